"""What a run says of its memory: every rank's peaks, how far it could have gone, what helps when it was too little.

Errors are an allocator's own: tensors that no machine has, and a run in an address space that is too small.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.shapes import changed, shape_of
from longctx.forecast.cost import cost, reach
from longctx.forecast.model_sizes import ModelSizes
from longctx.forecast.shape import RunShape
from longctx.launch.terminal import token_label
from longctx.machine.here import Machine
from longctx.model.tiny import tiny_config, tiny_model
from longctx.report.memory_advice import describe_memory, describe_reach, is_out_of_memory, out_of_memory_explained
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from longctx.training.peak_memory import GIB, PeakMemory
from tests.workers import run_ranks

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
RUN = ["--model_name_or_path", "tiny", "--dataset_name", "stdlib", "--overlong", "split", "--max_length", "65536"]
UNCHECKPOINTED = ["--gradient_checkpointing", "False"]
TOO_MUCH = 2**52


@pytest.fixture(scope="module")
def shape() -> RunShape:
    return shape_of(ModelSizes.of_config(tiny_config()), world_size=8, sp=4, engine="fsdp2")


NODE = Machine.of("H100", 8, host_bytes=1000 * 2**30)


def peaks(allocated, host, *, retries=0, device_total=80 * GIB, host_total=1000 * GIB) -> PeakMemory:
    ranks = len(host)
    reserved, totals = [x + GIB for x in allocated], ([device_total] * ranks, [host_total] * ranks)
    return PeakMemory(*map(tuple, (allocated, reserved, host, [retries] * ranks, *totals)))


def resolved(*flags: str):
    return resolve(parse_flags([*RUN, *flags]), read_profile(), os.environ)


# How far


def test_a_run_as_predicted_reaches_the_predicted_length(shape) -> None:
    length, total = 2**20, 40 * GIB
    predicted = cost(shape, NODE, length)
    measured, host = int(predicted.allocated_bytes), int(predicted.host_bytes / 8)
    said = describe_reach(shape, NODE, peaks([measured - 5, measured] * 4, [host] * 8, device_total=total), length)
    longest = token_label(reach(shape, replace(NODE, device_bytes=total)).length, 2)
    assert said == f"peak {measured / GIB:.1f} of 40.0 GiB on rank 1; these settings reach about {longest} tokens"


def test_full_host_memory_is_named(shape) -> None:
    offloads = changed(shape, activation_offloading=True)
    near, far = (cost(offloads, NODE, length) for length in (2**20, 2**21))
    host, total = int(near.host_bytes / 8), int(far.host_bytes)
    measured = peaks([int(near.allocated_bytes)] * 8, [host] * 8, host_total=total)
    said = describe_reach(offloads, NODE, measured, 2**20)
    assert said.endswith("these settings reach about 2.1M tokens, where host memory is full")


def test_on_a_cpu_all_ranks_of_a_machine_share_its_memory(shape) -> None:
    measured = peaks([0] * 8, [2 * GIB] * 7 + [3 * GIB], device_total=0, host_total=100 * GIB)
    said = describe_reach(shape, Machine.of("CPU", 4), measured, 2**20)
    assert said.startswith("peak 9.0 of 100.0 GiB of host memory, by the 4 ranks of a machine; these settings reach ")


# Peaks of the ranks


def test_ranks_are_told_apart_also_in_a_step_with_fewer_tokens_than_rows() -> None:
    run = resolved("--sp", "2", "--per_device_train_batch_size", "1000")
    first, last = describe_memory(run, peaks([0, 0], [GIB, 3 * GIB], device_total=0), 17, tiny_model())
    assert first == "host      3.00 GiB at most, on rank 1; 1.00 at least; 2.00 on average"
    assert "these settings reach" in last


def test_uneven_memory_and_retries_are_warned_of() -> None:
    assert not list(peaks([40 * GIB, 43 * GIB], [GIB, GIB]).warnings())  # 4% above the mean
    assert not list(peaks([GIB // 100, GIB // 5], [GIB, GIB]).warnings())  # nothing much
    uneven, retried = peaks([40 * GIB, 60 * GIB], [GIB, GIB], retries=3).warnings()
    assert "rank 1 took 60.0 GiB, 20% above the mean of 50.0" in uneven[1]
    assert "tried again 3 times" in retried[1]


def warned_of(arguments):
    """Train where rank 1 has 1.5 GiB more in memory; returns the warnings of uneven memory, and the logged steps."""
    from tests.training.test_training import log_of

    held = torch.ones((3 << 29) * dist.get_rank() + 1, dtype=torch.uint8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log = log_of(arguments)
    assert held.all()
    return [str(w.message) for w in caught if "uneven" in str(w.message)], sum("loss" in entry for entry in log)


@pytest.mark.long
def test_uneven_memory_is_warned_of_once(tmp_path) -> None:
    flags = ["--model_name_or_path", "tiny", "--dataset_name", "stdlib", "--overlong", "drop", "--max_length", "2048"]
    flags += ["--sp", "2", "--max_steps", "3", "--logging_steps", "1", "--report_to", "none", "--save_strategy", "no"]
    for given, logged in run_ranks(2, f"{__name__}:warned_of", [*flags, "--output_dir", str(tmp_path / "out")]):
        assert logged == 3
        assert [message.partition(" took")[0] for message in given] == ["host memory is uneven: rank 1"]


# Out of memory


def allocate_array() -> None:
    np.ones(TOO_MUCH)


def allocate_inside_another_error() -> None:
    try:
        torch.empty(TOO_MUCH)
    except RuntimeError as error:
        raise ValueError("the step failed") from error


@pytest.mark.parametrize("allocate", [allocate_array, allocate_inside_another_error])
def test_an_allocators_error_is_recognised(allocate) -> None:
    with pytest.raises((MemoryError, ValueError)) as caught:
        allocate()
    assert is_out_of_memory(caught.value)


def test_other_errors_are_left_alone() -> None:
    error = RuntimeError("Expected all tensors to be on the same device")
    assert not is_out_of_memory(error)
    with pytest.raises(RuntimeError), out_of_memory_explained(resolved()):
        raise error
    assert not hasattr(error, "__notes__")


def advice(*flags: str) -> str:
    with (
        pytest.raises(RuntimeError, match="can't allocate memory") as caught,
        out_of_memory_explained(resolved(*flags)),
    ):
        torch.empty(TOO_MUCH)
    [note] = caught.value.__notes__
    return note


def added(note: str) -> dict[str, str]:
    """{flags: length} of the memory options that are proposed, in order."""
    return dict(re.findall(r"add +(--.*?)(?:, on \d+ devices)?: about (\S+)$", note, re.M))


def test_what_would_have_helped_can_be_added_to_the_run() -> None:
    note = advice(*UNCHECKPOINTED, "--per_device_train_batch_size", "8")
    assert "with sequences of 65,536 tokens, 524,288 of them a rank" in note
    assert re.search(r"largest +checkpoints \d+\.\d\d, .* GiB of host memory", note)
    proposed = added(note)
    assert {"--gradient_checkpointing True", "--per_device_train_batch_size 1", "--memory longest"} <= proposed.keys()
    lengths = [float(n[:-1].replace(",", "")) * {"k": 1e3, "M": 1e6}[n[-1]] for n in proposed.values()]
    assert lengths == sorted(lengths, reverse=True)
    for flags in proposed:
        run = resolved(*([] if "checkpointing" in flags else UNCHECKPOINTED), *flags.split())
        assert run.settings[flags.split()[0][2:]] is not None
    already = {"--per_device_train_batch_size 1", "--tiled_mlp True"}
    assert not added(advice(*" ".join(already).split())).keys() & {*already, "--gradient_checkpointing True"}


SHORT_OF_MEMORY = """
import resource, sys
import deepspeed, torch, trl
import longctx.report.memory_advice, longctx.run
from longctx.train import main
taken = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize")) * 1024
resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 30),) * 2)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.long
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_run_in_too_little_memory_ends_with_what_would_have_helped(num_processes, tmp_path) -> None:
    script = tmp_path / "short_of_memory.py"
    script.write_text(SHORT_OF_MEMORY)
    flags = [*RUN, "--max_length", "262144", *UNCHECKPOINTED, "--per_device_train_batch_size", "1"]
    flags += ["--sp", str(num_processes), "--max_steps", "1", "--report_to", "none", "--output_dir", str(tmp_path)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]
    command += [str(script), *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=500, check=False)
    assert done.returncode != 0
    assert "DefaultCPUAllocator: can't allocate memory" in done.stderr
    assert done.stderr.count("What would have helped") == 1
    note = done.stderr[done.stderr.index("longctx: out of memory") :]
    assert "--gradient_checkpointing True" in added(note)
    assert "in _forward" in done.stderr, "the stack is there"


@pytest.mark.long
def test_a_run_ends_with_how_far_it_could_have_gone(tmp_path) -> None:
    flags = [*RUN, "--max_length", "4096", "--per_device_train_batch_size", "1", "--sp", "2", "--max_steps", "2"]
    flags += ["--logging_steps", "1", "--report_to", "none", "--output_dir", str(tmp_path), "--save_strategy", "no"]
    command = [sys.executable, "-m", "longctx.train", *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=500, check=True)
    *_, last = re.findall(r"^memory .*", done.stdout, re.MULTILINE)
    assert re.search(r"peak \d+\.\d of \d+\.\d GiB of host memory, by the 2 ranks .* reach about \d\S* tokens$", last)
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    log = [entry for entry in history if "loss" in entry]
    assert all(len(entry["memory"]["host"]["gib_by_rank"]) == 2 for entry in log)
    assert log[0]["peak_host_memory_gib_max"] >= log[0]["peak_host_memory_gib_min"] > 0.1

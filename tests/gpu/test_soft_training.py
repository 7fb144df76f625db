"""Training on two soft GPUs (tests/softcuda): what only a device with its own memory, threads and NCCL can show."""

from __future__ import annotations

import io
import itertools
import json
import re
import subprocess
import sys
from contextlib import nullcontext, redirect_stdout
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from longctx import parallelize
from longctx.attention.kernels.varlen import AtenFlashKernel
from longctx.machine import measure
from longctx.machine.speeds import Speeds
from longctx.ring.transport import PeerToPeer
from longctx.sequence.mesh import ParallelDims, select_device, sequence_groups
from tests import parity_page
from tests.few import few
from tests.model.test_models import TOLERANCE, largest_error, make_batch, make_model, stock_step
from tests.reference import train_reference
from tests.softcuda.ranks import soft_environment
from tests.training import test_evaluation
from tests.training.test_training import (
    COMMON,
    LEARNING_RATE,
    SHAPES,
    STEPS,
    check,
    log_of,
    make_documents,
    relative,
    write_jsonl,
)
from tests.verify.test_verify import QUICK, verify
from tests.workers import run_ranks

PARITY = Path(__file__).parents[2] / "benchmarks" / "results" / "soft_device_parity_2026-11-23.md"
WRAPPINGS = ("layers", "every part", "layers, kept whole")
TRAINED = {"all": "", "adapters": "q_proj", "adapters of the last layer": "1.mlp.down_proj"}


def chunked_errors(wrapping: str, trained: str, accumulation: int) -> float:
    """The largest relative error of a gradient of the sequence-chunked step under FSDP2 on this rank's GPU.

    Args:
        trained: parameters with another name are frozen.
        accumulation: equal micro-batches, whose mean has the gradient of one of them.
    """
    torch.cuda.set_device(dist.get_rank())
    model, batch = make_model("llama"), make_batch()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    _, _, expected = stock_step(model)
    model, sequence = parallelize(model, 2, sp_backend="ulysses", sequence_chunk_size=3)
    model.to(sequence.device)
    mesh = init_device_mesh("cuda", (2,))
    layers, rest = model.model.layers, [model.model.embed_tokens, model.model.norm]
    for part in [*layers, *(rest if wrapping == "every part" else [])]:
        fully_shard(part, mesh=mesh, reshard_after_forward=wrapping != "layers, kept whole")
    fully_shard(model, mesh=mesh)
    count = sequence.count_label_tokens([batch] * accumulation)
    for _ in range(accumulation):
        shard = sequence.shard(batch)
        outputs = model(**shard.inputs, shift_labels=shard.shift_labels, token_outputs=True)
        sequence.reduce(outputs.losses, count).backward()
    found = {name: p.grad.full_tensor().cpu() for name, p in model.named_parameters() if p.grad is not None}
    return largest_error(found, expected)


def all_chunked_errors(cases: list[tuple[str, str, int]]) -> list[float]:
    return [chunked_errors(wrapping, TRAINED[trained], accumulation) for wrapping, trained, accumulation in cases]


@pytest.mark.long
def test_the_chunked_step_hands_all_gradients_to_fsdp2(soft_gpus):
    """Hidden states are on the host and parameters on the GPU: their parts of backward must not be two threads."""
    cases = list(itertools.product(WRAPPINGS, TRAINED, (1, 2)))
    for errors in soft_gpus.run(2, f"{__name__}:all_chunked_errors", cases, timeout=600):
        wrong = {case: error for case, error in zip(cases, errors, strict=True) if not error <= TOLERANCE}
        assert not wrong


def step_in_threads() -> None:
    model, sequence = parallelize(make_model("llama"), 1, sequence_chunk_size=8, device=torch.device("cuda", 0))
    shard = sequence.shard(make_batch())
    outputs = model.to("cuda")(**shard.inputs, shift_labels=shard.shift_labels, token_outputs=True)
    with torch.autograd.set_multithreading_enabled(True), pytest.raises(ValueError, match="several threads"):
        outputs.losses.sum().backward()
    outputs = model(**shard.inputs, shift_labels=shard.shift_labels, token_outputs=True)
    outputs.losses.sum().backward()


def test_the_chunked_step_refuses_to_go_backward_in_several_threads(soft_gpus):
    soft_gpus.run(1, f"{__name__}:step_in_threads", backend=None)


CHUNKS = ["--sequence_chunk_size", "50"]
RUNS = {  # DeepSpeed's last: transformers keeps its configuration for the rest of the process
    "ring, fsdp2": ["--sp_backend", "ring"],
    "ulysses, fsdp2": ["--sp_backend", "ulysses", "--engine", "fsdp2"],
    "ulysses, fsdp2, chunks": ["--sp_backend", "ulysses", "--engine", "fsdp2", *CHUNKS],
    "ulysses, zero3": ["--sp_backend", "ulysses", "--engine", "deepspeed"],
    "ulysses, zero3, chunks": ["--sp_backend", "ulysses", "--engine", "deepspeed", *CHUNKS],
}


BF16 = {"loss": 1e-4, "gradient": 2e-3, "run": 5e-4}
"""Relative to fp32: a gradient's mean error of rounding is 2**-9 at most, the first loss's and the run's are of sums of
such errors with either sign. Measured: 2e-6, 5e-4 and 2e-4; on CPUs about the same."""


def arguments_of(flags, models, tmp_path, data, sp=2):
    common = [*COMMON, *SHAPES["packed"][1], "--sp", str(sp), "--model_name_or_path", models["GQA 4:2"]]
    return [*common, *flags, "--dataset_name", data, "--output_dir", str(tmp_path / "out")]


def logs_of(soft_gpus, cases, ranks=2, **limits):
    """{case: what was logged} of runs on so many soft GPUs, with these flags each."""
    return soft_gpus.run(ranks, "tests.training.test_training:run_cases", cases, backend=None, **limits)[0]


@pytest.fixture
def documents_file(tmp_path):
    """(documents, path of them)."""
    documents = make_documents(SHAPES["packed"][0])
    return documents, write_jsonl(tmp_path / "data.jsonl", documents)


@pytest.mark.long
def test_training_in_bf16_on_soft_gpus_equals_one_process(models, tmp_path, documents_file, parity_table, soft_gpus):
    """With the kernel that CUDA has for bf16, and the default optimizer, whose kernel is fused there."""
    documents, data = documents_file
    cases = {
        case: arguments_of([*flags, "--bf16", "True"], models, tmp_path / case, data) for case, flags in RUNS.items()
    }
    losses, norms = train_reference(models["GQA 4:2"], documents, steps=STEPS, learning_rate=LEARNING_RATE)
    for case, results in logs_of(soft_gpus, cases).items():
        found, found_norms = zip(*results, strict=True)
        first = relative(found[:1], losses[:1]), relative(found_norms[:1], norms[:1])
        parity_table.append((f"{case}, bf16", "soft GPUs", *first, relative(found, losses)))
        assert first[0] <= BF16["loss"], case
        assert first[1] <= BF16["gradient"], case
        assert relative(found, losses) <= BF16["run"], case


CHUNKED = ("ulysses, fsdp2, chunks", "ulysses, zero3, chunks")
OFFLOADED = "ring, offload"
"""Attention's outputs come from the host in another stream, and are read later than what autograd itself fetches."""
OTHER_RUNS = {
    "gather": ["--sp_backend", "gather"],
    "ring, accumulation": ["--sp_backend", "ring", "--gradient_accumulation_steps", "2"],
    "ulysses, fsdp2, tiles": ["--sp_backend", "ulysses", "--engine", "fsdp2", "--tiled_mlp_num_shards", "4"],
    OFFLOADED: ["--sp_backend", "ring", "--activation_offloading", "True"],
    "ring, parameters on the CPU": ["--sp_backend", "ring", "--offload_param_device", "cpu"],
    "ulysses, zero3, tiles": ["--sp_backend", "ulysses", "--engine", "deepspeed", "--tiled_mlp_num_shards", "4"],
    "ulysses, zero3, optimizer on the CPU": [
        *("--sp_backend", "ulysses", "--engine", "deepspeed", "--offload_optimizer_device", "cpu")
    ],
}


GROUPS = {
    "chunks": [CHUNKED[-1]],
    "engines": [case for case in RUNS if case != CHUNKED[-1]],
    **{case: [case] for case in OTHER_RUNS},
}


@pytest.mark.parametrize("group", few(GROUPS, ["chunks", OFFLOADED]))
def test_training_on_soft_gpus_equals_one_process(group, models, tmp_path, documents_file, parity_table, soft_gpus):
    """In fp32, with the tolerances of training on CPUs."""
    documents, data = documents_file
    runs = {case: [*(RUNS | OTHER_RUNS)[case], "--bf16", "False"] for case in GROUPS[group]}
    cases = {case: arguments_of(flags, models, tmp_path / case, data) for case, flags in runs.items()}
    reference = train_reference(models["GQA 4:2"], documents, steps=STEPS, learning_rate=LEARNING_RATE)
    for case, results in logs_of(soft_gpus, cases).items():
        check(results, reference, case, "soft GPUs", parity_table)


def first_hop(meets: bool) -> list[float]:
    """What this rank of three has received, when the first alone has something to send, to the second."""
    device = select_device(torch.device("cuda", dist.get_rank()))
    with nullcontext() if meets else patch("longctx.sequence.mesh._meet"):
        ring = sequence_groups(ParallelDims(world_size=3, ring=3), device).ring
    options, of_world = (group._get_backend(device).options for group in (ring, dist.group.WORLD))
    assert options.is_high_priority_stream
    assert options._timeout == of_world._timeout
    if not meets:
        ring._get_backend(device)._set_default_timeout(timedelta(seconds=2))
    keys = torch.full((6, 2, 1, 1), dist.get_rank() + 1.0, device=device)
    prefixes = np.array([[6, 4, 0, 0], [6, 0, 0, 0], [6, 0, 0, 0]])
    return PeerToPeer(ring, dist.get_rank(), prefixes, keys).receive(SimpleNamespace(hop=1)).flatten().tolist()


def test_ranks_with_nothing_to_send_meet_the_others_before_a_rings_first_hop(soft_gpus):
    """NCCL makes a communicator in the first operation of a process group, which therefore needs all its ranks."""
    assert soft_gpus.run(3, f"{__name__}:first_hop", True) == [[], [1.0] * 8, []]
    with pytest.raises(AssertionError, match=r"rank 2 has not come to the first operation of its process group"):
        soft_gpus.run(3, f"{__name__}:first_hop", False)


ON_FOUR = {
    "ring, fsdp2, sp 4": ["--sp_backend", "ring"],
    "hybrid, fsdp2, sp 4": ["--sp_backend", "hybrid", "--ring_size", "2"],
    "ulysses, zero3, sp 4": ["--sp_backend", "ulysses", "--engine", "deepspeed"],
}


@pytest.mark.long
@pytest.mark.parametrize("case", ON_FOUR)
def test_training_on_four_soft_gpus_equals_one_process(case, models, tmp_path, documents_file, parity_table, soft_gpus):
    documents, data = documents_file
    arguments = arguments_of([*ON_FOUR[case], "--bf16", "False"], models, tmp_path, data, sp=4)
    reference = train_reference(models["GQA 4:2"], documents, steps=STEPS, learning_rate=LEARNING_RATE)
    results = logs_of(soft_gpus, {case: arguments}, ranks=4, timeout=600)[case]
    check(results, reference, case, "soft GPUs", parity_table)


@pytest.mark.long
@pytest.mark.parametrize("case", ["ring, fsdp2", "ulysses, zero3"], ids=["fsdp2", "zero3"])
def test_a_resumed_run_on_soft_gpus_is_the_run_that_was_not_interrupted(
    case, models, tmp_path, documents_file, soft_gpus
):
    """With fused AdamW, whose kernel wants the count of steps on the GPU."""
    flags = [*RUNS[case], "--bf16", "True", "--optim", "adamw_torch_fused", "--save_strategy", "steps"]
    whole = arguments_of([*flags, "--save_steps", "2"], models, tmp_path, documents_file[1])
    resumed = [*whole, "--resume_from_checkpoint", str(tmp_path / "out" / "checkpoint-2")]
    runs = logs_of(soft_gpus, {"whole": whole, "resumed": resumed})
    assert runs["resumed"] == runs["whole"]


def printed_by(arguments: list[str]) -> str:
    """Return what this rank prints in a run with these flags."""
    with redirect_stdout(io.StringIO()) as printed:
        log_of(arguments)
    return printed.getvalue()


@pytest.mark.long
def test_a_run_on_soft_gpus_is_compared_with_its_forecast(models, tmp_path, documents_file, soft_gpus):
    arguments = arguments_of([*RUNS["ring, fsdp2"], "--bf16", "True"], models, tmp_path, documents_file[1])
    first, second = soft_gpus.run(2, f"{__name__}:printed_by", arguments, backend=None)
    assert re.search(r"forecast  \d+\.\d of 8\.0 GiB of GPU memory, [\d.e-]+ s a step, [\d,]+ tokens/s", first)
    measured = re.search(
        r"longctx: measured .* predicted; (\S+) GiB of tensors on the fullest GPU, and (\S+) were", first
    )
    assert measured is not None, first
    assert abs(float(measured[1]) - float(measured[2])) <= 0.1  # GiB; the model has a few MB
    assert "measured" not in second


@pytest.mark.long
def test_adapters_are_trained_on_soft_gpus(models, tmp_path, documents_file, soft_gpus):
    """Embeddings are frozen, so that the first layer's input needs no gradient; the reference is a ring of CPUs, which
    tests/model/test_peft.py compares with one process.
    """
    lora = ["--use_peft", "True", "--bf16", "False", "--lora_target_modules", "all-linear"]
    cases = {case: arguments_of([*RUNS[case], *lora], models, tmp_path / case, documents_file[1]) for case in RUNS}
    whole = arguments_of([*RUNS["ring, fsdp2"], *lora], models, tmp_path, documents_file[1])
    reference = run_ranks(2, "tests.training.test_training:run_cases", {"whole": whole})[0]["whole"]
    losses, norms = zip(*reference, strict=True)
    runs = logs_of(soft_gpus, cases, timeout=600)
    assert runs.keys() == RUNS.keys()
    for case, results in runs.items():
        found, found_norms = zip(*results, strict=True)
        assert relative(found, losses) <= 1e-4, case
        assert relative(found_norms, norms) <= 1e-4, case


@pytest.mark.long
def test_the_profile_of_fsdp1_trains_as_that_of_fsdp2(models, tmp_path, documents_file, soft_gpus):
    """FSDP1, which torch has for GPUs alone, as its user starts it: data parallel, since it has no mesh to share.

    FSDP2 goes on from its checkpoint.
    """
    logs = {}
    for profile in ("fsdp1", "fsdp2"):
        arguments = [*COMMON, "--packing", "True", "--max_length", "256", "--bf16", "False", "--model_name_or_path"]
        arguments += [models["GQA 4:2"], "--dataset_name", documents_file[1], "--output_dir", str(tmp_path / profile)]
        arguments += ["--save_strategy", "steps", "--save_steps", "2", "--save_total_limit", "9"]
        arguments += ["--resume_from_checkpoint", str(tmp_path / "fsdp1/checkpoint-2")] * (profile == "fsdp2")
        launch = ["--accelerate_config", profile, "--num_processes", "2"]
        command = [sys.executable, "-m", "longctx", "train", *launch, *arguments]
        subprocess.run(command, check=True, env=soft_environment(), timeout=300)
        state = json.loads((tmp_path / profile / "trainer_state.json").read_text())
        logs[profile] = [(entry["loss"], entry["grad_norm"]) for entry in state["log_history"] if "loss" in entry]
    assert len(logs["fsdp1"]) == STEPS
    for own, expected in zip(logs["fsdp1"], logs["fsdp2"], strict=True):
        assert relative(own, expected) <= 1e-4


@pytest.mark.long
def test_a_sweeps_ranks_use_gpus_though_their_server_has(tmp_path):
    """bitsandbytes initialises CUDA when it is imported, and processes forked after that can use no GPU."""
    command = [sys.executable, "-m", "tests.uses_cuda", str(tmp_path / "ranks")]
    ended = subprocess.run(command, env=soft_environment(), timeout=300, capture_output=True, text=True)
    assert ended.stdout == "ok [3.0, 3.0] \n", ended.stdout + ended.stderr


HANG = [*COMMON, "--sp", "2", "--bf16", "True", "--model_name_or_path", "tiny", "--dataset_name", "stdlib"]
HANG += ["--overlong", "truncate", "--ddp_timeout", "20"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "engine", "collective"), [("ring", "fsdp2", "all_gather"), ("ulysses", "deepspeed", "broadcast")]
)
def test_a_rank_that_does_not_come_is_named_before_nccl_ends_the_run(backend, engine, collective, tmp_path, soft_gpus):
    command = ["torchrun", "--nproc_per_node", "2", "-m", "tests.faulty_train", *HANG, "--sp_backend", backend]
    command += ["--engine", engine, "--output_dir", str(tmp_path)]
    env = soft_environment() | {"FAULT": "hang 1 2"}
    ended = subprocess.run(command, env=env, timeout=280, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert ended.returncode == 1
    assert "no progress for 10 s; NCCL ends the run after 20 s (--ddp_timeout)" in ended.stdout
    assert re.search(rf"rank 1 \(pid \d+ on \S+\) did not come to {collective}", ended.stdout)
    assert "rank 1 is at (step 2, forward): tests/faulty_train.py" in ended.stdout


@pytest.mark.long
def test_evaluation_on_soft_gpus_equals_one_process(models, tmp_path, soft_gpus):
    """Before training, after it, by evaluate() and by predict(), in fp32, with the tolerances of evaluation on CPUs."""
    model, data, cases = models["GQA 4:2"], tmp_path / "data", {}
    data.mkdir()
    write_jsonl(data / "train.jsonl", test_evaluation.TRAIN)
    write_jsonl(data / "test.jsonl", test_evaluation.EVALUATION)
    common = [*test_evaluation.COMMON, *test_evaluation.EVALUATES, "--sp", "2", "--bf16", "False"]
    common += ["--per_device_eval_batch_size", "2", "--dataset_name", str(data), "--model_name_or_path", model]
    for case, rows in {"ring, fsdp2": "evaluation packed, training not", "ulysses, zero3": "padded"}.items():
        flags = [*test_evaluation.ROWS[rows], *RUNS[case], "--output_dir", str(tmp_path / case)]
        cases[case] = [*common, *flags]
    before = test_evaluation.dense_means(model, test_evaluation.EVALUATION)
    for results in soft_gpus.run(2, "tests.training.test_evaluation:run_evaluations", cases, backend=None, timeout=600):
        for case, result in results.items():
            after = test_evaluation.dense_means(tmp_path / case, test_evaluation.EVALUATION)
            test_evaluation.check_evaluations(result, before, after)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["ring", "ulysses"])
def test_verify_passes_on_soft_gpus(backend, soft_gpus):
    """In bf16, with the kernel that training takes there."""
    code, result, stderr = verify(*QUICK, "--sp_backend", backend, environment=soft_environment())
    assert code == 0, (result, stderr)
    assert result["ok"] is True
    assert result["run"]["precision"] == "bf16"
    found = {finding["name"]: finding["value"] for finding in result["machine"]}
    assert found["devices"] == "2 × NVIDIA H100 80GB HBM3, 8 GiB"
    assert AtenFlashKernel.name in found["attention kernel"]


def measured_speeds() -> Speeds:
    """`longctx plan --measure` on this group, of less work than keeps a GPU busy."""
    sizes = {"tokens": 64, "hidden_size": 64, "intermediate_size": 96, "row": 256, "num_heads": 4, "head_size": 16}
    work = measure.Work(dtype=torch.bfloat16, num_key_value_heads=2, num_elements=1 << 16, **sizes)
    return measure.measure_together(work=work)


@pytest.mark.long
def test_speeds_are_measured_on_soft_gpus(soft_gpus):
    """The device says that it is an H100, and a CPU is slower than what is published of one in every figure."""
    found, same = soft_gpus.run(2, f"{__name__}:measured_speeds")
    assert found == same  # the slowest rank's
    published = Speeds.of("H100")
    assert 0 < found.attention < published.attention
    assert 0 < found.memory < published.memory
    assert 0 < found.within.exchange < published.within.exchange
    assert 0 < found.within.pass_on < published.within.pass_on
    assert published.launch_seconds < found.launch_seconds < 1
    assert 0 < found.matmul < 1e13
    assert 0 < found.host_link < 1e12
    assert 0 < found.host_memory < 1e12


@pytest.mark.long
def test_plan_measures_soft_gpus(soft_gpus):
    """As a command, with a process a GPU, and its forecast by what it has measured."""
    command = [sys.executable, "-m", "tests.small_measure", "--model_name_or_path", "tiny", "--max_length", "4096"]
    command += ["--gpus", "2", "--gpus_per_node", "2", "--measure", "--json"]
    done = subprocess.run(command, env=soft_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    plan = json.loads(done.stdout)
    assert plan["machine"]["device_bytes"] == 8 << 30  # of a soft GPU
    assert 0 < plan["machine"]["speeds"]["matmul_flops"] < 1e13
    steps = [at["seconds_per_step"] for found in plan["candidates"] for at in found["at"]]
    assert min(seconds for seconds in steps if seconds) > 0.1  # by published speeds it takes a thousandth of that


@pytest.mark.long
def test_what_needs_a_gpu_passes_on_a_soft_one(soft_gpus):
    """`pytest -m gpu`, with short sequences, so that it works where there is a real GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu/test_gpu.py"]
    env = soft_environment() | {"SOFTCUDA_WATCH": "0"}  # tests wait in their own steps; their ranks are watched anyway
    ended = subprocess.run(command, env=env, timeout=900, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout
    assert " passed, 10 skipped" in ended.stdout  # two, and flash-attn 3 and 4 on four kinds of documents


def test_the_page_of_parity_is_within_the_bounds():
    """Every case of these tests that it has; all that run by default are among them."""
    bounds = {f"{case}, bf16": (BF16["loss"], BF16["gradient"], BF16["run"]) for case in RUNS}
    bounds |= dict.fromkeys([*RUNS, *OTHER_RUNS, *ON_FOUR], (1e-5, 1e-5, 1e-4))
    found = parity_page.read(PARITY.read_text())
    assert {CHUNKED[-1], *(f"{case}, bf16" for case in RUNS)} <= found.keys() <= bounds.keys()
    for case, errors in found.items():
        assert all(error <= bound for error, bound in zip(errors, bounds[case], strict=True)), case

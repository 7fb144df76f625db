"""--sp auto, --memory auto and --global_batch_size, and the forecast of a run, on machines that are described here."""

from __future__ import annotations

import shlex

import pytest
import torch
from transformers import Qwen3Config

from benchmarks.published import CONFIGS
from longctx.forecast.cost import reach
from longctx.machine.here import Machine
from longctx.report.memory_advice import _changed, machine_of, out_of_memory_explained
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve

GIB = 2**30
EIGHT_B = Qwen3Config(**CONFIGS["Qwen/Qwen3-8B"].to_dict() | {"max_position_embeddings": 1 << 20})


@pytest.fixture
def resolved(monkeypatch, tmp_path):
    """Resolve flags of an 8B model on a machine with eight GPUs of 80 GB, of which accelerate started none."""
    folder = tmp_path / "model"
    EIGHT_B.save_pretrained(folder)

    def run(*flags: str, name: str = "NVIDIA H100 80GB HBM3", env=None):
        here = Machine.of(name, 8, device_bytes=int(79.2 * GIB), host_bytes=8 * 221 * GIB)
        monkeypatch.setattr("longctx.settings.resolve.device_count", lambda: 8)
        monkeypatch.setattr(Machine, "here", lambda gpus: here)
        monkeypatch.setattr("longctx.settings.machine_checks.available_host_memory", lambda: here.host_bytes)
        own = ["--model_name_or_path", str(folder), "--dataset_name", "stdlib", "--output_dir", str(tmp_path / "out")]
        env = dict(env or {})
        return resolve(parse_flags([*own, *flags]), read_profile(env), env)

    return run


def by_hand(resolved, *flags: str):
    """Return every run that --sp auto --memory auto could stand for, each resolved with its flags."""
    runs = []
    for sp in (1, 2, 4, 8):
        for memory in ("balanced", "fastest", "longest"):
            try:
                given = ("--sp", str(sp), "--memory", memory, "--num_processes", "8")
                runs.append(resolved(*flags, *given))
            except ValueError:
                continue
    return runs


def test_auto_finds_memory_options_that_go_with_compiled_layers(resolved):
    flags = ("--max_length", str(1 << 20), "--sp", "8", "--memory", "auto", "--engine", "fsdp2")
    run = resolved(*flags, "--torch_compile", "True")
    assert (run.memory_options.sequence_chunk_size, run.memory_options.tiled_mlp_num_shards) == (None, None)
    assert run.forecast.fits


def test_auto_shares_the_processes_that_a_launcher_started(resolved):
    env = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert resolved("--max_length", "131072", "--sp", "auto", env=env).dims.world_size == 4


@pytest.mark.long
def test_memory_is_auto_by_default_on_gpus_of_known_speed(resolved):
    given = ("--num_processes", "1", "--max_length", "4096", "--sp", "1", "--use_peft", "True")
    run = resolved(*given)
    assert run.memory_options == resolved(*given, "--memory", "auto").memory_options
    assert "(by default: predicted to be the fastest" in run.layout_reason
    for other in (("--gradient_checkpointing", "True"), ("--memory", "balanced"), ("--use_cpu",)):
        assert "by default" not in resolved(*given, *other).layout_reason
    assert resolved(*given, name="Some Other GPU").settings["memory"] == "balanced"


@pytest.mark.long
@pytest.mark.parametrize("length", [4096, 131072, 1048576])
def test_auto_is_the_fastest_that_leaves_a_tenth_free(resolved, length):
    flags = ("--max_length", str(length))
    run = resolved(*flags, "--sp", "auto", "--memory", "auto")
    roomy = [one for one in by_hand(resolved, *flags) if one.forecast.used <= 0.9]
    fastest = max(one.forecast.speed for one in roomy)
    assert run.forecast.used <= 0.9
    assert run.forecast.speed >= fastest / 1.02  # of those within 2%, the simplest
    assert run.dims.world_size == 8
    assert "fastest that leaves 10% of memory free; next best: --sp" in run.layout_reason
    assert any(line.startswith("auto ") and run.layout_reason in line for line in run.describe())


def test_each_flag_is_chosen_alone(resolved):
    spread = resolved("--max_length", "1048576", "--sp", "auto", "--memory", "longest")
    assert spread.dims.sp > 1
    assert spread.settings["memory"] == "longest"
    saving = resolved("--max_length", "524288", "--sp", "4", "--memory", "auto")
    preset = resolved("--max_length", "524288", "--sp", "4", "--memory", "longest")
    assert (saving.dims.sp, saving.dims.world_size) == (4, 4)
    assert saving.forecast.speed > 1.5 * preset.forecast.speed
    ring = resolved("--max_length", "131072", "--cp", "4", "--memory", "auto")
    assert (str(ring.backend.arrangement), ring.settings["memory"]) == ("ring 4", "balanced")


def test_all_spreads_as_many_sequences_as_groups_would_take(resolved):
    flags = ("--max_length", "32768", "--memory", "balanced")
    groups, whole = resolved(*flags, "--sp", "auto", "--num_processes", "8"), resolved(*flags, "--sp", "all")
    sequences = 8 // groups.dims.sp
    assert sequences > 1
    assert (whole.dims.world_size, whole.dims.sp) == (8, 8)
    assert whole.settings["per_device_train_batch_size"] == sequences
    assert f"--sp all: one group of 8 devices takes {sequences} sequences at a time" in " ".join(whole.notes)
    assert whole.forecast.fits
    three = resolved(*flags, "--sp", "all", "--num_processes", "4", "--per_device_train_batch_size", "3")
    assert (three.dims.sp, three.settings["per_device_train_batch_size"]) == (4, 3)


def test_all_keeps_the_sequences_of_an_optimizer_step(resolved):
    flags = ("--max_length", "32768", "--global_batch_size", "16")
    for sp in ("2", "all"):
        run = resolved(*flags, "--sp", sp, "--num_processes", "8")
        sequences = run.settings["per_device_train_batch_size"] * run.dims.dp
        assert sequences * run.settings["gradient_accumulation_steps"] == 16


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [("--sp 2", 2), ("--sp 2 --dp_replicate 3", 6), ("--sp 2 --num_processes 4", 4), ("--sp all", 8)],
)
def test_processes_that_longctx_starts_and_the_equations_that_it_prints(resolved, flags, world_size):
    run = resolved("--max_length", "4096", "--gradient_accumulation_steps", "3", *flags.split())
    dims, micro = run.dims, run.settings["per_device_train_batch_size"]
    assert dims.world_size == world_size == dims.dp_replicate * dims.dp_shard * dims.sp
    printed = [*run.describe(), *map(str, run.describe_batch())]
    equation = f"world {world_size} = dp_replicate {dims.dp_replicate} × dp_shard {dims.dp_shard} × sp {dims.sp}"
    assert [line for line in printed if line.startswith("mesh ") and equation in line]
    assert (
        f"batch     {micro * world_size // dims.sp * 3} sequences a step = per_device_train_batch_size {micro} × "
        f"(world {world_size} / sp {dims.sp}) × gradient_accumulation_steps 3"
    ) in printed


def test_no_speed_is_said_of_devices_of_unknown_speed(resolved):
    run = resolved("--max_length", "131072", "--sp", "auto", "--memory", "auto", name="Some Other GPU")
    assert run.forecast.known_speed is None
    assert "tokens/s" not in run.layout_reason


@pytest.mark.parametrize(("sp", "steps"), [(1, 2), (2, 4), (8, 16)])
def test_a_global_batch_is_the_same_on_any_layout(resolved, sp, steps):
    run = resolved("--max_length", "4096", "--sp", str(sp), "--num_processes", "8", "--global_batch_size", "16")
    assert run.settings["gradient_accumulation_steps"] == steps
    assert run.training_arguments()["gradient_accumulation_steps"] == steps
    assert run.dims.dp * steps * run.settings["per_device_train_batch_size"] == 16


def test_a_global_batch_that_cannot_be_is_refused(resolved):
    given = ("--max_length", "4096", "--sp", "2", "--num_processes", "8")
    with pytest.raises(ValueError, match=r"--global_batch_size 10 is not a multiple of the 4 sequences"):
        resolved(*given, "--global_batch_size", "10")
    with pytest.raises(ValueError, match="needs 2 micro-batches a step here, and --gradient_accumulation_steps 3 asks"):
        resolved(*given, "--global_batch_size", "8", "--gradient_accumulation_steps", "3")
    env = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3", "ACCELERATE_MIXED_PRECISION": "bf16"}
    with pytest.raises(ValueError, match="and gradient_accumulation_steps 3 in accelerate's config asks"):
        resolved(*given, "--global_batch_size", "8", env=env)
    agreed = resolved(*given, "--global_batch_size", "8", "--gradient_accumulation_steps", "2")
    assert agreed.settings["gradient_accumulation_steps"] == 2
    impossible = ("--num_processes", "8", "--dp_replicate", "2", "--global_batch_size", "3")
    with pytest.raises(ValueError, match=r"--sp auto: no arrangement can run\. --global_batch_size 3"):
        resolved("--sp", "auto", *impossible)


def test_what_does_not_fit_is_told_which_memory_options_do_before_and_after_the_memory_is_full(resolved):
    run = resolved("--max_length", "262144", "--sp", "4", "--memory", "balanced")
    [note] = [note for note in run.notes if "predicted not to fit" in note]
    words = shlex.split(note.partition("). ")[2].split(" is predicted to fit")[0])
    assert resolved("--max_length", "262144", *words).forecast.fits
    machine = machine_of(run)
    offered = _changed(run, machine)
    [flags] = [flags for flags in offered if flags.startswith("--memory auto, which is --")]
    shape, _ = offered[flags]
    assert reach(run.shape, machine).length < 262144 <= reach(shape, machine).length
    again = resolved("--max_length", "262144", "--sp", "4", *shlex.split(flags.partition("which is ")[2]))
    assert again.forecast.used <= 0.9
    assert not any("predicted not to fit" in note for note in again.notes)
    hopeless = resolved("--sp", "8", "--memory", "auto", "--max_length", str(1 << 26))
    assert any("a shorter --max_length" in note for note in hopeless.notes)


def test_the_next_choice_needs_less_memory_and_is_named_when_memory_runs_out(resolved):
    run = resolved("--max_length", "131072", "--sp", "4", "--memory", "auto")
    again = resolved("--max_length", "131072", *shlex.split(run.next_choice))
    assert again.forecast.device_bytes < 0.95 * run.forecast.device_bytes
    error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError), out_of_memory_explained(run):
        raise error
    assert f"longctx: run again with {run.next_choice}:" in error.__notes__[0]

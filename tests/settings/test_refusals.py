"""Input that cannot be trained on exactly ends with exit code 2 and one error: the value, the limit, the remedy."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shlex
import shutil
from multiprocessing.connection import Listener
from types import SimpleNamespace

import pytest

from longctx.attention.backends import BACKENDS
from longctx.train import main

pytestmark = pytest.mark.usefixtures("single_process")

OWN = ["--model_name_or_path", "tiny", "--dataset_name", "stdlib"]
RING, ULYSSES = ["--sp", "2", "--sp_backend", "ring"], ["--sp", "2", "--sp_backend", "ulysses"]


# ------------------------------------------------------------------------------------------------
# Flags, processes and devices: before anything is started
# ------------------------------------------------------------------------------------------------


def test_sp_does_not_divide_the_processes(refused, monkeypatch):
    refused("--sp", "2", "--num_processes", "3", parts=("--sp 2", "3 processes", "Use --sp 1 | 3", "multiple of 2"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "6")
    refused("--sp", "4", "--dry_run", parts=("--sp 4", "6 processes", "Use --sp 1 | 2 | 3 | 6"))


def test_dp_replicate_does_not_divide(refused):
    parts = ("--dp_replicate 3", "4 data-parallel", "divisor of 4")
    refused("--dp_replicate", "3", "--num_processes", "4", parts=parts)


def test_more_ranks_than_devices(refused, monkeypatch, without_preflight):
    monkeypatch.setattr("longctx.settings.resolve.device_count", lambda: 2)
    refused(*OWN, "--sp", "4", parts=("4 processes", "2 are visible", "--sp 2", "--use_cpu"))
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    refused(*OWN, "--sp", "4", "--dry_run", parts=("4 processes", "2 are visible", "--sp 2", "--use_cpu"))
    monkeypatch.delenv("LOCAL_WORLD_SIZE")  # a launcher that does not say: one GPU for each process, perhaps
    assert main([*OWN, "--sp", "4", "--dry_run"]) == 0


def test_accelerate_launch_in_each_of_several_tasks(refused, srun_task, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    refused("--sp", "4", parts=("in each of srun's 4 tasks", "srun longctx train"))


def test_a_profile_in_each_of_several_tasks(refused, srun_task):
    refused("--accelerate_config", "fsdp2", parts=("fsdp2 in 4 tasks on a node", "--ntasks-per-node 1"))


def test_a_first_node_without_address(refused, srun_task, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NODELIST", "no-such-node[3-4]")
    refused("--sp", "4", parts=("no-such-node3", "Set MASTER_ADDR"))


@pytest.fixture
def srun_task(monkeypatch):
    """What srun tells the first of four tasks on a node."""
    told = {"STEP_NUM_TASKS": "4", "STEP_TASKS_PER_NODE": "4", "STEP_NODELIST": "localhost", "JOB_ID": "7"}
    for name, value in (told | {"STEP_ID": "0", "NODEID": "0", "LOCALID": "0", "PROCID": "0"}).items():
        monkeypatch.setenv(f"SLURM_{name}", value)


def test_launcher_and_num_processes_disagree(refused, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    refused("--num_processes", "2", "--dry_run", parts=("--num_processes 2", "started 4", "Leave the flag out"))


def test_only_one_rank_of_a_machine_says_what_all_find(capsys, monkeypatch):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["--sp", "3", "--dry_run"]) == 2
    assert capsys.readouterr().err == ""


def test_unknown_backend(refused):
    listed = ", ".join(["auto", *BACKENDS.spread])
    refused("--sp", "2", "--sp_backend", "spiral", parts=("spiral", listed))


def test_ring_sizes_that_do_not_fit(refused):
    refused("--sp", "4", "--ring_size", "2", parts=("--ring_size 2", "--sp_backend hybrid"))
    hybrid = ["--sp", "6", "--sp_backend", "hybrid", "--ring_size"]
    refused(*hybrid, "4", parts=("--ring_size 4", "divisor of 6"))
    refused(*hybrid, "2", parts=("leaves 3 Ulysses ranks", "4 heads"))


def test_ulysses_lists_the_legal_sizes_where_heads_do_not_fit(refused):
    refused("--sp", "3", "--sp_backend", "ulysses", parts=("4 ", "--sp 1, 2, 4", "--sp_backend ring"))


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--cp", "2", "--sp", "4"], ("--cp 2", "--sp 4")),
        (["--cp", "2", "--sp_backend", "ulysses"], ("--cp 2", "ulysses")),
        (["--engine", "fsdp2"], ("fsdp2", "this run has one")),
        (["--sp", "2", "--dp_replicate", "2", "--engine", "deepspeed"], ("--dp_replicate 2", "--engine fsdp2")),
        (["--dp_replicate", "2"], ("--dp_replicate 2", "2 processes", "leave it out")),
        ([*RING, "--pad_to_multiple_of", "6"], ("--pad_to_multiple_of 6", "multiple of 4", "use 12")),
        (["--pad_to_multiple_of", "many"], ("--pad_to_multiple_of many", "auto")),
        (["--max_grad_norm", "-1"], ("--max_grad_norm -1", "0 stands for no clipping")),
        (["--accelerate_config", "fsdp9"], ("--accelerate_config fsdp9", "fsdp2")),
        (["--output_dir", "/proc/nothing"], ("--output_dir /proc/nothing: /proc cannot be", "Choose another")),
        (["--model_init_kwargs", '{"num_attention_heads": 0}'], ("--model_init_kwargs", "num_attention_heads to 0")),
        (["--report_to", "neptune"], ("--report_to neptune", "not installed", "pip install neptune, or use none")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_flags_that_contradict_each_other_or_their_limits(arguments, parts, refused):
    refused(*arguments, parts=parts)


MEMORY_OPTIONS = {
    "overlap of no exchange": (
        "--sp 2 --sp_backend ring --overlap_exchange True",
        ("--overlap_exchange True", "--sp_backend ulysses"),
    ),
    "chunks and overlap": (
        "--sp 2 --sp_backend ulysses --sequence_chunk_size 64 --overlap_exchange True",
        ("--sequence_chunk_size 64", "--overlap_exchange", "one of the two"),
    ),
    "chunks and heads": (
        "--sequence_chunk_size 64 --heads_k_stride 1",
        ("--sequence_chunk_size 64", "--heads_k_stride", "one of the two"),
    ),
    "tiles of none": ("--tiled_mlp False --tiled_mlp_num_shards 2", ("--tiled_mlp_num_shards 2", "--tiled_mlp False")),
    "chunks, not recomputed": (
        "--sequence_chunk_size 64 --gradient_checkpointing False",
        ("--sequence_chunk_size 64", "checkpointing is off"),
    ),
    "chunks and tiles": ("--sequence_chunk_size 64 --tiled_mlp True", ("64", "--tiled_mlp", "one of the two")),
    "every k without any": (
        "--gradient_checkpointing False --gradient_checkpointing_kwargs '{\"every_n_layers\": 2}'",
        ("every_n_layers", "checkpointing is off", "--activation_checkpointing True"),
    ),
    "every 0": ("--gradient_checkpointing_kwargs '{\"every_n_layers\": 0}'", ("every_n_layers 0", "at least 1")),
    "no mapping": ("--gradient_checkpointing_kwargs '{every: 2}'", ("{every: 2}", "Use a JSON object, such as")),
    "offload to where": (
        '--gradient_checkpointing_kwargs \'{"offload": "cpu"}\'',
        ("offload 'cpu'", "neither true, false nor a number of layers"),
    ),
    "bf16 sums of fp32": (
        "--sp 2 --sp_backend ring --communication_data_type bf16",
        ("--communication_data_type bf16", "trains in fp32", "--bf16 True"),
    ),
    "reduced by nobody": ("--communication_data_type fp32", ("--communication_data_type fp32", "engine is none")),
    "offloaded by nobody": (
        "--offload_optimizer_device cpu",
        ("--offload_optimizer_device cpu", "engine is none", "--engine deepspeed"),
    ),
    "optimizer alone on FSDP2": (
        "--sp 2 --sp_backend ring --offload_optimizer_device cpu",
        ("--offload_optimizer_device cpu", "FSDP2", "Use --offload_param_device cpu", "--engine deepspeed"),
    ),
    "disk of FSDP2": (
        "--sp 2 --sp_backend ring --offload_param_device nvme --offload_param_nvme_path .",
        ("--offload_param_device nvme", "option of DeepSpeed ZeRO-3", "--engine deepspeed"),
    ),
    "no folder": (
        "--sp 2 --sp_backend ulysses --offload_optimizer_device nvme",
        ("--offload_optimizer_device nvme", "add --offload_optimizer_nvme_path"),
    ),
    "folder for nothing": (
        "--sp 2 --sp_backend ulysses --offload_param_nvme_path swap",
        ("--offload_param_nvme_path swap", "--offload_param_device nvme", "is none. Set it to nvme"),
    ),
    "no such disk": (
        "--sp 2 --sp_backend ulysses --offload_param_device nvme --offload_param_nvme_path /dev/null/swap",
        ("--offload_param_nvme_path /dev/null/swap", "not a folder that can be written", "local SSD"),
    ),
    "2^31 tokens": (
        "--max_length 1073741824 --per_device_train_batch_size 2",
        ("--max_length 1073741824", "2,147,483,648 tokens", "2,147,483,647", "int32"),
    ),
    "2^31 sums": (
        "--sp 2 --sp_backend ring --max_length 1073741824 --per_device_train_batch_size 1",
        ("--max_length 1073741824", "2,147,483,648 sums of 4 heads on a rank", "2,147,483,647", "raise --sp"),
    ),
}


@pytest.mark.parametrize("case", MEMORY_OPTIONS)
def test_memory_options_that_the_run_has_no_place_for(case, refused):
    arguments, parts = MEMORY_OPTIONS[case]
    refused(*OWN, *shlex.split(arguments), parts=parts)


@pytest.mark.parametrize(
    "flags",
    ["--offload_param_device cpu", "--offload_optimizer_device nvme --offload_optimizer_nvme_path ."],
)
def test_offloading_that_the_zero_stage_does_not_have(flags, refused, launched_by_accelerate):
    launched_by_accelerate("ACCELERATE_USE_DEEPSPEED", "true")
    launched_by_accelerate("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    device, value, *path = flags.split()
    refused(*OWN, device, value, *path, "--dry_run", parts=(f"{device} {value}", "ZeRO-3", "the run has ZeRO-2"))


def test_host_memory_that_is_not_there(refused, monkeypatch, without_preflight):
    monkeypatch.setattr("longctx.settings.machine_checks.available_host_memory", lambda: 2**30)
    offloads = [*OWN, *RING, "--activation_offloading", "True", "--per_device_train_batch_size", "1"]
    assert main([*offloads, "--max_length", "65536", "--dry_run"]) == 0
    parts = ("GiB of host memory", "2 processes", "checkpoints", "1.0 GiB are available", "--max_length")
    refused(*offloads, "--max_length", "8388608", parts=parts)


def test_a_folder_for_temporary_files_too_deep_for_workers_sockets(refused, monkeypatch):
    deep = "/tmp/" + "d" * 71
    monkeypatch.setattr("tempfile.tempdir", deep)
    refused("--dataloader_num_workers", "2", parts=("--dataloader_num_workers 2", deep, "more than 75", "Set TMPDIR"))
    for folder, fits in ((deep[:-1], True), (deep, False)):
        os.makedirs(inner := f"{folder}/pymp-12345678", exist_ok=True)
        try:
            with pytest.raises(OSError, match="too long") if not fits else contextlib.nullcontext():
                Listener(f"{inner}/listener-12345678", "AF_UNIX").close()
        finally:
            shutil.rmtree(folder)


def test_disk_and_op_that_are_not_there(refused, monkeypatch, tmp_path):
    flags = [*OWN, *ULYSSES, "--offload_optimizer_device", "nvme", "--offload_optimizer_nvme_path", str(tmp_path)]
    monkeypatch.setattr("longctx.settings.machine_checks._has_async_io", lambda use_cpu: False)
    refused(*flags, parts=("nvme", "async_io", "libaio-dev", "ds_report"))
    full = SimpleNamespace(free=1000)
    monkeypatch.setattr("longctx.settings.machine_checks.shutil.disk_usage", lambda folder: full)
    refused(*flags, parts=(f"--offload_optimizer_nvme_path {tmp_path}", "0.0 GiB free"))


@pytest.mark.parametrize(
    ("kwargs", "parts"),
    [
        ('{"hidden": 5}', ("hidden", "qwen3", "hidden_size")),
        ('{"dtype": "bfloat16"}', ("dtype bfloat16", "--dtype")),
        ('{"a": ', ("Use a JSON object",)),
        ('{"num_hidden_layers": 3}', ("num_hidden_layers is set to 3", "2 layers", "Use 1 to 2")),
        ('{"num_hidden_layers": 0}', ("num_hidden_layers is set to 0", "Use 1 to 2")),
        ('["a"]', ("Use a JSON object",)),
    ],
)
def test_model_init_kwargs_that_would_not_act(kwargs, parts, refused):
    refused("--model_init_kwargs", kwargs, parts=parts)


# ------------------------------------------------------------------------------------------------
# The launcher's profile and the installed packages
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def launched_by_accelerate(monkeypatch):
    for name, value in {"ACCELERATE_MIXED_PRECISION": "no", "RANK": "0", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch.setenv


def test_tensor_parallel_profile(refused, launched_by_accelerate):
    launched_by_accelerate("PARALLELISM_CONFIG_TP_SIZE", "2")
    refused(parts=("parallelism_config_tp_size 2", "Set it to 1", "torchtitan"))


def make_old(package, monkeypatch):
    installed = importlib.metadata.version
    found = "longctx.settings.machine_checks.version"
    monkeypatch.setattr(found, lambda name: "0.1.2" if name == package else installed(name))


@pytest.mark.parametrize(
    ("package", "arguments"),
    [("torch", []), ("transformers", []), ("trl", []), ("accelerate", RING), ("deepspeed", ULYSSES)],
)
def test_package_versions_below_the_minimum(package, arguments, refused, monkeypatch):
    make_old(package, monkeypatch)
    refused(*arguments, parts=(f"{package} 0.1.2 is installed", " needs ", f"pip install -U '{package}>="))


@pytest.mark.long
def test_a_backend_asks_only_for_what_it_needs(monkeypatch):
    make_old("deepspeed", monkeypatch)
    assert main([*RING, "--dry_run"]) == 0

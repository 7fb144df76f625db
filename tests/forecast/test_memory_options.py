"""Memory options: what --memory and the flags come to, and what engines and torch are told."""

from __future__ import annotations

import json
import os
import re
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig

import longctx.sequence.host_tensors
from benchmarks.shapes import shape_of
from longctx.attention.kernels import Entries
from longctx.attention.operator import selective_checkpoint_contexts, varlen_attention
from longctx.forecast.memory_presets import with_options
from longctx.forecast.model_sizes import ModelSizes
from longctx.machine.here import available_host_memory
from longctx.model.tiny import tiny_config
from longctx.sequence.host_tensors import SavedOnHost, allocates_host_memory
from longctx.settings.launcher import read_profile
from longctx.settings.machine_checks import check_host_memory
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from longctx.training.engines import configure_deepspeed, set_up_allocators
from longctx.upstream.accelerate_internals import configure_fsdp
from tests.model.test_models import NEMOTRON_H, make_model

TINY = ["--model_name_or_path", "tiny", "--dataset_name", "stdlib", "--max_length", "4096", "--use_cpu", "True"]
TINY += ["--per_device_train_batch_size", "1"]


@pytest.fixture(autouse=True)
def no_devices(monkeypatch):
    monkeypatch.setattr("longctx.settings.resolve.device_count", lambda: 0)


def resolved(*flags, env=None):
    return resolve(parse_flags([*TINY, *flags]), read_profile(dict(env or {})), env or {})


# ------------------------------------------------------------------------------------------------
# What flags and presets come to
# ------------------------------------------------------------------------------------------------

ULYSSES = ("--sp", "2", "--sp_backend", "ulysses")
RING = ("--sp", "2", "--sp_backend", "ring")


def test_balanced_leaves_everything_at_its_default():
    memory_options = resolved(*RING).memory_options
    assert memory_options.describe() == "balanced; activation checkpointing"
    assert memory_options.set_by_preset == ()
    assert memory_options.parallelize_arguments() == {}


def test_fastest_checkpoints_nothing_unless_asked():
    assert resolved("--memory", "fastest").settings["gradient_checkpointing"] is False
    assert resolved("--memory", "fastest", "--gradient_checkpointing", "True").memory_options.activation_checkpointing
    assert resolved("--memory", "fastest", "--sequence_chunk_size", "512").memory_options.sequence_chunk_size == 512


@pytest.mark.parametrize(
    ("flags", "on"),
    [
        (
            ULYSSES,
            "longest: layers over 512 tokens a rank at a time, attention computed again, optimizer states on the host, "
            "small buckets",
        ),
        (RING, "longest: layers over 512 tokens a rank at a time, attention computed again, parameters on the host"),
        (
            (*RING, "--tiled_mlp", "True"),
            "longest: activation checkpointing, activations on the host, attention computed again, 1 key/value heads "
            "at a time, parameters on the host; MLP in tiles",
        ),
        (("--sp", "1"), "longest: layers over 1,024 tokens a rank at a time, attention computed again"),
        (
            (*ULYSSES, "--tiled_mlp", "True", "--offload_optimizer_device", "none"),
            "longest: activation checkpointing, activations on the host, attention computed again, 1 key/value heads "
            "at a time, small buckets; MLP in tiles",
        ),
        (
            (*ULYSSES, "--sequence_chunk_size", "100", "--activation_checkpointing_kwargs", '{"selective": true}'),
            "longest: optimizer states on the host, small buckets; layers over 100 tokens a rank at a time, "
            "attention's output kept",
        ),
    ],
)
def test_longest_is_printed_and_what_is_set_wins(flags, on):
    run = resolved("--memory", "longest", *flags)
    assert run.memory_options.describe() == on
    assert f"memory    {on}" in run.describe()


def test_longest_prefers_the_sequence_chunked_step_where_heads_allow(models):
    run = resolved("--memory", "longest", "--sp", "2")
    assert (run.backend.name, run.engine, run.memory_options.sequence_chunk_size) == ("ulysses", "deepspeed", 512)
    assert "auto: the sequence-chunked step has least on the device" in run.backend.describe()
    flags = ["--model_name_or_path", models["3 heads"], "--dataset_name", "stdlib", "--max_length", "512", "--sp", "2"]
    run = resolve(parse_flags([*flags, "--memory", "longest"]), read_profile({}), {})
    options = run.memory_options
    assert (run.backend.name, options.sequence_chunk_size, options.tiled_mlp_num_shards) == ("ring", 64, None)


def test_a_model_without_mlps_has_no_tiles():
    """Kimi's and Nemotron's layers may all be attention or recurrent ones."""
    shape = shape_of(ModelSizes.of_model(make_model("nemotron_h, no experts")))
    assert with_options(shape, "longest", {}, 64).options.tiled_mlp_num_shards == 0
    mixers = NEMOTRON_H | {"layers_block_type": ["linear_attention"] * 2}
    shape = replace(shape, model=ModelSizes.of_config(AutoConfig.for_model("nemotron_h", **mixers)))
    assert with_options(shape, "longest", {}, 64).options.tiled_mlp_num_shards is None
    for flag in ("tiled_mlp", "tiled_mlp_num_shards"):
        with pytest.raises(ValueError, match="no layer of this model has an MLP"):
            with_options(shape, "balanced", {flag: 1}, 64)


@pytest.mark.parametrize("prefix", ["gradient", "activation"])
def test_checkpointing_flags_by_both_names(prefix):
    kwargs = '{"every_n_layers": 2, "offload": true, "selective": false, "determinism_check": "none"}'
    run = resolved(f"--{prefix}_checkpointing", "True", f"--{prefix}_checkpointing_kwargs", kwargs)
    assert (run.memory_options.every_n_layers, run.memory_options.selective) == (2, False)
    assert run.memory_options.activation_offloading is True
    wanted = {"determinism_check": "none", "every_n_layers": 2, "selective": False}
    assert run.training_arguments()["gradient_checkpointing_kwargs"] == wanted


def test_offloading_of_a_profile_is_ours():
    """accelerate's own keys and those of an FSDP profile."""
    env = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "RANK": "0", "WORLD_SIZE": "2"}
    env |= {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none"}
    assert resolved(env=env).memory_options.describe() == (
        "balanced; activation checkpointing, optimizer states on the host"
    )
    with pytest.raises(ValueError, match=r"--offload_optimizer_device none contradicts .* sets"):
        resolved("--offload_optimizer_device", "none", env=env)
    env = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "RANK": "0", "WORLD_SIZE": "2"}
    assert resolved(env=env | {"FSDP_OFFLOAD_PARAMS": "true"}).memory_options.offload_param_device == "cpu"
    assert resolved(env=env | {"FSDP_OFFLOAD_PARAMS": "false"}).memory_options.offload_param_device == "none"


def test_offloading_of_a_deepspeed_file_is_ours(tmp_path):
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    values = {"zero_optimization": zero | {"offload_param": {"device": "none"}}, "communication_data_type": "bfp16"}
    (tmp_path / "ds.json").write_text(json.dumps(values))
    env = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(tmp_path / "ds.json")}
    asked = {name: value for name, (value, _) in read_profile(env).values.items()}
    assert asked == {
        "offload_optimizer_device": "nvme",
        "offload_optimizer_nvme_path": str(tmp_path),
        "communication_data_type": "bf16",
    }


def test_fsdp1_has_the_memory_options_that_leave_layers_as_they_are(monkeypatch):
    monkeypatch.setattr("longctx.settings.resolve.device_count", lambda: 2)
    env = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1", "RANK": "0", "WORLD_SIZE": "2"}

    def on_gpus(*flags):
        given = [flag for flag in TINY if flag not in ("--use_cpu", "True")]
        return resolve(parse_flags([*given, *flags]), read_profile(dict(env)), env)

    memory_options = on_gpus("--memory", "longest").memory_options
    assert (memory_options.sequence_chunk_size, memory_options.tiled_mlp_num_shards) == (None, None)
    assert memory_options.activation_offloading
    assert on_gpus("--activation_offloading", "True").training_arguments()["activation_offloading"] is True  # TRL's
    with pytest.raises(ValueError, match=r"--sequence_chunk_size 64: the engine is fsdp1, .* fsdp_version: 2"):
        on_gpus("--sequence_chunk_size", "64")


# ------------------------------------------------------------------------------------------------
# What engines and torch are told
# ------------------------------------------------------------------------------------------------


SIZES = ModelSizes.of_config(tiny_config())


def told(zero, *flags, sizes=SIZES):
    """DeepSpeed's configuration, whose file has this part of ZeRO's."""
    config = {"zero_optimization": zero}
    configure_deepspeed(config, resolved(*ULYSSES, *flags).memory_options, sizes, num_ranks=2, use_cpu=True)
    return config


def test_deepspeed_is_told_what_a_file_leaves_open():
    zero = {"stage": 3, "reduce_bucket_size": 7, "allgather_bucket_size": "auto"}
    zero["offload_optimizer"] = {"device": "none", "ratio": 0.5}
    config = told(zero, "--memory", "longest", "--offload_param_device", "cpu")
    assert zero["offload_optimizer"] == {"device": "cpu", "nvme_path": None, "pin_memory": False, "ratio": 0.5}
    assert zero["offload_param"]["device"] == "cpu"
    assert (zero["reduce_bucket_size"], zero["allgather_bucket_size"]) == (7, SIZES.hidden_size**2)
    assert zero["stage3_max_live_parameters"] == 2 * SIZES.layer_parameters
    assert config["zero_force_ds_cpu_optimizer"] is False
    assert "communication_data_type" not in config


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_deepspeed_is_told_what_to_reduce_in(dtype):
    config = told({"stage": 3}, "--bf16", "True", "--communication_data_type", dtype)
    assert config["communication_data_type"] == dtype


@pytest.mark.parametrize(("asked", "dtype"), [([], torch.float32), (["bf16"], torch.bfloat16)], ids=["not", "bf16"])
def test_fsdp2_reduces_in_bf16_where_it_is_asked_to(asked, dtype):
    flags = [*RING, "--bf16", "True", *(["--communication_data_type", *asked] if asked else [])]
    plugin = SimpleNamespace(
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        cpu_offload=None,
    )
    reduce_in_bf16 = resolved(*flags).memory_options.communication_data_type == "bf16"
    configure_fsdp(plugin, reduce_in_bf16=reduce_in_bf16, use_cpu=True)
    assert plugin.mixed_precision_policy.reduce_dtype is dtype


def test_buckets_of_a_plain_run_hold_a_layer():
    config = told({"stage": 2})
    assert config["zero_optimization"]["reduce_bucket_size"] == SIZES.layer_parameters
    assert config.keys() == {"zero_optimization"}


def test_zero_names_none_of_its_functions_for_a_profiler(monkeypatch):
    """It would do so in every layer, whether one listens or not."""
    from deepspeed.utils import nvtx

    monkeypatch.setattr(nvtx, "enable_nvtx", True)
    told({"stage": 3})
    assert not nvtx.enable_nvtx


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("memory", ["balanced", "longest"])
def test_buckets_are_even(memory, stage):
    """ZeRO-1 and 2 refuse odd ones; a layer of gpt-oss with 3 heads has an odd number of parameters."""
    config = told({"stage": stage}, "--memory", memory, sizes=replace(SIZES, layer_parameters=7, hidden_size=3))
    buckets = [size for name, size in config["zero_optimization"].items() if name.endswith("bucket_size")]
    assert buckets
    assert set(buckets) <= {8, 10}


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_allocator_is_set_up_unless_the_user_did(name, monkeypatch):
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, "max_split_size_mb:64")
    set_up_allocators()
    assert os.environ[name] == "max_split_size_mb:64"
    assert "PYTORCH_ALLOC_CONF" not in os.environ or name == "PYTORCH_ALLOC_CONF"
    monkeypatch.delenv(name)
    set_up_allocators()
    assert os.environ.pop("PYTORCH_ALLOC_CONF").split(",")[0] == "expandable_segments:True"


def test_what_autograd_saves_waits_on_the_host(monkeypatch):
    """Views, strides and weights, against the same without: bitwise, since nothing is computed otherwise."""
    made = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: made.append(allocates_host_memory()) or empty(*a, **k))
    weight = torch.nn.Parameter(torch.randn(6, 6))
    grads = []
    for on_host in (False, True):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)
        with SavedOnHost() if on_host else nullcontext():
            torch.sin((x @ weight).T[1:]).square().sum().backward()
        grads.append((x.grad, weight.grad.clone()))
        weight.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert made
    assert all(made)
    assert len(made) == 3  # x, of sin and of square; the weight stays


def test_attention_that_checkpoints_keep_waits_there_too(monkeypatch):
    made, empty = [], longctx.sequence.host_tensors.host_empty
    monkeypatch.setattr(
        "longctx.sequence.host_tensors.host_empty", lambda *shape, **k: made.append(shape) or empty(*shape, **k)
    )
    weight = torch.randn(16, 16, requires_grad=True)

    def layer(x):
        q = (x @ weight).view(1, 10, 2, 8).transpose(1, 2)
        return varlen_attention(q, q, q, np.array([0, 4, 10])).transpose(1, 2).reshape(10, 16)

    grads = []
    for on_host in (False, True):
        x = torch.randn(10, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
        with SavedOnHost() if on_host else nullcontext():
            y = checkpoint(layer, x, use_reentrant=False, context_fn=selective_checkpoint_contexts)
            y.square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)
    assert made == [(10, 16), (1, 2, 10, 8), (1, 2, 10), (10, 16)]  # the layer's input, out, lse; of square


# ------------------------------------------------------------------------------------------------
# Limits
# ------------------------------------------------------------------------------------------------


def test_host_memory_that_is_left(tmp_path):
    """The least of what the machine has available and of what its control groups leave, cache that can go included."""

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    assert available_host_memory(tmp_path) == 8000 * 1024
    write("proc/self/cgroup", "0::/job/step\n")
    write("sys/fs/cgroup/job/step/memory.max", "max\n")
    write("sys/fs/cgroup/job/step/memory.current", "10\n")
    assert available_host_memory(tmp_path) == 8000 * 1024
    write("sys/fs/cgroup/job/memory.max", "5000000\n")
    write("sys/fs/cgroup/job/memory.current", "3000000\n")
    assert available_host_memory(tmp_path) == 2000000
    write("sys/fs/cgroup/job/memory.stat", "anon 5\ninactive_file 700000\n")
    assert available_host_memory(tmp_path) == 2700000
    write("proc/self/cgroup", "4:cpu:/x\n3:memory:/\n")
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", "1000\n")
    write("sys/fs/cgroup/memory/memory.usage_in_bytes", "400\n")
    assert available_host_memory(tmp_path) == 600


def test_borders_that_kernels_cannot_count_are_refused():
    """In int32 they would be negative."""
    of_documents = Entries.of_documents(np.array([0, 2**30, 2**31]))
    with pytest.raises(ValueError, match=r"2,147,483,648 tokens in one call: kernels count 2,147,483,647"):
        of_documents.varlen(torch.device("cpu"))
    assert Entries.of_documents(np.array([0, 2**31 - 1])).varlen(torch.device("cpu")).cu_seqlens_k[-1] == 2**31 - 1


def test_the_length_that_a_refusal_names_fits():
    model = ModelSizes.of_config(tiny_config())
    offloads = {"offload_optimizer_device": "cpu", "activation_offloading": True}
    shape = shape_of(model, world_size=4, sp=4, engine="zero3", **offloads)
    with pytest.raises(ValueError, match=r"checkpoints .* GiB are available\. --max_length \d+ fits") as refused:
        check_host_memory(shape, 2**30, 4, 4 * 2**30)
    fits = int(re.search(r"--max_length (\d+) fits", str(refused.value))[1])
    check_host_memory(shape, fits, 4, 4 * 2**30)
    with pytest.raises(ValueError, match="GiB are available"):
        check_host_memory(shape, int(fits * 1.01), 4, 4 * 2**30)

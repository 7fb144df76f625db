"""Hand a training engine to accelerate through the environment its launcher uses, and start the process group."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from packaging.version import Version

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch import nn

    from longctx.forecast.levers import Levers
    from longctx.forecast.model_sizes import ModelSizes

_FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}
_DEEPSPEED = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
}
ENGINE_ENVIRONMENT = {"fsdp2": _FSDP, "deepspeed": _DEEPSPEED}
"""Variables that the launcher exports for the shipped profiles fsdp2 and zero3."""


def promote(engine: str) -> None:
    """Make a plain launch use `engine` (fsdp2 or deepspeed), as its shipped profile does."""
    os.environ.update(ENGINE_ENVIRONMENT[engine])


def stay_on_cpu() -> None:
    """Keep DeepSpeed, which accelerate imports for every engine, from looking for a GPU."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def prefer_huge_pages() -> None:
    """Make torch request huge pages for large CPU tensors, whose first access is then much faster.

    Call it before the first tensor: torch reads the variable once.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def set_up_allocators() -> None:
    """Set up torch's CUDA allocators, unless the user did.

    Segments grow instead of multiplying, which leaves fewer gaps, and large pinned host tensors are not rounded up to a
    power of two. Call it before CUDA is used: the variable is read once.
    """
    settings = ["expandable_segments:True"]
    if Version(version("torch")) >= Version("2.13"):  # older supported releases do not know it
        settings.append("pinned_max_round_threshold_mb:64")
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # its older name
        os.environ.setdefault("PYTORCH_ALLOC_CONF", ",".join(settings))


def load_on_every_rank() -> None:
    """Make every rank read the weights, and quantise them itself. Call it before FSDP2's plug-in exists."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"


def offload_fsdp() -> None:
    """Make FSDP2 keep parameters, gradients and optimizer states in host memory. Call it before its plug-in exists."""
    os.environ["FSDP_OFFLOAD_PARAMS"] = "true"


def start_on_cpu(engine: str, timeout: timedelta | None = None) -> None:
    """Start gloo and tell accelerate which engine runs on it; accelerate itself refuses both engines there.

    Called before TrainingArguments exist, which then take the state as it is.

    Args:
        timeout: how long ranks wait for each other; torch's default if None.
    """
    os.environ.pop("ACCELERATE_USE_CPU", None)  # with it accelerate does not use DeepSpeed
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    from longctx.launch.store import meeting_point

    options = meeting_point(os.environ) | ({} if timeout is None else {"timeout": timeout})
    PartialState(cpu=True, backend="gloo", **options)
    if engine == "deepspeed":
        _start_deepspeed_on_gloo()
        PartialState._shared_state["distributed_type"] = DistributedType.DEEPSPEED
    else:
        # accelerate itself promotes a type with an accelerator to FSDP, plug-in included.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU


def start_on_gpu(timeout: timedelta, backend: str | None) -> None:
    """Start the process group at the file store of our own launcher, which accelerate does not support.

    Under other launchers accelerate starts it. Called before TrainingArguments exist, which then find the group.

    Args:
        backend: --ddp_backend; accelerate's choice if None.
    """
    from longctx.launch.store import meeting_point

    if meeting := meeting_point(os.environ):
        from accelerate import PartialState

        PartialState(timeout=timeout, **({} if backend is None else {"backend": backend}), **meeting)


def _start_deepspeed_on_gloo() -> None:
    import deepspeed
    import deepspeed.ops

    # Otherwise DeepSpeed compiles a shared-memory op here: half a minute, and a crash without a compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)


# Settings that a profile leaves open


def configure_deepspeed(
    config: dict[str, Any], levers: Levers, model: ModelSizes, *, num_ranks: int, use_cpu: bool
) -> None:
    """Fill in DeepSpeed's configuration from the levers; sizes in the user's own file stay.

    Call it before DeepSpeed reads the configuration and before weights are loaded.
    """
    zero = config["zero_optimization"]
    for kind in ("optimizer", "param"):
        device = getattr(levers, f"offload_{kind}_device")
        if device != "none":
            given = zero.get(f"offload_{kind}") or {}
            place = {"device": device, "nvme_path": getattr(levers, f"offload_{kind}_nvme_path")}
            zero[f"offload_{kind}"] = {"pin_memory": not use_cpu, **given, **place}
    if levers.offload_param_device == "nvme":  # a rank's part of the largest parameter has to fit a buffer
        largest = max(model.vocab_size * model.hidden_size, model.layer_parameters)
        zero["offload_param"].setdefault("buffer_size", -(-largest // num_ranks))
    if levers.offload_optimizer_device == "nvme":  # elements that are in host memory at a time, four times over
        zero.setdefault("sub_group_size", 10**8)
    if levers.offload_optimizer_device != "none":
        # Allow any --optim on the CPU: torch's fused AdamW needs no compiler and is as fast as DeepSpeedCPUAdam.
        config.setdefault("zero_force_ds_cpu_optimizer", False)
    if levers.communication_data_type != "auto":
        config["communication_data_type"] = levers.communication_data_type
    for name, size in _bucket_sizes(levers, model, zero["stage"]).items():
        if zero.get(name, "auto") == "auto":
            zero[name] = size


def _bucket_sizes(levers: Levers, model: ModelSizes, zero_stage: int) -> Mapping[str, int]:
    """Return sizes in elements. DeepSpeed's default of 5e8 is 2 GB in fp32 on every rank, for any model.

    A layer's gradients are ready together, so a bucket of one layer never waits. `small_buckets` takes transformers'
    `auto`, one square matrix, and makes ZeRO-3 keep only the current layer and the next.
    """
    layer = model.layer_parameters
    bucket = min(layer, model.hidden_size**2) if levers.small_buckets else layer
    bucket += bucket % 2  # ZeRO-1 and 2 start messages at multiples of 4 bytes, which are 2 elements in half precision
    sizes = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if zero_stage == 3 and levers.small_buckets:
        sizes |= {"stage3_prefetch_bucket_size": bucket, "stage3_max_live_parameters": 2 * layer}
        sizes |= {"stage3_max_reuse_distance": 2 * layer}
    return sizes


def configure_fsdp(plugin: Any, levers: Levers, *, use_cpu: bool) -> None:
    """Set up FSDP2's plug-in from the levers, before the model is wrapped."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    if levers.communication_data_type == "bf16" and plugin.mixed_precision_policy is not None:
        import torch

        plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, reduce_dtype=torch.bfloat16)
    if use_cpu and isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # pinning needs a GPU's driver


def save_whole_models(accelerator: Accelerator) -> None:
    """Make FSDP save standard folders in checkpoints and output_dir, whatever format the profile asks for."""
    plugin: Any = accelerator.state.fsdp_plugin
    plugin.state_dict_config = plugin.optim_state_dict_config = None
    plugin.set_state_dict_type("FULL_STATE_DICT")


def keep_sums_in_fp32(accelerator: Accelerator) -> None:
    """Make FSDP2 under bf16 return per-token losses as computed, and add up gradients over micro-batches in fp32.

    accelerate's policy would cast the model's outputs to bf16, and so round the scale of the whole gradient.
    """
    import torch

    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    policy = getattr(plugin, "mixed_precision_policy", None)
    if policy is not None and plugin.fsdp_version == 2:
        plugin.mixed_precision_policy = replace(policy, output_dtype=None, reduce_dtype=torch.float32)


@contextmanager
def saved_buffers_handed_on(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Give every rank the saved buffers of rank 0, and keep them out of the state dict inside of the context.

    All ranks enter it together, around the call with which FSDP2 wraps the model. Examples of such buffers are the
    router's correction of GLM-4.5 and the constants of Apertus's activation. accelerate loads the weights on rank 0
    alone and hands on what it finds in the state dict, all of which it takes for sharded parameters. Each rank has the
    buffers outside of the state dict, which accelerate restores by itself.

    Args:
        device: where the process group communicates.
    """
    import torch
    import torch.distributed as dist

    saved = [(module, name) for module in model.modules() for name in _saved_names(module)]
    for module, name in saved:
        buffer = module._buffers[name]
        assert buffer is not None, "a name of _saved_names"
        value = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
        dist.broadcast(value, src=0)
        module._buffers[name] = value
        module._non_persistent_buffers_set.add(name)
    try:
        yield
    finally:
        for module, name in saved:
            module._non_persistent_buffers_set.discard(name)


def _saved_names(module: nn.Module) -> list[str]:
    left_out = module._non_persistent_buffers_set
    return [name for name, buffer in module._buffers.items() if buffer is not None and name not in left_out]

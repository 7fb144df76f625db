"""Start the process group under a training engine, and fill in the settings that a profile leaves open."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from longctx.launch.store import meeting_point
from longctx.upstream.accelerate_internals import start_on_gloo
from longctx.upstream.deepspeed_internals import lighten_steps, start_deepspeed_on_gloo

if TYPE_CHECKING:
    import torch
    from torch import nn

    from longctx.forecast.memory_options import MemoryOptions
    from longctx.forecast.model_sizes import ModelSizes


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


def start_on_cpu(engine: str, timeout: timedelta | None = None) -> None:
    """Start gloo, and tell accelerate which engine runs on it.

    Called before TrainingArguments exist, which then take the state as it is.

    Args:
        timeout: how long ranks wait for each other; torch's default if None.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    start_on_gloo(engine, **meeting_point(os.environ), **({} if timeout is None else {"timeout": timeout}))
    if engine == "deepspeed":
        start_deepspeed_on_gloo()


def start_on_gpu(timeout: timedelta, backend: str | None) -> None:
    """Start the process group at the file store of our own launcher, which accelerate does not support.

    Under other launchers accelerate starts it. Called before TrainingArguments exist, which then find the group.

    Args:
        backend: --ddp_backend; accelerate's choice if None.
    """
    if meeting := meeting_point(os.environ):
        from accelerate import PartialState

        PartialState(timeout=timeout, **({} if backend is None else {"backend": backend}), **meeting)


# Settings that a profile leaves open


def configure_deepspeed(
    config: dict[str, Any], memory_options: MemoryOptions, model: ModelSizes, *, num_ranks: int, use_cpu: bool
) -> None:
    """Fill in DeepSpeed's configuration from the memory options; sizes in the user's own file stay.

    Call it before DeepSpeed reads the configuration and before weights are loaded.
    """
    zero = config["zero_optimization"]
    for kind in ("optimizer", "param"):
        device = getattr(memory_options, f"offload_{kind}_device")
        if device != "none":
            given = zero.get(f"offload_{kind}") or {}
            place = {"device": device, "nvme_path": getattr(memory_options, f"offload_{kind}_nvme_path")}
            zero[f"offload_{kind}"] = {"pin_memory": not use_cpu, **given, **place}
    if memory_options.offload_param_device == "nvme":  # a rank's part of the largest parameter has to fit a buffer
        largest = max(model.vocab_size * model.hidden_size, model.layer_parameters)
        zero["offload_param"].setdefault("buffer_size", -(-largest // num_ranks))
    if memory_options.offload_optimizer_device == "nvme":  # elements that are in host memory at a time, four times over
        zero.setdefault("sub_group_size", 10**8)
    if memory_options.offload_optimizer_device != "none":
        # Allow any --optim on the CPU: torch's fused AdamW needs no compiler and is as fast as DeepSpeedCPUAdam.
        config.setdefault("zero_force_ds_cpu_optimizer", False)
    if memory_options.communication_data_type != "auto":
        config["communication_data_type"] = memory_options.communication_data_type
    for name, size in _bucket_sizes(memory_options, model, zero["stage"]).items():
        if zero.get(name, "auto") == "auto":
            zero[name] = size
    lighten_steps()


def _bucket_sizes(memory_options: MemoryOptions, model: ModelSizes, zero_stage: int) -> Mapping[str, int]:
    """Return sizes in elements. DeepSpeed's default of 5e8 is 2 GB in fp32 on every rank, for any model.

    A layer's gradients are ready together, so a bucket of one layer never waits. `small_buckets` takes transformers'
    `auto`, one square matrix, and makes ZeRO-3 keep only the current layer and the next.
    """
    layer = model.layer_parameters
    bucket = min(layer, model.hidden_size**2) if memory_options.small_buckets else layer
    bucket += bucket % 2  # ZeRO-1 and 2 start messages at multiples of 4 bytes, which are 2 elements in half precision
    sizes = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if zero_stage == 3 and memory_options.small_buckets:
        sizes |= {"stage3_prefetch_bucket_size": bucket, "stage3_max_live_parameters": 2 * layer}
        sizes |= {"stage3_max_reuse_distance": 2 * layer}
    return sizes


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

    saved = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]
    for module, name, buffer in saved:
        value = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
        dist.broadcast(value, src=0)
        module._buffers[name] = value
        module._non_persistent_buffers_set.add(name)
    try:
        yield
    finally:
        for module, name, _ in saved:
            module._non_persistent_buffers_set.discard(name)


def reshard(model: nn.Module) -> None:
    """Free what FSDP2 has gathered: after a forward pass without a backward one, the root's parameters are whole."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()

"""What longctx sets in accelerate: its launcher's environment variables, its state, and FSDP's plug-in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor, nn

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


def load_on_every_rank() -> None:
    """Make every rank read the weights, and quantise them itself. Call it before FSDP2's plug-in exists."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"


def offload_fsdp() -> None:
    """Make FSDP2 keep parameters, gradients and optimizer states in host memory. Call it before its plug-in exists."""
    os.environ["FSDP_OFFLOAD_PARAMS"] = "true"


def start_on_gloo(engine: str, **options: Any) -> None:
    """Start gloo and declare which engine runs on it; accelerate itself refuses both engines there.

    Args:
        options: keywords of `torch.distributed.init_process_group`.
    """
    os.environ.pop("ACCELERATE_USE_CPU", None)  # with it accelerate does not use DeepSpeed
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True, backend="gloo", **options)
    # accelerate itself promotes a type with an accelerator to FSDP, plug-in included.
    found = DistributedType.DEEPSPEED if engine == "deepspeed" else DistributedType.MULTI_XPU
    PartialState._shared_state["distributed_type"] = found


def configure_fsdp(plugin: Any, *, reduce_in_bf16: bool, use_cpu: bool) -> None:
    """Set up FSDP2's plug-in, before the model is wrapped."""
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy

    if reduce_in_bf16 and plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, reduce_dtype=torch.bfloat16)
    if use_cpu and isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # pinning needs a GPU's driver


def fsdp2_plugin(accelerator: Accelerator) -> Any | None:
    """Return FSDP2's plug-in; None for other engines."""
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    return plugin if plugin is not None and plugin.fsdp_version == 2 else None


def fsdp1_ranges(model: nn.Module) -> dict[Tensor, tuple[Sequence[int], int]]:
    """Return, for each parameter of FSDP1, its whole shape and the first element of it that this rank holds."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    found: dict[Tensor, tuple[Sequence[int], int]] = {}
    for module in FullyShardedDataParallel.fsdp_modules(model):
        flat: Any = getattr(module._handle, "flat_param", None)
        if flat is not None:
            parts = zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True)
            found |= {part: (shape, info.intra_param_start_idx or 0) for part, shape, info in parts}
    return found


def allow_meta(accelerator: Accelerator, model: nn.Module) -> None:
    """Let FSDP2 wrap a model with parameters on the meta device, which get their values then.

    accelerate finds the optimizer's parameters by their addresses, and on the meta device all are 0. Bytes, which are
    4-bit weights, get their values elsewhere.
    """
    parameter: Any
    for parameter in model.parameters():
        if parameter.is_meta and parameter.is_floating_point():
            parameter.data_ptr = partial(id, parameter)
            accelerator.state.fsdp_plugin.cpu_ram_efficient_loading = True


@contextmanager
def shards_filled(fill: Callable[[dict[str, tuple[Any, Tensor]]], object]) -> Iterator[None]:
    """Call `fill` with all shards of a model that is wrapped inside, where accelerate would send rank 0's weights.

    Args:
        fill: is given, by the parameter's name in the state dict, this rank's shard, a DTensor that is not yet
            initialised, and the parameter before it was cut.
    """
    import torch
    from accelerate.utils import fsdp_utils

    send = fsdp_utils.fsdp2_load_full_state_dict

    def fill_all(accelerator: Accelerator, model: nn.Module, whole: dict[str, Tensor], cpu_offload: bool) -> None:
        filled: dict[Any, nn.Parameter] = {}
        named: dict[str, tuple[Any, Tensor]] = {}
        shards = model.state_dict(keep_vars=True)
        for name, shard in shards.items():
            if shard not in filled:  # once for tied weights
                on_device = torch.empty_like(shard, device="cpu" if cpu_offload else accelerator.device)
                named[name] = on_device, whole[name]
                filled[shard] = torch.nn.Parameter(on_device, requires_grad=shard.requires_grad)
        fill(named)
        model.load_state_dict({name: filled[shard] for name, shard in shards.items()}, assign=True)

    fsdp_utils.fsdp2_load_full_state_dict = fill_all
    try:
        yield
    finally:
        fsdp_utils.fsdp2_load_full_state_dict = send


def keep_sums_in_fp32(accelerator: Accelerator) -> None:
    """Make FSDP2 under bf16 return per-token losses as computed, and add up gradients over micro-batches in fp32.

    accelerate's policy would cast the model's outputs to bf16, and so round the scale of the whole gradient.
    """
    import torch

    plugin = fsdp2_plugin(accelerator)
    if plugin is not None and (policy := plugin.mixed_precision_policy) is not None:
        plugin.mixed_precision_policy = replace(policy, output_dtype=None, reduce_dtype=torch.float32)


def update_shards(optimizer: Any) -> None:
    """Make torch's Adam and AdamW update FSDP2's shards as plain tensors. Their states stay DTensors.

    They work element by element, so the result is the same. DTensor would work out the placement of each tensor in
    every step.
    """
    import torch

    adam = without_wrappers(optimizer)
    if not issubclass(type(adam), torch.optim.Adam):
        return
    collect = partial(type(adam)._init_group, adam)

    def collect_shards(group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex = collect(group, *lists)
        for tensors in lists:
            tensors[:] = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
        return has_complex

    adam._init_group = collect_shards


def without_wrappers(optimizer: Any) -> Any:
    """Return the engine's or torch's optimizer from accelerate's wrappers."""
    while type(optimizer).__module__.startswith("accelerate."):
        optimizer = optimizer.optimizer
    return optimizer

"""Ranges of trained parameters and optimizer states on a rank, under any engine.

FSDP2 keeps whole rows of a parameter, ZeRO a contiguous part of its elements, and one process all of them. Each is a
range of the flattened parameter, so a run with another layout reads the ranges that it needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from longctx.upstream.accelerate_internals import fsdp1_ranges, without_wrappers
from longctx.upstream.deepspeed_internals import copy_to_working_weights, flat_range, is_on_nvme, is_zero

WEIGHT = "weight"
"""The kind of state that is the parameter as the optimizer updates it: ZeRO's fp32 copy if weights are bf16. Other
kinds have the optimizer's names."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ParameterShard:
    """A range of one flattened parameter with its states. Tensors are views: writing to them changes training."""

    name: str
    """Name of the parameter in the model without an engine."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    start: int
    """First element of the range."""
    states: dict[str, Tensor]
    """Kind -> the range's elements [n], or one value [] for the whole parameter, such as the step count."""
    is_copy: bool = False
    """Whether a rank of the first replica holds the same range."""

    @property
    def length(self) -> int:
        """Number of elements of the range."""
        return self.states[WEIGHT].numel()


def parameter_shards(
    model: nn.Module, optimizer: Any, kinds: Mapping[str, bool] | None = None
) -> Iterator[ParameterShard]:
    """Return all shards of this rank, in the order of the parameters. No messages are sent.

    Args:
        model: before or after an engine wrapped it.
        optimizer: torch's, or DeepSpeed's ZeRO-1, 2, 3.
        kinds: states to create as zeros if the optimizer has none yet, with whether each is one value per parameter.

    Raises:
        ValueError: for states on NVMe.
    """
    optimizer = without_wrappers(optimizer)
    of_engine = _of_zero if is_zero(optimizer) else _of_shards
    return of_engine(model, optimizer, kinds or {})


def trained_shapes(model: nn.Module) -> dict[str, list[int]]:
    """Return the full shape of every trained parameter by name, to compare a checkpoint with the model."""
    flattened = fsdp1_ranges(model)
    return {name: list(_shape(parameter, flattened)) for name, parameter in _trained(model)}


def _shape(parameter: Any, flattened: Mapping[Tensor, tuple[Sequence[int], int]]) -> Sequence[int]:
    return flattened[parameter][0] if parameter in flattened else getattr(parameter, "ds_shape", parameter.shape)


def update_working_weights(model: nn.Module, optimizer: Any) -> None:
    """Copy ZeRO's changed fp32 weights to those that layers compute with. Called by all ranks together."""
    optimizer = without_wrappers(optimizer)
    if is_zero(optimizer):
        copy_to_working_weights(optimizer, [parameter for _, parameter in _trained(model)])


def _trained(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name_without_wrappers(name), parameter


def name_without_wrappers(name: str) -> str:
    """Return a parameter's name in the model without an engine and without wrappers of activation checkpointing."""
    return name.removeprefix("module.").replace("_checkpoint_wrapped_module.", "").replace("_fsdp_wrapped_module.", "")


def _of_shards(model: nn.Module, optimizer: Any, kinds: Mapping[str, bool]) -> Iterator[ParameterShard]:
    """Yield shards of FSDP2 or FSDP1, or whole parameters."""
    flattened = fsdp1_ranges(model)
    for name, parameter in _trained(model):
        held = _with_states(optimizer, parameter, kinds)
        start, is_copy = 0, dist.is_initialized() and dist.get_rank() > 0
        if parameter in flattened:
            start, is_copy = flattened[parameter][1], False
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            _, offsets = compute_local_shape_and_global_offset(parameter.shape, mesh, parameter.placements)
            start = offsets[0] * math.prod(parameter.shape[1:])
            coordinate: Sequence[int] = mesh.get_coordinate() or ()
            is_copy = any(p.is_replicate() and at for p, at in zip(parameter.placements, coordinate, strict=True))
            assert all(p.is_replicate() or p.is_shard(0) for p in parameter.placements), f"{name} is cut along its rows"
        whole = {WEIGHT: parameter.data, **held}
        local = {kind: x.to_local() if isinstance(x, DTensor) else x for kind, x in whole.items()}
        if local[WEIGHT].numel():
            flat = {kind: tensor.view(-1) if tensor.dim() else tensor for kind, tensor in local.items()}
            shape = tuple(_shape(parameter, flattened))
            yield ParameterShard(name=name, shape=shape, start=start, states=flat, is_copy=is_copy)


def _of_zero(model: nn.Module, zero: Any, kinds: Mapping[str, bool]) -> Iterator[ParameterShard]:
    """Yield shards of ZeRO, which lie in flat tensors of many parameters."""
    for name, parameter in _trained(model):
        if is_on_nvme(zero, parameter):
            raise ValueError(
                "optimizer states on NVMe are neither saved nor resumed: use --offload_optimizer_device cpu, or "
                "--save_only_model True."
            )
        if (found := flat_range(zero, parameter)) is None:
            continue
        flat, offset, start, numel = found
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        numel = min(numel, math.prod(shape) - start)  # without padding
        if numel > 0:
            held = {WEIGHT: flat.data, **_with_states(zero.optimizer, flat, kinds)}
            states = {kind: x.narrow(0, offset, numel) if x.dim() else x for kind, x in held.items()}
            yield ParameterShard(name=name, shape=shape, start=start, states=states)


def _with_states(optimizer: torch.optim.Optimizer, parameter: Tensor, kinds: Mapping[str, bool]) -> dict[str, Tensor]:
    """Return the optimizer's states of one tensor, creating missing ones on the device that the optimizer would use."""
    for kind, is_scalar in kinds.items():
        held = optimizer.state[parameter]
        if kind not in held and is_scalar:
            held[kind] = torch.zeros((), dtype=torch.float32, device=_scalar_device(optimizer, parameter))
        elif kind not in held:
            held[kind] = torch.zeros_like(parameter.data)
    return {kind: value for kind, value in optimizer.state.get(parameter, {}).items() if isinstance(value, Tensor)}


def _scalar_device(optimizer: torch.optim.Optimizer, parameter: Tensor) -> torch.device:
    """Return the device of the step count: the parameter's if kernels are fused or captured.

    ZeRO empties the groups' lists of parameters, so a parameter's own group is unknown. Every implementation of torch
    accepts a count on the device.
    """
    on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    return parameter.device if on_device else torch.device("cpu")

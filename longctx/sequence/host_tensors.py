"""Host memory for what a device cannot hold all at once. It is pinned where there is a GPU, so that copies overlap."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

_allocating: ContextVar[bool] = ContextVar("allocating_host_memory", default=False)


@contextmanager
def host_memory() -> Iterator[None]:
    """CPU tensors made in here are host memory by intent. On a machine without a GPU all tensors are on the CPU, and
    `benchmarks.memory.trace` tells by this which of them would not be on the device.
    """
    token = _allocating.set(True)
    try:
        yield
    finally:
        _allocating.reset(token)


def allocates_host_memory() -> bool:
    """Return whether `host_memory` is entered."""
    return _allocating.get()


def host_empty(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised host tensor that tensors of `device` are copied to and from."""
    with host_memory():
        return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor on a device, or a tensor of the device itself.

    Host tensors are pinned first. The host waits for a copy from other memory, and for all the GPU's work before it.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def saved_in_place() -> saved_tensors_hooks:
    """Return a context in which the tensors that autograd saves stay as they are, whatever hooks around it do."""
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


class SavedOnHost(saved_tensors_hooks):
    """A context in which the tensors that autograd saves wait in host memory. Weights stay where they are.

    TRL's `OffloadActivations` does this with copies that overlap with a GPU's work, and needs a GPU. Without one, this
    context keeps a run the same, and shows a tracer which tensors would be on a device.
    """

    def __init__(self) -> None:
        super().__init__(_to_host, _from_host)


def _to_host(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
    if isinstance(tensor, nn.Parameter | DTensor):
        return tensor
    host = host_empty(*tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor.device, host.copy_(tensor)


def _from_host(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed[1].to(packed[0], copy=True)

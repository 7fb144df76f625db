"""Host memory for what a device cannot hold all at once: pinned where there is a GPU, so that copies do not wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_allocating: ContextVar[bool] = ContextVar("allocating_host_memory", default=False)


@contextmanager
def host_memory() -> Iterator[None]:
    """CPU tensors made in here are host memory by intent. On a machine without a GPU all tensors are on the CPU, and
    `longctx.memory` tells by this which of them would not be on the device.
    """
    token = _allocating.set(True)
    try:
        yield
    finally:
        _allocating.reset(token)


def allocates_host_memory() -> bool:
    """Whether `host_memory` is entered."""
    return _allocating.get()


def host_empty(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised host tensor that tensors of `device` are copied to and from."""
    with host_memory():
        return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")

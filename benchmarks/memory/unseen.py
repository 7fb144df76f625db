"""What no operator shows to a dispatch mode: resized storages, copies to host memory, workspaces inside kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

from longctx.sequence.host_tensors import host_memory


@contextmanager
def watched_resizes(resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `resized` whenever a storage is resized, which no operator shows.

    FSDP2 frees gathered parameters by resizing their storages to nothing.
    """
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int):
        result = original(storage, size)
        resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]


@contextmanager
def copies_to_host() -> Iterator[None]:
    """Make torch's `save_on_cpu` copy CPU tensors as it copies a GPU's.

    So offloading takes the same memory on a machine without a GPU as on one with a GPU.
    """
    original = save_on_cpu.__init__

    def __init__(self: save_on_cpu, pin_memory: bool = False, device_type: str = "cuda") -> None:
        original(self, pin_memory, device_type)
        torch.autograd.graph.saved_tensors_hooks.__init__(
            self, partial(_to_host, self.pack_hook), partial(_from_host, self.unpack_hook)
        )

    save_on_cpu.__init__ = __init__  # type: ignore[method-assign]
    try:
        yield
    finally:
        save_on_cpu.__init__ = original  # type: ignore[method-assign]


def _to_host(pack: Callable[[Tensor], Any], tensor: Tensor) -> tuple[bool, Any]:
    if tensor.device.type != "cpu":
        with host_memory():
            return False, pack(tensor)
    with host_memory():
        return True, tensor.clone()


def _from_host(unpack: Callable[[Any], Tensor], packed: tuple[bool, Any]) -> Tensor:
    is_copy, value = packed
    return value.clone() if is_copy else unpack(value)


def _flash_workspace(
    grad_out: Tensor, q: Tensor, k: Tensor, *args: Any
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return what FlashAttention-2's backward pass allocates besides its results (csrc/flash_attn/flash_api.cpp).

    It is dq in fp32, one fp32 number for each query and head, and with grouped heads dk and dv of every query head.
    """
    workspace = {
        "dq_accum": (tuple(q.shape), torch.float32),
        "softmax_d": (tuple(q.shape[:-1]), torch.float32),
    }
    heads = -2 if q.ndim == 3 else 1  # [N, H, D] varlen, [B, H, S, D] else
    if q.shape[heads] != k.shape[heads]:
        expanded = list(k.shape)
        expanded[heads] = q.shape[heads]
        workspace |= {name: (tuple(expanded), k.dtype) for name in ("dk_expanded", "dv_expanded")}
    return workspace


FLASH_WORKSPACE = dict.fromkeys(
    ("aten._flash_attention_backward", "aten._scaled_dot_product_flash_attention_for_cpu_backward"), _flash_workspace
)
"""The workspace of each operator. Stock transformers' sdpa calls the second one on CPU tensors."""

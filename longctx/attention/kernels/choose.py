"""Which kernel computes a block, and the block interface that attention is built on."""

from __future__ import annotations

import functools
import logging
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from longctx.attention.kernels import flash_attn
from longctx.attention.kernels.blockwise import CpuFlashKernel, ShortDenseKernel
from longctx.attention.kernels.check import BOUNDS, disagreement
from longctx.attention.kernels.cudnn import CudnnKernel
from longctx.attention.kernels.efficient import MemoryEfficientKernel
from longctx.attention.kernels.elsewhere import disagreement_elsewhere
from longctx.attention.kernels.entries import Entries, take
from longctx.attention.kernels.kernel import Kernel
from longctx.attention.kernels.varlen import AtenFlashKernel

logger = logging.getLogger(__name__)

LONG_DOCUMENT = 8192
"""Tokens from which a document that is alone goes to cuDNN; shorter ones have too many lengths to plan for each."""

MAX_PLANS = 64
"""Shapes that cuDNN computes in a process. It never drops a plan, of which forward and backward have one each."""

REMEMBERED_SHAPES = 1024

Shape: TypeAlias = tuple[int, int, bool]
"""Queries, keys, causal."""


def candidates() -> Iterator[Kernel]:
    """All kernels for CUDA, the fastest first."""
    installed = list(flash_attn.installed())
    yield from (kernel for kernel in installed if not isinstance(kernel, flash_attn.FlashAttention2))
    yield CudnnKernel()
    yield from (kernel for kernel in installed if isinstance(kernel, flash_attn.FlashAttention2))
    yield AtenFlashKernel()
    yield MemoryEfficientKernel()


@functools.cache
def choose_kernel(
    device: torch.device, dtype: torch.dtype, head_dim: int, queries_per_key: int = 1, windowed: bool = False
) -> Kernel:
    """The fastest kernel that is exact on such tensors: on CUDA each is compared with the dense one, once a process.

    Args:
        queries_per_key: query heads that share a key/value head.
        windowed: whether sliding windows will be asked of it.

    Raises:
        ValueError: for a dtype that no kernel computes in.
    """
    if dtype not in BOUNDS:
        raise ValueError(f"No attention kernel computes in {dtype}. Use one of {', '.join(map(str, BOUNDS))}.")
    if device.type == "cpu":
        return CpuFlashKernel()
    return first_exact(candidates(), device, dtype, head_dim, queries_per_key, windowed)


def first_exact(
    kernels: Iterable[Kernel],
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    queries_per_key: int,
    windowed: bool,
) -> Kernel:
    """The first that fits and is exact, a line in the log for each that is not. If none is, the dense one, which takes
    short sequences only.
    """
    long_document = None
    for kernel in kernels:
        if not kernel.fits(device, dtype, head_dim):
            continue
        wrong = _disagreement(kernel, device, dtype, head_dim, queries_per_key, windowed)
        if wrong is not None:
            logger.warning(
                "longctx: the attention kernel %s is passed over for %s, head size %d, on %s: %s",
                *(kernel.name, dtype, head_dim, device, wrong),
            )
        elif isinstance(kernel, CudnnKernel):
            long_document = kernel
        else:
            return kernel if long_document is None else _LongDocuments(long_document, kernel)
    return ShortDenseKernel()


def _disagreement(kernel: Kernel, *where: Any) -> str | None:
    """Where the kernel is wrong; a library that this process has not loaded is tried in another one."""
    if isinstance(kernel, flash_attn.FlashAttentionKernel) and not kernel.is_loaded:
        return disagreement_elsewhere(kernel, *where)
    return disagreement(kernel, *where)


class _LongDocuments(Kernel):
    """One kernel for a long document that is alone, another for all else.

    cuDNN builds a plan for every new shape and keeps it for good, and the blocks of a ring have other shapes with every
    pack. So a shape goes to cuDNN from its second batch on, and no more than MAX_PLANS of them do.
    """

    def __init__(self, alone: CudnnKernel, others: Kernel):
        self.alone, self.others = alone, others
        self._first: OrderedDict[Shape, weakref.ref[Entries]] = OrderedDict()
        """The entries that the shape was first met in, of the REMEMBERED_SHAPES that were met last."""
        self._planned: set[Shape] = set()
        self.name = f"{others.name}; {alone.name} for one document of {LONG_DOCUMENT:,} tokens or more"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, entries: Entries, scale: float) -> tuple[Tensor, Tensor]:
        return self._kernel(entries).forward(q, k, v, entries, scale)

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        entries: Entries,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._kernel(entries).backward(grad_out, q, k, v, out, lse, entries, scale)

    def _kernel(self, entries: Entries) -> Kernel:
        if torch.are_deterministic_algorithms_enabled():  # cuDNN's backward is not
            return self.others
        is_long = self.alone.takes(entries) and entries.num_keys.max() >= LONG_DOCUMENT
        return self.alone if is_long and self._recurs(entries) else self.others

    def _recurs(self, entries: Entries) -> bool:
        """Whether the shape was met in another batch: all layers of one share its entries."""
        shape = int(entries.num_queries[0]), int(entries.num_keys[0]), entries.causal
        if shape in self._planned:
            return True
        first = self._first.setdefault(shape, weakref.ref(entries))
        self._first.move_to_end(shape)
        if len(self._first) > REMEMBERED_SHAPES:
            self._first.popitem(last=False)
        if first() is entries or len(self._planned) == MAX_PLANS:
            return False
        self._planned.add(shape)
        return True


def block_forward(q: Tensor, k: Tensor, v: Tensor, entries: Entries, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of the entries' queries over the entries' keys.

    q [1, H, S, D]; k, v [1, K, S', D] -> out [1, H, N, D] and lse [1, H, N], compact in entry order.

    Raises:
        ValueError: for a dtype that no kernel computes in, or values of another head size than queries and keys.
    """
    kernel = _kernel_for(q, k, v, entries)
    return kernel.forward(take(q, entries.q_rows), take(k, entries.kv_rows), take(v, entries.kv_rows), entries, scale)


def block_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    entries: Entries,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one block, given the final `out` and `lse` of all [1, H, S(, D)] queries.

    Returns dq [1, H, N, D], dk and dv [1, K, M, D], compact in entry order.
    """
    kernel = _kernel_for(q, k, v, entries)
    grad_out, q, out, lse = (take(x, entries.q_rows) for x in (grad_out, q, out, lse))
    return kernel.backward(grad_out, q, take(k, entries.kv_rows), take(v, entries.kv_rows), out, lse, entries, scale)


def _kernel_for(q: Tensor, k: Tensor, v: Tensor, entries: Entries) -> Kernel:
    if not q.shape[-1] == k.shape[-1] == v.shape[-1]:
        raise ValueError(
            f"Heads of queries, keys and values have sizes {q.shape[-1]}, {k.shape[-1]} and {v.shape[-1]}, which must "
            "be equal. Use a model whose attention heads are all of one size; multi-head latent attention is not."
        )
    return choose_kernel(q.device, q.dtype, q.shape[-1], q.shape[1] // k.shape[1], entries.window is not None)

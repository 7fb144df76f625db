"""The choice of the kernel for a block, and the block interface that attention is built on."""

from __future__ import annotations

import functools
import logging
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from longctx.attention.kernels import flash_attn
from longctx.attention.kernels.blockwise import CappedDenseKernel, CpuFlashKernel, DenseKernel, ShortDenseKernel
from longctx.attention.kernels.check import BOUNDS, disagreement, disagreement_elsewhere
from longctx.attention.kernels.cudnn import CudnnKernel
from longctx.attention.kernels.efficient import MemoryEfficientKernel
from longctx.attention.kernels.entries import Entries, Inputs, Kernel, Operator, take
from longctx.attention.kernels.varlen import AtenFlashKernel

logger = logging.getLogger(__name__)

LONG_DOCUMENT = 2048
"""Fewest tokens of a single document that goes to cuDNN; shorter ones have too many lengths to plan for each."""

MAX_PLANS = 64
"""Most shapes that cuDNN computes in a process. It never drops a plan, and forward and backward have one each."""

REMEMBERED_SHAPES = 1024

FLASH_ATTENTION: dict[str, type[flash_attn.FlashAttentionKernel]] = {
    "flash_attention_2": flash_attn.FlashAttention2,
    "flash_attention_3": flash_attn.FlashAttention3,
    "flash_attention_4": flash_attn.FlashAttention4,
}
"""The packages' kernels, by transformers' names for them."""

Shape: TypeAlias = tuple[int, int, bool]
"""Queries, keys, causal."""

_preferred: tuple[str | None, bool] = (None, False)
"""What `prefer` was given last."""


def prefer(name: str | None, *, always_the_same: bool = False) -> None:
    """Choose, from now on in this process, among the kernels that a name of `attn_implementation` stands for.

    Args:
        name: eager for the dense kernel, sdpa for torch's own, one of FLASH_ATTENTION for this package's (torch has a
            FlashAttention-2, too); None for all.
        always_the_same: whether a batch that is computed again must be rounded as before, so that cuDNN does not take
            shapes from their second batch on.
    """
    global _preferred
    _preferred = name, always_the_same


def candidates(name: str | None = None) -> Iterator[Kernel]:
    """Yield the kernels for CUDA that a name given to `prefer` stands for, the fastest first."""
    if name == "eager":
        yield CappedDenseKernel()
        return
    installed = [] if name == "sdpa" else list(flash_attn.installed())
    if name in FLASH_ATTENTION:
        yield from (kernel for kernel in installed if isinstance(kernel, FLASH_ATTENTION[name]))
        if name == "flash_attention_2":
            yield AtenFlashKernel()
        return
    yield from (kernel for kernel in installed if not isinstance(kernel, flash_attn.FlashAttention2))
    yield CudnnKernel()
    yield from (kernel for kernel in installed if isinstance(kernel, flash_attn.FlashAttention2))
    yield AtenFlashKernel()
    yield MemoryEfficientKernel()


def choose_kernel(inputs: Inputs) -> Kernel:
    """Return the fastest kernel that is exact on such tensors, of those that `prefer` has named.

    On CUDA each kernel is compared with the dense one, once a process.

    Raises:
        ValueError: for a dtype that no kernel computes in, or if the named FlashAttention is not exact on CUDA.
    """
    return _choose(*_preferred, inputs)


@functools.cache
def _choose(name: str | None, always_the_same: bool, inputs: Inputs) -> Kernel:
    device, dtype, head_dim, _, windowed, capped = inputs
    if dtype not in BOUNDS:
        raise ValueError(f"No attention kernel computes in {dtype}. Use one of {', '.join(map(str, BOUNDS))}.")
    if device.type == "cpu":
        return CappedDenseKernel() if capped or name == "eager" else CpuFlashKernel()
    kernels = (kernel for kernel in candidates(name) if not (always_the_same and isinstance(kernel, CudnnKernel)))
    kernel = first_exact(kernels, inputs)
    if name in FLASH_ATTENTION and isinstance(kernel, DenseKernel):
        kinds = "".join([", sliding windows"] * windowed + [", soft-capped scores"] * capped)
        reasons = [
            f"{kernel.name}: {_disagreement(kernel, inputs)}"
            for kernel in candidates(name)
            if kernel.fits(device, dtype, head_dim) and (kernel.caps_scores or not capped)
        ]
        raise ValueError(
            f"--attn_implementation {name} is not exact for {dtype}, heads of {head_dim}{kinds}, on {device} "
            f"({'; '.join(reasons) or 'not made for them'}). Leave it out for the fastest kernel that is exact."
        )
    return kernel


def first_exact(kernels: Iterable[Kernel], inputs: Inputs) -> Kernel:
    """Return the first kernel that fits and is exact, else a dense one; without a cap it takes short sequences only.

    An exact cuDNN kernel takes long documents, and the next exact kernel all else. Each that is not exact is logged.
    """
    device, dtype, head_dim, *_, capped = inputs
    long_document = None
    for kernel in kernels:
        if not kernel.fits(device, dtype, head_dim) or (capped and not kernel.caps_scores):
            continue
        wrong = _disagreement(kernel, inputs)
        if wrong is not None:
            logger.warning(
                "longctx: the attention kernel %s is passed over for %s, head size %d, on %s: %s",
                *(kernel.name, dtype, head_dim, device, wrong),
            )
        elif isinstance(kernel, CudnnKernel):
            long_document = kernel
        else:
            return kernel if long_document is None else _LongDocuments(long_document, kernel)
    return CappedDenseKernel() if capped else ShortDenseKernel()


def _disagreement(kernel: Kernel, inputs: Inputs) -> str | None:
    """Return where the kernel is wrong, or None. A library that is not loaded yet is tried in another process."""
    if isinstance(kernel, flash_attn.FlashAttentionKernel) and not kernel.is_loaded:
        return disagreement_elsewhere(kernel, inputs)
    return disagreement(kernel, inputs)


class _LongDocuments(Kernel):
    """One kernel for a long document that is alone, another for all else.

    cuDNN builds a plan for every new shape and never drops it, and the blocks of a ring have other shapes in every
    batch. So a shape goes to cuDNN from its second batch on, and at most MAX_PLANS shapes do.
    """

    def __init__(self, alone: CudnnKernel, others: Kernel):
        self.alone, self.others = alone, others
        self._first: OrderedDict[Shape, weakref.ref[Entries]] = OrderedDict()
        """The entries in which each shape occurred first, of the REMEMBERED_SHAPES shapes that occurred last."""
        self._planned: set[Shape] = set()
        self.name = f"{others.name}; {alone.name} for one document of {LONG_DOCUMENT:,} tokens or more"

    def forward(self, q, k, v, entries, scale):
        return self._kernel(entries).forward(q, k, v, entries, scale)

    def backward(self, grad_out, q, k, v, out, lse, entries, scale):
        return self._kernel(entries).backward(grad_out, q, k, v, out, lse, entries, scale)

    def operator(self, entries: Entries) -> Operator | None:
        return self._kernel(entries).operator(entries)

    def _kernel(self, entries: Entries) -> Kernel:
        if torch.are_deterministic_algorithms_enabled():  # cuDNN's backward is not deterministic
            return self.others
        is_long = self.alone.takes(entries) and entries.num_keys.max() >= LONG_DOCUMENT
        return self.alone if is_long and self._recurs(entries) else self.others

    def _recurs(self, entries: Entries) -> bool:
        """Whether cuDNN computes this shape: it occurred in another batch, and it has a plan or may get one.

        All layers of a batch share its entries.
        """
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
    """Compute attention of the entries' queries over the entries' keys.

    q [1, H, S, D]; k, v [1, K, S', D] -> out [1, H, N, D] and lse [1, H, N], compact in entry order.

    Raises:
        ValueError: for a dtype that no kernel computes in, or values of another head size than queries and keys.
    """
    kernel = _kernel_for(q, k, v, entries)
    return kernel.forward(take(q, entries.q_rows), take(k, entries.kv_rows), take(v, entries.kv_rows), entries, scale)


def block_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, entries: Entries, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of one block, given the final `out` and `lse` of all [1, H, S(, D)] queries.

    Return dq [1, H, N, D], dk and dv [1, K, M, D], compact in entry order.
    """
    kernel = _kernel_for(q, k, v, entries)
    grad_out, q, out, lse = (take(x, entries.q_rows) for x in (grad_out, q, out, lse))
    return kernel.backward(grad_out, q, take(k, entries.kv_rows), take(v, entries.kv_rows), out, lse, entries, scale)


def block_operator(q: Tensor, k: Tensor, v: Tensor, entries: Entries) -> Operator | None:
    """Return the differentiable operator that computes a block of all rows in order, or None if it takes more calls.

    Raises:
        ValueError: as `block_forward` does.
    """
    return _kernel_for(q, k, v, entries).operator(entries)


def _kernel_for(q: Tensor, k: Tensor, v: Tensor, entries: Entries) -> Kernel:
    if not q.shape[-1] == k.shape[-1] == v.shape[-1]:
        raise ValueError(
            f"Heads of queries, keys and values have sizes {q.shape[-1]}, {k.shape[-1]} and {v.shape[-1]}, which must "
            "be equal. Pad the values with zeros to the size of the queries and keys."
        )
    windowed, capped = entries.window is not None, entries.softcap is not None
    kernel = choose_kernel(Inputs(q.device, q.dtype, q.shape[-1], q.shape[1] // k.shape[1], windowed, capped))
    assert kernel.caps_scores or not capped, f"the kernel {kernel.name} would leave out the soft cap of scores"
    return kernel

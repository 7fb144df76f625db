"""Local attention kernels over packed segments; the only file that knows them.

A kernel works on one flattened row and a list of entries. An entry pairs a range of queries with a range of
keys: in causal entries the queries are the last of the keys' own tokens, full entries attend all to all.

Shape legend: H query heads, K key/value heads (H a multiple of K), S tokens held, N tokens in entries, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

MAX_QUERY_BLOCK = 512
"""Queries a call where a window or a lead of keys needs a mask, which has this many rows."""

FLASH_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class Entries:
    """Pairs of token ranges that attend to each other.

    A query token, and likewise a key token, lies in at most one entry, so results are written, never summed.
    """

    q_ranges: np.ndarray
    """int64 [n, 2]: first and past-the-last query row of each entry, no range empty."""
    kv_ranges: np.ndarray
    """int64 [n, 2]: the same for keys and values."""
    causal: bool
    """Whether a query sees the keys up to itself: query i of n those j of m >= n keys with j <= i + m - n."""
    window: int | None = None
    """Causal entries only: of those keys a query sees the last `window`, itself included (a model's sliding_window)."""

    def __post_init__(self) -> None:
        for name, ranges in (("q_ranges", self.q_ranges), ("kv_ranges", self.kv_ranges)):
            assert (ranges[:, 0] < ranges[:, 1]).all(), f"empty range in {name}: {ranges}"
        if self.causal:
            assert (np.diff(self.kv_ranges) >= np.diff(self.q_ranges)).all(), (
                "a causal entry has fewer keys than queries"
            )
        if self.window is not None and (self.window < 1 or not self.causal):
            kind = "causal" if self.causal else "full"
            raise ValueError(f"A sliding window of {self.window} over {kind} entries: use 1 or more, over causal ones.")

    @classmethod
    def of_documents(cls, cu_seqlens: np.ndarray, window: int | None = None) -> Entries:
        """Causal entries of whole documents from their boundaries, int [n + 1]."""
        ranges = np.stack((cu_seqlens[:-1], cu_seqlens[1:]), axis=1).astype(np.int64)
        return cls(ranges, ranges, causal=True, window=window)

    def __len__(self) -> int:
        return len(self.q_ranges)

    @functools.cached_property
    def q_rows(self) -> slice | np.ndarray:
        """The query rows of all entries in entry order: a slice where they are contiguous, else int64 [N]."""
        return _rows(self.q_ranges)

    @functools.cached_property
    def kv_rows(self) -> slice | np.ndarray:
        """The key rows of all entries in entry order, likewise."""
        return _rows(self.kv_ranges)

    def compact(self) -> Iterator[tuple[slice, slice]]:
        """Each entry's (queries, keys) as slices of the rows taken in entry order."""
        q_bounds, kv_bounds = _boundaries(self.q_ranges), _boundaries(self.kv_ranges)
        for i in range(len(self)):
            yield slice(q_bounds[i], q_bounds[i + 1]), slice(kv_bounds[i], kv_bounds[i + 1])


def take(x: Tensor, rows: slice | np.ndarray) -> Tensor:
    """Rows of dimension 2: [1, H, S, D] or [1, H, S] -> [1, H, N, D] or [1, H, N]; a view where rows is a slice."""
    if isinstance(rows, slice):
        return x[:, :, rows]
    return x.index_select(2, torch.from_numpy(rows).to(x.device))


def put(x: Tensor, rows: slice | np.ndarray, values: Tensor) -> None:
    """Write rows of dimension 2 in place, the inverse of `take`."""
    if isinstance(rows, slice):
        x[:, :, rows] = values
    else:
        x.index_copy_(2, torch.from_numpy(rows).to(x.device), values)


def add(x: Tensor, rows: slice | np.ndarray, values: Tensor) -> None:
    """Add to rows of dimension 2 in place; a row occurs once."""
    if isinstance(rows, slice):
        x[:, :, rows] += values
    else:
        x.index_add_(2, torch.from_numpy(rows).to(x.device), values.to(x.dtype))


class Kernel(Protocol):
    """Attention of one entry list, given rows already taken in entry order."""

    name: str

    def forward(self, q: Tensor, k: Tensor, v: Tensor, entries: Entries, scale: float) -> tuple[Tensor, Tensor]:
        """q [1, H, N, D], k and v [1, K, M, D] -> out [1, H, N, D] of q's dtype, lse [1, H, N] fp32 or wider."""

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
        """Gradients of q, k, v; `out` and `lse` may be those of a wider softmax that these entries are a part of."""


class _BlockwiseKernel:
    """Call after call, by `_forward` and `_backward`: an entry each, or a block of its queries where it needs a mask.

    A call has a causal flag, which is for as many keys as queries, or an additive mask [queries, keys], or neither.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, entries: Entries, scale: float) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = q.new_empty(q.shape[:3], dtype=_wide(q))
        for at_q, at_kv, causal, mask in _calls(entries, q):
            rows = q[:, :, at_q], k[:, :, at_kv], v[:, :, at_kv]
            out[:, :, at_q], lse[:, :, at_q] = self._forward(*rows, causal, mask, scale)
        return out, lse

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
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format, dtype=_wide(x)) for x in (k, v))
        for at_q, at_kv, causal, mask in _calls(entries, q):
            rows = grad_out[:, :, at_q], q[:, :, at_q], k[:, :, at_kv], v[:, :, at_kv], out[:, :, at_q], lse[:, :, at_q]
            dq[:, :, at_q], *grads = self._backward(*rows, causal, mask, scale)
            for total, grad in zip((dk, dv), grads, strict=True):
                total[:, :, at_kv] += grad  # blocks of one entry share keys
        return dq, dk.to(k.dtype), dv.to(v.dtype)

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError


class CpuFlashKernel(_BlockwiseKernel):
    """torch's blocked CPU attention; native GQA, fp64 to bf16."""

    name = "aten flash for CPU"

    def _forward(self, q, k, v, causal, mask, scale):
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return forward(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)

    def _backward(self, grad, q, k, v, out, lse, causal, mask, scale):
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)


class CudaFlashKernel:
    """torch's own varlen FlashAttention-2 on CUDA, one call for all entries; fp16 and bf16."""

    name = "aten varlen flash"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, entries: Entries, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            _rows_first(q),
            _rows_first(k),
            _rows_first(v),
            *_varlen(entries, q.device),
            0.0,
            entries.causal,
            False,
            scale=scale,
            **_aten_window(entries),
        )
        return out.transpose(0, 1)[None], lse[None]

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
        no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device)
        grads = torch.ops.aten._flash_attention_backward(
            _rows_first(grad_out),
            _rows_first(q),
            _rows_first(k),
            _rows_first(v),
            _rows_first(out),
            lse[0].contiguous(),
            *_varlen(entries, q.device),
            0.0,
            entries.causal,
            no_dropout,
            torch.empty(0, device=q.device),
            scale=scale,
            **_aten_window(entries),
        )
        dq, dk, dv = (grad.transpose(0, 1)[None] for grad in grads)
        return dq, dk, dv


class DenseKernel(_BlockwiseKernel):
    """Plain torch, one score matrix a call: any device and dtype, O(L²) memory. The fallback and the yardstick."""

    name = "dense"

    def _forward(self, q, k, v, causal, mask, scale):
        scores = self._scores(q, k, causal, mask, scale)
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp()
        return (weights @ _repeat_heads(v, q).to(weights)).to(q.dtype), lse

    def _backward(self, grad, q, k, v, out, lse, causal, mask, scale):
        weights = (self._scores(q, k, causal, mask, scale) - lse[..., None]).exp()
        grad, out = grad.to(weights), out.to(weights)
        grad_weights = grad @ _repeat_heads(v, q).to(weights).transpose(-1, -2)
        grad_scores = weights * (grad_weights - (grad * out).sum(-1, keepdim=True)) * scale
        dq = grad_scores @ _repeat_heads(k, q).to(weights)
        dk = _sum_heads(grad_scores.transpose(-1, -2) @ q.to(weights), k)
        dv = _sum_heads(weights.transpose(-1, -2) @ grad, v)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    @staticmethod
    def _scores(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None, scale: float) -> Tensor:
        scores = q.to(_wide(q)) @ _repeat_heads(k, q).to(_wide(q)).transpose(-1, -2) * scale
        if causal:
            mask = _mask(q.shape[2], k.shape[2], k.shape[2], q)
        return scores if mask is None else scores + mask


def choose_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel:
    """The fastest exact kernel for tensors of this device, dtype and head size."""
    if device.type == "cpu":
        return CpuFlashKernel()
    fits_flash = dtype in FLASH_DTYPES and head_dim % 8 == 0 and head_dim <= 256
    if device.type == "cuda" and fits_flash and torch.cuda.get_device_capability(device) >= (8, 0):
        return CudaFlashKernel()
    return DenseKernel()


def block_forward(q: Tensor, k: Tensor, v: Tensor, entries: Entries, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of the entries' queries over the entries' keys.

    q [1, H, S, D]; k, v [1, K, S', D] -> out [1, H, N, D] and lse [1, H, N], compact in entry order.
    """
    kernel = choose_kernel(q.device, q.dtype, q.shape[-1])
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
    kernel = choose_kernel(q.device, q.dtype, q.shape[-1])
    grad_out, q, out, lse = (take(x, entries.q_rows) for x in (grad_out, q, out, lse))
    return kernel.backward(grad_out, q, take(k, entries.kv_rows), take(v, entries.kv_rows), out, lse, entries, scale)


class VarlenAttention(torch.autograd.Function):
    """Causal attention within each document of one flattened row, on one device.

    q [1, H, S, D]; k, v [1, K, S, D]; entries cover every row once, in order.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, entries: Entries, scale: float) -> Tensor:
        out, lse = block_forward(q, k, v, entries, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.entries, ctx.scale = entries, scale
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = block_backward(grad_out, q, k, v, out, lse, ctx.entries, ctx.scale)
        return dq, dk, dv, None, None


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: np.ndarray,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention within each document: q [1, H, S, D], k and v [1, K, S, D] -> [1, H, S, D].

    Args:
        cu_seqlens: int [n + 1], boundaries of the documents, from 0 to S.
        scale: of the scores before the softmax; 1/sqrt(D) where None.
        window: keys that a query sees, itself and those before it (a model's sliding_window); all where None.

    Raises:
        ValueError: for a window below 1.
    """
    entries = Entries.of_documents(np.asarray(cu_seqlens), window)
    return VarlenAttention.apply(q, k, v, entries, q.shape[-1] ** -0.5 if scale is None else scale)


def _rows(ranges: np.ndarray) -> slice | np.ndarray:
    if len(ranges) == 0:
        return slice(0, 0)
    if (ranges[1:, 0] == ranges[:-1, 1]).all():
        return slice(int(ranges[0, 0]), int(ranges[-1, 1]))
    return np.concatenate([np.arange(start, stop) for start, stop in ranges])


def _boundaries(ranges: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(ranges[:, 1] - ranges[:, 0])))


def _rows_first(x: Tensor) -> Tensor:
    """[1, H, N, D] -> [N, H, D]"""
    return x[0].transpose(0, 1)


def _varlen(entries: Entries, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    cu_q, cu_kv = (
        torch.from_numpy(_boundaries(ranges).astype(np.int32)).to(device)
        for ranges in (entries.q_ranges, entries.kv_ranges)
    )
    longest = [int((ranges[:, 1] - ranges[:, 0]).max()) for ranges in (entries.q_ranges, entries.kv_ranges)]
    return cu_q, cu_kv, longest[0], longest[1]


def _aten_window(entries: Entries) -> dict[str, int]:
    """The operator's window, counted without the query's own key; its causal flag is aligned at the last key."""
    return {} if entries.window is None else {"window_size_left": entries.window - 1, "window_size_right": 0}


def _calls(entries: Entries, q: Tensor) -> Iterator[tuple[slice, slice, bool, Tensor | None]]:
    """Queries, keys, causal flag and additive mask of each call of a blockwise kernel; every query sees a key."""
    longest = int(np.diff(entries.kv_ranges).max(initial=1))
    window = min(entries.window or longest, longest)
    block = min(max(window, 64), MAX_QUERY_BLOCK)
    mask = None
    for at_q, at_kv in entries.compact():
        num_queries, num_keys = at_q.stop - at_q.start, at_kv.stop - at_kv.start
        if not entries.causal or num_queries == num_keys <= window:
            yield at_q, at_kv, entries.causal, None
            continue
        if mask is None:
            mask = _mask(block, block + window - 1, window, q)
        shift = at_kv.stop - at_q.stop
        for start in range(at_q.start, at_q.stop, block):
            stop = min(start + block, at_q.stop)
            keys = slice(max(start + shift + 1 - window, at_kv.start), stop + shift)
            corner = mask[start - stop :, keys.start - keys.stop :]
            yield slice(start, stop), keys, False, corner


def _mask(num_queries: int, num_keys: int, window: int, like: Tensor) -> Tensor:
    """0 where a query sees a key, else -inf, of `like`'s dtype; the last query is the last key's own."""
    ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=like.device)
    own = num_keys - num_queries
    hidden = ones.triu(own + 1) | ones.tril(own - window)
    return torch.zeros_like(ones, dtype=like.dtype).masked_fill_(hidden, float("-inf"))


def _wide(x: Tensor) -> torch.dtype:
    """What sums over tensors of x's dtype are kept in."""
    return torch.promote_types(x.dtype, torch.float32)


def _repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """[1, K, M, D] -> [1, H, M, D]: each key/value head once for every query head that uses it."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _sum_heads(grad: Tensor, x: Tensor) -> Tensor:
    """[1, H, M, D] -> [1, K, M, D]: the adjoint of `_repeat_heads`."""
    return grad.unflatten(1, (x.shape[1], -1)).sum(2)

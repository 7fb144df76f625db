"""What a kernel computes, and its interface.

Entries are pairs of token ranges that attend to each other, and the rows that they occupy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import profiler

from longctx.regions import clock, region
from longctx.sequence.host_tensors import send


class Rows:
    """The row numbers of token ranges, one range after the other.

    Args:
        ranges: int64 [n, 2], first and past-the-last row of each range; no row occurs twice.
    """

    def __init__(self, ranges: np.ndarray):
        self.as_slice: slice | None = None
        """The rows if they are contiguous; else None."""
        self._on: dict[torch.device, Tensor] = {}
        if (ranges[1:, 0] == ranges[:-1, 1]).all():
            self.as_slice = slice(int(ranges[0, 0]), int(ranges[-1, 1])) if len(ranges) else slice(0, 0)
        else:
            self._rows = np.concatenate([np.arange(start, stop) for start, stop in ranges])

    def on(self, device: torch.device) -> Tensor:
        """Return rows that are not contiguous, int64 [N], which are copied to a device once."""
        if device not in self._on:
            self._on[device] = upload(self._rows, device)
        return self._on[device]


@dataclass(frozen=True, eq=False)
class Varlen:
    """The arguments of FlashAttention's varlen calls for entries, by FlashAttention's names."""

    cu_seqlens_q: Tensor
    """int32 [n + 1], on the device: boundaries of the entries' queries among the rows in entry order."""
    cu_seqlens_k: Tensor
    """int32 [n + 1]: the same for keys and values."""
    max_seqlen_q: int
    """At least 2: for 1, version 2 treats grouped heads differently and can return a wrong lse (vLLM's fork, #87)."""
    max_seqlen_k: int
    causal: bool
    """Whether each query sees only the keys up to its own, aligned at the last key."""
    window_size_left: int
    """Keys before its own that a query sees; -1 means all."""
    window_size_right: int
    """Keys after its own that a query sees; -1 means all."""
    softcap: float
    """c of scores c·tanh(s/c); 0 for plain scores."""


@dataclass(frozen=True, eq=False)
class Entries:
    """Pairs of token ranges that attend to each other.

    Each query token and each key token is in at most one entry, so results are written, never summed. The row numbers
    are copied to a device once: use one object for all layers of a batch.
    """

    q_ranges: np.ndarray
    """int64 [n, 2]: first and past-the-last query row of each entry, no range empty."""
    kv_ranges: np.ndarray
    """int64 [n, 2]: the same for keys and values."""
    causal: bool
    """Whether a query sees only the keys up to its own: query i of n sees key j of m >= n if j <= i + m - n."""
    window: int | None = None
    """How many of those keys a query sees, its own included (a model's sliding_window); None means all. Causal only."""
    softcap: float | None = None
    """c, if the softmax is over c·tanh(s/c) instead of the scaled scores s; None for plain scores."""

    def __post_init__(self) -> None:
        for name, ranges in (("q_ranges", self.q_ranges), ("kv_ranges", self.kv_ranges)):
            assert (ranges[:, 0] < ranges[:, 1]).all(), f"empty range in {name}: {ranges}"
        if self.causal:
            assert (self.num_keys >= self.num_queries).all(), "a causal entry has fewer keys than queries"
        if self.window is not None and (self.window < 1 or not self.causal):
            kind = "causal" if self.causal else "full"
            raise ValueError(
                f"A sliding window of {self.window} over {kind} entries is not supported. Use a window of at "
                "least 1, and causal entries."
            )

    @classmethod
    def of_documents(cls, cu_seqlens: np.ndarray, window: int | None = None, softcap: float | None = None) -> Entries:
        """Return causal entries of whole documents from their boundaries, int [n + 1]."""
        ranges = np.stack((cu_seqlens[:-1], cu_seqlens[1:]), axis=1).astype(np.int64)
        return cls(ranges, ranges, causal=True, window=window, softcap=softcap)

    def __len__(self) -> int:
        return len(self.q_ranges)

    @property
    def num_queries(self) -> np.ndarray:
        """Number of queries of each entry, int64 [n]."""
        return self.q_ranges[:, 1] - self.q_ranges[:, 0]

    @property
    def num_keys(self) -> np.ndarray:
        """Number of keys of each entry, int64 [n]."""
        return self.kv_ranges[:, 1] - self.kv_ranges[:, 0]

    @functools.cached_property
    def is_one_call(self) -> bool:
        """Whether it is one entry without a mask, or with the causal mask of as many queries as keys."""
        is_square = (self.num_queries == self.num_keys).all()
        return len(self) == 1 and self.window is None and bool(is_square or not self.causal)

    @functools.cached_property
    def q_rows(self) -> Rows:
        """The query rows of all entries in entry order."""
        return Rows(self.q_ranges)

    @functools.cached_property
    def kv_rows(self) -> Rows:
        """The key rows of all entries in entry order."""
        return Rows(self.kv_ranges)

    @functools.cached_property
    def compact(self) -> list[tuple[slice, slice]]:
        """Each entry's queries and keys as slices of the rows taken in entry order."""
        q_bounds, kv_bounds = (_boundaries(lengths).tolist() for lengths in (self.num_queries, self.num_keys))
        slices = ([slice(*ends) for ends in pairwise(bounds)] for bounds in (q_bounds, kv_bounds))
        return list(zip(*slices, strict=True))

    def varlen(self, device: torch.device) -> Varlen:
        """Return the arguments of one varlen call on the device for all entries."""
        if device not in self._varlen:
            self._varlen[device] = Varlen(
                cu_seqlens_q=upload(_int32(_boundaries(self.num_queries)), device),
                cu_seqlens_k=upload(_int32(_boundaries(self.num_keys)), device),
                max_seqlen_q=max(2, int(self.num_queries.max())),
                max_seqlen_k=int(self.num_keys.max()),
                causal=self.causal,
                window_size_left=-1 if self.window is None else self.window - 1,
                window_size_right=0 if self.causal else -1,
                softcap=self.softcap or 0.0,
            )
        return self._varlen[device]

    @functools.cached_property
    def _varlen(self) -> dict[torch.device, Varlen]:
        return {}


def take(x: Tensor, rows: Rows) -> Tensor:
    """Take rows of dimension 2: [1, H, S, D] or [1, H, S] -> [1, H, N, D] or [1, H, N]; a view if contiguous."""
    at = rows.as_slice
    if at is None:
        return x.index_select(2, rows.on(x.device))
    return x if at.stop - at.start == x.shape[2] else x[:, :, at]


def put(x: Tensor, rows: Rows, values: Tensor) -> None:
    """Write rows of dimension 2 in place, the inverse of `take`."""
    if rows.as_slice is not None:
        x[:, :, rows.as_slice] = values
    else:
        x.index_copy_(2, rows.on(x.device), values.to(x.dtype))


def add(x: Tensor, rows: Rows, values: Tensor) -> None:
    """Add to rows of dimension 2 in place."""
    if rows.as_slice is not None:
        x[:, :, rows.as_slice] += values
    else:
        x.index_add_(2, rows.on(x.device), values.to(x.dtype))


def merge(out: Tensor, lse: Tensor, rows: Rows, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge a block's softmax into the running one, for the given query rows, in place.

    Args:
        out, lse: [1, H, S, D] and [1, H, S], lse in fp32 or wider, and out as well if more than one block is merged.
        block_out, block_lse: the same for those rows and other keys.
    """
    old_out, old_lse = take(out, rows), take(lse, rows)
    weight = torch.sigmoid(block_lse - old_lse)[..., None]
    put(out, rows, old_out - weight * (old_out - block_out))
    put(lse, rows, old_lse - F.logsigmoid(old_lse - block_lse))


def upload(x: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device, without making the host wait."""
    return send(torch.from_numpy(x), device)


def _boundaries(lengths: np.ndarray) -> np.ndarray:
    return np.append(0, np.cumsum(lengths))


def _int32(boundaries: np.ndarray) -> np.ndarray:
    """Return the boundaries as int32, which kernels read; raise ValueError if they are too large for it."""
    if boundaries[-1] > np.iinfo(np.int32).max:
        raise ValueError(
            f"attention over {boundaries[-1]:,} tokens in one call: kernels count {np.iinfo(np.int32).max:,} at most, "
            "in int32. Use shorter sequences, or more ranks for each sequence."
        )
    return boundaries.astype(np.int32)


Operator: TypeAlias = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""(q [1, H, N, D], k and v [1, K, M, D], scale) -> out [1, H, N, D], differentiable."""


def count_backward(out: Tensor) -> Tensor:
    """Return an operator's `out`. While somebody measures, its backward pass is shown and counted as attention's."""
    node = out.grad_fn
    if node is not None and (clock.is_running or profiler._is_profiler_enabled):
        backward = region("attention backward", "attention")
        node.register_prehook(lambda grads: backward.__enter__())
        node.register_hook(lambda *grads: backward.__exit__())
    return out


class Inputs(NamedTuple):
    """The properties of attention's inputs by which a kernel is chosen and checked."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    queries_per_key: int = 1
    """Query heads that share a key/value head."""
    windowed: bool = False
    """Whether entries have sliding windows."""
    capped: bool = False
    """Whether scores have a soft cap."""


class Kernel:
    """Attention of one list of entries, over rows that are already taken in entry order.

    Shape legend: H query heads, K key/value heads (H a multiple of K), N queries, M keys, D head size.
    """

    name: str
    caps_scores = False
    """Whether it computes entries with a soft cap."""

    def fits(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        """Whether the kernel supports such tensors; `check` finds out whether it is exact on them."""
        return True

    def takes(self, entries: Entries) -> bool:
        """Whether the kernel computes such entries."""
        return True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, entries: Entries, scale: float) -> tuple[Tensor, Tensor]:
        """q [1, H, N, D], k and v [1, K, M, D] -> out [1, H, N, D] of q's dtype, lse [1, H, N] fp32 or wider.

        lse is the natural logarithm of the sum of the exponentials of a query's scaled scores.
        """
        raise NotImplementedError

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
        """Return the gradients of q, k and v.

        `out` and `lse` may be those of a wider softmax, of which these entries are a part.
        """
        raise NotImplementedError

    def operator(self, entries: Entries) -> Operator | None:
        """Return the kernel's own differentiable operator if one call of it computes such entries, with equal bits."""
        return None

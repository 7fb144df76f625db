"""Attention in windows or chunks over a sequence cut by a `RingPlan`: only the tokens that these reach travel.

Every rank computes its own pieces of documents, each with up to `window - 1` earlier tokens of its document, or with
those of its chunk: pieces are cut where chunks begin. Those tokens that other ranks hold arrive in one all-to-all,
which moves far less than a ring. The keys of a piece are then a contiguous range of its document that ends where the
piece ends, so one varlen call computes all pieces.

Shape legend: P ranks, S tokens a rank, R tokens received, N key rows in piece order, K key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from longctx.attention.kernels import Entries, block_backward, block_forward, upload
from longctx.regions import region
from longctx.ring.plan import IntArray, PlacedPieces, RingPlan, ranges
from longctx.ring.transport import check_shard, fuse, split


@dataclass(frozen=True, eq=False)
class WindowPlan:
    """What one rank sends, receives and computes for one window."""

    send_rows: IntArray
    """int64 [sum of send_sizes]: rows of this rank's shard that others need, sorted by the rank that receives them."""
    send_sizes: list[int]
    """Tokens sent to each of the P ranks."""
    receive_sizes: list[int]
    """Tokens received from each of the P ranks. In this order they follow the shard's own S rows."""
    q_bounds: IntArray
    """int64 [pieces + 1]: boundaries of the pieces in the shard."""
    kv_bounds: IntArray
    """int64 [pieces + 1]: boundaries of each piece's keys in `kv_rows`."""
    kv_rows: IntArray
    """int64 [N]: row of every key, piece after piece, in the document's order; own rows are below S, others above."""


def plan_window(plan: RingPlan, boundaries: IntArray, window: int | None, rank: int) -> WindowPlan:
    """Return what `rank` sends, receives and computes. Every rank derives it from the same plan.

    Args:
        boundaries: int64 [m + 1], of the documents, or of chunks of documents that do not see each other.
        window: tokens of its chunk that each query sees, itself included; None means all tokens before it.
    """
    pieces, begin, of_chunk = _cut_at(plan, boundaries)
    window = window or int(np.diff(boundaries).max())
    first = np.maximum(of_chunk, begin - (window - 1))  # the first token a piece sees
    order = np.argsort(begin)
    # The pieces cut the sequence into consecutive ranges, so what a piece sees is a range of pieces up to itself.
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    from_place = np.searchsorted(begin[order], first, side="right") - 1
    count = place - from_place + 1
    needer = np.repeat(np.arange(len(order)), count)
    source = order[np.arange(len(needer)) - np.repeat(np.cumsum(count) - count - from_place, count)]
    low = np.maximum(first[needer], begin[source])  # start of each part, which ends with the source piece
    travels = pieces.rank[needer] != pieces.rank[source]

    # A rank is sent one tail of a piece: the longest that any of its own pieces sees.
    tail = np.full((plan.world_size, len(order)), np.iinfo(np.int64).max)
    np.minimum.at(tail, (pieces.rank[needer[travels]], source[travels]), low[travels])
    end = pieces.offset + pieces.length
    lengths = np.where(tail < np.iinfo(np.int64).max, begin + pieces.length - tail, 0)  # [P, pieces]
    receive = lengths[rank]  # pieces are sorted by rank, so these are sorted by source rank
    send = np.where(pieces.rank == rank, lengths, 0)
    received_end = plan.num_tokens // plan.world_size + np.cumsum(receive)

    own = pieces.rank[needer] == rank
    needer, source, low, travels = needer[own], source[own], low[own], travels[own]
    size = begin[source] + pieces.length[source] - low
    stop = np.where(travels, received_end[source], end[source])
    is_first = np.append(True, needer[1:] != needer[:-1])
    return WindowPlan(
        send_rows=np.concatenate([ranges(end - tokens, tokens) for tokens in send]),
        send_sizes=send.sum(1).tolist(),
        receive_sizes=np.bincount(pieces.rank, receive, plan.world_size).astype(np.int64).tolist(),
        q_bounds=np.append(pieces.offset[pieces.rank == rank], plan.num_tokens // plan.world_size),
        kv_bounds=np.append((np.cumsum(size) - size)[is_first], size.sum()),
        kv_rows=ranges(stop - size, size),
    )


def _cut_at(plan: RingPlan, boundaries: IntArray) -> tuple[PlacedPieces, IntArray, IntArray]:
    """Return the plan's pieces, cut at boundaries, and where each of them and its chunk begin in the sequence."""
    whole = plan._pieces
    begin = plan.cu_seqlens[whole.document] + whole.start
    chunk = np.searchsorted(boundaries, begin, side="right") - 1
    count = np.searchsorted(boundaries, begin + whole.length) - chunk
    piece = np.repeat(np.arange(len(count)), count)
    chunk = ranges(chunk, count)
    cut = np.maximum(begin[piece], boundaries[chunk])
    skipped = cut - begin[piece]
    length = np.minimum((begin + whole.length)[piece], boundaries[chunk + 1]) - cut
    document, start, rank, offset = (x[piece] for x in (whole.document, whole.start, whole.rank, whole.offset))
    return PlacedPieces(document, start + skipped, length, rank, offset + skipped), cut, boundaries[chunk]


class WindowSchedule:
    """Attention over the last tokens of each query's document that its window or its chunk has."""

    def __init__(
        self,
        plan: RingPlan,
        group: dist.ProcessGroup,
        boundaries: IntArray,
        window: int | None,
        softcap: float | None = None,
    ):
        self.plan, self.group = plan, group
        self.mine = mine = plan_window(plan, boundaries, window, dist.get_rank(group))
        q_ranges, kv_ranges = (np.stack((x[:-1], x[1:]), axis=1) for x in (mine.q_bounds, mine.kv_bounds))
        self.entries = Entries(q_ranges, kv_ranges, causal=True, window=window, softcap=softcap)
        self.rows: tuple[Tensor, Tensor] | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        check_shard(self.plan, q, k, v)
        return block_forward(q, *self._within_reach(k, v), self.entries, scale)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        keys_values = self._within_reach(k, v)
        dq, dk, dv = block_backward(grad_out, q, *keys_values, out, lse, self.entries, scale)
        send_rows, kv_rows = self._rows_on(q.device)
        grads = fuse(dk, dv).to(lse.dtype)
        num_tokens, num_received = k.shape[2], sum(self.mine.receive_sizes)
        grads = grads.new_zeros(num_tokens + num_received, *grads.shape[1:]).index_add_(0, kv_rows, grads)
        own, others = grads.split([num_tokens, num_received])
        home = self._exchange(others, self.mine.receive_sizes, self.mine.send_sizes)
        return dq, *split(own.index_add(0, send_rows, home))

    def _within_reach(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all pieces, [1, K, N, D] each."""
        send_rows, kv_rows = self._rows_on(k.device)
        own = fuse(k, v)
        received = self._exchange(own.index_select(0, send_rows), self.mine.send_sizes, self.mine.receive_sizes)
        return split(torch.cat((own, received)).index_select(0, kv_rows))

    def _exchange(self, tokens: Tensor, sizes: list[int], received_sizes: list[int]) -> Tensor:
        received = tokens.new_empty(sum(received_sizes), *tokens.shape[1:])
        with region("exchange", "communication"):
            dist.all_to_all_single(received, tokens.contiguous(), received_sizes, sizes, group=self.group)
        return received

    def _rows_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if self.rows is None:
            self.rows = upload(self.mine.send_rows, device), upload(self.mine.kv_rows, device)
        return self.rows

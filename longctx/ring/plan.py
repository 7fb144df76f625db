"""The ring-attention plan: which rank owns which token of a packed sequence, and what must travel.

Shape legend: T tokens of the packed sequence, n documents, P ranks, C = T/P tokens a rank.

A *piece* is a contiguous range of one document on one rank. A *legal pair* is a query and a key that it attends to. A
rank's tokens are ordered in its shard by document, and by position within a document, so that one varlen causal call
over the shard's own documents is exact: concatenating a document's non-adjacent pieces keeps causality. The other keys
that a rank's queries need are in other ranks' shards. At hop h (1..P-1) of the ring, rank r receives a prefix of the
shard of rank (r-h) mod P, and computes the rectangles ("entries") of legal pairs in it. Documents that others need lie
first in a shard, those needed farthest away before the others, so the prefix shrinks from hop to hop.

The `gather` transport needs nothing more: it gathers the first `prefix_tokens[s, 1]` K/V tokens of every shard s into
one buffer (shard s then begins at the sum of the lengths before it) and computes the same entries, with their K/V
ranges shifted by that beginning. Gradients are reduce-scattered over the same prefixes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RingStep:
    """What one rank does at one hop of the ring."""

    hop: int
    """Distance from the source, 1..P-1."""
    source: int
    """Rank that owns the K/V received at this hop, (rank - hop) mod P."""
    recv_tokens: int
    """Length of the prefix of the source's shard that arrives; 0 if nothing arrives."""
    entries: IntArray
    """int64 [m, 4]: (q_start, q_end) in this rank's shard, (kv_start, kv_end) in the source's shard.

    All pairs of a rectangle are legal. Rectangles are not empty, and within a step no two of them share a
    query or a key, so each step writes every out, lse, dK and dV row at most once.
    """

    @property
    def num_pairs(self) -> int:
        """Number of (query, key) pairs in the entries."""
        q_start, q_end, kv_start, kv_end = self.entries.T
        return int(((q_end - q_start) * (kv_end - kv_start)).sum())


@dataclass(frozen=True, eq=False)
class RankShard:
    """One rank's part of a `RingPlan`."""

    rank: int
    num_tokens: int
    """Tokens of the shard, T/P."""
    cu_seqlens: IntArray
    """int64 [m + 1]: document boundaries of the rank's own varlen causal call, from 0 to `num_tokens`."""
    prefix_tokens: IntArray
    """int64 [P]: at [h], how many leading tokens of THIS shard travel at hop h; at [0], `num_tokens`."""
    steps: tuple[RingStep, ...]
    """The hops 1..P-1 in order."""


@dataclass(frozen=True, eq=False)
class PlacedPieces:
    """Pieces sorted by rank and by place in the shard; every array is int64 [m]."""

    document: IntArray
    start: IntArray
    """First position within the document."""
    length: IntArray
    rank: IntArray
    offset: IntArray
    """First place within the shard."""


@dataclass(frozen=True, eq=False)
class RingPlan:
    """The rank that owns each token, and what every rank computes and sends at every hop. See `plan_ring`."""

    world_size: int
    cu_seqlens: IntArray
    """int64 [n + 1]: document boundaries of the whole sequence, as given."""
    area_per_rank: IntArray
    """int64 [P]: legal (query, key) pairs of each rank's queries."""
    prefix_tokens: IntArray
    """int64 [P, P]: at [s, h], how many leading tokens of shard s travel at hop h; at [s, 0], T/P."""
    _pieces: PlacedPieces

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole sequence, T."""
        return int(self.cu_seqlens[-1])

    @property
    def imbalance(self) -> float:
        """Largest attention work of a rank divided by the mean; 1.0 is perfect."""
        return float(self.area_per_rank.max() * self.world_size / self.area_per_rank.sum())

    @property
    def kv_tokens_sent(self) -> int:
        """K/V tokens sent, summed over ranks and hops; a full gather sends T * (P - 1)."""
        return int(self.prefix_tokens[:, 1:].sum())

    @cached_property
    def permutation(self) -> IntArray:
        """int64 [T]: sharded = tokens[permutation]; rank r owns sharded[r*T/P : (r+1)*T/P]."""
        length = self._pieces.length
        place = np.cumsum(length) - length
        shift = self.cu_seqlens[self._pieces.document] + self._pieces.start - place
        return np.arange(self.num_tokens) + np.repeat(shift, length)

    @cached_property
    def rank_of_token(self) -> IntArray:
        """int64 [T]: the rank that holds each original token, for inspection; `shard_tokens` cuts by `permutation`."""
        rank = np.empty(self.num_tokens, np.int64)
        rank[self.permutation] = np.repeat(np.arange(self.world_size), self.num_tokens // self.world_size)
        return rank

    @cached_property
    def work_per_hop(self) -> IntArray:
        """int64 [3, P, P]: at [:, rank, hop], the legal pairs, the entries they lie in, and the queries of these.

        At hop 0, a rank's own varlen causal call, the entries are documents. The values are sums over `shards`,
        computed without making those.
        """
        return _work_per_hop(self)

    @cached_property
    def shards(self) -> tuple[RankShard, ...]:
        """Every rank's shard. A rank that needs only its own calls `shard(rank)`, which is cheaper."""
        return tuple(self.shard(rank) for rank in range(self.world_size))

    def shard(self, rank: int) -> RankShard:
        """Return the shard of `rank`, which is made on the first call and kept.

        Raises:
            ValueError: if `rank` is not in 0..world_size-1.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be in 0..{self.world_size - 1} (world_size {self.world_size}), got {rank}")
        if rank not in self._shard_cache:
            self._shard_cache[rank] = _make_shard(self, rank)
        return self._shard_cache[rank]

    @cached_property
    def _shard_cache(self) -> dict[int, RankShard]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """Return all but arrays of T, which a data loader's worker need not send."""
        return {name: value for name, value in vars(self).items() if name not in ("permutation", "rank_of_token")}

    @cached_property
    def _split_table(self) -> _SplitTable:
        return _SplitTable.of(self._pieces, self.world_size)


@dataclass(frozen=True, eq=False)
class _SplitTable:
    """First and last piece of each of the S split documents on every rank; int64 [S, P] each, -1 if there is none."""

    first_start: IntArray
    first_offset: IntArray
    first_end: IntArray
    last_start: IntArray
    last_offset: IntArray
    last_end: IntArray

    @staticmethod
    def of(pieces: PlacedPieces, world_size: int) -> _SplitTable:
        """Return the table of the documents that lie on more than one rank, in document order."""
        row, selected = _split_rows(pieces)
        rank, start, offset = pieces.rank[selected], pieces.start[selected], pieces.offset[selected]
        # The pieces of one document on one rank are neighbours here: find the first and the last of them.
        changes = (row[1:] != row[:-1]) | (rank[1:] != rank[:-1])
        shape = (int(row.max()) + 1 if len(row) else 0, world_size)
        tables = []
        for chosen in (np.append(True, changes)[: len(row)], np.append(changes, True)[: len(row)]):
            for value in (start, offset, offset + pieces.length[selected]):
                table = np.full(shape, -1, np.int64)
                table[row[chosen], rank[chosen]] = value[chosen]
                tables.append(table)
        return _SplitTable(*tables)


def _split_rows(pieces: PlacedPieces) -> tuple[IntArray, IntArray]:
    """Return the table row of each piece of a split document, and the indices of those pieces."""
    num_documents = int(pieces.document.max()) + 1
    low = np.full(num_documents, np.iinfo(np.int64).max)
    high = np.full(num_documents, -1)
    np.minimum.at(low, pieces.document, pieces.rank)
    np.maximum.at(high, pieces.document, pieces.rank)
    is_split = high > low
    selected = np.flatnonzero(is_split[pieces.document])
    return (np.cumsum(is_split) - 1)[pieces.document[selected]], selected


def _make_shard(plan: RingPlan, rank: int) -> RankShard:
    own = plan._pieces.rank == rank
    document, offset = plan._pieces.document[own], plan._pieces.offset[own]
    num_tokens = plan.num_tokens // plan.world_size
    boundaries = np.append(offset[np.append(True, document[1:] != document[:-1])], num_tokens)
    steps = _make_steps(plan, rank)
    local = np.diff(boundaries)
    computed = int((local * (local + 1) // 2).sum()) + sum(step.num_pairs for step in steps)
    assert computed == plan.area_per_rank[rank], (
        f"rank {rank} computes {computed} legal pairs of {plan.area_per_rank[rank]}: pieces interleave"
    )
    return RankShard(
        rank=rank,
        num_tokens=num_tokens,
        cu_seqlens=boundaries,
        prefix_tokens=plan.prefix_tokens[rank],
        steps=steps,
    )


def _make_steps(plan: RingPlan, rank: int) -> tuple[RingStep, ...]:
    """Return the steps of one rank, for the hops in order.

    A document gives at most one rectangle per pair of ranks: its pieces on any two ranks are nested or one after the
    other, never interleaved, so all queries with a key on the source see the same keys there.
    """
    world_size, table, prefix = plan.world_size, plan._split_table, plan.prefix_tokens
    legal = (table.first_start >= 0) & (table.first_start < table.last_start[:, rank, None])
    legal[:, rank] = False
    row, source = np.nonzero(legal)
    entries = np.stack(_rectangles(table, row, np.full_like(row, rank), source), axis=1)
    hop = (rank - source) % world_size
    order = np.lexsort((entries[:, 0], hop))
    bounds = np.searchsorted(hop[order], np.arange(1, world_size + 1))
    return tuple(
        RingStep(
            hop=h,
            source=(rank - h) % world_size,
            recv_tokens=int(prefix[(rank - h) % world_size, h]),
            entries=entries[order[bounds[h - 1] : bounds[h]]],
        )
        for h in range(1, world_size)
    )


def _rectangles(
    table: _SplitTable, row: IntArray, rank: IntArray, source: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Return the columns of `RingStep.entries`: what queries on `rank` see of the same document on `source`."""
    all_of_q = table.first_start[row, rank] > table.first_start[row, source]
    all_of_kv = table.last_start[row, source] < table.last_start[row, rank]
    return (
        np.where(all_of_q, table.first_offset[row, rank], table.last_offset[row, rank]),
        table.last_end[row, rank],
        table.first_offset[row, source],
        np.where(all_of_kv, table.last_end[row, source], table.first_end[row, source]),
    )


def _work_per_hop(plan: RingPlan) -> IntArray:
    """Return `RingPlan.work_per_hop`: of the entries of split documents, and of each rank's own documents."""
    pieces, table, world_size = plan._pieces, plan._split_table, plan.world_size
    work = np.zeros((3, world_size, world_size), np.int64)
    row, rank = np.nonzero(table.first_start >= 0)
    count = np.bincount(row)[row]  # ranks that have a part of the document
    source = rank[ranges(np.searchsorted(row, row), count)]
    row, rank = np.repeat(row, count), np.repeat(rank, count)
    legal = (table.first_start[row, source] < table.last_start[row, rank]) & (rank != source)
    row, rank, source = row[legal], rank[legal], source[legal]
    q_start, q_end, kv_start, kv_end = _rectangles(table, row, rank, source)
    queries, hop = q_end - q_start, (rank - source) % world_size
    for of_rank, value in zip(work, (queries * (kv_end - kv_start), np.ones_like(row), queries), strict=True):
        np.add.at(of_rank, (rank, hop), value)
    new = np.append(True, (pieces.document[1:] != pieces.document[:-1]) | (pieces.rank[1:] != pieces.rank[:-1]))
    length, rank = np.add.reduceat(pieces.length, np.flatnonzero(new)), pieces.rank[new]
    for of_rank, value in zip(work[:, :, 0], (length * (length + 1) // 2, np.ones_like(length), length), strict=True):
        np.add.at(of_rank, rank, value)
    return work


def ranges(start: IntArray, length: IntArray) -> IntArray:
    """Return length[0] consecutive numbers from start[0], then length[1] numbers from start[1], and so on."""
    before = np.cumsum(length) - length
    return np.arange(int(length.sum())) + np.repeat(start - before, length)


class Pieces(NamedTuple):
    """Pieces in position order within each document, documents in any order; every array is int64 [m]."""

    document: IntArray
    length: IntArray
    rank: IntArray


def assemble(cu: IntArray, world_size: int, pieces: Pieces) -> RingPlan:
    """Return the plan for pieces given in position order within each document."""
    document, start, length, rank = merged(pieces)
    farthest = _farthest_hop(document, start, rank, world_size)
    order = _shard_order(document, start, rank, farthest)
    document, start, length, rank, farthest = (a[order] for a in (document, start, length, rank, farthest))
    num_tokens = int(cu[-1]) // world_size
    offset = np.cumsum(length) - length - rank * num_tokens
    prefix = np.zeros((world_size, world_size), np.int64)
    np.maximum.at(prefix, (rank, farthest), offset + length)
    prefix = np.maximum.accumulate(prefix[:, ::-1], axis=1)[:, ::-1]
    prefix[:, 0] = num_tokens
    return RingPlan(
        world_size=world_size,
        cu_seqlens=cu,
        area_per_rank=summed_area(start, length, rank, world_size),
        prefix_tokens=prefix,
        _pieces=PlacedPieces(document, start, length, rank, offset),
    )


def merged(pieces: Pieces) -> tuple[IntArray, ...]:
    """Drop empty pieces, sort by document and join neighbours on one rank. Return (document, start, length, rank)."""
    document, length, rank = pieces
    kept = np.flatnonzero(length)
    kept = kept[np.argsort(document[kept], kind="stable")]
    document, length, rank = document[kept], length[kept], rank[kept]
    new = np.flatnonzero(np.append(True, (document[1:] != document[:-1]) | (rank[1:] != rank[:-1])))
    length = np.add.reduceat(length, new)
    document, rank = document[new], rank[new]
    place = np.cumsum(length) - length
    first = np.flatnonzero(np.append(True, document[1:] != document[:-1]))
    start = place - np.repeat(place[first], np.diff(np.append(first, len(document))))
    return document, start, length, rank


def _farthest_hop(document: IntArray, start: IntArray, rank: IntArray, world_size: int) -> IntArray:
    """Return int64 [m]: the farthest hop at which each piece's K/V are needed, 0 if no other rank needs them.

    A rank needs a piece if it holds a later piece of the same document.
    """
    first = np.flatnonzero(np.append(True, document[1:] != document[:-1]))
    pieces = np.diff(np.append(first, len(document)))
    farthest = np.zeros(len(document), np.int64)
    pending = np.flatnonzero(np.repeat(pieces > 1, pieces))
    if not len(pending):
        return farthest
    row = np.zeros(len(document), np.int64)
    row[pending] = np.unique(document[pending], return_inverse=True)[1]
    last_start = np.full((int(row.max()) + 1, world_size), -1, np.int64)
    np.maximum.at(last_start, (row[pending], rank[pending]), start[pending])
    for hop in range(world_size - 1, 0, -1):
        needed = last_start[row[pending], (rank[pending] + hop) % world_size] > start[pending]
        farthest[pending[needed]] = hop
        pending = pending[~needed]
    return farthest


def _shard_order(document: IntArray, start: IntArray, rank: IntArray, hops: IntArray) -> IntArray:
    """Return the order of the pieces: by rank, then documents by farthest hop, descending, then by position."""
    num_ranks = int(rank.max()) + 1
    key = document * num_ranks + rank
    farthest = np.zeros(int(key.max()) + 1, np.int64)
    travels = hops > 0
    np.maximum.at(farthest, key[travels], hops[travels])
    return np.lexsort((start, document, -farthest[key], rank))


def summed_area(start: IntArray, length: IntArray, rank: IntArray, world_size: int) -> IntArray:
    """Return int64 [P]: the legal pairs of queries start..start+length-1 of their documents, summed by rank."""
    area = np.zeros(world_size, np.int64)
    np.add.at(area, rank, length * (2 * start + length + 1) // 2)
    return area

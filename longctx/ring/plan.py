"""The ring-attention plan: which rank owns which token of a packed sequence, and what must travel.

Shape legend: T tokens of the packed sequence, n documents, P ranks, C = T/P tokens a rank.

A *piece* is a contiguous range of one document on one rank. Tokens of a rank lie in its shard ordered by
document, and by position within a document, so that one varlen causal call over the shard's own documents is
exact: concatenating a document's non-adjacent pieces keeps causality. What a rank's queries miss is in other
ranks' shards. Around the ring, at hop h (1..P-1), rank r receives a prefix of the shard of rank (r-h) mod P
from its neighbour r-1, which held it at hop h-1, and computes the rectangles ("entries") of legal pairs in
it. Documents that others need lie first in a shard, those needed farthest away before the others, so the
prefix shrinks from hop to hop.

The `gather` transport needs nothing more: gather the first `prefix_tokens[s, 1]` K/V tokens of every shard s
into one buffer (shard s then begins at the sum of the lengths before it) and compute the same entries, their
K/V ranges shifted by that beginning; gradients are reduce-scattered over the same prefixes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

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
    """Length of the prefix of the source's shard received from rank - 1; 0: nothing is received."""
    send_tokens: int
    """Length of the prefix, of the buffer held at the hop before, that is sent to rank + 1; 0: nothing."""
    entries: IntArray
    """int64 [m, 4]: (q_start, q_end) in this rank's shard, (kv_start, kv_end) in the source's shard.

    All pairs of a rectangle are legal. Rectangles are not empty, and within a step no two of them share a
    query or a key, so each step writes every out, lse, dK and dV row at most once.
    """


@dataclass(frozen=True, eq=False)
class RankShard:
    """One rank's part of a `RingPlan`."""

    rank: int
    num_tokens: int
    """T/P."""
    cu_seqlens: IntArray
    """int64 [m + 1]: document boundaries of the rank's own varlen causal call, from 0 to `num_tokens`."""
    prefix_tokens: IntArray
    """int64 [P]: at [h], how many leading tokens of THIS shard travel at hop h; at [0], `num_tokens`."""
    steps: tuple[RingStep, ...]
    """The hops 1..P-1 in order."""


@dataclass(frozen=True, eq=False)
class _Pieces:
    """Pieces sorted by (rank, place in the shard); int64 [m] each."""

    document: IntArray
    start: IntArray
    """First position within the document."""
    length: IntArray
    rank: IntArray
    offset: IntArray
    """First place within the shard."""


@dataclass(frozen=True, eq=False)
class RingPlan:
    """Who owns which token, and what every rank computes and sends at every hop. See `plan_ring`."""

    world_size: int
    cu_seqlens: IntArray
    """int64 [n + 1]: document boundaries of the whole sequence, as given."""
    permutation: IntArray
    """int64 [T]: sharded = tokens[permutation]; rank r owns sharded[r*T/P : (r+1)*T/P]."""
    area_per_rank: IntArray
    """int64 [P]: legal (query, key) pairs of each rank's queries."""
    runs_per_rank: IntArray
    """int64 [P]: maximal contiguous ranges of original tokens in each shard."""
    prefix_tokens: IntArray
    """int64 [P, P]: at [s, h], how many leading tokens of shard s travel at hop h; at [s, 0], T/P."""
    _pieces: _Pieces

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.cu_seqlens[-1])

    @property
    def imbalance(self) -> float:
        """Largest attention work of a rank over the mean; 1.0 is perfect."""
        return float(self.area_per_rank.max() * self.world_size / self.area_per_rank.sum())

    @property
    def kv_tokens_sent(self) -> int:
        """K/V tokens sent, summed over ranks and hops; a full gather is T * (P - 1)."""
        return int(self.prefix_tokens[:, 1:].sum())

    @cached_property
    def rank_of_token(self) -> IntArray:
        """int64 [T]: the rank that owns each original token."""
        rank = np.empty(self.num_tokens, np.int64)
        rank[self.permutation] = np.repeat(np.arange(self.world_size), self.num_tokens // self.world_size)
        return rank

    @cached_property
    def entries_per_step(self) -> IntArray:
        """int64 [P, P - 1]: number of rectangles of each rank at each hop."""
        counts = [[len(step.entries) for step in shard.steps] for shard in self.shards]
        return np.array(counts, np.int64).reshape(self.world_size, self.world_size - 1)

    @cached_property
    def shards(self) -> tuple[RankShard, ...]:
        """Every rank's shard. A rank that needs only its own calls `shard(rank)`, which is cheaper."""
        return tuple(self.shard(rank) for rank in range(self.world_size))

    def shard(self, rank: int) -> RankShard:
        """The part of `rank`, made on the first call and kept.

        Raises:
            ValueError: if `rank` is not in 0..world_size-1.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank must be in 0..{self.world_size - 1} (world_size {self.world_size}), got {rank}"
            )
        if rank not in self._shard_cache:
            self._shard_cache[rank] = _make_shard(self, rank)
        return self._shard_cache[rank]

    @cached_property
    def _shard_cache(self) -> dict[int, RankShard]:
        return {}

    @cached_property
    def _split_table(self) -> _SplitTable:
        return _SplitTable.of(self._pieces, self.world_size)


@dataclass(frozen=True, eq=False)
class _SplitTable:
    """First and last piece of every split document on every rank; int64 [S, P] each, absent: start -1."""

    first_start: IntArray
    first_offset: IntArray
    first_end: IntArray
    last_start: IntArray
    last_offset: IntArray
    last_end: IntArray

    @staticmethod
    def of(pieces: _Pieces, world_size: int) -> _SplitTable:
        """Table of the documents that lie on more than one rank, in document order."""
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


def _split_rows(pieces: _Pieces) -> tuple[IntArray, IntArray]:
    """Row of each piece of a split document, rows numbered by document, and the indices of those pieces."""
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
    return RankShard(
        rank=rank,
        num_tokens=num_tokens,
        cu_seqlens=boundaries,
        prefix_tokens=plan.prefix_tokens[rank],
        steps=_make_steps(plan, rank),
    )


def _make_steps(plan: RingPlan, rank: int) -> tuple[RingStep, ...]:
    """The hops of one rank.

    A document gives at most one rectangle per pair of ranks: its pieces on any two ranks are nested or one
    after the other, never interleaved, so all queries with a key on the source see the same keys there.
    """
    world_size, table, prefix = plan.world_size, plan._split_table, plan.prefix_tokens
    q_first, q_last = table.first_start[:, rank, None], table.last_start[:, rank, None]
    legal = (table.first_start >= 0) & (table.first_start < q_last)
    legal[:, rank] = False
    row, source = np.nonzero(legal)
    all_of_q = q_first[row, 0] > table.first_start[row, source]
    all_of_kv = table.last_start[row, source] < q_last[row, 0]
    entries = np.stack(
        [
            np.where(all_of_q, table.first_offset[row, rank], table.last_offset[row, rank]),
            table.last_end[row, rank],
            table.first_offset[row, source],
            np.where(all_of_kv, table.last_end[row, source], table.first_end[row, source]),
        ],
        axis=1,
    )
    hop = (rank - source) % world_size
    order = np.lexsort((entries[:, 0], hop))
    bounds = np.searchsorted(hop[order], np.arange(1, world_size + 1))
    return tuple(
        RingStep(
            hop=h,
            source=(rank - h) % world_size,
            recv_tokens=int(prefix[(rank - h) % world_size, h]),
            send_tokens=int(prefix[(rank - h + 1) % world_size, h]),
            entries=entries[order[bounds[h - 1] : bounds[h]]],
        )
        for h in range(1, world_size)
    )


def plan_ring(
    cu_seqlens: Sequence[int] | npt.NDArray[np.integer],
    world_size: int,
    *,
    max_imbalance: float = 1.02,
) -> RingPlan:
    """Spread a packed sequence over a ring of ranks: equal tokens, balanced attention work, little K/V sent.

    Pure and deterministic: every rank that calls it with the same arguments gets the same plan.

    Args:
        cu_seqlens: int [n + 1], document boundaries: starts with 0, strictly increasing, ends with T.
        world_size: P, the number of ranks in the ring.
        max_imbalance: documents are split over all ranks, longest first, until the largest attention work
            of a rank is at most this multiple of the mean.

    Returns:
        The plan. Its arrays are int64.

    Raises:
        ValueError: if `cu_seqlens` is not as described, `world_size` is below 1, or T is not divisible
            by `world_size`.
    """
    cu = _checked(cu_seqlens, world_size)
    lengths = np.diff(cu)
    order = np.argsort(-lengths, kind="stable")
    best: RingPlan | None = None
    for num_zigzag in _candidates(len(lengths)):
        plan = _assemble(cu, world_size, *_partition(lengths, order[:num_zigzag], world_size))
        if best is None or plan.imbalance < best.imbalance:
            best = plan
        if plan.imbalance <= max_imbalance:
            break
    assert best is not None
    return best


def _checked(cu_seqlens: Sequence[int] | npt.NDArray[np.integer], world_size: int) -> IntArray:
    """cu_seqlens as int64 [n + 1], or ValueError with the remedy."""
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    given = np.asarray(cu_seqlens)
    if given.ndim != 1 or len(given) < 2 or not np.issubdtype(given.dtype, np.integer):
        raise ValueError(
            f"cu_seqlens must be a one-dimensional integer array of at least two document boundaries, got "
            f"dtype {given.dtype} and shape {given.shape}; flatten several rows to one before planning"
        )
    cu = given.astype(np.int64)
    if cu[0] != 0:
        raise ValueError(f"cu_seqlens must start with 0, got {cu[0]}")
    if (bad := np.flatnonzero(np.diff(cu) <= 0)).size:
        i = int(bad[0])
        raise ValueError(
            f"cu_seqlens must be strictly increasing, but document {i} goes from {cu[i]} to {cu[i + 1]}; "
            f"drop documents of length zero before planning"
        )
    if cu[-1] % world_size:
        multiple = 2 * world_size
        raise ValueError(
            f"{cu[-1]} tokens can't be divided equally over world_size={world_size} ranks; pad the sequence "
            f"to a multiple of 2 * world_size = {multiple} (here {-(-int(cu[-1]) // multiple) * multiple})"
        )
    return cu


def _candidates(num_documents: int) -> list[int]:
    """How many of the longest documents to zigzag: few values, growing."""
    values = [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, num_documents]
    return sorted({min(value, num_documents) for value in values})


def _partition(lengths: IntArray, zigzag: IntArray, world_size: int) -> tuple[IntArray, ...]:
    """Pieces (document, length, rank), each document's in position order."""
    z_document, z_length, z_rank = _zigzag_pieces(lengths, zigzag, world_size)
    taken = np.bincount(z_rank, weights=z_length, minlength=world_size).astype(np.int64)
    rest = np.setdiff1d(np.arange(len(lengths)), zigzag)
    f_document, f_length, f_rank = _contiguous_pieces(lengths, rest, lengths.sum() // world_size - taken)
    return (
        np.concatenate([z_document, f_document]),
        np.concatenate([z_length, f_length]),
        np.concatenate([z_rank, f_rank]),
    )


def _zigzag_pieces(lengths: IntArray, documents: IntArray, world_size: int) -> tuple[IntArray, ...]:
    """Pieces r and 2P-1-r of each document on rank r; ranks' totals differ by one token at most.

    Tokens left over by the division by P go round-robin, going on where the document before stopped.
    """
    length = lengths[documents, None]
    spare = length % world_size
    turn = np.cumsum(spare, axis=0) - spare
    rank = np.arange(world_size)
    per_rank = length // world_size + ((rank - turn) % world_size < spare)
    head = per_rank // 2
    piece_length = np.concatenate([head, (per_rank - head)[:, ::-1]], axis=1)
    piece_rank = np.concatenate([rank, rank[::-1]])
    return (
        np.repeat(documents, 2 * world_size),
        piece_length.reshape(-1),
        np.tile(piece_rank, len(documents)),
    )


def _contiguous_pieces(lengths: IntArray, documents: IntArray, capacity: IntArray) -> tuple[IntArray, ...]:
    """Lay the documents end to end and cut the line at the ranks' capacities, int64 [P]."""
    document_end, rank_end = np.cumsum(lengths[documents]), np.cumsum(capacity)
    ends = np.union1d(document_end, rank_end[rank_end > 0])
    if not len(documents):
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64)
    starts = np.append(0, ends[:-1])
    return (
        documents[np.searchsorted(document_end, starts, side="right")],
        ends - starts,
        np.searchsorted(rank_end, starts, side="right"),
    )


def _assemble(
    cu: IntArray, world_size: int, document: IntArray, length: IntArray, rank: IntArray
) -> RingPlan:
    """The plan for pieces given in position order within each document."""
    document, start, length, rank = _merged(document, length, rank)
    far = _farthest_hop(document, start, rank, world_size)
    order = _shard_order(document, start, rank, far)
    document, start, length, rank, far = (a[order] for a in (document, start, length, rank, far))
    num_tokens = int(cu[-1]) // world_size
    offset = np.cumsum(length) - length - rank * num_tokens
    prefix = np.zeros((world_size, world_size), np.int64)
    np.maximum.at(prefix, (rank, far), offset + length)
    prefix = np.maximum.accumulate(prefix[:, ::-1], axis=1)[:, ::-1]
    prefix[:, 0] = num_tokens
    original = cu[document] + start
    end = start + length
    area = np.zeros(world_size, np.int64)
    np.add.at(area, rank, (end * (end + 1) - start * (start + 1)) // 2)
    new_run = np.append(True, (original[1:] != original[:-1] + length[:-1]) | (rank[1:] != rank[:-1]))
    place = np.cumsum(length) - length
    return RingPlan(
        world_size=world_size,
        cu_seqlens=cu,
        permutation=np.arange(int(cu[-1])) + np.repeat(original - place, length),
        area_per_rank=area,
        runs_per_rank=np.bincount(rank[new_run], minlength=world_size),
        prefix_tokens=prefix,
        _pieces=_Pieces(document, start, length, rank, offset),
    )


def _merged(document: IntArray, length: IntArray, rank: IntArray) -> tuple[IntArray, ...]:
    """Drop empty pieces, sort by document, join neighbours on one rank: (document, start, length, rank)."""
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
    """int64 [m]: the farthest hop at which a piece's K/V is needed, 0 if on no other rank.

    A rank needs a piece if it holds a later piece of the same document.
    """
    last_start = np.full((int(document.max()) + 1, world_size), -1, np.int64)
    np.maximum.at(last_start, (document, rank), start)
    far = np.zeros(len(document), np.int64)
    pending = np.arange(len(document))
    for hop in range(world_size - 1, 0, -1):
        needed = last_start[document[pending], (rank[pending] + hop) % world_size] > start[pending]
        far[pending[needed]] = hop
        pending = pending[~needed]
    return far


def _shard_order(document: IntArray, start: IntArray, rank: IntArray, far: IntArray) -> IntArray:
    """Order of the pieces: by rank, then documents by farthest hop, descending, then by position."""
    num_ranks = int(rank.max()) + 1
    key = document * num_ranks + rank
    farthest = np.zeros(int(key.max()) + 1, np.int64)
    np.maximum.at(farthest, key, far)
    return np.lexsort((start, document, -farthest[key], rank))

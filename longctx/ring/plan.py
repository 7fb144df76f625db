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

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

MAX_IMBALANCE = 1.02
"""Largest attention work of a rank over the mean that a plan aims at."""


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

    @property
    def num_pairs(self) -> int:
        """(query, key) pairs in the entries."""
        q_start, q_end, kv_start, kv_end = self.entries.T
        return int(((q_end - q_start) * (kv_end - kv_start)).sum())


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
    def permutation(self) -> IntArray:
        """int64 [T]: sharded = tokens[permutation]; rank r owns sharded[r*T/P : (r+1)*T/P]."""
        length = self._pieces.length
        place = np.cumsum(length) - length
        shift = self.cu_seqlens[self._pieces.document] + self._pieces.start - place
        return np.arange(self.num_tokens) + np.repeat(shift, length)

    @cached_property
    def rank_of_token(self) -> IntArray:
        """int64 [T]: the rank that owns each original token."""
        rank = np.empty(self.num_tokens, np.int64)
        rank[self.permutation] = np.repeat(np.arange(self.world_size), self.num_tokens // self.world_size)
        return rank

    @cached_property
    def entries_per_step(self) -> IntArray:
        """int64 [P, P - 1]: number of rectangles of each rank at each hop."""
        return self.work_per_hop[1, :, 1:]

    @cached_property
    def work_per_hop(self) -> IntArray:
        """int64 [3, P, P]: at [:, rank, hop], legal pairs, documents or rectangles they lie in, and their queries.

        Hop 0 is a rank's own varlen causal call. The same as adding up `shards`, without making them.
        """
        return _work_per_hop(self)

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
            raise ValueError(f"rank must be in 0..{self.world_size - 1} (world_size {self.world_size}), got {rank}")
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
    """The hops of one rank.

    A document gives at most one rectangle per pair of ranks: its pieces on any two ranks are nested or one
    after the other, never interleaved, so all queries with a key on the source see the same keys there.
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
            send_tokens=int(prefix[(rank - h + 1) % world_size, h]),
            entries=entries[order[bounds[h - 1] : bounds[h]]],
        )
        for h in range(1, world_size)
    )


def _rectangles(
    table: _SplitTable, row: IntArray | int, rank: IntArray, source: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """The columns of `RingStep.entries`: what queries on `rank` see of the same document on `source`."""
    all_of_q = table.first_start[row, rank] > table.first_start[row, source]
    all_of_kv = table.last_start[row, source] < table.last_start[row, rank]
    return (
        np.where(all_of_q, table.first_offset[row, rank], table.last_offset[row, rank]),
        table.last_end[row, rank],
        table.first_offset[row, source],
        np.where(all_of_kv, table.last_end[row, source], table.first_end[row, source]),
    )


def _work_per_hop(plan: RingPlan) -> IntArray:
    """`RingPlan.work_per_hop`: one split document after the other, then own documents by piece."""
    pieces, table, world_size = plan._pieces, plan._split_table, plan.world_size
    work = np.zeros((3, world_size, world_size), np.int64)  # of each rank with the keys of each rank
    for row in range(len(table.first_start)):
        present = np.flatnonzero(table.first_start[row] >= 0)
        rank, source = present[:, None], present[None]
        legal = (table.first_start[row, source] < table.last_start[row, rank]) & (rank != source)
        q_start, q_end, kv_start, kv_end = _rectangles(table, row, rank, source)
        queries = (q_end - q_start) * legal
        for of_pair, value in zip(work, (queries * (kv_end - kv_start), legal, queries), strict=True):
            of_pair[rank, source] += value
    ranks = np.arange(world_size)
    work = work[:, ranks[:, None], (ranks[:, None] - ranks) % world_size]
    new = np.append(True, (pieces.document[1:] != pieces.document[:-1]) | (pieces.rank[1:] != pieces.rank[:-1]))
    length, rank = np.add.reduceat(pieces.length, np.flatnonzero(new)), pieces.rank[new]
    for of_rank, value in zip(work[:, :, 0], (length * (length + 1) // 2, np.ones_like(length), length), strict=True):
        np.add.at(of_rank, rank, value)
    return work


def plan_ring(
    cu_seqlens: Sequence[int] | npt.NDArray[np.integer],
    world_size: int,
    *,
    max_imbalance: float = MAX_IMBALANCE,
    group_fraction: float = 0.125,
) -> RingPlan:
    """Spread a packed sequence over a ring of ranks: equal tokens, balanced attention work, little K/V sent.

    Pure and deterministic: every rank that calls it with the same arguments gets the same plan.

    The K/V of a document that climbs the ring (its positions in the order of the ranks) travels only as far
    as its last rank, while a zigzagged one (https://github.com/zhuzilin/ring-flash-attention) travels all the
    way round. So as few documents as possible are zigzagged:

    1. Starting at the last rank, every rank takes tails of the longest documents and whole short ones, in
       the proportion that gives it its share of both tokens and attention work; what is left of a document
       goes to the ranks before.
    2. If that does not balance, the longest document is cut in two first, and its second half climbs the ring's
       first ranks while the first half climbs its last ones: the document goes over the end of the ring.
    3. If that does not either, the longest documents are zigzagged, one more at a time. The longest of them
       is dealt last, from both its ends, in the parts that make up for what the others leave unbalanced.

    Args:
        cu_seqlens: int [n + 1], document boundaries: starts with 0, strictly increasing, ends with T.
        world_size: P, the number of ranks in the ring.
        max_imbalance: the first arrangement whose largest attention work of a rank is at most this multiple
            of the mean is taken; if there is none, the most balanced one.
        group_fraction: neighbouring documents of at most this fraction of T/P tokens are dealt together, in
            groups of about as many tokens, so that a rank gets few runs of the original sequence.

    Returns:
        The plan. Its arrays are int64.

    Raises:
        ValueError: if `cu_seqlens` is not as described, `world_size` is below 1, or T is not divisible
            by `world_size`; or if `max_imbalance` is below 1 or `group_fraction` is negative.
    """
    if max_imbalance < 1 or group_fraction < 0:
        raise ValueError(
            f"max_imbalance must be at least 1 and group_fraction at least 0, got {max_imbalance} and {group_fraction}"
        )
    cu = _checked(cu_seqlens, world_size)
    problem = _Problem.of(cu, world_size, max_imbalance, group_fraction)
    best, most_work = None, np.inf
    for num_zigzag, cut in _candidates(problem):
        pieces = _partition(problem, num_zigzag, cut)
        if pieces is not None and (work := _area_per_rank(pieces, world_size).max()) < most_work:
            best, most_work = pieces, work
        if most_work <= problem.mean_work + problem.slack:
            break
    assert best is not None, "the first candidate always gives pieces"
    return _assemble(cu, world_size, best)


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


_NUM_ZIGZAG = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of zigzagged documents that are tried, after 0."""
_CUTS = (0.5, 0.45, 0.55, 0.4, 0.6, 0.35, 0.65)
"""Where the document that goes over the end of the ring is cut: tried in this order without zigzag."""
_CUTS_WITH_ZIGZAG = (0.5, 0.45, 0.55)
"""The same beside zigzagged documents, which make up for what does not balance."""
_MANY_RANKS = 16
"""Above this many ranks only `_CUTS_WITH_ZIGZAG` are tried: planning time grows with the ranks."""
_LONGEST_CUT = 0.55
"""Above this fraction of the tokens a document leaves the ranks too few to pair its tail with."""
_FRESH = 0.75
"""Documents with more than this fraction of the cut one left are used before the cut one's second half."""
_MADE_UP = 0.5
"""Fraction of a zigzagged document's work on a rank by which that rank may be off before it is dealt."""
_TOLERANCE = 0.2
"""Fraction of the allowed imbalance that a rank may use to keep a document whole."""


@dataclass(frozen=True, eq=False)
class _Problem:
    """What every candidate arrangement starts from."""

    lengths: IntArray
    """int64 [n]."""
    longest_first: IntArray
    """int64 [n]: documents by length, descending."""
    area: IntArray
    """int64 [n]: L(L+1)/2 legal pairs of each document."""
    world_size: int
    group_tokens: int
    mean_work: float
    """Legal pairs of a rank, on average."""
    slack: float
    """Legal pairs that a rank may have above the mean."""

    @staticmethod
    def of(cu: IntArray, world_size: int, max_imbalance: float, group_fraction: float) -> _Problem:
        lengths = np.diff(cu)
        area = lengths * (lengths + 1) // 2
        return _Problem(
            lengths=lengths,
            longest_first=np.argsort(-lengths, kind="stable"),
            area=area,
            world_size=world_size,
            group_tokens=int(cu[-1] / world_size * group_fraction),
            mean_work=int(area.sum()) / world_size,
            slack=(max_imbalance - 1) * int(area.sum()) / world_size,
        )


class _Lists(NamedTuple):
    """Pieces in position order within each document, documents in any order; int64 [m] each."""

    document: IntArray
    length: IntArray
    rank: IntArray


class _Take(NamedTuple):
    """`tokens` tokens at the end of what is left of a unit go to `rank`."""

    unit: int
    tokens: int
    rank: int


class _Mixture(NamedTuple):
    """What a rank takes from a line."""

    takes: list[tuple[int, int]]
    """(unit, tokens), in the order of taking."""
    work: int
    started: int | None
    """The unit to go on with."""


class _Cut(NamedTuple):
    """The document that goes over the end of the ring, and where its part on the first ranks begins."""

    document: int
    position: int


def _candidates(problem: _Problem) -> Iterator[tuple[int, _Cut | None]]:
    """(number of zigzagged documents, document cut in two), from little K/V sent to much."""
    num_documents = len(problem.lengths)
    for num_zigzag in sorted({0, *(min(k, num_documents) for k in _NUM_ZIGZAG)}):
        yield num_zigzag, None
        rest = problem.longest_first[num_zigzag:]
        longest = int(problem.lengths[rest[:1]].sum())
        if problem.group_tokens < longest <= _LONGEST_CUT * int(problem.lengths[rest].sum()):
            thorough = num_zigzag == 0 and problem.world_size <= _MANY_RANKS
            for fraction in _CUTS if thorough else _CUTS_WITH_ZIGZAG:
                yield num_zigzag, _Cut(int(rest[0]), max(1, int(longest * fraction)))


def _partition(problem: _Problem, num_zigzag: int, cut: _Cut | None) -> _Lists | None:
    """Pieces of all documents, or None where the arrangement does not work out."""
    world_size, lengths = problem.world_size, problem.lengths
    zigzag = problem.longest_first[:num_zigzag]
    share = _equal_shares(lengths[zigzag], world_size)
    capacity = int(lengths.sum()) // world_size - share.sum(axis=0)
    limit = problem.slack + _MADE_UP * problem.area[zigzag[:1]].sum() / world_size
    climbing = _climbing_pieces(problem, np.sort(problem.longest_first[num_zigzag:]), capacity, cut, limit)
    if climbing is None:
        return None
    pieces = _joined(climbing, _zigzag_pieces(zigzag[1:], share[1:]))
    if not num_zigzag:
        return pieces
    area = problem.mean_work - _area_per_rank(pieces, world_size)
    return _joined(pieces, _make_up_pieces(int(zigzag[0]), int(lengths[zigzag[0]]), share[0], area))


def _joined(*lists: _Lists) -> _Lists:
    return _Lists(*(np.concatenate(columns) for columns in zip(*lists, strict=True)))


def _area_per_rank(pieces: _Lists, world_size: int) -> IntArray:
    """int64 [P]: legal pairs of each rank's queries."""
    if not len(pieces.document):
        return np.zeros(world_size, np.int64)
    _, start, length, rank = _merged(pieces)
    return _summed_area(start, length, rank, world_size)


def _summed_area(start: IntArray, length: IntArray, rank: IntArray, world_size: int) -> IntArray:
    """int64 [P]: legal pairs of the queries start..start+length-1 of documents, summed by rank."""
    area = np.zeros(world_size, np.int64)
    np.add.at(area, rank, length * (2 * start + length + 1) // 2)
    return area


def _equal_shares(lengths: IntArray, world_size: int) -> IntArray:
    """int64 [k, P]: tokens of k documents on each rank; ranks' totals differ by one token at most.

    Tokens left over by the division by P go round-robin, going on where the document before stopped.
    """
    length = lengths[:, None]
    spare = length % world_size
    turn = np.cumsum(spare, axis=0) - spare
    return length // world_size + ((np.arange(world_size) - turn) % world_size < spare)


def _zigzag_pieces(documents: IntArray, share: IntArray) -> _Lists:
    """Pieces i and 2P-1-i of each document on one rank; share: int64 [k, P], the documents' tokens there.

    Each document begins one rank further on: the last piece of a document is of no use to other ranks, and
    so every rank may have one of these at the end of the prefix that travels, where it can be left out.
    """
    num_documents, world_size = share.shape
    rank = (np.arange(world_size) + np.arange(1, num_documents + 1)[:, None]) % world_size
    share = np.take_along_axis(share, rank, axis=1)
    head = share // 2
    return _Lists(
        np.repeat(documents, 2 * world_size),
        np.concatenate([head, (share - head)[:, ::-1]], axis=1).reshape(-1),
        np.concatenate([rank, rank[:, ::-1]], axis=1).reshape(-1),
    )


def _make_up_pieces(document: int, length: int, share: IntArray, area: npt.NDArray[Any]) -> _Lists:
    """Deal one document from both its ends so that each rank gets `share` tokens and about `area` pairs.

    Tokens near the end of a document cost more, so a longer tail and a shorter head give more pairs for as
    many tokens. Ranks that need the most unusual mixture choose first, while both ends are far apart.

    Args:
        document, length: the document.
        share: int64 [P], its tokens on each rank, `length` in all.
        area: float64 [P], legal pairs that each rank still needs.
    """
    unusual = np.abs(area - share * (length + 1) / 2)
    heads, tails, ranks = [], [], []
    begin, end = 0, length
    for rank in np.argsort(-unusual.round(-1), kind="stable").tolist():
        tokens = int(share[rank])
        # Least work: all from the head. Every token moved from head to tail adds the distance between them.
        least = tokens * (2 * begin + tokens + 1) / 2
        tail = (area[rank] - least) / max(1, end - begin - tokens)
        tail = min(tokens, max(0, round(float(tail))))
        heads.append(tokens - tail)
        tails.append(tail)
        ranks.append(rank)
        begin, end = begin + tokens - tail, end - tail
    return _Lists(
        np.full(2 * len(ranks), document),
        np.array(heads + tails[::-1], np.int64),
        np.array(ranks + ranks[::-1], np.int64),
    )


def _climbing_pieces(
    problem: _Problem, documents: IntArray, capacity: IntArray, cut: _Cut | None, limit: float
) -> _Lists | None:
    """Pieces of `documents`, int64 [m] ascending, whose positions climb the ring rank by rank.

    Args:
        capacity: int64 [P], tokens of these documents for each rank.
        cut: the document that goes over the end of the ring, if any.
        limit: with a cut, give up (None) when a rank's work is this much above its share.
    """
    if not len(documents):
        return _Lists(documents, documents, documents)
    line = _Line(problem, documents)
    if cut is not None:
        line.cut_in_two(int(np.searchsorted(documents, cut.document)), cut.position)
    takes = line.deal(capacity.tolist(), tolerance=_TOLERANCE * problem.slack, limit=np.inf if cut is None else limit)
    if takes is None:
        return None
    unit, tokens, rank = np.array(takes).T
    order = np.argsort(np.array(line.begin)[unit[::-1]], kind="stable")  # a unit's tail was taken first
    tokens, rank = tokens[::-1][order], rank[::-1][order]
    document_end, take_end = np.cumsum(problem.lengths[documents]), np.cumsum(tokens)
    end = np.sort(np.concatenate([document_end, take_end]))
    end = end[np.append(True, end[1:] != end[:-1])]
    begin = np.append(0, end[:-1])
    return _Lists(
        documents[np.searchsorted(document_end, begin, side="right")],
        end - begin,
        rank[np.searchsorted(take_end, begin, side="right")],
    )


class _Line:
    """Documents laid end to end in units, from which ranks take tails.

    A unit is a document, a part of the one that is cut in two, or a group of short neighbours. `ready` holds
    the units that have tokens left by their work per token: its begin is cheap and its end dear.
    """

    def __init__(self, problem: _Problem, documents: IntArray):
        lengths, area = problem.lengths[documents], problem.area[documents]
        first = _first_of_groups(lengths, problem.group_tokens)
        is_group = np.diff(np.append(first, len(documents))) > 1
        tokens, start = np.add.reduceat(lengths, first), np.cumsum(lengths) - lengths
        self.document_start: list[int] = start.tolist()
        self.work_before: list[int] = (np.cumsum(area) - area).tolist()
        self.begin: list[int] = start[first].tolist()
        self.left: list[int] = tokens.tolist()
        self.base: list[int] = [0] * len(first)
        """Tokens of the unit's document that come before the unit."""
        self.is_group: list[bool] = is_group.tolist()
        self.size: list[float] = (2 * np.add.reduceat(area, first) / tokens - 1).tolist()
        """Length of the document that is left, or of one with as much work per token as the group."""
        self.ready = sorted(range(len(first)), key=self.size.__getitem__)
        self.started: int | None = None
        """The document from whose end the last rank took."""
        self.lower: int | None = None
        self.upper: int | None = None
        """Units of a document cut in two; the upper one is not ready before the lower one is used up."""

    def cut_in_two(self, document: int, position: int) -> None:
        """Make two units of a document that is one: its first `position` tokens and the others."""
        unit = bisect.bisect_right(self.begin, self.document_start[document]) - 1
        if self.is_group[unit]:
            return
        self.lower, self.upper = unit, len(self.left)
        self.begin.append(self.begin[unit] + position)
        self.base.append(position)
        self.left.append(self.left[unit] - position)
        self.size.append(self.size[unit])
        self.is_group.append(False)
        self.left[unit] = position
        self.size[unit] = position
        self.ready.sort(key=self.size.__getitem__)

    def work(self, unit: int, tokens: int) -> int:
        """Legal pairs of the last `tokens` tokens left of a unit."""
        if not self.is_group[unit]:
            return tokens * (2 * (self.base[unit] + self.left[unit]) - tokens + 1) // 2
        end = self.begin[unit] + self.left[unit]
        return self._work_to(end) - self._work_to(end - tokens)

    def _work_to(self, place: int) -> int:
        i = bisect.bisect_right(self.document_start, place) - 1
        position = place - self.document_start[i]
        return self.work_before[i] + position * (position + 1) // 2

    def deal(self, capacity: list[int], tolerance: float, limit: float) -> list[_Take] | None:
        """Fill the ranks from the last to the first.

        Args:
            capacity: tokens for each rank; all tokens of the line together.
            tolerance: how far a rank may be off its share of the work if that saves cutting a document.
            limit: give up (None) when a rank is further above its share.
        """
        work_left = sum(self.work(unit, tokens) for unit, tokens in enumerate(self.left))
        takes: list[_Take] = []
        for rank in range(len(capacity) - 1, 0, -1):
            share = work_left / (rank + 1)
            chosen = self._choose(capacity[rank], share, tolerance, limit)
            if chosen is None:
                return None
            work = sum(self._take(unit, tokens) for unit, tokens in chosen.takes)
            if work > share + limit:
                return None
            takes += [_Take(unit, tokens, rank) for unit, tokens in chosen.takes]
            work_left -= work
            self.started = chosen.started
            self.ready = list(filter(self.left.__getitem__, self.ready))
            self.ready.sort(key=self.size.__getitem__)
        return takes + [_Take(unit, tokens, 0) for unit, tokens in enumerate(self.left) if tokens]

    def _take(self, unit: int, tokens: int) -> int:
        """Remove tokens from the end of a unit and return their work."""
        work = self.work(unit, tokens)
        self.left[unit] -= tokens
        if not self.is_group[unit]:
            self.size[unit] -= tokens
        return work

    def _choose(self, tokens: int, share: float, tolerance: float, limit: float) -> _Mixture | None:
        """`tokens` tokens for one rank, their work near `share`; None where there are not as many.

        No rank but one may hold parts of both units of a document cut in two: the pieces of two such ranks
        would interleave. So the upper unit waits until the lower one is used up, or is taken whole here.
        """
        lower, may_open = self.lower, self._upper_may_open()
        if lower is not None and may_open and not self.left[lower]:
            self._open_upper()
            lower = None
        mixture = self._mixture(tokens, share, tolerance)
        if mixture is not None and mixture.work <= share + limit:
            return mixture
        if lower is None or not may_open or self.left[lower] > tokens:
            return mixture
        whole = (lower, self.left[lower])
        size = self.size[lower]
        work = self._take(*whole)
        self.ready.remove(lower)
        self._open_upper()
        mixture = self._mixture(tokens - whole[1], share - work, tolerance)
        self.left[lower], self.size[lower] = whole[1], size
        return mixture and _Mixture([whole, *mixture.takes], mixture.work + work, mixture.started)

    def _upper_may_open(self) -> bool:
        """Whether all other documents have been started."""
        if self.upper is None:
            return False
        longest = next((unit for unit in reversed(self.ready) if unit != self.lower), self.upper)
        return longest == self.upper or self.size[longest] <= _FRESH * self.size[self.upper]

    def _open_upper(self) -> None:
        assert self.upper is not None
        self.ready.append(self.upper)
        self.ready.sort(key=self.size.__getitem__)
        self.lower = self.upper = None

    def _mixture(self, tokens: int, share: float, tolerance: float) -> _Mixture | None:
        """Dear tokens from the end of `ready` and cheap ones from its begin: `tokens` in all, work `share`.

        The document that is in use already is the dear one if that works: going on with it keeps the others
        whole, at different stages of use, and its K/V near. None where there are too few tokens.
        """
        if not tokens:
            return _Mixture([], 0, self.started)
        if all(total < tokens for total in itertools.accumulate(map(self.left.__getitem__, self.ready))):
            return None
        mixture, started = None, self.started
        if started is not None and self.left[started] and started not in (self.ready[0], self.ready[-1]):
            dear = (unit for unit in reversed(self.ready) if unit != started)
            cheap = (unit for unit in self.ready if unit != started)
            mixture = self._mixture_of(
                itertools.chain([started], dear), itertools.chain(cheap, [started]), tokens, share, tolerance
            )
        if mixture is None or abs(mixture.work - share) > tolerance + self.size[self.ready[-1]]:
            mixture = self._mixture_of(reversed(self.ready), self.ready, tokens, share, tolerance)
        return mixture

    def _mixture_of(
        self, dearest_first: Iterable[int], cheapest_first: Iterable[int], tokens: int, share: float, tolerance: float
    ) -> _Mixture:
        """Both orders are read no further than `tokens` tokens."""
        dear, cheap = _Profile(self, dearest_first, tokens), _Profile(self, cheapest_first, tokens)
        num_dear = _root(
            lambda x: dear.work(x) + cheap.work(tokens - x) - share,
            [x for x in dear.tokens if x <= tokens],
            [tokens - x for x in cheap.tokens if x <= tokens],
            tolerance,
        )
        takes = dear.first(num_dear)
        return _Mixture(
            takes=takes + cheap.first(tokens - num_dear),
            work=dear.work(num_dear) + cheap.work(tokens - num_dear),
            started=takes[-1][0] if takes else self.started,
        )


class _Profile:
    """Units of a line in one order, up to a number of tokens, and the work of their first x tokens."""

    def __init__(self, line: _Line, units: Iterable[int], max_tokens: int):
        self.line, self.units, self.tokens, self.total = line, list[int](), [0], [0]
        for unit in units:
            if self.tokens[-1] >= max_tokens:
                break
            self.units.append(unit)
            self.tokens.append(self.tokens[-1] + line.left[unit])
            self.total.append(self.total[-1] + line.work(unit, line.left[unit]))

    def work(self, tokens: int) -> int:
        """Legal pairs of the first `tokens` tokens."""
        i = bisect.bisect_right(self.tokens, tokens) - 1
        part = tokens - self.tokens[i]
        return self.total[i] + (self.line.work(self.units[i], part) if part else 0)

    def first(self, tokens: int) -> list[tuple[int, int]]:
        """(unit, tokens) of the first `tokens` tokens."""
        bounds = zip(self.units, self.tokens[:-1], self.tokens[1:], strict=True)
        return [(unit, min(end, tokens) - begin) for unit, begin, end in bounds if begin < tokens]


def _root(error: Callable[[int], float], best_cuts: list[int], good_cuts: list[int], tolerance: float) -> int:
    """A zero of `error` on integers, or one of the given points if `error` is at most `tolerance` there.

    `best_cuts`, ascending, and `good_cuts`, descending, are the points that cut no dear or no cheap unit.
    """
    best_errors, good_errors = [error(x) for x in best_cuts], [error(x) for x in good_cuts]
    for cuts, errors in ((best_cuts, best_errors), (good_cuts, good_errors)):
        smallest = min(range(len(cuts)), key=lambda i: abs(errors[i]))
        if abs(errors[smallest]) <= tolerance:
            return cuts[smallest]
    points = sorted(dict(zip(best_cuts + good_cuts, best_errors + good_errors, strict=True)).items())
    if points[0][1] >= 0:
        return points[0][0]
    for (low, _), (high, at_high) in itertools.pairwise(points):
        if at_high >= 0:
            return low + 1 + bisect.bisect_left(range(low + 1, high), 0.0, key=error)
    return min(points, key=lambda point: abs(point[1]))[0]


def _first_of_groups(lengths: IntArray, group_tokens: int) -> IntArray:
    """int64 [units]: first document of each unit; short neighbours share one of about `group_tokens` tokens."""
    short = lengths <= group_tokens
    bucket = (np.cumsum(lengths) - lengths) // max(1, group_tokens)
    joins = short[1:] & short[:-1] & (bucket[1:] == bucket[:-1])
    return np.flatnonzero(np.append(True, ~joins))


def _assemble(cu: IntArray, world_size: int, pieces: _Lists) -> RingPlan:
    """The plan for pieces given in position order within each document."""
    document, start, length, rank = _merged(pieces)
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
    new_run = np.append(True, (original[1:] != original[:-1] + length[:-1]) | (rank[1:] != rank[:-1]))
    return RingPlan(
        world_size=world_size,
        cu_seqlens=cu,
        area_per_rank=_summed_area(start, length, rank, world_size),
        runs_per_rank=np.bincount(rank[new_run], minlength=world_size),
        prefix_tokens=prefix,
        _pieces=_Pieces(document, start, length, rank, offset),
    )


def _merged(pieces: _Lists) -> tuple[IntArray, ...]:
    """Drop empty pieces, sort by document, join neighbours on one rank: (document, start, length, rank)."""
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
    """int64 [m]: the farthest hop at which a piece's K/V is needed, 0 if on no other rank.

    A rank needs a piece if it holds a later piece of the same document.
    """
    first = np.flatnonzero(np.append(True, document[1:] != document[:-1]))
    pieces = np.diff(np.append(first, len(document)))
    far = np.zeros(len(document), np.int64)
    pending = np.flatnonzero(np.repeat(pieces > 1, pieces))
    if not len(pending):
        return far
    row = np.zeros(len(document), np.int64)
    row[pending] = np.unique(document[pending], return_inverse=True)[1]
    last_start = np.full((int(row.max()) + 1, world_size), -1, np.int64)
    np.maximum.at(last_start, (row[pending], rank[pending]), start[pending])
    for hop in range(world_size - 1, 0, -1):
        needed = last_start[row[pending], (rank[pending] + hop) % world_size] > start[pending]
        far[pending[needed]] = hop
        pending = pending[~needed]
    return far


def _shard_order(document: IntArray, start: IntArray, rank: IntArray, far: IntArray) -> IntArray:
    """Order of the pieces: by rank, then documents by farthest hop, descending, then by position."""
    num_ranks = int(rank.max()) + 1
    key = document * num_ranks + rank
    farthest = np.zeros(int(key.max()) + 1, np.int64)
    travels = far > 0
    np.maximum.at(farthest, key[travels], far[travels])
    return np.lexsort((start, document, -farthest[key], rank))

"""The search for a ring's plan, which gives every rank equal work and sends few keys and values.

`plan_ring` tries arrangements from the one that sends the least keys and values to the one that sends the most, and
takes the first that is balanced. If it is told how long plans take, and ranks would wait by this one, it also tries
plans that are less balanced or send more, and takes the fastest. `longctx.ring.plan` describes the result and defines
*piece* and *legal pair*.

Shape legend: T tokens of the packed sequence, n documents, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from longctx.ring.line import Line, Problem
from longctx.ring.plan import IntArray, Pieces, RingPlan, assemble, merged, summed_area

MAX_IMBALANCE = 1.02
"""The imbalance that a plan aims at: the largest attention work of a rank divided by the mean."""
TOLERANCE = 0.2
"""The part of the allowed imbalance that a rank may use to keep a document whole."""
SEARCHES = (
    (0.25, 0.2),
    (0.0025, 0.2),
    (0.125, 0.05),
    (0.0025, 0.3),
    (0.05, 0.2),
    (0.125, 0.3),
    (0.05, 0.6),
    (0.25, 0.05),
)
"""Where a plan's seconds are modelled: the part of the mean work that a rank may use to keep a document whole, and the
group fraction, for which numbers of zigzagged documents are tried."""
PATIENCE = 2
"""A search ends when so many numbers of zigzagged documents, one after the other, gave no faster plan."""
MOST_TRIED = 2048
"""At most MOST_TRIED / P plans are tried over P ranks, since each takes time in proportion to the ranks."""
WORTH_A_SEARCH = 0.02
"""Further plans are tried where ranks wait for more than this part of the seconds."""


class PlanTime(NamedTuple):
    """Modelled time of attention by a plan."""

    seconds: float
    """Seconds that a step of the slowest rank takes."""
    waiting: float
    """The part of `seconds` in which ranks compute nothing, on average."""


TimeOfPlan = Callable[[RingPlan], PlanTime]
"""A model of a plan's time. Ranks may differ by the rounding errors of their processors, and by nothing else."""


def plan_ring(
    cu_seqlens: Sequence[int] | npt.NDArray[np.integer],
    world_size: int,
    *,
    max_imbalance: float = MAX_IMBALANCE,
    group_fraction: float = 0.125,
    time_of: TimeOfPlan | None = None,
) -> RingPlan:
    """Spread a packed sequence over a ring of ranks: equal tokens, balanced attention work, little K/V sent.

    Pure and deterministic: every rank that calls it with the same arguments gets the same plan.

    The K/V of a document that climbs the ring (its positions in the order of the ranks) travels only as far
    as its last rank, while a zigzagged one (https://github.com/zhuzilin/ring-flash-attention) travels to all
    ranks. So as few documents as possible are zigzagged:

    1. Starting at the last rank, every rank takes tails of the longest documents and whole short ones, in
       the proportion that gives it its share of both tokens and attention work; what is left of a document
       goes to the ranks before.
    2. If that does not balance, the longest document is cut in two first, and its second half climbs the ring's
       first ranks while the first half climbs its last ones: the document wraps around the end of the ring.
    3. If that does not balance either, the longest documents are zigzagged, one more at a time. The longest of
       them is dealt last, from both its ends, in parts that compensate for the imbalance of the others.

    Args:
        cu_seqlens: int [n + 1], document boundaries: starts with 0, strictly increasing, ends with T.
        world_size: P, the number of ranks in the ring.
        max_imbalance: the first arrangement whose largest attention work of a rank is at most this multiple
            of the mean is taken; if there is none, the most balanced one.
        group_fraction: neighbouring documents of at most this fraction of T/P tokens are dealt together, in
            groups of about as many tokens, so that a rank gets few runs of the original sequence.
        time_of: the modelled time of a plan. With it, SEARCHES are tried, too, and the fastest plan is taken: over
            many ranks, the last percent of balance can cost more messages than it saves, and one document more that
            is zigzagged can send them more evenly.

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
    problem = Problem.of(cu, world_size, max_imbalance - 1, TOLERANCE * (max_imbalance - 1), group_fraction)
    *_, pieces = _arrangements(problem)
    best = assemble(cu, world_size, pieces)
    if time_of is None:
        return best
    taken, seen = _rounded(time_of(best)), {_bytes(pieces)}
    tried = 0
    for tolerance, fraction in SEARCHES:
        problem = Problem.of(cu, world_size, np.inf, tolerance, fraction)
        least, left = np.inf, PATIENCE
        for num_zigzag in _numbers_of_zigzag(problem):
            if not left:
                break
            if taken.waiting <= WORTH_A_SEARCH * taken.seconds or tried >= MOST_TRIED // world_size:
                return best
            tried, left = tried + 1, left - 1
            arrangement = _partition(problem, num_zigzag, None)
            assert arrangement is not None, "without a cut, any number of documents can be zigzagged"
            if (key := _bytes(arrangement)) in seen:
                continue
            seen.add(key)
            plan = assemble(cu, world_size, arrangement)
            time = _rounded(time_of(plan))
            if time.seconds < least:
                least, left = time.seconds, PATIENCE
            if time.seconds < taken.seconds:
                best, taken = plan, time
    return best


def _bytes(pieces: Pieces) -> bytes:
    """Return the pieces as a key. Searches often come to the same ones, which need no plan again."""
    return b"".join(column.tobytes() for column in pieces)


def _rounded(time: PlanTime) -> PlanTime:
    """Return the time with three digits, so that rounding errors of different processors decide nothing."""
    return PlanTime(*(float(f"{value:.2e}") for value in time))


def _arrangements(problem: Problem) -> Iterator[Pieces]:
    """Yield the arrangements that are more balanced than all before, up to the first within the problem's slack."""
    most_work = np.inf
    for num_zigzag, cut in _candidates(problem):
        pieces = _partition(problem, num_zigzag, cut)
        if pieces is not None and (work := _area_per_rank(pieces, problem.world_size).max()) < most_work:
            most_work = work
            yield pieces
        if most_work <= problem.mean_work + problem.slack:
            return


def _checked(cu_seqlens: Sequence[int] | npt.NDArray[np.integer], world_size: int) -> IntArray:
    """Return cu_seqlens as int64 [n + 1], or raise ValueError with the remedy."""
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    given = np.asarray(cu_seqlens)
    if given.ndim != 1 or len(given) < 2 or not np.issubdtype(given.dtype, np.integer):
        raise ValueError(
            f"cu_seqlens must be a one-dimensional integer array of at least two document boundaries, got "
            f"dtype {given.dtype} and shape {given.shape}; flatten several sequences into one before planning"
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
"""Fractions at which the document that wraps around the ring is cut, in the order they are tried without zigzag."""
_CUTS_WITH_ZIGZAG = (0.5, 0.45, 0.55)
"""Fractions that are tried beside zigzagged documents, which compensate for the remaining imbalance."""
_MANY_RANKS = 16
"""Above this many ranks only `_CUTS_WITH_ZIGZAG` are tried: planning time grows with the ranks."""
_LONGEST_CUT = 0.55
"""A document with more than this fraction of the tokens is not cut: too few tokens are left to pair its tail with."""
_REGAINED = 0.5
"""Until the longest document is dealt, a rank's work may exceed its share by this fraction of its work in it."""


class _Cut(NamedTuple):
    """The document that wraps around the end of the ring, and the position where its part on the first ranks begins."""

    document: int
    position: int


def _candidates(problem: Problem) -> Iterator[tuple[int, _Cut | None]]:
    """Yield (number of zigzagged documents, document cut in two), from the least K/V sent to the most."""
    for num_zigzag in _numbers_of_zigzag(problem):
        yield num_zigzag, None
        rest = problem.longest_first[num_zigzag:]
        longest = int(problem.lengths[rest[:1]].sum())
        if problem.group_tokens < longest <= _LONGEST_CUT * int(problem.lengths[rest].sum()):
            thorough = num_zigzag == 0 and problem.world_size <= _MANY_RANKS
            for fraction in _CUTS if thorough else _CUTS_WITH_ZIGZAG:
                yield num_zigzag, _Cut(int(rest[0]), max(1, int(longest * fraction)))


def _numbers_of_zigzag(problem: Problem) -> list[int]:
    return sorted({0, *(min(k, len(problem.lengths)) for k in _NUM_ZIGZAG)})


def _partition(problem: Problem, num_zigzag: int, cut: _Cut | None) -> Pieces | None:
    """Return the pieces of all documents, or None if the arrangement is not possible."""
    world_size, lengths = problem.world_size, problem.lengths
    zigzag = problem.longest_first[:num_zigzag]
    share = _equal_shares(lengths[zigzag], world_size)
    capacity = int(lengths.sum()) // world_size - share.sum(axis=0)
    limit = problem.slack + _REGAINED * problem.area[zigzag[:1]].sum() / world_size
    climbing = _climbing_pieces(problem, np.sort(problem.longest_first[num_zigzag:]), capacity, cut, limit)
    if climbing is None:
        return None
    pieces = _joined(climbing, _zigzag_pieces(zigzag[1:], share[1:]))
    if not num_zigzag:
        return pieces
    area = problem.mean_work - _area_per_rank(pieces, world_size)
    return _joined(pieces, _make_up_pieces(int(zigzag[0]), int(lengths[zigzag[0]]), share[0], area))


def _joined(*lists: Pieces) -> Pieces:
    return Pieces(*(np.concatenate(columns) for columns in zip(*lists, strict=True)))


def _area_per_rank(pieces: Pieces, world_size: int) -> IntArray:
    """Return int64 [P]: the legal pairs of each rank's queries."""
    if not len(pieces.document):
        return np.zeros(world_size, np.int64)
    _, start, length, rank = merged(pieces)
    return summed_area(start, length, rank, world_size)


def _equal_shares(lengths: IntArray, world_size: int) -> IntArray:
    """Return int64 [k, P]: the tokens of k documents on each rank; the ranks' totals differ by at most one.

    Tokens left over by the division by P are given out round-robin, continuing where the document before stopped.
    """
    length = lengths[:, None]
    spare = length % world_size
    turn = np.cumsum(spare, axis=0) - spare
    return length // world_size + ((np.arange(world_size) - turn) % world_size < spare)


def _zigzag_pieces(documents: IntArray, share: IntArray) -> Pieces:
    """Return 2P pieces for each document; the i-th from the start and the i-th from the end are on the same rank.

    Each document begins one rank further on. A document's last piece is of no use to other ranks. So every rank may
    have one of these at the end of the prefix that travels, where it can be left out.

    Args:
        share: int64 [k, P], the tokens of each document on each rank.
    """
    num_documents, world_size = share.shape
    rank = (np.arange(world_size) + np.arange(1, num_documents + 1)[:, None]) % world_size
    share = np.take_along_axis(share, rank, axis=1)
    head = share // 2
    return Pieces(
        np.repeat(documents, 2 * world_size),
        np.concatenate([head, (share - head)[:, ::-1]], axis=1).reshape(-1),
        np.concatenate([rank, rank[:, ::-1]], axis=1).reshape(-1),
    )


def _make_up_pieces(document: int, length: int, share: IntArray, area: npt.NDArray[Any]) -> Pieces:
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
    return Pieces(
        np.full(2 * len(ranks), document),
        np.array(heads + tails[::-1], np.int64),
        np.array(ranks + ranks[::-1], np.int64),
    )


def _climbing_pieces(
    problem: Problem, documents: IntArray, capacity: IntArray, cut: _Cut | None, limit: float
) -> Pieces | None:
    """Return the pieces of `documents`, int64 [m] ascending, whose positions climb the ring rank by rank.

    Args:
        capacity: int64 [P], tokens of these documents for each rank.
        cut: the document that wraps around the end of the ring, if any.
        limit: with a cut, return None when a rank's work exceeds its share by more.
    """
    if not len(documents):
        return Pieces(documents, documents, documents)
    line = Line(problem, documents)
    if cut is not None:
        line.cut_in_two(int(np.searchsorted(documents, cut.document)), cut.position)
    takes = line.deal(capacity.tolist(), tolerance=problem.tolerance, limit=np.inf if cut is None else limit)
    if takes is None:
        return None
    unit, tokens, rank = np.array(takes).T
    order = np.argsort(np.array(line.begin)[unit[::-1]], kind="stable")  # a unit's tail was taken first
    tokens, rank = tokens[::-1][order], rank[::-1][order]
    document_end, take_end = np.cumsum(problem.lengths[documents]), np.cumsum(tokens)
    end = np.sort(np.concatenate([document_end, take_end]))
    end = end[np.append(True, end[1:] != end[:-1])]
    begin = np.append(0, end[:-1])
    return Pieces(
        documents[np.searchsorted(document_end, begin, side="right")],
        end - begin,
        rank[np.searchsorted(take_end, begin, side="right")],
    )

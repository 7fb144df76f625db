"""The distribution of documents over a ring: each rank takes tokens from the ends of documents, the last rank first.

The documents are laid end to end in a line. A rank needs its share of both the tokens and the attention work. Tokens
near the end of a document cost more than those near its start, so a rank combines expensive tokens of one document with
cheap tokens of another.

Shape legend: n documents, P ranks.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from longctx.ring.plan import IntArray

_FRESH = 0.75
"""The second half of a cut document is used only after all others are down to this fraction of the cut one's length."""


@dataclass(frozen=True, eq=False)
class Problem:
    """The documents and limits that all candidate arrangements share."""

    lengths: IntArray
    """int64 [n]: tokens of each document."""
    longest_first: IntArray
    """int64 [n]: indices of the documents, the longest first."""
    area: IntArray
    """int64 [n]: legal pairs of each document, L(L+1)/2 for L tokens."""
    world_size: int
    group_tokens: int
    mean_work: float
    """Legal pairs of a rank, on average."""
    slack: float
    """Legal pairs that a rank may have beyond the mean."""
    tolerance: float
    """Legal pairs by which a rank's work may differ from its share, if a document stays whole for it."""

    @staticmethod
    def of(cu: IntArray, world_size: int, slack: float, tolerance: float, group_fraction: float) -> Problem:
        """Return the problem of a sequence. `slack` and `tolerance` are parts of the mean work."""
        lengths = np.diff(cu)
        area = lengths * (lengths + 1) // 2
        mean_work = int(area.sum()) / world_size
        return Problem(
            lengths=lengths,
            longest_first=np.argsort(-lengths, kind="stable"),
            area=area,
            world_size=world_size,
            group_tokens=int(cu[-1] / world_size * group_fraction),
            mean_work=mean_work,
            slack=slack * mean_work,
            tolerance=tolerance * mean_work,
        )


class _Take(NamedTuple):
    """The last `tokens` remaining tokens of a unit go to `rank`."""

    unit: int
    tokens: int
    rank: int


class _Mixture(NamedTuple):
    """The tokens that one rank takes from a line."""

    takes: list[tuple[int, int]]
    """(unit, tokens), in the order of taking."""
    work: int
    started: int | None
    """The unit that the next rank should continue."""


class Line:
    """Documents laid end to end in units, from whose ends ranks take tokens.

    A unit is a document, one of the two parts of a cut document, or a group of short neighbours. `ready` holds the
    units that have tokens left, sorted by their work per token: the first is the cheapest, the last the most expensive.
    """

    def __init__(self, problem: Problem, documents: IntArray):
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
        """Remaining length of the unit's document; for a group, the length of a document with the same work a token."""
        self.ready = sorted(range(len(first)), key=self.size.__getitem__)
        self.started: int | None = None
        """The unit from which the previous rank took its expensive tokens."""
        self.lower: int | None = None
        self.upper: int | None = None
        """The two units of a cut document. `upper`, its end, is not ready before `lower`, its start, is used up."""

    def cut_in_two(self, document: int, position: int) -> None:
        """Cut a document into two units, its first `position` tokens and the others, unless it is part of a group."""
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
        """Return the legal pairs of the last `tokens` remaining tokens of a unit."""
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
            capacity: tokens for each rank, which add up to all tokens of the line.
            tolerance: deviation from a rank's share of the work that is accepted to avoid cutting a document.
            limit: return None when the work of a rank exceeds its share by more.
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
        """Choose `tokens` tokens for one rank with work near `share`; return None if fewer are ready.

        At most one rank may hold parts of both units of a cut document: the pieces of two such ranks would interleave.
        So the upper unit waits until the lower one is used up, or is taken whole here.
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
        """Whether no other document has more than `_FRESH` of the upper unit's length left."""
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
        """Combine expensive tokens from the end of `ready` with cheap ones from its start, with `share` work in all.

        The unit that the previous rank started is preferred as the expensive one: continuing it keeps the others whole
        and its K/V near. Return None if there are too few tokens.
        """
        if not tokens:
            return _Mixture([], 0, self.started)
        if all(total < tokens for total in itertools.accumulate(map(self.left.__getitem__, self.ready))):
            return None
        mixture, started = None, self.started
        if started is not None and self.left[started] and started not in (self.ready[0], self.ready[-1]):
            costly = (unit for unit in reversed(self.ready) if unit != started)
            light = (unit for unit in self.ready if unit != started)
            mixture = self._mixture_of(
                itertools.chain([started], costly), itertools.chain(light, [started]), tokens, share, tolerance
            )
        if mixture is None or abs(mixture.work - share) > tolerance + self.size[self.ready[-1]]:
            mixture = self._mixture_of(reversed(self.ready), self.ready, tokens, share, tolerance)
        return mixture

    def _mixture_of(
        self, costliest_first: Iterable[int], lightest_first: Iterable[int], tokens: int, share: float, tolerance: float
    ) -> _Mixture:
        """Combine the first units of both orders, neither of which is read beyond `tokens` tokens."""
        costly, light = _Profile(self, costliest_first, tokens), _Profile(self, lightest_first, tokens)
        num_costly = _root(
            lambda x: costly.work(x) + light.work(tokens - x) - share,
            [x for x in costly.tokens if x <= tokens],
            [tokens - x for x in light.tokens if x <= tokens],
            tolerance,
        )
        takes = costly.first(num_costly)
        return _Mixture(
            takes=takes + light.first(tokens - num_costly),
            work=costly.work(num_costly) + light.work(tokens - num_costly),
            started=takes[-1][0] if takes else self.started,
        )


class _Profile:
    """Units of a line in a given order, up to a number of tokens, and the work of their first x tokens."""

    def __init__(self, line: Line, units: Iterable[int], max_tokens: int):
        self.line, self.units, self.tokens, self.total = line, list[int](), [0], [0]
        for unit in units:
            if self.tokens[-1] >= max_tokens:
                break
            self.units.append(unit)
            self.tokens.append(self.tokens[-1] + line.left[unit])
            self.total.append(self.total[-1] + line.work(unit, line.left[unit]))

    def work(self, tokens: int) -> int:
        """Return the legal pairs of the first `tokens` tokens."""
        i = bisect.bisect_right(self.tokens, tokens) - 1
        part = tokens - self.tokens[i]
        return self.total[i] + (self.line.work(self.units[i], part) if part else 0)

    def first(self, tokens: int) -> list[tuple[int, int]]:
        """Return (unit, tokens) pairs of the first `tokens` tokens."""
        bounds = zip(self.units, self.tokens[:-1], self.tokens[1:], strict=True)
        return [(unit, min(end, tokens) - begin) for unit, begin, end in bounds if begin < tokens]


def _root(error: Callable[[int], float], best_cuts: list[int], good_cuts: list[int], tolerance: float) -> int:
    """Return an integer zero of `error`, or one of the given points if `error` is at most `tolerance` there.

    `best_cuts`, ascending, and `good_cuts`, descending, are the points that cut no expensive or no cheap unit.
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
    """Return int64 [units], the first document of each unit; short neighbours share about `group_tokens` tokens."""
    short = lengths <= group_tokens
    bucket = (np.cumsum(lengths) - lengths) // max(1, group_tokens)
    joins = short[1:] & short[:-1] & (bucket[1:] == bucket[:-1])
    return np.flatnonzero(np.append(True, ~joins))

"""Documents laid end to end, from whose ends the ranks of a ring take tokens, the last rank first.

A rank is to get its share of the tokens and of attention's work at once. Tokens near the end of a document cost more
than those near its begin, so that a rank takes from two documents, one of them at a place where tokens cost much.

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
"""Documents with more than this fraction of the cut one left are used before the cut one's second half."""


@dataclass(frozen=True, eq=False)
class Problem:
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
    def of(cu: IntArray, world_size: int, max_imbalance: float, group_fraction: float) -> Problem:
        lengths = np.diff(cu)
        area = lengths * (lengths + 1) // 2
        return Problem(
            lengths=lengths,
            longest_first=np.argsort(-lengths, kind="stable"),
            area=area,
            world_size=world_size,
            group_tokens=int(cu[-1] / world_size * group_fraction),
            mean_work=int(area.sum()) / world_size,
            slack=(max_imbalance - 1) * int(area.sum()) / world_size,
        )


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


class Line:
    """Documents laid end to end in units, from which ranks take tails.

    A unit is a document, a part of the one that is cut in two, or a group of short neighbours. `ready` holds
    the units that have tokens left by their work per token: its begin is cheap and its end dear.
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
        """Both orders are read no further than `tokens` tokens."""
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
    """Units of a line in one order, up to a number of tokens, and the work of their first x tokens."""

    def __init__(self, line: Line, units: Iterable[int], max_tokens: int):
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

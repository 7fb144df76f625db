"""Which length to try next: the largest that trains and the smallest that does not, in few tries.

A pure function of what has been tried, so that a sweep that was interrupted goes on as if it had not been.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

AIMS = 6
"""Lengths that are tried close to a prediction; a prediction that is wrong so often is not followed any longer."""


class Bracket(NamedTuple):
    """Between which lengths the limit lies."""

    fits: int
    """The largest length that trains; 0 where none is known."""
    fails: int | None
    """The smallest above it that does not; None where none is known."""


def bracket(outcomes: Mapping[int, bool]) -> Bracket:
    """
    Args:
        outcomes: length -> whether it trains. One that does not may lie below one that does: it is then left out.
    """
    fits = max((length for length, ok in outcomes.items() if ok), default=0)
    return Bracket(fits, min((length for length, ok in outcomes.items() if not ok and length > fits), default=None))


def next_length(
    outcomes: Mapping[int, bool], *, guess: float, multiple: int, precision: float, longest: int
) -> int | None:
    """The length to try, or None once the limit is known: to one multiple, or so that the smallest length that fails
    is no more than `precision` above the largest that fits; or nothing fits, or `longest` does.

    Close to the guess first: just below it, then just above. Where that does not settle it, exponentially from what is
    known, then by halves.

    Args:
        outcomes: length -> whether it trains.
        guess: where the limit is predicted to lie, by what is known so far.
        multiple: all lengths are multiples of it.
        precision: relative, above 0.
        longest: no length above it is tried.
    """
    last = max(1, longest // multiple)
    fits, fails = bracket(outcomes)
    low, high = fits // multiple, None if fails is None else fails // multiple
    if low >= last or (high is not None and high - low <= max(1, precision * low)):
        return None
    aim = min(max(1, _aim(guess / multiple, low, high, precision)), last)
    if len(outcomes) < AIMS and low < aim and (high is None or aim < high):
        return aim * multiple
    if high is None:
        return min(max(1, 2 * low), last) * multiple
    return (high // 2 if low == 0 else (low + high) // 2) * multiple


def _aim(guess: float, low: int, high: int | None, precision: float) -> int:
    """What settles it if the guess is right: the other end of a bracket that has one end, else a little below it."""
    if low <= guess <= low * (1 + precision):
        return low + max(1, int(precision * low))
    if high is not None and high / (1 + precision) <= guess <= high:
        return math.ceil(high / (1 + precision))
    return max(int(guess / (1 + precision / 2)), low + (guess > low))

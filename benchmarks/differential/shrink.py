"""The simplest case with the same finding: dimensions go back to their plain values while the finding stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from .judge import Outcome
from .space import Case, make_consistent

SMALLER: dict[str, tuple[Any, ...]] = {
    "documents": (1, 2, 3),
    "steps": (1,),
    "sp": (2, 3),
    "dp": (2, 3),
    "max_length": (17, 37),
}
"""Values that are simpler than others, though not plain."""


def shrink(found: Outcome, judge: Callable[[Case], Outcome], *, most: int = 60) -> Outcome:
    """The outcome of the simplest case that was found.

    Args:
        most: cases to run at most.
    """
    tried = {found.case}
    while most > 0:
        for case in _simpler(found.case):
            if case in tried or most == 0:
                continue
            tried.add(case)
            most -= 1
            outcome = judge(case)
            if is_same(outcome, found):
                found = outcome
                break
        else:
            return found
    return found


def is_same(one: Outcome, other: Outcome) -> bool:
    """Whether two outcomes are the same finding; what is wrong first may differ."""
    return one.status == other.status and (one.status == "wrong" or one.signature == other.signature)


def explains(known: Outcome, outcome: Outcome) -> bool:
    """Whether a finding is a known one again: the same error, or what is wrong has all that the known one needs."""
    if known.status != "wrong" or outcome.status != "wrong":
        return is_same(known, outcome)
    needed = {name: value for name, value in known.case.changed().items() if name not in (*SMALLER, "seed")}
    return needed.items() <= outcome.case.changed().items() and all(
        getattr(outcome.case, name) >= getattr(known.case, name) for name in ("sp", "dp")
    )


def _simpler(case: Case) -> Iterator[Case]:
    """Simpler cases, those first in which most is plain."""
    plain = {name: getattr(Case(), name) for name in case.changed()}
    changed = [name for name in plain if name not in SMALLER or plain[name] < getattr(case, name)]
    half = len(changed) // 2
    if half > 1:
        for part in (changed[:half], changed[half:]):
            yield make_consistent(replace(case, **{name: plain[name] for name in part}))
    for name in reversed(changed):
        yield make_consistent(replace(case, **{name: plain[name]}))
    for name, values in SMALLER.items():
        for value in values:
            now = getattr(case, name)
            if value < now:
                yield make_consistent(replace(case, **{name: value}))

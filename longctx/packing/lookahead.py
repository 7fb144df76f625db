"""Packing with bounded look-ahead: pieces in order, and gaps filled from the pieces that wait.

Best fit decreasing needs every length before its first pack. Here a pack takes pieces in the order they came until
the next one does not fit, and then the waiting piece, or pair of pieces, that fills the gap best. The piece that did
not fit opens the next pack, so that no piece waits for ever, as small ones would if the largest that fits were taken.
"""

from __future__ import annotations

from array import array
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Item = TypeVar("Item")


class LookAhead(Generic[Item]):
    """Pieces on their way into packs of at most `capacity` tokens.

        capacity 10, pieces of 6 5 3 1 4 tokens waiting: the first pack takes 6, then 5 does not fit, and of 3, 1
        and 4 the pair that fills 4 tokens best is 3 + 1, but 4 does it alone  ->  6 4 | 5 3 1

    Args:
        capacity: most tokens in a pack.
        packs: as many packs' tokens should wait before one is taken.
    """

    def __init__(self, capacity: int, packs: int) -> None:
        self.capacity, self.packs = capacity, packs
        self.items: list[Item] = []
        self.sizes = array("q")  # which NumPy copies at once
        self.waiting = 0
        """Tokens that wait."""

    def __len__(self) -> int:
        """Return the number of pieces that wait."""
        return len(self.sizes)

    @property
    def full(self) -> bool:
        """Whether enough tokens wait to take a pack."""
        return self.waiting >= self.packs * self.capacity

    def add(self, size: int, item: Item) -> None:
        """Add a piece of 1 .. capacity tokens behind those that wait."""
        self.sizes.append(size)
        self.items.append(item)
        self.waiting += size

    def take(self) -> list[Item]:
        """Return the next pack. Call this when `full`, or at the end of the stream while pieces wait."""
        sizes, gap, taken = self.sizes, self.capacity, 0
        for size in sizes:
            if size > gap:
                break
            gap -= size
            taken += 1
        pack = self.items[:taken]
        del self.items[:taken], sizes[:taken]
        if gap and sizes:
            chosen, gap = _close(np.array(sizes), gap)
            pack += [self.items[i] for i in chosen]
            for i in sorted(chosen, reverse=True):
                del self.items[i], sizes[i]
        self.waiting -= self.capacity - gap
        return pack


def _close(sizes: NDArray[np.int64], gap: int) -> tuple[list[int], int]:
    """Choose from pieces of these sizes [n] those that fill `gap` tokens best: (their numbers, tokens left)."""
    chosen: list[int] = []
    numbers = np.flatnonzero(sizes <= gap)
    while len(numbers):
        fitting = sizes[numbers]
        order = fitting.argsort(kind="stable")
        ascending = fitting[order]
        largest = int(ascending[-1])
        if gap > 2 * largest:  # no pair fills it: take the next ones in order until a pair can
            picked = np.arange(fitting.cumsum().searchsorted(gap - largest, side="right"))
        else:
            picked = order[_best_pair(ascending, gap)]
        chosen += numbers[picked].tolist()
        gap -= int(fitting[picked].sum())
        if gap < ascending[0]:
            break
        rest = np.delete(numbers, picked)
        numbers = rest[sizes[rest] <= gap]
    return chosen, gap


def _best_pair(ascending: NDArray[np.int64], gap: int) -> list[int]:
    """Return the numbers of the one or two of these sizes, each at most `gap`, with the largest sum up to `gap`."""
    last = len(ascending) - 1
    if last == 0 or ascending[last] == gap:
        return [last]
    partners = ascending.searchsorted(gap - ascending, side="right") - 1  # the largest that fits beside each
    partners = np.minimum(partners, np.arange(-1, last))  # each pair once, and none beside itself
    sums = np.where(partners >= 0, ascending + ascending[partners], ascending)
    best = int(sums.argmax())
    return [best] if partners[best] < 0 else [best, int(partners[best])]

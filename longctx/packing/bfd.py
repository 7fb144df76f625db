"""Best-fit-decreasing bin packing over the histogram of lengths, and the lower bound it is measured against.

Two facts make it fast in plain Python and NumPy:

- Bins with the same free space are interchangeable, so a run of equal documents goes into a run of equal bins
  in one step.
- Lengths only decrease. Whatever is left in a bin that just took as many documents of length `v` as fit is
  smaller than `v`, so free spaces become useful in decreasing order too: the open bins form a stack, smallest
  space on top, and "the tightest bin that fits" is always its top.

`_place` works that way through the histogram.

Best fit decreasing: Johnson et al., 1974, "Worst-Case Performance Bounds for Simple One-Dimensional Packing
Algorithms"; for language-model data: Ding et al., 2024, "Fewer Truncations Improve Language Modeling".
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

_FIELDS = 4  # of a placement step, see `_place`


def sort_decreasing(lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sort by decreasing length, and equal lengths by increasing index, with the same result on every machine.

    Returns:
        (order, sorted lengths), both int64 [n].
    """
    below = lengths.max(initial=0) - lengths
    order = np.argsort(below.astype(np.uint16), kind="stable")  # a radix sort, linear in n
    for shift in range(16, int(below.max(initial=0)).bit_length(), 16):
        digits = (below >> shift).astype(np.uint16)
        order = order[np.argsort(digits[order], kind="stable")]
    return order, lengths[order]


def _place(values: list[int], counts: list[int], capacity: int) -> tuple[NDArray[np.int64], int]:
    """Place `counts[i]` documents of length `values[i]`, for strictly decreasing values.

    Args:
        values, counts: the histogram.
        capacity: tokens per bin.

    Returns:
        (steps, number of bins). A step [4] = (documents per bin, bins, first bin, documents already in each
        of these bins) places documents in sorted order, filling one bin after another.
    """
    steps: list[int] = []
    smallest = values[-1] if values else 0
    n_bins = 0
    stack: list[tuple[int, int, int, int]] = []  # runs of bins, smallest space on top
    waiting: dict[int, list[tuple[int, int, int, int]]] = {}  # runs of bins too full for the current length
    spaces: list[int] = []  # heap of the negated keys of `waiting`

    # A document longer than half a bin always opens its own: no search needed for these.
    alone = 0
    while alone < len(values) and 2 * values[alone] > capacity:
        value, count = values[alone], counts[alone]
        steps += (1, count, n_bins, 0)
        if capacity - value >= smallest:
            waiting[capacity - value] = [(capacity - value, n_bins, count, 1)]
            spaces.append(value - capacity)
        n_bins += count
        alone += 1
    heapify(spaces)

    for value, count in zip(values[alone:], counts[alone:], strict=True):
        while spaces and -spaces[0] >= value:
            stack += waiting.pop(-heappop(spaces))
        while count:
            if stack:
                space, first, bins, held = stack.pop()
            else:
                space, first, held = capacity, n_bins, 0
                bins = -(-count // (capacity // value))
                n_bins += bins
            fit = space // value  # documents of this length that one such bin still takes
            rest = 0
            if fit * bins > count:  # some bins of the run are left, and one may be left half full
                filled, rest = divmod(count, fit)
                opened = filled + (rest > 0)
                if opened < bins:
                    stack.append((space, first + opened, bins - opened, held))
                if rest:
                    stack.append((space - rest * value, first + filled, 1, held + rest))
                bins = filled
            if bins:
                steps += (fit, bins, first, held)
                left = space - fit * value
                if left in waiting:
                    waiting[left].append((left, first, bins, held + fit))
                elif left >= smallest:  # else nothing will ever fit
                    waiting[left] = [(left, first, bins, held + fit)]
                    heappush(spaces, -left)
            if rest:
                steps += (rest, 1, first + bins, held)
            count -= fit * bins + rest
    return np.asarray(steps, dtype=np.int64).reshape(-1, _FIELDS), n_bins


def best_fit_decreasing(lengths: NDArray[np.int64], capacity: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pack documents into bins: longest first, each into the fullest bin that still takes it.

    With capacity 6 and lengths 4 3 2 1 2, the bins hold documents (0, 2), (1, 4, 3).

    Args:
        lengths: int64 [n], each in 0..capacity.
        capacity: tokens per bin.

    Returns:
        (documents, offsets), int64 [m] and int64 [n_bins + 1]: bin b holds documents[offsets[b]] and
        so on, longest first; those of length 0 are in none. Equal documents and equally full bins are taken in
        a fixed order.
    """
    order, decreasing = sort_decreasing(lengths)
    present = int(np.count_nonzero(lengths))
    order, decreasing = order[:present], decreasing[:present]
    edges = np.flatnonzero(np.diff(decreasing, prepend=-1, append=-1))
    steps, n_bins = _place(decreasing[edges[:-1]].tolist(), np.diff(edges).tolist(), capacity)
    per_bin, bins, first, held = steps.T
    runs = np.repeat(np.arange(len(steps)), bins)  # one run of documents per (step, bin)
    bin_of_run = first[runs] + np.arange(len(runs)) - np.repeat(np.cumsum(bins) - bins, bins)
    run_sizes = per_bin[runs]
    sizes = np.zeros(n_bins, dtype=np.int64)
    np.add.at(sizes, bin_of_run, run_sizes)
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    # Document j of the sorted order, i-th of its run, goes to the run's place + i.
    shift = offsets[bin_of_run] + held[runs] - (np.cumsum(run_sizes) - run_sizes)
    documents = np.empty(present, dtype=np.int64)
    documents[np.repeat(shift, run_sizes) + np.arange(present)] = order
    return documents, offsets


def lower_bound(lengths: NDArray[np.integer], capacity: int) -> int:
    """Return the fewest bins that any packing can reach: max(ceil(sum / capacity), Martello-Toth L2).

    Args:
        lengths: integers [n], each at most `capacity`.
        capacity: tokens per bin.

    Martello and Toth, 1990, "Lower bounds and reduction procedures for the bin packing problem".
    """
    ascending = np.sort(np.asarray(lengths, dtype=np.int64))
    ascending = ascending[np.searchsorted(ascending, 1) :]
    if len(ascending) == 0:
        return 0
    sums = np.concatenate(([0], np.cumsum(ascending)))
    half = int(np.searchsorted(ascending, capacity // 2, side="right"))  # documents up to half a bin
    thresholds = np.unique(np.append(ascending[:half], 0))
    low = np.searchsorted(ascending, thresholds, side="left")
    high = np.searchsorted(ascending, capacity - thresholds, side="right")
    large = len(ascending) - half  # each needs a bin of its own
    room = (high - half) * capacity - (sums[high] - sums[half])  # left beside those that leave >= threshold
    small = sums[half] - sums[low]
    extra = np.maximum(0, -((room - small) // capacity))
    return max(int(-(-sums[-1] // capacity)), large + int(extra.max()))

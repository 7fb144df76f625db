"""Best-fit-decreasing bin packing over the histogram of lengths, and the lower bound it is measured against.

Two facts make it fast in plain Python and NumPy:

- Bins with the same free space are interchangeable, so a run of equal documents goes into a run of equal bins
  in one step.
- Lengths only decrease. Whatever is left in a bin that just took as many documents of length `v` as fit is
  smaller than `v`, so free spaces become useful in decreasing order too: the open bins form a stack, smallest
  space on top, and "the tightest bin that fits" is always its top.

`_place` works that way through the histogram. Where hardly two documents are equally long it gains nothing from
runs; there `_place_phases` finds what the stack would do for thousands of documents at once.

Best fit decreasing: Johnson et al., 1974, "Worst-Case Performance Bounds for Simple One-Dimensional Packing
Algorithms"; for language-model data: Ding et al., 2024, "Fewer Truncations Improve Language Modeling".
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

_FIELDS = 4  # of a placement step, see `_place`

# Below these, a step of `_place` costs less than its share of a phase.
_PHASE_LENGTHS = 1000  # documents
_PHASE_VARIETY = 1 / 4  # lengths a document


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


def _match(opened: NDArray[np.int64], n_documents: int) -> NDArray[np.int64]:
    """Give each document in turn the slot that was opened last, as a closing bracket matches an opening one.

        slots opened before document 0, 0, 2; 4 documents:  ( ( ) ) ( ) )  ->  slots 1 0 2 -1

    Args:
        opened: the document before which each slot opens, int64 [n_slots], not decreasing.
        n_documents: how many there are.

    Returns:
        Slot of each document, int64 [n_documents], -1 where none is left.
    """
    is_slot = np.zeros(len(opened) + n_documents, dtype=bool)
    is_slot[opened + np.arange(len(opened))] = True
    depth = np.cumsum(np.where(is_slot, 1, -1))
    lowest = np.minimum(np.minimum.accumulate(depth), 0)
    left_over = np.diff(lowest, prepend=0) < 0
    # A slot and the document that takes it are on one level, with nothing of this level between them; 0: no slot.
    level = depth - lowest + ~(is_slot | left_over)
    by_level = np.argsort(level.astype(np.min_scalar_type(level.max())), kind="stable")
    slot = np.where(is_slot, np.cumsum(is_slot) - 1, -1)
    taken = np.full(len(slot), -1)
    taken[by_level[1:]] = slot[by_level[:-1]]
    return taken[~is_slot]


def _place_phase(
    lengths: NDArray[np.int64], capacity: int, space: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Place documents until a bin returns to the stack after it has taken all that it was sure to take.

    A bin is sure to take `space // v` documents, where v is the first length that fits, and opens as many slots.

    Args:
        lengths: decreasing, int64 [n], all from capacity // (k + 1) + 1 to capacity // k for some k.
        capacity: tokens per bin.
        space: left in each open bin, int64 [n_bins]; new bins are numbered from n_bins on.

    Returns:
        (bin of each document, documents that the bin took before it in this phase), int64 [m] each, 1 <= m <= n.
    """
    fits = np.flatnonzero(space >= lengths[-1])
    fits = fits[np.argsort(-space[fits], kind="stable")]
    opened = np.searchsorted(-lengths, -space[fits])
    slots = np.zeros_like(space)
    slots[fits] = space[fits] // lengths[opened]
    bin_of_slot = np.repeat(fits, slots[fits])
    rank_of_slot = np.repeat(np.cumsum(slots[fits]), slots[fits]) - 1 - np.arange(len(bin_of_slot))
    taken = _match(np.repeat(opened, slots[fits]), len(lengths))

    new = np.flatnonzero(taken < 0)
    per_new = capacity // int(lengths[0])
    bins, ranks = np.divmod(np.arange(len(new)), per_new)
    n_new = -(-len(new) // per_new)
    bin_of_slot = np.concatenate((bin_of_slot, bins + len(space)))
    rank_of_slot = np.concatenate((rank_of_slot, ranks))
    taken[new] = np.arange(len(new)) + len(bin_of_slot) - len(new)
    bins, ranks = bin_of_slot[taken], rank_of_slot[taken]

    slots = np.concatenate((slots, np.full(n_new, per_new)))
    left = np.concatenate((space, np.full(n_new, capacity)))
    np.subtract.at(left, bins, lengths)
    last = np.flatnonzero(ranks == slots[bins] - 1)  # documents that take the last slot of a bin
    comes_back = np.maximum(last + 1, np.searchsorted(-lengths, -left[bins[last]]))
    stop = int(comes_back.min(initial=len(lengths)))
    return bins[:stop], ranks[:stop]


def _place_phases(decreasing: NDArray[np.int64], capacity: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Place documents one by one while there are many of them, of many lengths.

    Returns:
        (steps, space): one step, as of `_place`, for each document that was placed, int64 [m, 4], and what is left
        in each bin, int64 [n_bins].
    """
    space, held = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    phases = [np.zeros((0, _FIELDS), dtype=np.int64)]
    done = 0
    while done < len(decreasing):
        shortest = capacity // (capacity // int(decreasing[done]) + 1) + 1
        lengths = decreasing[done : len(decreasing) - int(np.searchsorted(decreasing[::-1], shortest))]
        variety = np.count_nonzero(np.diff(lengths)) + 1
        if len(lengths) < _PHASE_LENGTHS or variety < _PHASE_VARIETY * len(lengths):
            break
        bins, ranks = _place_phase(lengths, capacity, space)
        n_new = max(int(bins.max()) + 1 - len(space), 0)
        space = np.concatenate((space, np.full(n_new, capacity)))
        held = np.concatenate((held, np.zeros(n_new, dtype=np.int64)))
        phases.append(np.stack((np.ones_like(bins), np.ones_like(bins), bins, held[bins] + ranks), axis=1))
        np.subtract.at(space, bins, lengths[: len(bins)])
        np.add.at(held, bins, 1)
        done += len(bins)
        if len(bins) < len(lengths) // 4:
            break
    return np.concatenate(phases), space


def _place(
    values: list[int], counts: list[int], capacity: int, open_bins: list[tuple[int, int, int, int]], n_bins: int
) -> tuple[NDArray[np.int64], int]:
    """Place `counts[i]` documents of length `values[i]`, for strictly decreasing values.

    Args:
        values, counts: the histogram.
        capacity: tokens per bin.
        open_bins: runs of bins that hold documents already, (space, first bin, bins, documents in each); none where
            there is a value above half the capacity.
        n_bins: bins so far.

    Returns:
        (steps, number of bins). A step [4] = (documents per bin, bins, first bin, documents already in each
        of these bins) places documents in sorted order, filling one bin after another.
    """
    steps: list[int] = []
    smallest = values[-1] if values else 0
    stack: list[tuple[int, int, int, int]] = []  # runs of bins, smallest space on top
    waiting: dict[int, list[tuple[int, int, int, int]]] = {}  # runs of bins too full for the current length
    spaces: list[int] = []  # heap of the negated keys of `waiting`

    for run in open_bins:
        waiting.setdefault(run[0], []).append(run)
    spaces += [-space for space in waiting]

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
    steps, n_bins = _steps(decreasing, capacity)
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


def _steps(decreasing: NDArray[np.int64], capacity: int) -> tuple[NDArray[np.int64], int]:
    """Return the steps of `_place` that place all documents of these lengths, int64 [n], and the number of bins."""
    phases, space = _place_phases(decreasing, capacity)
    rest = decreasing[len(phases) :]
    if len(rest) == 0:
        return phases, len(space)
    phases[:, 2], open_bins = _runs_of_bins(phases[:, 2], space, int(rest[-1]))
    edges = np.flatnonzero(np.diff(rest, prepend=-1, append=-1))
    steps, n_bins = _place(rest[edges[:-1]].tolist(), np.diff(edges).tolist(), capacity, open_bins, len(space))
    return np.concatenate((phases, steps)), n_bins


def _runs_of_bins(
    bins: NDArray[np.int64], space: NDArray[np.int64], smallest: int
) -> tuple[NDArray[np.int64], list[tuple[int, int, int, int]]]:
    """Renumber the bins, so that open bins that are alike follow each other.

    Args:
        bins: bin of each document so far, int64 [m].
        space: left in each bin, int64 [n_bins].
        smallest: bins with less space than this are not open.

    Returns:
        (new bins, int64 [m]; open runs: space, first bin, bins, documents in each).
    """
    held = np.bincount(bins, minlength=len(space))
    is_open = space >= smallest
    opened = np.flatnonzero(is_open)
    order = np.concatenate((np.flatnonzero(~is_open), opened[np.lexsort((held[opened], space[opened]))]))
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    space, held = space[order], held[order]
    is_first = (np.diff(space, prepend=-1) != 0) | (np.diff(held, prepend=-1) != 0)
    first = np.flatnonzero(is_first & (space >= smallest))
    runs = zip(space[first], first, np.diff(first, append=len(space)), held[first], strict=True)
    return number[bins], [(int(s), int(f), int(n), int(h)) for s, f, n, h in runs]


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

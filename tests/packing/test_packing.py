"""Packing: plans against a plain reference, and exact counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.packing import Packing, lower_bound, pack, plan_packing

CAPACITIES = st.one_of(
    st.just(1), st.integers(1, 8).flatmap(lambda n: st.sampled_from([2**n - 1, 2**n, 2**n + 1])), st.integers(1, 300)
)


@st.composite
def fitting(draw: st.DrawFn) -> tuple[list[int], int]:
    """(lengths, capacity) with every length in 0..capacity; repeated lengths are likely."""
    capacity = draw(CAPACITIES)
    some = draw(st.lists(st.integers(0, capacity), min_size=1, max_size=12))
    lengths = draw(st.lists(st.sampled_from(some), max_size=150))
    return lengths, capacity


@st.composite
def any_length(draw: st.DrawFn) -> tuple[list[int], int]:
    """(lengths, capacity), empty and too long documents included."""
    capacity = draw(CAPACITIES)
    return draw(st.lists(st.integers(0, 3 * capacity + 1), max_size=60)), capacity


def reference_fills(lengths: list[int], capacity: int) -> list[int]:
    """Best fit decreasing as the textbook has it: the fullest bin that still takes the document."""
    fills: list[int] = []
    for length in sorted(filter(None, lengths), reverse=True):
        fitting_bins = [b for b, fill in enumerate(fills) if fill + length <= capacity]
        if fitting_bins:
            fills[max(fitting_bins, key=lambda b: fills[b])] += length
        else:
            fills.append(length)
    return sorted(fills)


def fewest_bins(lengths: list[int], capacity: int) -> int:
    """The optimum, by trying everything."""
    best = len(lengths)

    def place(rest: list[int], fills: list[int]) -> None:
        nonlocal best
        if len(fills) >= best:
            return
        if not rest:
            best = len(fills)
            return
        for b in range(len(fills)):
            if fills[b] + rest[0] <= capacity:
                place(rest[1:], [*fills[:b], fills[b] + rest[0], *fills[b + 1 :]])
        place(rest[1:], [*fills, rest[0]])

    place(sorted(filter(None, lengths), reverse=True), [])
    return 0 if not any(lengths) else best


def pieces_of(packing: Packing, lengths: list[int]) -> list[tuple[int, int, int]]:
    """Every (document, start, stop) of a plan."""
    starts = np.zeros(len(packing.indices), int) if packing.starts is None else packing.starts
    stops = starts + packing.piece_lengths(np.array(lengths, dtype=np.int64))
    return list(zip(packing.indices.tolist(), starts.tolist(), stops.tolist(), strict=True))


def check_nothing_lost(packing: Packing, lengths: list[int]) -> None:
    """The pieces of every document, in order of their starts, cover it exactly; packs are within capacity."""
    covered = dict.fromkeys((i for i, length in enumerate(lengths) if length), 0)
    for document, start, stop in sorted(pieces_of(packing, lengths)):
        assert start == covered[document] < stop
        covered[document] = stop
    assert all(stop == lengths[document] for document, stop in covered.items())
    fills = packing.fills(np.array(lengths, dtype=np.int64))
    assert len(fills) == len(packing) == len(list(packing.bins))
    assert all(0 < fill <= packing.capacity for fill in fills)


# Plans


@given(fitting())
def test_bfd_is_a_permutation_with_the_fills_of_the_reference(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    packing = pack(lengths, capacity)
    present = [i for i, length in enumerate(lengths) if length]
    assert sorted(packing.indices.tolist()) == present, "each document once, empty ones never"
    assert packing.starts is None
    fills = packing.fills(np.array(lengths, dtype=np.int64))
    assert sorted(fills.tolist()) == reference_fills(lengths, capacity)
    check_nothing_lost(packing, lengths)


@given(any_length())
def test_bfd_split_and_wrapped_lose_nothing(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    split, wrapped = pack(lengths, capacity, "bfd_split"), pack(lengths, capacity, "wrapped")
    check_nothing_lost(split, lengths)
    check_nothing_lost(wrapped, lengths)
    for document, start, stop in pieces_of(split, lengths):
        whole = lengths[document] <= capacity
        assert (start, stop) == (0, lengths[document]) if whole else start % capacity == 0
    assert len(wrapped) == -(-sum(lengths) // capacity)
    assert all(wrapped.fills(np.array(lengths, dtype=np.int64))[:-1] == capacity)
    assert wrapped.indices.tolist() == sorted(wrapped.indices.tolist())


@settings(max_examples=40)
@given(st.integers(1, 30).flatmap(lambda c: st.tuples(st.lists(st.integers(0, c), max_size=7), st.just(c))))
def test_lower_bound_is_at_most_the_optimum(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    optimum = fewest_bins(lengths, capacity)
    assert -(-sum(lengths) // capacity) <= lower_bound(np.array(lengths, dtype=np.int64), capacity) <= optimum
    assert len(pack(lengths, capacity)) >= optimum


def test_lower_bound_sees_what_the_sum_does_not() -> None:
    assert lower_bound(np.array([6, 6, 6, 4, 4, 5, 0]), 10) == 4  # the sum alone gives ceil(31 / 10) = 4
    assert lower_bound(np.array([6, 6, 6, 5, 5, 5]), 10) == 5  # ceil(33 / 10) = 4, but 6 and 5 never share
    assert lower_bound(np.array([7, 7, 7, 7]), 10) == 4


def test_lengths_beyond_32_bits() -> None:
    big = 2**40
    lengths = [big, big - 3, 3, 2**33, 5]
    assert sorted(pack(lengths, big).fills(np.array(lengths)).tolist()) == [2**33 + 5, big, big]
    check_nothing_lost(pack(lengths, 2**35, "bfd_split"), lengths)
    wrapped = pack(lengths, 2**35, "wrapped")
    check_nothing_lost(wrapped, lengths)
    assert wrapped.stops is not None
    assert wrapped.stops.dtype == wrapped.offsets.dtype == np.int64
    check_nothing_lost(pack([2**61, 2**61, 2**60], 2**62), [2**61, 2**61, 2**60])


@pytest.mark.parametrize(
    ("lengths", "capacity", "strategy", "words"),
    [
        ([3, 9, 11], 8, "bfd", ["2 of 3 documents", "capacity of 8", "11 (document 2)", "bfd_split"]),
        ([3, 9], 8, "none", ["1 of 2 documents", "9 (document 1)"]),
        ([3], 8, "best", ["'best'", "bfd_split"]),
        ([3], 0, "bfd", ["at least 1", "got 0"]),
        ([3], 2.5, "bfd", ["got 2.5"]),
        ([3, -1], 8, "bfd", ["negative", "-1 for document 1"]),
        ([[3]], 8, "bfd", ["shape (1, 1)"]),
        ([3.0], 8, "bfd", ["integers", "float64"]),
    ],
)
def test_bad_arguments(lengths: list, capacity: int, strategy: str, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        pack(lengths, capacity, strategy)
    assert all(word in str(error.value) for word in words), str(error.value)


# Overlong documents


@given(
    any_length(),
    st.sampled_from(["truncate", "drop", "split"]),
    st.sampled_from(["bfd", "bfd_split", "wrapped", "none"]),
)
def test_every_token_is_counted_once(case: tuple[list[int], int], overlong: str, strategy: str) -> None:
    lengths, capacity = case
    packing, report = plan_packing(lengths, capacity, strategy=strategy, overlong=overlong)
    too_long = [length for length in lengths if length > capacity]
    placed = pieces_of(packing, lengths)
    assert report.tokens_kept == sum(stop - start for _, start, stop in placed)
    assert report.tokens == sum(lengths)
    assert report.tokens == report.tokens_kept + report.tokens_cut + report.tokens_dropped
    assert report.tokens_cut == (sum(too_long) - len(too_long) * capacity if overlong == "truncate" else 0)
    assert report.tokens_dropped == (sum(too_long) if overlong == "drop" else 0)
    assert report.documents_dropped == (len(too_long) if overlong == "drop" else 0)
    assert (report.documents, report.too_long_documents) == (len(lengths), len(too_long))
    assert report.empty_documents == lengths.count(0)
    assert (report.packs, report.pieces) == (len(packing), len(packing.indices))
    if overlong == "split":
        check_nothing_lost(packing, lengths)
    if strategy == "none":  # documents alone, or their pieces, in order
        assert len(packing) == len(placed)
        assert placed == sorted(placed)
    if overlong == "truncate" and strategy in ("bfd", "none"):
        assert {d: (a, b) for d, a, b in placed} == {
            d: (0, min(length, capacity)) for d, length in enumerate(lengths) if length
        }


def test_overlong_error_weighs_the_choices() -> None:
    with pytest.raises(ValueError, match="2 of 4 documents are longer than max_length = 10") as error:
        plan_packing([4, 25, 11, 0], 10)
    message = str(error.value)
    assert "document 1 with 25" in message
    assert "Raise --max_length to 25" in message
    choices = (
        "--overlong truncate cuts 16 of the 40 tokens, drop leaves out 36 of them, split makes 5 pieces and loses none"
    )
    assert choices in message
    for strategy in ("bfd_split", "wrapped"):  # these cut by themselves
        assert plan_packing([4, 25], 10, strategy=strategy)[1].tokens_kept == 29
    with pytest.raises(ValueError, match="needs the turn_ends of the documents"):
        plan_packing([11], 10, overlong="turns")
    with pytest.raises(ValueError, match="'keep'"):
        plan_packing([1], 10, overlong="keep")


def test_report_reads_well() -> None:
    for overlong, lost in {"truncate": "16 tokens cut off", "drop": "2 documents dropped", "split": "2 split"}.items():
        assert plan_packing([4, 25, 11, 0], 10, overlong=overlong)[1].short().endswith(f"; {lost}")
    text = str(plan_packing([4, 25, 11, 0], 10, overlong="truncate")[1])
    assert "4 documents with 40 tokens in 3 packs" in text
    assert "16 tokens cut off (40.00%)" in text
    assert "1 empty documents left out" in text
    report = plan_packing([4, 25, 11, 0], 10, overlong="drop")[1]
    assert "2 documents dropped with 36 tokens" in str(report)
    assert report.to_dict()["tokens_dropped"] == 36
    assert report.fill == 0.4

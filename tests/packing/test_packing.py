"""Packing: plans against a plain reference, rows against the documents they were cut from, exact counts."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longctx.packing import (
    PackedDataset,
    Packing,
    bfd,
    lower_bound,
    one_per_bin,
    pack,
    pack_dataset,
    plan_packing,
    read_lengths,
)

CAPACITIES = st.one_of(
    st.just(1),
    st.integers(1, 8).flatmap(lambda n: st.sampled_from([2**n - 1, 2**n, 2**n + 1])),
    st.integers(1, 300),
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
    pieces = [packing.piece(i) for i in range(len(packing.indices))]
    return [(p.document, p.start, lengths[p.document] if p.stop is None else p.stop) for p in pieces]


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


def test_bfd_matches_the_reference_on_heavy_tails() -> None:
    rng = np.random.default_rng(0)
    for capacity in (127, 1000, 4096, 100_000):
        lengths = np.clip(rng.lognormal(5, 1.5, 3000), 1, capacity).astype(np.int64)
        spread = rng.integers(capacity // 5, capacity // 2 + 2, 3000)
        for sample in (lengths, spread):
            fills = np.sort(pack(sample, capacity).fills(sample))
            assert fills.tolist() == reference_fills(sample.tolist(), capacity)


@given(fitting(), st.integers(1, 20), st.sampled_from([0, 0.5]))
@example(([19, 16, 14], 50), 1, 0)  # the bin of the first is sure to take the second, and then takes the third too
def test_bfd_is_the_same_in_phases(case: tuple[list[int], int], fewest: int, variety: float) -> None:
    """Documents placed many at a time, all of them or the longest ones before the histogram takes over."""
    lengths, capacity = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bfd, "_PHASE_LENGTHS", fewest)
        patch.setattr(bfd, "_PHASE_VARIETY", variety)
        packing = pack(lengths, capacity)
    assert sorted(packing.fills(np.array(lengths, dtype=np.int64)).tolist()) == reference_fills(lengths, capacity)
    check_nothing_lost(packing, lengths)


@given(st.lists(st.integers(0, 12), max_size=20), st.integers(1, 12))
def test_documents_take_slots_like_closing_brackets(opened: list[int], n_documents: int) -> None:
    opened = sorted(before for before in opened if before < n_documents)
    stack, expected = [], []
    for document in range(n_documents):
        stack += [slot for slot, before in enumerate(opened) if before == document]
        expected.append(stack.pop() if stack else -1)
    assert bfd._match(np.array(opened, dtype=np.int64), n_documents).tolist() == expected


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


@given(fitting())
def test_none_keeps_documents_alone_and_in_order(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    present = [i for i, length in enumerate(lengths) if length]
    for packing in (pack(lengths, capacity, "none"), one_per_bin(lengths)):
        assert [b.tolist() for b in packing.bins] == [[i] for i in present]


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


def test_plan_is_compact() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 2000, 70_000)
    packing = pack(lengths, 4096)
    assert packing.indices.dtype == np.uint32
    assert packing.nbytes <= 8 * len(lengths)
    assert pack([1] * 256, 300).indices.dtype == np.uint8
    assert pack([1] * 257, 300).indices.dtype == np.uint16


def test_same_plan_in_every_process() -> None:
    code = (
        "import hashlib, numpy as np; from longctx.packing.plan import pack\n"
        "x = np.random.default_rng(3).integers(0, 900, 5000)\n"
        "plans = [pack(x, 900, s) for s in ('bfd', 'bfd_split', 'wrapped')]\n"
        "plans = b''.join(p.indices.tobytes() + p.offsets.tobytes() for p in plans)\n"
        "print(hashlib.sha256(plans).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(digests) == 1


def test_select_reorders_packs() -> None:
    lengths = np.array([4, 3, 9, 2, 1, 7])
    for packing in (pack(lengths, 9), pack(lengths, 4, "bfd_split")):
        order = list(reversed(range(len(packing))))[:-1]
        chosen = packing.select(order)
        assert [b.tolist() for b in chosen.bins] == [packing.documents(i).tolist() for i in order]
        assert chosen.fills(lengths).tolist() == packing.fills(lengths)[order].tolist()


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
    if strategy == "none":
        assert len(packing) == len(placed)
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
    assert "--overlong truncate  cuts 16 of the 40 tokens" in message
    assert "--overlong drop      drops 2 documents with 36 of the 40 tokens" in message
    assert "--overlong split     makes 5 pieces of them, 0 tokens lost" in message
    for strategy in ("bfd_split", "wrapped"):  # these cut by themselves
        assert plan_packing([4, 25], 10, strategy=strategy)[1].tokens_kept == 29
    with pytest.raises(ValueError, match="'keep'"):
        plan_packing([1], 10, overlong="keep")


def test_report_reads_well() -> None:
    text = str(plan_packing([4, 25, 11, 0], 10, overlong="truncate")[1])
    assert "4 documents with 40 tokens in 3 packs" in text
    assert "16 tokens cut off (40.00%)" in text
    assert "1 empty documents left out" in text
    report = plan_packing([4, 25, 11, 0], 10, overlong="drop")[1]
    assert "2 documents dropped with 36 tokens" in str(report)
    assert report.to_dict()["tokens_dropped"] == 36
    assert report.fill == 0.4


# Rows out of Arrow

COLUMNS = {"input_ids": pa.int32(), "labels": pa.int64(), "completion_mask": pa.int8(), "flag": pa.bool_()}
SCORE = {"score": pa.float32()}


def make_documents(lengths: list[int]) -> list[dict[str, list]]:
    """Documents whose tokens differ everywhere, so that a swapped token shows."""
    rng = np.random.default_rng(len(lengths))
    return [
        {
            "input_ids": list(range(1000 * i, 1000 * i + n)),
            "labels": rng.integers(-100, 2**40, n).tolist(),
            "completion_mask": rng.integers(0, 2, n).tolist(),
            "flag": (rng.random(n) < 0.5).tolist(),
            "score": rng.random(n).astype(np.float32).tolist(),
        }
        for i, n in enumerate(lengths)
    ]


def make_table(documents: list[dict[str, list]], kind: str, chunk_sizes: list[int], junk: int) -> pa.Table:
    """A table of the documents in chunks; with `junk`, slices of longer arrays with nulls outside."""
    make_type = {"list": pa.list_, "large_list": pa.large_list}[kind]
    zero = {name: type_.to_pandas_dtype()(0) for name, type_ in (COLUMNS | SCORE).items()}
    extra = [{name: [None, value] for name, value in zero.items()}] * junk
    chunks, position = [], 0
    for size in [*chunk_sizes, len(documents)]:
        part = documents[position : position + size]
        columns = {
            name: pa.array([d[name] for d in [*extra, *part, *extra]], type=make_type(type_))
            for name, type_ in (COLUMNS | SCORE).items()
        }
        text = pa.array(["text"] * (len(part) + 2 * junk), type=pa.string())
        chunks.append(pa.table(columns | {"text": text}).slice(junk, len(part)))
        position += size
    return pa.concat_tables(chunks)


@given(
    any_length(),
    st.sampled_from(["list", "large_list"]),
    st.lists(st.integers(0, 20), max_size=4),
    st.integers(0, 2),
    st.sampled_from(["bfd", "bfd_split", "wrapped", "none"]),
    st.sampled_from(["truncate", "drop", "split"]),
)
@settings(max_examples=60, deadline=None)
def test_rows_are_byte_equal_to_their_documents(
    case: tuple[list[int], int], kind: str, chunk_sizes: list[int], junk: int, strategy: str, overlong: str
) -> None:
    lengths, capacity = case
    documents = make_documents(lengths)
    table = make_table(documents, kind, chunk_sizes, junk)
    assert read_lengths(table).tolist() == lengths
    packing, _ = plan_packing(lengths, capacity, strategy=strategy, overlong=overlong)
    packed = PackedDataset(table, packing)
    assert len(packed) == len(packing)
    placed = pieces_of(packing, lengths)
    for index in range(len(packed)):
        row = packed[index]
        pieces = placed[packing.offsets[index] : packing.offsets[index + 1]]
        assert row["seq_lengths"].tolist() == [stop - start for _, start, stop in pieces]
        assert row["position_ids"].tolist() == [i for _, start, stop in pieces for i in range(stop - start)]
        for name, type_ in (COLUMNS | SCORE).items():
            expected = [value for document, start, stop in pieces for value in documents[document][name][start:stop]]
            assert row[name].tolist() == expected, name
            dtype = np.int64 if name == "input_ids" else type_.to_pandas_dtype()
            assert row[name].dtype == dtype
    assert "text" not in packed.column_names


def test_fixed_size_lists_and_slices() -> None:
    values = pa.array(range(24), type=pa.int32())
    table = pa.table({"input_ids": pa.FixedSizeListArray.from_arrays(values, 4)}).slice(1, 4)
    packed = PackedDataset(table, pack(read_lengths(table), 8))
    assert sorted(token for row in packed for token in row["input_ids"].tolist()) == list(range(4, 20))


def test_values_that_are_a_slice_themselves() -> None:
    values = pa.array(range(10), type=pa.int32()).slice(3)
    table = pa.table({"input_ids": pa.ListArray.from_arrays(pa.array([0, 2, 5], type=pa.int32()), values)})
    assert PackedDataset(table, pack([2, 3], 5))[0]["input_ids"].tolist() == [5, 6, 7, 3, 4]


def small_dataset() -> datasets.Dataset:
    documents = make_documents([5, 2, 7, 0, 3, 4, 1, 6])
    return datasets.Dataset.from_list([d | {"text": "text"} for d in documents])


def tokens_of(rows: object) -> list[int]:
    return sorted(token for row in rows for token in np.asarray(row["input_ids"]).tolist())  # type: ignore[attr-defined]


def test_shuffled_and_selected_datasets_stay_where_they_are(tmp_path: Path) -> None:
    small_dataset().save_to_disk(tmp_path / "data")
    stored = datasets.load_from_disk(str(tmp_path / "data"))
    files = sorted(tmp_path.rglob("*"))
    chosen = stored.select([6, 2, 0, 4]).shuffle(seed=1)
    assert chosen._indices is not None, "the case this test is about"
    packed = PackedDataset(chosen, pack(read_lengths(chosen), 8))
    assert tokens_of(packed) == tokens_of(chosen)
    for index, documents in enumerate(packed.packing.bins):
        row = [token for i in documents for token in chosen[int(i)]["input_ids"]]
        assert packed[index]["input_ids"].tolist() == row
    on_disk = [path for path in sorted(tmp_path.rglob("*")) if not path.name.startswith("cache-")]
    assert on_disk == files, "no second copy of the data"


def test_workers_receive_file_names_not_tokens(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"input_ids": [list(range(50_000))] * 20}).save_to_disk(tmp_path / "data")
    stored = datasets.load_from_disk(str(tmp_path / "data"))
    packed = PackedDataset(stored, one_per_bin(read_lengths(stored)))
    sent = pickle.dumps(packed)
    assert len(sent) < 20_000
    copy = pickle.loads(sent)
    assert copy[3]["input_ids"].tolist() == packed[3]["input_ids"].tolist()


def test_row_access() -> None:
    packed = PackedDataset(small_dataset(), pack(read_lengths(small_dataset()), 8), columns=["input_ids"])
    assert packed.column_names == ["input_ids", "seq_lengths", "position_ids"]
    last = len(packed) - 1
    assert packed[-1]["input_ids"].tolist() == packed[last]["input_ids"].tolist()
    assert [row["input_ids"].tolist() for row in packed.__getitems__([0, last])] == [
        packed[0]["input_ids"].tolist(),
        packed[last]["input_ids"].tolist(),
    ]
    with pytest.raises(IndexError, match=f"pack {last + 1} of {last + 1}"):
        packed[last + 1]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (
            {"input_ids": [[1, 2], [3]], "labels": [[1, 2], [3, 4]]},
            ["'labels'", "2 values for document 1", "1 input_ids"],
        ),
        ({"labels": [[1], [3]], "input_ids": [[1, 2], [3]]}, ["'labels'", "1 values for document 0"]),
        ({"input_ids": [[1, 2], None]}, ["'input_ids'", "null", "document 1"]),
        ({"input_ids": [[1, 2], [], [5, None]]}, ["'input_ids'", "null among the tokens of document 2"]),
        ({"input_ids": [[1, 2]], "seq_lengths": [[1, 1]]}, ["packed already", "seq_lengths"]),
        ({"text": ["a"]}, ["tokenise first", "text: string"]),
    ],
)
def test_tables_that_cannot_be_packed(columns: dict[str, list], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        read_lengths(pa.table(columns))
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("packing", "words"),
    [
        (pack([2, 2, 2], 4), ["document 2", "the data set has 2"]),
        (pack([6, 1], 4, "bfd_split"), ["up to token 4 of document 0", "which has 3"]),
        (pack([2, 1], 3), ["would hold 5 tokens", "the limit is 3"]),
    ],
)
def test_plan_for_other_documents(packing: Packing, words: list[str]) -> None:
    with pytest.raises(ValueError, match="Plan again") as error:
        PackedDataset(pa.table({"input_ids": [[1, 2, 3], [4, 5]]}), packing)
    assert all(word in str(error.value) for word in words), str(error.value)


# pack_dataset


def test_pack_dataset_has_the_columns_and_rows_of_trl() -> None:
    from trl.data_utils import pack_dataset as trl_pack_dataset

    documents = small_dataset().select_columns(["input_ids", "labels", "flag"])
    for strategy in ("bfd", "bfd_split"):
        ours, theirs = pack_dataset(documents, 8, strategy), trl_pack_dataset(documents, 8, strategy)
        assert set(ours.column_names) == set(theirs.column_names)
        assert sorted(map(len, ours["input_ids"])) == sorted(map(len, theirs["input_ids"]))
        assert tokens_of(ours) == tokens_of(theirs)
        for name in ("input_ids", "labels", "flag"):
            assert ours.features[name] == theirs.features[name]
    assert [sum(row) for row in ours["seq_lengths"]] == [len(row) for row in ours["input_ids"]]
    wrapped = pack_dataset(documents, 8, "wrapped")
    assert wrapped["input_ids"][:] == trl_pack_dataset(documents, 8, "wrapped")["input_ids"][:]


def test_pack_dataset_packs_over_all_documents() -> None:
    documents = datasets.Dataset.from_dict({"input_ids": [[1] * 600] * 1001 + [[1] * 400] * 1001})
    assert len(pack_dataset(documents, 1000)) == 1001  # per 1,000 documents the pairs would not meet


def test_pack_dataset_overlong_formats_and_dicts(tmp_path: Path) -> None:
    documents = small_dataset()
    with pytest.raises(ValueError, match="--overlong truncate  cuts 6 of the 28 tokens"):
        pack_dataset(documents, 4)
    assert sum(map(len, pack_dataset(documents, 4, overlong="truncate")["input_ids"])) == 28 - 6
    parts = pack_dataset(datasets.DatasetDict(train=documents, test=documents.select([0, 2])), 8)
    assert tokens_of(parts["test"]) == tokens_of(documents.select([0, 2]))
    shaped = pack_dataset(documents.with_format("numpy", columns=["labels"]), 8)
    assert set(shaped[0]) == {"labels", "seq_lengths"}
    with pytest.raises(ValueError, match="streaming"):
        pack_dataset(documents.to_iterable_dataset(), 8)
    documents.save_to_disk(tmp_path / "data")
    stored = datasets.load_from_disk(str(tmp_path / "data"))
    first, again = pack_dataset(stored, 8), pack_dataset(stored, 8)
    assert [f["filename"] for f in first.cache_files] == [f["filename"] for f in again.cache_files] != []
    assert pack_dataset(stored, 7)._fingerprint != first._fingerprint

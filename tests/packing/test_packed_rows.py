"""Packed rows out of Arrow tables, and `pack_dataset`: the bytes of their documents, and TRL's columns and rows."""

from __future__ import annotations

import pickle
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.packing import PackedDataset, Packing, one_per_bin, pack, pack_dataset, plan_packing, read_lengths
from tests.packing.test_packing import any_length, pieces_of

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
    """Of the documents, and of the values that they are made of."""
    values = pa.array(range(24), type=pa.int32())
    table = pa.table({"input_ids": pa.FixedSizeListArray.from_arrays(values, 4)}).slice(1, 4)
    packed = PackedDataset(table, pack(read_lengths(table), 8))
    assert sorted(token for row in packed for token in row["input_ids"].tolist()) == list(range(4, 20))
    table = pa.table({"input_ids": pa.ListArray.from_arrays(pa.array([0, 2, 5], type=pa.int32()), values.slice(3))})
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
    with pytest.raises(ValueError, match="--overlong truncate cuts 6 of the 28 tokens"):
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

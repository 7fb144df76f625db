"""Damaged tables: the error of the data stage, naming the file, or all of their rows; nothing in between.

`benchmarks.fuzz` damages files of every kind; tests/untrusted runs a few of them.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longctx.data import DataError, load_records, tokenize_records
from longctx.model.tiny import tiny_tokenizer
from tests.data.tables import table_bytes

pytestmark = pytest.mark.usefixtures("own_cache")
TOKENIZER = tiny_tokenizer()


def cases(number: int):
    """The same cases on every machine: damaged binary files reach C++ code that is not ours."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=number, deadline=None, derandomize=True, suppress_health_check=checks)


def write(folder: Path, suffix: str, data: bytes) -> Path:
    """A file with a name of its own, since `datasets` caches by name."""
    path = folder / f"{len([*folder.iterdir()])}{suffix}"
    path.write_bytes(data)
    return path


def documents_in(path: Path) -> list[str] | str:
    """The text of every document, or the message of the DataError; anything else fails the test."""
    try:
        records = load_records(str(path))
        documents = tokenize_records(records, TOKENIZER)
    except DataError as error:
        return str(error)
    return [TOKENIZER.decode(ids[:-1]) for ids in documents["input_ids"]]


FORMATS = [".parquet", ".arrow", ".file.arrow"]
SUFFIXES = st.sampled_from(FORMATS)
TABLE = pa.table({"text": [f"document {number}" for number in range(7)]})


@pytest.mark.long
@cases(150)
@given(SUFFIXES, st.data())
def test_a_damaged_table_is_refused_or_has_all_its_rows(tmp_path, suffix, data):
    whole = bytearray(table_bytes(TABLE, suffix))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    found = documents_in(write(tmp_path, suffix, bytes(whole)))
    if isinstance(found, list):
        assert len(found) == len(TABLE)


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_truncated_table_is_refused(tmp_path, suffix):
    """Also an Arrow stream that ends between two batches, which only lacks its end marker."""
    whole = table_bytes(TABLE, suffix)
    for end in (*range(0, len(whole), len(whole) // 30), len(whole) - 1):
        path = write(tmp_path, suffix, whole[:end])
        assert str(path) in documents_in(path)
    if suffix == ".arrow":
        ends = [len(table_bytes(TABLE[:rows], suffix)) - 8 for rows in (2, 4, 6, 7)]  # the marker has 8 bytes
        for end in ends:
            assert "its stream has no end" in documents_in(write(tmp_path, suffix, whole[:end]))
    assert len(documents_in(write(tmp_path, suffix, whole))) == len(TABLE)


@pytest.mark.parametrize(("suffix", "at"), [(".parquet", None), (".arrow", 104)])
def test_a_column_name_that_is_not_utf_8_is_refused(tmp_path, suffix, at):
    whole = bytearray(table_bytes(TABLE, suffix))
    whole[whole.find(b"text") if at is None else at] = 128
    assert "codec can't decode byte 0x80" in documents_in(write(tmp_path, suffix, bytes(whole)))


@pytest.mark.parametrize("suffix", FORMATS)
def test_bytes_behind_a_table_are_no_silent_loss(tmp_path, suffix):
    whole = table_bytes(TABLE, suffix)
    found = documents_in(write(tmp_path, suffix, whole + whole[: len(whole) // 2]))
    assert isinstance(found, str)
    if suffix == ".arrow":
        assert isinstance(documents_in(write(tmp_path, suffix, whole + whole)), str)

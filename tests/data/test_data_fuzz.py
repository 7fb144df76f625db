"""Malformed files: the error of the data stage, naming the file and the record, or every record; nothing in between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from longctx.data import DataError, load_records, tokenize_records
from longctx.model.tiny import tiny_tokenizer
from tests.few import few

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


# ----------------------------------------------------------------------------------------------------
# JSON
# ----------------------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
VALUES = st.one_of(
    TEXTS,
    st.none() | st.booleans() | st.integers() | st.floats() | st.just(10**400),
    st.recursive(st.integers(), lambda inner: st.lists(inner, max_size=3), max_leaves=5),
    st.dictionaries(TEXTS, st.integers(), max_size=2),
    st.integers(1, 2000).map(lambda depth: json.loads("[" * min(depth, 500) + "]" * min(depth, 500))),
)
KNOWN_LINES = [
    b'{"text": "a',
    b'{"text": "\\ud83d"}',
    b'{"text": "\\ud83d", "body": ' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"text": "a\x00b"}',
    b'{"text": "a\\u0000b"}',
    b'{"text": "\xff"}',
    b'{"text": "\xed\xa0\x80"}',
    b'{"text": ' + b"9" * 5000 + b"}",
    b'{"text": "a", "n": ' + b"9" * 5000 + b"}",
    b'{"text": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"text": ' + b"[" * 200_000,
    b'{"text": ' + b'{"a":' * 900 + b"1" + b"}" * 901,
    b'{"text": NaN}',
    b'{"text": 1e999}',
    b'{"text": "a"} x',
    b'{"text": "a", "text": 3}',
    b"\xef\xbb\xbf" + b'{"text": "a"}',
    b"\xff\xfe{\x00}\x00",
]
BAD_LINES = st.one_of(
    st.binary(min_size=1, max_size=30),
    st.builds(lambda value: json.dumps(value).encode(), VALUES),
    st.builds(lambda value: json.dumps({"text": value}).encode(), VALUES),
    st.builds(
        lambda key, value: json.dumps({key: value}).encode(), st.sampled_from(["body", "input_ids", "messages"]), VALUES
    ),
    st.sampled_from(KNOWN_LINES),
)
GOOD_LINES = st.builds(
    lambda text, ascii_: json.dumps({"text": text}, ensure_ascii=ascii_).encode(), TEXTS, st.booleans()
)


def text_of(line: bytes) -> str | None:
    """What a line of JSON says, None if it is no record of text."""
    try:
        record = json.loads(line.decode("utf-8"))
        text = record["text"]
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return text if isinstance(text, str) else None


@pytest.mark.long
@cases(150)
@given(
    st.lists(GOOD_LINES, max_size=4),
    BAD_LINES,
    st.lists(GOOD_LINES, max_size=2),
    st.sampled_from([b"\n", b"\r\n", b"\n \n"]),
)
def test_a_bad_line_is_named_or_every_line_is_a_document(tmp_path, before, line, after, end):
    check_lines(tmp_path, before, line, after, end)


@pytest.mark.parametrize("line", KNOWN_LINES, ids=lambda line: str(line[:30]))
def test_a_known_bad_line_is_named(tmp_path, line):
    check_lines(tmp_path, [b'{"text": "fine"}'], line, [], b"\n")


def check_lines(tmp_path, before, line, after, end):
    lines = [part for whole in [*before, line, *after] for part in whole.split(b"\n")]
    path = write(tmp_path, ".jsonl", end.join(lines) + end)
    found = documents_in(path)
    numbered = list(enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1))
    texts = [(number, text_of(line)) for number, line in numbered if line.strip()]
    bad = [number for number, text in texts if text is None]
    if isinstance(found, list):
        assert found == [text for _, text in texts]
    elif path.read_bytes().removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):  # read as an array
        assert found.startswith(str(path)), found
    elif texts and texts[0][1] is None:  # may be a record of another kind, from which the following differ
        assert str(path) in found or "record 0" in found or "no token to train on" in found, found
    else:
        assert found.startswith(f"{path}:{bad[0]}: " if bad else f"{path}: "), found


@pytest.mark.long
@cases(60)
@given(st.lists(GOOD_LINES, max_size=3), BAD_LINES, st.data())
def test_an_array_gives_all_its_records_or_the_name_of_one(tmp_path, good, line, data):
    lines = data.draw(st.permutations([*good, line]))
    path = write(tmp_path, ".json", b"[" + b", ".join(lines) + b"]")
    found = documents_in(path)
    if isinstance(found, list):
        assert found == [text_of(line) for line in lines]
    else:
        assert str(path) in found


@pytest.mark.long
@cases(60)
@given(st.lists(GOOD_LINES, min_size=1, max_size=3), st.booleans(), st.data())
def test_a_truncated_json_file_is_refused(tmp_path, lines, is_array, data):
    whole = b"[" + b",\n".join(lines) + b"]" if is_array else b"\n".join(lines)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    path = write(tmp_path, ".json", cut)
    found = documents_in(path)
    complete = not is_array and all(text_of(line) is not None for line in cut.split(b"\n") if line)
    assert found == [text_of(line) for line in cut.split(b"\n") if line] if complete and cut else str(path) in found


@pytest.mark.parametrize("column", few(["text", "messages", "body", "tools", "input_ids"], 2))
def test_nesting_of_any_depth(tmp_path, column):
    """Wherever Python or Arrow gives up on nested lists, in reading, checking, storing or tokenising."""
    for depth in (20, 100, 300, 600, *range(840, 1000, 10)):
        nested = b"[" * depth + b'"\\ud83d\\ude00"' + b"]" * depth
        chat = (
            b'"messages": [{"role": "user", "content": "a", "more": '
            + (nested if column == "messages" else b"1")
            + b"}]"
        )
        record = chat if column in ("messages", "tools") else b'"text": "a"'
        if column != "messages":
            record += b', "' + column.encode() + b'": ' + nested
        path = write(tmp_path, ".jsonl", b"{" + record + b"}\n")
        found = documents_in(path)
        assert len(found) == 1 or "record" in found or str(path) in found


# ----------------------------------------------------------------------------------------------------
# Parquet, Arrow, text
# ----------------------------------------------------------------------------------------------------


def table_bytes(table: pa.Table, suffix: str, rows_per_batch: int = 2) -> bytes:
    sink = pa.BufferOutputStream()
    if suffix == ".parquet":
        pq.write_table(table, sink, row_group_size=rows_per_batch)
    else:
        make = pa.ipc.new_file if suffix == ".file.arrow" else pa.ipc.new_stream
        with make(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=rows_per_batch)
    return sink.getvalue().to_pybytes()


SUFFIXES = st.sampled_from([".parquet", ".arrow", ".file.arrow"])
TABLE = pa.table({"text": [f"document {number}" for number in range(7)]})


@cases(60)
@given(st.sampled_from([".parquet", ".arrow", ".json", ".jsonl", ".txt", ".py"]), st.binary(max_size=60))
@example(".txt", b"a\x00b")
@example(".txt", b"")
@example(".parquet", b"PAR1" + b"\x00" * 40 + b"PAR1")
@example(".arrow", b"ARROW1\x00\x00" + b"\xff" * 40)
@example(".arrow", b"\xff\xff\xff\xff\x10\x00\x00\x00" + b"\x00" * 40)
def test_any_bytes(tmp_path, suffix, data):
    path = write(tmp_path, suffix, data)
    found = documents_in(path)
    if isinstance(found, list):
        assert suffix in (".txt", ".py")
        assert found == [data.removeprefix(b"\xef\xbb\xbf").decode("utf-8")]
    else:
        assert str(path) in found or not data.strip(b"\xef\xbb\xbf")


@cases(120)
@given(SUFFIXES, st.data())
def test_a_truncated_table_is_refused(tmp_path, suffix, data):
    whole = table_bytes(TABLE, suffix)
    path = write(tmp_path, suffix, whole[: data.draw(st.integers(0, len(whole) - 1))])
    found = documents_in(path)
    assert isinstance(found, str), f"{len(found)} of {len(TABLE)} documents"
    assert str(path) in found


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


@pytest.mark.parametrize(("suffix", "at"), [(".parquet", None), (".arrow", 104)])
def test_a_column_name_that_is_not_utf_8_is_refused(tmp_path, suffix, at):
    whole = bytearray(table_bytes(TABLE, suffix))
    whole[whole.find(b"text") if at is None else at] = 128
    assert "codec can't decode byte 0x80" in documents_in(write(tmp_path, suffix, bytes(whole)))


def test_an_arrow_stream_cut_between_batches_is_refused(tmp_path):
    """Nothing but the missing end marker tells such a file from a whole one of fewer rows."""
    sink, ends = pa.BufferOutputStream(), []
    with pa.ipc.new_stream(sink, TABLE.schema) as writer:
        for batch in TABLE.to_batches(max_chunksize=2):
            writer.write_batch(batch)
            ends.append(sink.tell())
    whole = sink.getvalue().to_pybytes()
    for end in ends:
        found = documents_in(write(tmp_path, ".arrow", whole[:end]))
        assert "its stream has no end" in found
    assert len(documents_in(write(tmp_path, ".arrow", whole))) == len(TABLE)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".file.arrow"])
def test_bytes_behind_a_table_are_no_silent_loss(tmp_path, suffix):
    whole = table_bytes(TABLE, suffix)
    found = documents_in(write(tmp_path, suffix, whole + whole[: len(whole) // 2]))
    assert isinstance(found, str)
    if suffix == ".arrow":
        assert isinstance(documents_in(write(tmp_path, suffix, whole + whole)), str)


COLUMNS = st.sampled_from(
    [
        pa.array(["a", None, "b"]),
        pa.array(["a", "", "b"]),
        pa.array([None, None, None], pa.string()),
        pa.array([None, None, None], pa.null()),
        pa.array([1, 2, 3]),
        pa.array([1.5, float("nan"), 2.0]),
        pa.array([True, False, True]),
        pa.array([b"a", b"\xff", b"b"], pa.binary()),
        pa.array(["a", "b", "c"], pa.large_string()),
        pa.array(["a", "b", "c"], pa.string_view()),
        pa.array(["a", "b", "a"]).dictionary_encode(),
        pa.array([["a"], ["b", None], []]),
        pa.array([[1, 2], [3], [4, 5]]),
        pa.array([[1, 2], None, [4, 5]]),
        pa.array([[1, 2], [], [4, None]]),
        pa.array([[1, 2], [-3, 4], [4, 5]]),
        pa.array([[1, 2], [3, 2**40], [4, 5]]),
        pa.array([[1.0, 2.0], [3.0], [4.0]]),
        pa.array([[1, 2], [3, 4], [4, 5]], pa.large_list(pa.uint64())),
        pa.array([[1, 2], [3, 4], [4, 5]], pa.list_(pa.int64(), 2)),
        pa.array([[2**64 - 1, 2], [3, 4], [4, 5]], pa.list_(pa.uint64())),
        pa.array([[[1]], [[2]], [[3]]]),
        pa.array([{"a": 1}, {"a": 2}, {"a": 3}]),
        pa.array([[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}], None]),
        pa.array([[{"role": "user", "content": "a"}], [{"role": "user", "content": None}], []]),
        pa.array([[{"role": "user"}], [{"role": "user"}], [{"role": None}]]),
        pa.array([1, 2, 3], pa.timestamp("s")),
        pa.array([1, 2, 3], pa.decimal128(10, 2)),
    ]
)
NAMES_OF_COLUMNS = st.sampled_from(
    ["text", "input_ids", "labels", "messages", "prompt", "completion", "completion_mask", "body"]
)


@pytest.mark.long
@cases(150)
@given(st.sampled_from([".parquet", ".arrow"]), st.dictionaries(NAMES_OF_COLUMNS, COLUMNS, min_size=1, max_size=3))
def test_columns_of_any_type(tmp_path, suffix, columns):
    try:
        data = table_bytes(pa.table(columns), suffix, rows_per_batch=3)
    except (pa.ArrowException, NotImplementedError):
        return  # a type this format does not have
    found = documents_in(write(tmp_path, suffix, data))
    if isinstance(found, list):
        assert len(found) == 3


def ids_of(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(n, int) and not isinstance(n, bool) for n in values)


@pytest.mark.long
@cases(80)
@given(st.lists(st.one_of(st.lists(st.integers(-2, 300), max_size=4), VALUES), min_size=1, max_size=4))
def test_tokens_of_any_kind(tmp_path, rows):
    path = write(tmp_path, ".jsonl", b"".join(json.dumps({"input_ids": row}).encode() + b"\n" for row in rows))
    found = documents_in(path)
    valid = all(ids_of(row) and row and min(row) >= 0 and max(row) < np.iinfo(np.int32).max for row in rows)
    if isinstance(found, list):
        assert valid
        assert len(found) == len(rows)
    else:
        assert not valid or "no token to train on" in found


MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "from", "value", "tool_calls"]), VALUES, max_size=3)
    | st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": VALUES | TEXTS})
    | VALUES,
    max_size=3,
)


@pytest.mark.long
@cases(80)
@given(
    st.fixed_dictionaries(
        {"messages": MESSAGES},
        optional={"tools": VALUES | st.sampled_from(["[", "[]", "[1]"]), "chat_template_kwargs": VALUES},
    )
    | st.fixed_dictionaries({"prompt": MESSAGES | VALUES, "completion": MESSAGES | VALUES})
)
@example({"messages": [{"role": "user", "content": "a"}], "tools": "["})
@example({"messages": [{"role": "user", "content": "a"}], "tools": "[1]"})
def test_conversations_of_any_kind(tmp_path, record):
    path = write(tmp_path, ".jsonl", json.dumps(record).encode() + b"\n")
    found = documents_in(path)
    assert len(found) == 1 or str(path) in found or "record 0" in found or "column " in found, found

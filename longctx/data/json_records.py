"""JSON files -> records: one object per line or one array of objects, each checked and named on error.

`datasets` would round numbers to 10 decimals, and give every object the keys of all others, which changes tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, Json, Value

from longctx.data.errors import (
    RECORD_BOUNDS,
    RECORD_BYTES,
    DataError,
    check_selection,
    name_files,
    name_record,
    no_records,
    too_long,
    unreadable,
)
from longctx.data.kinds import (
    ALPACA,
    CONVERSATION_EXTRAS,
    PER_TOKEN_COLUMNS,
    TOKENS,
    check_unread_columns,
    kind_columns,
    optional_columns,
    record_kind,
    warn_of_unread_columns,
)
from longctx.data.messages import check_chat, check_text
from longctx.data.reading import RecordStream
from longctx.untrusted.confined import Confined, OutOfBounds, confined

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_ARRAY_BYTES = 1 << 30
"""The largest file that holds one JSON array."""
_NESTED = 100
"""Levels of lists and objects in a record. Python, `datasets` and Arrow each give up at some greater depth."""
_HALF_OF_A_PAIR = re.compile(rb"\\u[dD]")
_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.DOTALL)
_DEEPER = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


class JsonRecords(RecordStream):
    """The records of JSON files. All must be of the first record's kind, and only the columns of that kind are kept.

    As they lie, records are a place and a text of JSON. With `selected`, they are read as if they had no other columns.
    """

    def __init__(self, files: Sequence[Path], text_field: str, selected: Sequence[str] | None = None) -> None:
        self.files, self.text_field, self.selected = list(files), text_field, selected
        first = next(self.raw(), None)
        if first is None:
            raise no_records(name_files(self.files))
        self.first_place = first[0]
        try:
            present, self.kind, self.columns, self.is_json = confined(partial(self._described, *first), RECORD_BOUNDS)
        except OutOfBounds as error:
            raise _beyond_bounds(self.first_place, error) from error
        warn_of_unread_columns(present, self.columns)
        type_ = TOKENS if self.kind == "input_ids" else Json() if self.is_json else Value("string")
        self.features = Features(dict.fromkeys(self.columns, type_))
        self._process = Confined(self._table)

    def _described(self, place: str, text: bytes) -> tuple[list[str], str, tuple[str, ...], bool]:
        """Return the columns of the first record, its kind, the columns that are read, and whether they keep JSON."""
        record = parse_object(place, text)
        check_selection(self.selected or (), record, may_lack=CONVERSATION_EXTRAS)
        record = self._select(record)
        kind = record_kind(_present(record), self.text_field, place)
        is_chat = any(isinstance(record.get(column), list) for column in kind_columns(kind))
        is_json = kind == ALPACA or (kind != "input_ids" and is_chat)
        return _present(record), kind, _columns_of(record, kind, is_json), is_json

    def load(self) -> Dataset:
        try:
            return super().load()
        finally:
            self._process.close()

    def options(self) -> list[Any]:
        # What is not selected is not checked either.
        return [self.text_field, None if self.selected is None else sorted(self.selected)]

    def raw(self) -> Iterator[tuple[str, bytes]]:
        return (record for path in self.files for record in _texts(path))

    def size(self, record: tuple[str, bytes]) -> int:
        return len(record[1])

    def place(self, record: int) -> str | None:
        return next((place for place, _ in islice(self.raw(), record, None)), None)

    def parse(self, records: Sequence[tuple[str, bytes]]) -> pa.Table:
        try:
            return self._process.call(RECORD_BOUNDS, records).select(self.column_names)
        except OutOfBounds as error:
            if len(records) == 1:
                raise _beyond_bounds(records[0][0], error) from error
            return pa.concat_tables(self.parse([record]) for record in records)

    def _table(self, records: Sequence[tuple[str, bytes]]) -> pa.Table:
        objects = [(place, self._select(parse_object(place, text))) for place, text in records]
        for place, record in objects:
            self._check_kind(record, place)
        schema = self.features.arrow_schema
        columns = [
            pa.array([self._value(record.get(field.name), field.name, place) for place, record in objects], field.type)
            for field in schema
        ]
        return pa.Table.from_arrays(columns, schema=schema)

    def _select(self, record: dict[str, Any]) -> dict[str, Any]:
        if self.selected is None:
            return record
        return {column: value for column, value in record.items() if column in self.selected}

    def _check_kind(self, record: Mapping[str, Any], place: str) -> None:
        present = _present(record)
        filled = [column for column in present if record[column] not in ([], "")]
        check_unread_columns(filled, self.kind, isinstance(record.get("label"), bool), place)
        same_kind = record_kind(present, self.text_field, place) == self.kind
        if not same_kind or _columns_of(record, self.kind, self.is_json) != self.columns:
            raise DataError(
                f"{place}: mixed kinds of records: this one has the columns {sorted(present)}, "
                f"but {self.first_place} is a {self.kind!r} record with {sorted(self.columns)}. "
                "Put each kind into a data set of its own."
            )

    def _value(self, value: Any, column: str, place: str) -> Any:
        if self.kind == "input_ids":
            return _token_array(value, column, place)
        if not self.is_json:
            check_text(value, column, place)
            return value
        if column in kind_columns(self.kind) and self.kind != ALPACA:
            check_chat(value, column, place)
        try:
            return None if value is None else json.dumps(value, ensure_ascii=False, allow_nan=False)
        except ValueError:
            raise DataError(
                f"{place}: '{column}' holds NaN or an infinite number, which JSON does not have. Correct the record."
            ) from None


def _present(record: Mapping[str, Any]) -> list[str]:
    return [column for column, value in record.items() if value is not None]


def _columns_of(record: Mapping[str, Any], kind: str, is_json: bool) -> tuple[str, ...]:
    if kind == "input_ids":
        return tuple(column for column in PER_TOKEN_COLUMNS if record.get(column) is not None)
    return kind_columns(kind) + (optional_columns(kind) if is_json else ())


def _token_array(value: object, column: str, place: str) -> np.ndarray:
    """A JSON list of integers as int32 [num_tokens]. A boolean is no integer, though it is one in Python."""
    if isinstance(value, list) and set(map(type, value)) <= {int}:
        with suppress(OverflowError):
            return np.array(value, np.int32)
    parts = value if isinstance(value, list) else [value]
    wrong = next(
        part for part in parts if type(part) is not int or not -(1 << 31) <= part < 1 << 31 or parts is not value
    )
    raise DataError(
        f"{place}: '{column}' {'holds' if parts is value else 'is'} {json.dumps(wrong)[:60]}; expected a flat list of "
        "integers of 32 bits. Correct the record."
    )


def _texts(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the place and the text of each record of one file."""
    try:
        with path.open("rb") as file:
            start = file.read(64).removeprefix(_BYTE_ORDER_MARK)
            file.seek(0)
            if start.lstrip().startswith(b"["):
                data = file.read(_ARRAY_BYTES + 1)
                if len(data) > _ARRAY_BYTES:
                    remedy = "Write one object per line, which is read in turn."
                    raise too_long(str(path), "a JSON array", _ARRAY_BYTES, remedy)
                yield from _elements(data, path)
                return
            for number, line in enumerate(iter(lambda: file.readline(RECORD_BYTES + 1), b""), start=1):
                place = f"{path}:{number}"
                if len(line) > RECORD_BYTES:
                    raise too_long(place, "a line", RECORD_BYTES, "Put one record into each line, or split the record.")
                if line.strip():
                    yield place, line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
    except OSError as error:
        raise unreadable(path, error) from error


def _elements(data: bytes, path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the place and the text of each object of a JSON array. Brackets tell them apart, and none is parsed."""
    start, depth, number, comma = data.index(b"[") + 1, 0, 0, b""
    for found in _STRING_OR_BRACKET.finditer(data, start):
        step = _DEEPER.get(data[found.start()], 0)
        depth += step
        if depth < 0:
            break
        text = data[start : found.end()].lstrip() if step and not depth else b""
        if text and text.startswith(comma):
            yield f"{path}, {name_record(number)}", text.removeprefix(comma)
            start, number, comma = found.end(), number + 1, b","
    if data[start:].strip() != b"]":
        raise DataError(
            f"{path}, {name_record(number)}: malformed JSON: {data[start : start + 60].decode(errors='replace')!r}. "
            "Expected an array of objects, or one object per line."
        )


def parse_object(place: str, text: bytes) -> dict[str, Any]:
    """Parse a JSON text into an object that holds every number and every null exactly as it is written.

    Raises:
        DataError: with the place, for anything else; a repeated key; half a surrogate pair, which `json` accepts and no
            tokenizer does; lists and objects nested too deep.
    """
    try:
        record = json.loads(text.decode("utf-8"), object_pairs_hook=_object)
        if text.count(b"[") + text.count(b"{") > _NESTED and _is_nested(record, _NESTED):
            raise RecursionError
        if _HALF_OF_A_PAIR.search(text):
            json.dumps(record, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise DataError(
            f"{place}: lists and objects are nested more than {_NESTED} deep, the limit. Correct or remove the record."
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: not UTF-8 (byte 0x{error.object[error.start]:02x} at column {error.start + 1}). Save the file "
            "as UTF-8."
        ) from None
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place}: the escape \\u{ord(error.object[error.start]):04x} is half a surrogate pair, not a "
            "character. Write the text again as UTF-8."
        ) from None
    except ValueError as error:  # also a number of more than 4,300 digits
        shown = text[:200].decode("utf-8", errors="ignore")[:60].rstrip()
        raise DataError(
            f"{place}: malformed JSON ({error}): {shown!r}. Expected one JSON object per line, or an "
            "array of objects; correct or remove the record (none is skipped silently)."
        ) from None
    if not isinstance(record, dict):
        raise DataError(
            f"{place}: a JSON {type(record).__name__}, not an object. Expected a record such as "
            '{"text": "…"}; correct or remove it.'
        )
    return record


def _beyond_bounds(place: str, error: OutOfBounds) -> DataError:
    return DataError(f"{place}: the record cannot be read: {error}. Correct or remove the record.")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, and refuse a repeated key, of which `json` would keep only the last value."""
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = next(key for number, (key, _) in enumerate(pairs) if key in dict(pairs[:number]))
        raise ValueError(f"the key {twice!r} stands twice in an object")
    return made


def _is_nested(value: object, levels: int) -> bool:
    """Return whether lists and objects are nested more than `levels` deep."""
    parts = [value]
    for _ in range(levels):
        nests = (part.values() if isinstance(part, dict) else part for part in parts if isinstance(part, dict | list))
        parts = [inner for nest in nests for inner in nest]
    return any(isinstance(part, dict | list) for part in parts)

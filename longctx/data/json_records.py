"""JSON files -> records: one object per line or one array of objects, each checked and named on error."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Features, Json, Value
from datasets.utils.json import ujson_dumps, ujson_loads

from longctx.data.errors import (
    RECORD_BYTES,
    RECORD_MEMORY_BYTES,
    DataError,
    MemoryBound,
    check_selection,
    name_files,
    name_record,
    no_records,
    too_long,
    unreadable,
)
from longctx.data.kinds import (
    ALPACA,
    CHECKED_COLUMNS,
    CONVERSATION_EXTRAS,
    PER_TOKEN_COLUMNS,
    TOKENS,
    check_unread_columns,
    kind_columns,
    optional_columns,
    record_kind,
)
from longctx.data.messages import check_chat, check_text

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_INT32_MAX = np.iinfo(np.int32).max

_SPACE = re.compile(r"[ \t\n\r]*")
SMALL_TEXT = 1 << 20
"""Characters of JSON that cannot become much memory: an empty list takes two of them and 64 bytes."""
_ARRAY_BYTES = 1 << 30
"""The largest file that holds one JSON array."""
_NESTED = 100
"""Levels of lists and objects in a record. Python, `datasets` and Arrow each give up at some greater depth."""
_HALF_OF_A_PAIR = re.compile(r"\\u[dD]")


class JsonRecords:
    """The records of JSON files. All must be of the first record's kind, and only the columns of that kind are kept.

    With `selected`, records are read as if they had no other columns.
    """

    def __init__(self, files: Sequence[Path], text_field: str, selected: Sequence[str] | None = None) -> None:
        self.files = list(files)
        self.text_field, self.selected = text_field, selected
        first = next(self._iterate_raw(), None)
        if first is None:
            raise no_records(name_files(self.files))
        self.first_where, record = first
        check_selection(selected or (), record, may_lack=CONVERSATION_EXTRAS)
        record = self._select(record)
        self.kind = record_kind(_present(record), text_field, self.first_where)
        is_chat = any(isinstance(record[column], list) for column in kind_columns(self.kind) if column in record)
        self.conversational = self.kind == ALPACA or (self.kind != "input_ids" and is_chat)
        self.columns = self._columns_of(record)

    def _columns_of(self, record: Mapping[str, Any]) -> tuple[str, ...]:
        if self.kind == "input_ids":
            return tuple(column for column in (*PER_TOKEN_COLUMNS, *CHECKED_COLUMNS) if record.get(column) is not None)
        return kind_columns(self.kind) + (optional_columns(self.kind) if self.conversational else ())

    @property
    def features(self) -> Features:
        if self.kind == "input_ids":
            return Features(dict.fromkeys(self.columns, TOKENS))
        return Features(dict.fromkeys(self.columns, Json() if self.conversational else Value("string")))

    def _iterate_raw(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for path in self.files:
            try:
                yield from _iterate(path)
            except OSError as error:
                raise unreadable(path, error) from error

    def _select(self, record: dict[str, Any]) -> dict[str, Any]:
        if self.selected is None:
            return record
        return {column: value for column, value in record.items() if column in self.selected}

    def places(self) -> Iterator[str]:
        """File and line, or file and number, of each record."""
        return (where for where, _ in self._iterate_raw())

    def __call__(self) -> Iterator[dict[str, Any]]:
        for where, record in self._iterate_raw():
            record = self._select(record)
            self._check_kind(record, where)
            yield {column: self._value(record.get(column), column, where) for column in self.columns}

    def _check_kind(self, record: Mapping[str, Any], where: str) -> None:
        present = _present(record)
        filled = [column for column in present if record[column] not in ([], "")]
        check_unread_columns(filled, self.kind, isinstance(record.get("label"), bool), where)
        same_kind = record_kind(present, self.text_field, where) == self.kind
        if not same_kind or self._columns_of(record) != self.columns:
            raise DataError(
                f"{where}: mixed kinds of records: this one has the columns {sorted(present)}, "
                f"but {self.first_where} is a {self.kind!r} record with {sorted(self.columns)}. "
                "Put each kind into a data set of its own."
            )

    def _value(self, value: Any, column: str, where: str) -> Any:
        if self.kind == "input_ids":
            return _token_array(value, column, where)
        if not self.conversational:
            check_text(value, column, where)
        else:
            if column not in optional_columns(self.kind) and self.kind != ALPACA:
                check_chat(value, column, where)
            _check_numbers(value, column, where)
        return value


def _present(record: Mapping[str, Any]) -> list[str]:
    return [column for column, value in record.items() if value is not None]


def _check_numbers(value: Any, column: str, where: str) -> None:
    """Refuse numbers that `datasets` would change: it stores whole numbers in 64 bits and others with 10 decimals."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            _check_numbers(part, column, where)
    elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise DataError(f"{where}: '{column}' holds a whole number beyond 64 bits. Correct the record.")
    elif isinstance(value, float) and repr(kept := ujson_loads(ujson_dumps(value))) != repr(value):
        raise DataError(
            f"{where}: '{column}' holds the number {value!r}, which would be kept as {kept!r}. Round it to 10 decimals "
            "or fewer, or write it as a string."
        )


def _token_array(value: object, column: str, where: str) -> np.ndarray:
    """A JSON list of integers as int32 [num_tokens]. A boolean is no integer, though it is one in Python."""
    if not isinstance(value, list) or set(map(type, value)) - {int}:
        wrong = next(part for part in value if type(part) is not int) if isinstance(value, list) else value
        raise DataError(
            f"{where}: '{column}' {'holds' if isinstance(value, list) else 'is'} {json.dumps(wrong)[:60]}; expected a "
            "flat list of integers. Correct the record."
        )
    try:
        return np.array(value, np.int32)
    except OverflowError:
        raise DataError(
            f"{where}: '{column}' holds {max(value, key=abs)}, which is beyond 32-bit token ids "
            f"(limit {_INT32_MAX}). Correct the record."
        ) from None


def _iterate(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, record) of one file."""
    with path.open("rb") as file:
        start = file.read(64).removeprefix(_BYTE_ORDER_MARK).lstrip()
    return _iterate_array(path) if start.startswith(b"[") else _iterate_lines(path)


def _iterate_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`file:line`, record). Lines of white space only are passed over wherever they stand."""
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(RECORD_BYTES + 1), b""), start=1):
            where = f"{path}:{number}"
            if len(line) > RECORD_BYTES:
                raise too_long(where, "a line", RECORD_BYTES, "Put one record into each line, or split the record.")
            if number == 1:
                line = line.removeprefix(_BYTE_ORDER_MARK)
            if line.strip():
                yield where, _parse_line(line, where)


def _iterate_array(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`file, record n`, record) of a file that is one JSON array. Its text is read whole."""
    with path.open("rb") as file:
        data = file.read(_ARRAY_BYTES + 1)
    if len(data) > _ARRAY_BYTES:
        raise too_long(str(path), "a JSON array", _ARRAY_BYTES, "Write one object per line, which is read in turn.")
    where = f"{path}, {name_record(0)}"
    try:
        for number, (record, text) in enumerate(_elements(data.decode("utf-8-sig")), start=1):
            yield where, _checked(record, where, text)
            where = f"{path}, {name_record(number)}"
    except DataError:
        raise
    except MemoryError:
        raise _too_large(where) from None
    except RecursionError:
        raise _too_deep(where) from None
    except ValueError as error:  # also a number of more than 4,300 digits
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise DataError(
            f"{path}{line}: malformed JSON ({error}). Expected an array of objects, or one object per line."
        ) from None


def _elements(text: str) -> Iterator[tuple[Any, str]]:
    """Yield the elements of a JSON array and the text of each, parsing one at a time.

    Raises:
        MemoryError: for an element that is too large once it is parsed.
        RecursionError: for one that is too deeply nested.
        ValueError: for malformed JSON.
    """
    decoder = json.JSONDecoder(object_pairs_hook=_object)
    position, measured_at = _skip_space(text, _skip_space(text, 0) + 1), 0
    bound = MemoryBound(RECORD_MEMORY_BYTES)
    is_first = True
    while not (is_first and text[position : position + 1] == "]"):
        if position - measured_at > SMALL_TEXT:
            bound, measured_at = MemoryBound(RECORD_MEMORY_BYTES), position
        with bound:
            element, end = decoder.raw_decode(text, position)
        yield element, text[position:end]
        is_first = False
        position = _skip_space(text, end)
        if text[position : position + 1] == "]":
            break
        if text[position : position + 1] != ",":
            raise json.JSONDecodeError("Expecting ',' delimiter", text, position)
        position = _skip_space(text, position + 1)
    end = _skip_space(text, position + 1)
    if end < len(text):
        raise json.JSONDecodeError("Extra data", text, end)


def _skip_space(text: str, position: int) -> int:
    """Return the first position from this one on that is no white space."""
    match = _SPACE.match(text, position)
    assert match is not None, "matches nothing, too"
    return match.end()


def _too_large(where: str) -> DataError:
    remedy = "Correct or remove the record."
    return too_long(where, "a record with a parsed size", RECORD_MEMORY_BYTES, remedy)


def _too_deep(where: str) -> DataError:
    return DataError(
        f"{where}: lists and objects are nested more than {_NESTED} deep, the limit. Correct or remove the record."
    )


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        text = line.decode("utf-8")
        with MemoryBound(RECORD_MEMORY_BYTES) if len(line) > SMALL_TEXT else nullcontext():
            record = json.loads(text, object_pairs_hook=_object)
    except MemoryError:
        raise _too_large(where) from None
    except RecursionError:
        raise _too_deep(where) from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8 (byte 0x{line[error.start]:02x} at column {error.start + 1}). Save the file as UTF-8."
        ) from None
    except ValueError as error:  # also a number of more than 4,300 digits
        shown = line[:60].decode("utf-8", "backslashreplace").rstrip()
        raise DataError(
            f"{where}: malformed JSON ({error}): {shown!r}. Expected one JSON object per line; correct or "
            "remove the line (no line is skipped silently)."
        ) from None
    return _checked(record, where, text)


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


def _checked(record: object, where: str, text: str) -> dict[str, Any]:
    """Refuse what is no object or too deep, and half a surrogate pair, which json accepts and no tokenizer does.

    Args:
        text: That the record was parsed from. Most texts show that looking closer is not worth its time.
    """
    if text.count("[") + text.count("{") > _NESTED and _is_nested(record, _NESTED):
        raise _too_deep(where)
    try:
        if _HALF_OF_A_PAIR.search(text):
            json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: the escape \\u{ord(error.object[error.start]):04x} is half a surrogate pair, not a "
            "character. Write the text again as UTF-8."
        ) from None
    if not isinstance(record, dict):
        raise DataError(
            f"{where}: a JSON {type(record).__name__}, not an object. Expected a record such as "
            '{"text": "…"}; correct or remove it.'
        )
    return record

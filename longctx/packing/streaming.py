"""Packs from a stream of documents whose lengths nobody knows in advance; resumable, the same on every rank."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from longctx.data import DataError
from longctx.data.columns import INPUT_IDS, is_token_type, token_columns

from .lookahead import LookAhead
from .overlong import OVERLONG, PackingReport

_DOCUMENTS_PER_TABLE = 256


class _Piece(NamedTuple):
    """A document, or `capacity` or fewer tokens of a longer one."""

    document: int  # place in the source
    start: int  # first token in the document
    columns: dict[str, NDArray[Any]]  # [tokens] each


class PackedStream:
    """Rows of packed documents from a stream; the same keys as rows of `PackedDataset`.

    Documents are taken in order until the next one does not fit, then the gap is closed with the best one or two of
    those that wait, `look_ahead` packs of them. What is longer than a pack and split gives full packs at once, and
    its rest waits with the others.

    There is one order of rows, a function of the source alone. `longctx.training.data_order.StepStream` deals them out
    to ranks and to the workers of a DataLoader; every process reads every document.

    `position()` between two rows says where the stream stands; `go_on_from` makes a stream over the same source go on
    with the next row.
    """

    def __init__(
        self,
        source: Iterable[Mapping[str, Any]],
        capacity: int,
        *,
        overlong: str = "raise",
        strategy: str = "stream",
        look_ahead: int = 16,
        columns: list[str] | None = None,
    ) -> None:
        """
        Args:
            source: documents with `input_ids` and other per-token columns: a datasets.IterableDataset, or anything
                that can be iterated again with the same result. Arrow and parquet files are read table by table
                (under 1 µs a document); what makes examples in Python is read as examples, fastest as NumPy arrays.
            capacity: most tokens in a row (`max_length`).
            overlong: for documents longer than that: "raise", "truncate", "drop" or "split"; counted in `report`.
            strategy: "stream" packs; "none" gives every document, or piece of a split one, a row of its own, in order.
            look_ahead: packs' worth of tokens that wait. Memory is this much and one document, or the tables they
                come from.
            columns: per-token columns of a row; every list of numbers of the first document (of the tables) when None.

        Raises:
            ValueError: for an argument out of range.
        """
        _check_arguments(capacity, overlong, strategy, look_ahead)
        if isinstance(source, Iterator):
            raise ValueError(
                f"the source is a {type(source).__name__}, which can be read only once, so neither an epoch nor a run "
                "could be repeated; pass something that can be iterated again, such as a datasets.IterableDataset"
            )
        self.source, self.capacity, self.overlong, self.look_ahead = source, int(capacity), overlong, look_ahead
        self.strategy, self.columns = strategy, columns
        self._position: Mapping[str, Any] | None = None
        self._begin(None)

    def __iter__(self) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield every row: `input_ids` int64 [S], the other columns [S], `seq_lengths` int64 [documents],
        `position_ids` int64 [S].

        Raises:
            DataError: a document without a column, of columns of several lengths, or too long, with its number.
        """
        places = np.arange(self.capacity)
        return (_row(pack, places) for pack in self._packs())

    def _begin(self, position: Mapping[str, Any] | None) -> None:
        """Set out, with no piece that waits, from the start of the source or from a position."""
        position = position or {"read": 0, "counts": {}, "columns": self.columns}
        self._read: int = position["read"]
        self._counts = dict.fromkeys(_COUNTS, 0) | position["counts"]
        self._names: list[str] | None = position["columns"]
        self._ready: list[_Piece] = []
        self._waiting: LookAhead[_Piece] = LookAhead(self.capacity, self.look_ahead)

    def _read_from(self, document: int) -> Iterator[Mapping[str, Any]]:
        """The documents of the source from this one on."""
        if hasattr(self.source, "starting_at"):
            return self.source.starting_at(document)
        if _is_arrow_stream(self.source):
            return self._read_tables(document)
        return islice(iter(self.source), document, None)

    def _read_tables(self, skip: int) -> Iterator[Mapping[str, Any]]:
        """Read a datasets.IterableDataset over Arrow tables, without a Python list for every document."""
        source = self.source.with_format("arrow")  # type: ignore[attr-defined]
        source.set_epoch(self.source.epoch)  # type: ignore[attr-defined]  # which `with_format` does not hand on
        for table in source.iter(batch_size=_DOCUMENTS_PER_TABLE):
            if self._names is None:
                self._names = _column_names_of_table(table)
            if skip < table.num_rows:
                yield from islice(_documents(table, self._names), skip, None)
            skip = max(skip - table.num_rows, 0)

    def _packs(self) -> Iterator[list[_Piece]]:
        """Every pack of the stream, from its start or from the position that was set."""
        if self._position is not None:
            documents = self._read_again()
        else:
            self._begin(None)
            documents = self._read_from(0)
        while True:
            while self._ready or self._waiting.full:
                yield self._take()
            document = next(documents, None)
            if document is None:
                break
            self._add(document)
        while len(self._waiting):
            yield self._take()

    def _take(self) -> list[_Piece]:
        pack = [self._ready.pop(0)] if self._ready else self._waiting.take()
        self._counts["packs"] += 1
        self._counts["pieces"] += len(pack)
        return pack

    def _add(self, document: Mapping[str, Any]) -> None:
        """Put a document where it waits: full packs of a split one apart, the rest or the whole with the others."""
        if self._names is None:
            self._names = _column_names(document, self._read)
        columns = _read_columns(document, self._names, self._read)
        length = len(columns[INPUT_IDS])
        kept = self._kept(length)
        number = self._read
        self._read += 1
        if 0 < length < self.capacity and self.strategy == "stream":
            self._waiting.add(length, _Piece(number, 0, columns))
            return
        for start in range(0, kept, self.capacity):
            stop = min(start + self.capacity, kept)
            piece = _cut(columns, number, start, stop)
            if stop - start == self.capacity or self.strategy == "none":
                self._ready.append(piece)
            else:  # a copy, so that it does not keep the whole document in memory while it waits
                copied = {name: values.copy() for name, values in piece.columns.items()}
                self._waiting.add(stop - start, piece._replace(columns=copied))

    def _kept(self, length: int) -> int:
        """Tokens of the next document, of this length, that go into packs; counts it."""
        counts, limit = self._counts, self.capacity
        if length > limit and self.overlong == "raise":
            raise DataError(
                f"document {self._read} (counted from 0) has {length:,} tokens, more than max_length = {limit:,}. "
                f"Raise --max_length to {length}, or choose what happens to longer documents: --overlong truncate, "
                "drop or split"
            )
        counts["documents"] += 1
        counts["tokens"] += length
        if length > counts["longest_document"]:
            counts["longest_document"] = length
        if length <= limit:
            counts["empty_documents"] += length == 0
            return length
        counts["too_long_documents"] += 1
        if self.overlong == "split":
            return length
        if self.overlong == "truncate":
            counts["tokens_cut"] += length - limit
            return limit
        counts["documents_dropped"] += 1
        counts["tokens_dropped"] += length
        return 0

    @property
    def report(self) -> PackingReport:
        """What became of the documents read so far, those that still wait counted as kept; over all ranks' packs."""
        counts = self._counts
        return PackingReport(
            strategy=self.strategy,
            overlong=self.overlong,
            capacity=self.capacity,
            tokens_kept=counts["tokens"] - counts["tokens_cut"] - counts["tokens_dropped"],
            tokens_waiting=sum(self._waiting.sizes) + sum(len(piece.columns[INPUT_IDS]) for piece in self._ready),
            **counts,
        )

    def position(self) -> dict[str, Any]:
        """Return where the stream stands, without tokens, so that JSON holds it: the documents that wait are read again
        from the source. A digest tells whether they are the same."""
        waiting, ready = self._waiting.items, self._ready
        return {
            "settings": self._settings(),
            "read": self._read,
            "columns": self._names,
            "waiting": [_span(piece) for piece in waiting],
            "ready": [_span(piece) for piece in ready],
            "digest": _digest([*waiting, *ready]),
            "counts": dict(self._counts),
            **({"source": self.source.position()} if hasattr(self.source, "position") else {}),
        }

    def go_on_from(self, position: Mapping[str, Any]) -> None:
        """Make the next iteration go on from a `position`.

        Raises:
            ValueError: it is of a stream with other settings; the iteration, if it is of other documents.
        """
        self._check_settings(position)
        self._position = position

    def reset_counts(self) -> None:
        """Reset the counts that the source keeps over iterations. This stream's own start again with each iteration."""
        if hasattr(self.source, "reset_counts"):
            self.source.reset_counts()

    def _read_again(self) -> Iterator[Mapping[str, Any]]:
        """Set out from a position; the documents that were not read then.

        Raises:
            DataError: for others than were read then.
        """
        position, self._position = self._position, None
        assert position is not None
        self._begin(position)
        spans, stop = [*position["waiting"], *position["ready"]], position["read"]
        first = min((document for document, *_ in spans), default=stop)
        if "source" in position:
            self.source.go_on_from(position["source"], stop)  # type: ignore[attr-defined]
        documents = self._read_from(first)
        again = {document for document, *_ in spans}
        columns = {
            number: _read_columns(document, position["columns"], number)
            for number, document in zip(range(first, stop), documents, strict=False)
            if number in again
        }
        pieces = [_cut(columns.get(document, {}), document, start, stop) for document, start, stop in spans]
        if _digest(pieces) != position["digest"]:
            raise DataError(
                f"the stream has other documents than when it was read before: {len(again)} that waited for a pack, "
                f"from {first} to {stop} (counted from 0), are not the same. Use the same data and tokenizer, or "
                f"start again from the checkpoint's weights with --model_name_or_path"
            )
        waiting = len(position["waiting"])
        self._ready = pieces[waiting:]
        for piece in pieces[:waiting]:
            self._waiting.add(len(piece.columns[INPUT_IDS]), piece)
        return documents

    def _check_settings(self, position: Mapping[str, Any]) -> None:
        if position["settings"] != self._settings():
            raise ValueError(
                f"the position is of a stream with {position['settings']}, this one has {self._settings()}; its "
                f"sequences would differ. Make the stream with the same settings"
            )

    def _settings(self) -> dict[str, Any]:
        names = ("capacity", "overlong", "strategy", "look_ahead")
        return {name: getattr(self, name) for name in names}


_COUNTS = (
    "documents",
    "tokens",
    "empty_documents",
    "too_long_documents",
    "longest_document",
    "tokens_cut",
    "documents_dropped",
    "tokens_dropped",
    "pieces",
    "packs",
)
"""Fields of PackingReport that are counted along the stream."""


def _check_arguments(capacity: Any, overlong: str, strategy: str, look_ahead: int) -> None:
    if isinstance(capacity, bool) or not isinstance(capacity, int | np.integer) or capacity < 1:
        raise ValueError(f"capacity must be a number of tokens of at least 1, got {capacity!r}")
    if overlong not in OVERLONG:
        raise ValueError(f"unknown overlong={overlong!r}, must be one of {', '.join(OVERLONG)}")
    if strategy not in ("stream", "none"):
        raise ValueError(f"unknown strategy={strategy!r}, must be stream or none; others need every length at once")
    if look_ahead < 1:
        raise ValueError(f"look_ahead must be at least 1 pack, got {look_ahead}; 16 packs fill sequences to 99.8%")


def _column_names(document: Mapping[str, Any], number: int) -> list[str]:
    """The per-token columns of a document, `input_ids` first."""
    if "seq_lengths" in document:
        raise DataError(f"document {number} has 'seq_lengths', so it is a pack already; use its sequences as they are")
    names = [name for name, value in document.items() if name != INPUT_IDS and _is_token_list(value)]
    return [INPUT_IDS, *names]


def _is_token_list(value: object) -> bool:
    if value is None or isinstance(value, str | bytes | Mapping):
        return False
    try:
        array = np.asarray(value)
    except ValueError:  # lists of several lengths inside
        return False
    return array.ndim == 1 and array.dtype.kind in "iubf"


def _span(piece: _Piece) -> tuple[int, int, int]:
    """(document, first token, after the last)"""
    return piece.document, piece.start, piece.start + len(piece.columns[INPUT_IDS])


def _cut(columns: Mapping[str, NDArray[Any]], document: int, start: int, stop: int) -> _Piece:
    return _Piece(document, start, {name: values[start:stop] for name, values in columns.items()})


def _digest(pieces: Iterable[_Piece]) -> str:
    """xxh3 of their columns, as int64 and one after the other."""
    state = xxhash.xxh3_128()
    for piece in pieces:
        for values in piece.columns.values():
            state.update(np.ascontiguousarray(values, dtype=np.int64).data)
    return state.hexdigest()


def _row(pack: list[_Piece], places: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """The row of these pieces; `places` is 0 .. capacity - 1."""
    row = {
        name: np.concatenate([piece.columns[name] for piece in pack], dtype=np.int64 if name == INPUT_IDS else None)
        for name in pack[0].columns
    }
    lengths = [len(piece.columns[INPUT_IDS]) for piece in pack]
    row["seq_lengths"] = np.array(lengths)
    row["position_ids"] = np.concatenate([places[:length] for length in lengths])
    return row


def _is_arrow_stream(source: object) -> bool:
    """Whether a source is a datasets.IterableDataset that reads Arrow tables, and makes Python objects of them."""
    datasets = sys.modules.get("datasets")
    if datasets is None or not isinstance(source, datasets.IterableDataset):
        return False
    return getattr(source._ex_iterable, "iter_arrow", None) is not None  # type: ignore[attr-defined]


def _column_names_of_table(table: pa.Table) -> list[str]:
    names = [field.name for field in table.schema if is_token_type(field.type)]
    return _column_names(dict.fromkeys(names, ()), 0)


def _documents(table: pa.Table, names: list[str]) -> Iterator[Mapping[str, Any]]:
    """The documents of a table, with these columns as views of its buffers."""
    try:
        columns = token_columns(table, names)
    except DataError:
        return iter(table.to_pylist())  # one of them is wrong: it is named when its turn comes
    rows = zip(*(column.rows() for column in columns.values()), strict=True)
    return (dict(zip(columns, values, strict=True)) for values in rows)


def _read_columns(document: Mapping[str, Any], names: list[str], number: int) -> dict[str, NDArray[Any]]:
    """The per-token columns of a document as arrays of one length [tokens]."""
    columns: dict[str, NDArray[Any]] = {}
    length = None
    for name in names:
        values = document.get(name)
        if values is None:
            raise DataError(f"document {number} (counted from 0) has no {name!r}; it has {', '.join(document)}")
        if type(values) is not np.ndarray:
            values = np.asarray(values)
            if values.size == 0:
                values = np.zeros(0, dtype=np.int64)
        if values.ndim != 1 or values.dtype.kind not in ("iu" if name == INPUT_IDS else "iubf"):
            raise DataError(
                f"document {number} (counted from 0): {name!r} has shape {values.shape} of {values.dtype}; expected "
                f"a flat list of numbers, one per token"
            )
        if length is None:
            length = len(values)
        elif len(values) != length:
            raise DataError(
                f"document {number} (counted from 0) has {len(values)} values of {name!r} for "
                f"{length} input_ids; give one per token, or name the columns to keep with columns=[...]"
            )
        columns[name] = values
    return columns

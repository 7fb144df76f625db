"""Packs from a stream of documents whose lengths nobody knows in advance; resumable, the same in every layout."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from longctx.data import DataError
from longctx.data.columns import INPUT_IDS, SOURCE_COUNTS, TURN_ENDS, Document, is_token_type, token_columns

from .lookahead import LookAhead
from .overlong import OVERLONG, PackingReport, whole_turns

_DOCUMENTS_PER_TABLE = 256


@dataclass(slots=True, eq=False)
class _Piece:
    """A document, or `capacity` or fewer tokens of a longer one."""

    turn: int
    """The document's place among those of its lane."""
    columns: dict[str, NDArray[Any]]
    """[tokens] each."""
    _digest: int | None = None

    def __len__(self) -> int:
        return len(self.columns[INPUT_IDS])

    def digest(self) -> int:
        """xxh3 of the columns, as int64 and one after the other."""
        if self._digest is None:
            state = xxhash.xxh3_64()
            for values in self.columns.values():
                state.update(np.ascontiguousarray(values, dtype=np.int64).data)
            self._digest = state.intdigest()
        return self._digest


class PackedStream:
    """Rows of packed documents from a stream; the same keys as rows of `PackedDataset`.

    Documents are taken in order until the next one does not fit, then the gap is closed with the best one or two of
    those that wait, `look_ahead` packs of them. What is longer than a pack and split gives full packs at once, and
    its rest waits with the others.

    Iterating gives the rows of all documents in one order. `lanes` divides the documents into lanes, each of which is
    packed by itself, so that the processes of a run share the work of reading.

        7 documents in 3 lanes    lane 0: 0 3 6    lane 1: 1 4    lane 2: 2 5

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
        look_ahead: int = 8,
        columns: list[str] | None = None,
    ) -> None:
        """
        Args:
            source: documents with `input_ids` and other per-token columns: a datasets.IterableDataset, or anything
                that can be iterated again with the same result. Arrow and parquet files are read table by table
                (under 1 µs a document); what makes examples in Python is read as examples, fastest as NumPy arrays.
            capacity: most tokens in a row (`max_length`).
            overlong: for documents longer than that: "raise", "truncate", "drop", "split", or "turns" for documents
                with `turn_ends`; counted in `report`.
            strategy: "stream" packs; "none" gives every document, or piece of a split one, a row of its own, in order.
            look_ahead: packs' worth of tokens that wait in a lane. Memory is this much for each lane and one document,
                or the tables they come from, and what is read for a lane while another one needs documents.
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
        self.names = columns
        """The columns of rows, once the first document is read."""
        self.count_names = _COUNTS + tuple(f"{source} {name}" for source in self._sources() for name in SOURCE_COUNTS)
        """Names of the counts of a lane; those of a mixture's data sets begin with their numbers."""
        self._position: Mapping[str, Any] | None = None
        self._lane = Lane(_Reader(self, 1, [0], {}), 0)

    def __iter__(self) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield every row: `input_ids` int64 [S], the other columns [S], `seq_lengths` int64 [documents],
        `position_ids` int64 [S].

        Raises:
            DataError: a document without a column, of columns of several lengths, or too long, with its number.
        """
        position, self._position = self._position, None
        (self._lane,) = self.lanes(1, [0], position).values()
        if position:
            self._lane.counts = dict(position["counts"])
        while (row := self._lane.take()) is not None:
            yield row

    def lanes(
        self, num_lanes: int, chosen: Sequence[int], position: Mapping[str, Any] | None = None
    ) -> dict[int, Lane]:
        """Return lanes by number, which read the source together, from its start or from a position.

        Document k is in lane k mod `num_lanes`. A lane's rows depend neither on the other lanes nor on which of them
        are chosen here.

        Args:
            chosen: numbers of the lanes whose documents are read; those of others are passed over, and not tokenised.
            position: of all lanes, as `position_of` returns it.

        Raises:
            ValueError: if the position is of a stream with other settings, or other lanes.
            DataError: if it is of other documents.
        """
        self.check_position(num_lanes, position)
        reader = _Reader(self, num_lanes, chosen, position or {})
        return {lane: Lane(reader, lane, position and position["lanes"][lane]) for lane in chosen}

    def documents_from(
        self, first: int, wanted: Callable[[int], bool], counts: Mapping[str, int]
    ) -> Iterator[Document]:
        """Yield the wanted documents of the source from this one on. What is not wanted is not tokenised.

        Args:
            wanted: whether a document is, by its number.
            counts: of the lanes up to `first`.
        """
        if hasattr(self.source, "documents_from"):
            lengths = [counts.get(f"{source} {SOURCE_COUNTS[-1]}", 0) for source in self._sources()]
            yield from self.source.documents_from(first, wanted, lengths)
        else:
            yield from self._read_tables(first, wanted) if _is_arrow_stream(self.source) else self._read(first, wanted)

    def _sources(self) -> range:
        """Numbers of the data sets of a mixture."""
        return range(len(getattr(self.source, "sources", ())))

    def _read(self, first: int, wanted: Callable[[int], bool]) -> Iterator[Document]:
        for number, document in enumerate(self.source):
            if self.names is None:  # of the first one, whoever reads it
                self.names = _column_names(document, number)
            if number >= first and wanted(number):
                yield Document(number, document)

    def _read_tables(self, first: int, wanted: Callable[[int], bool]) -> Iterator[Document]:
        """Read a datasets.IterableDataset over Arrow tables, without a Python list for every document."""
        source = self.source.with_format("arrow")  # type: ignore[attr-defined]
        source.set_epoch(self.source.epoch)  # type: ignore[attr-defined]  # which `with_format` does not hand on
        number = 0
        for table in source.iter(batch_size=_DOCUMENTS_PER_TABLE):
            if self.names is None:
                types = {field.name: field.type for field in table.schema}
                self.names = _column_names({name: () for name in types if is_token_type(types[name])}, 0)
            if number + table.num_rows > first:
                for place, document in enumerate(_documents(table, self.names), number):
                    if place >= first and wanted(place):
                        yield Document(place, document)
            number += table.num_rows

    @property
    def report(self) -> PackingReport:
        """What became of the documents read so far, those that still wait counted as kept; over all ranks' packs."""
        return self.report_of(self._lane.counts)

    def report_of(self, counts: Mapping[str, int]) -> PackingReport:
        """Return the counts of lanes as a report."""
        kept = counts["tokens"] - counts["tokens_cut"] - counts["tokens_dropped"]
        of_report: dict[str, Any] = {name: counts[name] for name in _COUNTS if name != "tokens_packed"}
        return PackingReport(
            strategy=self.strategy,
            overlong=self.overlong,
            capacity=self.capacity,
            tokens_kept=kept,
            tokens_waiting=kept - counts["tokens_packed"],
            **of_report,
        )

    def position(self) -> dict[str, Any]:
        """Return where the stream stands, without tokens, so that JSON holds it: the documents that wait are read again
        from the source. A digest tells whether they are the same."""
        return self.position_of([self._lane.position()], self._lane.counts)

    def position_of(self, lanes: Sequence[Mapping[str, Any]], counts: Mapping[str, int]) -> dict[str, Any]:
        """Return where the stream stands from where each of its lanes does, in order, and their counts."""
        return {"settings": self._settings(len(lanes)), "lanes": [*lanes], "counts": dict(counts)}

    def go_on_from(self, position: Mapping[str, Any]) -> None:
        """Make the next iteration go on from a `position`.

        Raises:
            ValueError: it is of a stream with other settings; the iteration, if it is of other documents.
        """
        self.check_position(1, position)
        self._position = position

    def check_position(self, num_lanes: int, position: Mapping[str, Any] | None) -> None:
        """Check that the position is of a stream with these settings and so many lanes."""
        if position and position["settings"] != self._settings(num_lanes):
            raise ValueError(
                f"the position is of a stream with {position['settings']}, this one has {self._settings(num_lanes)}; "
                "its sequences would differ. Make the stream with the same settings"
            )

    def _settings(self, num_lanes: int) -> dict[str, Any]:
        names = ("capacity", "overlong", "strategy", "look_ahead", "columns")
        return {name: getattr(self, name) for name in names} | {"lanes": num_lanes}


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
    "tokens_packed",
)
"""Fields of PackingReport that are counted along a lane, and the tokens in its packs."""


def add_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the counts of several lanes, or parts of a stream, together."""
    first, *others = counts
    added = dict(first)
    for other in others:
        for name, value in other.items():
            is_largest = name.endswith(("longest_document", SOURCE_COUNTS[-1]))
            added[name] = max(added[name], value) if is_largest else added[name] + value
    return added


class _Reader:
    """Reads a source once for several lanes.

    Args:
        position: of all lanes, {} for the start.
    """

    def __init__(self, stream: PackedStream, num_lanes: int, chosen: Sequence[int], position: Mapping[str, Any]):
        self.stream, self.num_lanes = stream, num_lanes
        self.places = np.arange(stream.capacity)
        self._queues: dict[int, deque[Document]] = {lane: deque() for lane in chosen}
        # Of all lanes, though only the chosen ones are read: so each end of a data set before it has been seen.
        self._first = min((_again(lane)[0] for lane in position.get("lanes", ())), default=0) * num_lanes
        lanes = {lane: position["lanes"][lane] for lane in chosen} if position else {}
        self._again = {lane: {*_again(lanes[lane])} for lane in lanes}
        self._read = {lane: lanes[lane]["read"] if lanes else 0 for lane in chosen}
        self._counts = position.get("counts", {})
        self._documents: Iterator[Document] | None = None

    def _wants(self, number: int) -> bool:
        turn, lane = divmod(number, self.num_lanes)
        return lane in self._queues and (turn >= self._read[lane] or turn in self._again[lane])

    def next_of(self, lane: int) -> Document | None:
        """Return the next document of a lane, None at the end. Those of other lanes that come before it are kept."""
        if self._documents is None:
            self._documents = self.stream.documents_from(self._first, self._wants, self._counts)
        while not self._queues[lane]:
            document = next(self._documents, None)
            if document is None:
                return None
            self._queues[document.number % self.num_lanes].append(document)
        return self._queues[lane].popleft()


def _again(lane: Mapping[str, Any]) -> list[int]:
    """Turns of the documents that are read again from the position of a lane, and of the next one, in order."""
    last = [lane["read"] - 1] if lane["ready"] else []  # which may wait as well
    return sorted({*(turn for first, stop in lane["waiting"] for turn in range(first, stop)), *last, lane["read"]})


class Lane:
    """Packs the documents of one lane of a `PackedStream`."""

    def __init__(self, reader: _Reader, number: int, position: Mapping[str, Any] | None = None) -> None:
        self._reader, self._number, self._stream = reader, number, reader.stream
        self.counts: dict[str, int] = dict.fromkeys(self._stream.count_names, 0)
        """Of the documents read since this lane was made, and of its packs."""
        self._read = 0
        self._ready: list[_Piece] = []
        self._waiting: LookAhead[_Piece] = LookAhead(self._stream.capacity, self._stream.look_ahead)
        if position:
            self._read_again(position)

    def take(self) -> dict[str, NDArray[Any]] | None:
        """Return the next row, as of `PackedStream`; None after the last one."""
        while not self._ready and not self._waiting.full:
            document = self._reader.next_of(self._number)
            if document is None:
                break
            columns = self._columns(document)
            kept = self._kept(document, len(columns[INPUT_IDS]))
            full, rest = self._cut(self._read, columns, kept)
            self._read += 1
            self._ready += full
            if rest is not None:
                self._waiting.add(len(rest), rest)
        if not self._ready and not len(self._waiting):
            return None
        pack = [self._ready.pop(0)] if self._ready else self._waiting.take()
        self.counts["packs"] += 1
        self.counts["pieces"] += len(pack)
        row = _row(pack, self._reader.places)
        self.counts["tokens_packed"] += len(row[INPUT_IDS])
        return row

    def _columns(self, document: Document) -> dict[str, NDArray[Any]]:
        if self._stream.names is None:
            self._stream.names = _column_names(document.columns, document.number)
        return _read_columns(document.columns, self._stream.names, document.number)

    def _cut(self, turn: int, columns: dict[str, NDArray[Any]], kept: int) -> tuple[list[_Piece], _Piece | None]:
        """Return what a document of so many kept tokens is ready for at once, and what waits for a pack."""
        capacity, is_packed = self._stream.capacity, self._stream.strategy == "stream"
        if kept < capacity and is_packed:
            return [], _Piece(turn, columns) if kept else None
        pieces = [
            _Piece(turn, {name: values[start : min(start + capacity, kept)] for name, values in columns.items()})
            for start in range(0, kept, capacity)
        ]
        if not is_packed or kept % capacity == 0:
            return pieces, None
        rest = pieces.pop()  # a copy, so that it does not keep the whole document in memory while it waits
        return pieces, _Piece(turn, {name: values.copy() for name, values in rest.columns.items()})

    def _kept(self, document: Document, length: int) -> int:
        """Return how many tokens of the next document, which has so many, go into packs; count it."""
        counts, limit, overlong = self.counts, self._stream.capacity, self._stream.overlong
        if length > limit and overlong == "raise":
            raise DataError(
                f"document {document.number} (counted from 0) has {length:,} tokens, more than max_length = {limit:,}. "
                f"Raise --max_length to {length}, or choose what happens to longer documents: --overlong truncate, "
                "drop or split"
            )
        kept = length if length <= limit or overlong == "split" else limit if overlong == "truncate" else 0
        if length > limit and overlong == "turns":
            kept = whole_turns(document.columns[TURN_ENDS], limit)
        is_dropped = length > limit and kept == 0
        counts["documents"] += 1
        counts["tokens"] += length
        counts["longest_document"] = max(counts["longest_document"], length)
        counts["empty_documents"] += length == 0
        counts["too_long_documents"] += length > limit
        counts["documents_dropped"] += is_dropped
        counts["tokens_dropped" if is_dropped else "tokens_cut"] += length - kept
        if self._stream._sources():
            found = zip(SOURCE_COUNTS, (1, length, int(document.is_new), document.records), strict=True)
            of_source = {f"{document.source} {name}": value for name, value in found}
            counts |= add_counts([{name: counts[name] for name in of_source}, of_source])
        return kept

    def position(self) -> dict[str, Any]:
        """Return where the lane stands: documents read, spans of those that wait, pieces that are ready, a digest."""
        waiting, ready = self._waiting.items, self._ready
        turns = np.array([piece.turn for piece in waiting], dtype=np.int64)
        spans = np.split(turns, np.flatnonzero(np.diff(turns) != 1) + 1) if len(turns) else []
        digests = np.array([piece.digest() for piece in (*waiting, *ready)], dtype=np.uint64)
        return {
            "read": self._read,
            "waiting": [[int(span[0]), int(span[-1]) + 1] for span in spans],
            "ready": len(ready),
            "digest": xxhash.xxh3_64_hexdigest(digests.data),
        }

    def _read_again(self, position: Mapping[str, Any]) -> None:
        """Set out from a position.

        Raises:
            DataError: for other documents than were read then.
        """
        waiting = {turn for first, stop in position["waiting"] for turn in range(first, stop)}
        *again, self._read = _again(position)
        for turn in again:
            document = self._reader.next_of(self._number)
            if document is None:
                break
            columns = self._columns(document)
            counts, self.counts = self.counts, dict(self.counts)
            full, rest = self._cut(turn, columns, self._kept(document, len(columns[INPUT_IDS])))
            self.counts = counts
            if turn in waiting and rest is not None:
                self._waiting.add(len(rest), rest)
            if turn == position["read"] - 1 and position["ready"]:
                self._ready = full[-position["ready"] :]
        if self.position() != position:
            numbers = [turn * self._reader.num_lanes + self._number for turn in (again[0], self._read)] if again else []
            raise DataError(
                f"the stream has other documents than when it was read before: {len(again)} that waited for a pack, "
                f"from {numbers[0]} to {numbers[1]} (counted from 0), are not the same. Use the same data and "
                "tokenizer, or start again from the checkpoint's weights with --model_name_or_path"
            )


def _check_arguments(capacity: Any, overlong: str, strategy: str, look_ahead: int) -> None:
    if isinstance(capacity, bool) or not isinstance(capacity, int | np.integer) or capacity < 1:
        raise ValueError(f"capacity must be a number of tokens of at least 1, got {capacity!r}")
    if overlong not in OVERLONG:
        raise ValueError(f"unknown overlong={overlong!r}, must be one of {', '.join(OVERLONG)}")
    if strategy not in ("stream", "none"):
        raise ValueError(f"unknown strategy={strategy!r}, must be stream or none; others need every length at once")
    if look_ahead < 1:
        raise ValueError(f"look_ahead must be at least 1 pack, got {look_ahead}; 8 packs fill sequences to 99.8%")


def _column_names(document: Mapping[str, Any], number: int) -> list[str]:
    """The per-token columns of a document, `input_ids` first."""
    if "seq_lengths" in document:
        raise DataError(f"document {number} has 'seq_lengths', so it is a pack already; use its sequences as they are")
    names = [name for name, value in document.items() if name not in (INPUT_IDS, TURN_ENDS) and _is_token_list(value)]
    return [INPUT_IDS, *names]


def _is_token_list(value: object) -> bool:
    if value is None or isinstance(value, str | bytes | Mapping):
        return False
    try:
        array = np.asarray(value)
    except ValueError:  # lists of several lengths inside
        return False
    return array.ndim == 1 and array.dtype.kind in "iubf"


def _row(pack: list[_Piece], places: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """The row of these pieces; `places` is 0 .. capacity - 1."""
    row = {
        name: np.concatenate([piece.columns[name] for piece in pack], dtype=np.int64 if name == INPUT_IDS else None)
        for name in pack[0].columns
    }
    lengths = [*map(len, pack)]
    row["seq_lengths"] = np.array(lengths)
    row["position_ids"] = np.concatenate([places[:length] for length in lengths])
    return row


def _is_arrow_stream(source: object) -> bool:
    """Whether a source is a datasets.IterableDataset that reads Arrow tables, and makes Python objects of them."""
    datasets = sys.modules.get("datasets")
    if datasets is None or not isinstance(source, datasets.IterableDataset):
        return False
    return getattr(source._ex_iterable, "iter_arrow", None) is not None  # type: ignore[attr-defined]


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

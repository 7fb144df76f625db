"""Lanes of a stream: each packs documents of its own, and those of a process read the source together."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from longctx.data import DataError
from longctx.data.columns import INPUT_IDS, TURN_ENDS, Document

from .dataset import positions
from .lookahead import LookAhead
from .overlong import whole_turns

COUNTS = (
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
            is_largest = name.endswith(("longest_document", "there"))
            added[name] = max(added[name], value) if is_largest else added[name] + value
    return added


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


def lane_of(document: int, num_lanes: int) -> int:
    """Return the lane of a document: they are dealt in rounds, each of which begins one lane further than the last.

    So a data set whose long documents come at regular intervals does not fill some lanes with long ones alone.

        documents 0 .. 8 in 3 lanes  ->  0 1 2, 1 2 0, 2 0 1
    """
    return (document + document // num_lanes) % num_lanes


class Reader:
    """Reads a source once for several lanes.

    Args:
        stream: a `PackedStream`, whose module imports this one.
        position: of all lanes, {} for the start.
    """

    def __init__(self, stream: Any, num_lanes: int, chosen: Sequence[int], position: Mapping[str, Any]):
        self.stream, self.num_lanes = stream, num_lanes
        self._queues: dict[int, deque[Document]] = {lane: deque() for lane in chosen}
        turns = [_turns(lane) for lane in position.get("lanes", [{"read": 0, "waiting": [], "ready": 0}] * num_lanes)]
        self._turns = {lane: ({*turns[lane]}, turns[lane][-1]) for lane in chosen}
        # From the first document that any lane needs, so that lanes have met the end of each data set before it.
        first = min(of_lane[0] for of_lane in turns) * num_lanes
        self._documents = stream.documents_from(first, self._wants, position.get("counts", {}))

    def _wants(self, number: int) -> bool:
        again, read = self._turns.get(lane_of(number, self.num_lanes), ((), math.inf))
        turn = number // self.num_lanes
        return turn >= read or turn in again

    def next_of(self, lane: int) -> Document | None:
        """Return the next document of a lane, None at the end. Those of other lanes that come before it are kept."""
        while not self._queues[lane]:
            document = next(self._documents, None)
            if document is None:
                return None
            self._queues[lane_of(document.number, self.num_lanes)].append(document)
        return self._queues[lane].popleft()


def _turns(position: Mapping[str, Any]) -> list[int]:
    """Return the turns of the documents that a lane reads again from its position, and of the next one, in order."""
    waiting = [turn for first, stop in position["waiting"] for turn in range(first, stop)]
    last = [position["read"] - 1] if position["ready"] else []  # which may wait as well
    return sorted({*waiting, *last, position["read"]})


class Lane:
    """Packs the documents of one lane of a `PackedStream`."""

    def __init__(self, reader: Reader, number: int, position: Mapping[str, Any] | None = None) -> None:
        self._reader, self._number, self._stream = reader, number, reader.stream
        self.counts: dict[str, int] = dict.fromkeys(self._stream.count_names, 0)
        """Of the documents read since this lane was made, and of its packs."""
        self._read = 0
        self._ready: list[_Piece] = []
        self._waiting: LookAhead[_Piece] = LookAhead(self._stream.capacity, self._stream.look_ahead)
        if position:
            self._read_again(position)

    def take(self) -> dict[str, NDArray[Any]] | None:
        """Return the next row, as of `PackedStream`; None after the last one.

        Raises:
            DataError: as of iterating over one.
        """
        while not self._ready and not self._waiting.full:
            document = self._reader.next_of(self._number)
            if document is None:
                break
            self._count(document, *self._add(document, self._read))
            self._read += 1
        if not self._ready and not len(self._waiting):
            return None
        pack = [self._ready.pop(0)] if self._ready else self._waiting.take()
        row = _row(pack)
        for name, value in (("packs", 1), ("pieces", len(pack)), ("tokens_packed", len(row[INPUT_IDS]))):
            self.counts[name] += value
        return row

    def _add(self, document: Document, turn: int) -> tuple[int, int]:
        """Add the pieces of a document to those that are ready, and one that is no full pack to those that wait.

        Returns:
            Its tokens, and those of them that go into packs.
        """
        stream, capacity = self._stream, self._stream.capacity
        if stream.names is None:
            stream.names = column_names(document.columns, document.number)
        columns = _read_columns(document.columns, stream.names, document.number)
        length = kept = len(columns[INPUT_IDS])
        if length > capacity and stream.overlong == "raise":
            raise DataError(
                f"document {document.number} (counted from 0) has {length:,} tokens, more than max_length = "
                f"{capacity:,}. Raise --max_length to {length}, or choose what happens to longer documents: --overlong "
                "truncate, drop or split"
            )
        if length > capacity and stream.overlong == "turns":
            if TURN_ENDS not in document.columns:
                raise DataError(
                    f"document {document.number} (counted from 0) has no {TURN_ENDS!r}, which overlong='turns' needs; "
                    "choose another value for text"
                )
            kept = whole_turns(document.columns[TURN_ENDS], capacity)
        elif length > capacity and stream.overlong != "split":
            kept = capacity if stream.overlong == "truncate" else 0
        pieces = [
            _Piece(turn, {name: values[start : min(start + capacity, kept)] for name, values in columns.items()})
            for start in range(0, kept, capacity)
        ]
        if kept % capacity and stream.strategy == "stream":
            rest = pieces.pop()
            if pieces:  # a copy, so that it does not keep the whole document in memory while it waits
                rest.columns = {name: values.copy() for name, values in rest.columns.items()}
            self._waiting.add(len(rest), rest)
        self._ready += pieces
        return length, kept

    def _count(self, document: Document, length: int, kept: int) -> None:
        counts, is_too_long = self.counts, length > self._stream.capacity
        is_dropped = is_too_long and not kept
        counts["documents"] += 1
        counts["tokens"] += length
        counts["longest_document"] = max(counts["longest_document"], length)
        counts["empty_documents"] += length == 0
        counts["too_long_documents"] += is_too_long
        counts["documents_dropped"] += is_dropped
        counts["tokens_dropped" if is_dropped else "tokens_cut"] += length - kept
        if (documents := f"{document.source} documents") in counts:
            counts[documents] += 1
            counts[f"{document.source} tokens"] += length
            counts[f"{document.source} distinct"] += document.is_new
            counts[f"{document.source} there"] = max(counts[f"{document.source} there"], document.records)

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
        *again, self._read = _turns(position)
        for turn in again:
            if (document := self._reader.next_of(self._number)) is not None:
                self._add(document, turn)
        self._ready = self._ready[len(self._ready) - position["ready"] :]  # of the last one, whose rest waits
        if self.position() != position:
            raise DataError(
                f"the stream has other documents than when it was read before: {len(again)} that waited for a pack, "
                f"of the documents from {again[0] * self._reader.num_lanes} (counted from 0) on, are not the same. Use "
                "the same data and tokenizer, or start again from the checkpoint's weights with --model_name_or_path"
            )


def column_names(document: Mapping[str, Any], number: int) -> list[str]:
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


def _row(pack: list[_Piece]) -> dict[str, NDArray[Any]]:
    row = {
        name: np.concatenate([piece.columns[name] for piece in pack], dtype=np.int64 if name == INPUT_IDS else None)
        for name in pack[0].columns
    }
    lengths = np.array([*map(len, pack)])
    return row | {"seq_lengths": lengths, "position_ids": positions(lengths)}


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

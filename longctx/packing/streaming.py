"""Packs from a stream of documents whose lengths nobody knows in advance; resumable, for any number of ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

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


class PackedStream(IterableDataset):
    """Rows of packed documents from a stream; the same keys as rows of `PackedDataset`.

    Documents are taken in order until the next one does not fit, then the gap is closed with the best one or two of
    those that wait, `look_ahead` packs of them. What is longer than a pack and split gives full packs at once, and
    its rest waits with the others.

    **Ranks and workers.** There is one order of rows, a function of the source alone. Data-parallel rank r of R
    yields row r, R + r, 2 R + r, ...; the ranks of a sequence group pass the same `rank`, so they yield the same
    rows. W workers of a DataLoader share a rank's rows round about, so with rows that are not batched
    (`DataLoader(stream, batch_size=None)`) a step's rows do not depend on W. Every process reads every document, and
    makes tensors of its own rows only. `rows()` is the one order itself. Two ways to read less:

    - a datasets.IterableDataset deals its files out to workers by itself; each worker then packs its files alone.
    - give every rank its own documents (`datasets.distributed.split_dataset_by_node(source, rank, world)`), and
      leave `num_ranks` at 1.

    Where the rows do not divide by the ranks, the last round has rows for the first ranks only: feed the others
    `SequenceCollator.empty()`, or leave it out with `drop_last`.

    **Resuming.** `state_dict()` between two rows, and `load_state_dict()` into a stream over the same source: it goes
    on with the next row. The state is the same on every rank, and may be loaded with another number of ranks. It
    lives where the rows are made. Without workers it is `stream.state_dict()`. With workers torch's own DataLoader
    does not hand it out; torchdata's StatefulDataLoader does:

        loader = StatefulDataLoader(stream, batch_size=None, num_workers=2)
        state = loader.state_dict()  # between two rows; torch.save it
        loader.load_state_dict(state)  # of a new loader over the same source, with as many workers

    or else pass over the rows that were read: `itertools.islice(loader, rows, None)`.
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
        rank: int = 0,
        num_ranks: int = 1,
        drop_last: bool = False,
        source_state: bool = False,
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
            rank, num_ranks: which data-parallel rank this is (`sequence.dims.dp_rank(...)`), of how many.
            drop_last: leave out a last round of rows that not every rank and worker has a row of.
            source_state: keep the source's own `state_dict()`, so that resuming does not read it from its start. A
                datasets.IterableDataset is then read as examples (20 µs a document and more), where states are exact.
                Not for datasets' `shuffle`, whose buffer is no part of that state: documents would be missed.

        Raises:
            ValueError: for an argument out of range.
        """
        _check_arguments(capacity, overlong, strategy, look_ahead, rank, num_ranks)
        if isinstance(source, Iterator):
            raise ValueError(
                f"the source is a {type(source).__name__}, which can be read only once, so neither an epoch nor a run "
                "could be repeated; pass something that can be iterated again, such as a datasets.IterableDataset"
            )
        if source_state and not hasattr(source, "state_dict"):
            raise ValueError(f"source_state=True, but a {type(source).__name__} has no state_dict; leave it out")
        self.source, self.capacity, self.overlong, self.look_ahead = source, int(capacity), overlong, look_ahead
        self.strategy, self.columns, self.rank, self.num_ranks = strategy, columns, rank, num_ranks
        self.drop_last, self.source_state = drop_last, source_state
        self._source_start = self.source.state_dict() if source_state else None  # type: ignore[attr-defined]
        self._loaded: dict[str, Any] | None = None
        self._position: Mapping[str, Any] | None = None
        self._begin(None)

    def __iter__(self) -> Iterator[dict[str, NDArray[Any]]]:
        """This rank's (and worker's) rows: `input_ids` int64 [S], the other columns [S], `seq_lengths` int64
        [documents], `position_ids` int64 [S].

        Raises:
            DataError: a document without a column, of columns of several lengths, or too long, with its number.
        """
        packs, places = self._packs(), np.arange(self.capacity)
        mine, shares = self._share()
        while group := list(islice(packs, shares)):
            if self.drop_last and len(group) < shares:
                return
            if mine < len(group):
                yield _row(group[mine], places)

    def rows(self) -> Iterator[dict[str, NDArray[Any]]]:
        """Every row of the one order, whichever rank and worker this is; raises as iterating does.

        For those that deal the rows out by themselves, such as longctx.training.data_order.StepStream.
        """
        places = np.arange(self.capacity)
        return (_row(pack, places) for pack in self._packs())

    def _begin(self, state: Mapping[str, Any] | None) -> None:
        """Set out from the start of the source, or from a state."""
        state = state or {"read": 0, "waiting": [], "ready": [], "counts": {}, "columns": self.columns}
        self._read: int = state["read"]
        self._counts = dict.fromkeys(_COUNTS, 0) | state["counts"]
        self._names: list[str] | None = state["columns"]
        self._ready = [_Piece(*piece) for piece in state["ready"]]
        self._waiting: LookAhead[_Piece] = LookAhead(self.capacity, self.look_ahead)
        for piece in map(_Piece._make, state["waiting"]):
            self._waiting.add(len(piece.columns[INPUT_IDS]), piece)

    def _share(self) -> tuple[int, int]:
        """(this process's place, places) in a round of rows."""
        worker = get_worker_info()
        if worker is None or _divides_among_workers(self.source):
            return self.rank, self.num_ranks
        return worker.id * self.num_ranks + self.rank, worker.num_workers * self.num_ranks

    def _read_on(self, state: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
        """The documents of the source that were not read yet."""
        if not self.source_state:
            return self._read_from(self._read)
        # Also at the start: datasets goes back to the state that was loaded last, not to the start.
        position = self._source_start if state is None else state["source"]
        self.source.load_state_dict(position)  # type: ignore[attr-defined]
        return iter(self.source)

    def _read_from(self, document: int) -> Iterator[Mapping[str, Any]]:
        """The documents of the source from this one on."""
        if hasattr(self.source, "starting_at"):
            return self.source.starting_at(document)
        if _is_arrow_stream(self.source):
            return self._read_tables(document)
        return islice(iter(self.source), document, None)

    def _read_tables(self, skip: int) -> Iterator[Mapping[str, Any]]:
        """The same of a datasets.IterableDataset over Arrow tables, without a Python list for every document."""
        source, worker = self.source.with_format("arrow"), get_worker_info()  # type: ignore[attr-defined]
        if worker is not None:  # `iter` does not deal files out to workers, as iterating over examples does
            if worker.id >= source.num_shards:
                return
            source = source.shard(min(worker.num_workers, source.num_shards), worker.id, contiguous=False)
        source.set_epoch(self.source.epoch)  # type: ignore[attr-defined]  # which neither of them hands on
        for table in source.iter(batch_size=_DOCUMENTS_PER_TABLE):
            if self._names is None:
                self._names = _column_names_of_table(table)
            if skip < table.num_rows:
                yield from islice(_documents(table, self._names), skip, None)
            skip = max(skip - table.num_rows, 0)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to a source that shuffles by it."""
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)

    def _packs(self) -> Iterator[list[_Piece]]:
        """Every pack of the stream, of all ranks, from its start or from the state that was loaded."""
        if self._position is not None:
            documents = self._read_again()
        else:
            state, self._loaded = self._loaded, None
            self._begin(state)
            documents = self._read_on(state)
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

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands: documents read, and those that wait with their tokens (pickle or torch.save)."""
        if self._loaded is not None:
            return self._loaded
        return {
            "settings": self._settings(),
            "read": self._read,
            "source": self.source.state_dict() if self.source_state else None,  # type: ignore[attr-defined]
            "columns": self._names,
            "waiting": [tuple(piece) for piece in self._waiting.items],
            "ready": [tuple(piece) for piece in self._ready],
            "counts": dict(self._counts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration go on from there.

        Raises:
            ValueError: the state is of a stream with other settings, whose packs would differ.
        """
        self._check_settings(state)
        self._loaded = dict(state)

    def position(self) -> dict[str, Any]:
        """Where the stream stands, as `state_dict` but without tokens, so that JSON holds it: the documents that wait
        are read again from the source. A digest tells whether they are the same."""
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

    def _read_again(self) -> Iterator[Mapping[str, Any]]:
        """Set out from a position; the documents that were not read then.

        Raises:
            DataError: for others than were read then.
        """
        position, self._position = self._position, None
        assert position is not None
        self._begin({**position, "waiting": [], "ready": []})
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
                f"from {first} to {stop} (counted from 0), are not the same. Give the same data and tokenizer, or "
                "start anew from the checkpoint's weights with --model_name_or_path"
            )
        waiting = len(position["waiting"])
        self._ready = pieces[waiting:]
        for piece in pieces[:waiting]:
            self._waiting.add(len(piece.columns[INPUT_IDS]), piece)
        return documents

    def _check_settings(self, state: Mapping[str, Any]) -> None:
        if state["settings"] != self._settings():
            raise ValueError(
                f"the state is of a stream with {state['settings']}, this one has {self._settings()}; its rows would "
                "be others. Make the stream with the same settings"
            )

    def _settings(self) -> dict[str, Any]:
        names = ("capacity", "overlong", "strategy", "look_ahead", "source_state")
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


def _check_arguments(capacity: Any, overlong: str, strategy: str, look_ahead: int, rank: int, num_ranks: int) -> None:
    if isinstance(capacity, bool) or not isinstance(capacity, int | np.integer) or capacity < 1:
        raise ValueError(f"capacity must be a number of tokens of at least 1, got {capacity!r}")
    if overlong not in OVERLONG:
        raise ValueError(f"unknown overlong={overlong!r}, must be one of {', '.join(OVERLONG)}")
    if strategy not in ("stream", "none"):
        raise ValueError(f"unknown strategy={strategy!r}, must be stream or none; others need every length at once")
    if look_ahead < 1:
        raise ValueError(f"look_ahead must be at least 1 pack, got {look_ahead}; 16 packs fill rows to 99.8%")
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank must be in 0 .. {num_ranks - 1} for num_ranks={num_ranks}, got {rank}")


def _divides_among_workers(source: object) -> bool:
    """Whether a source reads another part in each worker by itself."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(source, datasets.IterableDataset)


def _column_names(document: Mapping[str, Any], number: int) -> list[str]:
    """The per-token columns of a document, `input_ids` first."""
    if "seq_lengths" in document:
        raise DataError(f"document {number} has 'seq_lengths', so it is a pack already; use its rows as they are")
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
    return _divides_among_workers(source) and getattr(source._ex_iterable, "iter_arrow", None) is not None  # type: ignore[attr-defined]


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
                f"document {number} (counted from 0): {name!r} has shape {values.shape} of {values.dtype}; expected a "
                "flat list of numbers, one a token"
            )
        if length is None:
            length = len(values)
        elif len(values) != length:
            raise DataError(
                f"document {number} (counted from 0) has {len(values)} values of {name!r} for "
                f"{length} input_ids; give one a token, or name the columns to keep with columns=[...]"
            )
        columns[name] = values
    return columns

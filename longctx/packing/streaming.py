"""Packs from a stream of documents whose lengths nobody knows in advance; resumable, the same in every layout."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longctx.data import DataError
from longctx.data.columns import SOURCE_COUNTS, Document, documents_of, is_token_type

from .lanes import COUNTS, Lane, Reader, column_names
from .overlong import OVERLONG, PackingReport

_DOCUMENTS_PER_TABLE = 256


class PackedStream:
    """Rows of packed documents from a stream; the same keys as rows of `PackedDataset`.

    Documents are taken in order until the next one does not fit, then the gap is closed with the best one or two of
    those that wait, `look_ahead` packs of them. What is longer than a pack and split gives full packs at once, and
    its rest waits with the others.

    Iterating gives the rows of all documents in one order. `lanes` divides the documents into lanes, each of which is
    packed by itself, so that the processes of a run share the work of reading.

        7 documents in 3 lanes    lane 0: 0 5    lane 1: 1 3    lane 2: 2 4 6

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
        self.count_names = COUNTS + tuple(f"{source} {name}" for source in self._sources() for name in SOURCE_COUNTS)
        """Names of the counts of a lane; those of a mixture's data sets begin with their numbers."""
        self._position: Mapping[str, Any] | None = None
        self._lane = Lane(Reader(self, 1, [0], {}), 0)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the lane, which reads the source: the stream begins anew in another process."""
        return {name: value for name, value in vars(self).items() if name != "_lane"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lane = Lane(Reader(self, 1, [0], {}), 0)

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

        `lane_of` says which documents are in which lane. A lane's rows depend neither on the other lanes nor on which
        of them are chosen here.

        Args:
            chosen: numbers of the lanes whose documents are read; those of others are passed over, and not tokenised.
            position: of all lanes, as `position_of` returns it.

        Raises:
            ValueError: if the position is of a stream with other settings, or other lanes.
            DataError: if it is of other documents.
        """
        self.check_position(num_lanes, position)
        reader = Reader(self, num_lanes, chosen, position or {})
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
            lengths = [counts.get(f"{source} there", 0) for source in self._sources()]
            yield from self.source.documents_from(first, wanted, lengths)
            return
        for number, document in enumerate(self._examples()):
            if self.names is None:  # of the first one, whoever reads it
                self.names = column_names(document, number)
            if number >= first and wanted(number):
                yield Document(number, document)

    def _sources(self) -> range:
        """Numbers of the data sets of a mixture."""
        return range(len(getattr(self.source, "sources", ())))

    def _examples(self) -> Iterator[Mapping[str, Any]]:
        """The documents of a source; those of Arrow tables without a Python list for each."""
        if not _is_arrow_stream(self.source):
            yield from self.source
            return
        source = self.source.with_format("arrow")  # type: ignore[attr-defined]
        source.set_epoch(self.source.epoch)  # type: ignore[attr-defined]  # which `with_format` does not hand on
        for table in source.iter(batch_size=_DOCUMENTS_PER_TABLE):
            if self.names is None:
                self.names = column_names({f.name: () for f in table.schema if is_token_type(f.type)}, 0)
            try:
                documents = documents_of(table)
            except DataError:  # one of them is wrong: it is named when its turn comes
                documents = iter(table.to_pylist())
            yield from documents

    @property
    def report(self) -> PackingReport:
        """What became of the documents read so far, those that still wait counted as kept; over all ranks' packs."""
        return self.report_of(self._lane.counts)

    def report_of(self, counts: Mapping[str, int]) -> PackingReport:
        """Return the counts of lanes as a report."""
        kept = counts["tokens"] - counts["tokens_cut"] - counts["tokens_dropped"]
        of_report: dict[str, Any] = {name: counts[name] for name in COUNTS if name != "tokens_packed"}
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


def _check_arguments(capacity: Any, overlong: str, strategy: str, look_ahead: int) -> None:
    if isinstance(capacity, bool) or not isinstance(capacity, int | np.integer) or capacity < 1:
        raise ValueError(f"capacity must be a number of tokens of at least 1, got {capacity!r}")
    if overlong not in OVERLONG:
        raise ValueError(f"unknown overlong={overlong!r}, must be one of {', '.join(OVERLONG)}")
    if strategy not in ("stream", "none"):
        raise ValueError(f"unknown strategy={strategy!r}, must be stream or none; others need every length at once")
    if look_ahead < 1:
        raise ValueError(f"look_ahead must be at least 1 pack, got {look_ahead}; 16 packs fill sequences to 99.8%")


def _is_arrow_stream(source: object) -> bool:
    """Whether a source is a datasets.IterableDataset that reads Arrow tables, and makes Python objects of them."""
    datasets = sys.modules.get("datasets")
    if datasets is None or not isinstance(source, datasets.IterableDataset):
        return False
    return getattr(source._ex_iterable, "iter_arrow", None) is not None  # type: ignore[attr-defined]

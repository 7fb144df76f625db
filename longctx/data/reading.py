"""Streams of records: passed over as they lie, parsed where they are encoded, or kept in a cache as a data set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import Any, Self

import datasets
import pyarrow as pa
from datasets import Dataset, Features, IterableDataset

from longctx.data.contents import cache_folder, cache_key, check_unchanged, content_digests, file_state
from longctx.data.errors import within_memory
from longctx.untrusted.files import written_whole

_CACHED_RECORDS, _CACHED_BYTES = 1000, 8 << 20
"""Records, and bytes of their files, that are parsed and written to the cache at a time."""


class RecordStream:
    """The records of one split, in order. They can be read any number of times, and in any process."""

    features: Features
    """Types of the columns that are read."""
    files: Sequence[Path] = ()
    """The files that are read, if they are known."""

    @property
    def column_names(self) -> list[str]:
        return list(self.features)

    def select_columns(self, columns: Sequence[str]) -> Self:
        """Return a stream of the same records with these columns only."""
        chosen = copy(self)
        chosen.features = Features({column: self.features[column] for column in columns})
        return chosen

    def raw(self) -> Iterator[Any]:
        """Yield each record as it lies in its source, which costs as little as can be.

        Raises:
            DataError: for a file that cannot be read.
        """
        raise NotImplementedError

    def parse(self, records: Sequence[Any]) -> pa.Table:
        """Return records of `raw` as a table of the selected columns, one row a record.

        Raises:
            DataError: for a record that is malformed or of another kind, with file and line.
        """
        raise NotImplementedError

    def place(self, record: int) -> str | None:
        """Return the file, and the line if it has lines, that a record is in; None if that is not known."""
        return None

    def tables(self) -> Iterator[pa.Table]:
        """Yield all records, parsed some at a time."""
        waiting, nbytes = [], 0
        for record in self.raw():
            waiting.append(record)
            nbytes += self.size(record)
            if len(waiting) == _CACHED_RECORDS or nbytes > _CACHED_BYTES:
                yield self.parse(waiting)
                waiting, nbytes = [], 0
        if waiting:
            yield self.parse(waiting)

    def size(self, record: Any) -> int:
        """Return about how many bytes a record of `raw` has."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield records as `datasets` gives them."""
        for table in self.tables():
            yield from Dataset(table, fingerprint="stream")

    def load(self) -> Dataset:
        """Write all records to the cache, once for the same contents of the files, and map them into memory."""
        states = [file_state(file) for file in self.files]
        key = cache_key(type(self).__name__, self.features.to_dict(), content_digests(self.files), *self.options())
        kept = cache_folder() / f"records-{key}.arrow"
        if not kept.exists():
            with written_whole(kept) as unfinished:
                with pa.ipc.new_stream(str(unfinished), self.features.arrow_schema) as writer:
                    for table in datasets.utils.tqdm(self.tables(), desc="Reading", unit=" tables"):
                        writer.write_table(table)
                for file, state in zip(self.files, states, strict=True):
                    check_unchanged(file, state)
        loaded = Dataset.from_file(str(kept))
        loaded._fingerprint = key
        return loaded

    def options(self) -> list[Any]:
        """Return what the records depend on besides the files and their columns."""
        return []


class TableStream(RecordStream):
    """Records that are read as tables; as they lie, each is a table and the number of its row."""

    def raw(self) -> Iterator[tuple[pa.Table, int]]:
        return ((table, row) for table in self.tables() for row in range(table.num_rows))

    def parse(self, records: Sequence[tuple[pa.Table, int]]) -> pa.Table:
        return pa.concat_tables(table.slice(row, 1) for table, row in records).select(self.column_names)


class IterableRecords(TableStream):
    """The records of a streamed data set of `datasets`, without dealing any out to the workers of a DataLoader."""

    def __init__(self, dataset: IterableDataset) -> None:
        self.dataset = dataset._resolve_features()
        self.features = self.dataset.features

    def tables(self) -> Iterator[pa.Table]:
        return within_memory(self.dataset.with_format("arrow").iter(batch_size=256))


def as_stream(records: RecordStream | IterableDataset) -> RecordStream:
    return IterableRecords(records) if isinstance(records, IterableDataset) else records

"""The columns of documents that hold one value a token: read in place from Arrow tables, whatever their layout.

Tokenising checks with it, packing measures and cuts with it; it needs NumPy and Arrow only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from longctx.data.errors import DataError

INPUT_IDS = "input_ids"
TURN_ENDS = "turn_ends"
"""Column of where the turns of a chat end: it has a value for each turn, and not for each token."""

IGNORE_INDEX = -100
"""Label of a token that is no target of the loss."""


class Document(NamedTuple):
    """A document of a stream."""

    number: int
    """Its place in the stream, counted from 0."""
    columns: Mapping[str, Any]
    """[tokens] each."""
    source: int = 0
    """The number of its data set in a mixture."""
    is_new: bool = True
    """Whether the stream has not had it before, since it repeats data sets that end early."""
    records: int = 0
    """Records of its data set, if it is the last one there; else 0."""


SOURCE_COUNTS = ("documents", "tokens", "distinct", "there")
"""Counts of each data set of a streamed mixture, after its number: documents, their tokens, those that do not repeat
earlier ones, and the documents of the data set once its end is read, 0 before."""


def is_list_type(type_: pa.DataType) -> bool:
    return pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_)


def is_token_type(type_: pa.DataType) -> bool:
    """Return whether a column of this type can hold one number (or boolean) for every token."""
    if not is_list_type(type_):
        return False
    value = type_.value_type
    return pa.types.is_integer(value) or pa.types.is_floating(value) or pa.types.is_boolean(value)


class TokenColumn:
    """A list column of numbers as NumPy views of the Arrow buffers; nothing is copied before `read`."""

    def __init__(self, name: str, column: pa.ChunkedArray) -> None:
        chunks = [chunk for chunk in column.chunks if len(chunk)]
        values = [chunk.flatten() for chunk in chunks]
        self.name = name
        if column.null_count or any(some.null_count for some in values):
            self._refuse_nulls(column)
        self.value_type: pa.DataType = column.type.value_type
        self.dtype = np.dtype(self.value_type.to_pandas_dtype())
        self._first_rows = np.cumsum([0, *map(len, chunks)])
        self._offsets = [_list_offsets(chunk) for chunk in chunks]
        self._values = values if pa.types.is_boolean(self.value_type) else [some.to_numpy() for some in values]
        """Booleans are bits in Arrow, and so remain there."""

    def _refuse_nulls(self, column: pa.ChunkedArray) -> None:
        for document, row in enumerate(column):
            if not row.is_valid:
                raise DataError(
                    f"column {self.name!r}: {column.null_count} documents have null instead of a list, the first of "
                    f"them is document {document} (counted from 0); remove them"
                )
            if row.values.null_count:
                raise DataError(
                    f"column {self.name!r} has a null among the tokens of document {document} (counted from 0); "
                    "correct or remove it"
                )

    def __len__(self) -> int:
        return int(self._first_rows[-1])

    def lengths(self, rows: NDArray[np.integer] | None = None) -> NDArray[np.int64]:
        """Return the tokens of each row of the table, or of these rows, int64 [k]."""
        lengths = np.concatenate([np.zeros(0, np.int64), *map(np.diff, self._offsets)]).astype(np.int64, copy=False)
        return lengths if rows is None else lengths[rows]

    def rows(self) -> Iterator[NDArray[Any]]:
        """The values of every row of the table, [tokens] each, as views."""
        for offsets, values in zip(self._offsets, self._values, strict=True):
            chunk = np.asarray(values)
            for start, stop in pairwise(offsets.tolist()):
                yield chunk[start:stop]

    def count_others(
        self, value: int, rows: NDArray[np.integer], starts: NDArray[np.integer], stops: NDArray[np.integer]
    ) -> NDArray[np.int64]:
        """Return the number of values that differ from `value` in each piece, int64 [k].

        Args:
            rows: row of each piece in the table, [k].
            starts, stops: first value of each piece in its row and the end, [k]; a piece may be empty.
        """
        rows, counts = rows.astype(np.int64), np.zeros(len(rows), dtype=np.int64)
        order = np.argsort(rows, kind="stable")
        of_chunks = np.split(order, np.searchsorted(rows[order], self._first_rows[1:-1]))
        for pieces, first, offsets, values in zip(
            of_chunks, self._first_rows, self._offsets, self._values, strict=False
        ):
            before = np.concatenate(([0], np.cumsum(np.asarray(values) != value)))
            begins = offsets[rows[pieces] - first]
            counts[pieces] = before[begins + stops[pieces]] - before[begins + starts[pieces]]
        return counts

    def spans(self, rows: NDArray[np.integer]) -> tuple[list[int], NDArray[np.int64], NDArray[np.int64]]:
        """(chunk, start, length) of each row within the chunk's values, for rows [k]."""
        chunks = np.searchsorted(self._first_rows, rows, side="right") - 1
        of_rows = [self._offsets[chunk] for chunk in chunks.tolist()]
        places = (rows - self._first_rows[chunks]).tolist()
        starts = np.array([offsets[place] for offsets, place in zip(of_rows, places, strict=True)], np.int64)
        stops = np.array([offsets[place + 1] for offsets, place in zip(of_rows, places, strict=True)], np.int64)
        return chunks.tolist(), starts, stops - starts

    def read(self, rows: NDArray[np.integer], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[Any]:
        """Return pieces [k] of rows one after another, [sum of lengths].

        Args:
            starts, lengths: first value of each piece in its row, and its values, [k].
        """
        chunks, begins, _ = self.spans(rows)
        begins = begins + starts
        spans = zip(chunks, begins.tolist(), (begins + lengths).tolist(), strict=True)
        pieces = [self._values[chunk][start:stop] for chunk, start, stop in spans]
        return np.concatenate([np.zeros(0, self.dtype), *pieces])


def _list_offsets(chunk: pa.Array) -> NDArray[np.integer]:
    """Return where each list starts in `chunk.flatten()`, [rows + 1]."""
    if pa.types.is_fixed_size_list(chunk.type):
        return np.arange(len(chunk) + 1) * chunk.type.list_size
    offsets = chunk.offsets.to_numpy()
    return offsets - offsets[0] if offsets[0] else offsets  # those of a slice, of which `flatten` gives no more


def arrow_table(source: Any) -> tuple[pa.Table, NDArray[np.integer] | None]:
    """Return the Arrow table behind a datasets.Dataset or a table, and the rows it selects (None: all, in order)."""
    if isinstance(source, pa.Table):
        return source, None
    data = getattr(source, "data", None)
    if data is None or not isinstance(getattr(data, "table", None), pa.Table):
        raise DataError(
            f"expected a datasets.Dataset or a pyarrow.Table, got {type(source).__name__}; a streaming data "
            "set has no table, load it without streaming=True"
        )
    indices = source._indices
    if indices is None:
        return data.table, None
    return data.table, indices.column(0).to_numpy()


def token_columns(table: pa.Table, names: list[str] | None = None) -> dict[str, TokenColumn]:
    """Return every per-token column of a table, or those in `names`; the first is `input_ids` where there is one.

    Raises:
        DataError: no list column of numbers; a name that is not one; a table of packs; nulls.
    """
    if names is None:
        if "seq_lengths" in table.column_names:
            raise DataError(
                "the data set has a column 'seq_lengths', so it is packed already; use its sequences as they are, "
                "or remove the column to pack them as single documents"
            )
        names = [
            name for name in table.column_names if is_token_type(table.schema.field(name).type) and name != TURN_ENDS
        ]
    for name in names:
        if name not in table.column_names or not is_token_type(table.schema.field(name).type):
            raise DataError(
                f"column {name!r} is not a list of numbers per document; the columns are "
                + ", ".join(f"{field.name}: {field.type}" for field in table.schema)
            )
    if not names:
        raise DataError(
            "no column holds a list of numbers per document (such as input_ids); tokenise first. The "
            "columns are " + ", ".join(f"{field.name}: {field.type}" for field in table.schema)
        )
    names = sorted(names, key=lambda name: name != INPUT_IDS)
    return {name: TokenColumn(name, table.column(name)) for name in names}


def documents_of(table: pa.Table) -> Iterator[dict[str, NDArray[Any]]]:
    """The documents of a table, [tokens] of each column, as views; and `turn_ends` [turns] if they have them.

    Raises:
        DataError: as `token_columns`.
    """
    columns = token_columns(table)
    if TURN_ENDS in table.column_names:
        columns |= token_columns(table, [TURN_ENDS])
    rows = zip(*(column.rows() for column in columns.values()), strict=True)
    return (dict(zip(columns, values, strict=True)) for values in rows)


def document_lengths(source: Any, columns: list[str] | None = None) -> NDArray[np.int64]:
    """Return the tokens of each document, int64 [n_documents], read from the Arrow offsets alone.

    Args:
        source: the documents, a datasets.Dataset or pyarrow.Table; `input_ids` (or else its first list column
            of numbers) gives the lengths.
        columns: per-token columns that must agree; every list column of numbers when None.

    Raises:
        DataError: columns of different lengths, nulls, no per-token column, a table of packs.
    """
    table, rows = arrow_table(source)
    return agreed_lengths(token_columns(table, columns), rows)


def target_counts(source: Any) -> NDArray[np.int64]:
    """Return the tokens of each document that the loss counts, int64 [n_documents].

    These are the tokens with a label, but for the first one of each document, which is not a target.
    """
    table, rows = arrow_table(source)
    labels = token_columns(table, ["labels"])["labels"]
    rows = np.arange(len(labels)) if rows is None else rows
    return targets_of_pieces(labels, rows, np.zeros(len(rows), np.int64), labels.lengths(rows))


def targets_of_pieces(
    labels: TokenColumn, rows: NDArray[np.integer], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the number of targets in each piece of a document, int64 [n_pieces].

    A token with a label is a target unless it is the first token of its piece.

    Args:
        rows: row of each piece in the table, [n_pieces].
        starts, lengths: first token of each piece in its document, and its tokens, int64 [n_pieces].
    """
    return labels.count_others(IGNORE_INDEX, rows, starts + np.minimum(lengths, 1), starts + lengths)


def agreed_lengths(columns: dict[str, TokenColumn], rows: NDArray[np.integer] | None) -> NDArray[np.int64]:
    """Return the tokens of each selected document, int64 [n_documents], and check that every column agrees on them.

    Raises:
        DataError: a column of another length than the first, with its name and the document.
    """
    reference, *others = columns.values()
    lengths = reference.lengths(rows)
    for column in others:
        other = column.lengths(rows)
        if not np.array_equal(lengths, other):
            document = int(np.flatnonzero(lengths != other)[0])
            raise DataError(
                f"column {column.name!r} has {other[document]} values for document {document} (counted from 0), which "
                f"has {lengths[document]} {reference.name}; every per-token column needs one value per token. "
                "Correct or remove the column, or name the columns to keep with columns=[...]"
            )
    return lengths


def list_array(offsets: NDArray[np.integer], values: pa.Array) -> pa.ListArray:
    """Lists [len(offsets) - 1] over values, with 32-bit offsets: for batches, which are small."""
    return pa.ListArray.from_arrays(pa.array(offsets, type=pa.int32()), values)

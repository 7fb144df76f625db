"""Rows that a packing plan cuts from a data set of documents as they are needed."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from longctx.data.columns import (
    INPUT_IDS,
    TURN_ENDS,
    agreed_lengths,
    arrow_table,
    document_lengths,
    list_array,
    targets_of_pieces,
    token_columns,
)

from .overlong import plan_packing
from .plan import Packing

if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)

_TOKENS_PER_WRITE = 1 << 22


class PackedDataset:
    """A map-style data set of packs, in which row i is cut from the documents' Arrow buffers on access.

    Nothing is copied ahead: a memory-mapped datasets.Dataset stays on disk, and so does its selection or
    shuffle. Works as the data set of a torch DataLoader. What is sent to a worker is the source (a
    memory-mapped data set sends file names) and the plan.
    """

    def __init__(self, source: Any, packing: Packing, columns: list[str] | None = None) -> None:
        """
        Args:
            source: documents, a datasets.Dataset or pyarrow.Table with `input_ids`.
            packing: plan over these documents.
            columns: per-token columns of a row; every list column of numbers when None, other columns are
                ignored.

        Raises:
            ValueError: a per-token column with another length than `input_ids`; a plan for other documents.
        """
        self.packing = packing
        self._source = source
        self._column_names = columns
        self._open()
        _check_plan(packing, self._lengths())

    def _lengths(self) -> NDArray[np.int64]:
        """Return the tokens of each document that the plan is over, int64 [n_documents]."""
        return agreed_lengths(self._columns, self._rows)

    def _open(self) -> None:
        table, self._rows = arrow_table(self._source)
        self._columns = token_columns(table, self._column_names)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_rows", "_columns")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()

    @property
    def column_names(self) -> list[str]:
        """The keys of a row."""
        return [*self._columns, "seq_lengths", "position_ids"]

    def __len__(self) -> int:
        return len(self.packing)

    def __getitem__(self, index: int) -> dict[str, NDArray[Any]]:
        """Return pack `index`.

        Returns:
            `input_ids` int64 [S]; the other per-token columns [S] in their own dtype; `seq_lengths` int64
            [documents], the length of each in the row; `position_ids` int64 [S], from 0 in each document, so
            that the documents stay known where a trainer passes on only the model's own arguments.
        """
        offsets, index = self.packing.offsets, self._checked(index)
        rows, starts, lengths = self._pieces(slice(offsets[index], offsets[index + 1]))
        row = {name: column.read(rows, starts, lengths) for name, column in self._columns.items()}
        row[INPUT_IDS] = row[INPUT_IDS].astype(np.int64, copy=False)
        return row | {"seq_lengths": lengths, "position_ids": positions(lengths)}

    def __getitems__(self, indices: list[int]) -> list[dict[str, NDArray[Any]]]:
        """Return several packs. torch's DataLoader calls this."""
        return [self[index] for index in indices]

    def _checked(self, index: int) -> int:
        packs = len(self)
        if not -packs <= index < packs:
            raise IndexError(f"pack {index} of {packs}")
        return int(index) % packs

    def target_counts(self) -> NDArray[np.int64]:
        """Return the number of targets of each document in the packs, int64 [n_documents].

        A token with a label is a target unless it is the first token of its document or piece.
        """
        rows, starts, lengths = self._pieces(slice(None))
        counts = targets_of_pieces(self._columns["labels"], rows, starts, lengths)
        documents = np.repeat(self.packing.indices, len(counts) // max(len(self.packing.indices), 1))
        totals = np.zeros(len(self._lengths()), dtype=np.int64)
        np.add.at(totals, documents, counts)
        return totals

    def _pieces(self, pieces: slice) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return (rows of the table, first tokens, lengths) of pieces of the plan, int64 [pieces]."""
        rows: NDArray[Any] = self.packing.indices[pieces].astype(np.int64)
        if self._rows is not None:
            rows = self._rows[rows].astype(np.int64)
        if self.packing.starts is not None and self.packing.stops is not None:
            first = self.packing.starts[pieces]
            return rows, first, self.packing.stops[pieces] - first
        _, _, lengths = next(iter(self._columns.values())).spans(rows)
        return rows, np.zeros_like(lengths), lengths

    def arrow_rows(self, indices: list[int]) -> pa.Table:
        """Return several packs as an Arrow table in the columns' own types, with `seq_lengths`."""
        rows = self.__getitems__(indices)
        types = {name: column.value_type for name, column in self._columns.items()} | {"seq_lengths": pa.int64()}
        return pa.table(
            {
                name: list_array(
                    np.cumsum([0, *(len(row[name]) for row in rows)]),
                    pa.array(np.concatenate([row[name] for row in rows]) if rows else [], type=value_type),
                )
                for name, value_type in types.items()
            }
        )


def pack_dataset(
    dataset: Any,
    seq_length: int,
    strategy: str = "bfd",
    map_kwargs: dict[str, Any] | None = None,
    overlong: str = "raise",
) -> Any:
    """Write a packed copy of a data set; `trl.pack_dataset`'s signature and columns, packed globally.

    Differences from TRL: documents of the whole data set are packed together (not of each 1,000); a document
    longer than `seq_length` is an error unless `overlong` says what to do; columns that are not lists of
    numbers are left out instead of refused; "wrapped" gives `seq_lengths` too, so that documents stay apart.
    `PackedDataset` cuts the same rows without writing a copy.

        input_ids [1 2 3 4] [5 6] [7 8 9], seq_length 6
        ->  input_ids [1 2 3 4 5 6] [7 8 9], seq_lengths [4 2] [3]

    Args:
        dataset: datasets.Dataset or DatasetDict whose list columns of numbers hold one value a token.
        seq_length: most tokens in a pack.
        strategy: "bfd", "bfd_split" or "wrapped", as in `pack`.
        map_kwargs: passed to datasets' `map` (`num_proc`, `desc`, `keep_in_memory`, `cache_file_name`, ...).
        overlong: "raise", "truncate" (TRL's silent choice), "drop", "split", or "turns" for documents with the column
            `turn_ends`, as in `plan_packing`.

    Returns:
        The same kind of data set, one pack a row: the per-token columns in their own types, and
        `seq_lengths`.

    Raises:
        ValueError: a document is too long; columns of different lengths; a streaming data set.
    """
    import datasets

    if isinstance(dataset, datasets.DatasetDict):
        return datasets.DatasetDict(
            {name: pack_dataset(part, seq_length, strategy, map_kwargs, overlong) for name, part in dataset.items()}
        )
    if not isinstance(dataset, datasets.Dataset):
        raise ValueError(
            f"pack_dataset takes a datasets.Dataset or DatasetDict, got {type(dataset).__name__}; load it "
            "without streaming=True"
        )
    ends = dataset[TURN_ENDS] if overlong == "turns" else None
    packing, report = plan_packing(
        document_lengths(dataset), seq_length, strategy=strategy, overlong=overlong, turn_ends=ends
    )
    lossless = report.tokens_kept == report.tokens
    logger.log(logging.INFO if lossless else logging.WARNING, "%s", report)
    key = (dataset._fingerprint, seq_length, strategy, overlong)
    return _write_packs(dataset, PackedDataset(dataset, packing), key, map_kwargs or {})


def _write_packs(
    dataset: datasets.Dataset, packs: PackedDataset, key: tuple[Any, ...], map_kwargs: dict[str, Any]
) -> datasets.Dataset:
    """Cut every pack and write it through datasets' `map`, with its cache and worker processes."""
    import datasets

    from longctx.data.contents import cache_key

    fingerprint = cache_key("pack_dataset", *key)
    values = {name: dataset.features[name].feature for name in packs._columns}
    features = {name: datasets.List(value) for name, value in values.items()}
    features["seq_lengths"] = datasets.List(datasets.Value("int64"))
    arguments: dict[str, Any] = {
        "batched": True,
        "batch_size": max(1, _TOKENS_PER_WRITE // packs.packing.capacity),
        "remove_columns": ["pack"],
        "features": datasets.Features(features),
        "new_fingerprint": fingerprint,
        "desc": "Packing dataset",
    }
    if dataset.cache_files:
        folder = os.path.dirname(dataset.cache_files[0]["filename"])
        arguments["cache_file_name"] = os.path.join(folder, f"cache-{fingerprint}.arrow")
    numbers = datasets.Dataset.from_dict({"pack": np.arange(len(packs))}).with_format("numpy")
    packed = numbers.map(_cut_batch, fn_kwargs={"packs": packs}, **(arguments | map_kwargs))
    format_, kept = dataset.format, None
    if len(format_["columns"]) < len(dataset.column_names):  # the user chose some
        kept = [*(name for name in format_["columns"] if name in packs._columns), "seq_lengths"]
    return packed.with_format(format_["type"], columns=kept, **format_["format_kwargs"])


def _cut_batch(batch: dict[str, NDArray[np.int64]], packs: PackedDataset) -> pa.Table:
    return packs.arrow_rows(batch["pack"].tolist())


def _check_plan(packing: Packing, lengths: NDArray[np.int64]) -> None:
    """Raise ValueError unless the plan's pieces exist in documents [n] of these lengths and no pack is overfull."""
    if len(packing) == 0:
        return
    wrong = None
    if packing.indices.max() >= len(lengths):
        wrong = f"it names document {packing.indices.max()}, the data set has {len(lengths)}"
    elif packing.stops is not None and (packing.stops > lengths[packing.indices]).any():
        piece = int(np.flatnonzero(packing.stops > lengths[packing.indices])[0])
        document = int(packing.indices[piece])
        stop, length = packing.stops[piece], lengths[document]
        wrong = f"it cuts up to token {stop} of document {document}, which has {length}"
    elif packing.piece_lengths(lengths).min() < 1:
        wrong = "it places a document of 0 tokens"
    else:
        fills = packing.fills(lengths)
        if fills.max() > packing.capacity:
            wrong = f"its pack {fills.argmax()} would hold {fills.max()} tokens, the limit is {packing.capacity}"
    if wrong:
        raise ValueError(f"the plan is for other documents: {wrong}. Plan again with read_lengths(data set)")


def positions(seq_lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 0 .. length - 1 for each document, int64 [sum of seq_lengths]."""
    ends = np.cumsum(seq_lengths)
    return np.arange(ends[-1]) - np.repeat(ends - seq_lengths, seq_lengths)

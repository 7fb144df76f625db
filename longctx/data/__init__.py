"""Data sets on disk, on the hub or built in -> tokenised documents.

Two steps, both cached on disk by `datasets` so that a second run starts at once:

    load_records     name, file, folder or glob -> one row per record: text, messages, prompt+completion, ids
    tokenize_records records -> one row per document: input_ids, and labels where some tokens are no target

`stream_records` and `tokenize_stream` do the same while the documents are used, and keep nothing on disk.

A document is what packing places and attention isolates. Nothing is shortened, split or dropped here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from longctx.data.columns import IGNORE_INDEX, document_lengths, target_counts
from longctx.data.errors import DataError, with_place
from longctx.data.mixture import Mixture, name_data

if TYPE_CHECKING:
    from longctx.data.files import STDLIB, stdlib_files
    from longctx.data.mixing import MixedStream, SourceReport, mix, order_of_part
    from longctx.data.records import load_records, record_place, stream_records
    from longctx.data.stream import DocumentStream, tokenize_stream
    from longctx.data.tokenize import tokenize_records

__all__ = [
    "IGNORE_INDEX",
    "STDLIB",
    "DataError",
    "DocumentStream",
    "MixedStream",
    "Mixture",
    "SourceReport",
    "document_lengths",
    "load_records",
    "mix",
    "name_data",
    "order_of_part",
    "record_place",
    "stdlib_files",
    "stream_records",
    "target_counts",
    "tokenize_records",
    "tokenize_stream",
    "with_place",
]

# Packing reads columns and needs neither `datasets` nor `transformers`, which take seconds to import.
_LOADED_WHEN_USED = {
    "files": ("STDLIB", "stdlib_files"),
    "mixing": ("MixedStream", "SourceReport", "mix", "order_of_part"),
    "records": ("load_records", "record_place", "stream_records"),
    "stream": ("DocumentStream", "tokenize_stream"),
    "tokenize": ("tokenize_records",),
}


def __getattr__(name: str) -> Any:
    for module, names in _LOADED_WHEN_USED.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Records and tables of tests, in every format that is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset

from tests.jsonl import write_lines


def table_bytes(table: pa.Table, name: str, rows: int | None = 2, **options: Any) -> bytes:
    """Return a table in the format of a file's name: Parquet, or Arrow's of streams or (file.arrow) of files.

    Args:
        rows: of a row group or record batch; None for all.
        options: of the writer.
    """
    sink = pa.BufferOutputStream()
    if name.endswith(".parquet"):
        pq.write_table(table, sink, row_group_size=rows, **options)
    else:
        make = pa.ipc.new_file if name.endswith("file.arrow") else pa.ipc.new_stream
        with make(sink, table.schema, **options) as writer:
            writer.write_table(table, max_chunksize=rows)
    return sink.getvalue().to_pybytes()


def write_table(path: Path, table: pa.Table, rows: int | None = 2, **options: Any) -> str:
    """Write what `table_bytes` returns for the file's name; returns its path."""
    path.write_bytes(table_bytes(table, path.name, rows, **options))
    return str(path)


def write_records(path: Path, records: Sequence[dict[str, Any]]) -> str:
    """Write records in the format of the path's name, by Dataset.save_to_disk if it has no suffix; returns the path."""
    if path.suffix == ".txt":
        path.write_text("".join(record["text"] for record in records), encoding="utf-8")
        return str(path)
    if path.suffix in (".jsonl", ".json"):
        return write_lines(path, records)
    data = Dataset.from_list(records)
    if path.suffix:
        return write_table(path, data.data.table)
    data.save_to_disk(path)
    return str(path)

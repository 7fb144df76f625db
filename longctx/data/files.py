"""Files of one format -> records. Text and source files are one document each, also those of Python's own library."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, Features, Value
from datasets.table import table_cast

from longctx.data.contents import cache_key, content_digests
from longctx.data.errors import (
    GROUP_MEMORY_BYTES,
    RECORD_BYTES,
    DataError,
    bounded_by_files,
    name_files,
    no_records,
    too_large,
    too_long,
    unreadable,
    within_memory,
)
from longctx.data.json_records import JsonRecords
from longctx.data.reading import RecordStream, TableStream

STDLIB = "stdlib"
"""Value of `--dataset_name` that selects the running Python's own standard-library sources."""

_STDLIB_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"})


class TextFiles(RecordStream):
    """Text files as records, one per file, in the order given. As it lies, a record is the path of its file."""

    def __init__(self, files: Sequence[Path], text_field: str) -> None:
        self.files = list(files)
        self.features = Features({text_field: Value("string")})

    def raw(self) -> Iterator[Path]:
        return iter(self.files)

    def size(self, record: Path) -> int:
        return record.stat().st_size if record.exists() else 0

    def place(self, record: int) -> str:
        return str(self.files[record])

    def parse(self, records: Sequence[Path]) -> pa.Table:
        texts = [_read_text(path) for path in records]
        return pa.table(dict.fromkeys(self.features, texts), schema=self.features.arrow_schema)


def _read_text(path: Path) -> str:
    """Return the text of a file with its line ends, without a UTF-8 byte order mark."""
    try:
        with path.open("rb") as file:
            data = file.read(RECORD_BYTES + 1)
    except OSError as error:
        raise unreadable(path, error) from error
    if len(data) > RECORD_BYTES:
        raise too_long(str(path), "a text", RECORD_BYTES, "Divide it into several files, one document each.")
    remedy = "Give a glob that leaves it out (such as 'folder/**/*.py'), or convert it to UTF-8 text."
    if b"\x00" in data:
        raise DataError(f"{path}: NUL byte at offset {data.index(0)}; this is a binary file, expected text. {remedy}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}:{line}: not UTF-8 (byte 0x{data[error.start]:02x} at offset {error.start}). {remedy}"
        ) from None


def stdlib_files() -> list[Path]:
    """Python sources of the running interpreter's standard library, sorted by path.

    Without installed packages (site-packages, dist-packages) and the test, tests and idlelib trees.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in root.rglob("*.py") if not _STDLIB_LEFT_OUT & set(path.relative_to(root).parts)]
    if not files:
        raise DataError(
            f"'{STDLIB}': no .py files under {root}, where this Python keeps its standard library. "
            "Name another data set with --dataset_name."
        )
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


_JSON_SUFFIXES = (".jsonl", ".json")
DATA_SUFFIXES = (*_JSON_SUFFIXES, ".parquet", ".arrow")
"""Files of records; any other file is one text document."""

# Data and archives that would otherwise be taken for one text document, or refused as binary only.
_OTHER_SUFFIXES = re.compile(
    r"\.(ndjson|jsonlines|csv|tsv|xlsx|feather|orc|avro|h5|tfrecord|npy|npz|pkl|pt|bin|safetensors"
    r"|gz|bz2|xz|zst|zip|tar|tgz|7z)"
)

FORMATS_HELP = (
    "a hub name, a .jsonl/.json/.parquet/.arrow file or a folder of them, a folder or glob of text files, "
    f"a folder written by Dataset.save_to_disk, or '{STDLIB}'"
)


def read_files(files: Sequence[Path], text_field: str, columns: Sequence[str] | None = None) -> RecordStream:
    """Return the records of files, which must all have one format. Of JSON files, it reads only `columns` if given."""
    formats = {_format_of(file): file for file in reversed(files)}
    if len(formats) > 1:
        examples = ", ".join(f"{format_name} ({file})" for format_name, file in sorted(formats.items()))
        raise DataError(
            f"{len(files)} files of mixed formats: {examples}. Expected files of one format; "
            "give a glob that selects them, such as 'folder/**/*.py' or 'folder/*.jsonl'."
        )
    (format_name,) = formats
    if format_name == "json":
        return JsonRecords(files, text_field, columns)
    return TextFiles(files, text_field) if format_name == "text" else TableFiles(files)


def _format_of(file: Path) -> str:
    suffix = file.suffix.lower()
    if suffix in _JSON_SUFFIXES:
        return "json"
    if suffix in DATA_SUFFIXES:
        return suffix.removeprefix(".")
    if _OTHER_SUFFIXES.fullmatch(suffix):
        raise DataError(
            f"{file}: unknown format '{file.suffix}'. Expected {FORMATS_HELP}. Unpack or convert the file to "
            ".jsonl or .parquet."
        )
    return "text"


_ROWS_AT_A_TIME = 256
"""Records of Parquet that are unpacked at a time."""


class TableFiles(TableStream):
    """The records of Parquet or Arrow files, cast to the types of the first file that has any."""

    def __init__(self, files: Sequence[Path]) -> None:
        found: dict[Path, Features] = {}
        for file in files:
            with _damage_named(file):
                schema, batches = _open(file)
                if twice := [name for name, times in Counter(schema.names).items() if times > 1]:
                    raise ValueError(f"it has two columns with the name {twice[0]!r}")
                features = Features.from_arrow_schema(schema)
                if any(batch.num_rows for batch in batches):
                    found[file] = features
        if not found:
            raise no_records(name_files(files))
        self.files, self.features = list(found), next(iter(found.values()))
        self.schema = self.features.arrow_schema

    def tables(self) -> Iterator[pa.Table]:
        tables = ((file, table) for file in self.files for table in self._tables_of(file))
        return (table for _, table in bounded_by_files(tables, self.files))

    def _tables_of(self, file: Path) -> Iterator[pa.Table]:
        with _damage_named(file):
            for batch in _open(file)[1]:
                batch.validate(full=True)  # neither offsets nor text are checked by reading them
                try:
                    table = table_cast(pa.Table.from_batches([batch]), self.schema)
                except (pa.ArrowException, ValueError, TypeError) as error:
                    raise unlike_files(str(file), error) from error
                yield table.select(self.column_names)


class SavedTables(TableFiles):
    """The tables of `Dataset.save_to_disk`, which are mapped where they lie once they are known to be valid."""

    def load(self) -> Dataset:
        for _ in self.tables():
            pass
        dataset = datasets.concatenate_datasets([Dataset.from_file(str(file)) for file in self.files])
        dataset._fingerprint = cache_key("saved", [file.name for file in self.files], content_digests(self.files))
        return dataset


def unlike_files(where: str, cause: BaseException) -> DataError:
    """Return the error for a file whose contents do not fit the first file's columns."""
    return DataError(
        f"{where}: not readable as one data set ({cause}). Check that the files are whole and have the same columns "
        "and types."
    )


@contextmanager
def _damage_named(file: Path) -> Iterator[None]:
    """Name the file in whatever is raised about it, since damage shows as any error of the code that meets it."""
    try:
        yield
    except DataError:
        raise
    except MemoryError:
        raise too_large(str(file)) from None
    except Exception as error:
        raise DataError(
            f"{file}: not a readable {file.suffix.lower()[1:]} file ({error}). Write it again, with columns of text, "
            "numbers, and lists or objects of them, or correct its suffix."
        ) from None


def _open(file: Path) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Return the schema of a Parquet or Arrow file, and its records, which are unpacked only as they are asked for.

    An Arrow file may have the stream format or the file format. The stream format must have its end: without one, it
    was cut off between two batches.
    """
    if _format_of(file) == "parquet":
        parquet = pq.ParquetFile(file)
        metadata = parquet.metadata
        if any(metadata.row_group(i).total_byte_size > GROUP_MEMORY_BYTES for i in range(metadata.num_row_groups)):
            raise MemoryError
        return parquet.schema_arrow, within_memory(_all_rows(parquet))
    source = pa.memory_map(str(file))
    try:
        stream = pa.ipc.open_stream(source)
    except pa.ArrowInvalid:
        reader = pa.ipc.open_file(source)
        return reader.schema, within_memory(map(reader.get_batch, range(reader.num_record_batches)))
    _check_end_of_stream(pa.memory_map(str(file)))
    return stream.schema, within_memory(stream)


def _all_rows(parquet: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
    """Yield a file's rows, and check their number: a damaged page may give fewer, or more, without an error."""
    found, stated = 0, parquet.metadata.num_rows
    for batch in parquet.iter_batches(_ROWS_AT_A_TIME):
        found += batch.num_rows
        yield batch
    if found != stated:
        raise pa.ArrowInvalid(f"its pages hold {found} rows, and its footer states {stated}")


_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""That of Arrow 0.15 and later."""


def _check_end_of_stream(source: pa.NativeFile) -> None:
    """Refuse what a reader takes for a whole stream: one cut off between two batches, or with another one behind it."""
    for _ in pa.ipc.MessageReader.open_stream(source):  # unpacks nothing
        pass
    end, size = source.tell(), source.size()
    if end < size:
        raise pa.ArrowInvalid(f"{size - end} bytes follow the end of its stream, at byte {end}")
    source.seek(max(0, size - len(_END_OF_STREAM)))
    if source.read() != _END_OF_STREAM:
        raise pa.ArrowInvalid("its stream has no end: it was cut off, or is still being written")

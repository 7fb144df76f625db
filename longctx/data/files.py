"""Files of one format -> records, through the cache of `datasets`.

Text and source files are one document each; among them is the standard library of the running Python.
"""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, DatasetInfo, Features, IterableDataset, Value
from datasets.arrow_writer import ArrowWriter
from datasets.iterable_dataset import ArrowExamplesIterable
from datasets.table import table_cast

from longctx.data.contents import (
    FileState,
    cache_folder,
    cache_key,
    check_unchanged,
    content_digests,
    file_state,
)
from longctx.data.errors import (
    RECORD_BYTES,
    DataError,
    bounded_by_files,
    name_files,
    name_record,
    no_records,
    too_large,
    too_long,
    unreadable,
    within_memory,
)
from longctx.data.json_records import JsonRecords
from longctx.data.kinds import record_kind
from longctx.untrusted.files import written_whole

STDLIB = "stdlib"
"""Value of `--dataset_name` that selects the running Python's own standard-library sources."""

_STDLIB_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"})


class TextFiles:
    """Text files as records, one per file, in the order given."""

    def __init__(self, files: Sequence[Path], text_field: str) -> None:
        self.files = list(files)
        self.text_field = text_field
        self.features = Features({text_field: Value("string")})

    def places(self) -> Iterator[str]:
        """The file of each record."""
        return map(str, self.files)

    def __call__(self) -> Iterator[dict[str, str]]:
        for path in self.files:
            yield {self.text_field: _read_text(path)}


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


_CONTINUATION = b"\xff\xff\xff\xff"
_END_OF_STREAM = _CONTINUATION + b"\x00\x00\x00\x00"

_PART_BYTES = 1 << 30
"""Bytes of files that are read into the cache at a time, which an interruption loses."""
_RECORDS_AT_A_TIME = 256
"""Records of Parquet that are unpacked at a time."""


@dataclass(frozen=True)
class Loader:
    """Reads one split, and knows the place of each record."""

    load: Callable[[], Dataset]
    stream: Callable[[], IterableDataset]
    """Returns the same records, read on demand."""
    places: Callable[[], Iterator[str]]
    """File and line (or number) of every record, in order; for error messages."""


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


def files_loader(files: Sequence[Path], text_field: str, columns: Sequence[str] | None = None) -> Loader:
    """Return the loader of files, which must all have one format. Of JSON files, it reads only `columns` if given."""
    for file in files:
        if not file.is_file():  # a pipe or a device may have no end
            raise DataError(f"{file}: not a regular file. Expected {FORMATS_HELP}.")
    formats = {_format_of(file): file for file in reversed(files)}
    if len(formats) > 1:
        examples = ", ".join(f"{format_name} ({file})" for format_name, file in sorted(formats.items()))
        raise DataError(
            f"{len(files)} files of mixed formats: {examples}. Expected files of one format; "
            "give a glob that selects them, such as 'folder/**/*.py' or 'folder/*.jsonl'."
        )
    (format_name,) = formats
    if format_name == "json":
        return generated_loader(lambda: JsonRecords(files, text_field, columns))
    if format_name == "text":
        return generated_loader(lambda: TextFiles(files, text_field))
    return Loader(
        load=lambda: _load_arrow(files, format_name, text_field),
        stream=lambda: _stream_arrow(files, format_name, text_field),
        places=lambda: _arrow_places(files, format_name),
    )


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


def generated_loader(make: Callable[[], JsonRecords | TextFiles]) -> Loader:
    return Loader(
        load=lambda: _load_generated(make()),
        stream=lambda: _stream_generated(make()),
        places=lambda: make().places(),
    )


def _stream_generated(records: JsonRecords | TextFiles) -> IterableDataset:
    return IterableDataset.from_generator(records, features=records.features)


def _load_generated(records: JsonRecords | TextFiles) -> Dataset:
    """Write records to the cache of `datasets` once for the same contents of the files, and map them into memory.

    Some files after the others, so that a run that was interrupted finds those it had read.
    """
    states = [file_state(file) for file in records.files]
    digests = content_digests(records.files)
    fingerprint = _records_key(records, digests)
    bytes_before = np.cumsum([0, *(state.size for state in states[:-1])])
    starts = np.flatnonzero(np.diff(bytes_before // _PART_BYTES, prepend=-1)).tolist()
    if len(starts) == 1:
        return _generate(_Unchanged(records, states), fingerprint)
    parts = []
    for start, stop in zip(starts, [*starts[1:], len(states)], strict=True):
        part = copy(records)
        part.files = records.files[start:stop]
        if next(part.places(), None) is None:  # files of blank lines only
            continue
        parts.append(_generate(_Unchanged(part, states[start:stop]), _records_key(part, digests[start:stop])))
    whole = datasets.concatenate_datasets(parts)
    whole._fingerprint = fingerprint
    return whole


def _records_key(records: JsonRecords | TextFiles, digests: Sequence[str]) -> str:
    """Return the fingerprint of the records of files with these contents; where the files are does not matter.

    The features are those of the first file of all, which a part does not have.
    """
    selected = records.selected if isinstance(records, JsonRecords) else None
    chosen = [] if selected is None else [sorted(selected)]  # what is not selected is not checked either
    return cache_key(type(records).__name__, records.text_field, records.features.to_dict(), list(digests), *chosen)


class _Unchanged:
    """Records of files that are checked, once they have all been read, to be the files that were hashed."""

    def __init__(self, records: JsonRecords | TextFiles, states: Sequence[FileState]) -> None:
        self.records, self.states = records, list(states)

    def __call__(self) -> Iterator[dict[str, Any]]:
        """
        Raises:
            DataError: at the end, before anything is kept, for a file that was written to meanwhile.
        """
        yield from self.records()
        for file, state in zip(self.records.files, self.states, strict=True):
            check_unchanged(file, state)


def _generate(unchanged: _Unchanged, fingerprint: str) -> Dataset:
    records = unchanged.records
    try:
        return Dataset.from_generator(unchanged, features=records.features, fingerprint=fingerprint)
    except datasets.exceptions.DatasetGenerationError as error:
        cause = error.__cause__
        if isinstance(cause, DataError):
            raise cause from None
        if isinstance(cause, ValueError | RecursionError | pa.ArrowException):  # such as lists nested too deeply
            raise DataError(
                f"{name_files(records.files)}: a record cannot be stored ({cause}). Correct or remove it."
            ) from error
        raise


def _load_arrow(files: Sequence[Path], format_name: str, text_field: str) -> Dataset:
    """Write the records of Parquet or Arrow files to the cache once for the same contents, and map them into memory."""
    filled = _filled_files(files, format_name, text_field)
    states = [file_state(file) for file in filled]
    fingerprint = cache_key(format_name, content_digests(list(filled)))
    kept = cache_folder() / f"records-{fingerprint}.arrow"
    if not kept.exists():
        with written_whole(kept) as unfinished:
            with ArrowWriter(features=next(iter(filled.values())), path=str(unfinished)) as writer:
                for _, table in datasets.utils.tqdm(_tables(filled, format_name), desc="Reading", unit=" tables"):
                    writer.write_table(table)
                writer.finalize()
            for file, state in zip(filled, states, strict=True):
                check_unchanged(file, state)
    loaded = Dataset.from_file(str(kept))
    loaded._fingerprint = fingerprint
    return loaded


def _stream_arrow(files: Sequence[Path], format_name: str, text_field: str) -> IterableDataset:
    filled = _filled_files(files, format_name, text_field)
    tables = ArrowExamplesIterable(lambda: _tables(filled, format_name), {})
    return IterableDataset(tables, info=DatasetInfo(features=next(iter(filled.values()))))


def _tables(filled: Mapping[Path, Features], format_name: str) -> Iterator[tuple[str, pa.Table]]:
    """Yield the records of Parquet or Arrow files as small tables, each with a key, cast to the first file's types."""
    schema = next(iter(filled.values())).arrow_schema
    batches = ((file, batch) for file in filled for batch in _batches(file, format_name))
    for number, (file, batch) in enumerate(bounded_by_files(batches, list(filled))):
        try:
            table = table_cast(pa.Table.from_batches([batch]), schema)
        except (pa.ArrowException, ValueError, TypeError) as error:
            raise unlike_files(str(file), error) from error
        yield str(number), table


def _batches(file: Path, format_name: str) -> Iterator[pa.RecordBatch]:
    with _damage_named(file, format_name):
        for batch in _open(file, format_name)[2]:
            batch.validate(full=format_name == "arrow")  # reading an Arrow file does not check its offsets
            yield batch


def unlike_files(where: str, cause: BaseException) -> DataError:
    """Return the error for a file whose contents do not fit the first file's columns."""
    return DataError(
        f"{where}: not readable as one data set ({cause}). Check that the files are whole and have the same columns "
        "and types."
    )


def _filled_files(files: Sequence[Path], format_name: str, text_field: str) -> dict[Path, Features]:
    """Features of the parquet or Arrow files that have rows, after a look at every file's."""
    kinds: dict[str, Path] = {}
    filled = {}
    for file in files:
        with _damage_named(file, format_name):
            schema, counts, _ = _open(file, format_name)
            if twice := [name for name, times in Counter(schema.names).items() if times > 1]:
                raise ValueError(f"it has two columns with the name {twice[0]!r}")
            features = Features.from_arrow_schema(schema)
            is_filled = any(counts)
        kinds.setdefault(record_kind(schema.names, text_field, str(file)), file)
        if is_filled:
            filled[file] = features
    if len(kinds) > 1:
        listed = ", ".join(f"{kind!r} in {file}" for kind, file in kinds.items())
        raise DataError(f"mixed kinds of records: {listed}. Put each kind into a data set of its own.")
    if not filled:
        raise no_records(name_files(files))
    return filled


def _arrow_places(files: Sequence[Path], format_name: str) -> Iterator[str]:
    for file in files:
        with _damage_named(file, format_name):
            rows = (row for count in _open(file, format_name)[1] for row in range(count))
            yield from (f"{file}, {name_record(number)}" for number, _ in enumerate(rows))


@contextmanager
def _damage_named(file: Path, format_name: str) -> Iterator[None]:
    """Name the file in whatever is raised about it, since damage shows as any error of the code that meets it."""
    try:
        yield
    except DataError:
        raise
    except MemoryError:
        raise too_large(str(file)) from None
    except Exception as error:
        raise DataError(
            f"{file}: not a readable {format_name} file ({error}). Write it again, with columns of text, "
            "numbers, and lists or objects of them, or correct its suffix."
        ) from None


def _open(file: Path, format_name: str) -> tuple[pa.Schema, Iterable[int], Iterator[pa.RecordBatch]]:
    """Return the schema of a Parquet or Arrow file, the numbers of its records, and its records.

    An Arrow file may have the stream format or the file format. Records are counted and unpacked only as they are asked
    for.
    """
    if format_name == "parquet":
        parquet = pq.ParquetFile(file)
        batches = within_memory(parquet.iter_batches(_RECORDS_AT_A_TIME))
        return parquet.schema_arrow, [parquet.metadata.num_rows], batches
    source = pa.memory_map(str(file))
    try:
        stream = pa.ipc.open_stream(source)
    except pa.ArrowInvalid:
        reader = pa.ipc.open_file(source)
        schema, batches = reader.schema, within_memory(map(reader.get_batch, range(reader.num_record_batches)))
    else:
        schema, batches = stream.schema, within_memory(stream)
        _check_end_of_stream(pa.memory_map(str(file)))
    return schema, (batch.num_rows for batch in batches), batches


def _check_end_of_stream(source: pa.NativeFile) -> None:
    """Refuse what a reader takes for a whole stream: one cut off between two batches, or with another one behind it."""
    for _ in pa.ipc.MessageReader.open_stream(source):  # unpacks nothing
        pass
    end, size = source.tell(), source.size()
    if end < size:
        raise pa.ArrowInvalid(f"{size - end} bytes follow the end of its stream, at byte {end}")
    source.seek(0)
    if source.read(len(_CONTINUATION)) == _CONTINUATION:  # else a stream of before Arrow 0.15, whose end is four zeros
        source.seek(size - len(_END_OF_STREAM))
        if source.read() != _END_OF_STREAM:
            raise pa.ArrowInvalid("its stream has no end: it was cut off, or is still being written")

"""Data sets on disk, on the hub or built in -> tokenised documents.

Two steps, both cached on disk by `datasets` so that a second run starts at once:

    load_records     name, file, folder or glob -> one row per record: text, messages, prompt+completion, ids
    tokenize_records records -> one row per document: input_ids, and labels where some tokens are no target

A document is what packing places and attention isolates. Nothing is shortened, split or dropped here.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import transformers
from datasets import Dataset, DatasetDict, Features, Json, List, Value
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

logger = logging.get_logger(__name__)

STDLIB = "stdlib"
"""Value of `--dataset_name` that selects the running Python's own standard-library sources."""

IGNORE_INDEX = -100
"""Label of a token that is no target of the loss."""

_STDLIB_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"})
_JSON_SUFFIXES = (".jsonl", ".json")
_DATA_SUFFIXES = (*_JSON_SUFFIXES, ".parquet", ".arrow")
# Data and archives that would otherwise be taken for one text document, or refused as binary only.
_OTHER_SUFFIXES = re.compile(
    r"\.(ndjson|jsonlines|csv|tsv|xlsx|feather|orc|avro|h5|tfrecord|npy|npz|pkl|pt|bin|safetensors"
    r"|gz|bz2|xz|zst|zip|tar|tgz|7z)"
)
_COMPANION_FILES = frozenset({"readme.md", "license", "license.txt", "license.md", "dataset_infos.json"})
_FORMATS_HELP = (
    "a hub name, a .jsonl/.json/.parquet/.arrow file or a folder of them, a folder or glob of text files, "
    f"a folder written by Dataset.save_to_disk, or '{STDLIB}'"
)
_PER_TOKEN_COLUMNS = ("input_ids", "labels", "assistant_masks", "completion_mask")
_CONVERSATION_EXTRAS = ("tools", "chat_template_kwargs")
_TOKENS = List(Value("int32"))
_INT32_MAX = np.iinfo(np.int32).max
# Raised when the same records would now give other tokens or other rows: it is part of every cache key.
_CACHE_VERSION = 1
_BATCH_BYTES = 8 << 20
_TOKENIZER_CHARACTERS = 1 << 20


_SPLIT_PROMPT_WARNING = (
    "The tokens of a prompt are not the first tokens of prompt+completion; its completion starts where they "
    "differ, so training sees another context than inference. End prompts at a token boundary to avoid it."
)


class DataError(ValueError):
    """The data cannot be read or used; the message names the place, what was expected and the remedy."""


# ----------------------------------------------------------------------------------------------------
# Records: the kinds and what each must look like
# ----------------------------------------------------------------------------------------------------


def _record_kind(columns: Sequence[str], text_field: str) -> str | None:
    """Kind of the records with these columns, by TRL's precedence; None if it is none of the known kinds."""
    if "input_ids" in columns:
        return "input_ids"
    if "prompt" in columns and "completion" in columns:
        return "prompt+completion"
    if "messages" in columns:
        return "messages"
    if "conversations" in columns:
        return "conversations"
    return text_field if text_field in columns else None


def _kinds_help(text_field: str) -> str:
    chats = "'messages' (or 'conversations')"
    return f"'{text_field}', {chats}, 'prompt' and 'completion', or 'input_ids' (+ 'labels')"


def _require_kind(columns: Sequence[str], text_field: str, where: str) -> str:
    kind = _record_kind(columns, text_field)
    if kind is None:
        raise DataError(
            f"{where}: no known kind of record in the columns {sorted(columns)}; expected "
            f"{_kinds_help(text_field)}. Rename the column or pass its name with --dataset_text_field."
        )
    return kind


def _present(record: Mapping[str, Any]) -> list[str]:
    return [column for column, value in record.items() if value is not None]


def _kind_columns(kind: str) -> tuple[str, ...]:
    """Columns every record of a kind has."""
    return ("prompt", "completion") if kind == "prompt+completion" else (kind,)


def _is_messages(value: object) -> bool:
    """Whether a value is a chat: a list of messages with `role` (or, in the older form, `from`)."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(message, dict) and ("role" in message or "from" in message) for message in value)
    )


def _to_chatml(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rename `from`/`value` to `role`/`content`, as TRL's maybe_convert_to_chatml does."""
    names = {"from": "role", "value": "content"}
    return [{names.get(key, key): value for key, value in message.items()} for message in messages]


def _check_chat(value: object, column: str, where: str) -> None:
    if not _is_messages(value):
        shown = repr(value)
        raise DataError(
            f"{where}: '{column}' is {shown[:80]}{'…' if len(shown) > 80 else ''}; expected a non-empty "
            'list of messages such as {"role": "user", "content": "…"}. Correct or remove the record.'
        )


def _check_text(value: object, column: str, where: str) -> None:
    if not isinstance(value, str):
        raise DataError(
            f"{where}: '{column}' is {type(value).__name__} ({str(value)[:60]!r}); expected a string. "
            "Convert or remove the record."
        )


# ----------------------------------------------------------------------------------------------------
# JSON files
# ----------------------------------------------------------------------------------------------------


def _parse_json_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8 (byte 0x{line[error.start]:02x} at column {error.start + 1}). Save the file as UTF-8."
        ) from None
    except (json.JSONDecodeError, RecursionError) as error:
        shown = line[:60].decode("utf-8", "backslashreplace").rstrip()
        raise DataError(
            f"{where}: malformed JSON ({error}): {shown!r}. Expected one JSON object per line; correct or "
            "remove the line (no line is skipped silently)."
        ) from None
    if b"\\ud" in line.lower():
        _check_surrogates(record, where)
    return _require_object(record, where)


def _check_surrogates(record: object, where: str) -> None:
    """Refuse half a surrogate pair: json accepts it, and no tokenizer does."""
    try:
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: the escape \\u{ord(error.object[error.start]):04x} is half a surrogate pair, not a "
            "character. Write the text again as UTF-8."
        ) from None


def _require_object(record: object, where: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise DataError(
            f"{where}: a JSON {type(record).__name__}, not an object. Expected a record such as "
            '{"text": "…"}; correct or remove it.'
        )
    return record


def _iterate_json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`file:line`, record). Lines of white space only are passed over wherever they stand."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                where = f"{path}:{number}"
                yield where, _parse_json_line(line, where)


def _iterate_json_array(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`file, record n`, record) of a file that is one JSON array (this one form is read whole)."""
    try:
        records = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise DataError(
            f"{path}{line}: malformed JSON ({error}). Expected an array of objects, or one object per line."
        ) from None
    for number, record in enumerate(records):
        where = f"{path}, record {number}"
        yield where, _require_object(record, where)


def _iterate_json(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        start = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
    return _iterate_json_array(path) if start.startswith(b"[") else _iterate_json_lines(path)


class _JsonRecords:
    """The records of JSON files, all of the first one's kind, cut to that kind's columns."""

    def __init__(self, files: Sequence[Path], text_field: str) -> None:
        self.files = list(files)
        self.text_field = text_field
        first = next(self._iterate_raw(), None)
        if first is None:
            raise _no_records(self.files)
        self.first_where, record = first
        self.kind = _require_kind(_present(record), text_field, self.first_where)
        self.conversational = any(isinstance(record[column], list) for column in _kind_columns(self.kind))
        self.conversational = self.conversational and self.kind != "input_ids"
        self.columns = self._columns_of(record)

    def _columns_of(self, record: Mapping[str, Any]) -> tuple[str, ...]:
        if self.kind == "input_ids":
            return tuple(column for column in _PER_TOKEN_COLUMNS if record.get(column) is not None)
        return _kind_columns(self.kind) + (_CONVERSATION_EXTRAS if self.conversational else ())

    @property
    def features(self) -> Features:
        if self.kind == "input_ids":
            return Features(dict.fromkeys(self.columns, _TOKENS))
        return Features(dict.fromkeys(self.columns, Json() if self.conversational else Value("string")))

    def _iterate_raw(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for path in self.files:
            try:
                yield from _iterate_json(path)
            except OSError as error:
                raise _unreadable(path, error) from error

    def __call__(self) -> Iterator[dict[str, Any]]:
        for where, record in self._iterate_raw():
            self._check_kind(record, where)
            yield {column: self._value(record.get(column), column, where) for column in self.columns}

    def _check_kind(self, record: Mapping[str, Any], where: str) -> None:
        present = _present(record)
        kind = _record_kind(present, self.text_field)
        if kind is None:
            _require_kind(present, self.text_field, where)
        same_columns = self.kind != "input_ids" or self._columns_of(record) == self.columns
        if kind != self.kind or not same_columns:
            raise DataError(
                f"{where}: mixed kinds of records: this one has the columns {sorted(present)}, "
                f"but {self.first_where} is a {self.kind!r} record with {sorted(self.columns)}. "
                "Put each kind into a data set of its own."
            )

    def _value(self, value: Any, column: str, where: str) -> Any:
        if self.kind == "input_ids":
            return _token_array(value, column, where)
        if column in _CONVERSATION_EXTRAS:
            return value
        if self.conversational:
            _check_chat(value, column, where)
        else:
            _check_text(value, column, where)
        return value


def _token_array(value: object, column: str, where: str) -> np.ndarray:
    """A JSON list of integers as int32 [num_tokens]."""
    if value == []:
        return np.empty(0, np.int32)
    try:
        array = np.asarray(value if isinstance(value, list) else None)
    except ValueError:  # lists of several lengths inside
        array = np.asarray(None)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(
            f"{where}: '{column}' is {str(value)[:60]!r}; expected a flat list of integers. Correct the record."
        )
    if array.max() > _INT32_MAX or array.min() < -_INT32_MAX:
        worst = array.max() if array.max() > _INT32_MAX else array.min()
        raise DataError(
            f"{where}: '{column}' holds {worst}, which is beyond 32-bit token ids "
            f"(limit {_INT32_MAX}). Correct the record."
        )
    return array.astype(np.int32)


# ----------------------------------------------------------------------------------------------------
# Text files
# ----------------------------------------------------------------------------------------------------


class _TextFiles:
    """One record per file, in the order given."""

    def __init__(self, files: Sequence[Path], text_field: str) -> None:
        self.files = list(files)
        self.text_field = text_field
        self.features = Features({text_field: Value("string")})

    def __call__(self) -> Iterator[dict[str, str]]:
        for path in self.files:
            yield {self.text_field: _read_text(path)}


def _read_text(path: Path) -> str:
    """A text file as it is on disk (line ends kept); a UTF-8 byte order mark is taken off."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error
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


# ----------------------------------------------------------------------------------------------------
# From a name to records
# ----------------------------------------------------------------------------------------------------

_Loader = Callable[[], Dataset]


def load_records(
    dataset_name: str, *, config: str | None = None, split: str = "train", text_field: str = "text"
) -> Dataset:
    """Load one split of a data set as records.

    Args:
        dataset_name: a hub name; a `.jsonl`, `.json`, `.parquet` or `.arrow` file or a folder of them; a glob
            or folder of text files (one document per file, sorted by path, hidden files left out); a folder
            written by `Dataset.save_to_disk`; or `stdlib`.
        config: configuration of a hub data set.
        split: split name, optionally with a slice as `datasets` writes them (`train[:10%]`). Files and
            folders without split names are the split `train`.
        text_field: column of plain text; text files are put into this column.

    Returns:
        A memory-mapped Dataset with at least the columns of one kind of record. Blank lines of JSON-lines
        files are passed over wherever they stand; no other line is.

    Raises:
        DataError: not found, unknown format, unreadable or malformed (with file and line), empty, no known
            kind of record, several kinds in one data set, or no such split (with those there are).
    """
    splits = _local_splits(dataset_name, text_field)
    if splits is None:
        dataset = _load_from_hub(dataset_name, config, split)
    elif config is not None:
        raise DataError(
            f"--dataset_config {config!r}: only hub data sets have configurations and {dataset_name!r} is "
            "local. Leave it out, or name the files of that configuration."
        )
    else:
        dataset = _read_split(splits, split, dataset_name)
    if len(dataset) == 0:
        raise DataError(f"{dataset_name} (split {split!r}): empty data set, 0 records. Give at least one record.")
    _require_kind(dataset.column_names, text_field, dataset_name)
    return dataset


def _local_splits(name: str, text_field: str) -> dict[str, _Loader] | None:
    """Loader of each split of a local or built-in data set; None if the name is one for the hub."""
    if name == STDLIB:
        return {"train": lambda: _load_generated(_TextFiles(stdlib_files(), text_field))}
    path = Path(name).expanduser()
    if path.is_dir():
        return _folder_splits(path, text_field)
    if path.exists():
        return {"train": _files_loader([path], text_field)}
    if glob.has_magic(name):
        found = sorted(Path(match) for match in glob.glob(str(path), recursive=True) if os.path.isfile(match))
        if not found:
            raise DataError(f"{name}: no file matches this glob (from {Path.cwd()}). Check the pattern.")
        return {"train": _files_loader(found, text_field)}
    if _looks_like_a_path(name):
        raise DataError(f"{name}: no such file or folder (from {Path.cwd()}). Expected {_FORMATS_HELP}.")
    return None


def _looks_like_a_path(name: str) -> bool:
    """Hub names are `name` or `owner/name`, without a leading dot or separator and a data file's suffix."""
    return re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name) is None or name.endswith(_DATA_SUFFIXES)


def _folder_splits(path: Path, text_field: str) -> dict[str, _Loader]:
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        saved = _load_saved(path)
        parts = saved if isinstance(saved, DatasetDict) else {str(saved.split or "train"): saved}
        return {str(name): functools.partial(_identity, part) for name, part in parts.items()}
    files = _visible_files(path)
    if not files:
        raise DataError(f"{path}: the folder holds no files. Expected {_FORMATS_HELP}.")
    if not all(file.suffix.lower() in _DATA_SUFFIXES for file in files):
        return {"train": _files_loader(files, text_field)}
    return {name: _files_loader(part, text_field) for name, part in _split_files(path, files).items()}


def _identity(dataset: Dataset) -> Dataset:
    return dataset


def _load_saved(path: Path) -> Dataset | DatasetDict:
    try:
        return datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise DataError(
            f"{path}: not a readable folder of Dataset.save_to_disk ({error}). Save the data set again."
        ) from error


def _visible_files(folder: Path) -> list[Path]:
    """Files below a folder, sorted by path, without hidden ones, caches and the notes beside data files."""
    files = [
        file
        for file in folder.rglob("*")
        if file.is_file()
        and not any(part.startswith(".") or part == "__pycache__" for part in file.relative_to(folder).parts)
    ]
    data = [file for file in files if file.suffix.lower() in _DATA_SUFFIXES]
    if data and all(file in data or file.name.lower() in _COMPANION_FILES for file in files):
        files = [file for file in data if file.name.lower() not in _COMPANION_FILES]
    return sorted(files, key=lambda file: file.relative_to(folder).as_posix())


def _split_files(folder: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Divide data files by the split names in their paths, as `datasets` does (train, test, …)."""
    from datasets.data_files import DataFilesDict, get_data_patterns

    base = os.path.abspath(folder)
    found = DataFilesDict.from_patterns(get_data_patterns(base), base_path=base)
    splits = {str(name): _in_order(files, set(part)) for name, part in found.items()}
    left = sorted(set(files).difference(*splits.values()))
    if left:
        raise DataError(
            f"{folder}: some files carry split names ({', '.join(splits)}) and {len(left)} do not, such as "
            f"{left[0]}. Name a split in every file, or give a glob that selects the files."
        )
    return {name: part for name, part in splits.items() if part}


def _in_order(files: Sequence[Path], wanted: Set[str]) -> list[Path]:
    # Without resolving links: the files of a hub snapshot are links into another folder.
    return [file for file in files if os.path.abspath(file) in wanted]


def _files_loader(files: Sequence[Path], text_field: str) -> _Loader:
    """Loader of files that must all be of one format."""
    formats = {_format_of(file): file for file in reversed(files)}
    if len(formats) > 1:
        examples = ", ".join(f"{format_name} ({file})" for format_name, file in sorted(formats.items()))
        raise DataError(
            f"{len(files)} files of mixed formats: {examples}. Expected files of one format; "
            "give a glob that selects them, such as 'folder/**/*.py' or 'folder/*.jsonl'."
        )
    (format_name,) = formats
    if format_name == "json":
        return lambda: _load_generated(_JsonRecords(files, text_field))
    if format_name == "text":
        return lambda: _load_generated(_TextFiles(files, text_field))
    return lambda: _load_arrow(files, format_name, text_field)


def _format_of(file: Path) -> str:
    suffix = file.suffix.lower()
    if suffix in _JSON_SUFFIXES:
        return "json"
    if suffix in _DATA_SUFFIXES:
        return suffix.removeprefix(".")
    if _OTHER_SUFFIXES.fullmatch(suffix):
        raise DataError(
            f"{file}: unknown format '{file.suffix}'. Expected {_FORMATS_HELP}. Unpack or convert the file to "
            ".jsonl or .parquet."
        )
    return "text"


def _load_generated(records: _JsonRecords | _TextFiles) -> Dataset:
    """Write records to the cache of `datasets` once per state of the files, and map them into memory."""
    stats = [(str(file.resolve()), *_size_and_time(file)) for file in records.files]
    key = [_CACHE_VERSION, type(records).__name__, records.text_field, stats]
    fingerprint = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    try:
        return Dataset.from_generator(records, features=records.features, fingerprint=fingerprint)
    except datasets.exceptions.DatasetGenerationError as error:
        if isinstance(error.__cause__, DataError):
            raise error.__cause__ from None
        raise


def _size_and_time(file: Path) -> tuple[int, int]:
    try:
        stat = file.stat()
    except OSError as error:
        raise _unreadable(file, error) from error
    return stat.st_size, stat.st_mtime_ns


def _load_arrow(files: Sequence[Path], format_name: str, text_field: str) -> Dataset:
    """Load parquet or Arrow files after a look at every file's schema. Files without rows are left out."""
    kinds: dict[str, Path] = {}
    filled = []
    for file in files:
        schema, has_rows = _inspect(file, format_name)
        kinds.setdefault(_require_kind(schema.names, text_field, str(file)), file)
        filled += [str(file)] if has_rows else []
    if len(kinds) > 1:
        listed = ", ".join(f"{kind!r} in {file}" for kind, file in kinds.items())
        raise DataError(f"mixed kinds of records: {listed}. Put each kind into a data set of its own.")
    if not filled:
        raise _no_records(files)
    try:
        return datasets.load_dataset(format_name, data_files=filled, split="train")
    except (datasets.exceptions.DatasetGenerationError, pa.ArrowException, ValueError) as error:
        cause = error.__cause__ or error
        raise DataError(
            f"{_name_files(files)}: not readable as one {format_name} data set ({cause}). "
            "Check that the files are whole and have the same columns and types."
        ) from error


def _inspect(file: Path, format_name: str) -> tuple[pa.Schema, bool]:
    """Schema of a parquet or Arrow file, and whether it has rows."""
    try:
        if format_name == "parquet":
            metadata = pq.read_metadata(file)
            return metadata.schema.to_arrow_schema(), metadata.num_rows > 0
        with pa.memory_map(str(file)) as source:
            return _inspect_arrow(source)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{file}: not a readable {format_name} file ({error}). Write it anew, or correct its suffix."
        ) from None


def _inspect_arrow(source: pa.NativeFile) -> tuple[pa.Schema, bool]:
    """The same for an open Arrow file, which may be of the stream or the file format."""
    try:
        stream = pa.ipc.open_stream(source)
        return stream.schema, any(batch.num_rows for batch in stream)
    except pa.ArrowInvalid:
        reader = pa.ipc.open_file(source)
        return reader.schema, any(reader.get_batch(i).num_rows for i in range(reader.num_record_batches))


def _no_records(files: Sequence[Path]) -> DataError:
    return DataError(f"{_name_files(files)}: empty data set, 0 records. Give at least one record.")


def _load_from_hub(name: str, config: str | None, split: str) -> Dataset:
    try:
        dataset = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"--dataset_name {name!r}, split {split!r}: {error}. No such file or folder here either (from "
            f"{Path.cwd()}). Expected {_FORMATS_HELP}; without a connection, give a local one."
        ) from error
    assert isinstance(dataset, Dataset), f"load_dataset(split={split!r}) gave {type(dataset).__name__}"
    return dataset


def _read_split(splits: Mapping[str, _Loader], split: str, name: str) -> Dataset:
    """Load the splits that a split expression names and cut the slices it asks for."""
    wanted = [re.split(r"[\[(]", part, maxsplit=1)[0].strip() for part in split.split("+")]
    unknown = [part for part in wanted if part not in splits]
    if unknown:
        raise DataError(
            f"{name}: no split {unknown[0]!r}; available: {', '.join(sorted(splits))}. "
            "Choose one with --dataset_train_split."
        )
    loaded = {part: splits[part]() for part in dict.fromkeys(wanted)}
    if split in loaded:
        return loaded[split]
    try:
        instruction = datasets.ReadInstruction.from_spec(split)
        spans = instruction.to_absolute({part: len(dataset) for part, dataset in loaded.items()})
    except (AssertionError, ValueError) as error:
        raise DataError(f"{name}: split {split!r} is not understood ({error}). Example: 'train[:10%]'.") from None
    parts = [loaded[span.splitname].select(range(span.from_ or 0, _end(span, loaded))) for span in spans]
    return datasets.concatenate_datasets(parts)


def _end(span: Any, loaded: Mapping[str, Dataset]) -> int:
    return len(loaded[span.splitname]) if span.to is None else span.to


def _unreadable(file: Path, error: OSError) -> DataError:
    return DataError(f"{file}: unreadable ({error.strerror}). Check the file and its permissions.")


def _name_files(files: Sequence[Path]) -> str:
    return str(files[0]) if len(files) == 1 else f"{files[0]} … {files[-1]} ({len(files)} files)"


# ----------------------------------------------------------------------------------------------------
# Tokenising
# ----------------------------------------------------------------------------------------------------


def tokenize_records(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    text_field: str = "text",
    completion_only_loss: bool | None = None,
    assistant_only_loss: bool = False,
    chat_template: str | None = None,
    num_proc: int | None = None,
    vocab_size: int | None = None,
) -> Dataset:
    """Turn records into documents, with the tokens and masks TRL's SFTTrainer gives them.

    Text and completions end with the EOS token; chats go through the chat template; a completion starts where
    the tokens of the prompt and of prompt+completion part; pre-tokenised records are checked and passed on.
    Nothing is truncated. The result is cached under the data set's fingerprint, the tokenizer and these
    options.

    Args:
        dataset: records as from `load_records`.
        tokenizer: needs an EOS token for text and completions, a chat template for chats.
        text_field: column of plain text.
        completion_only_loss: mask the prompt; None means True for prompt+completion records.
        assistant_only_loss: mask all but the assistant's turns; a known template without generation markers
            is replaced by TRL's training version of it.
        chat_template: used instead of the tokenizer's own.
        num_proc: processes; None works in this one.
        vocab_size: number of embeddings of the model, which token ids must be below; None checks only for
            negative ids.

    Returns:
        Dataset with `input_ids` (list of int32) and, where some tokens are masked or labels were given,
        `labels` (list of int32, -100 where masked, not shifted).

    Raises:
        DataError: a record is not of the data set's kind; lengths of labels and input_ids differ; ids lie
            outside the vocabulary; an option does not apply to this kind of record; or no token is a target
            of the loss.
    """
    if not isinstance(dataset, Dataset):
        raise DataError(f"{type(dataset).__name__} is not supported; expected a datasets.Dataset (map-style).")
    if dataset.format["type"] == "custom":
        raise DataError(
            "the data set has a transform (Dataset.with_transform), which caching would bake in. "
            "Apply it with Dataset.map first."
        )
    if len(dataset) == 0:
        raise DataError("empty data set: 0 records. Give at least one record.")
    kind = _require_kind(dataset.column_names, text_field, "data set")
    columns = [column for column in _used_columns(kind) if column in dataset.column_names]
    _check_column_types(dataset.features, kind)
    dataset = dataset.with_format(None).select_columns(columns)
    conversational = kind != "input_ids" and _holds_chats(dataset, columns[0])
    encoder: _Encoder
    if kind == "input_ids":
        encoder = _PretokenizedEncoder(columns, completion_only_loss, assistant_only_loss)
    else:
        _check_options(kind, conversational, completion_only_loss, assistant_only_loss)
        masks_prompt = kind == "prompt+completion" and completion_only_loss is not False
        if conversational:
            template = _training_template(tokenizer, chat_template, assistant_only_loss)
            encoder = _ChatEncoder(tokenizer, kind, template, assistant_only_loss, masks_prompt)
        else:
            encoder = _TextEncoder(tokenizer, kind, masks_prompt)
    encoder.vocab_size = vocab_size
    tokenized = _map(dataset, encoder, tokenizer, num_proc)
    _check_targets(tokenized)
    return tokenized


def _holds_chats(dataset: Dataset, column: str) -> bool:
    feature = dataset.features[column]
    return isinstance(dataset[0][column], list) if isinstance(feature, Json) else not isinstance(feature, Value)


def _used_columns(kind: str) -> tuple[str, ...]:
    return _PER_TOKEN_COLUMNS if kind == "input_ids" else _kind_columns(kind) + _CONVERSATION_EXTRAS


def _check_column_types(features: Features, kind: str) -> None:
    """Refuse columns whose Arrow type no record of this kind has, such as numbers where text is expected."""
    for column in _kind_columns(kind):
        feature = features[column]
        arrow_type = Features({"x": feature}).arrow_schema.field("x").type
        is_list = isinstance(feature, (List, list, datasets.LargeList)) or pa.types.is_list(arrow_type)
        is_text = pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type)
        expected = {
            "input_ids": "lists of integers",
            "messages": "lists of messages",
            "conversations": "lists of messages",
        }
        fits = is_list or isinstance(feature, Json)
        if kind == "input_ids":
            value_type = arrow_type.value_type if is_list else None
            fits = value_type is not None and pa.types.is_integer(value_type)
        elif kind not in expected:
            fits = fits or is_text
        if not fits:
            raise DataError(
                f"column '{column}' has the type {arrow_type}; expected {expected.get(kind, 'strings')}. "
                "Convert the column (Dataset.cast_column), or name another one with --dataset_text_field."
            )


def _check_options(kind: str, conversational: bool, completion_only: bool | None, assistant_only: bool) -> None:
    if assistant_only and not conversational:
        raise DataError(
            f"assistant_only_loss=True needs conversations, and the records are {kind!r} with plain text. "
            "Leave it out, or give records with 'messages'."
        )
    if completion_only and kind != "prompt+completion":
        raise DataError(
            f"completion_only_loss=True needs records with 'prompt' and 'completion', and these are "
            f"{kind!r}. Leave it out" + (", or use --assistant_only_loss." if conversational else ".")
        )


def _training_template(
    tokenizer: PreTrainedTokenizerBase, chat_template: str | None, assistant_only: bool
) -> str | None:
    """Template to render with, None for the tokenizer's own; with generation markers where needed."""
    template = chat_template or tokenizer.chat_template
    if not template:
        raise DataError(
            "the tokenizer has no chat template, and the records are conversations. Use a chat model's "
            "tokenizer, or pass a template with --chat_template_path."
        )
    text = template.get("default", "") if isinstance(template, dict) else template
    if not assistant_only:
        return chat_template
    if re.search(r"\{%-?\s*generation\s*-?%\}", text) is None:
        chat_template = _known_training_template(tokenizer, chat_template)
    _warn_if_stop_token_is_masked(tokenizer, chat_template)
    return chat_template


def _known_training_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> str:
    """TRL's version, with generation markers, of a template that has none."""
    from trl.chat_template_utils import get_training_chat_template

    given = tokenizer.chat_template
    try:
        tokenizer.chat_template = chat_template or given
        training_template = get_training_chat_template(tokenizer)
        assert training_template is not None, "a template without markers needs patching"
        return training_template
    except ValueError:
        pass
    finally:
        tokenizer.chat_template = given
    raise DataError(
        "assistant_only_loss=True needs a chat template with {% generation %} markers; this one has none "
        "and TRL "
        "knows no training version of it. Put the assistant's turn (with its end-of-turn token) between "
        "{% generation %} and {% endgeneration %} and pass the template with --chat_template_path."
    )


def _warn_if_stop_token_is_masked(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> None:
    from trl.chat_template_utils import is_chat_template_stop_token_trained

    if not is_chat_template_stop_token_trained(tokenizer, chat_template=chat_template):
        logger.warning(
            "The chat template leaves the assistant's end-of-turn token out of the loss: the model may not "
            "learn to stop. Move the token into {% generation %} … {% endgeneration %}, or use every token."
        )


class _Encoder:
    """Batch of records -> Arrow table of documents. Called by `Dataset.map` with the records' numbers."""

    masked: bool
    """Whether the documents have labels."""
    vocab_size: int | None = None

    def options(self) -> dict[str, Any]:
        """What the result depends on, besides the records and the tokenizer."""
        plain = (str, int, bool, type(None), list)
        return {name: value for name, value in vars(self).items() if isinstance(value, plain)}

    def encode(self, batch: dict[str, list[Any]], indices: Sequence[int]) -> tuple[list, list | None]:
        """Token ids and, if `masked`, labels of each record."""
        raise NotImplementedError

    def __call__(self, batch: dict[str, list[Any]], indices: Sequence[int]) -> pa.Table:
        input_ids, labels = self.encode(batch, indices)
        for ids, index in zip(input_ids, indices, strict=True):
            if len(ids) == 0:
                raise DataError(f"{_record(index)}: 'input_ids' is empty, 0 tokens. Remove the record.")
            _check_ids(ids, self.vocab_size, "input_ids", index)
        columns = {"input_ids": _list_array(input_ids)}
        if labels is not None:
            for ids, index in zip(labels, indices, strict=True):
                _check_ids(ids[ids != IGNORE_INDEX], self.vocab_size, "labels", index)
            columns["labels"] = _list_array(labels)
        return pa.table(columns)


class _TextEncoder(_Encoder):
    """Plain text, or prompt and completion as plain text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kind: str, masks_prompt: bool) -> None:
        if tokenizer.eos_token is None:
            raise DataError("the tokenizer has no EOS token, which ends every document. Set tokenizer.eos_token.")
        self.tokenizer = tokenizer
        self.kind = kind
        self.masked = masks_prompt

    def encode(self, batch: dict[str, list[Any]], indices: Sequence[int]) -> tuple[list, list | None]:
        for column in _kind_columns(self.kind):
            for value, index in zip(batch[column], indices, strict=True):
                _check_text(value, column, _record(index))
        if self.kind != "prompt+completion":
            return self._tokenize([self._end(text) for text in batch[self.kind]]), None
        pairs = list(zip(batch["prompt"], batch["completion"], strict=True))
        input_ids = self._tokenize([prompt + self._end(completion) for prompt, completion in pairs])
        if not self.masked:
            return input_ids, None
        prompts = self._tokenize([prompt for prompt, _ in pairs])
        return input_ids, [_mask_prompt(ids, prompt) for ids, prompt in zip(input_ids, prompts, strict=True)]

    def _end(self, text: str) -> str:
        eos_token = str(self.tokenizer.eos_token)
        return text if text.endswith(eos_token) else text + eos_token

    def _tokenize(self, texts: list[str]) -> list[np.ndarray]:
        """Tokenise a million characters at a time: the tokenizer needs over 100 bytes per token meanwhile."""
        input_ids: list[np.ndarray] = []
        for part in _by_characters(texts, _TOKENIZER_CHARACTERS):
            encoded = self.tokenizer(part, verbose=False, return_attention_mask=False, return_token_type_ids=False)
            input_ids.extend(np.asarray(ids, dtype=np.int64) for ids in encoded["input_ids"])
        return input_ids


class _ChatEncoder(_Encoder):
    """Conversations: messages, or prompt and completion as messages."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        kind: str,
        chat_template: str | None,
        assistant_only: bool,
        masks_prompt: bool,
    ) -> None:
        self.tokenizer = tokenizer
        self.kind = kind
        self.chat_template = chat_template
        self.assistant_only = assistant_only
        self.masks_prompt = masks_prompt
        self.masked = assistant_only or masks_prompt

    def encode(self, batch: dict[str, list[Any]], indices: Sequence[int]) -> tuple[list, list | None]:
        input_ids, labels = [], []
        for row, index in enumerate(indices):
            ids, label = self._encode_one({column: values[row] for column, values in batch.items()}, index)
            input_ids.append(ids)
            labels.append(label)
        return input_ids, labels if self.masked else None

    def _encode_one(self, record: dict[str, Any], index: int) -> tuple[np.ndarray, np.ndarray]:
        chats = []
        for column in _kind_columns(self.kind):
            _check_chat(record[column], column, _record(index))
            chats.append(_to_chatml(record[column]))
        options = self._template_options(record)
        out = self._apply([message for chat in chats for message in chat], index, options, self.assistant_only)
        ids = np.asarray(out["input_ids"], dtype=np.int64)
        labels = ids
        if self.masks_prompt:
            prompt = self._apply(chats[0], index, {**options, "add_generation_prompt": True}, False)
            labels = _mask_prompt(ids, np.asarray(prompt["input_ids"], dtype=np.int64))
        if self.assistant_only:
            mask = np.asarray(out["assistant_masks"], dtype=bool)
            if not mask.any():
                raise DataError(
                    f"{_record(index)}: assistant_only_loss=True, but none of its {len(ids)} tokens are the "
                    "assistant's. Remove the record, or check the {% generation %} markers of the template."
                )
            labels = np.where(mask, labels, IGNORE_INDEX)
        return ids, labels

    def _template_options(self, record: dict[str, Any]) -> dict[str, Any]:
        tools = record.get("tools")
        tools = json.loads(tools) if isinstance(tools, str) else tools
        return {
            "chat_template": self.chat_template,
            "tools": tools,
            **(record.get("chat_template_kwargs") or {}),
        }

    def _apply(self, chat: list, index: int, options: dict[str, Any], assistant_mask: bool) -> Mapping[str, Any]:
        from jinja2 import TemplateError

        try:
            out = self.tokenizer.apply_chat_template(
                chat,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=assistant_mask,
                tokenizer_kwargs={"verbose": False},
                **options,
            )
        except (TemplateError, TypeError) as error:
            raise DataError(
                f"{_record(index)}: the chat template refuses its messages ({error}). Correct or remove it."
            ) from error
        assert isinstance(out, Mapping), f"apply_chat_template(return_dict=True) gave {type(out).__name__}"
        return out


class _PretokenizedEncoder(_Encoder):
    """Token ids that come ready made, with labels or masks of the same length."""

    def __init__(self, columns: list[str], completion_only: bool | None, assistant_only: bool) -> None:
        self.masks: list[str] = [] if "labels" in columns else self._masks(columns, completion_only, assistant_only)
        self.given_labels = "labels" in columns
        self.masked = self.given_labels or bool(self.masks)

    @staticmethod
    def _masks(columns: list[str], completion_only: bool | None, assistant_only: bool) -> list[str]:
        if assistant_only and "assistant_masks" not in columns:
            raise DataError(
                "assistant_only_loss=True needs conversations, and the records are 'input_ids' without "
                "'assistant_masks'. Give labels with -100 at masked tokens instead."
            )
        if completion_only and "completion_mask" not in columns:
            raise DataError(
                "completion_only_loss=True needs 'prompt' and 'completion', and the records are 'input_ids' "
                "without 'completion_mask'. Give labels with -100 at masked tokens instead."
            )
        if completion_only is None and "completion_mask" in columns:
            raise DataError(
                "the records are 'input_ids' with a 'completion_mask' and no 'labels': set "
                "--completion_only_loss to true to train on the completions, or to false to train on every token."
            )
        masks = ["assistant_masks"] if "assistant_masks" in columns else []
        return masks + (["completion_mask"] if completion_only else [])

    def encode(self, batch: Any, indices: Sequence[int]) -> tuple[list, list | None]:
        columns = {name: _rows(batch[name], name, indices) for name in batch.column_names}
        input_ids, labels = [], []
        for row, index in enumerate(indices):
            values = {name: rows[row] for name, rows in columns.items()}
            ids = values["input_ids"]
            for column in (*self.masks, *(["labels"] if self.given_labels else [])):
                self._check_length(len(values[column]), len(ids), column, index)
            input_ids.append(ids)
            labels.append(values["labels"] if self.given_labels else self._apply_masks(values))
        return input_ids, labels if self.masked else None

    @staticmethod
    def _check_length(length: int, expected: int, column: str, index: int) -> None:
        if length != expected:
            raise DataError(
                f"{_record(index)}: '{column}' has {length} entries and 'input_ids' has {expected}. "
                "Give one entry per token (labels are not shifted; -100 masks a token)."
            )

    def _apply_masks(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        keep = np.ones(len(values["input_ids"]), dtype=bool)
        for column in self.masks:
            keep &= values[column] != 0
        return np.where(keep, values["input_ids"], IGNORE_INDEX)


def _rows(column: pa.ChunkedArray, name: str, indices: Sequence[int]) -> list[np.ndarray]:
    """Rows of a list column of integers or booleans as int64 views into one array."""
    lists = _one_chunk(column)
    if lists.null_count or lists.flatten().null_count:
        row = next(row for row, value in enumerate(lists.to_pylist()) if value is None or None in value)
        raise DataError(f"{_record(indices[row])}: '{name}' is null or holds a null. Correct or remove the record.")
    values = lists.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
    ends = np.cumsum(pc.list_value_length(lists).to_numpy())
    return np.split(values, ends[:-1])


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array, whether or not combine_chunks already gives one."""
    combined = column.combine_chunks()
    return combined.chunk(0) if isinstance(combined, pa.ChunkedArray) else combined


def _record(index: int) -> str:
    return f"record {index} (counted from 0)"


def _mask_prompt(ids: np.ndarray, prompt: np.ndarray) -> np.ndarray:
    """Labels of prompt+completion: -100 over the common prefix of its tokens and the prompt's."""
    shared = min(len(ids), len(prompt))
    differs = np.flatnonzero(ids[:shared] != prompt[:shared])
    prompt_length = int(differs[0]) if len(differs) else shared
    if prompt_length < len(prompt):
        logger.warning_once(_SPLIT_PROMPT_WARNING)
    labels = ids.copy()
    labels[:prompt_length] = IGNORE_INDEX
    return labels


def _by_characters(texts: list[str], limit: int) -> Iterator[list[str]]:
    """Cut a list into runs of at most `limit` characters (or one text)."""
    part: list[str] = []
    size = 0
    for text in texts:
        if part and size + len(text) > limit:
            yield part
            part, size = [], 0
        part.append(text)
        size += len(text)
    if part:
        yield part


def _list_array(rows: Sequence[np.ndarray]) -> pa.ListArray:
    """Rows of integers as an Arrow list<int32> array [num_rows]."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    values = np.concatenate(rows).astype(np.int32) if len(rows) else np.empty(0, np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def _check_ids(ids: np.ndarray, vocab_size: int | None, column: str, index: int) -> None:
    if len(ids) == 0:
        return
    limit = _INT32_MAX if vocab_size is None else vocab_size
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= limit:
        raise DataError(
            f"{_record(index)}: '{column}' holds the token id {low if low < 0 else high}, and the "
            f"vocabulary has the ids 0 to {limit - 1}. Tokenise with this model's tokenizer"
            + (", and mask labels with -100." if column == "labels" else ".")
        )


def _map(dataset: Dataset, encoder: _Encoder, tokenizer: PreTrainedTokenizerBase, num_proc: int | None) -> Dataset:
    columns = ["input_ids", "labels"] if encoder.masked else ["input_ids"]
    if isinstance(encoder, _PretokenizedEncoder):
        dataset = dataset.with_format("arrow")
    try:
        tokenized = dataset.map(
            encoder,
            batched=True,
            with_indices=True,
            batch_size=_batch_size(dataset),
            remove_columns=dataset.column_names,
            features=Features(dict.fromkeys(columns, _TOKENS)),
            new_fingerprint=_fingerprint(dataset, encoder, tokenizer),
            num_proc=num_proc,
            desc="Tokenizing",
        )
    except UnicodeDecodeError as error:
        raise DataError(
            f"a text column holds bytes that are not UTF-8 ({error}). Write the files again with valid UTF-8."
        ) from error
    return tokenized.with_format(None)


def _batch_size(dataset: Dataset) -> int:
    """Records per batch: about 8 MiB on average, since documents may be megabytes long."""
    mean_bytes = max(1, dataset.data.nbytes // max(1, dataset.data.num_rows))
    return int(np.clip(_BATCH_BYTES // mean_bytes, 1, 1000))


def _fingerprint(dataset: Dataset, encoder: _Encoder, tokenizer: PreTrainedTokenizerBase) -> str:
    """Cache key. `datasets` would pickle the tokenizer, whose state changes when it is first called."""
    parts = [_CACHE_VERSION, transformers.__version__, type(encoder).__name__, dataset._fingerprint, encoder.options()]
    if not isinstance(encoder, _PretokenizedEncoder):
        parts.append(_tokenizer_state(tokenizer))
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _tokenizer_state(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return [datasets.fingerprint.Hasher.hash(tokenizer)]
    state = json.loads(backend.to_str())
    state["truncation"] = state["padding"] = None
    return [state, str(tokenizer.special_tokens_map), tokenizer.chat_template]


def _check_targets(dataset: Dataset) -> None:
    """At least one token besides the documents' first ones, which nothing predicts, must be a target."""
    if "labels" not in dataset.column_names:
        if document_lengths(dataset).max() > 1:
            return
        reason = "every document has one token only"
    else:
        for batch in dataset.with_format("arrow").select_columns("labels").iter(batch_size=1000):
            lists = _one_chunk(batch["labels"])
            is_target = lists.flatten().to_numpy() != IGNORE_INDEX
            lengths = pc.list_value_length(lists).to_numpy()
            is_target[np.cumsum(lengths) - lengths] = False
            if is_target.any():
                return
        reason = "every label is -100 (the first token of a document never counts)"
    raise DataError(
        f"no token to train on in {len(dataset)} documents with {document_lengths(dataset).sum()} tokens: "
        f"{reason}. Check the labels, and --completion_only_loss or --assistant_only_loss where set."
    )


def document_lengths(dataset: Dataset) -> np.ndarray:
    """Number of tokens of each document: int64 [num_documents], read from the Arrow offsets alone."""
    lengths = pc.list_value_length(dataset.data.column("input_ids"))
    if lengths.null_count:
        raise DataError(f"{lengths.null_count} documents have null 'input_ids'. Remove them.")
    counts = lengths.to_numpy().astype(np.int64)
    if dataset._indices is None:
        return counts
    return counts[dataset._indices.column(0).to_numpy()]

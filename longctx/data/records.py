"""The name of a data set -> its records: where it is, which splits it has, and the slice asked for.

A folder of `Dataset.save_to_disk` may be anybody's, so Arrow's own checks come before it is read.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

import datasets
from datasets import Dataset, IterableDataset

from longctx.data.errors import DataError, no_records
from longctx.data.files import DATA_SUFFIXES, FORMATS_HELP, STDLIB, SavedTables, read_files, stdlib_files
from longctx.data.kinds import record_kind
from longctx.data.reading import IterableRecords, RecordStream
from longctx.untrusted.files import check_data_file, check_folder, files_below, leads_outside, matching_files

Kind = TypeVar("Kind", Dataset, IterableDataset)
Splits = Mapping[str, Callable[[], RecordStream]]
"""How the records of each split are opened."""

_COMPANION_FILES = frozenset({"readme.md", "license", "license.txt", "license.md", "dataset_infos.json"})


def load_records(
    dataset_name: str,
    *,
    config: str | None = None,
    split: str = "train",
    text_field: str = "text",
    columns: Sequence[str] | None = None,
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
        columns: columns of JSON files that are read, as if there were no others; all when None.

    Returns:
        A memory-mapped Dataset with at least the columns of one kind of record. Blank lines of JSON-lines
        files are skipped; no other line is. Chats of JSON files are kept as JSON text
        (`datasets.Json`), from which `tokenize_records` reads every number and null as it was written.

    Raises:
        DataError: not found, unknown format, unreadable or malformed (with file and line), empty, no known
            kind of record, several kinds in one data set, or no such split (lists the splits).
    """
    splits = _local_splits(dataset_name, config, text_field, columns)
    if splits is None:
        dataset = _load_from_hub(dataset_name, config, split, Dataset)
    else:
        dataset = _read_split(splits, split, dataset_name)
    if len(dataset) == 0:
        raise no_records(f"{dataset_name} (split {split!r})")
    record_kind(dataset.column_names, text_field, dataset_name)
    return dataset


def stream_records(
    dataset_name: str,
    *,
    config: str | None = None,
    split: str = "train",
    text_field: str = "text",
    columns: Sequence[str] | None = None,
) -> RecordStream:
    """The records of `load_records` in the same order, read when they are asked for; nothing is written to a cache.

    The first record is read ahead, to see its columns; of Parquet and Arrow files also every file's schema.

    Raises:
        DataError: as `load_records`, for what shows before the first record; and for a slice of a split.
    """
    splits = _local_splits(dataset_name, config, text_field, columns)
    if splits is None:
        records: RecordStream = IterableRecords(_load_from_hub(dataset_name, config, split, IterableDataset))
    elif split in splits:
        records = splits[split]()
    elif any(split.startswith(f"{part}[") for part in splits) or "+" in split:
        raise DataError(
            f"{dataset_name}: split {split!r} is a part of a split, or several splits, and a stream reads one "
            f"whole split. Name one of {', '.join(sorted(splits))}, or leave out --dataset_streaming."
        )
    else:
        raise _no_split(dataset_name, split, splits)
    record_kind(records.column_names, text_field, dataset_name)
    return records


def record_place(
    record: int,
    dataset_name: str,
    *,
    config: str | None = None,
    split: str = "train",
    text_field: str = "text",
    columns: Sequence[str] | None = None,
) -> str:
    """Where a record of `load_records`, counted from 0, comes from: the line of its file, or `split[record]`."""
    splits = _local_splits(dataset_name, config, text_field, columns)
    parts = [(split, range(record + 1))]
    if splits is not None and split not in splits:
        parts = _read_parts(splits, split, dataset_name)[1]
    for part, rows in parts:
        if record < len(rows):
            place = splits[part]().place(rows[record]) if splits is not None else None
            return place or f"{dataset_name}, {part}[{rows[record]}]"
        record -= len(rows)
    raise AssertionError(f"record {record} beyond the end of {dataset_name}")


def local_files(dataset_name: str) -> list[Path] | None:
    """Return the files of a local or built-in data set in the order in which they are read; None for one of the hub.

    Raises:
        DataError: as `load_records`, for a name that leads to no file.
    """
    path = Path(dataset_name).expanduser()
    if path.is_dir() and dataset_name != STDLIB:
        return _visible_files(path)
    parts = _local_parts(dataset_name, path)
    return None if parts is None else parts["train"]


def _local_splits(name: str, config: str | None, text_field: str, columns: Sequence[str] | None) -> Splits | None:
    """How the records of each split of a local or built-in data set are opened; None if the name is one for the hub."""
    path = Path(name).expanduser()
    parts = _local_parts(name, path)
    if parts is None:
        return None
    if config is not None:
        raise DataError(
            f"--dataset_config {config!r}: only hub data sets have configurations and {name!r} is "
            "local. Leave it out, or name the files of that configuration."
        )
    if name != STDLIB and _is_saved(path):
        return {split: partial(SavedTables, files) for split, files in parts.items()}
    return {split: partial(read_files, files, text_field, columns) for split, files in parts.items()}


def _local_parts(name: str, path: Path) -> dict[str, list[Path]] | None:
    """The files of each split of a local or built-in data set; None if the name is one for the hub."""
    if name == STDLIB:
        return {"train": stdlib_files()}
    if path.is_dir():
        return _saved_splits(path) if _is_saved(path) else _split_files(path)
    if path.exists():
        return {"train": [check_data_file(path)]}
    if glob.has_magic(name):
        files = matching_files(str(path))
        if not files:
            raise DataError(f"{name}: no file matches this glob (from {Path.cwd()}). Check the pattern.")
        _check_links(files, next(parent for parent in path.parents if not glob.has_magic(str(parent))))
        return {"train": files}
    # Hub names are `name` or `owner/name`, without a leading dot or separator and a data file's suffix.
    if re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name) is None or name.endswith(DATA_SUFFIXES):
        raise DataError(f"{name}: no such file or folder (from {Path.cwd()}). Expected {FORMATS_HELP}.")
    return None


def _check_links(files: Sequence[Path], folder: Path) -> None:
    """Refuse texts that are links out of their folder: a private file could be learnt from, and published."""
    for file in files:
        if file.suffix.lower() not in DATA_SUFFIXES and leads_outside(file, folder):
            raise DataError(
                f"{file} is a link to {file.resolve()}, outside {folder}. Copy the file there, or name it itself."
            )


def _visible_files(folder: Path) -> list[Path]:
    """Files below a folder, sorted by path, without hidden ones, caches and the notes beside data files.

    Raises:
        ValueError: for a link to nothing, and for what is no regular file.
    """
    files = [
        check_data_file(file)
        for file in files_below(folder)
        if not any(part.startswith(".") or part == "__pycache__" for part in file.relative_to(folder).parts)
    ]
    others = [file for file in files if file.name.lower() not in _COMPANION_FILES]
    if others and all(file.suffix.lower() in DATA_SUFFIXES for file in others):
        files = others
    return sorted(files, key=lambda file: file.relative_to(folder).as_posix())


def _split_files(folder: Path) -> dict[str, list[Path]]:
    """Divide the data files of a folder by the split names in their paths, as `datasets` does (train, test, …)."""
    from datasets.data_files import DataFilesDict, get_data_patterns

    files = _visible_files(folder)
    if not files:
        raise DataError(f"{folder}: the folder holds no files. Expected {FORMATS_HELP}.")
    _check_links(files, folder)
    if not all(file.suffix.lower() in DATA_SUFFIXES for file in files):
        return {"train": files}
    check_folder(folder, subfolders=True)  # `datasets` follows links to folders
    base = os.path.abspath(folder)
    found = DataFilesDict.from_patterns(get_data_patterns(base), base_path=base)
    wanted = {str(name): set(part) for name, part in found.items()}
    # Without resolving links: the files of a hub snapshot are links into another folder.
    splits = {name: [file for file in files if os.path.abspath(file) in part] for name, part in wanted.items()}
    for (name, part), (other, its) in combinations(splits.items(), 2):
        if both := sorted(set(part) & set(its)):
            raise DataError(
                f"{folder}: {both[0]} carries the names of two splits, {name} and {other}, and would be in both. "
                "Rename it, or give a glob that selects the files."
            )
    left = sorted(set(files).difference(*splits.values()))
    if left:
        raise DataError(
            f"{folder}: some files carry split names ({', '.join(splits)}) and {len(left)} do not, such as "
            f"{left[0]}. Name a split in every file, or give a glob that selects the files."
        )
    return {name: part for name, part in splits.items() if part}


def _load_from_hub(name: str, config: str | None, split: str, kind: type[Kind]) -> Kind:
    try:
        dataset = datasets.load_dataset(name, config, split=split, streaming=kind is IterableDataset)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"--dataset_name {name!r}, split {split!r}: {error}. No such file or folder here either (from "
            f"{Path.cwd()}). Expected {FORMATS_HELP}; without a connection, give a local one."
        ) from error
    assert isinstance(dataset, kind), f"load_dataset(split={split!r}) gave {type(dataset).__name__}"
    return dataset


def _read_split(splits: Splits, split: str, name: str) -> Dataset:
    """Load the splits that a split expression names and cut the slices it asks for."""
    loaded, parts = _read_parts(splits, split, name)
    if split in loaded:
        return loaded[split]
    return datasets.concatenate_datasets([loaded[part].select(rows) for part, rows in parts])


def _read_parts(splits: Splits, split: str, name: str) -> tuple[dict[str, Dataset], list[tuple[str, range]]]:
    """The splits that a split expression names, loaded, and the rows of them that it asks for, in order."""
    wanted = [re.split(r"[\[(]", part, maxsplit=1)[0].strip() for part in split.split("+")]
    unknown = [part for part in wanted if part not in splits]
    if unknown:
        raise _no_split(name, unknown[0], splits)
    loaded = {part: splits[part]().load() for part in dict.fromkeys(wanted)}
    if split in loaded:
        return loaded, [(split, range(len(loaded[split])))]
    try:
        instruction = datasets.ReadInstruction.from_spec(split)
        spans = instruction.to_absolute({part: len(dataset) for part, dataset in loaded.items()})
    except (AssertionError, ValueError) as error:
        raise DataError(f"{name}: split {split!r} is not understood ({error}). Example: 'train[:10%]'.") from None
    return loaded, [(span.splitname, range(span.from_, span.to)) for span in spans]


def _no_split(name: str, split: str, splits: Splits) -> DataError:
    return DataError(
        f"{name}: no split {split!r}; available: {', '.join(sorted(splits))}. "
        "Choose one with --dataset_train_split or --dataset_test_split, or several joined by a plus sign."
    )


def _is_saved(path: Path) -> bool:
    """Return whether the folder is one of `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def _saved_splits(path: Path) -> dict[str, list[Path]]:
    """Return the tables of each split in such a folder, which are all that is read of it.

    Raises:
        DataError: The folder is damaged, or names files outside itself.
    """
    try:
        check_folder(path, subfolders=True)
        if not (path / "state.json").is_file():
            folders = {name: path / _own_name(name, path) for name in _json(path / "dataset_dict.json")["splits"]}
            return {name: _saved_tables(_json(folder / "state.json"), folder) for name, folder in folders.items()}
        state = _json(path / "state.json")
        return {str(state.get("_split") or "train"): _saved_tables(state, path)}
    except Exception as error:  # damage shows as any error of the code that meets it
        raise DataError(
            f"{path}: not a readable folder of Dataset.save_to_disk ({error}). Save the data set again."
        ) from error


def _saved_tables(state: Mapping[str, Any], folder: Path) -> list[Path]:
    if state.get("_indices_data_files"):
        raise ValueError("an old release of datasets has kept its selection of rows apart")
    return [folder / _own_name(file["filename"], folder / "state.json") for file in state["_data_files"]]


def _own_name(name: Any, where: Path) -> str:
    """The name of a file or folder in the folder itself."""
    if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
        raise ValueError(f"{where} names {name}, outside its folder")
    return name


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))

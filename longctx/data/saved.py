"""Folders of `Dataset.save_to_disk` -> records. They may be anybody's, so Arrow's own checks come first."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset

from longctx.data.cache import cache_key
from longctx.data.contents import content_digests
from longctx.data.errors import DataError, name_record
from longctx.data.files import Loader
from longctx.data.memory import GROUP_MEMORY_BYTES, MemoryBound
from longctx.untrusted.files import check_folder

_THREADS = 8


def is_saved(path: Path) -> bool:
    """Return whether the folder is one of `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def saved_splits(path: Path) -> dict[str, Loader]:
    """Return the loader of each split in a folder.

    Raises:
        DataError: The folder is damaged, or names files outside itself; by the loaders, for its contents.
    """
    return {name: _loader(path, folder) for name, folder in _split_folders(path).items()}


def _split_folders(path: Path) -> dict[str, Path]:
    try:
        check_folder(path, subfolders=True)
        if (path / "state.json").is_file():
            return {str(_json(path / "state.json").get("_split") or "train"): path}
        return {name: path / _own_name(name, path) for name in _json(path / "dataset_dict.json")["splits"]}
    except Exception as error:  # damage shows as any error of the code that meets it
        raise _unreadable(path, error) from error


def _loader(path: Path, folder: Path) -> Loader:
    """
    Args:
        path: The data set or the dictionary of several, for messages.
        folder: The folder of this one.
    """
    load = cache(lambda: _load(path, folder))
    return Loader(
        load=load,
        stream=lambda: load().to_iterable_dataset(),
        places=lambda: (f"{path}, {name_record(row)}" for row in range(len(load()))),
    )


def _load(path: Path, folder: Path) -> Dataset:
    """Map the tables of a folder into memory, once their contents are known to be valid.

    Of state.json, only the names of the tables count. Its format is dropped, and its fingerprint, which anybody could
    have copied from another data set, is replaced by one of the contents.
    """
    try:
        state = _json(folder / "state.json")
        tables = [folder / _own_name(file["filename"], folder / "state.json") for file in state["_data_files"]]
        with MemoryBound(GROUP_MEMORY_BYTES), ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(_validate, tables))
        dataset = Dataset.load_from_disk(str(folder)).with_format(None)
    except Exception as error:
        raise _unreadable(path, error) from error
    files = [*tables, folder / "dataset_info.json"]
    dataset._fingerprint = cache_key("saved", [file.name for file in files], content_digests(files))
    return dataset


def _validate(table: Path) -> None:
    """Read a whole table and check it: offsets and indices within bounds, text in UTF-8.

    Arrow's readers take offsets on trust, and one that points elsewhere reads foreign memory or crashes the process.
    """
    try:
        with pa.memory_map(str(table)) as source:
            for batch in pa.ipc.open_stream(source):
                batch.validate(full=True)
    except pa.ArrowException as error:
        raise ValueError(f"{table.name}: {error}") from error


def _own_name(name: Any, where: Path) -> str:
    """The name of a file or folder in the folder itself."""
    if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
        raise ValueError(f"{where} names {name}, outside its folder")
    return name


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"{path}: not a readable folder of Dataset.save_to_disk ({error}). Save the data set again.")

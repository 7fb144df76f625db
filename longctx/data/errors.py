"""The error of the data stage, the wording that several of its files share, and the limits on what is read.

Compressed files, and JSON of empty lists, are small on the disk and large once they are read.
"""

from __future__ import annotations

import logging
import re
import resource
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from longctx.ranks import is_first_rank
from longctx.untrusted.confined import Bounds, data_bytes

logger = logging.getLogger(__name__)

Part = TypeVar("Part")


class DataError(ValueError):
    """The data cannot be read or used; the message names the place, what was expected and the remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(message.rpartition(f"{__name__}.DataError: ")[2].rstrip())  # without a worker's traceback


def say(note: str, *, on_all_ranks: bool = False) -> None:
    """Log what a user has to know of the data, on the first rank: the others have the same data."""
    if on_all_ranks or is_first_rank():
        logger.warning(note)


RECORD_BYTES = 1 << 28
"""The largest line of JSON or text file. It is read before anything is known about it, so this bounds memory."""


def too_long(where: str, what: str, limit: int, remedy: str) -> DataError:
    return DataError(f"{where}: {what} of more than {limit >> 20:,} MiB, the limit. {remedy}")


def unreadable(file: Path, error: OSError) -> DataError:
    return DataError(f"{file}: unreadable ({error.strerror}). Check the file and its permissions.")


def no_records(where: str) -> DataError:
    return DataError(f"{where}: empty, 0 records. Give at least one record.")


def name_files(files: Sequence[Path]) -> str:
    return str(files[0]) if len(files) == 1 else f"{files[0]} … {files[-1]} ({len(files)} files)"


def name_record(index: int) -> str:
    """A record where the file it came from is not known any more."""
    return f"record {index} (counted from 0)"


def with_place(error: DataError, place: Callable[[int], str]) -> DataError:
    """The error with the place of the record that its message begins with, by `name_record`; or as it is."""
    named = re.match(r"record (\d+) \(counted from 0\)", str(error))
    return DataError(place(int(named[1])) + str(error)[named.end() :]) if named else error


RECORD_BOUNDS = Bounds(seconds=120, memory_bytes=4 << 30)
"""Limits of parsing JSON records; those that exceed them together are parsed one by one."""
GROUP_MEMORY_BYTES = 8 << 30
"""The most memory that a record batch (Arrow), or the records of a row group (Parquet) that are unpacked together, may
take."""
UNPACKED_TIMES = 1000
"""Unpacked records may be as many times as large as their files, or GROUP_MEMORY_BYTES if that is more. Real documents
become some ten times as large."""


def within_memory(parts: Iterable[Part]) -> Iterator[Part]:
    """Yield parts of a table, which are unpacked while they are asked for.

    Meanwhile this process may take GROUP_MEMORY_BYTES more than it has, besides files that are mapped into memory.
    Linux only.

    Raises:
        MemoryError: for a part that takes more (pyarrow's ArrowMemoryError is one).
    """
    parts = iter(parts)
    while True:
        before = resource.getrlimit(resource.RLIMIT_DATA)
        known = [limit for limit in before if limit != resource.RLIM_INFINITY]
        limit = before[0] if (held := data_bytes()) is None else min([held + GROUP_MEMORY_BYTES, *known])
        resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
        try:
            part = next(parts, None)
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)
        if part is None:
            return
        yield part


def too_large(where: str) -> DataError:
    remedy = "Write it anew in smaller ones (pyarrow's max_chunksize or row_group_size), or shorten its records."
    return too_long(where, "a row group or record batch with an unpacked size", GROUP_MEMORY_BYTES, remedy)


def bounded_by_files(batches: Iterable[tuple[Path, Any]], files: Sequence[Path]) -> Iterator[tuple[Path, Any]]:
    """Yield record batches of files, and stop where they become far larger than the files of any real data.

    Raises:
        DataError: when their size exceeds GROUP_MEMORY_BYTES and UNPACKED_TIMES the size of the files.
    """
    packed = sum(file.stat().st_size for file in files)
    limit, unpacked = max(GROUP_MEMORY_BYTES, UNPACKED_TIMES * packed), 0
    for file, batch in batches:
        unpacked += batch.nbytes
        if unpacked > limit:
            remedy = f"That is over {UNPACKED_TIMES:,} times the size of the files. Check what they hold."
            raise too_long(str(file), "records with an unpacked size", limit, remedy)
        yield file, batch


def check_selection(selected: Iterable[str], there: Iterable[str], *, may_lack: Iterable[str] = ()) -> None:
    """Check that a data set has the columns that its entry in --datasets selects.

    Raises:
        DataError: for the first missing column.
    """
    if missing := sorted({*selected} - {*there, *may_lack}):
        raise DataError(f"no column {missing[0]!r} to select; there are {', '.join(sorted(there))}.")

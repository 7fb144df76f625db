"""The error of the data stage, and the wording that several of its files share."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path


class DataError(ValueError):
    """The data cannot be read or used; the message names the place, what was expected and the remedy."""


RECORD_BYTES = 1 << 28
"""Of a line of JSON, or of a text file: what is read before anything is known about it, and so bounds memory."""


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

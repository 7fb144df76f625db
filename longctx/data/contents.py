"""What is kept on disk for later runs: its keys, its folder, and digests of whole files.

A file is known by its contents: its size and modification time can be those of another file, since anyone can set
them. The time of its last change (ctime) cannot be set, so a digest is computed once for each
(device, inode, size, mtime, ctime), and found again for as long as these stay as they are.
"""

from __future__ import annotations

import hashlib
import json
import stat
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import xxhash

from longctx.data.errors import DataError, unreadable
from longctx.untrusted.files import written_whole

# Raised when the same records would now give other tokens or other rows, or be refused.
_VERSION = 5


def cache_key(*parts: Any) -> str:
    """Fingerprint of everything a cached result depends on."""
    return digest_of(_VERSION, *parts)


def digest_of(*parts: Any) -> str:
    """Return a digest of JSON values. Checkpoints keep such digests, so they must not change between releases."""
    return hashlib.sha256(json.dumps([4, *parts], sort_keys=True, default=str).encode()).hexdigest()[:32]


def cache_folder() -> Path:
    """The folder of plans and digests, beside the data sets that `datasets` keeps (HF_DATASETS_CACHE)."""
    return Path(datasets.config.HF_DATASETS_CACHE) / "longctx"


_BLOCK_BYTES = 64 << 20
"""Blocks of a large file are hashed side by side."""
_READ_BYTES = 1 << 20
_THREADS = 8
_LARGE_BYTES = 4 << 20
"""The digests of smaller files are remembered together, in one entry for all files of a call."""
_SETTLED_SECONDS = 2.0
"""File systems keep time in ticks of up to a second or two: a file that was changed within the current tick could be
changed once more without showing it, so its digest is not remembered yet."""


class FileState(NamedTuple):
    """What tells one state of a file from the next without reading it."""

    device: int
    inode: int
    size: int
    """Bytes."""
    mtime_ns: int
    ctime_ns: int


def file_state(path: Path) -> FileState:
    """Return the state of the file that a path or link leads to.

    Raises:
        DataError: if there is no regular file, or it cannot be looked at.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise unreadable(path, error) from error
    if not stat.S_ISREG(found.st_mode):  # a pipe or a device may have no end
        raise DataError(f"{path}: not a regular file. Name files and folders of files.")
    return FileState(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def content_digests(files: Sequence[Path]) -> list[str]:
    """Return the digest (xxh3, 128 bits, hexadecimal) of the contents of each file.

    All bytes of a file count, whatever its name and times are. Files are read by several threads, once for each of
    their states.

    Raises:
        DataError: if a file cannot be read, or changes while it is.
    """
    states = [file_state(file) for file in files]
    digests: dict[int, str] = {}
    missing: list[list[int]] = []
    for group in _groups(states):
        remembered = _recall([states[number] for number in group])
        if remembered is None:
            missing.append(group)
        else:
            digests.update(zip(group, remembered, strict=True))
    wanted = [number for group in missing for number in group]
    computed = _read([(files[number], states[number].size) for number in wanted])
    digests.update(zip(wanted, computed, strict=True))
    for number in wanted:
        check_unchanged(files[number], states[number])
    for group in missing:
        _remember([states[number] for number in group], [digests[number] for number in group])
    return [digests[number] for number in range(len(files))]


def check_unchanged(file: Path, state: FileState) -> None:
    """Check that a file is still in this state.

    Raises:
        DataError: if it has been written to or replaced.
    """
    if file_state(file) != state:
        raise DataError(f"{file} changed while it was read. Start again when nothing writes to it.")


def _groups(states: Sequence[FileState]) -> list[list[int]]:
    """Divide the numbers of the files into those that are remembered together."""
    small = [number for number, state in enumerate(states) if state.size < _LARGE_BYTES]
    large = [[number] for number, state in enumerate(states) if state.size >= _LARGE_BYTES]
    return [small, *large] if small else large


def _read(files: Iterable[tuple[Path, int]]) -> list[str]:
    """Hash files of these sizes, block by block."""
    blocks = [
        (number, file, start, min(_BLOCK_BYTES, size - start))
        for number, (file, size) in enumerate(files)
        for start in range(0, max(size, 1), _BLOCK_BYTES)
    ]
    states: dict[int, xxhash.xxh3_128] = {}
    with ThreadPoolExecutor(_THREADS) as threads:
        for (number, *_), block in zip(blocks, threads.map(_block_digest, blocks), strict=True):
            states.setdefault(number, xxhash.xxh3_128()).update(block)
    return [states[number].hexdigest() for number in sorted(states)]


def _block_digest(block: tuple[int, Path, int, int]) -> bytes:
    _, path, start, left = block
    state, buffer = xxhash.xxh3_128(), memoryview(bytearray(min(_READ_BYTES, max(left, 1))))
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while left and (size := file.readinto(buffer[: min(left, len(buffer))])):
                state.update(buffer[:size])
                left -= size
    except OSError as error:
        raise unreadable(path, error) from error
    return state.digest()


def _entry(states: Sequence[FileState]) -> tuple[Path, str]:
    key = cache_key("contents", [list(state) for state in states])
    return cache_folder() / f"contents-{key}.json", key


def _recall(states: Sequence[FileState]) -> list[str] | None:
    """Return the digests that were remembered for files in these states; None if there are none that are whole."""
    path, key = _entry(states)
    try:
        entry = json.loads(path.read_text())
        digests = entry["digests"]
        is_whole = entry["check"] == cache_key(key, digests) and len(digests) == len(states)
    except Exception:  # damage shows as any error of the decoders
        return None
    return digests if is_whole else None


def _remember(states: Sequence[FileState], digests: Sequence[str]) -> None:
    """Write an entry aside and rename it, unless a file may still change without showing it."""
    latest = max(max(state.ctime_ns, state.mtime_ns) for state in states)
    if time.time_ns() - latest < _SETTLED_SECONDS * 1e9:
        return
    path, key = _entry(states)
    # On a full or read-only disk, the files are read again the next time.
    with suppress(OSError), written_whole(path) as unfinished:
        unfinished.write_text(json.dumps({"digests": list(digests), "check": cache_key(key, list(digests))}))

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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import xxhash

from longctx.data.errors import DataError, unreadable
from longctx.untrusted.files import written_whole

# Raised when the same records would now give other tokens or other rows, or be refused.
_VERSION = 6


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
"""Digests are those of blocks of so many bytes, one after another."""
_READ_BYTES = 1 << 20
_THREADS = 8
_LARGE_BYTES = 4 << 20
"""The digests of smaller files are not remembered: they are read as fast as an entry for each would be."""
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

    All bytes of a file count, whatever its name and times are. Files are read by several threads; large ones once for
    each of their states.

    Raises:
        DataError: if a file cannot be read, or changes while it is.
    """
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(_content_digest, files))


def _content_digest(file: Path) -> str:
    state = file_state(file)
    key = cache_key("contents", list(state))
    entry = cache_folder() / f"contents-{key}.json"
    if state.size >= _LARGE_BYTES:
        with suppress(Exception):  # a missing entry, and damage, which shows as any error of the decoders
            known = json.loads(entry.read_text())
            if known["check"] == cache_key(key, known["digest"]):
                return known["digest"]
    digest = _read(file, state.size)
    check_unchanged(file, state)
    is_settled = time.time_ns() - max(state.ctime_ns, state.mtime_ns) > _SETTLED_SECONDS * 1e9
    if state.size >= _LARGE_BYTES and is_settled:
        # On a full or read-only disk, the files are read again the next time.
        with suppress(OSError), written_whole(entry) as unfinished:
            unfinished.write_text(json.dumps({"digest": digest, "check": cache_key(key, digest)}))
    return digest


def check_unchanged(file: Path, state: FileState) -> None:
    """Check that a file is still in this state.

    Raises:
        DataError: if it has been written to or replaced.
    """
    if file_state(file) != state:
        raise DataError(f"{file} changed while it was read. Start again when nothing writes to it.")


def _read(file: Path, size: int) -> str:
    """Hash a file of this size, block by block."""
    whole, buffer = xxhash.xxh3_128(), memoryview(bytearray(min(_READ_BYTES, max(size, 1))))
    try:
        with file.open("rb", buffering=0) as opened:
            for start in range(0, max(size, 1), _BLOCK_BYTES):
                block, left = xxhash.xxh3_128(), min(_BLOCK_BYTES, size - start)
                while left and (read := opened.readinto(buffer[: min(left, len(buffer))])):
                    block.update(buffer[:read])
                    left -= read
                whole.update(block.digest())
    except OSError as error:
        raise unreadable(file, error) from error
    return whole.hexdigest()

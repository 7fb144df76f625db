"""What a folder of unknown origin may hold: regular files, and links that do not lead out of it.

Reading a pipe, a socket or a device may never end. Links to regular files are followed, since the snapshots of the
hub's cache consist of them. Links to folders are not, since they can form a loop. Files of our own are written by
`written_whole`, so that no reader meets half of one.
"""

from __future__ import annotations

import errno
import fnmatch
import glob
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_file(path: Path) -> Path:
    """Return the path of a regular file, or of a link to one.

    Raises:
        ValueError: if it is anything else. A missing file is left to the code that opens it.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return path
    except OSError as error:
        raise ValueError(f"{path} cannot be opened: {error.strerror}. Correct the path or its permissions.") from error
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path} is {_kind(mode)}, expected a regular file. Remove it, or name another.")
    return path


def check_path(flag: str, value: object) -> None:
    """Check that the value of a flag, if it names a file or a folder, is one that a file system takes.

    Raises:
        ValueError: if it is too long, or has a NUL byte.
    """
    try:
        os.lstat(str(value))
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) or error.errno == errno.ENAMETOOLONG:
            shown, reason = str(value), getattr(error, "strerror", None) or error
            shown = shown if len(shown) <= 60 else f"{shown[:60]}…"
            raise ValueError(f"--{flag} {shown!r} cannot be a path: {reason}. Correct it.") from None


def is_template_file(path: str) -> bool:
    """Whether --chat_template_path means a file, else a tokenizer; as TRL tells them apart."""
    return path.endswith((".jinja", ".j2"))


def check_folder(folder: Path, *, subfolders: bool = False) -> None:
    """Check that a folder holds regular files, links to such files, and folders, before a library opens any of them.

    Args:
        subfolders: whether the folders below it are checked too.

    Raises:
        ValueError: with the first entry that is none of these, by name.
    """
    if folder.is_dir():
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            path = Path(entry.path)
            if entry.is_file(follow_symlinks=False):  # as the folder itself says, without a look at the file
                continue
            if not entry.is_dir():
                check_file(path)
            elif entry.is_symlink():
                raise ValueError(
                    f"{path} is a link to a folder, which may lead in a circle. Remove it, or put a copy of the folder "
                    "in its place."
                )
            elif subfolders:
                check_folder(path, subfolders=True)


def leads_outside(path: Path, folder: Path) -> bool:
    """Return whether a path below a folder leads, through a link, to a file outside it.

    The hub's cache is made of links: what is in the `blobs` of one of its repositories counts as inside.
    """
    target = path.resolve()
    is_blob = target.parent.name == "blobs" and target.parent.parent.name.startswith(("models--", "datasets--"))
    return not is_blob and not target.is_relative_to(folder.resolve())


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def check_data_file(path: Path) -> Path:
    """Return the path of a regular file, or of a link to one, so that no data is left out silently.

    Raises:
        ValueError: if it is anything else, or a link to nothing.
    """
    if path.is_symlink() and not path.exists():
        raise ValueError(f"{path} is a link to {os.readlink(path)}, where no file is. Remove it, or restore the file.")
    return check_file(path)


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders, without following links to folders."""
    for root, folders, names in os.walk(folder, followlinks=False):
        folders.sort()
        yield from (Path(root, name) for name in sorted(names))


def matching_files(pattern: str) -> list[Path]:
    """Return the regular files that a glob matches, sorted; `**` does not go through links to folders.

    As in a shell, names with a leading dot match only patterns with one.

    Raises:
        ValueError: if it matches something that is neither a file nor a folder, or a link to nothing.
    """
    parts = Path(pattern).parts
    first = next((index for index, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    root = Path(*parts[:first])
    wanted = [part if part == "**" else re.sub(r"\*+", "*", part) for part in parts[first:]]
    if not wanted:
        return [root] if root.is_file() else []
    if wanted[-1] == "**":
        wanted.append("*")
    dotted = [part for part in wanted if part.startswith(".")]
    return sorted(
        check_data_file(path)
        for path in root.glob("/".join(wanted))
        if not path.is_dir() and not _is_hidden(path.relative_to(root), dotted)
    )


def _is_hidden(path: Path, dotted: list[str]) -> bool:
    return any(
        part.startswith(".") and not any(fnmatch.fnmatchcase(part, pattern) for pattern in dotted)
        for part in path.parts
    )


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a path to write to, which then takes the place of `path`: a reader sees the whole file or the one before.

    The folder is created if it is missing. After an error, nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)

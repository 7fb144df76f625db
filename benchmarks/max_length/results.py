"""results.jsonl: what a sweep has been told, has found and is about to do, a line for each change of state.

Lines are only ever added, and are on the disk before the sweep goes on. What a killed sweep leaves behind is therefore
right up to its last line, which may be cut: it is dropped, and a probe that was running is run again.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FILE = "results.jsonl"
SWEEP, COMBINATION, FIT, TIME = "sweep", "combination", "fit", "time"
"""Kinds of lines: what the sweep was told and where it runs; a backend on some devices; a probe for the longest row;
a probe for the seconds of a step."""
INIT, RUNNING, OK, OOM, TIMEOUT, FAIL, REFUSED = "init", "running", "ok", "oom", "timeout", "fail", "refused"
"""States of the last three."""
DECIDED = (OK, OOM, TIMEOUT, FAIL, REFUSED)

_START = b'{"kind": '
"""Of every line; one that is cut may have less of it."""

Line = dict[str, Any]


class TimeIsUp(Exception):
    """The next probe is not expected to end in the time that is left, or has been cut: which, and why."""


class Key(NamedTuple):
    """What a line is about."""

    kind: str
    backend: str
    devices: int
    length: int
    """Tokens of a row; 0 for a combination."""


def key_of(line: Line) -> Key:
    return Key(line["kind"], line["backend"], line["devices"], line.get("length", 0))


class Results:
    """All lines of a folder, and the latest of each key.

    Raises:
        ValueError: if another process writes there, or the file is none of ours.
    """

    def __init__(self, folder: Path):
        self.path = folder / FILE
        self._file = self.path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"--output {folder} is written by another sweep now. Choose another folder.") from None
        self.lines = list(read(self.path))
        self._file.truncate(_whole_lines(self.path))

    def add(self, line: Line) -> None:
        """On the disk when it returns."""
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.lines.append(line)

    def close(self) -> None:
        self._file.close()


def _whole_lines(path: Path) -> int:
    """Bytes up to the end of the last line that was written to its end."""
    content = path.read_bytes()
    return content.rfind(b"\n") + 1


def read(path: Path) -> Iterator[Line]:
    """Every line but a last one that is cut.

    Raises:
        ValueError: for a line that is not a JSON object.
    """
    *whole, cut = path.read_bytes().split(b"\n")
    for number, text in enumerate([*whole, cut], 1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if number > len(whole) and cut[: len(_START)] == _START[: len(cut)]:
            return
        if not isinstance(line, dict) or "kind" not in line:
            raise ValueError(
                f"line {number} of {path} is none of a sweep's. Move the file away, or name another folder."
            )
        yield line


def latest(lines: list[Line]) -> dict[Key, Line]:
    """The state of everything, in the order in which it was first heard of."""
    return {key_of(line): line for line in lines if line["kind"] != SWEEP}

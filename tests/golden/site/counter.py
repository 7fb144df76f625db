"""Counts what a process and those that it forks do: functions called, files opened, bytes read, processes started.

A process has a file of counts in a folder, mapped into its memory, so that those of a process that is killed remain.
Only the main thread's calls count: how often other threads look whether there is something to do depends on time.
"""

from __future__ import annotations

import atexit
import mmap
import os
import sys
from collections.abc import MutableSequence
from pathlib import Path
from types import FrameType
from typing import Any

NAMES = ("Python functions", "C functions", "files opened", "processes started", "KiB read")
"""Of each count; bytes are counted of what is read."""
PYTHON, C, OPENED, STARTED, READ = range(len(NAMES))
_STARTS = {"subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"}

_counts: MutableSequence[int] = [0] * len(NAMES)
_folder = ""
_proc = -1


def start(folder: str) -> None:
    """Count from here on, in this process and in those that it forks."""
    global _folder
    _folder = folder
    _begin()
    os.register_at_fork(after_in_child=_begin)
    atexit.register(stop)
    sys.addaudithook(_count_event)
    sys.setprofile(_count_call)


def stop() -> None:
    """End counting, and note the bytes that this process and the children that it has waited for have read."""
    sys.setprofile(None)
    _counts[READ] = bytes_read()


def read() -> list[int]:
    """Return the counts of this process so far. Taking them does not count."""
    sys.setprofile(None)
    counts = [*_counts[:READ], bytes_read()]
    sys.setprofile(_count_call)
    return counts


def total(folder: str | Path) -> list[int]:
    """Return the counts of all processes together."""
    files = [memoryview(path.read_bytes()).cast("Q") for path in Path(folder).iterdir()]
    *columns, read = zip(*files, strict=True)
    return [*map(sum, columns), max(read)]  # the first process counts what children have read


def bytes_read() -> int:
    return int(os.pread(_proc, 100, 0).split()[1])  # rchar: what read(2) and the like have returned


def _begin() -> None:
    global _counts, _proc
    _counts = [0] * len(NAMES)  # not those of the parent, which go on
    with open(os.path.join(_folder, str(os.getpid())), "xb+") as file:
        file.truncate(8 * len(NAMES))
        shared = mmap.mmap(file.fileno(), 0)
    _proc = os.open("/proc/self/io", os.O_RDONLY)
    _counts = memoryview(shared).cast("B").cast("Q")  # type: ignore[assignment]


def _count_call(frame: FrameType, event: str, argument: Any) -> None:
    if event == "call":
        _counts[PYTHON] += 1
    elif event == "c_call":
        _counts[C] += 1


def _count_event(event: str, arguments: Any) -> None:
    if event == "open":
        _counts[OPENED] += 1
    elif event in _STARTS:
        _counts[STARTED] += 1

"""Time and memory for code that is not ours: chat templates, which come with a model and may loop without end."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Never

SECONDS = 30.0
"""Of this process's CPU time, for one conversation; a usual template takes less than a millisecond."""
MEMORY_BYTES = 2 << 30
"""Of address space, besides what the process has."""

_STATM = Path("/proc/self/statm")


@contextmanager
def bounded(seconds: float = SECONDS, memory_bytes: int = MEMORY_BYTES) -> Iterator[None]:
    """Run Python code with bounds: time in the main thread alone, which gets signals; memory on Linux alone.

    Raises:
        TimeoutError: after so many seconds of CPU time.
        MemoryError: where more memory is asked for.
    """
    with _bounded_memory(memory_bytes), _bounded_time(seconds):
        yield


@contextmanager
def _bounded_time(seconds: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> Never:
        raise TimeoutError(f"it ran for more than {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def _bounded_memory(memory_bytes: int) -> Iterator[None]:
    if not _STATM.exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = int(_STATM.read_text().split()[0]) * resource.getpagesize() + memory_bytes
    for known in (soft, hard):
        limit = limit if known == resource.RLIM_INFINITY else min(limit, known)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    except MemoryError:
        raise MemoryError(f"it asked for more than {memory_bytes >> 20:,} MiB") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

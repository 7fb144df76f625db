"""End a command with one line if Ctrl-C comes before it has anything to save."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from longctx.launch.terminal import INTERRUPTED
from longctx.ranks import is_first_rank


@contextmanager
def interrupts_end() -> Iterator[None]:
    """End the process with one line if SIGINT comes within the context, in place of tracebacks of all ranks.

    Training replaces this: it saves first (`longctx.training.callbacks.StopOnSignal`).
    """
    if threading.current_thread() is not threading.main_thread():  # only that one may handle signals
        yield
        return
    before = signal.signal(signal.SIGINT, _end_interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end_interrupted(number: int, frame: FrameType | None) -> None:
    if is_first_rank():
        os.write(2, b"\nlongctx: interrupted. Nothing more is saved.\n")  # print could be interrupted within itself
    os._exit(INTERRUPTED)

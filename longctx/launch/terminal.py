"""Keep the terminal short: every message once, and only those that a user can act on."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from longctx.ranks import is_first_on_node, is_first_rank

BETWEEN_LIBRARIES = (
    r"`(is_)?gradient_checkpointing` is deprecated",  # transformers, about a name that TRL, peft and users use
    r"`torch\.distributed\.\w+` is deprecated",  # torch, about DeepSpeed's calls in every step
    r"Slicing a flattened dim from root mesh will be deprecated",  # torch, about accelerate's mesh
    r"barrier\(\): using the device under current context",  # torch, about DeepSpeed's process group; ranks set it
)
"""Warnings that one library gives another, by how they begin."""

USAGE_ERROR = 2
"""The exit code of a command that refuses its input."""
INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ends before it has anything to save, as shells give it."""
HAS_STARTED = "LONGCTX_HAS_STARTED"
"""Environment variable that tells the processes that a run starts that the terminal shows it already."""


def say_hello(version: str) -> None:
    """Print that the run starts, before the imports that take seconds, and once for all of its processes."""
    if HAS_STARTED not in os.environ:
        os.environ[HAS_STARTED] = "1"
        print(f"longctx {version} is starting: PyTorch and transformers are being loaded", flush=True)


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


def quieten() -> None:
    """Show warnings on the first rank only, and none that one library gives another."""
    if not is_first_rank():
        warnings.simplefilter("ignore")
    for message in BETWEEN_LIBRARIES:
        for category in (FutureWarning, UserWarning):
            warnings.filterwarnings("ignore", message=message, category=category)


def end_refused(
    error: Exception, *, is_mine: bool | None = None, together: bool = False, code: int = USAGE_ERROR
) -> int:
    """Print why a run ends, and return its exit code.

    A `RefusedOnAllRanks` is printed by the one rank that reports it. Of other errors, which every rank may have, each
    machine's first rank prints one line, or a line for each mistake of an error that `is_listed`; other ranks leave
    theirs to the launcher.

    Args:
        is_mine: whether this rank reports it; None for what a `RefusedOnAllRanks` says, and True for other errors.
        together: whether all ranks end now, as they do after a `RefusedOnAllRanks`; then each waits for the others.
    """
    is_of_one_rank = hasattr(error, "is_mine")
    if getattr(error, "is_mine", True) if is_mine is None else is_mine:
        prints = is_of_one_rank or is_first_on_node()
        message = str(error) if hasattr(error, "is_listed") else " ".join(str(error).splitlines())
        tell(message, prints=prints, is_left=not prints)
    if together or is_of_one_rank:
        from longctx.ranks.agreement import exit_with_others

        exit_with_others()
    return code


def tell(message: str, *, prints: bool, is_left: bool = False, later: int = 0) -> None:
    """Print why a run ends, and write it to a file for the launcher's closing report.

    torchrun and `accelerate launch` end with a report on processes, which then holds every rank's error.

    Args:
        prints: whether this rank prints it.
        is_left: whether longctx's launcher is to print it.
        later: seconds added to the failure's time, since launchers report the earliest.
    """
    message = printable(message)
    if prints:
        print(*(f"longctx: error: {line}" for line in message.splitlines()), sep="\n", file=sys.stderr, flush=True)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        extra = {"timestamp": str(int(time.time()) + later), "is_left": is_left}
        report = json.dumps({"message": {"message": message, "extraInfo": extra}})
        whole = Path(f"{path}.{os.getpid()}")  # the launcher may read at any moment
        whole.write_text(report)
        os.replace(whole, path)


def printable(message: str) -> str:
    """Return the message with unprintable characters escaped, such as control characters in a file's name."""
    return "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in message)


def number(value: float) -> str:
    """Return a number as text with three digits: 12300 -> 12.3k, 0.00002 -> 2e-05."""
    size = abs(value)
    for unit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if 1e13 > size >= 0.9995 * unit:
            return f"{value / unit:.3g}{suffix}"
    return f"{value:.3g}"


def token_label(tokens: float, digits: int = 3) -> str:
    """Return a number of tokens with so many significant digits from 1,000 on: 131072 as `131k`, 1300000 as `1.3M`."""
    if tokens < 1000:
        return f"{tokens:.0f}"
    rounded = round(tokens, digits - len(str(int(tokens))))
    unit, suffix = (10**6, "M") if rounded >= 10**6 else (10**3, "k")
    return f"{rounded / unit:,.{digits}f}".rstrip("0").removesuffix(".") + suffix

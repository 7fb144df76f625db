"""What a run prints on stdout: coloured and fitted to a terminal, plain lines without control codes in a file or pipe.

The functions print on every rank that calls them; a run calls them on its first rank.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from longctx.launch.terminal import printable

LABEL = 10
"""Columns of a label and the space after it."""

GROUPS = (
    ("model", "weights", "files"),
    (
        *("data", "records", "overlong", "sample", "packing", "prompts", "targets", "mixture"),
        *("evaluate", "generate", "resume"),
    ),
    ("auto", "mesh", "backend", "engine", "device", "kernel", "memory", "liger", "compile"),
    ("batch", "tokens", "routers", "forecast", "steps", "time", "disk", "preset", "defaults"),
    ("note",),
)
"""Labels of the summary, in the order in which they are printed."""


class Line(NamedTuple):
    """A label and what is said under it."""

    label: str
    value: str
    explained: str | None = None
    """The value with its reasons, for --explain; None if it has none."""

    def text(self, *, explain: bool) -> str:
        return printable(self.explained if explain and self.explained is not None else self.value)

    def __str__(self) -> str:
        return f"{self.label:{LABEL}}{self.text(explain=True)}"


def show(lines: Iterable[Line], *, explain: bool = False) -> None:
    """Print lines, with their values below each other. A terminal wraps values; a file has one line for each."""
    width = row_width()
    for label, value in ((line.label, line.text(explain=explain)) for line in lines):
        parts = [value] if width is None else textwrap.wrap(value, max(width - LABEL, LABEL))
        for part in parts or [""]:
            show_row(Text.assemble((f"{label:{LABEL}}", "cyan"), part))
            label = ""


def show_summary(lines: Sequence[Line], *, explain: bool) -> None:
    """Print what was decided, in GROUPS with an empty line above each."""
    assert {line.label for line in lines} <= {label for group in GROUPS for label in group}, "a label without a group"
    for group in GROUPS:
        if of_group := [line for label in group for line in lines if line.label == label]:
            show_row(Text())
            show(of_group, explain=explain)
    if not explain and any(line.explained not in (None, line.value) for line in lines):
        show_row(Text("\n--explain prints the reasons, too.", "dim"))
    show_row(Text())


def say(message: str) -> None:
    """Print one message about the run. It may stand between the lines of two steps."""
    show_row(Text.assemble(("longctx: ", "dim"), printable(message)))


def show_result(message: str, numbers: str) -> None:
    """Print what the run has shown, apart from the lines above, and the numbers that show it."""
    show_row(Text.assemble("\n", (message, "bold green"), "\n", (numbers, "dim")))


def show_row(row: Text) -> None:
    """Print one line as it is."""
    _console().print(row, soft_wrap=True)


def row_width() -> int | None:
    """Return the terminal's width, or None in a file or pipe."""
    console = _console()
    return console.width if console.is_terminal else None


def show_for_now(message: str) -> None:
    """Show a message until the next call, in a terminal only; an empty one leaves an empty line to print on."""
    console = _console()
    if console.is_terminal:
        console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))
        console.print(Text(message, "dim", no_wrap=True, overflow="crop"), end="")


def _console() -> Console:
    # Of today's sys.stdout and environment: rich keeps the environment that there was when it was imported.
    return Console(markup=False, highlight=False, emoji=False, _environ=os.environ)

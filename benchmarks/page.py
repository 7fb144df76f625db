"""What all pages of results have in common: their headings, their tables, and how they are printed and written."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path


def row(cells: Iterable[object]) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def head(names: Sequence[str]) -> str:
    """Return the header of a Markdown table, two lines."""
    return f"{row(names)}\n{row(['---'] * len(names))}"


def table(names: Sequence[str], rows: Iterable[Iterable[object]]) -> list[str]:
    return [*head(names).splitlines(), *map(row, rows)]


def device() -> str:
    """Return the number of cores that this process may use, and their architecture."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cgroup = Path("/sys/fs/cgroup/cpu.max")
    quota = cgroup.read_text().split() if cgroup.exists() else ["max"]
    if quota[0] != "max":
        cores = round(int(quota[0]) / int(quota[1]))
    return f"{cores}-core CPU, {platform.machine()}"


def today() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d}"


def commit() -> str:
    """Return the commit of this checkout, with `-dirty` if files have changed; empty outside of a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def versions(packages: Iterable[str]) -> str:
    """Return the versions of Python and of packages."""
    return ", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in packages)])


def command(name: str, arguments: Sequence[str] | None = None) -> str:
    """Return the command that was typed, without --output, as Markdown code.

    Args:
        name: of the benchmark.
        arguments: None for those of this process.
    """
    given = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    given.add_argument("--output")
    _, rest = given.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    return f"`{shlex.join(['python', '-m', f'benchmarks.{name}', *rest])}`"


def heading(title: str, typed: str, *facts: str) -> list[str]:
    """Return the lines that begin a page: its title, the command, and the date with facts about the run."""
    return [f"# {title}", "", f"{typed}  ", "; ".join([today(), *facts]), ""]


def explained(doc: str | None) -> str:
    """Return what follows the first line and the usage in a module's docstring."""
    return (doc or "").split("\n\n", 2)[2].strip()


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help begins with the docstring of the benchmark."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc, formatter_class=raw)


class Report:
    """Prints lines at once and, if a path is given, also writes them there."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        if path is not None:
            path.write_text("")

    def add(self, *lines: str) -> None:
        print(*lines, sep="\n", flush=True)
        if self.path is not None:
            with self.path.open("a") as file:
                print(*lines, sep="\n", file=file)

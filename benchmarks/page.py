"""Pages of results, the same for all benchmarks: their heads, their tables, and lines that are printed and kept."""

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
    """A row of a Markdown table."""
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def head(names: Sequence[str]) -> str:
    """The two lines above the rows of a table."""
    return f"{row(names)}\n{row(['---'] * len(names))}"


def table(names: Sequence[str], rows: Iterable[Iterable[object]]) -> list[str]:
    return [*head(names).splitlines(), *map(row, rows)]


def device() -> str:
    """The processor and the cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cgroup = Path("/sys/fs/cgroup/cpu.max")
    quota = cgroup.read_text().split() if cgroup.exists() else ["max"]
    if quota[0] != "max":
        cores = round(int(quota[0]) / int(quota[1]))
    return f"{cores}-core CPU, {platform.machine()}"


def today() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d}"


def commit() -> str:
    """Of the checkout this runs in, `-dirty` where it has changes; empty outside one."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def versions(packages: Iterable[str]) -> str:
    """Of Python and of packages."""
    return ", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in packages)])


def command(name: str, arguments: Sequence[str] | None = None) -> str:
    """What was typed, but for --output, in backquotes.

    Args:
        name: of the benchmark.
        arguments: None for those of this process.
    """
    given = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    given.add_argument("--output")
    _, rest = given.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    return f"`{shlex.join(['python', '-m', f'benchmarks.{name}', *rest])}`"


def heading(title: str, typed: str, *facts: str) -> list[str]:
    """The title of a page, the command, and the date with what else there is to say of where it ran."""
    return [f"# {title}", "", f"{typed}  ", "; ".join([today(), *facts]), ""]


def explained(doc: str | None) -> str:
    """What a module's docstring says below its usage."""
    return (doc or "").split("\n\n", 2)[2].strip()


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the docstring of the benchmark."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc, formatter_class=raw)


class Report:
    """Lines that are printed as they come, and kept in a file where one is given."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        if path is not None:
            path.write_text("")

    def add(self, *lines: str) -> None:
        print(*lines, sep="\n", flush=True)
        if self.path is not None:
            with self.path.open("a") as file:
                print(*lines, sep="\n", file=file)

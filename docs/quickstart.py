"""Draw docs/images/quickstart.svg: what README's quick start prints in a terminal, from a real run.

    python docs/quickstart.py

takes a minute on two cores.
"""

from __future__ import annotations

import io
import os
import pty
import re
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

IMAGE = Path(__file__).parent / "images" / "quickstart.svg"
COLUMNS = 100
COMMAND = ("longctx", "train", "--sp", "4")


def run_in_terminal(command: list[str], folder: str) -> str:
    """Return what the command prints in a terminal of COLUMNS columns, with its control codes."""
    os.environ |= {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    os.chdir(folder)
    printed = bytearray()

    def read(descriptor: int) -> bytes:
        part = os.read(descriptor, 65536)
        printed.extend(part)
        return part

    if status := pty.spawn(command, read):
        raise SystemExit(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
    return printed.decode()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        printed = run_in_terminal([sys.executable, "-m", *COMMAND], folder)
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {' '.join(COMMAND)}", "bold"))
    for line in printed.replace("\r\n", "\n").splitlines():
        shown = line.rpartition("\r")[2]  # what stands in the line at last
        console.print(Text.from_ansi(shown))
    svg = console.export_svg(title="longctx")
    IMAGE.write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL), encoding="utf-8")  # fonts of the web


if __name__ == "__main__":
    main()

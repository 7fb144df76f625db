"""Draw docs/images/quickstart.svg, run_page.png and plan_page.png: what README's quick start prints, from a real run,
its page, and the page of README's plan.

    python docs/quickstart.py

takes two minutes on two cores. Pictures of pages need Chromium; without it, the old ones stay.
"""

from __future__ import annotations

import io
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.text import Text

from benchmarks.published import CONFIGS

IMAGES = Path(__file__).parent / "images"
MODEL = "Qwen/Qwen3-8B"
PLAN = f"longctx plan --model_name_or_path {MODEL} --gpus 8 --max_length 1048576"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PAGE_SIZE = "1280,983"
"""Width and height of the picture of the page, which ends with the second row of its charts."""
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


def picture(page: Path, image: Path) -> None:
    """Write a picture of the top of a page."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"{image} stays as it is: none of {', '.join(BROWSERS)} is installed.")
        return
    flags = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={PAGE_SIZE}", f"--screenshot={image}"]
    subprocess.run([browser, *flags, page.resolve().as_uri()], check=True, capture_output=True)
    Image.open(image).quantize(256).save(image, optimize=True)


def draw_plan() -> None:
    """Draw the page of README's plan, of the published configuration."""
    with tempfile.TemporaryDirectory() as folder:
        CONFIGS[MODEL].save_pretrained(Path(folder) / MODEL)
        command = [sys.executable, "-m", "longctx", *PLAN.split()[1:], "--no_learned", "--html", "plan.html"]
        subprocess.run(command, cwd=folder, check=True)
        picture(Path(folder) / "plan.html", IMAGES / "plan_page.png")


def main() -> None:
    draw_plan()
    with tempfile.TemporaryDirectory() as folder:
        printed = run_in_terminal([sys.executable, "-m", *COMMAND], folder)
        picture(Path(folder) / "longctx-output" / "run_report.html", IMAGES / "run_page.png")
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {' '.join(COMMAND)}", "bold"))
    for line in printed.replace("\r\n", "\n").splitlines():
        shown = line.rpartition("\r")[2]  # what stands in the line at last
        console.print(Text.from_ansi(shown))
    svg = console.export_svg(title="longctx")
    (IMAGES / "quickstart.svg").write_text(
        re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL), encoding="utf-8"
    )  # fonts of the web


if __name__ == "__main__":
    main()

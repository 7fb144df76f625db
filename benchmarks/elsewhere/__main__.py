"""The command line; see the package."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path

from .. import elsewhere, ranks
from ..packing import device, line
from .cases import CASES
from .steps import HEADER, PACKAGES, write_model


def commit() -> str:
    """` (commit …)` of the checkout this runs in; nothing outside one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f" (commit {done.stdout.strip()})" if done.returncode == 0 else ""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.elsewhere",
        description=elsewhere.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="cases to run")
    options = parser.parse_args(arguments)

    os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    ranks.start_server()
    import longctx

    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES) + f", longctx {longctx.__version__}"
    print("`" + " ".join(["python -m benchmarks.elsewhere", *sys.argv[1:]]) + f"`, {date.today()}")
    print(f"{device()}, gloo; Python {platform.python_version()}, {versions}{commit()}\n")
    print("loss and norm: mean loss and gradient norm of the first optimizer step, fp32.\n")
    print(line(HEADER), line(["---"] * len(HEADER)), sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder)
        for name in options.only:
            for row in CASES[name](folder):
                print(line(list(row)), flush=True)


if __name__ == "__main__":
    main()

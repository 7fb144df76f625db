"""The command line; see the package."""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path

from .. import memory
from .rows import DEVICE, HOST, MODELS, RESERVE, Results
from .steps import print_states, print_times
from .tables import length_tasks, print_lengths, print_published, published_tasks


def machine() -> str:
    """Processor and versions."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [s for s in Path("/proc/cpuinfo").read_text().splitlines() if s.startswith("model name")]
        name = names[0].split(":", 1)[1].strip() if names else name
    packages = ", ".join(f"{p} {version(p)}" for p in ("torch", "transformers", "accelerate", "trl", "deepspeed"))
    return f"{name}, {os.cpu_count()} CPUs; Python {platform.python_version()}, {packages}"


PARTS = ("lengths", "published", "states", "time")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory",
        description=memory.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["Qwen3-0.6B", "Llama-3.1-8B"])
    parser.add_argument("--sp", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="traces at a time")
    options = parser.parse_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    warnings.simplefilter("ignore")
    print("# Memory options\n")
    print(f"`{' '.join(['python -m benchmarks.memory', *given])}`  \n{machine()}  \n{time.strftime('%Y-%m-%d')}\n")
    print((memory.__doc__ or "").split("\n\n", 2)[2].rstrip())
    print(
        f"\nBudget: {DEVICE / 2**30:.2f} GiB of a device (80 GiB less {RESERVE / 1e9} GB) and {HOST / 1e9:.1f} GB of "
        "host memory for each device, an eighth of 1.9 TB. *alone*: with the first row. *together*: what is listed, "
        "with the first row. *device alone*: were host memory without end."
    )
    settings = list(itertools.product(options.models, options.sp)) if "lengths" in options.parts else []
    tasks = [task for model, sp in settings for task in length_tasks(model, sp)]
    if "published" in options.parts:
        tasks += published_tasks()
    results = Results(tasks, options.jobs)
    for model, sp in settings:
        print_lengths(model, sp, results)
    if "published" in options.parts:
        print_published(results)
    if "states" in options.parts:
        print_states()
    if "time" in options.parts:
        print_times()


if __name__ == "__main__":
    main()

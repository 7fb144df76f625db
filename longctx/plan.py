"""`longctx plan --model_name_or_path Qwen/Qwen3-8B --gpus 8`: what fits, how fast, and how to start it.

Everything is predicted (`longctx.forecast`). No weights are read, and no process is started. The exit code is 0, 1 if
nothing fits --max_length, or 2 for input that cannot be planned.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longctx.machine.here import Machine
    from longctx.settings.schema import Method
    from longctx.settings.values import Settings

LENGTHS = (32768, 131072, 524288, 1048576)
GPU = "H100"
GIB = 2**30


def main(arguments: list[str] | None = None) -> int:
    """Print the plan, and return the exit code."""
    options, flags = _parser().parse_known_args(arguments)
    from longctx.launch.terminal import end_refused, quieten
    from longctx.settings.dpo import DPO
    from longctx.settings.flags import SFT
    from longctx.settings.read import parse_flags

    quieten()
    try:
        method: Method = {"train": SFT, "dpo": DPO}[options.method]
        return _plan(options, parse_flags(flags, method))
    except ValueError as error:
        return end_refused(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="longctx plan",
        usage="longctx plan --model_name_or_path MODEL [--gpus 8] [--max_length TOKENS] [flags of longctx train]",
        description="For every attention backend and every sp, predict the longest sequence that fits, the speed and "
        "the memory. Recommend the fastest of them and print its command. Only the model's config.json is needed. "
        "Every flag of longctx train, --config among them, is taken and planned with.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--method", choices=("train", "dpo"), default="train", help="The command to plan: longctx train or longctx dpo."
    )
    parser.add_argument("--gpus", type=int, default=8, help="Number of GPUs on all nodes. Default: 8.")
    parser.add_argument("--gpus_per_node", type=int, default=8, help="Number of GPUs on one node. Default: 8.")
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--gpu", help=f"Kind of GPU: A100, H100, H200, B200, RTX 3090, RTX 4090, L40S. Default: {GPU}.")
    device.add_argument("--measure", action="store_true", help="Measure the speeds and the memory of this machine.")
    parser.add_argument("--gpu_memory_gib", type=float, help="Memory of one GPU. Default: that of --gpu.")
    parser.add_argument(
        "--host_memory_gib", type=float, help="Host memory of one node. Default: 221 GiB for each of its GPUs."
    )
    parser.add_argument(
        "--kernel", help='Attention kernel: "flash-attn 2", 3 or 4, or cuDNN. Default: those that a run takes on --gpu.'
    )
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=list(LENGTHS),
        help="Sequence lengths for which to predict speeds. --max_length is the one to recommend a command for; "
        "by default the longest of these that fits.",
    )
    parser.add_argument(
        "--document_lengths",
        type=Path,
        help="CSV file with the columns low,high,documents: the lengths of the packed documents.",
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of text.")
    parser.add_argument("--output", type=Path, help="Folder for plan.json, plan.md and plan.html.")
    parser.add_argument(
        "--html", type=Path, help="File for a page on which you choose devices, length and arrangement."
    )
    return parser


def _plan(options: argparse.Namespace, settings: Settings) -> int:
    from longctx.forecast.documents import drawn_from, one_document, one_pair
    from longctx.forecast.learned import corrected
    from longctx.report.plan_page import as_json, page_of
    from longctx.report.plan_text import Plan, as_text

    if not settings.is_set("model_name_or_path"):
        raise ValueError("--model_name_or_path is missing: name a model of the hub, a folder, or its config.json.")
    machine = _machine(options, settings)
    if machine.is_cpu:
        settings = settings.with_("command", use_cpu=True)
    elif settings["learned"] and not options.measure:
        machine = corrected(machine)
    file = options.document_lengths
    one = one_pair if settings.method.reads_pairs else one_document
    documents = one if file is None else drawn_from(file)
    plan = Plan(settings, machine, options.gpus, options.lengths, documents, documents_file=file)
    page = options.html or (options.output and options.output / "plan.html")
    for folder in filter(None, (options.output, page and page.parent)):
        with _writing(folder):  # before planning takes seconds
            folder.mkdir(parents=True, exist_ok=True)
    values = f"{json.dumps(as_json(plan), indent=1)}\n" if options.json or options.output else ""
    text = f"{as_text(plan, page)}\n"
    print(values if options.json else text, end="")
    files = {options.output / "plan.json": values, options.output / "plan.md": text} if options.output else {}
    if page is not None:
        files[page] = page_of(plan)
    for path, content in files.items():
        with _writing(path):
            path.write_text(content, encoding="utf-8")
    return 1 if plan.best(plan.length) is None else 0


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raise ValueError if the body fails to write this file or folder."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}. Name another one.") from error


def _machine(options: argparse.Namespace, settings: Settings) -> Machine:
    """Return the machine that the flags describe, or this one with its measured speeds."""
    from longctx.launch.spawn import device_count
    from longctx.machine.here import Machine
    from longctx.machine.speeds import TABLE

    for name in ("gpus", "gpus_per_node"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)} is below 1. Use at least 1.")
    for name in ("gpu_memory_gib", "host_memory_gib"):
        if getattr(options, name) is not None and not 0 < getattr(options, name) < math.inf:
            raise ValueError(f"--{name} {getattr(options, name)} is not a number above 0. Correct it, or leave it out.")
    if min(options.lengths) < 2:
        raise ValueError(f"--lengths {min(options.lengths)} is below 2: a token needs one to predict. Use at least 2.")
    per_node = min(options.gpus, options.gpus_per_node)
    if options.gpus % per_node:
        raise ValueError(
            f"--gpus {options.gpus} are not a whole number of nodes of --gpus_per_node {per_node}. Change one of them."
        )
    sizes = {"device_bytes": options.gpu_memory_gib, "host_bytes": options.host_memory_gib}
    memory = {name: size * GIB for name, size in sizes.items() if size is not None}
    if settings["use_cpu"] and (not options.measure or device_count()):
        raise ValueError(
            "--use_cpu True needs --measure on a machine without GPUs, since no speeds of CPUs are published. Add it, "
            "or leave --use_cpu out."
        )
    if not options.measure:
        gpu, known = options.gpu or GPU, TABLE.values("device_bytes")
        if gpu not in known:
            raise ValueError(f"--gpu {gpu} is not a kind of GPU that is known. Use one of {', '.join(known)}.")
        return Machine.of(gpu, per_node, options.kernel, **memory)
    from longctx.machine.measure import measure_speeds

    try:
        speeds = measure_speeds(per_node)
    except RuntimeError as error:
        raise ValueError(f"--measure: {error} Use --gpu with a device whose speeds are published.") from error
    here = Machine.here(device_count())
    if here.is_cpu:
        memory.pop("device_bytes", None)
    return replace(here, per_node=per_node, speeds=speeds, of_long_documents=None, kernel="", is_known=True, **memory)


if __name__ == "__main__":
    from longctx.__main__ import main as longctx

    sys.exit(longctx(["plan", *sys.argv[1:]]))

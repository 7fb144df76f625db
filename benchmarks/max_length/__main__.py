"""Measure the longest sequence that each backend trains: `longctx bench --gpus 1 2 4 8 --output DIR`.

For each backend and number of devices, the sweep finds the longest sequence that completes two optimizer steps of the
real trainer and the shortest that fails, and then measures the seconds of a step at fixed lengths. It writes
results.jsonl, table.md, max_length.png and seconds_per_step.png to DIR, and updates them after every probe. To continue
an interrupted sweep, run the same command again. At the end, it prints a summary in Markdown, to paste into an issue.

    longctx bench --gpus 8 --compare trl --minutes 60 --output DIR

This command compares every backend on eight GPUs with TRL's own ring and Ulysses, and stops after an hour. What tells
most comes first: a length that fits on each backend, the seconds at the lengths that all of them train, the longest
sequences, and then the other seconds.

Without GPUs, the ranks are processes on gloo, and --memory_budget_gib limits the bytes that their real steps allocate,
counted tensor by tensor. With GPUs, it limits torch's allocator.

The exit code is 0, 2 for settings that cannot be swept, 3 if the time was up first, or 130 after an interruption.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import shlex
import shutil
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import longctx

from .. import page
from ..ranks import run_group, start_server
from .results import SWEEP, Results, TimeIsUp
from .tables import summary

USAGE_ERROR, TIME_IS_UP, INTERRUPTED = 2, 3, 130
TRL = "trl"
"""Value of --compare."""
GIB = 2**30
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "trl")
SETTINGS = (
    "model",
    "memory",
    "budget_bytes",
    "precision",
    "max_length",
    "accelerate_config",
    "document_lengths",
    "warmup",
    "steps",
    "timeout",
    "device",
    "device_bytes",
    "versions",
)
"""What all probes in one folder have in common."""


def main(arguments: list[str] | None = None) -> int:
    """Sweep; returns the exit code."""
    options = _parser().parse_args(arguments)
    given, code = sys.argv[1:] if arguments is None else arguments, 0
    options.until = time.monotonic() + 60 * options.minutes
    try:
        _check(options)
        options.output.mkdir(parents=True, exist_ok=True)
        results = Results(options.output)
    except OSError as error:
        print(f"longctx: error: --output {options.output} cannot be written: {error}", file=sys.stderr)
        return USAGE_ERROR
    except ValueError as error:
        print(f"longctx: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    try:
        _sweep(options, results, shlex.join(["longctx", "bench", *given]))
    except TimeIsUp as cut:
        print(f"longctx: time is up; the same command goes on with {cut}", file=sys.stderr)
        code = TIME_IS_UP
    except ValueError as error:
        print(f"longctx: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("longctx: interrupted; the same command goes on from here", file=sys.stderr)
        return INTERRUPTED
    finally:
        shutil.rmtree(options.output / ".probe", ignore_errors=True)
        results.close()
    print(*summary(results.lines), sep="\n", end="\n\n")
    print(f"longctx: {', '.join(str(path) for path in sorted(options.output.glob('*.*')))}")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="longctx bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--gpus", type=int, nargs="+", default=[1, 2, 4, 8], help="Numbers of devices or gloo ranks. Default: 1 2 4 8."
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="Folder for the results. A sweep whose results are there continues."
    )
    parser.add_argument("--backends", nargs="+", help="Values of --sp_backend. Default: all but gather.")
    parser.add_argument(
        "--compare",
        choices=(TRL,),
        help="Measure TRL, too: its own context parallelism on FSDP2, and its own Ulysses on DeepSpeed.",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="Time for the sweep. Probes that are not expected to end in time are left out, and the same command "
        "continues with them. Default: no limit.",
    )
    parser.add_argument("--model_name_or_path", help="Model to train. Default: Qwen/Qwen3-8B with GPUs, tiny without.")
    parser.add_argument(
        "--memory", choices=("balanced", "longest", "fastest"), default="balanced", help="Default: balanced."
    )
    parser.add_argument(
        "--memory_budget_gib",
        type=float,
        help="Memory of a rank. Default: all of its GPU, or 0.02 without GPUs, for a short sweep of tiny.",
    )
    parser.add_argument("--lengths", type=int, nargs="+", help="Sequence lengths to time, in tokens.")
    parser.add_argument(
        "--precision",
        type=float,
        default=0.02,
        help="Largest gap between the longest sequence that fits and the shortest that fails, relative to the former. "
        "Default: 0.02.",
    )
    parser.add_argument("--max_length", type=int, default=1 << 26, help="Longest sequence to try. Default: 67108864.")
    parser.add_argument("--steps", type=int, help="Number of steps to time. Default: 10 with GPUs, 5 without.")
    parser.add_argument("--warmup", type=int, help="Number of steps before these. Default: 3 with GPUs, 1 without.")
    parser.add_argument(
        "--timeout", type=float, default=1800, help="Most seconds that a probe may take. Default: 1800."
    )
    parser.add_argument("--accelerate_config", help="Profile to run on: a name from configs/ or a path to a YAML file.")
    parser.add_argument(
        "--document_lengths",
        type=Path,
        help="CSV file with the columns low,high,documents: the distribution of lengths of the packed documents. "
        "Default: one document fills a sequence.",
    )
    return parser


def _check(options: argparse.Namespace) -> None:
    """What can be said of the flags alone.

    Raises:
        ValueError: for the first that cannot be, with its value, the limit and the remedy.
    """
    from longctx.attention.backends import BACKENDS  # which imports torch: --help does without

    known = list(BACKENDS.spread)
    options.gpus = sorted(set(options.gpus))
    options.backends = list(dict.fromkeys(options.backends or [name for name in known if name != "gather"]))
    if unknown := [name for name in options.backends if name not in known]:
        raise ValueError(
            f"--backends {' '.join(unknown)} is not known. Use some of {', '.join(known)}; "
            f"for TRL's own, --compare {TRL}."
        )
    if options.compare:
        options.backends.append(options.compare)
    if options.gpus[0] < 1:
        raise ValueError(f"--gpus {options.gpus[0]} is below 1. Name numbers of devices.")
    for name, least in (("steps", 1), ("warmup", 0), ("max_length", 2)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"--{name} {value} is below {least}. Use at least that.")
    if options.lengths is not None and min(options.lengths) < 2:
        raise ValueError(f"--lengths {min(options.lengths)} is below 2: a token needs one to predict.")
    for name in ("timeout", "memory_budget_gib", "minutes"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ValueError(f"--{name} {value} is not above 0.")
    if not 0 < options.precision < 1:
        raise ValueError(f"--precision {options.precision} is not between 0 and 1. 0.02 is two hundredths.")
    if options.output.exists() and not (options.output.is_dir() and os.access(options.output, os.W_OK)):
        raise ValueError(f"--output {options.output} is not a folder that can be written. Name another.")
    if options.document_lengths is not None and not options.document_lengths.is_file():
        raise ValueError(
            f"--document_lengths {options.document_lengths} is not a file. Name a CSV of low,high,documents."
        )
    if options.compare and options.document_lengths:
        raise ValueError(
            f"--compare {TRL} and --document_lengths: TRL spreads one document over devices, not several. "
            "Leave one of them out."
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError('Pictures need matplotlib. Install it: pip install "matplotlib>=3.9".')


def _sweep(options: argparse.Namespace, results: Results, command: str) -> None:
    use_cpu = _prepare_environment(options.output)
    start_server(f"{__package__}.rank")  # it imports while we do

    from longctx.forecast.documents import drawn_from, one_document
    from longctx.launch.terminal import quieten
    from longctx.machine.here import Machine

    from .combinations import combinations
    from .sweep import Settings, Sweep

    quieten()
    _fill_in(options, use_cpu)
    facts = _facts(options, use_cpu)
    _check_same(facts, results, options.output)
    budget = facts["budget_bytes"]
    memory = {"device_bytes": budget or facts["device_bytes"], "host_bytes": facts["host_bytes"]}
    found = list(
        combinations(
            options.model_name_or_path,
            gpus=options.gpus,
            backends=options.backends,
            memory=options.memory,
            profile=options.accelerate_config,
            data=options.output / ".probe" / "data.parquet",
        )
    )
    documents = one_document if options.document_lengths is None else drawn_from(options.document_lengths)
    settings = Settings(
        model=options.model_name_or_path,
        lengths=sorted(set(options.lengths)),
        machine=Machine.of(facts["device_kind"], options.gpus[-1], **memory),
        memory_fraction=None if use_cpu or not budget else budget / facts["device_bytes"],
        precision=options.precision,
        longest=options.max_length,
        steps=options.steps,
        warmup=options.warmup,
        timeout=options.timeout,
        until=options.until,
        documents=documents,
        commit=facts["commit"],
    )
    results.add({"kind": SWEEP, "command": command, "date": page.today(), **facts})
    Sweep(options.output, settings, results, found).run()


def _prepare_environment(output: Path) -> bool:
    """What ranks and this process have in common; returns whether there are no GPUs."""
    os.environ["HF_DATASETS_CACHE"] = str((output / ".probe" / "ranks" / "cache").absolute())  # goes with each probe
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # else ranks would be forked from a process that has seen CUDA
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    from longctx.training.engines import prefer_huge_pages, set_up_allocators
    from longctx.upstream.deepspeed_internals import stay_on_cpu

    prefer_huge_pages()
    set_up_allocators()
    use_cpu = not torch.cuda.is_available()
    if use_cpu:
        stay_on_cpu()
    return use_cpu


def _fill_in(options: argparse.Namespace, use_cpu: bool) -> None:
    """Defaults that depend on whether there are GPUs."""
    defaults: dict[str, Any] = {
        "model_name_or_path": "tiny" if use_cpu else "Qwen/Qwen3-8B",
        "lengths": [256, 512, 1024, 2048, 4096, 8192] if use_cpu else [16384, 65536, 262144, 1048576],
        "memory_budget_gib": 0.02 if use_cpu else None,
        "steps": 5 if use_cpu else 10,
        "warmup": 1 if use_cpu else 3,
    }
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def _facts(options: argparse.Namespace, use_cpu: bool) -> dict[str, Any]:
    """What the sweep is told and what it runs on.

    Raises:
        ValueError: for more devices than there are, or a larger budget than one has.
    """
    from longctx.launch.spawn import device_count
    from longctx.machine.here import host_bytes

    if not use_cpu and options.gpus[-1] > device_count():
        raise ValueError(f"--gpus {options.gpus[-1]}: {device_count()} are visible. Leave it out.")
    budget = options.memory_budget_gib * GIB if options.memory_budget_gib else None
    device: dict[str, Any] = {"device_kind": "CPU", "device_bytes": None} if use_cpu else _gpu(options.output)
    if not use_cpu and budget and budget > device["device_bytes"]:
        has = f"{device['device_bytes'] / GIB:.1f}"
        raise ValueError(f"--memory_budget_gib {options.memory_budget_gib}: a {device['device_kind']} has {has} GiB.")
    return device | {
        "device": page.device() if use_cpu else device["device_kind"],
        "host_bytes": host_bytes(),
        "use_cpu": use_cpu,
        "budget_bytes": budget,
        "model": options.model_name_or_path,
        "document_lengths": options.document_lengths and str(options.document_lengths.absolute()),
        **{n: getattr(options, n) for n in SETTINGS if n in vars(options) and n != "document_lengths"},
        "versions": {name: version(name) for name in PACKAGES} | {"longctx": longctx.__version__},
        "python": sys.version.split()[0],
        "commit": page.commit(),
    }


def _gpu(output: Path) -> dict[str, Any]:
    """Name and bytes of the first, asked by a process of its own, since asking takes some of them."""
    from .rank import describe_gpu

    asked = run_group(1, describe_gpu, None, environment={}, folder=output / ".probe" / "ranks", timeout=300)
    if not asked.reports:
        raise ValueError(f"There are GPUs, and the first does not answer: {asked.error}. See nvidia-smi.")
    return asked.reports[0]


def _check_same(facts: dict[str, Any], results: Results, output: Path) -> None:
    """
    Raises:
        ValueError: if the folder holds the probes of a sweep with other settings, with what differs.
    """
    before = next((line for line in results.lines if line["kind"] == SWEEP), None)
    if before is None:
        return
    differing = [f"{n} {before.get(n)} there, {facts[n]} here" for n in SETTINGS if before.get(n) != facts[n]]
    if differing:
        raise ValueError(
            f"--output {output} has a sweep with other settings: {'; '.join(differing)}. Name another folder, or use "
            "the same settings."
        )


if __name__ == "__main__":
    sys.exit(main())

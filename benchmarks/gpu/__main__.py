"""The first hour on one GPU: what it does in a second, beside what longctx predicts, in slices that go on.

    python -m benchmarks.gpu --minutes 25        # the same command goes on from there
    until python -m benchmarks.gpu; do :; done   # all of it, about an hour
    python -m benchmarks.gpu --only kernels ring "steps: QLoRA"
    python -m benchmarks.gpu --quick             # tiny sizes, minutes: does everything work here?
    python -m benchmarks.gpu --refit             # and have the forecast use what was measured from now on
    python -m benchmarks.gpu --output FOLDER     # the page once more on any machine, by today's forecast
    python -m benchmarks.gpu --refit --output FOLDER    # the same on any machine, from results that are there

- *device*, *checks*: what the GPU is, and a quick part of `pytest -m gpu`.
- *speeds*: those that `longctx plan --measure` finds.
- *kernels*: every attention kernel that is installed, on one document, packed documents and a window.
- *loss*: the loss's kernel in other blocks, with a soft cap and without top-1 tokens, beside torch's operators.
- *ring*: the ranks of a ring one after the other, without communication, against one call for the whole pack.
- *steps*: seconds and peak memory of real training steps, beside TRL's on the same rows, with Liger's kernels and
  without.
- *memory options*: what each memory option costs and saves, and how much of its copies hides behind kernels.
- *longest*: the longest sequence within a part of the device's memory, beside TRL's.

Models have random weights and real sizes, so that no hub is needed. Steps of one model share a process, as kernels do,
and each trainer starts anew in it; TRL with Liger's kernels, which replace classes of transformers, has its own. What
a process has measured is in benchmarks/results/gpu_DEVICE/results.jsonl before the next begins, and README.md there is
the page.

`--refit` writes the constants that the figures give into the table that all forecasts read,
longctx/machine/speeds.toml, once nothing is left to measure, and prints each with its source, before and after.
Nothing is written without the flag. To have the old constants again, check out the file.

Exit code 0 when nothing is left, 3 when the time was up first, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .. import page
from ..max_length.results import DECIDED, OK, OOM, REFUSED, TIMEOUT, Line, Results, read
from ..max_length.results import FILE as RESULTS_FILE
from ..ranks import run_group, start_server

USAGE_ERROR, TIME_IS_UP = 2, 3
RESULTS = Path(__file__).parents[1] / "results"
PACKAGES = ("torch", "triton", "transformers", "accelerate", "deepspeed", "trl", "liger-kernel", "flash-attn")
SHORTEST = 45.0
"""Seconds that have to be left for one more figure."""


def main(arguments: list[str] | None = None) -> int:
    """Measure what is left; returns the exit code."""
    options = _parser().parse_args(arguments)
    until = time.monotonic() + 60 * options.minutes
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # else processes would be forked from one that has seen CUDA
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
    import torch

    from .catalogue import FULL, QUICK, SLICES, Catalogue
    from .page import write_page
    from .probes import facts
    from .refit import constants_of

    if not torch.cuda.is_available():
        found = options.output and options.output / RESULTS_FILE
        if found and options.refit is not None:
            return _refit(read(found), options.refit)
        if found and found.exists() and (lines := list(read(found))):
            with tempfile.TemporaryDirectory() as models:
                write_page(options.output, Catalogue(QUICK if lines[0].get("quick") else FULL, Path(models)), lines)
            return 0
        print("longctx: error: there is no CUDA device. Run it on a machine with a GPU.", file=sys.stderr)
        return USAGE_ERROR

    from longctx.launch.terminal import quieten
    from longctx.machine.speeds import TABLE
    from longctx.training.engines import set_up_allocators

    set_up_allocators()
    quieten()
    start_server(f"{__package__}.probes")
    work = Path(options.work or options.output or RESULTS, ".probe").absolute()
    work.mkdir(parents=True, exist_ok=True)
    about = run_group(1, facts, None, environment={}, folder=work / "ranks", timeout=300)
    if not about.reports:
        print(f"longctx: error: the GPU does not answer: {about.error}\n{about.log}", file=sys.stderr)
        return USAGE_ERROR
    output = options.output or RESULTS / _folder_name(about.reports[0]["device"], options.quick)
    output.mkdir(parents=True, exist_ok=True)
    results = Results(output)
    os.environ["HF_DATASETS_CACHE"] = str((work / "ranks" / "cache").absolute())
    try:
        catalogue = Catalogue(QUICK if options.quick else FULL, work)
        if not any(line["kind"] == "device" for line in results.lines):
            known = constants_of(about.reports[0]["device"], TABLE)
            found = {**about.reports[0], **known, "quick": options.quick}
            results.add({"kind": "device", "name": "facts", "status": OK, **found, **_versions()})
        is_done = _measure(catalogue, results, options.only or SLICES, until, work)
        write_page(output, catalogue, results.lines)
    finally:
        results.close()
    print(f"longctx: {output}/README.md, results.jsonl")
    if is_done:
        shutil.rmtree(work)
        return 0 if options.refit is None else _refit(results.lines, options.refit)
    print("longctx: time is up; the same command goes on from here")
    return TIME_IS_UP


def _parser() -> argparse.ArgumentParser:
    parser = page.parser("gpu", __doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="SLICE[: TEXT]",
        help="Slices to measure, or what of a slice has this text in its name. Default: all.",
    )
    parser.add_argument("--minutes", type=float, default=25, help="After which it stops. Default: 25.")
    parser.add_argument("--quick", action="store_true", help="Tiny sizes, to see that all of it works.")
    parser.add_argument(
        "--refit",
        nargs="?",
        const="",
        metavar="FILE",
        help="Write the constants that the figures give into the forecast's table of speeds, or into FILE.",
    )
    parser.add_argument("--output", type=Path, help="Folder. Default: benchmarks/results/gpu_DEVICE.")
    parser.add_argument("--work", type=Path, help="Folder for models and rows, some 10 GB. Default: that of --output.")
    return parser


def _refit(lines: Iterable[Line], path: str) -> int:
    """Write the constants into the table at `path`, or into the forecast's where it is empty; returns the exit code."""
    from longctx.machine.speeds import FILE

    from .refit import refit

    table = Path(path) if path else FILE
    try:
        found = refit(list(lines), table)
    except (ValueError, OSError) as error:
        print(f"longctx: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    for change in found:
        print(change)
    print(f"longctx: {len(found)} constants of {table} have changed")
    return 0


def _measure(catalogue: Any, results: Results, slices: Sequence[str], until: float, work: Path) -> bool:
    """Until nothing is left, or the time is up; returns whether nothing is left."""
    tried: set[tuple[str, str]] = set()
    while True:
        left = [probe for probe in catalogue.left(results.lines, slices) if probe.key not in tried]
        seconds = until - time.monotonic()
        if not left:
            return not tried
        if seconds < SHORTEST:
            return False
        for probe, status, found in _run(catalogue, list(_together(left)), work, seconds):
            if status == TIMEOUT and time.monotonic() > until - 1:
                tried.add(probe.key)  # it has not had its time yet, and gets it when this goes on
                continue
            assert status in DECIDED, status
            line = {"kind": probe.slice, "name": probe.name, "status": status, **catalogue.predicted(probe), **found}
            results.add(line | dict(probe.about))
            told = f": {found['error']}" if status not in (OK, OOM, REFUSED) else ""
            print(f"{found['wall']:6.1f} s  {status:8} {probe.slice}: {probe.name}{told}", flush=True)


def _together(left: Sequence[Any]) -> Iterator[Any]:
    """Yield the first probe, and those after it that share its process."""
    first = left[0]
    yield first
    for probe in left[1:]:
        if first.is_alone or probe.shares != first.shares:
            return
        if not probe.is_alone:
            yield probe


def _run(
    catalogue: Any, probes: Sequence[Any], work: Path, seconds: float
) -> Iterator[tuple[Any, str, dict[str, Any]]]:
    """Run probes in one process, and yield each with what became of it and what it found, up to one that fails."""
    from .probes import make_model, perform

    ranks, path, started = work / "ranks", work / "found.jsonl", time.monotonic()
    path.unlink(missing_ok=True)
    if probes[0].model is not None:
        argument = (catalogue.sizes.models[probes[0].model], str(catalogue.model_folder(probes[0].model)))
        made = run_group(1, make_model, argument, environment={}, folder=ranks, timeout=seconds)
        if not made.reports:
            yield probes[0], made.status, {"error": made.error, "log": made.log[-2000:], "wall": made.seconds}
            return
        catalogue.write_rows(probes)
    argument = ([(probe.function, probe.argument) for probe in probes], str(path))
    seconds = min(seconds - (time.monotonic() - started), sum(probe.timeout for probe in probes))
    ending = run_group(1, perform, argument, environment={}, folder=ranks, timeout=seconds)
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for probe, one in zip(probes, found, strict=False):
        yield probe, REFUSED if one.pop("absent", False) else OK, one
    if len(found) < len(probes):
        wall = ending.seconds - sum(one["wall"] for one in found)
        yield probes[len(found)], ending.status, {"error": ending.error, "log": ending.log[-2000:], "wall": wall}


def _folder_name(device: str, is_quick: bool) -> str:
    words = re.sub(r"\W+", "_", device.removeprefix("NVIDIA ")).strip("_")
    return f"gpu_{words}" + "_quick" * is_quick


def _versions() -> dict[str, Any]:
    found = {name: version(name) for name in PACKAGES if importlib.util.find_spec(name.replace("-", "_"))}
    return {
        "date": page.today(),
        "python": sys.version.split()[0],
        "versions": found,
        "commit": page.commit(),
    }


if __name__ == "__main__":
    sys.exit(main())

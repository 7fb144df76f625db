"""How long sequences can be and how long a step takes, planned for known models on H100s: tables and pictures.

    python -m benchmarks.planned --output benchmarks/results/planned_h100_DATE                    # all
    python -m benchmarks.planned --models Qwen/Qwen3-0.6B --gpus 1 2 --output DIR

Predicted as `longctx plan` does, never measured. Nodes have eight H100s of 80 GB and 1.9 TB of host memory. All devices
share one sequence of one document, and a step trains on that sequence. Of a hybrid's splits, each number is that of the
one that does best. *plain* is without a memory option, *longest* with those that reach farthest. Seconds are those of
--memory auto, which leaves a tenth of the memory free if it can.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from longctx.forecast.documents import one_document
from longctx.launch.terminal import token_label
from longctx.machine.here import Machine
from longctx.report.plan_text import Plan, name_of
from longctx.settings.read import parse_flags

from . import page
from .pictures import Bar, Point, max_length_picture, seconds_per_step_picture
from .published import CONFIGS, HOST_BYTES

MODELS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-32B")
GPUS = (1, 2, 4, 8, 16, 32)
LENGTHS = tuple(k * 1024 for k in (32, 128, 512, 1024, 4096))
DEVICE, NODE = "H100", 8


class Row(NamedTuple):
    """A backend on so many devices, which all share one sequence."""

    gpus: int
    backend: str
    plain: int
    longest: int
    seconds: tuple[float | None, ...]
    """Of a step at LENGTHS; None where it does not fit."""


def rows(model: str, every: Sequence[int]) -> Iterator[Row]:
    """Yield the rows of a model, by the number of devices."""
    with tempfile.TemporaryDirectory() as folder:
        CONFIGS[model].save_pretrained(folder)
        for gpus in every:
            per_node = min(gpus, NODE)
            machine = Machine.of(DEVICE, per_node, host_bytes=HOST_BYTES * per_node / NODE)
            settings = parse_flags(["--model_name_or_path", folder, "--sp", str(gpus)])
            plan = Plan(settings, machine, gpus, lengths=LENGTHS, documents=one_document)
            names: dict[str, list[str]] = {}
            for name, run in plan.runs.items():
                names.setdefault("one device" if gpus == 1 else run.backend.name, []).append(name)
            for backend, group in names.items():
                reaches = [plan.reaches[name] for name in group]
                fitting = [
                    [one.cost.step_seconds for one in plan.choices[n] if name_of(one.shape) in group and one.cost.fits]
                    for n in LENGTHS
                ]
                yield Row(
                    gpus,
                    backend,
                    max((plain.length for plain, _ in reaches if plain), default=0),
                    max(longest.length for _, longest in reaches),
                    tuple(min(seconds, default=None) for seconds in fitting),
                )


def cells_of(row: Row) -> list[str]:
    seconds = ["OOM" if value is None else f"{value:,.1f}" for value in row.seconds]
    return [str(row.gpus), row.backend, f"{row.plain:,}", f"{row.longest:,}", *seconds]


def main(arguments: list[str] | None = None) -> int:
    parser = page.parser("planned", __doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=tuple(CONFIGS))
    parser.add_argument("--gpus", type=int, nargs="+", default=list(GPUS))
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    command = f"`python -m benchmarks.planned --output {options.output}`"
    facts = "bf16 with fp32 master weights", "all predicted, nothing measured"
    lines = [
        *page.heading(f"Planned for {DEVICE} 80 GB", command, *facts),
        page.explained(__doc__),
        "",
        "*plain* and *longest* give the longest sequences, in tokens. The columns to their right give the seconds of a "
        "step on one sequence of the length at their head.",
        "",
    ]
    heads = ["devices", "backend", "plain", "longest", *map(token_label, LENGTHS)]
    for model in options.models:
        found, name = list(rows(model, options.gpus)), model.split("/")[1]
        folder, note = options.output / name, f"predicted, {DEVICE} 80 GB, 8 a node"
        folder.mkdir(parents=True, exist_ok=True)
        bars = [Bar(row.backend, row.gpus, row.longest or None) for row in found]
        points = [
            Point(row.backend, row.gpus, length, seconds)
            for row in found
            for length, seconds in zip(LENGTHS, row.seconds, strict=True)
        ]
        max_length_picture(folder / "max_length.png", bars, title=name, note=note)
        seconds_per_step_picture(folder / "seconds_per_step.png", points, title=name, note=note)
        lines += [f"## {name}", "", *page.table(heads, map(cells_of, found)), ""]
        lines += [f"![longest sequences]({name}/max_length.png)", f"![seconds]({name}/seconds_per_step.png)", ""]
    (options.output / "table.md").write_text("\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

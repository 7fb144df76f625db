"""How long sequences can be and how long a step takes, planned for known models on H100s: tables and pictures.

    python -m benchmarks.planned --output benchmarks/results/planned_h100_DATE                    # all
    python -m benchmarks.planned --models Qwen/Qwen3-0.6B --gpus 1 2 --output DIR

Predicted, never measured: memory by `longctx.forecast.closed_form`, time by `longctx.forecast.step_time`. Nodes have
eight H100s of 80 GB and 1.9 TB of host memory. All devices share one sequence, and a step trains on that sequence.
Hybrid is the split that does best. *balanced* and *longest* are presets of --memory. Seconds are those of --memory
auto, which leaves a tenth of the memory free, or of the faster preset where only a preset fits. Everything is in
planned.jsonl, with memory by category at the longest sequence.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from longctx.forecast.candidates import DEVICE_BYTES, Candidate, Machine, Outlook, candidates, outlook
from longctx.forecast.closed_form import predict
from longctx.forecast.step_time import Speeds
from longctx.report.pictures import draw_lengths_and_seconds
from transformers import PretrainedConfig

from longctx.attention.backends import BACKENDS
from longctx.forecast.memory_options import AUTO
from longctx.launch.terminal import token_label

from .published import CONFIGS, HOST_BYTES

MODELS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-32B")
GPUS = (1, 2, 4, 8, 16, 32)
LENGTHS = tuple(k * 1024 for k in (32, 128, 512, 1024, 4096))
PRESETS = ("balanced", "longest")
DEVICE, KERNEL, NODE = "H100", "flash-attn 2", 8

Table = dict[Candidate, list[Outlook]]


def machine(gpus: int) -> Machine:
    """As many H100s; of a node that has less than eight, its part of the host memory."""
    per_node = min(gpus, NODE)
    return Machine(
        gpus=gpus,
        gpus_per_node=per_node,
        device=DEVICE,
        device_bytes=DEVICE_BYTES[DEVICE],
        host_bytes=HOST_BYTES * per_node / NODE,
        kernel=KERNEL,
        speeds=Speeds.of(DEVICE, KERNEL),
    )


def found_on(gpus: int, config: PretrainedConfig) -> list[Candidate]:
    """Return the candidates of which all devices share one sequence."""
    return [c for c in candidates(config, machine(gpus), presets=(*PRESETS, AUTO)) if c.dims.sp == gpus]


def plan(config: PretrainedConfig, gpus: Sequence[int]) -> Table:
    """Every candidate on so many devices, at LENGTHS."""
    return {
        candidate: [outlook(candidate, machine(n), length) for length in LENGTHS]
        for n in gpus
        for candidate in found_on(n, config)
    }


def lines_of(table: Table) -> list[str]:
    """A Markdown table: a row for each number of devices and backend."""
    heads = ["devices", "backend", *(f"longest, {preset}" for preset in PRESETS), *map(token_label, LENGTHS)]
    lines = ["| " + " | ".join(heads) + " |", "| ---: | --- " + "| ---: " * (len(heads) - 2) + "|"]
    for gpus in dict.fromkeys(c.dims.world_size for c in table):
        for backend in BACKENDS:
            group = [c for c in table if (c.dims.world_size, c.backend) == (gpus, backend)]
            if not group:
                continue
            longest = [max(c.max_length for c in group if c.memory == preset) for preset in PRESETS]
            seconds = []
            for i in range(len(LENGTHS)):
                times = [o.time.seconds for c in group if (o := table[c][i]).time is not None]
                seconds.append(f"{min(times):,.1f}" if times else "OOM")
            name = "one device" if backend == "local" else backend
            lines.append("| " + " | ".join([str(gpus), name, *(f"{n:,}" for n in longest), *seconds]) + " |")
    return lines


def records(model: str, table: Table) -> list[dict[str, Any]]:
    """One for each candidate."""
    return [
        {
            "model": model,
            "predicted": True,
            "devices": candidate.dims.world_size,
            "device": DEVICE,
            "kernel": KERNEL,
            "backend": candidate.backend,
            "ring": candidate.dims.ring,
            "ulysses": candidate.dims.ulysses,
            "engine": candidate.engine,
            "memory": candidate.memory,
            "max_length": candidate.max_length,
            "binds": candidate.binds,
            "at_max_length": _memory(candidate),
            "seconds_per_step": {str(o.length): round(o.time.seconds, 2) if o.time else None for o in outlooks},
        }
        for candidate, outlooks in table.items()
    ]


def _memory(candidate: Candidate) -> dict[str, dict[str, int]]:
    if not candidate.max_length:
        return {}
    peak = predict(candidate.setup, candidate.max_length)
    return {
        side: {name: round(size) for name, size in sizes.items()}
        for side, sizes in (("device_bytes", peak.device), ("host_bytes", peak.host))
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.planned", description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=tuple(CONFIGS))
    parser.add_argument("--gpus", type=int, nargs="+", default=list(GPUS))
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    _, _, about = __doc__.partition("--output DIR\n\n")
    page = [
        f"# Planned for {DEVICE} 80 GB",
        "",
        f"`python -m benchmarks.planned --output {options.output}`  ",
        f"{datetime.now(UTC):%Y-%m-%d}; {KERNEL}, bf16 with fp32 master weights; all predicted, nothing measured",
        "",
        about.strip(),
        "",
        "The first columns of lengths are the longest sequences, in tokens. The others are the seconds of a step of "
        "one sequence of that length.",
        "",
    ]
    found = []
    for model in options.models:
        table = plan(CONFIGS[model], options.gpus)
        name = model.split("/")[1]
        folder = options.output / name
        folder.mkdir(exist_ok=True)
        note = f"predicted, {DEVICE} 80 GB, 8 a node; --memory {', '.join(PRESETS)} or auto"
        draw_lengths_and_seconds(folder, table, devices=lambda c: c.dims.world_size, title=name, note=note)
        page += [f"## {name}", "", *lines_of(table), ""]
        page += [f"![longest sequences]({name}/max_length.png)", f"![seconds]({name}/seconds_per_step.png)", ""]
        found += records(model, table)
    (options.output / "table.md").write_text("\n".join(page))
    (options.output / "planned.jsonl").write_text("".join(json.dumps(record) + "\n" for record in found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

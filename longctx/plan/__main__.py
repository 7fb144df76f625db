"""`python -m longctx.plan --model_name_or_path Qwen/Qwen3-8B --gpus 8`: what fits, how fast, and how to start it.

All of it is predicted: memory by `longctx.memory.closed_form`, time by `longctx.step_time`. No weights are read, and
no process is started. Exit code 0, 1 if no set-up takes --max_length, 2 for what cannot be planned.
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from longctx.levers import PRESETS

USAGE_ERROR = 2
LENGTHS = (32768, 131072, 524288, 1048576)


def main(arguments: list[str] | None = None) -> int:
    """Print the plan; returns the exit code."""
    options = _parser().parse_args(arguments)
    from longctx.launch.terminal import quieten, refuse

    quieten()
    try:
        return _plan(options)
    except ValueError as error:
        refuse(error)
        return USAGE_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m longctx.plan",
        description="Predict, for every backend and degree, the longest sequence that fits, the seconds of a step and "
        "the memory it takes; recommend one and print its launch command. Needs the model's config.json only.",
        allow_abbrev=False,
    )
    parser.add_argument("--model_name_or_path", required=True, help="Hub name, folder, or tiny.")
    parser.add_argument("--model_revision", default="main")
    parser.add_argument("--gpus", type=int, default=8, help="Devices of all nodes. Default: 8.")
    parser.add_argument("--gpus_per_node", type=int, default=8)
    parser.add_argument("--gpu", default="H100", choices=tuple(_KERNELS))
    parser.add_argument("--gpu_memory_gib", type=float, help="Of one device. Default: that of --gpu (80 GB kinds).")
    parser.add_argument(
        "--host_memory_gib", type=float, help="Of one node. Default: 221 GiB (1.9 TB / 8) for each of its devices."
    )
    parser.add_argument("--kernel", help="flash-attn 2, 3 or 4, or cuDNN. Default: what is common on --gpu.")
    parser.add_argument("--memory", nargs="+", default=["balanced", "longest"], choices=tuple(PRESETS))
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="Rows to give step times for.")
    parser.add_argument(
        "--max_length", type=int, help="The row to recommend a set-up for. Default: the longest of --lengths that fits."
    )
    parser.add_argument(
        "--document_lengths", type=Path, help="CSV of low,high,documents: rows are packed with such documents."
    )
    parser.add_argument("--use_peft", action="store_true", help="Train an adapter (LoRA).")
    parser.add_argument("--lora_r", type=int, default=16)
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of tables.")
    return parser


_KERNELS = {"A100": "flash-attn 2", "H100": "flash-attn 2", "H200": "flash-attn 2", "B200": "cuDNN"}


def _plan(options: argparse.Namespace) -> int:
    from longctx.attention.support import check_model
    from longctx.model import load_config
    from longctx.plan.candidates import candidates, outlook, recommend

    config = load_config(options.model_name_or_path, revision=options.model_revision)
    check_model(config)
    machine = _machine(options)
    adapter: dict[str, Any] = {"use_peft": True, "lora_r": options.lora_r} if options.use_peft else {}
    found = candidates(config, machine, presets=options.memory, settings=adapter)
    documents = _documents(options.document_lengths)
    lengths = sorted({*options.lengths, *([options.max_length] if options.max_length else [])})
    table = {c: [outlook(c, machine, length, documents) for length in lengths] for c in found}
    longest = max(candidate.max_length for candidate in found)
    wanted = options.max_length or max((n for n in lengths if n <= longest), default=min(lengths))
    best = recommend([outlooks[lengths.index(wanted)] for outlooks in table.values()])
    result = {
        "model": options.model_name_or_path,
        "machine": asdict(machine),
        "predicted": True,
        "candidates": [_as_dict(candidate, outlooks) for candidate, outlooks in table.items()],
        "recommendation": None if best is None else _recommendation(best, options),
    }
    print(json.dumps(result, indent=1) if options.json else _as_text(result, lengths))
    return 0 if best is not None else 1


def _machine(options: argparse.Namespace) -> Any:
    from longctx.plan.candidates import DEVICE_BYTES, GIB, HOST_BYTES_PER_DEVICE, Machine
    from longctx.step_time import Speeds

    for name in ("gpus", "gpus_per_node", "lora_r"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)} is below 1.")
    for name in ("gpu_memory_gib", "host_memory_gib", "max_length"):
        if getattr(options, name) is not None and getattr(options, name) <= 0:
            raise ValueError(f"--{name} {getattr(options, name)} is not above 0.")
    if min(options.lengths) < 2:
        raise ValueError(f"--lengths {min(options.lengths)} is below 2: a token needs one to predict.")
    per_node = min(options.gpus, options.gpus_per_node)
    if options.gpus % per_node:
        raise ValueError(
            f"--gpus {options.gpus} are no whole number of nodes of --gpus_per_node {per_node}. Change one of them."
        )
    kernel = options.kernel or _KERNELS[options.gpu]
    return Machine(
        gpus=options.gpus,
        gpus_per_node=per_node,
        device=options.gpu,
        device_bytes=options.gpu_memory_gib * GIB if options.gpu_memory_gib else DEVICE_BYTES[options.gpu],
        host_bytes=options.host_memory_gib * GIB if options.host_memory_gib else HOST_BYTES_PER_DEVICE * per_node,
        kernel=kernel,
        speeds=Speeds.of(options.gpu, kernel),
    )


def _documents(path: Path | None) -> Any:
    """Length of a row -> its documents, drawn from the histogram, the same each time."""
    from longctx.plan.candidates import one_document

    if path is None:
        return one_document
    try:
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        bins = [(int(row["low"]), int(row["high"]), float(row["documents"])) for row in csv.DictReader(lines)]
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(
            f"--document_lengths {path} is no CSV with columns low,high,documents of whole numbers: {error!r}."
        ) from None
    if not bins or min(low for low, _, _ in bins) < 1 or sum(number for *_, number in bins) <= 0:
        raise ValueError(f"--document_lengths {path} has no document of at least 1 token.")

    lows, highs, numbers = (np.array(column) for column in zip(*bins, strict=True))

    def draw(length: int) -> list[int]:
        random = np.random.default_rng(0)
        drawn = np.zeros(0, np.int64)
        while drawn.sum() < length:
            which = random.choice(len(bins), size=1024, p=numbers / numbers.sum())
            drawn = np.append(drawn, random.integers(lows[which], highs[which] + 1))
        ends = np.minimum(np.cumsum(drawn), length)
        documents = np.diff(ends, prepend=0)
        return documents[documents > 0].tolist()

    return draw


def _as_dict(candidate: Any, outlooks: Sequence[Any]) -> dict[str, Any]:
    return {
        "backend": candidate.backend,
        "sp": candidate.dims.sp,
        "ring": candidate.dims.ring,
        "ulysses": candidate.dims.ulysses,
        "dp": candidate.dims.dp,
        "engine": candidate.engine,
        "memory": candidate.memory,
        "max_length": candidate.max_length,
        "binds": candidate.binds,
        "at": [
            {
                "length": o.length,
                "fits": o.time is not None,
                "seconds_per_step": o.time.seconds if o.time else None,
                "tokens_per_second_per_device": o.speed if o.time else None,
                "seconds": dict(o.time.parts) if o.time else {},
                "device_bytes": dict(o.memory.device),
                "host_bytes": dict(o.memory.host),
            }
            for o in outlooks
        ],
    }


def _recommendation(best: Any, options: argparse.Namespace) -> dict[str, Any]:
    command = ["accelerate", "launch", "--num_processes", str(options.gpus)]
    if options.gpus > options.gpus_per_node:
        command += ["--num_machines", str(options.gpus // options.gpus_per_node), "--machine_rank", "RANK"]
        command += ["--main_process_ip", "HOST", "--main_process_port", "29500"]
    command += ["-m", "longctx.train", "--model_name_or_path", options.model_name_or_path, "--dataset_name", "DATA"]
    command += ["--max_length", str(best.length), *best.candidate.flags()]
    if options.use_peft:
        command += ["--use_peft", "--lora_r", str(options.lora_r)]
    return _as_dict(best.candidate, [best]) | {"name": str(best.candidate), "command": shlex.join(command)}


def _as_text(result: dict[str, Any], lengths: Sequence[int]) -> str:
    machine, best = result["machine"], result["recommendation"]
    head = (
        f"{result['model']} on {machine['gpus']} x {machine['device']}, {machine['device_bytes'] / 2**30:.0f} GiB "
        f"each, {machine['host_bytes'] / 2**30:,.0f} GiB of host memory a node, {machine['kernel']}, bf16; predicted"
    )
    rows = [["backend", "sp", "dp", "engine", "--memory", "longest", "full is", *(f"s at {n:,}" for n in lengths)]]
    for c in result["candidates"]:
        name = f"{c['backend']} {c['ulysses']} x {c['ring']}" if c["backend"] == "hybrid" else c["backend"]
        times = [f"{a['seconds_per_step']:,.1f}" if a["fits"] else "OOM" for a in c["at"]]
        rows.append(
            [name, str(c["sp"]), str(c["dp"]), c["engine"], c["memory"], f"{c['max_length']:,}", c["binds"], *times]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    if best is None:
        longest = max(c["max_length"] for c in result["candidates"])
        return "\n".join([head, "", *lines, "", f"No set-up takes that; the longest is {longest:,} tokens."])
    at = best["at"][0]
    parts = [
        f"{what}: " + ", ".join(f"{name} {size / 2**30:.1f}" for name, size in at[key].items() if size >= 2**26)
        for what, key in (("GiB of a device", "device_bytes"), ("GiB of a node's host memory", "host_bytes"))
        if at[key]
    ]
    seconds = ", ".join(f"{name} {value:,.1f}" for name, value in at["seconds"].items())
    return "\n".join(
        [
            head,
            "",
            *lines,
            "",
            f"Recommended for {at['length']:,} tokens: {best['name']}, --memory {best['memory']}; "
            f"{at['seconds_per_step']:,.1f} s a step ({seconds}), "
            f"{at['tokens_per_second_per_device']:,.0f} tokens/s a device",
            *parts,
            "",
            best["command"],
        ]
    )


if __name__ == "__main__":
    sys.exit(main())

"""`python -m longctx.plan --model_name_or_path Qwen/Qwen3-8B --gpus 8`: what fits, how fast, and how to start it.

Everything is predicted: memory by `longctx.forecast.closed_form`, which `longctx.forecast.calibrate` corrects for the
model at hand, and time by `longctx.forecast.step_time`. No weights are read, and no process is started. The exit code
is 0, 1 if no set-up fits --max_length, or 2 for input that cannot be planned.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from longctx.forecast.memory_options import PRESETS

USAGE_ERROR = 2
WIDTH = 120
"""Width of printed lines."""
LENGTHS = (32768, 131072, 524288, 1048576)


def main(arguments: list[str] | None = None) -> int:
    """Print the plan, and return the exit code."""
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
        prog="longctx plan",
        description="Predict, for every backend and degree, the longest sequence that fits, the seconds of a step and "
        "the memory it takes; recommend one and print its launch command. Needs the model's config.json only.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model_name_or_path", required=True, help="Hub name, folder, config.json itself, or tiny; no weights needed."
    )
    parser.add_argument("--model_revision", default="main")
    parser.add_argument("--gpus", type=int, default=8, help="Devices of all nodes. Default: 8.")
    parser.add_argument("--gpus_per_node", type=int, default=8)
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--gpu", choices=tuple(_KERNELS), help=f"Default: {GPU}.")
    device.add_argument("--measure", action="store_true", help="Measure speeds and memory of the machine at hand.")
    parser.add_argument("--gpu_memory_gib", type=float, help="Of one device. Default: that of --gpu (80 GB kinds).")
    parser.add_argument(
        "--host_memory_gib", type=float, help="Of one node. Default: 221 GiB (1.9 TB / 8) for each of its devices."
    )
    parser.add_argument("--kernel", help="flash-attn 2, 3 or 4, or cuDNN. Default: what is common on --gpu.")
    parser.add_argument(
        "--memory", nargs="+", choices=tuple(PRESETS), help="Default: balanced longest; balanced with --load_in_4bit."
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="Rows to give step times for.")
    parser.add_argument(
        "--max_length", type=int, help="The row to recommend a set-up for. Default: the longest of --lengths that fits."
    )
    parser.add_argument(
        "--document_lengths", type=Path, help="CSV of low,high,documents: rows are packed with such documents."
    )
    parser.add_argument("--rope_scaling", help="Extend the model's context, as in longctx.train.")
    for name, meaning in {
        "use_peft": "Train an adapter (LoRA).",
        "load_in_4bit": "Keep the weights of layers in 4 bits (QLoRA).",
        "use_bnb_nested_quant": "And their scales in 8.",
    }.items():
        parser.add_argument(f"--{name}", type=_boolean, nargs="?", const=True, default=False, help=meaning)
    parser.add_argument("--lora_r", type=int, default=16)
    parser.add_argument(
        "--no_calibration", action="store_true", help="Trust the closed form: no traces of the model, seconds less."
    )
    parser.add_argument("--trace", action="store_true", help="Trace the recommended step, too; takes a minute or so.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of tables.")
    parser.add_argument("--output", type=Path, help="Folder for plan.json, plan.md and pictures (matplotlib).")
    return parser


def _boolean(text: str) -> bool:
    from transformers.hf_argparser import string_to_bool

    return bool(string_to_bool(text))


GPU = "H100"
_KERNELS = {"A100": "flash-attn 2", "H100": "flash-attn 2", "H200": "flash-attn 2", "B200": "cuDNN"}


def _plan(options: argparse.Namespace) -> int:
    from longctx.forecast.calibrate import calibrate, corrected
    from longctx.forecast.candidates import candidates, outlook, recommend
    from longctx.forecast.documents import drawn_from, one_document
    from longctx.model.allow_list import check_model
    from longctx.model.load import load_config
    from longctx.model.rope import extended, parse_rope_scaling
    from longctx.model.tied_head import untie_as_stored

    config = load_config(options.model_name_or_path, revision=options.model_revision)
    untie_as_stored(config, options.model_name_or_path, revision=options.model_revision)
    if scaling := parse_rope_scaling(options.rope_scaling):
        config = extended(config, scaling)
    check_model(config)
    machine = _machine(options)
    presets = options.memory or (["balanced"] if options.load_in_4bit else ["balanced", "longest"])
    documents = one_document if options.document_lengths is None else drawn_from(options.document_lengths)
    found = candidates(config, machine, presets=presets, settings=_adapter(options))
    calibrations: list[Any] = []
    if not options.no_calibration:
        calibrations = calibrate(config, found)
        found = corrected(found, machine, calibrations)
    lengths = sorted({*options.lengths, *([options.max_length] if options.max_length else [])})
    table = {c: [outlook(c, machine, length, documents) for length in lengths] for c in found}
    longest = max(candidate.max_length for candidate in found)
    wanted = options.max_length or max((n for n in lengths if n <= longest), default=min(lengths))
    there = [outlooks[lengths.index(wanted)] for outlooks in table.values()]
    best = recommend(there)
    result = {
        "model": options.model_name_or_path,
        "machine": asdict(machine),
        "predicted": True,
        "presets": presets,
        "lengths": lengths,
        "calibration": [calibration._asdict() for calibration in calibrations],
        "candidates": [_as_dict(candidate, outlooks) for candidate, outlooks in table.items()],
        "recommendation": None if best is None else _recommendation(best, there, options),
        "trace": _retraced(config, best, machine) if options.trace and best is not None else None,
    }
    print(json.dumps(result, indent=1) if options.json else as_text(result))
    if options.output is not None:
        _write(options.output, result, table, best, machine)
    return 0 if best is not None else 1


def _adapter(options: argparse.Namespace) -> dict[str, Any]:
    """Return the flags of longctx.train about adapters that affect memory."""
    names = ("model_name_or_path", "use_peft", "lora_r", "load_in_4bit", "use_bnb_nested_quant")
    return {name: getattr(options, name) for name in names}


def _retraced(config: Any, best: Any, machine: Any) -> dict[str, Any]:
    from longctx.forecast.calibrate import retrace

    try:
        return asdict(retrace(config, best, machine))
    except (RuntimeError, ValueError, TypeError) as error:
        raise ValueError(f"--trace: this model's step does not run on fake tensors. Leave it out. {error}") from error


def _write(folder: Path, result: dict[str, Any], table: Any, best: Any, machine: Any) -> None:
    from longctx.report.forecast import draw_lengths_and_seconds, draw_memory

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "plan.md").write_text(as_text(result, markdown=True) + "\n")
    name = f"{_folder(result['model']).name} on {machine.gpus} x {machine.device}"
    draw_lengths_and_seconds(
        folder, table, devices=lambda c: c.dims.sp, title=f"{name}, by devices a row", note="predicted"
    )
    if best is not None:
        title = f"{name}: {best.candidate.label}, {best.length:,} tokens"
        draw_memory(folder / "memory.png", best, machine, title=title, note="predicted")


def _machine(options: argparse.Namespace) -> Any:
    from longctx.forecast.candidates import DEVICE_BYTES, GIB, HOST_BYTES_PER_DEVICE, Machine
    from longctx.forecast.step_time import Speeds

    for name in ("gpus", "gpus_per_node", "lora_r"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)} is below 1. Use at least 1.")
    for name in ("gpu_memory_gib", "host_memory_gib", "max_length"):
        if getattr(options, name) is not None and not 0 < getattr(options, name) < math.inf:
            raise ValueError(f"--{name} {getattr(options, name)} is not above 0, or no number. Use a number above 0.")
    if min(options.lengths) < 2:
        raise ValueError(f"--lengths {min(options.lengths)} is below 2: a token needs one to predict. Use at least 2.")
    per_node = min(options.gpus, options.gpus_per_node)
    if options.gpus % per_node:
        raise ValueError(
            f"--gpus {options.gpus} are no whole number of nodes of --gpus_per_node {per_node}. Change one of them."
        )
    gpu = options.gpu or GPU
    kernel = options.kernel or _KERNELS[gpu]
    device_bytes, host_bytes = DEVICE_BYTES[gpu], HOST_BYTES_PER_DEVICE * per_node
    if options.measure:
        speeds, (device_bytes, host_bytes) = _measured(per_node)
    else:
        speeds = Speeds.of(gpu, kernel)
    return Machine(
        gpus=options.gpus,
        gpus_per_node=per_node,
        device="device of this machine" if options.measure else gpu,
        device_bytes=options.gpu_memory_gib * GIB if options.gpu_memory_gib else device_bytes,
        host_bytes=options.host_memory_gib * GIB if options.host_memory_gib else host_bytes,
        kernel="the kernel measured" if options.measure else kernel,
        speeds=speeds,
    )


def _measured(num_devices: int) -> Any:
    """Return (speeds, (bytes of a device, bytes of the host))."""
    from longctx.forecast.measure import device_memory, measure_speeds

    try:
        return measure_speeds(num_devices), device_memory()
    except RuntimeError as error:
        raise ValueError(f"--measure: {error} Use --gpu with a device that speeds are published of.") from error


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


def _recommendation(best: Any, there: Sequence[Any], options: argparse.Namespace) -> dict[str, Any]:
    from longctx.forecast.candidates import why

    command = ["accelerate", "launch", *(["--multi_gpu"] if options.gpus > 1 else [])]
    command += ["--num_processes", str(options.gpus)]
    if options.gpus > options.gpus_per_node:
        command += ["--num_machines", str(options.gpus // options.gpus_per_node), "--machine_rank", "RANK"]
        command += ["--main_process_ip", "HOST", "--main_process_port", "29500"]
    command += ["-m", "longctx.train", "--model_name_or_path", str(_folder(options.model_name_or_path))]
    command += ["--dataset_name", "DATA", "--max_length", str(best.length), *best.candidate.flags()]
    if options.rope_scaling:
        command += ["--rope_scaling", options.rope_scaling]
    if options.use_peft:
        command += ["--use_peft", "True", "--lora_r", str(options.lora_r)]
    for name in ("load_in_4bit", "use_bnb_nested_quant"):
        command += [f"--{name}", "True"] if getattr(options, name) else []
    facts = {"name": best.candidate.label, "why": why(best, there), "command": shlex.join(command)}
    return _as_dict(best.candidate, [best]) | facts


def _folder(model: str) -> Path:
    """Return the model's folder if the name is that of its config.json, else the name."""
    return Path(model).parent if Path(model).is_file() else Path(model)


def as_text(result: dict[str, Any], *, markdown: bool = False) -> str:
    """Return the plan as text: a table with a row for each backend and its degrees, and the recommendation."""
    machine, best = result["machine"], result["recommendation"]
    head = (
        f"{result['model']} on {machine['gpus']} x {machine['device']}, {machine['device_bytes'] / 2**30:.0f} GiB "
        f"each, {machine['host_bytes'] / 2**30:,.0f} GiB of host memory a node, {machine['kernel']}, bf16; predicted"
    )
    rows = _rows(result)
    lines = [head, _markdown(rows) if markdown else _aligned(rows), _legend(result), _calibrated(result)]
    if best is None:
        longest = max(c["max_length"] for c in result["candidates"])
        lines.append(f"No set-up takes that; the longest is {longest:,} tokens.")
    else:
        command = f"```bash\n{best['command']}\n```" if markdown else best["command"]
        if "RANK" in command:
            command += "\n\nOn every node, with RANK 0 on the first and HOST the first one's address."
        lines += [*_about(best), _traced(result), command]
    kept = (lines[1], lines[-1])  # a table and a command are not wrapped
    wrapped = [text if markdown or text in kept else textwrap.fill(text, WIDTH) for text in lines if text]
    return "\n\n".join(wrapped)


def _rows(result: dict[str, Any]) -> list[list[str]]:
    """Return the table's rows, with presets beside each other, and seconds of the fastest that fits."""
    from longctx.forecast.token_label import token_label

    presets, lengths = result["presets"], result["lengths"]
    rows = [["backend", "sp", "dp", *(f"longest, {p}" for p in presets), *(f"s at {token_label(n)}" for n in lengths)]]
    for same in _by_degrees(result["candidates"]):
        first = next(iter(same.values()))
        degrees = f" {first['ulysses']} x {first['ring']}" if min(first["ulysses"], first["ring"]) > 1 else ""
        name = first["backend"] + degrees
        longest = [f"{same[p]['max_length']:,}{HOST_FULL if same[p]['binds'] == 'host' else ''}" for p in presets]
        rows.append([name, str(first["sp"]), str(first["dp"]), *longest])
        for i in range(len(lengths)):
            seconds = [(same[p]["at"][i]["seconds_per_step"], mark) for p, mark in zip(presets, MARKS, strict=False)]
            least, mark = min(((s, mark) for s, mark in seconds if s is not None), default=(None, ""))
            rows[-1].append("OOM" if least is None else f"{_seconds(least)}{mark}")
    return rows


HOST_FULL = " h"
MARKS = ("", "*", "+")
"""Marks of seconds, by preset."""


def _by_degrees(candidates: Sequence[dict[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    """Group the candidates that differ in --memory alone, each by its --memory."""
    groups: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for c in candidates:
        groups.setdefault((c["backend"], c["ring"], c["ulysses"]), {})[c["memory"]] = c
    return list(groups.values())


def _legend(result: dict[str, Any]) -> str:
    marked = ", ".join(f"{mark} --memory {p}" for p, mark in zip(result["presets"], MARKS, strict=False) if mark)
    return "hybrid: Ulysses x ring. h: host memory is full first. s: of the fastest preset that fits" + (
        f"; {marked}." if marked else "."
    )


def _calibrated(result: dict[str, Any]) -> str:
    if not (calibrations := result["calibration"]):
        return "Layers by the closed form alone."
    factors: dict[str, list[str]] = {}
    for c in calibrations:
        name = f"{c['backend']} {c['ulysses']} x" if c["ulysses"] else c["backend"]
        factors.setdefault(name, []).append("-" if c["problem"] else f"{c['factor']:.2f}")
    text = "Layers as traces of this model have them, of the closed form's bytes: "
    text += ", ".join(f"{backend} {' '.join(of)}" for backend, of in factors.items()) + "."
    if problem := next((c["problem"] for c in calibrations if c["problem"]), ""):
        text += f" Untraced (-), since {problem}."
    return text


def _about(best: dict[str, Any]) -> list[str]:
    at = best["at"][0]
    seconds = ", ".join(f"{name} {_seconds(value)}" for name, value in at["seconds"].items())
    return [
        f"Recommended for {at['length']:,} tokens: {best['name']}, on {best['engine']}: {best['why']}.",
        f"A step takes {_seconds(at['seconds_per_step'])} s ({seconds}): "
        f"{at['tokens_per_second_per_device']:,.0f} tokens/s a device.",
        *(
            f"{what}: " + ", ".join(f"{name} {size / 2**30:.1f}" for name, size in at[key].items() if size >= 2**26)
            for what, key in (("GiB of a device", "device_bytes"), ("GiB of a node's host memory", "host_bytes"))
            if at[key]
        ),
    ]


def _seconds(value: float) -> str:
    return f"{value:,.1f}" if value >= 1 else f"{value:.2g}"


def _traced(result: dict[str, Any]) -> str:
    if not (trace := result["trace"]):
        return ""
    stands_in = " of its twin on FSDP2 (DeepSpeed runs on no fake tensors; ZeRO's states by formula)"
    traced, predicted = trace["traced_bytes"] / 2**30, trace["predicted_bytes"] / 2**30
    length, binds = trace["longest"]
    return (
        f"Traced{stands_in if trace['stands_in'] else ''}: {traced:.2f} GiB allocated at the device's peak, by the "
        f"closed form {predicted:.2f} ({predicted / traced - 1:+.1%}). The longest row with that: {length:,} tokens, "
        f"then the {binds} is full."
    )


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    )


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "| --- " + "| ---: " * (len(rows[0]) - 1) + "|", *lines[1:]])


if __name__ == "__main__":
    sys.exit(main())

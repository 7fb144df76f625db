"""`python -m longctx.plan --model_name_or_path Qwen/Qwen3-8B --gpus 8`: what fits, how fast, and how to start it.

Everything is predicted: memory by `longctx.forecast.closed_form`, and time by `longctx.forecast.step_time`. No weights
are read, and no process is started. The exit code is 0, 1 if no set-up fits --max_length, or 2 for input that cannot be
planned.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from longctx.forecast.memory_options import AUTO
from longctx.forecast.memory_presets import PRESETS

LENGTHS = (32768, 131072, 524288, 1048576)


def main(arguments: list[str] | None = None) -> int:
    """Print the plan, and return the exit code."""
    options = _parser().parse_args(arguments)
    from longctx.launch.terminal import end_refused, quieten

    quieten()
    try:
        return _plan(options)
    except ValueError as error:
        return end_refused(error)


METHODS = ("train", "dpo")
"""Commands that can be planned."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="longctx plan",
        description="For every attention backend and every sp, predict the longest sequence that fits, the seconds per "
        "step and the memory. Recommend the fastest setup and print its launch command. Only the model's "
        "config.json is needed.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model_name_or_path", required=True, help="Hub name, folder, or path of a config.json. tiny is built in."
    )
    parser.add_argument("--model_revision", default="main", help="Branch, tag or commit on the hub. Default: main.")
    parser.add_argument(
        "--method", choices=METHODS, default="train", help="The command to plan: longctx train or longctx dpo."
    )
    parser.add_argument("--gpus", type=int, default=8, help="Number of GPUs on all nodes. Default: 8.")
    parser.add_argument("--gpus_per_node", type=int, default=8, help="Number of GPUs on one node. Default: 8.")
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--gpu", choices=tuple(_KERNELS), help=f"Kind of GPU. Default: {GPU}.")
    device.add_argument("--measure", action="store_true", help="Measure the speeds and the memory of this machine.")
    parser.add_argument("--gpu_memory_gib", type=float, help="Memory of one GPU. Default: that of --gpu.")
    parser.add_argument(
        "--host_memory_gib", type=float, help="Host memory of one node. Default: 221 GiB for each of its GPUs."
    )
    parser.add_argument(
        "--kernel", help='Attention kernel: "flash-attn 2", 3 or 4, or cuDNN. Default: the usual one for --gpu.'
    )
    parser.add_argument(
        "--memory",
        nargs="+",
        choices=(*PRESETS, AUTO),
        help="Presets to compare. Default: all; with --load_in_4bit, balanced and auto.",
    )
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=list(LENGTHS),
        help="Sequence lengths for which to predict step times.",
    )
    parser.add_argument(
        "--max_length",
        type=int,
        help="Sequence length to recommend a setup for. Default: the longest of --lengths that fits.",
    )
    parser.add_argument(
        "--document_lengths",
        type=Path,
        help="CSV file with the columns low,high,documents: the lengths of the packed documents.",
    )
    parser.add_argument("--rope_scaling", help="Extend the model's context, as in longctx train.")
    for name, meaning in {
        "use_peft": "Train an adapter (LoRA).",
        "load_in_4bit": "Keep the base weights in 4 bits (QLoRA).",
        "use_bnb_nested_quant": "Also quantise the scales of the 4-bit weights.",
    }.items():
        parser.add_argument(f"--{name}", type=_boolean, nargs="?", const=True, default=False, help=meaning)
    parser.add_argument("--lora_r", type=int, default=16, help="Rank of the adapter. Default: 16.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of tables.")
    parser.add_argument("--output", type=Path, help="Folder for plan.json, plan.md, plan.html and pictures.")
    parser.add_argument(
        "--html", type=Path, help="File for a page on which you choose devices, length and arrangement."
    )
    return parser


def _boolean(text: str) -> bool:
    from transformers.hf_argparser import string_to_bool

    return bool(string_to_bool(text))


GPU = "H100"
_KERNELS = {"A100": "flash-attn 2", "H100": "flash-attn 2", "H200": "flash-attn 2", "B200": "cuDNN"}
_KERNELS |= dict.fromkeys(("RTX 3090", "RTX 4090", "L40S"), "flash-attn 2")


def _plan(options: argparse.Namespace) -> int:
    from longctx.forecast.candidates import candidates
    from longctx.model.allow_list import check_model
    from longctx.model.load import load_config
    from longctx.model.rope import extended, parse_rope_scaling, replacement
    from longctx.model.tied_head import untie_as_stored
    from longctx.report.plan_text import Commands, as_text

    if options.output is not None and find_spec("matplotlib") is None:
        raise ValueError(
            f"--output {options.output} needs matplotlib for its pictures. Run pip install matplotlib first."
        )
    config = load_config(options.model_name_or_path, revision=options.model_revision)
    untie_as_stored(config, options.model_name_or_path, revision=options.model_revision)
    replaced = ""
    if scaling := parse_rope_scaling(options.rope_scaling):
        replaced = replacement(config, scaling)
        config = extended(config, scaling)
    check_model(config)
    commands = Commands(
        config=config,
        model=options.model_name_or_path,
        revision=options.model_revision,
        rope_scaling=options.rope_scaling,
        replaced=replaced,
        adapter=_adapter(options),
        gpus_per_node=options.gpus_per_node,
        module=f"longctx.{options.method}",
    )
    machine = _machine(options)
    presets = options.memory or (
        ["balanced", AUTO] if options.load_in_4bit else ["balanced", "longest", "fastest", AUTO]
    )
    found = candidates(config, machine, presets=presets, settings=_adapter(options))
    plan = _planned(options, commands, machine, presets, found)
    print(json.dumps(plan.result, indent=1) if options.json else as_text(plan.result))
    if options.output is not None:
        _write(options.output, plan, machine)
    if options.html is not None:
        options.html.parent.mkdir(parents=True, exist_ok=True)
        options.html.write_text(plan.html(), encoding="utf-8")
    return 0 if plan.best is not None else 1


class _Planned(NamedTuple):
    """A plan, and what its pictures are drawn from."""

    result: dict[str, Any]
    table: dict[Any, list[Any]]
    """The outlooks of each candidate, by length."""
    best: Any
    page: dict[str, Any]
    """The fields of a `longctx.report.plan_page.PlanPage`."""

    def html(self) -> str:
        """Return the page."""
        from longctx.report.plan_page import PlanPage

        return PlanPage(**self.page).html()


def _planned(
    options: argparse.Namespace, commands: Any, machine: Any, presets: Sequence[str], found: Sequence[Any]
) -> _Planned:
    """Return the plan for these candidates."""
    from longctx.forecast.candidates import next_best, outlook, recommend
    from longctx.forecast.documents import drawn_from, one_document, one_pair
    from longctx.model.branches import branch_obstacle

    of_pairs = options.method == "dpo"
    shares = of_pairs and branch_obstacle(commands.config, backend_has_branches=True, is_chunked=False) is None
    fill = one_pair if of_pairs and not shares else one_document
    documents = fill if options.document_lengths is None else drawn_from(options.document_lengths)
    lengths = sorted({*options.lengths, *([options.max_length] if options.max_length else [])})
    longest = max(candidate.max_length for candidate in found)
    wanted = options.max_length or max((n for n in lengths if n <= longest), default=min(lengths))
    table = {c: [outlook(c, machine, length, documents) for length in lengths] for c in found}
    there = [outlooks[lengths.index(wanted)] for outlooks in table.values()]
    best = recommend(there)
    second = None if best is None else next_best(there)
    result = {
        "method": options.method,
        "shares_prompts": shares,
        "model": options.model_name_or_path,
        "machine": asdict(machine),
        "predicted": True,
        "documents": None if options.document_lengths is None else str(options.document_lengths),
        "presets": presets,
        "lengths": lengths,
        "context": commands.context(wanted),
        "candidates": [_as_dict(candidate, outlooks) for candidate, outlooks in table.items()],
        "reference_seconds": None if best is None or not of_pairs else _reference_seconds(best, machine),
        "recommendation": None if best is None else _recommendation(best, there, commands, machine),
        "next_best": None if second is None else _recommendation(second, there, commands, machine),
    }
    page = {
        "machine": machine,
        "commands": commands,
        "presets": presets,
        "documents": documents,
        "lengths": lengths,
        "length": wanted,
    }
    return _Planned(result, table, best, page)


def _adapter(options: argparse.Namespace) -> dict[str, Any]:
    """Return the flags of longctx.train about adapters that affect memory.

    With 4-bit weights, what is not quantised is loaded in bf16: it is frozen, so no precision of an update is lost.
    """
    names = ("model_name_or_path", "use_peft", "lora_r", "load_in_4bit", "use_bnb_nested_quant")
    adapter = {name: getattr(options, name) for name in names}
    return adapter | ({"dtype": "bfloat16"} if options.load_in_4bit else {})


def _write(folder: Path, plan: _Planned, machine: Any) -> None:
    from longctx.report.pictures import draw_lengths, draw_memory, draw_speeds
    from longctx.report.plan_text import as_text, model_folder

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(plan.result, indent=1) + "\n")
    (folder / "plan.md").write_text(as_text(plan.result, markdown=True) + "\n")
    (folder / "plan.html").write_text(plan.html(), encoding="utf-8")
    name = f"{model_folder(plan.result['model']).name} on {machine.gpus} x {machine.device}"
    draw_lengths(folder, plan.table, devices=lambda c: c.dims.sp, title=f"{name}, by sp", note="predicted")
    if any(outlook.time is not None for outlooks in plan.table.values() for outlook in outlooks):
        draw_speeds(folder / "tokens_per_second.png", plan.table, title=name, note="predicted")
    if (best := plan.best) is not None:
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
            raise ValueError(f"--{name} {getattr(options, name)} is not a number above 0. Correct it, or leave it out.")
    if min(options.lengths) < 2:
        raise ValueError(f"--lengths {min(options.lengths)} is below 2: a token needs one to predict. Use at least 2.")
    per_node = min(options.gpus, options.gpus_per_node)
    if options.gpus % per_node:
        raise ValueError(
            f"--gpus {options.gpus} are not a whole number of nodes of --gpus_per_node {per_node}. Change one of them."
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
        raise ValueError(f"--measure: {error} Use --gpu with a device whose speeds are published.") from error


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


def _reference_seconds(best: Any, machine: Any) -> float:
    """Return the seconds of a reference model's forward pass over the sequences of a step."""
    from longctx.forecast.step_time import forward_seconds

    return forward_seconds(best.candidate.setup, best.time, machine.speeds)


def _recommendation(best: Any, there: Sequence[Any], commands: Any, machine: Any) -> dict[str, Any]:
    from longctx.forecast.candidates import why
    from longctx.forecast.step_time import weights_seconds

    facts = {"name": best.candidate.label, "why": why(best, there)}
    facts["weights_seconds"] = weights_seconds(best.candidate.setup, machine.speeds.device)
    return _as_dict(best.candidate, [best]) | facts | {"command": commands.command(best.candidate, best.length)}


if __name__ == "__main__":
    sys.exit(main())

"""A plan in print: the recommendation, the next best, and a table of all backends and degrees, with their commands."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longctx.forecast.candidates import Candidate
from longctx.forecast.memory_options import AUTO
from longctx.launch.terminal import token_label
from longctx.model.rope import context_length, scaling_for

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ASSUMED = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "bf16": True, "dtype": "float32"}
"""Flags of longctx.train that a plan assumes, unless `Commands.adapter` has them."""

WIDTH = 120
"""Width of printed lines."""


@dataclass(frozen=True, kw_only=True)
class Commands:
    """The commands of a plan, which differ in devices, length and arrangement."""

    config: PretrainedConfig
    """The model's configuration, with `rope_scaling` applied."""
    model: str
    """The model's name, its folder, or the config.json in it."""
    revision: str
    rope_scaling: str | None
    """The --rope_scaling that was asked for."""
    replaced: str = ""
    """What `rope_scaling` replaces, as `longctx.model.rope.replacement` says it."""
    adapter: Mapping[str, Any]
    """Flags of longctx.train about adapters."""
    gpus_per_node: int
    module: str = "longctx.train"
    """The command's module."""

    def command(self, candidate: Candidate, length: int) -> str:
        """Return the command that trains the candidate on sequences of `length` tokens."""
        parts = [self.launcher(candidate.dims.world_size), self.run_flags(), self.rope_flags(length)]
        return " ".join(part for part in [*parts, length_flags(candidate, length)] if part)

    def launcher(self, gpus: int) -> str:
        """Return what starts so many processes."""
        words = ["accelerate", "launch", *(["--multi_gpu"] if gpus > 1 else []), "--num_processes", str(gpus)]
        if gpus > self.gpus_per_node:
            words += ["--num_machines", str(gpus // self.gpus_per_node), "--machine_rank", "RANK"]
            words += ["--main_process_ip", "HOST", "--main_process_port", "29500"]
        return shlex.join([*words, "-m", self.module])

    def run_flags(self) -> str:
        """Return the flags that depend neither on the arrangement nor on the length."""
        words = ["--model_name_or_path", str(model_folder(self.model)), "--dataset_name", "DATA"]
        words += ["--model_revision", self.revision] if self.revision != "main" else []
        if self.adapter["use_peft"]:
            words += ["--use_peft", "True", "--lora_r", str(self.adapter["lora_r"])]
        for name in ("load_in_4bit", "use_bnb_nested_quant"):
            words += [f"--{name}", "True"] if self.adapter.get(name) else []
        assumed = {name: self.adapter.get(name, value) for name, value in ASSUMED.items()}
        return shlex.join([*words, *(word for name, value in assumed.items() for word in (f"--{name}", str(value)))])

    def rope_flags(self, length: int) -> str:
        """Return the flag that extends the model's context to this length; empty if there is none."""
        scaling = self.context(length)["rope_scaling"] or self.rope_scaling
        return shlex.join(["--rope_scaling", scaling]) if scaling else ""

    def context(self, length: int) -> dict[str, Any]:
        """Return the model's context, and the --rope_scaling that a longer sequence needs or why there is none.

        `replaced` says what the --rope_scaling that was asked for replaces, where the command has it.
        """
        scaling = problem = None
        try:
            scaling = scaling_for(self.config, length)
        except ValueError as error:
            problem = str(error)
        return {
            "tokens": context_length(self.config),
            "length": length,
            "rope_scaling": scaling,
            "problem": problem,
            "replaced": "" if scaling else self.replaced,
        }


def length_flags(candidate: Candidate, length: int) -> str:
    """Return the length's flag and those that select the candidate."""
    return shlex.join(["--max_length", str(length), *candidate.flags()])


def model_folder(model: str) -> Path:
    """Return the model's folder if the name is that of its config.json, else the name."""
    return Path(model).parent if Path(model).is_file() else Path(model)


def as_text(result: dict[str, Any], *, markdown: bool = False) -> str:
    """Return the plan as text: the recommendation, the next best, and a table of all backends and degrees."""
    rows = _rows(result)
    table = _markdown(rows) if markdown else _aligned(rows)
    return _wrapped([*_answer(result, markdown), table, _legend(result)], markdown, kept=(table,))


def _wrapped(lines: Sequence[str], markdown: bool, kept: Sequence[str]) -> str:
    """Return paragraphs of at most WIDTH characters a line; tables and commands are not wrapped."""
    whole = [text for text in lines if text]
    return "\n\n".join(
        text if markdown or text in kept or text.startswith("accelerate launch") else textwrap.fill(text, WIDTH)
        for text in whole
    )


def _answer(result: dict[str, Any], markdown: bool) -> list[str]:
    """Return the machine, the recommendation and the next best with their commands, in paragraphs."""
    machine, best, second = result["machine"], result["recommendation"], result["next_best"]
    head = (
        f"{result['model']} on {machine['gpus']} x {machine['device']}, {machine['device_bytes'] / 2**30:.0f} GiB "
        f"each, {machine['host_bytes'] / 2**30:,.0f} GiB of host memory a node, {machine['kernel']}, bf16; predicted"
    )
    if best is None:
        longest = max(c["max_length"] for c in result["candidates"])
        return [head, f"No setup fits sequences of this length. The longest that fits has {longest:,} tokens."]
    lines = [head, *_about(best), about_context(result["context"]), _command(best, markdown)]
    if result["reference_seconds"] is not None:
        lines.insert(-1, _reference(result))
    if result["documents"] is None:
        packed = "Packed documents take less time: --document_lengths reads their lengths."
        unit = "document" if result["method"] == "train" else "pair"
        shared = ", planned as one document: its answers share the prompt" * result["shares_prompts"]
        lines.insert(-1, f"Times are for one {unit} per sequence{shared}. {packed}")
    if second is not None:
        at = second["at"][0]
        lines += [
            f"Next best: {second['name']}, {_seconds(at['seconds_per_step'])} s a step of {_sequences(second)}, "
            f"{at['tokens_per_second_per_device']:,.0f} tokens/s a device.",
            _command(second, markdown),
        ]
    if "RANK" in best["command"]:
        lines.append(
            "Run the command on every node. RANK is 0 on the first node, and HOST is the address of that node."
        )
    return lines


def _reference(result: dict[str, Any]) -> str:
    seconds, step = result["reference_seconds"], result["recommendation"]["at"][0]["seconds_per_step"]
    return (
        "Before the first step, the reference model's log-probabilities take a forward pass over all sequences, once: "
        f"{_seconds(seconds)} s for those of a step, {seconds / step:.0%} of it. The model itself is the reference, "
        "and no second one is held in memory."
    )


def _command(plan: dict[str, Any], markdown: bool) -> str:
    return f"```bash\n{plan['command']}\n```" if markdown else plan["command"]


def about_context(context: dict[str, Any]) -> str:
    """Return what to know of the model's context: that the sequence is beyond it, or what --rope_scaling replaces."""
    if context["length"] <= context["tokens"]:
        replaced = context["replaced"]
        return f"The context is {context['tokens']:,} tokens by --rope_scaling; {replaced}." if replaced else ""
    text = f"The model's context is {context['tokens']:,} tokens, and {context['length']:,} are beyond it. "
    if context["problem"]:
        return text + f"No --rope_scaling is known for it: {context['problem']}"
    return text + f"The command extends it with --rope_scaling {context['rope_scaling']}."


def _rows(result: dict[str, Any]) -> list[list[str]]:
    """Return the table's rows, with presets beside each other, and seconds of the fastest that fits."""
    presets, lengths = result["presets"], result["lengths"]
    with_length = [p for p in presets if p != AUTO]  # which goes as far as the others
    rows = [
        ["backend", "sp", "dp", *(f"longest, {p}" for p in with_length), *(f"s at {token_label(n)}" for n in lengths)]
    ]
    for same in _by_degrees(result["candidates"]):
        first = next(iter(same.values()))
        degrees = f" {first['ulysses']} x {first['ring']}" if min(first["ulysses"], first["ring"]) > 1 else ""
        name = first["backend"] + degrees
        longest = [f"{same[p]['max_length']:,}{HOST_FULL if same[p]['binds'] == 'host' else ''}" for p in with_length]
        rows.append([name, str(first["sp"]), str(first["dp"]), *longest])
        for i in range(len(lengths)):
            seconds = [(same[p]["at"][i]["seconds_per_step"], MARKS[p]) for p in presets]
            least, mark = min(((s, mark) for s, mark in seconds if s is not None), default=(None, ""))
            rows[-1].append("OOM" if least is None else f"{_seconds(least)}{mark}")
    return rows


HOST_FULL = " h"
MARKS = {"balanced": "", "longest": "*", "fastest": "+", AUTO: "~"}
"""Marks of seconds, by preset."""


def _by_degrees(candidates: Sequence[dict[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    """Group the candidates that differ in --memory alone, each by its --memory."""
    groups: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for c in candidates:
        groups.setdefault((c["backend"], c["ring"], c["ulysses"]), {})[c["memory"]] = c
    return list(groups.values())


def _legend(result: dict[str, Any]) -> str:
    marked = ", ".join(f"{MARKS[p]} --memory {p}" for p in result["presets"] if MARKS[p])
    return (
        "hybrid: Ulysses x ring. h: limited by host memory. s: seconds per step (of dp sequences) with the fastest "
        "--memory that fits" + (f"; {marked}." if marked else ".")
    )


def _sequences(plan: dict[str, Any]) -> str:
    return f"{plan['dp']:,} sequence{'s' * (plan['dp'] > 1)}"


def _about(best: dict[str, Any]) -> list[str]:
    at = best["at"][0]
    seconds = ", ".join(f"{name} {_seconds(value)}" for name, value in at["seconds"].items())
    return [
        f"Recommended for {at['length']:,} tokens: {best['name']}, on {best['engine']}: {best['why']}.",
        f"A step of {_sequences(best)} takes {_seconds(at['seconds_per_step'])} s ({seconds}): "
        f"{at['tokens_per_second_per_device']:,.0f} tokens/s a device.{_gathers(best, at)}",
        *(
            f"{what}: " + ", ".join(f"{name} {size / 2**30:.1f}" for name, size in at[key].items() if size >= 2**26)
            for what, key in (("GiB per device", "device_bytes"), ("GiB of host memory per node", "host_bytes"))
            if at[key]
        ),
    ]


def _gathers(best: dict[str, Any], at: dict[str, Any]) -> str:
    """Return a sentence on the exchange of weights and gradients; empty where it is below 1% of a step."""
    if best["weights_seconds"] < 0.01 * at["seconds_per_step"]:
        return ""
    weights, exposed = _seconds(best["weights_seconds"]), _seconds(at["seconds"].get("weights", 0.0))
    return f" Gathering weights and reducing gradients takes {weights} s, {exposed} s of it exposed."


def _seconds(value: float) -> str:
    return f"{value:,.1f}" if value >= 1 else f"{value:.2g}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    )


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "| --- " + "| ---: " * (len(rows[0]) - 1) + "|", *lines[1:]])

"""The page: what is predicted beside what is measured, from the lines of results.jsonl alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from longctx.forecast.cost import cost
from longctx.machine.here import Machine
from longctx.machine.speeds import TABLE, Speeds, SpeedTable

from .. import page
from ..max_length.results import OK, Line
from .refit import as_of, changes, known_kernel, number, row_of, speeds_of

PAGE = "README.md"
GIB = 2**30
NONE = "—"


def write_page(folder: Path, catalogue: Any, lines: Sequence[Line]) -> None:
    """Write the page of all lines so far, with what the table of speeds had when the first of them was measured."""
    of: dict[str, list[Line]] = {}
    for line in lines:
        of.setdefault(line["kind"], []).append(line)
    device = of["device"][0]
    table = as_of(device, TABLE)
    measured = next((speeds_of(line) for line in of.get("speeds", ()) if line["status"] == OK), None)
    machine = None
    if measured is not None:
        named = Machine.of(row_of(device["device"], table) or "GPU", 1)
        machine = replace(named, device_bytes=device["device_bytes"], speeds=measured, of_long_documents=None)
    parts = [
        _head(device),
        _checks(of.get("checks", ())),
        _speeds(device, measured, table),
        _steps(catalogue, machine, of.get("steps", ())),
        _kernels(device, of.get("kernels", ()), table),
        _loss(of.get("loss", ())),
        _memory_options(catalogue, machine, of.get("memory_options", ())),
        _longest(catalogue.sizes.longest, of.get("longest", ())),
        _ring(of.get("ring", ())),
        _failed(lines),
        _constants(lines, table),
    ]
    (folder / PAGE).write_text("\n".join(text for part in parts for text in part))


def _section(title: str, *paragraphs: str) -> Iterator[str]:
    for text in (f"## {title}", *paragraphs):
        yield from (text, "")


def _head(device: Line) -> Iterator[str]:
    versions = ", ".join(f"{name} {number}" for name, number in device["versions"].items())
    yield f"# {device['device']}: predicted and measured"
    yield ""
    yield "`python -m benchmarks.gpu`  "
    yield (
        f"{device['date']}, commit {device['commit'] or 'unknown'}; {device['device_bytes'] / GIB:.1f} GiB, compute "
        f"capability {device['capability']}, CUDA {device['cuda']}; Python {device['python']}, {versions}"
    )
    yield ""
    yield f"Attention kernel of a bf16 run with heads of 128: {device['kernel']}."
    yield ""


def _checks(lines: Sequence[Line]) -> Iterator[str]:
    for line in lines:
        if line["status"] != OK:
            continue
        counts = [
            f"{line[word]} {word}" for word in ("passed", "failed", "errors", "error", "skipped") if line.get(word)
        ]
        yield from _section("Checks", f"`pytest -m gpu`, without the tests of every model type: {', '.join(counts)}.")
        yield from (f"- failed: `{name}`" for name in line["failures"])
        if line["failures"]:
            yield ""


def _speeds(device: Line, measured: Speeds | None, table: SpeedTable) -> Iterator[str]:
    if measured is None:
        return
    known, kernel = row_of(device["device"], table), known_kernel(device["kernel"], table)
    named = Speeds.of(known, kernel, table) if known and kernel in table.kernels(known) else None
    yield from _section(
        "Speeds", "What the forecast takes from its table of speeds, beside what `longctx plan --measure` finds."
    )
    rows = []
    for label, scale, get in _SPEEDS:
        before, now = None if named is None else get(named), get(measured)
        rows.append((label, _number(before, scale), _number(now, scale), _ratio(now, before)))
    yield from _table(("", "predicted", "measured", "measured / predicted"), rows)


_SPEEDS: Sequence[tuple[str, float, Any]] = (
    ("matrices, TFLOP/s", 1e12, lambda speeds: speeds.matmul),
    ("attention forward, TFLOP/s", 1e12, lambda speeds: speeds.attention_forward),
    ("attention backward, TFLOP/s", 1e12, lambda speeds: speeds.attention_backward),
    ("device memory, GB/s", 1e9, lambda speeds: speeds.memory),
    ("copies to and from the host, GB/s", 1e9, lambda speeds: speeds.host_link),
    ("AdamW in host memory, GB/s", 1e9, lambda speeds: speeds.host_memory),
    ("launch of a kernel, µs", 1e-6, lambda speeds: speeds.launch_seconds),
)


def _kernels(device: Line, lines: Sequence[Line], table: SpeedTable) -> Iterator[str]:
    there = [line for line in lines if line["status"] == OK]
    if not there:
        return
    known = row_of(device["device"], table)
    peak = table.values("peak_flops").get(known or "")
    yield from _section(
        "Attention kernels",
        "TFLOP/s of causal attention in bf16, only legal pairs counted. Predicted are parts of the dense peak.",
    )
    rows = []
    for line in there:
        kernel = known_kernel(line["kernel"], table)
        parts = table.kernels(known).get(kernel or "") if known else None
        expected = NONE if parts is None or peak is None else " / ".join(f"{part * peak / 1e12:.0f}" for part in parts)
        found = (line["forward_flops"], line["backward_flops"])
        of_peak = NONE if peak is None else " / ".join(f"{flops / peak:.0%}" for flops in found)
        measured = " / ".join(_significant(flops / 1e12) for flops in found)
        rows.append((line["kernel"], line["documents"], f"{line['length']:,}", measured, of_peak, expected))
    yield from _table(("kernel", "documents", "tokens", "forward / backward", "of the peak", "predicted"), rows)
    absent = sorted({line["kernel"] for line in lines} - {line["kernel"] for line in there})
    if absent:
        yield f"Not for these tensors, or not on this device: {', '.join(absent)}."
        yield ""


def _loss(lines: Sequence[Line]) -> Iterator[str]:
    rows = [
        (
            f"{line['vocabulary']:,}",
            f"{line['tokens']:,}",
            line["way"],
            f"{1e3 * line['seconds']:.3g}",
            f"{line['logits_per_second'] / 1e9:.3g}",
        )
        for line in lines
        if line["status"] == OK
    ]
    if not rows:
        return
    yield from _section(
        "The loss",
        "Losses of bf16 logits and their gradient: one tile, and a head of four tiles with its matrix products.",
    )
    yield from _table(("vocabulary", "tokens", "", "ms", "10⁹ logits/s"), rows)


def _ring(lines: Sequence[Line]) -> Iterator[str]:
    there = [line for line in lines if line["status"] == OK]
    if not there:
        return
    yield from _section(
        "A ring's ranks on one device",
        (
            "Seconds of a rank times the number of ranks, over one call for the whole pack, without communication: 1 "
            "is a ring that loses nothing. Planned is the imbalance of attention's work, which is the least that the "
            "slowest can take."
        ),
    )
    rows = [
        (
            str(line["ranks"]),
            line["documents"],
            f"{line['length']:,}",
            f"{line['planned']:.2f}",
            f"{line['slowest']:.2f}",
            f"{line['mean']:.2f}",
        )
        for line in there
    ]
    yield from _table(("ranks", "documents", "tokens", "planned", "slowest", "mean"), rows)


def _steps(catalogue: Any, machine: Machine | None, lines: Sequence[Line]) -> Iterator[str]:
    if not lines:
        return
    found = {(line["model"], line["length"], line["way"]): seconds(line) for line in lines}
    yield from _section(
        "Steps",
        (
            "One document a step, bf16 with fp32 weights and states, batch size 1. `auto` is the default on one GPU; "
            "`balanced` has checkpoints, as TRL has. In both, norms, activations and rotary embeddings are Liger's "
            "from 8 million hidden states on. `compiled` has `--torch_compile`, `DeepSpeed` is ZeRO-3 on one rank, "
            "and `packed` has rows of several documents. A step of DPO has a pair whose prompt is half of the tokens "
            "and each answer a quarter; QLoRA trains an adapter on weights of 4 bits. Both are compared with TRL's "
            "own. Predicted seconds are by the speeds measured above, predicted memory by the closed form when it was"
            " measured; both of longctx's own steps alone."
        ),
    )
    rows = []
    for line in lines:
        kind = next((f", {kind}" for kind in ("DPO", "QLoRA") if kind in line["way"]), "")
        trl, liger = (found.get((line["model"], line["length"], way)) for way in (f"TRL{kind}", f"TRL, Liger{kind}"))
        if "packed" in line["way"]:  # which TRL does not train exactly without a flash-attn package
            trl = liger = None
        rows.append(
            (
                line["model"],
                f"{line['length']:,}",
                line["way"],
                *_seconds_and_memory(catalogue, machine, line),
                _ratio(trl, seconds(line)),
                _ratio(liger, seconds(line)),
            )
        )
    yield from _table(("model", "tokens", "by", *_OF_A_STEP, "speed over TRL", "over TRL with Liger"), rows)


_OF_A_STEP = ("seconds", "predicted", "error", "peak, GiB", "predicted", "error")


def _memory_options(catalogue: Any, machine: Machine | None, lines: Sequence[Line]) -> Iterator[str]:
    if not lines:
        return
    plain = next((line for line in lines if line["way"] == "none" and line["status"] == OK), None)
    yield from _section(
        "Memory options",
        f"{lines[0]['model']}, one document of {lines[0]['length']:,} tokens; each option over the step without it.",
    )
    rows = []
    for line in lines:
        against = ("", "")
        if plain is not None and line["status"] == OK:
            against = (_ratio(seconds(line), seconds(plain)), _ratio(line["allocated"], plain["allocated"]))
        hidden = line.get("hidden")
        rows.append(
            (
                line["way"],
                *_seconds_and_memory(catalogue, machine, line),
                *against,
                NONE if hidden is None else f"{hidden:.0%} of {line['copied_seconds']:.2f} s",
            )
        )
    yield from _table(("memory_option", *_OF_A_STEP, "seconds over none", "bytes over none", "copies hidden"), rows)


def _longest(most: int, lines: Sequence[Line]) -> Iterator[str]:
    if not lines:
        return
    yield from _section(
        "The longest sequence",
        (
            f"{lines[0]['model']}, one document, within {lines[0]['budget'] / GIB:.0f} GiB of the device: sequences "
            f"that fill all of it take minutes a step. No length above {most:,} tokens is tried."
        ),
    )
    ways = list(dict.fromkeys(line["way"] for line in lines))
    of_trl = _longest_of(lines, "TRL")
    rows = []
    for way in ways:
        longest = _longest_of(lines, way)
        fails = [line["length"] for line in lines if line["way"] == way and line["status"] != OK]
        above = min((length for length in fails if length > longest), default=None)
        rows.append((way, f"{longest:,}", NONE if above is None else f"{above:,}", _ratio(longest, of_trl)))
    yield from _table(("by", "longest that trains", "shortest that does not", "over TRL"), rows)


def _longest_of(lines: Sequence[Line], way: str) -> int:
    return max((line["length"] for line in lines if line["way"] == way and line["status"] == OK), default=0)


def _failed(lines: Sequence[Line]) -> Iterator[str]:
    failed = [line for line in lines if line["status"] in ("fail", "timeout")]
    if not failed:
        return
    yield from _section("What failed")
    for line in failed:
        yield f"- {line['kind']}: {line['name']}: {line['status']}, {line.get('error', '')}"
    yield ""


def _constants(lines: Sequence[Line], table: SpeedTable) -> Iterator[str]:
    """Constants of the forecast, as these figures would have them."""
    try:
        found = changes(lines, table)
    except ValueError as error:
        yield from _section("Constants", str(error))
        return
    about = "Of the table of speeds (`longctx/machine/speeds.toml`), as these figures have them; of a kernel on its "
    yield from _section("Constants", f"{about}longest single document. `--refit` writes them there.")
    rows = [
        (
            f"{change.device} {change.name}",
            NONE if change.before is None else number(change.before.value),
            number(change.after.value),
            NONE if change.before is None else change.before.source,
        )
        for change in found
    ]
    yield from _table(("constant", "before", "refitted", "source before"), rows)
    ratios = [
        line["allocated"] / line["predicted_bytes"]
        for line in lines
        if line["kind"] in ("steps", "memory_options") and line["status"] == OK and line.get("predicted_bytes")
    ]
    if ratios:
        yield (
            f"Measured peaks over those of the closed form: median {statistics.median(ratios):.3f}, "
            f"{min(ratios):.3f} to {max(ratios):.3f} in {len(ratios)} steps."
        )
        yield ""


def seconds(line: Line) -> float | None:
    """Median of a step, without the first two."""
    return statistics.median(line["seconds"][2:] or line["seconds"]) if line["status"] == OK else None


def _seconds_and_memory(catalogue: Any, machine: Machine | None, line: Line) -> tuple[str, ...]:
    if line["status"] != OK:
        return (line["status"], *[NONE] * (len(_OF_A_STEP) - 1))
    took, expected, memory = seconds(line), None, line.get("predicted_bytes")
    if memory is not None and machine is not None:
        expected = cost(catalogue.shape(line, machine), machine, line["length"]).step_seconds
    peak = line["allocated"]
    return (
        _significant(took),
        _significant(expected),
        _error(expected, took),
        f"{peak / GIB:.2f}",
        NONE if memory is None else f"{memory / GIB:.2f}",
        _error(memory, peak),
    )


def _number(value: float | None, scale: float) -> str:
    return _significant(None if value is None else value / scale)


def _significant(value: float | None) -> str:
    return NONE if value is None else f"{value:.3g}"


def _ratio(value: float | None, over: float | None) -> str:
    return f"{value / over:.2f}" if value is not None and over and math.isfinite(over) else NONE


def _error(predicted: float | None, measured: float | None) -> str:
    return f"{predicted / measured - 1:+.0%}" if predicted is not None and measured else NONE


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [*page.table(head, rows), ""]

"""Summary, table.md and both pictures, from the lines of results.jsonl alone: an interrupted sweep has them, too."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import page
from .results import COMBINATION, FIT, OK, OOM, SWEEP, TIME, Key, Line, latest

TABLE, LENGTHS_PICTURE, SECONDS_PICTURE = "table.md", "max_length.png", "seconds_per_step.png"
MIB = 2**20

LENGTH_COLUMNS = (
    *("backend", "devices", "sp × dp", "engine", "longest sequence", "shortest that fails", "tokens per rank"),
    *("peak, MiB", "forecast error", "status"),
)
TIME_COLUMNS = (
    *("backend", "devices", "sp × dp", "sequence", "tokens per rank", "s/step", "p10 to p90", "tokens/s/device"),
    *("MFU", "peak, MiB"),
)
SUMMARY_COLUMNS = (
    *("backend", "devices", "sp × dp", "longest sequence", "timed at", "s/step", "tokens/s/device", "peak, MiB"),
    *("first step", "forecast error"),
)
REFERENCES = ("one device", "TRL ring", "TRL ulysses")
"""Whose first step others are compared with: the first of them that trained on the same sequences."""
NONE = "—"


def write_table(folder: Path, lines: Sequence[Line]) -> None:
    _replace(folder / TABLE, "\n".join(_page(lines)) + "\n")


def write_pictures(folder: Path, lines: Sequence[Line], kind: str) -> None:
    """The picture that probes of this kind are for.

    Raises:
        ValueError: without matplotlib.
    """
    from ..pictures import Bar, Point, max_length_picture, seconds_per_step_picture

    known, sweep = latest(list(lines)), _sweep(lines)
    subject = f"{sweep['model']} on {sweep['device']}"
    note = _how_measured(sweep)
    if kind == FIT:
        bars = [
            Bar(key.backend, key.devices, line.get("longest") or None)
            for key, line in known.items()
            if key.kind == COMBINATION and "longest" in line
        ]
        if bars:
            path = folder / LENGTHS_PICTURE
            max_length_picture(_new(path), bars, title=f"Longest sequences: {subject}", note=note)
            os.replace(_new(path), path)
        return
    points = []
    for key, line in known.items():
        if key.kind == TIME and line["status"] in (OK, OOM):
            times = timing(line)
            range_ = {"low": times["p10"], "high": times["p90"]} if times else {}
            points.append(Point(key.backend, key.devices, key.length, times["median"] if times else None, **range_))
    if points:
        path = folder / SECONDS_PICTURE
        note = "Seconds of an optimizer step: median, bars from p10 to p90"
        seconds_per_step_picture(_new(path), points, title=f"Seconds per step: {subject}", note=note)
        os.replace(_new(path), path)


def timing(line: Line) -> dict[str, float] | None:
    """Median, p10 and p90 of the steps after warm-up; None where there are none."""
    seconds = line.get("seconds", [])[line.get("warmup", 0) :]
    if not seconds:
        return None
    tenths = statistics.quantiles(seconds, n=10, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 9
    return {"median": statistics.median(seconds), "p10": tenths[0], "p90": tenths[-1]}


def summary(lines: Sequence[Line]) -> Iterator[str]:
    """Markdown to paste into an issue: what was measured where, and a line for each backend."""
    sweep, known = _sweep(lines), latest(list(lines))
    commits = dict.fromkeys(line["commit"] for line in known.values() if line.get("commit"))
    yield from (f"### longctx bench: {sweep['model']} on {sweep['device']}", "")
    yield f"- {_how_measured(sweep)}; --memory {sweep['memory']}"
    yield f"- {_versions(sweep)}, Python {sweep['python']}; commit {', '.join(commits) or 'unknown'}"
    yield from (f"- {command}" for command in _commands(lines))
    yield from ("", *_summary_table(known), "", *_errors(known))


def _summary_table(known: Mapping[Key, Line]) -> Iterator[str]:
    counts = dict.fromkeys(line["devices"] for line in _of(known, COMBINATION))
    yield from page.table(SUMMARY_COLUMNS, [row for devices in counts for row in _summary_rows(devices, known)])
    yield ""
    yield (
        "*Longest*: the longest sequence that completed two optimizer steps; ≥ where the search was not over. *Timed "
        "at*: the longest of the timed lengths that all backends train on so many devices. *Peak*: allocated at that "
        "length, unless another is named. *First step*: its loss and gradient norm, relative to the reference on the "
        "same sequences. *Forecast error*: what was predicted, relative to what was measured."
    )


def _summary_rows(devices: int, known: Mapping[Key, Line]) -> Iterator[list[str]]:
    timed = [key for key, line in known.items() if _is_timed(key, line) and key.devices == devices]
    lengths = [{key.length for key in timed if key.backend == name} for name in {key.backend for key in timed}]
    at = max(set.intersection(*lengths), default=0) if lengths else 0
    for combination in (line for line in _of(known, COMBINATION) if line["devices"] == devices):
        key = Key(TIME, combination["backend"], devices, at)
        step = known[key] if key in timed else {}
        times, longest = timing(step), _longest(combination, known)
        peak = step if step.get("allocated") else known.get(key._replace(kind=FIT, length=longest), {})
        elsewhere = "" if peak is step else f" at {longest:,}"  # steps that are timed on the CPU are not traced
        yield [
            combination["backend"],
            str(devices),
            _degrees(combination),
            f"{'' if 'longest' in combination else '≥ '}{longest:,}" if longest else combination["status"],
            f"{at:,}" if step else NONE,
            f"{times['median']:.3g}" if times else NONE,
            f"{step['tokens'] / times['median'] / devices:,.0f}" if times else NONE,
            f"{peak['allocated'] / MIB:,.1f}{elsewhere}" if peak.get("allocated") else NONE,
            _together({name: _parity(of, key, known) for name, of in (("loss", "loss"), ("norm", "grad_norm"))}),
            _together(
                {
                    "peak": _error(peak.get("predicted"), peak.get("allocated")),
                    "s/step": _error(step.get("predicted_seconds"), times["median"] if times else None),
                }
            ),
        ]


def _together(values: Mapping[str, str]) -> str:
    """Return the values that are known in one cell, with their names."""
    if set(values.values()) == {"reference"}:
        return "reference"
    return ", ".join(f"{name} {value}" for name, value in values.items() if value != NONE) or NONE


def _is_timed(key: Key, line: Line) -> bool:
    return key.kind == TIME and line["status"] == OK


def _longest(combination: Line, known: Mapping[Key, Line]) -> int:
    """Tokens of the longest sequence that has trained, so far where the search goes on; 0 for none."""
    if "longest" in combination:
        return int(combination["longest"])
    key = Key(FIT, combination["backend"], combination["devices"], 0)
    fits = [k.length for k, line in known.items() if k._replace(length=0) == key and line["status"] == OK]
    return max(fits, default=0)


def _parity(name: str, key: Key, known: Mapping[Key, Line]) -> str:
    """Relative difference to the reference, which trains on the same sequences: one for each group of devices."""

    def groups(timed: Key) -> int | None:
        return known[timed._replace(kind=COMBINATION, length=0)].get("dp")

    values = {
        other.backend: line[name]
        for other, line in known.items()
        if _is_timed(other, line)
        and other.length == key.length
        and other.devices in (1, key.devices)
        and groups(other) == groups(key)
        and line.get(name)
    }
    if key.backend not in values:
        return NONE
    reference = next((backend for backend in REFERENCES if backend in values), next(iter(values)))
    return "reference" if key.backend == reference else f"{values[key.backend] / values[reference] - 1:+.1g}"


def _error(predicted: float | None, measured: float | None) -> str:
    return f"{predicted / measured - 1:+.1%}" if predicted and measured else NONE


# table.md


def _page(lines: Sequence[Line]) -> Iterator[str]:
    sweep, known = _sweep(lines), latest(list(lines))
    yield from ("# How far it goes", "", "  \n".join(_commands(lines)), "", f"{sweep['device']}; {_versions(sweep)}")
    yield from ("", "## Summary", "", *_summary_table(known))
    yield from ("", "## Longest sequences", "", f"{_how_measured(sweep)}. {_model_text(sweep, known)}")
    yield (
        "A sequence fits where two optimizer steps complete on it. The shortest that fails was tried within "
        f"{sweep['precision']:.1%} or one multiple of the padding above the longest. *Peak*: allocated on the fullest "
        "rank. *Forecast error*: of that peak, by the closed form. results.jsonl has all ranks, reserved bytes and "
        "host memory."
    )
    yield ""
    yield from page.table(LENGTH_COLUMNS, [_length_row(line, known) for line in _of(known, COMBINATION)])
    yield from ("", "## Seconds per step", "")
    yield (
        f"Optimizer steps, after {sweep['warmup']} of warm-up: the median, and the range from p10 to p90. *MFU*: "
        "floating point operations of the parameters and of causal attention over the device's peak, "
        f"{_peak_text(known)}."
    )
    yield ""
    yield from page.table(TIME_COLUMNS, [_time_row(line, known) for line in _of(known, TIME)])
    if errors := list(_errors(known)):
        yield from ("", "## Why", "", *errors)


def _commands(lines: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(f"`{line['command']}`, {line['date']}" for line in lines if line["kind"] == SWEEP))


def _versions(sweep: Line) -> str:
    return ", ".join(f"{name} {number}" for name, number in sweep["versions"].items())


def _how_measured(sweep: Line) -> str:
    if sweep["budget_bytes"] is None:
        return f"Memory: all of each device, {sweep['device_bytes'] / MIB:,.0f} MiB"
    budget = f"{sweep['budget_bytes'] / MIB:,.1f} MiB for each rank"
    return f"{'Traced bytes of real steps' if sweep['use_cpu'] else 'Memory that torch may take'}: {budget}"


def _model_text(sweep: Line, known: Mapping[Key, Line]) -> str:
    sizes = {f"{line['parameters']:,} parameters in {line['dtype']}" for line in known.values() if "dtype" in line}
    commits = dict.fromkeys(line["commit"] for line in known.values() if line.get("commit"))
    return (
        f"{sweep['model']}: {'; '.join(sorted(sizes)) or 'nothing trained'}. Commit {', '.join(commits) or 'unknown'}."
    )


def _length_row(line: Line, known: Mapping[Key, Line]) -> list[str]:
    key = Key(FIT, line["backend"], line["devices"], 0)
    fit = known.get(key._replace(length=line.get("longest") or 0), {})
    fails = known.get(key._replace(length=line.get("fails") or 0), {})
    return [
        line["backend"],
        str(line["devices"]),
        _degrees(line),
        line.get("engine", NONE),
        f"{line['longest']:,}" if "longest" in line else NONE,
        f"{line['fails']:,} ({fails.get('status', NONE)})" if line.get("fails") else NONE,
        _per_rank(line, line.get("longest")),
        _peak(fit),
        _error(fit.get("predicted"), fit.get("allocated")),
        line["status"],
    ]


def _time_row(line: Line, known: Mapping[Key, Line]) -> list[str]:
    combination = known.get(Key(COMBINATION, line["backend"], line["devices"], 0), {})
    cells = ["OOM" if line["status"] == OOM else line["status"], NONE, NONE, NONE]
    if times := timing(line):
        speed = line["tokens"] / times["median"] / line["devices"]
        peak = line.get("peak_flops")
        mfu = line["flops"] / times["median"] / line["devices"] / peak if peak and line.get("flops") else None
        cells = [f"{times['median']:.3g}", f"{times['p10']:.3g} to {times['p90']:.3g}", f"{speed:,.0f}"]
        cells.append(f"{mfu:.1%}" if mfu else NONE)
    return [
        line["backend"],
        str(line["devices"]),
        _degrees(combination),
        f"{line['length']:,}",
        _per_rank(combination, line.get("padded_length", line["length"])),
        *cells,
        _peak(line),
    ]


def _degrees(line: Line) -> str:
    if "sp" not in line:
        return NONE
    ways = f" (ring {line['ring']} × ulysses {line['ulysses']})" if min(line["ring"], line["ulysses"]) > 1 else ""
    return f"{line['sp']} × {line['dp']}{ways}"


def _per_rank(combination: Line, length: int | None) -> str:
    return f"{-(-length // combination['sp']):,}" if length and combination.get("sp") else NONE


def _peak(line: Line) -> str:
    """Return the bytes allocated on the rank that has most."""
    most = max((peak for peak in line.get("allocated_by_rank", []) if peak), default=None)
    return f"{most / MIB:,.1f}" if most else NONE


def _peak_text(known: Mapping[Key, Line]) -> str:
    peaks = {line["peak_flops"] for line in known.values() if line.get("peak_flops")}
    return ", ".join(f"{peak / 1e12:,.0f} TFLOP/s in bf16" for peak in peaks) or "which is not known here"


def _errors(known: Mapping[Key, Line]) -> Iterator[str]:
    nothing_fits = {(line["backend"], line["devices"]) for line in _of(known, COMBINATION) if line.get("longest") == 0}
    for key, line in known.items():
        explains = line["status"] != OOM or (key.kind == FIT and (key.backend, key.devices) in nothing_fits)
        if line.get("error") and explains:
            at = f", sequences of {key.length:,}" if key.length else ""
            yield f"- {key.backend} on {key.devices}{at}: {line['status']}: {line['error']}"


def _of(known: Mapping[Key, Line], kind: str) -> list[Line]:
    return [line for key, line in known.items() if key.kind == kind]


def _sweep(lines: Sequence[Line]) -> dict[str, Any]:
    """The latest of its own lines."""
    return next(line for line in reversed(lines) if line["kind"] == SWEEP)


def _new(path: Path) -> Path:
    return path.with_name(f".new-{path.name}")


def _replace(path: Path, text: str) -> None:
    _new(path).write_text(text)
    os.replace(_new(path), path)

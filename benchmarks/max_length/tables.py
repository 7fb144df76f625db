"""Summary, table.md and both pictures, from the lines of results.jsonl alone: an interrupted sweep has them, too."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .results import COMBINATION, FIT, OK, OOM, SWEEP, TIME, Key, Line, latest

TABLE, LENGTHS_PICTURE, SECONDS_PICTURE = "table.md", "max_length.png", "seconds_per_step.png"
MIB = 2**20

LENGTH_COLUMNS = (
    "model",
    "parameters",
    "dtype",
    "device × count",
    "backend",
    "sp × dp",
    "engine",
    "longest row",
    "smallest that fails",
    "why",
    "tokens a rank",
    "padding",
    "peak allocated, MiB (rank)",
    "reserved",
    "host",
    "predicted, MiB",
    "error",
    "status",
    "commit",
)
TIME_COLUMNS = (
    "model",
    "device × count",
    "backend",
    "sp × dp",
    "row",
    "tokens a rank",
    "padding",
    "s/it, median",
    "p10",
    "p90",
    "it/s",
    "tokens/s/device",
    "causal MFU",
    "peak allocated, MiB (rank)",
    "reserved",
    "host",
    "status",
    "commit",
)
SUMMARY_COLUMNS = (
    "backend",
    "devices",
    "sp × dp",
    "longest sequence",
    "timed at",
    "s/step",
    "tokens/s/device",
    "peak, MiB",
    "loss",
    "gradient norm",
    "forecast: peak",
    "forecast: s/step",
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
    """Markdown to paste into an issue: what was measured where, and a row for each backend."""
    sweep, known = _sweep(lines), latest(list(lines))
    commits = dict.fromkeys(line["commit"] for line in known.values() if line.get("commit"))
    yield from (f"### longctx bench: {sweep['model']} on {sweep['device']}", "")
    yield f"- {_how_measured(sweep)}; --memory {sweep['memory']}"
    yield f"- {_versions(sweep)}, Python {sweep['python']}; commit {', '.join(commits) or 'unknown'}"
    yield from (f"- {command}" for command in _commands(lines))
    yield from ("", *_summary_table(known), "", *_errors(known))


def _summary_table(known: Mapping[Key, Line]) -> Iterator[str]:
    counts = dict.fromkeys(line["devices"] for line in _of(known, COMBINATION))
    yield from _table(SUMMARY_COLUMNS, [row for devices in counts for row in _summary_rows(devices, known)])
    yield ""
    yield (
        "*Longest*: the longest sequence that completed two optimizer steps; ≥ where the search was not over. *Timed "
        "at*: the longest of the timed lengths that all backends train on so many devices. *Peak*: allocated at that "
        "length, unless another is named. *Loss*, *gradient norm*: of the first step, relative to the reference on the "
        "same sequences. *Forecast*: what was predicted, relative to what was measured."
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
            *(_parity(name, key, known) for name in ("loss", "grad_norm")),
            _error(peak.get("predicted"), peak.get("allocated")),
            _error(step.get("predicted_seconds"), times["median"] if times else None),
        ]


def _is_timed(key: Key, line: Line) -> bool:
    return key.kind == TIME and line["status"] == OK


def _longest(combination: Line, known: Mapping[Key, Line]) -> int:
    """Tokens of the longest row that has trained, so far where the search goes on; 0 for none."""
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
    yield from ("", "## Longest rows", "", _how_measured(sweep) + ".")
    yield (
        "A row fits where two optimizer steps complete on it; *smallest that fails*: of the rows tried above the "
        f"longest one, within {sweep['precision']:.1%} or one multiple of the padding. *Peak*: of the rank that has "
        "most, and which. *Predicted*: allocated bytes at the longest row by the closed form, and its error."
    )
    yield ""
    yield from _table(LENGTH_COLUMNS, [_length_row(line, known, sweep) for line in _of(known, COMBINATION)])
    yield from ("", "## Seconds of an optimizer step", "")
    yield (
        f"Steps of warm-up before: {sweep['warmup']}. MFU: floating point operations of the parameters and of causal "
        f"attention over the device's peak, {_peak_text(known)}."
    )
    yield ""
    yield from _table(TIME_COLUMNS, [_time_row(line, known, sweep) for line in _of(known, TIME)])
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


def _length_row(line: Line, known: Mapping[Key, Line], sweep: Line) -> list[str]:
    key = Key(FIT, line["backend"], line["devices"], 0)
    fit = known.get(key._replace(length=line.get("longest") or 0), {})
    fails = known.get(key._replace(length=line.get("fails") or 0), {})
    predicted, allocated = fit.get("predicted"), fit.get("allocated")
    return [
        sweep["model"],
        f"{line['parameters']:,}" if "parameters" in line else NONE,
        line.get("dtype", NONE),
        f"{sweep['device_kind']} × {line['devices']}",
        line["backend"],
        _degrees(line),
        line.get("engine", NONE),
        f"{line['longest']:,}" if "longest" in line else NONE,
        f"{line['fails']:,}" if line.get("fails") else NONE,
        fails.get("status", NONE),
        _per_rank(line, line.get("longest")),
        f"{fit['padding']:.1%}" if fit else NONE,
        *_peaks(fit),
        f"{predicted / MIB:,.1f}" if predicted else NONE,
        _error(predicted, allocated),
        line["status"],
        line.get("commit") or NONE,
    ]


def _time_row(line: Line, known: Mapping[Key, Line], sweep: Line) -> list[str]:
    combination = known.get(Key(COMBINATION, line["backend"], line["devices"], 0), {})
    times = timing(line)
    cells = [NONE] * 6
    if times:
        speed = line["tokens"] / times["median"] / line["devices"]
        peak = line.get("peak_flops")
        mfu = line["flops"] / times["median"] / line["devices"] / peak if peak and line.get("flops") else None
        cells = [f"{times[name]:.3g}" for name in ("median", "p10", "p90")]
        cells += [f"{1 / times['median']:.3g}", f"{speed:,.0f}", f"{mfu:.1%}" if mfu else NONE]
    return [
        sweep["model"],
        f"{sweep['device_kind']} × {line['devices']}",
        line["backend"],
        _degrees(combination),
        f"{line['length']:,}",
        _per_rank(combination, line.get("padded_length", line["length"])),
        f"{line['padding']:.1%}" if "padding" in line else NONE,
        *(cells if line["status"] != OOM else ["OOM", *cells[1:]]),
        *_peaks(line),
        line["status"],
        line.get("commit") or NONE,
    ]


def _degrees(line: Line) -> str:
    if "sp" not in line:
        return NONE
    ways = f" (ring {line['ring']} × ulysses {line['ulysses']})" if min(line["ring"], line["ulysses"]) > 1 else ""
    return f"{line['sp']} × {line['dp']}{ways}"


def _per_rank(combination: Line, length: int | None) -> str:
    return f"{-(-length // combination['sp']):,}" if length and combination.get("sp") else NONE


def _peaks(line: Line) -> list[str]:
    """Allocated, reserved and host, each with the rank that has most."""
    cells = []
    for name in ("allocated", "reserved", "host"):
        peaks = [peak for peak in line.get(f"{name}_by_rank", []) if peak]
        most = max(peaks, default=None)
        cells.append(f"{most / MIB:,.1f} ({line[f'{name}_by_rank'].index(most)})" if most else NONE)
    return cells


def _peak_text(known: Mapping[Key, Line]) -> str:
    peaks = {line["peak_flops"] for line in known.values() if line.get("peak_flops")}
    return ", ".join(f"{peak / 1e12:,.0f} TFLOP/s in bf16" for peak in peaks) or "which is not known here"


def _errors(known: Mapping[Key, Line]) -> Iterator[str]:
    nothing_fits = {(line["backend"], line["devices"]) for line in _of(known, COMBINATION) if line.get("longest") == 0}
    for key, line in known.items():
        explains = line["status"] != OOM or (key.kind == FIT and (key.backend, key.devices) in nothing_fits)
        if line.get("error") and explains:
            at = f", rows of {key.length:,}" if key.length else ""
            yield f"- {key.backend} on {key.devices}{at}: {line['status']}: {line['error']}"


def _of(known: Mapping[Key, Line], kind: str) -> list[Line]:
    return [line for key, line in known.items() if key.kind == kind]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [columns, ["---"] * len(columns), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return ["| " + " | ".join(row) + " |" for row in cells]


def _sweep(lines: Sequence[Line]) -> dict[str, Any]:
    """The latest of its own lines."""
    return next(line for line in reversed(lines) if line["kind"] == SWEEP)


def _new(path: Path) -> Path:
    return path.with_name(f".new-{path.name}")


def _replace(path: Path, text: str) -> None:
    _new(path).write_text(text)
    os.replace(_new(path), path)

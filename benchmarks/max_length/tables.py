"""table.md and both pictures, from the lines of results.jsonl alone: an interrupted sweep has them, too."""

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
NONE = "—"


def write_table(folder: Path, lines: Sequence[Line]) -> None:
    _replace(folder / TABLE, "\n".join(_page(lines)) + "\n")


def write_pictures(folder: Path, lines: Sequence[Line], kind: str) -> None:
    """The picture that probes of this kind are for.

    Raises:
        ValueError: without matplotlib.
    """
    from longctx.report.pictures import Bar, Point, max_length_picture, seconds_per_step_picture

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


# table.md


def _page(lines: Sequence[Line]) -> Iterator[str]:
    sweep, known = _sweep(lines), latest(list(lines))
    commands = list(dict.fromkeys(f"`{line['command']}`, {line['date']}" for line in lines if line["kind"] == SWEEP))
    versions = ", ".join(f"{name} {number}" for name, number in sweep["versions"].items())
    yield from ("# How far it goes", "", "  \n".join(commands), "")
    yield f"{sweep['device']}; {versions}"
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
        f"{predicted / allocated - 1:+.1%}" if predicted and allocated else NONE,
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

"""The numbers, charts and tables of a run's page, made from trainer_state.json's log_history."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from longctx.forecast.cost import GIB, Cost
from longctx.launch.terminal import number
from longctx.regions import PARTS
from longctx.report.svg import Series, area_chart, bar_chart, escaped, figure, finite, folded, line_chart

PART_NAMES = {
    "data": "waiting for data",
    "attention": "attention",
    "communication": "waiting for other ranks",
    "saving": "saving checkpoints",
    "rest": "rest",
}
PART_LOOKS = dict(zip(PARTS, ("c3", "c0", "c1", "c4", "c5"), strict=True))
SMOOTHING = 0.8
"""The weight of earlier steps in a moving mean."""
SMOOTHED_FROM = 20
"""The fewest steps that have one."""
MOST_ROWS = 40
"""The most rows of the table of numbers."""


def key_numbers(
    history: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]], forecast: Cost | None = None
) -> list[tuple[str, str]]:
    """Return the numbers that people ask for first, with what was predicted of them."""
    evaluated = [("last evaluation", f"{entry['eval_loss']:.4g}") for entry in history if "eval_loss" in entry][-1:]
    if not steps:
        return [("steps logged", "0"), *evaluated]
    last = steps[-1]
    after_first = steps[1:] or steps  # the first step includes what is set up once
    seconds = [_total(entry) for entry in _timed(steps)]
    tiles = [
        ("steps", f"{last['step']:,}"),
        ("last loss", f"{last['loss']:.4g}"),
        *evaluated,
        ("tokens", number(last.get("num_tokens", 0))),
        ("time in steps", _duration(sum(seconds))),
    ]
    for name, key in (("tokens/s", "tokens_per_second"), ("tokens/s/device", "tokens_per_second_per_device")):
        if values := _values(after_first, key):
            tiles.append((name, number(_median(values))))
    if forecast is not None and forecast.known_speed is not None:
        tiles.append(("tokens/s/device, predicted", number(forecast.known_speed)))
    if values := _values(after_first, "mfu"):
        tiles.append(("MFU", f"{_median(values):.0%}"))
    for name, key in (
        ("peak GPU memory", "peak_memory_gib_max"),
        ("host memory/rank", "peak_host_memory_gib_max"),
    ):
        if values := _values(steps, key):
            tiles.append((name, f"{max(values):.3g} GiB"))
    if forecast is not None and not forecast.machine.is_cpu:
        tiles.append(("peak GPU memory, predicted", f"{forecast.allocated_bytes / GIB:.3g} GiB"))
    return tiles


def all_charts(history: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]) -> list[str]:
    evaluated = [(entry["step"], entry["eval_loss"]) for entry in history if "eval_loss" in entry]
    loss = [*_smoothed("training", _points(steps, "loss")), Series("evaluation", evaluated, "c1 dashed")]
    total = [Series("all devices", _points(steps, "tokens_per_second"), "c0")]
    charts, flat = [], []
    charts += [
        figure("Loss", line_chart("Loss over steps", loss), [s for s in loss if s.points]),
        *_rewards(history, steps),
        figure("Tokens per second", line_chart("Tokens per second over steps", total, low=0)),
        _memory(steps),
        *_times(steps),
    ]
    of_experts: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("Auxiliary loss", "aux_loss", {"low": 0.0}),
        ("Expert load", "expert_load_imbalance", {"low": 1.0, "high": 2.0}),
    )
    for name, key, options in (
        *(chart for chart in of_experts if any(chart[1] in step for step in steps)),
        ("Padding", "padding_fraction", {"low": 0.0, "high": 0.05, "tick": _percent}),
        ("Attention imbalance", "attention_imbalance", {"low": 1.0, "high": 1.1}),
        ("Gradient norm", "grad_norm", {"low": 0.0}),
        ("Learning rate", "learning_rate", {"low": 0.0, "tick": number}),
    ):
        points = finite(_points(steps, key))
        chart = line_chart(f"{name} over steps", [Series(name.lower(), points, "c0")], **options)  # type: ignore[arg-type]
        whole = figure(name, chart, note=_NOTES.get(name, ""))
        write: Any = options.get("tick", "{:.4g}".format)
        shown = {write(y) for _, y in points}
        if len(points) < 2:
            charts.append(whole)
        elif len(shown) == 1:
            flat.append(folded(name, f"{shown.pop()} in all steps", whole))
        elif max(y for _, y in points) <= _UNREMARKABLE.get(key, -math.inf):
            flat.append(folded(name, f"at most {write(max(y for _, y in points))}", whole))
        else:
            charts.append(whole)
    return charts + flat


def _rewards(history: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Draw the rewards of a run on preferences, where they are logged."""
    if not any("rewards/margins" in step for step in steps):
        return []
    sides = [Series(side, _points(steps, f"rewards/{side}"), f"c{i}") for i, side in enumerate(("chosen", "rejected"))]
    charts = [figure("Rewards", line_chart("Rewards over steps", sides), sides)]
    of_pairs: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("Reward margins", "rewards/margins", {}),
        ("Reward accuracies", "rewards/accuracies", {"low": 0.0, "high": 1.0, "tick": _percent}),
    )
    for name, key, options in of_pairs:
        evaluated = Series("evaluation", _points(history, f"eval_{key}"), "c1 dashed")
        lines = [*_smoothed("training", _points(steps, key)), evaluated]
        chart = line_chart(f"{name} over steps", lines, **options)
        charts.append(figure(name, chart, [line for line in lines if line.points], _NOTES[name]))
    return charts


def _smoothed(name: str, points: Sequence[tuple[float, float]]) -> list[Series]:
    """Return the line; of a longer one its moving mean, and the values behind it."""
    if len(points) < SMOOTHED_FROM:
        return [Series(name, points, "c0")]
    means, mean = [], points[0][1]
    for step, value in points:
        mean = SMOOTHING * mean + (1 - SMOOTHING) * value if math.isfinite(value) else mean
        means.append((step, mean))
    return [Series(name, points, "c0 faded"), Series(f"{name}, moving mean", means, "c0")]


_UNREMARKABLE = {"padding_fraction": 0.05, "attention_imbalance": 1.1}
"""The largest values of charts that are folded because nothing in them needs attention."""

_NOTES = {
    "Reward margins": "Mean over pairs of the chosen answer's reward minus the rejected one's.",
    "Reward accuracies": "Part of the pairs whose chosen answer has the larger reward.",
    "Padding": "Part of the tokens computed that are padding.",
    "Auxiliary loss": "Of the routers, without its coefficient; with an even load, it is the experts of a token.",
    "Expert load": "Tokens of a layer's busiest expert over the mean, in the least balanced layer; 1 is even.",
    "Attention imbalance": "Attention work of the busiest rank over the mean; 1 is even.",
}


def _memory(steps: Sequence[Mapping[str, Any]]) -> str:
    """Draw a line for each rank, among which the fullest stands out, or the extremes where the log has no ranks."""
    known = [entry for entry in steps if "memory" in entry]
    kind = "allocated" if any("allocated" in entry["memory"] for entry in known) else "host"
    known = [entry for entry in known if "gib_max" in entry["memory"].get(kind, ())]  # older ones list ranks alone
    name = f"Peak {'GPU' if kind == 'allocated' else 'host'} memory by rank, GiB"
    if not known:
        return figure(name, line_chart(name, []))
    last = known[-1]["memory"][kind].get("gib_by_rank")
    if not last:
        extremes = [
            Series(name, [(entry["step"], entry["memory"][kind][f"gib_{key}"]) for entry in known], look)
            for name, key, look in (("the fullest rank", "max", "c1"), ("mean", "mean", "c0"), ("lowest", "min", "c5"))
        ]
        return figure(name, line_chart(f"{name} over steps", extremes, low=0), extremes)
    fullest = last.index(max(last))
    ranks = [rank for rank in range(len(last)) if rank != fullest]
    lines = [Series(f"rank {rank}", _of_rank(known, kind, rank), f"c{rank % 5} thin") for rank in ranks]
    if len(last) > 5:
        lines = [line._replace(look="c5 thin") for line in lines]
    lines.append(Series(f"rank {fullest}", _of_rank(known, kind, fullest), "c1" if len(last) > 5 else f"c{fullest}"))
    chart = line_chart(f"{name} over steps", lines, low=0)
    shown = sorted(lines, key=lambda line: int(line.name.split()[1])) if len(last) <= 5 else lines[-2:]
    if len(last) > 5:
        shown = [shown[1]._replace(name=f"rank {fullest}, the fullest"), shown[0]._replace(name="the other ranks")]
    return figure(name, chart, shown)


def _of_rank(entries: Sequence[Mapping[str, Any]], kind: str, rank: int) -> list[tuple[float, float]]:
    ranks = ((entry["step"], entry["memory"][kind].get("gib_by_rank", ())) for entry in entries)
    return [(step, peaks[rank]) for step, peaks in ranks if rank < len(peaks)]


def _times(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Draw where the time went over the steps, and by rank if the log lists all ranks."""
    timed = _timed(steps)
    shares = {part: [(e["step"], e["seconds"][part]["mean"] / _total(e)) for e in timed] for part in PARTS}
    parts = [
        Series(PART_NAMES[part], shares[part], PART_LOOKS[part]) for part in PARTS if any(y for _, y in shares[part])
    ]
    over_steps = area_chart("Where the time went, over steps", [entry["step"] for entry in timed], parts)
    charts = [figure("Where the time went", over_steps, parts, note=_TIMES_NOTE)]
    num_ranks = _num_ranks(timed[-1]) if timed else 0
    if timed and not num_ranks:
        return charts
    alike = [entry for entry in timed if _num_ranks(entry) == num_ranks]
    unit, name = next((u for u in _UNITS if sum(map(_total, timed)) > 2 * u[0]), (1, "s"))
    rows = [
        (f"rank {n}", [(PART_LOOKS[p], sum(e["seconds"][p]["by_rank"][n] for e in alike) / unit) for p in PARTS])
        for n in range(num_ranks)
    ]
    note = f"The {len(alike)} logged steps with {num_ranks} ranks." if len(alike) < len(timed) else ""
    by_rank = bar_chart("Where the time went, by rank", rows, name)
    return [*charts, figure("Where the time went, by rank", by_rank, parts, note=note)]


def _num_ranks(entry: Mapping[str, Any]) -> int:
    return min(len(entry["seconds"][part].get("by_rank", ())) for part in PARTS)


def _total(entry: Mapping[str, Any]) -> float:
    """Return the seconds of an entry, as a mean over the ranks."""
    return sum(entry["seconds"][part]["mean"] for part in PARTS)


_TIMES_NOTE = (
    "Mean over ranks. Waiting for other ranks is what attention's messages did not hide; what FSDP or ZeRO gathers and "
    "reduces is part of the rest."
)


def numbers_table(history: Sequence[Mapping[str, Any]]) -> str:
    """Return the table with a row for each logged step, or for some of them in a long run."""
    steps: dict[int, dict[str, Any]] = {}
    for entry in history:
        if "loss" in entry or "eval_loss" in entry:
            steps.setdefault(entry["step"], {}).update(entry)
    entries = list(steps.values())
    every = max(1, -(-len(entries) // MOST_ROWS))
    shown = [entry for i, entry in enumerate(entries) if i % every == 0 or i == len(entries) - 1]
    columns = {name: write for name, write in _COLUMNS.items() if any(_is_number(entry.get(name)) for entry in shown)}
    head = "".join(f'<th scope="col">{escaped(name.replace("_", " "))}</th>' for name in columns)
    rows = (
        "".join(f"<td>{write(e[name]) if _is_number(e.get(name)) else ''}</td>" for name, write in columns.items())
        for e in shown
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    table = f"<table class=numbers><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    if every == 1:
        return table
    return f"<p>Every {every}th of {len(entries):,} logged steps; all are in trainer_state.json.</p>{table}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


_COLUMNS = {
    "step": "{:,}".format,
    "loss": "{:.4f}".format,
    "eval_loss": "{:.4f}".format,
    "grad_norm": "{:.3g}".format,
    "learning_rate": "{:.3g}".format,
    "tokens_per_second": number,
    "mfu": _percent,
    "peak_memory_gib_max": "{:.2f}".format,
    "peak_host_memory_gib_max": "{:.2f}".format,
    "padding_fraction": _percent,
    "attention_imbalance": "{:.3f}".format,
    "aux_loss": "{:.4g}".format,
    "expert_load_imbalance": "{:.2f}".format,
    "unused_experts_fraction": _percent,
    "data_fraction": _percent,
    "attention_fraction": _percent,
    "communication_fraction": _percent,
}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _points(entries: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    return [(entry["step"], float(entry[key])) for entry in entries if _is_number(entry.get(key))]


def _values(entries: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [y for _, y in finite(_points(entries, key))]


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _timed(steps: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    timed = [entry for entry in steps if all("mean" in entry.get("seconds", {}).get(part, ()) for part in PARTS)]
    return [entry for entry in timed if _total(entry)]


_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def _duration(seconds: float) -> str:
    """75 -> 1.25 min"""
    for unit, name in _UNITS:
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"

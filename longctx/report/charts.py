"""The numbers, charts and tables of a run's page, made from trainer_state.json's log_history."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median_high
from typing import Any, NamedTuple

from longctx.forecast.cost import GIB, Cost
from longctx.launch.terminal import number
from longctx.report.svg import Points, Series, escaped, figure, line_chart, table
from longctx.training.completions import answer_of, ending
from longctx.training.progress import duration

SMOOTHING = 0.8
"""The weight of earlier steps in a moving mean."""
SMOOTHED_FROM = 20
"""The fewest steps that have one."""
MOST_ROWS = 40
"""The most rows of the table of numbers."""


MOST_PROMPTS, MOST_ANSWERS = 20, 3
"""Prompts of --eval_generate that the page shows, and the last answers to each."""


def answers_table(completions: Iterable[Mapping[str, Any]]) -> str:
    """Return the prompts of --eval_generate and the last answers to each; an empty text without any."""
    answers: dict[str, list[tuple[str, str]]] = {}
    for entry in completions:
        answers.setdefault(entry["prompt"], []).append((f"after step {entry['step']:,}", answer_of(entry)))
    shown = list(answers.items())[:MOST_PROMPTS]
    rows = [row for prompt, given in shown for row in (("prompt", ending(prompt)), *given[-MOST_ANSWERS:])]
    return f'<div class="answers">{table(rows)}</div>' if rows else ""


def percent(share: float) -> str:
    return f"{100 * share:.3g}%"


_four_digits = "{:.4g}".format


class Chart(NamedTuple):
    """A chart, and the columns of the table that hold its numbers."""

    title: str
    keys: Sequence[str]
    """Of the log, one for each line."""
    reaches: Sequence[float] = ()
    """Values that the y axis reaches at least."""
    write: Callable[[float], str] = _four_digits
    """A value as text."""
    note: str = ""
    names: Sequence[str] = ()
    """Of the lines, where there are several. Those that are named training have a moving mean."""
    ordinary: float = -math.inf
    """The chart is folded if no value is above this one."""


_PARTS = ("training", "evaluation")
_RANKS = ("the fullest rank", "the emptiest rank")
_SHARES = ("attention", "waiting for other ranks", "waiting for data")
_TIMES = ("attention_fraction", "communication_fraction", "data_fraction")
_OF_MARGINS = "Mean over pairs of the chosen answer's reward minus the rejected one's."
_OF_ACCURACIES = "Part of the pairs whose chosen answer has the larger reward."
_OF_TIMES = (
    "Parts of the time, as means over ranks. Waiting for other ranks is what attention's messages did not hide; what "
    "FSDP or ZeRO gathers and reduces is part of the rest."
)
_OF_ROUTERS = "Of the routers, without its coefficient; with an even load, it is the experts of a token."
_OF_EXPERTS = "Tokens of a layer's busiest expert over the mean, in the least balanced layer; 1 is even."
_OF_PADDING = "Part of the tokens computed that are padding."
_OF_ATTENTION = "Attention work of the busiest rank over the mean; 1 is even."

CHARTS = (
    Chart("Loss", ("loss", "eval_loss"), write="{:.4f}".format, names=_PARTS),
    Chart("Rewards", ("rewards/chosen", "rewards/rejected"), names=("chosen", "rejected")),
    Chart("Reward margins", ("rewards/margins", "eval_rewards/margins"), note=_OF_MARGINS, names=_PARTS),
    Chart(
        "Reward accuracies", ("rewards/accuracies", "eval_rewards/accuracies"), (0, 1), percent, _OF_ACCURACIES, _PARTS
    ),
    Chart("Tokens per second", ("tokens_per_second",), (0,), number),
    Chart("MFU", ("mfu",), (0,), percent),
    Chart("Peak GPU memory, GiB", ("peak_memory_gib_max", "peak_memory_gib_min"), names=_RANKS),
    Chart("Peak host memory, GiB", ("peak_host_memory_gib_max", "peak_host_memory_gib_min"), names=_RANKS),
    Chart("Where the time went", _TIMES, (0,), percent, _OF_TIMES, _SHARES),
    Chart("Auxiliary loss", ("aux_loss",), (0,), note=_OF_ROUTERS),
    Chart("Expert load", ("expert_load_imbalance",), (1, 2), note=_OF_EXPERTS),
    Chart("Unused experts", ("unused_experts_fraction",), (0, 0.05), percent),
    Chart("Padding", ("padding_fraction",), (0, 0.05), percent, _OF_PADDING, ordinary=0.05),
    Chart("Attention imbalance", ("attention_imbalance",), (1, 1.1), note=_OF_ATTENTION, ordinary=1.1),
    Chart("Gradient norm", ("grad_norm",), (0,)),
    Chart("Learning rate", ("learning_rate",), (0,)),
)


def _typical(values: Sequence[float]) -> float:
    """Return the median without the first step, which includes what is set up once."""
    return median_high(values[1:] or values)


TILES: tuple[tuple[str, str, Callable[[Sequence[float]], float], Callable[[float], str]], ...] = (
    ("last loss", "loss", lambda values: values[-1], _four_digits),
    ("last evaluation", "eval_loss", lambda values: values[-1], _four_digits),
    ("tokens", "num_tokens", max, number),
    ("tokens/s", "tokens_per_second", _typical, number),
    ("tokens/s/device", "tokens_per_second_per_device", _typical, number),
    ("MFU", "mfu", _typical, "{:.0%}".format),
    ("peak GPU memory", "peak_memory_gib_max", max, "{:.3g} GiB".format),
    ("host memory/rank", "peak_host_memory_gib_max", max, "{:.3g} GiB".format),
)
"""The numbers that people ask for first: name, key of the log, which of its values, and that as text."""


def key_numbers(history: Sequence[Mapping[str, Any]], forecast: Cost | None = None) -> Iterator[tuple[str, str]]:
    """Yield the numbers that people ask for first, with what was predicted of them."""
    yield "steps", f"{max((entry['step'] for entry in history if 'loss' in entry), default=0):,}"
    for name, key, of, write in TILES:
        if points := _points(history, key):
            yield name, write(of([y for _, y in points]))
    # entries of earlier releases list the ranks without a mean
    parts = [part for entry in history for part in entry.get("seconds", {}).values() if "mean" in part]
    if parts:
        yield "time in steps", duration(sum(part["mean"] for part in parts))
    if forecast is not None and forecast.known_speed is not None:
        yield "tokens/s/device, predicted", number(forecast.known_speed)
    if forecast is not None and not forecast.machine.is_cpu:
        yield "peak GPU memory, predicted", f"{forecast.allocated_bytes / GIB:.3g} GiB"


def all_charts(history: Sequence[Mapping[str, Any]]) -> str:
    """Draw what the log has. Charts in which there is nothing to see are folded, and come last."""
    drawn, folded = [], []
    for chart in CHARTS:
        lines = list(_lines(chart, history))
        if not lines:
            continue
        tick = percent if chart.write is percent else None
        picture = line_chart(f"{chart.title} over steps", lines, reaches=chart.reaches, tick=tick)
        whole = figure(chart.title, picture, lines if chart.names else (), chart.note)
        values = [y for line in lines for _, y in line.points]
        shown, most = {*map(chart.write, values)}, max(values)
        if len(values) > 1 and (len(shown) == 1 or most <= chart.ordinary):
            what = f"{shown.pop()} in all steps" if len(shown) == 1 else f"at most {chart.write(most)}"
            folded.append(f"<details class=flat><summary>{chart.title}: {what}</summary>{whole}</details>\n")
        else:
            drawn.append(whole)
    return "".join(drawn + folded)


def _lines(chart: Chart, history: Sequence[Mapping[str, Any]]) -> Iterator[Series]:
    """Yield the lines that have points, each once; of a longer one its moving mean, and the values behind it."""
    seen: list[Points] = []
    for i, (name, key) in enumerate(zip(chart.names or (chart.title,), chart.keys, strict=True)):
        points = [(step, value) for step, value in _points(history, key) if math.isfinite(value)]
        look = f"c{i}"
        if not points or (chart.names is _RANKS and points in seen):  # one device is the fullest and the emptiest
            continue
        seen.append(points)
        if name != "training" or len(points) < SMOOTHED_FROM:
            yield Series(name, points, look)
            continue
        means, mean = [], points[0][1]
        for step, value in points:
            mean = SMOOTHING * mean + (1 - SMOOTHING) * value
            means.append((step, mean))
        yield Series(name, points, f"{look} faded")
        yield Series(f"{name}, moving mean", means, look)


def numbers_table(history: Sequence[Mapping[str, Any]]) -> str:
    """Return the table with a row for each logged step, or for some of them in a long run."""
    written: dict[str, dict[float, str]] = {
        key: {step: chart.write(value) for step, value in _points(history, key)}
        for chart in CHARTS
        for key in chart.keys
    }
    steps = sorted({step for of in written.values() for step in of})
    every = max(1, -(-len(steps) // MOST_ROWS))
    shown = sorted({*steps[::every], *steps[-1:]})
    columns = {key: of for key, of in written.items() if of.keys() & set(shown)}
    head = "".join(f'<th scope="col">{escaped(name.replace("_", " "))}</th>' for name in ("step", *columns))
    rows = ([f"{step:,}", *(of.get(step, "") for of in columns.values())] for step in shown)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    about = (
        f"<p>Every {every}th of {len(steps):,} logged steps; all are in trainer_state.json.</p>" if every > 1 else ""
    )
    return f"{about}<table class=numbers><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _points(history: Sequence[Mapping[str, Any]], key: str) -> Points:
    """Return the values of a key over steps."""
    return [(entry["step"], entry[key]) for entry in history if isinstance(entry.get(key), int | float)]

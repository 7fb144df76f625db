"""The elements of a page: small charts as inline SVG, and the HTML around them. The page's style sheet colours them."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any, NamedTuple

from longctx.launch.terminal import number

WIDTH, HEIGHT = 420, 240
LEFT, RIGHT, TOP, BOTTOM = 50, 12, 10, 34
MOST_HOVERED = 100
"""The most points of a line that tell their value under the mouse."""
MOST_POINTS = 400
"""The most points of a line. A longer line keeps the least and the greatest value of every stretch."""


class Series(NamedTuple):
    """A line."""

    name: str
    points: Sequence[tuple[float, float]]
    """(step, value); values that are not finite are left out."""
    look: str
    """Class of the style sheet, such as `c0`."""


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    low: float | None = None,
    high: float | None = None,
    tick: Callable[[float], str] | None = None,
) -> str:
    """Draw values over steps.

    Args:
        low, high: the y axis reaches at least this far.
        tick: how a value on the y axis is written.
    """
    lines = [Series(s.name, thinned(finite(s.points)), s.look) for s in series]
    lines = [line for line in lines if line.points]
    if not lines:
        return empty(title)
    values = [y for line in lines for _, y in line.points]
    ends = [end for end in (low, high) if end is not None]
    x_axis = Axis.of([x for line in lines for x, _ in line.points], LEFT, WIDTH - RIGHT, whole=True)
    y_axis = Axis.of([*values, *ends], HEIGHT - BOTTOM, TOP)
    write = tick or "{:.4g}".format
    drawn = [_line(line, x_axis, y_axis) for line in lines]
    drawn += [_hovered(line, x_axis, y_axis, write) for line in lines if line.look.endswith("thin") is False]
    described = "; ".join(
        f"{line.name}: from {number(line.points[0][1])} at step {line.points[0][0]:g} to "
        f"{number(line.points[-1][1])} at step {line.points[-1][0]:g}"
        for line in lines[:8]
    )
    return svg(title, described, [*_frame(x_axis, y_axis, tick), *drawn])


def area_chart(title: str, steps: Sequence[float], parts: Sequence[Series]) -> str:
    """Draw shares that add up to 1 at every step, on top of each other; `points` of all parts are at these steps."""
    if not steps:
        return empty(title)
    x_axis = Axis.of(steps, LEFT, WIDTH - RIGHT, whole=True)
    y_axis = Axis(0, 1, HEIGHT - BOTTOM, TOP, (0, 0.25, 0.5, 0.75, 1))
    size = -(-len(steps) // MOST_POINTS)
    stretches = [slice(start, start + size) for start in range(0, len(steps), size)]
    places = [steps[stretch][0] for stretch in stretches[:-1]] + [steps[-1]]
    if len(steps) == 1:  # as wide as the axis
        stretches, places = 2 * stretches, [x_axis.low, x_axis.high]
    below = [0.0] * len(places)
    drawn = []
    for part in parts:
        means = [_mean([y for _, y in part.points[stretch]]) for stretch in stretches]
        above = [b + y for b, y in zip(below, means, strict=True)]
        edge = [*zip(places, above, strict=True), *zip(reversed(places), reversed(below), strict=True)]
        corners = " ".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in edge)
        drawn.append(f'<polygon class="area {part.look}" points="{corners}"/>')
        below = above
    shares = ", ".join(f"{p.name} {_mean([y for _, y in p.points]):.0%}" for p in parts)
    return svg(title, f"On average {shares}.", [*_frame(x_axis, y_axis, "{:.0%}".format, grid_above=drawn)])


def bar_chart(title: str, rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], unit: str) -> str:
    """Draw bars of several parts, each (look, size), under each other."""
    longest = max((sum(size for _, size in parts) for _, parts in rows), default=0.0)
    if not longest:
        return empty(title)
    step = min(34.0, max(14.0, (HEIGHT - BOTTOM - TOP) / len(rows)))
    height = TOP + step * len(rows) + BOTTOM
    axis = Axis.of([0, longest], LEFT + 14, WIDTH - RIGHT)
    drawn = [
        f'<line class="grid" x1="{axis.at(t):.1f}" x2="{axis.at(t):.1f}" y1="{TOP}" y2="{height - BOTTOM:.1f}"/>'
        + _label(axis.at(t), height - BOTTOM + 15, number(t))
        for t in axis.ticks
    ]
    drawn.append(_label((LEFT + WIDTH - RIGHT) / 2, height - 4, unit))
    for i, (name, parts) in enumerate(rows):
        at, y = 0.0, TOP + step * i
        drawn.append(_label(LEFT + 8, y + step / 2 + 4, name, anchor="end"))
        for look, size in parts:
            x, width = axis.at(at), axis.at(at + size) - axis.at(at)
            rectangle = f'x="{x:.1f}" y="{y + 2:.1f}" width="{max(width, 0):.1f}" height="{step - 4:.1f}"'
            drawn.append(f'<rect class="area {look}" {rectangle}/>')
            at += size
    described = "; ".join(f"{name}: {number(sum(size for _, size in parts))} {unit}" for name, parts in rows[:8])
    return svg(title, described, drawn, height=height)


class Axis(NamedTuple):
    """Values from `low` to `high` on a line from `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float
    ticks: Sequence[float]

    @classmethod
    def of(cls, values: Sequence[float], start: float, stop: float, *, whole: bool = False) -> Axis:
        """Over all values; on a y axis to the next tick.

        Args:
            whole: of steps: ticks are whole numbers, and the axis ends with the values.
        """
        low, high = min(values), max(values)
        if low == high:
            room = 0.5 if whole else abs(low) * 0.1 or 1.0
            low, high = low - room, high + room
        step = nice((high - low) / 5)
        if whole:
            step = 5.0 if step == 2.5 else max(1.0, step)
            ticks = _ticks(math.ceil(low / step), math.floor(high / step), step)
            return cls(low, high, start, stop, ticks)
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        return cls(first * step, last * step, start, stop, _ticks(first, last, step))

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)


def _ticks(first: int, last: int, step: float) -> list[float]:
    return [i * step for i in range(first, last + 1)]


def nice(step: float) -> float:
    """The next of 1, 2, 2.5 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(n * power for n in (1, 2, 2.5, 5, 10) if n * power >= step * (1 - 1e-9))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def finite(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if math.isfinite(y)]


def thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Return at most about MOST_POINTS of them, so that every stretch keeps its least and greatest value."""
    if len(points) <= MOST_POINTS:
        return points
    size = -(-2 * len(points) // MOST_POINTS)
    kept = [points[0]]
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept += sorted(ends)
    return [*kept, points[-1]]


def svg(title: str, description: str, parts: Sequence[str], *, height: float = HEIGHT) -> str:
    """Return one picture, with the text that a screen reader reads."""
    about = f"<title>{escape(title)}</title><desc>{escape(description)}</desc>"
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">{about}{"".join(parts)}</svg>'


def empty(title: str) -> str:
    """Return the picture for a chart without data."""
    return svg(title, "not recorded", [_label(WIDTH / 2, HEIGHT / 2, "not recorded")])


def _line(line: Series, x_axis: Axis, y_axis: Axis) -> str:
    places = [(x_axis.at(x), y_axis.at(y)) for x, y in line.points]
    dots = places if len(places) <= 12 else []
    drawn = "".join(f'<circle class="dot {line.look}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in dots)
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline class="line {line.look}" points="{corners}"/>{drawn}'


def _hovered(line: Series, x_axis: Axis, y_axis: Axis, write: Callable[[float], str]) -> str:
    """Draw unseen points that show the line's values under the mouse; of a long line some."""
    every = -(-len(line.points) // MOST_HOVERED)
    return "".join(
        f'<circle class="hover" cx="{x_axis.at(x):.1f}" cy="{y_axis.at(y):.1f}" r="6">'
        f"<title>{escape(line.name)}, step {x:g}: {escape(write(y))}</title></circle>"
        for x, y in line.points[::every]
    )


def _frame(
    x_axis: Axis, y_axis: Axis, tick: Callable[[float], str] | None, grid_above: Sequence[str] = ()
) -> list[str]:
    """Draw the grid, ticks and the name of the x axis, over the chart if that fills the frame."""
    write = tick or _tick_writer(y_axis)
    drawn = list(grid_above)
    for value in y_axis.ticks:
        y = f"{y_axis.at(value):.1f}"
        drawn.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        drawn.append(_label(LEFT - 6, y_axis.at(value) + 4, write(value), anchor="end"))
    drawn += [_label(x_axis.at(value), HEIGHT - BOTTOM + 15, number(value)) for value in x_axis.ticks]
    return [*drawn, _label((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, "step")]


def _label(x: float, y: float, text: str, *, anchor: str = "middle") -> str:
    return f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _tick_writer(axis: Axis) -> Callable[[float], str]:
    """Return a function that writes all ticks of an axis with as many digits as tell them apart."""
    top = max(abs(axis.ticks[0]), abs(axis.ticks[-1]))
    if top >= 1000 or (top and top < 1e-3):
        return number
    step = axis.ticks[1] - axis.ticks[0]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    digits += round(step * 10**digits, 6) % 1 > 0  # a step of 2.5
    return lambda value: f"{value:.{digits}f}"


def escaped(text: str) -> str:
    """Return the text as HTML shows it."""
    return escape(str(text).replace("\x00", "\ufffd"))


def tile(name: str, value: str) -> str:
    return f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>"


def figure(name: str, chart: str, legend: Sequence[Series] = (), note: str = "") -> str:
    keys = "".join(f'<li><i class="{series.look}"></i>{escaped(series.name)}</li>' for series in legend)
    below = (f"<ul class=legend>{keys}</ul>" if keys else "") + (f"<p>{escaped(note)}</p>" if note else "")
    return f"<figure><figcaption>{escaped(name)}</figcaption>{chart}{below}</figure>\n"


def folded(name: str, values: str, inner: str) -> str:
    """Return a figure that is shown on demand, under a line that says as much."""
    return f"<details class=flat><summary>{escaped(name)}: {escaped(values)}</summary>{inner}</details>\n"


def words(command: Sequence[str]) -> str:
    """Return words as a shell reads them. Lines break between words, and not within `--flag`."""
    return " ".join(f"<span>{escaped(shlex.quote(word))}</span>" for word in command)


_FLAG = re.compile(r"(?<![\w-])--\w+")


def table(rows: Iterable[tuple[str, Any]]) -> str:
    """Return a table of names and values. Lines do not break within `--flag`."""
    shown = [(escaped(n), _FLAG.sub(r"<span class=flag>\g<0></span>", escaped(str(v).strip()))) for n, v in rows]
    body = "".join(f'<tr><th scope="row">{name}</th><td>{value}</td></tr>' for name, value in shown)
    return f"<table><tbody>{body}</tbody></table>" if body else "<p>none</p>"


def bullet_list(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escaped(item)}</li>' for item in items)}</ul>" if items else "<p>none</p>"

"""The elements of a page: line charts as inline SVG, and the HTML around them. Style sheets colour them."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib import resources
from statistics import fmean
from typing import Any, NamedTuple

from longctx.launch.terminal import number

WIDTH, HEIGHT = 420, 240
LEFT, RIGHT, TOP, BOTTOM = 50, 12, 10, 34
MOST_POINTS = 400
"""The most points of a line. Those of a longer line are means over intervals."""

Points = Sequence[tuple[float, float]]
"""(step, value)"""

DOCUMENT = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; {csp}img-src data:">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


class Series(NamedTuple):
    """A line."""

    name: str
    points: Points
    look: str
    """Class of the style sheet, such as `c0`."""


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
        power = 10.0 ** math.floor(math.log10((high - low) / 5))
        nice = (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)
        step = next(n * power for n in nice if n * power >= (high - low) / 5 * (1 - 1e-9))
        if whole:
            step = max(1.0, step)
            first, last = math.ceil(low / step), math.floor(high / step)
        else:
            first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
            low, high = first * step, last * step
        return cls(low, high, start, stop, [i * step for i in range(first, last + 1)])

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)

    def write(self, value: float) -> str:
        """Return a tick as text, with as many digits as tell it from the others."""
        top = max(abs(self.ticks[0]), abs(self.ticks[-1]))
        if top >= 1000 or (top and top < 1e-3):
            return number(value)
        step = self.ticks[1] - self.ticks[0]
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        digits += round(step * 10**digits, 6) % 1 > 0  # a step of 2.5
        return f"{value:.{digits}f}"


def line_chart(
    title: str, lines: Sequence[Series], *, reaches: Sequence[float] = (), tick: Callable[[float], str] | None = None
) -> str:
    """Draw values over steps, with the text that a screen reader reads.

    Args:
        lines: each with at least one point, and without values that are not finite.
        reaches: values that the y axis reaches at least.
        tick: how a value on the y axis is written.
    """
    lines = [line._replace(points=averaged(line.points)) for line in lines]
    x_axis = Axis.of([x for line in lines for x, _ in line.points], LEFT, WIDTH - RIGHT, whole=True)
    y_axis = Axis.of([*reaches, *(y for line in lines for _, y in line.points)], HEIGHT - BOTTOM, TOP)
    drawn = []
    for value in y_axis.ticks:
        y = y_axis.at(value)
        drawn.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        drawn.append(_label(LEFT - 6, y + 4, (tick or y_axis.write)(value), anchor="end"))
    drawn += [_label(x_axis.at(value), HEIGHT - BOTTOM + 15, number(value)) for value in x_axis.ticks]
    drawn.append(_label((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, "step"))
    described = []
    for name, points, look in lines:
        places = [(f"{x_axis.at(x):.1f}", f"{y_axis.at(y):.1f}") for x, y in points]
        drawn.append(f'<polyline class="line {look}" points="{" ".join(map(",".join, places))}"/>')
        if len(places) <= 12:
            drawn += [f'<circle class="dot {look}" cx="{x}" cy="{y}" r="2.5"/>' for x, y in places]
        (start, first), (end, last) = points[0], points[-1]
        described.append(f"{name}: from {number(first)} at step {start:g} to {number(last)} at step {end:g}")
    about = f"<title>{escape(title)}</title><desc>{escape('; '.join(described))}</desc>"
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{about}{"".join(drawn)}</svg>'


def averaged(points: Points) -> Points:
    """Return at most MOST_POINTS points: of a longer line the means over intervals of equally many points."""
    size = -(-len(points) // MOST_POINTS)
    if size <= 1:
        return points
    intervals = (points[start : start + size] for start in range(0, len(points), size))
    return [(fmean(x for x, _ in interval), fmean(y for _, y in interval)) for interval in intervals]


def _label(x: float, y: float, text: str, *, anchor: str = "middle") -> str:
    return f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def document(title: str, body: str, styles: Sequence[str], *, csp: str = "") -> str:
    """Return a page that fetches nothing.

    Args:
        title, body: as HTML.
        styles: style sheets of this package.
        csp: what the page may do besides, as a part of its Content-Security-Policy.
    """
    return DOCUMENT.format(title=title, body=body, style="".join(map(asset, styles)), csp=csp)


def asset(name: str) -> str:
    """Return a file of this package."""
    return resources.files("longctx.report").joinpath(name).read_text(encoding="utf-8")


def escaped(text: str) -> str:
    """Return the text as HTML shows it."""
    return escape(str(text).replace("\x00", "\ufffd"))


def figure(name: str, chart: str, legend: Sequence[Series], note: str) -> str:
    keys = "".join(f'<li><i class="{series.look}"></i>{escaped(series.name)}</li>' for series in legend)
    below = (f"<ul class=legend>{keys}</ul>" if keys else "") + (f"<p>{escaped(note)}</p>" if note else "")
    return f"<figure><figcaption>{escaped(name)}</figcaption>{chart}{below}</figure>\n"


def words(command: Sequence[str]) -> str:
    """Return words as a shell reads them. Lines break between words, and not within `--flag`."""
    return " ".join(f"<span>{escaped(shlex.quote(word))}</span>" for word in command)


_FLAG = re.compile(r"(?<![\w-])--\w+")


def table(rows: Iterable[tuple[str, Any]]) -> str:
    """Return a table of names and values. Lines do not break within `--flag`."""
    shown = [(escaped(n), _FLAG.sub(r"<span class=flag>\g<0></span>", escaped(str(v).strip()))) for n, v in rows]
    body = "".join(f'<tr><th scope="row">{name}</th><td>{value}</td></tr>' for name, value in shown)
    return f"<table><tbody>{body}</tbody></table>" if body else "<p>none</p>"

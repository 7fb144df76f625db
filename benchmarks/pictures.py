"""Pictures of the longest sequences and of the seconds of a step, as PNG files.

Drawn by matplotlib, which is optional (the extra `plots`), in colours that colour-blind people tell apart
(Okabe and Ito), each backend always in the same one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from longctx.attention.backends import BACKENDS
from longctx.launch.terminal import token_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Bar(NamedTuple):
    """The longest sequence of a backend on some devices."""

    backend: str
    """One of BACKEND_LOOKS."""
    devices: int
    length: int | None
    """Tokens; None where none fits."""


class Point(NamedTuple):
    """The seconds of a step of a backend."""

    backend: str
    """One of BACKEND_LOOKS."""
    devices: int
    length: int
    """Tokens of a sequence."""
    seconds: float | None
    """None if the sequence does not fit."""
    low: float | None = None
    high: float | None = None
    """The range around `seconds`, if it is known."""


class _Look(NamedTuple):
    color: str
    marker: str
    line: Literal["-", "--"] = "-"
    hatch: str = ""


BACKEND_LOOKS: Mapping[str, _Look] = {
    "one device": _Look(BACKENDS["local"].color, BACKENDS["local"].marker),
    **{name: _Look(backend.color, backend.marker) for name, backend in BACKENDS.spread.items()},
    "TRL ring": _Look("#D55E00", "P", "--", "//"),
    "TRL ulysses": _Look("#0072B2", "X", "--", "//"),
}
"""Looks by backend, in the order from left to right."""

FITS = 0.8
"""The part of a panel's height for sequences that fit. Those that do not are drawn above."""


def max_length_picture(path: Path, bars: Sequence[Bar], *, title: str, note: str = "") -> None:
    """Draw the longest sequences as bars from 0, side by side for each number of devices.

    Raises:
        ValueError: without matplotlib.
    """
    figure = _figure(width=max(6.0, 2.0 + 0.5 * (len(bars) + len({bar.devices for bar in bars}))), height=4.6)
    axes = figure.subplots()
    lengths = [bar.length for bar in bars if bar.length]
    top = max(lengths, default=1000)
    left, ticks = 0.0, {}
    for devices in sorted({bar.devices for bar in bars}):
        group = [bar for name in BACKEND_LOOKS for bar in bars if (bar.backend, bar.devices) == (name, devices)]
        for at, bar in enumerate(group):
            look, x = BACKEND_LOOKS[bar.backend], left + at
            if bar.length:
                axes.bar(x, bar.length, 0.9, color=look.color, hatch=look.hatch, edgecolor="white", linewidth=0)
            else:
                axes.plot(x, 0, marker="x", color=look.color, markersize=7, clip_on=False)
            text = token_label(bar.length) if bar.length else "OOM"
            axes.annotate(
                text,
                (x, bar.length or 0),
                xytext=(0, 3 if bar.length else 8),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=8,
            )
        ticks[left + (len(group) - 1) / 2] = f"{devices:,}"
        left += len(group) + 1
    axes.set_ylim(0, 1.1 * top)
    axes.set_xlim(-1, left - 1)
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel("devices")
    axes.set_ylabel("longest sequence, tokens")
    axes.yaxis.set_major_formatter(lambda tokens, _: token_label(tokens))
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    _legend_of_backends(figure, [bar.backend for bar in bars], lines=False)
    _save(figure, path, title, note)


def seconds_per_step_picture(path: Path, points: Sequence[Point], *, title: str, note: str = "") -> None:
    """Draw seconds of a step over the length of a sequence, both logarithmic: a panel for each number of devices.

    Sequences that do not fit are crosses in a strip above.

    Raises:
        ValueError: without matplotlib.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    panels = sorted({point.devices for point in points})
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = _figure(width=max(6.0, 4.0 * columns), height=1.4 + 3.2 * rows)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, devices in itertools.zip_longest(grid.flat, panels):
        if devices is None:
            axes.set_visible(False)
        else:
            _panel(axes, [point for point in points if point.devices == devices])
            axes.set_title(f"{devices:,} device{'s' * (devices > 1)}", fontsize=10)
    for index, axes in enumerate(grid.flat[: len(panels)]):
        axes.tick_params(labelbottom=True)
        if index + columns >= len(panels):
            axes.set_xlabel("sequence, tokens")
        if index % columns == 0:
            axes.set_ylabel("step, seconds")
    seconds = [bound for p in points if p.seconds for bound in (p.seconds, p.low, p.high) if bound]
    low, high = min(seconds, default=1.0), max(seconds, default=1.0)
    lengths = sorted({point.length for point in points})
    first = grid.flat[0]
    first.set_xscale("log", base=2)
    first.set_yscale("log")
    first.set_xlim(lengths[0] / 2.5, lengths[-1] * 1.5)  # left of all, the word OOM
    low, high = low / 1.6, high * 1.6
    first.set_ylim(low, low * (high / low) ** (1 / FITS if any(p.seconds is None for p in points) else 1))
    first.xaxis.set_ticks(lengths)
    first.xaxis.set_major_formatter(lambda tokens, _: token_label(tokens))
    first.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    first.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    for axis in (first.xaxis, first.yaxis):
        axis.set_minor_locator(NullLocator())  # whose ticks would be written as 6 × 10⁻¹
    _legend_of_backends(figure, [point.backend for point in points], lines=True)
    _save(figure, path, title, note)


def _panel(axes: Axes, points: Sequence[Point]) -> None:
    from matplotlib.patches import Rectangle

    names = [name for name in BACKEND_LOOKS if any(point.backend == name for point in points)]
    if any(point.seconds is None for point in points):
        axes.add_patch(Rectangle((0, FITS), 1, 1 - FITS, transform=axes.transAxes, color="0.93", zorder=0))
        axes.text(0.02, (1 + FITS) / 2, "OOM", transform=axes.transAxes, va="center", fontsize=8, color="0.3")
    for at, name in enumerate(names):
        look = BACKEND_LOOKS[name]
        line = sorted((point for point in points if point.backend == name), key=lambda point: point.length)
        fits = [point for point in line if point.seconds is not None]
        aside = 2 ** (0.1 * (at - (len(names) - 1) / 2))  # none hides another
        if fits:
            ends = [(p.low or p.seconds or 0.0, p.seconds or 0.0, p.high or p.seconds or 0.0) for p in fits]
            axes.errorbar(
                [aside * point.length for point in fits],
                [middle for _, middle, _ in ends],
                yerr=[[middle - low for low, middle, _ in ends], [high - middle for _, middle, high in ends]],
                color=look.color,
                marker=look.marker,
                linestyle=look.line,
                markersize=5,
                linewidth=1.5,
                capsize=2,
                alpha=0.85,
            )
        height = FITS + (1 - FITS) * (at + 0.5) / len(names)
        for point in line:
            if point.seconds is None:
                axes.plot(
                    aside * point.length,
                    height,
                    transform=axes.get_xaxis_transform(),
                    marker="x",
                    color=look.color,
                    markersize=5,
                )
    axes.grid(color="0.9")
    axes.set_axisbelow(True)


def _figure(*, width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError('Pictures need matplotlib. Install it: pip install "matplotlib>=3.9".') from None
    return Figure(figsize=(width, height), layout="constrained")


def _legend_of_backends(figure: Figure, names: Sequence[str], *, lines: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shown = {name: look for name, look in BACKEND_LOOKS.items() if name in names}
    handles: list[Any] = [
        Line2D([], [], color=look.color, marker=look.marker, linestyle=look.line, label=name)
        if lines
        else Patch(facecolor=look.color, hatch=look.hatch, edgecolor="white", label=name)
        for name, look in shown.items()
    ]
    figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=9)


def _save(figure: Figure, path: Path, title: str, note: str) -> None:
    figure.suptitle(title, fontsize=12)
    if note:
        figure.supxlabel(note, fontsize=8, color="0.3")
    figure.savefig(path, dpi=150)

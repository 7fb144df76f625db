"""Pictures of the page: efficiency over devices, and the parts of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..pictures import BACKEND_LOOKS
from .simulation import DEVICES, NAMES, SHOWN, Results, Run, pays_up_to

LOOKS = {
    "least": ("layers and attention", "#009E73", ""),
    "blocks": ("blocks begun and merged", "#56B4E9", "xx"),
    "exchange": ("exchange", "#E69F00", "//"),
    "wait": ("wait", "#999999", ".."),
}
"""Part of a step -> its name, colour and hatch."""


def curves_picture(path: Path, columns: Mapping[str, Results], title: str) -> None:
    """Efficiency over devices: columns of studies, rows of models and links; rings where a backend stops paying."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(1.5 + 3.6 * len(columns), 1.2 + 2.3 * len(SHOWN)), layout="constrained")
    grid = figure.subplots(len(SHOWN), len(columns), sharex=True, sharey=True, squeeze=False)
    for at_row, (model, gigabits) in zip(grid, SHOWN, strict=True):
        for axes, (column, results) in zip(at_row, columns.items(), strict=True):
            case = next(case for case in results if (case.model, case.gigabits) == (model, gigabits))
            for name in NAMES:
                runs = [run for run in results[case] if run.backend == name]
                look = BACKEND_LOOKS[name]
                axes.plot(
                    [run.devices for run in runs],
                    [run.efficiency for run in runs],
                    color=look.color,
                    marker=look.marker,
                    markersize=4,
                    linewidth=1.5,
                    alpha=0.9,
                )
                if runs:
                    last = pays_up_to(runs)
                    axes.plot(last.devices, last.efficiency, "o", mfc="none", mec=look.color, markersize=11)
            axes.set_title(f"{case.title}\n{column}", fontsize=9)
            axes.grid(color="0.9")
    first = grid[0, 0]
    first.set_xscale("log", base=2)
    first.set_xticks(DEVICES, [f"{devices:,}" for devices in DEVICES])
    first.set_ylim(0, 1.05)
    first.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    for axes in grid[:, 0]:
        axes.set_ylabel("efficiency")
    for axes in grid[-1]:
        axes.set_xlabel("devices")
        axes.tick_params(axis="x", labelsize=8)
    handles = [Line2D([], [], color=BACKEND_LOOKS[n].color, marker=BACKEND_LOOKS[n].marker, label=n) for n in NAMES]
    handles.append(Line2D([], [], color="0.4", marker="o", mfc="none", markersize=11, ls="", label="pays up to here"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=12)
    figure.savefig(path, dpi=130)


def time_picture(path: Path, results: Mapping[str, Sequence[Run]], title: str) -> None:
    """What ranks spend a step with, stacked, for some numbers of devices: a panel for each of the results."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(10, 1.2 + 2.6 * len(results)), layout="constrained")
    grid = figure.subplots(len(results), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, runs) in zip(grid, results.items(), strict=True):
        ticks = {}
        for at, devices in enumerate(DEVICES):
            for place, backend in enumerate(NAMES):
                one = next((run for run in runs if (run.backend, run.devices) == (backend, devices)), None)
                bottom, x = 0.0, at * (len(NAMES) + 1) + place
                ticks[x] = backend
                for part, (_, color, hatch) in LOOKS.items():
                    if one is None:
                        break
                    height = one.share(part)
                    axes.bar(x, height, 0.9, bottom, color=color, hatch=hatch, edgecolor="white", linewidth=0)
                    bottom += height
            middle = at * (len(NAMES) + 1) + (len(NAMES) - 1) / 2
            axes.annotate(f"{devices:,}", (middle, 1.02), ha="center", fontsize=9)
        axes.set_ylim(0, 1.12)
        axes.set_xticks(list(ticks), list(ticks.values()), rotation=90, fontsize=7)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set_title(f"{name}, by devices", fontsize=9)
    handles = [
        Patch(facecolor=color, hatch=hatch, edgecolor="white", label=label) for label, color, hatch in LOOKS.values()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=12)
    figure.savefig(path, dpi=130)

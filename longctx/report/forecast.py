"""The planner's pictures: the longest sequences, the seconds of a step, and the memory of the recommended set-up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from longctx.forecast.candidates import Candidate, Machine, Outlook
from longctx.report.pictures import (
    Bar,
    Point,
    Stack,
    max_length_picture,
    memory_picture,
    seconds_per_step_picture,
)

Table = Mapping[Candidate, Sequence[Outlook]]
"""The outlooks of each candidate, at the same lengths."""


def draw_lengths_and_seconds(
    folder: Path, table: Table, *, devices: Callable[[Candidate], int], title: str, note: str
) -> None:
    """Draw max_length.png and seconds_per_step.png: of each backend on so many devices, its best presets and splits.

    Args:
        devices: those of a candidate, by which the pictures are divided.
    """
    groups: dict[tuple[str, int], list[Candidate]] = {}
    for candidate in table:
        name = "one device" if candidate.backend == "local" else candidate.backend
        groups.setdefault((name, devices(candidate)), []).append(candidate)
    bars, points = [], []
    for (name, number), group in groups.items():
        bars.append(Bar(name, number, max(candidate.max_length for candidate in group) or None))
        for outlooks in zip(*(table[candidate] for candidate in group), strict=True):
            seconds = min((o.time.seconds for o in outlooks if o.time is not None), default=None)
            points.append(Point(name, number, outlooks[0].length, seconds))
    max_length_picture(folder / "max_length.png", bars, title=f"{title}: longest rows that fit", note=note)
    seconds_per_step_picture(folder / "seconds_per_step.png", points, title=f"{title}: seconds of a step", note=note)


def draw_memory(path: Path, outlook: Outlook, machine: Machine, *, title: str, note: str) -> None:
    """Draw what a device holds at its peak, and a node's host memory, against what there is."""
    stacks = [Stack("a device", outlook.memory.device, machine.device_bytes)]
    if outlook.memory.host:
        stacks.append(Stack("host memory of a node", outlook.memory.host, machine.host_bytes))
    memory_picture(path, stacks, title=title, note=note)

"""The planner's pictures: the longest sequences, the speed or seconds of a step, and the memory of a set-up."""

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
    speed_picture,
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
    points = []
    for (name, number), group in groups.items():
        for outlooks in zip(*(table[candidate] for candidate in group), strict=True):
            seconds = min((o.time.seconds for o in outlooks if o.time is not None), default=None)
            points.append(Point(name, number, outlooks[0].length, seconds))
    draw_lengths(folder, table, devices=devices, title=title, note=note)
    seconds_per_step_picture(folder / "seconds_per_step.png", points, title=f"{title}: seconds of a step", note=note)


def draw_lengths(folder: Path, table: Table, *, devices: Callable[[Candidate], int], title: str, note: str) -> None:
    """Draw max_length.png: the longest sequence of each backend, with its best presets and splits."""
    longest: dict[tuple[str, int], int] = {}
    for candidate in table:
        place = "one device" if candidate.backend == "local" else candidate.backend, devices(candidate)
        longest[place] = max(longest.get(place, 0), candidate.max_length)
    bars = [Bar(name, number, length or None) for (name, number), length in longest.items()]
    max_length_picture(folder / "max_length.png", bars, title=f"{title}: longest sequence that fits", note=note)


def draw_speeds(path: Path, table: Table, *, title: str, note: str) -> None:
    """Draw tokens per second and device over the length, a line for each sp with its fastest arrangement."""
    groups: dict[int, list[Outlook]] = {}
    for candidate, outlooks in table.items():
        groups.setdefault(candidate.dims.sp, []).extend(outlooks)
    lines: dict[str, dict[int, float]] = {}
    for sp, outlooks in groups.items():
        fastest: dict[int, float] = {}
        for outlook in outlooks:
            fastest[outlook.length] = max(outlook.speed, fastest.get(outlook.length, 0.0))
        lines[f"sp {sp}"] = {length: speed for length, speed in fastest.items() if speed}
    speed_picture(path, lines, title=f"{title}: tokens/s a device, fastest arrangement that fits", note=note)


def draw_memory(path: Path, outlook: Outlook, machine: Machine, *, title: str, note: str) -> None:
    """Draw what a device holds at its peak, and a node's host memory, against what there is."""
    stacks = [Stack("a device", outlook.memory.device, machine.device_bytes)]
    if outlook.memory.host:
        stacks.append(Stack("host memory of a node", outlook.memory.host, machine.host_bytes))
    memory_picture(path, stacks, title=title, note=note)

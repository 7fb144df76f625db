"""From measured figures to the constants of the forecast: what `--refit` writes into the table of speeds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from longctx.attention.speeds import BACKWARD, FILE, FORWARD, Constant, SpeedTable, number
from longctx.forecast.step_time import Speeds

from longctx.attention.cost import Device, Link

from ..max_length.results import OK, Line


class Change(NamedTuple):
    """One constant of a device, before and after."""

    device: str
    name: str
    before: Constant | None
    """None for a kernel of which the table has nothing on this device."""
    after: Constant

    def __str__(self) -> str:
        was = "nothing" if self.before is None else f"{number(self.before.value)} ({self.before.source})"
        return f"{self.device} {self.name}: {was} -> {number(self.after.value)} ({self.after.source})"


def refit(lines: Sequence[Line], path: Path) -> list[Change]:
    """Write the constants that these results give into the table of speeds at `path`, and return the changes.

    Every other constant stays. Where `path` does not exist, the rest is that of the forecast's own table.

    Raises:
        ValueError: for results that give no constants of a device in the table. Nothing is written then.
        OSError: where the table cannot be written.
    """
    if path.resolve() == FILE.resolve() and any(line.get("quick") for line in lines):
        raise ValueError(
            "These results are of --quick, whose figures say nothing of the GPU: the forecast is not refitted to them. "
            "Measure without --quick, or name a file of your own: --refit FILE."
        )
    table = SpeedTable.read(path if path.exists() else FILE)
    found = changes(lines, table)
    if found:
        table = table.replaced(found[0].device, {change.name: change.after for change in found})
    table.write(path)
    return found


def changes(lines: Sequence[Line], table: SpeedTable) -> list[Change]:
    """Return the constants that these results would change in a table; those that they confirm are none.

    Raises:
        ValueError: see `refit`.
    """
    facts = next((line for line in lines if line["kind"] == "device"), None)
    if facts is None:
        raise ValueError("There are no results of a GPU. Measure them with `python -m benchmarks.gpu` on its machine.")
    device = row_of(facts["device"], table)
    if device is None:
        raise ValueError(
            f"The table of speeds has no row for {facts['device']!r}, and none is fitted without its peak. Add the row "
            f"with its peak_flops, from the data sheet, to {FILE}. There are {', '.join(table.values('peak_flops'))}."
        )
    measured = next((speeds_of(line) for line in lines if line["kind"] == "speeds" and line["status"] == OK), None)
    if measured is None:
        raise ValueError("The speeds of this GPU are not among the results. Measure them: --only speeds kernels.")
    source = f"python -m benchmarks.gpu, {facts['device']}, {facts['date']}, commit {facts['commit'] or 'unknown'}"
    found: dict[str, Constant] = {}
    for name, value in _fitted(measured, lines, table.value(device, "peak_flops"), table):
        found[name] = Constant(float(f"{value:.4g}"), source)
        is_part = name.endswith(("_part", FORWARD, BACKWARD))
        if not 0 < value < (1 if is_part else math.inf):
            raise ValueError(
                f"{facts['device']} would have {name} = {value:.4g}, which cannot be: the table's peak of {device} is "
                f"{number(table.value(device, 'peak_flops'))} FLOPs a second. Correct that row of {FILE}, or measure "
                "again where nothing else runs."
            )
    before = table.constants[device]
    return [Change(device, name, before.get(name), after) for name, after in found.items() if before.get(name) != after]


def _fitted(measured: Speeds, lines: Sequence[Line], peak: float, table: SpeedTable) -> Iterator[tuple[str, float]]:
    """Names and values. A kernel's are those of the longest single document."""
    yield "matmul_part", measured.matmul_flops / peak
    yield "attention_flops", measured.device.attention_flops
    yield "memory_speed", measured.device.memory_speed
    yield "launch_seconds", measured.device.launch_seconds
    yield "host_link", measured.host_link
    yield "host_memory", measured.host_memory
    longest: dict[str, Line] = {}
    for line in lines:
        is_speed = line["kind"] == "kernels" and line["status"] == OK and line["documents"] == "one document"
        if is_speed and (kernel := known_kernel(line["kernel"], table)):
            longest[kernel] = max(longest.get(kernel, line), line, key=lambda line: line["length"])
    for kernel, line in longest.items():
        yield kernel + FORWARD, line["forward_flops"] / peak
        yield kernel + BACKWARD, line["backward_flops"] / peak


def row_of(device: str, table: SpeedTable) -> str | None:
    """Return the row of the table for a GPU's full name; None without one, and for cards on PCIe, which have less."""
    if "PCI" in device.upper():
        return None
    return next((key for key in table.values("peak_flops") if key in device), None)


def known_kernel(name: str, table: SpeedTable) -> str | None:
    """Return the kernel's name in the table, if it is there. torch's own varlen kernel is FlashAttention-2."""
    if "aten varlen flash" in name:
        return "flash-attn 2"
    return next((key for key in table.kernels() if key.lower() in name.lower()), None)


def speeds_of(line: Line) -> Speeds:
    """Return the speeds that `longctx.forecast.measure` found."""
    links = {name: Link(**line["device"][name]) for name in ("within", "across")}
    values = {name: line[name] for name in ("matmul_flops", "attention_forward_flops", "attention_backward_flops")}
    values |= {name: line[name] for name in ("host_link", "host_memory")}
    return Speeds(**values, device=Device(**line["device"] | links))


def as_of(facts: Line, table: SpeedTable) -> SpeedTable:
    """Return the table as it was when this GPU was first measured; a later refit would predict with hindsight."""
    device = row_of(facts["device"], table)
    if device is None or "constants" not in facts:
        return table
    return table.replaced(device, {name: Constant(*constant) for name, constant in facts["constants"].items()})


def constants_of(device: str, table: SpeedTable) -> dict[str, Any]:
    """Return the constants that the table has of this GPU, for `as_of`."""
    row = row_of(device, table)
    return {} if row is None else {"constants": dict(table.constants[row])}

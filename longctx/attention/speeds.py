"""The speeds of devices, kernels and links, which all forecasts of seconds and the choice of a backend read.

The table is the file speeds.toml beside this module. It has a section for each device, and a value with its source for
each constant. `python -m benchmarks.gpu --refit` replaces the constants of a GPU by values measured on it, and
nothing else writes the file. The constants of a device are:

    peak_flops          FLOPs a second: the dense peak in bf16
    matmul_part         the part of the peak that matrices of a few thousand columns reach
    KERNEL forward,     the parts of the peak that an attention kernel reaches on long documents with heads of 128;
    KERNEL backward     `longctx.forecast.step_time` reads these two
    attention_flops     FLOPs a second of attention, both passes together, for the choice of a backend
    memory_speed        bytes a second that the device reads or writes in its own memory
    within_exchange, within_pass_on, across_exchange, across_pass_on
                        bytes a second of a link: see `longctx.attention.cost.Link`
    host_link           bytes a second between the device and pinned host memory
    host_memory         bytes a second that all processes of a node read and write
    message_seconds, launch_seconds, entry_seconds
                        latencies: see `longctx.attention.cost.Device`
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from longctx.untrusted.files import written_whole

FILE = Path(__file__).with_name("speeds.toml")

_HEAD = """\
# What devices, kernels and links do, for forecasts: longctx/attention/speeds.py says what each constant is.
# `python -m benchmarks.gpu --refit` rewrites this file, and keeps no other comments.
"""
FORWARD, BACKWARD = " forward", " backward"


class Constant(NamedTuple):
    """A number of the table."""

    value: float
    source: str
    """The publication that gives the value, or the device, date and commit of its measurement."""


@dataclass(frozen=True)
class SpeedTable:
    """The constants of each device."""

    constants: Mapping[str, Mapping[str, Constant]]
    """Device -> name of the constant -> the constant."""

    @classmethod
    def read(cls, path: Path = FILE) -> SpeedTable:
        """Return the table that a file holds."""
        devices = tomllib.loads(path.read_text(encoding="utf-8"))
        return cls(
            {
                device: {name: Constant(float(entry["value"]), entry["source"]) for name, entry in entries.items()}
                for device, entries in devices.items()
            }
        )

    def write(self, path: Path) -> None:
        """Replace the file by this table in one step: another process reads either the old table or the new one."""
        lines = [_HEAD.rstrip()]
        for device, entries in self.constants.items():
            lines += ["", f"[{_key(device)}]"]
            lines += [
                f"{_key(name)} = {{ value = {number(c.value)}, source = {_text(c.source)} }}"
                for name, c in entries.items()
            ]
        with written_whole(path) as unfinished:
            unfinished.write_text("\n".join([*lines, ""]), encoding="utf-8")

    def value(self, device: str, name: str) -> float:
        """Return the value of one constant."""
        return self.constants[device][name].value

    def values(self, name: str) -> dict[str, float]:
        """Return this constant's value on every device that has one."""
        return {device: entries[name].value for device, entries in self.constants.items() if name in entries}

    def kernels(self) -> dict[str, dict[str, tuple[float, float]]]:
        """Return kernel -> device -> the parts of the peak that it reaches, forward and backward."""
        found: dict[str, dict[str, tuple[float, float]]] = {}
        for device, entries in self.constants.items():
            for name in entries:
                if name.endswith(FORWARD):
                    kernel = name.removesuffix(FORWARD)
                    parts = entries[name].value, entries[kernel + BACKWARD].value
                    found.setdefault(kernel, {})[device] = parts
        return found

    def replaced(self, device: str, constants: Mapping[str, Constant]) -> SpeedTable:
        """Return the table with these constants of one device replaced."""
        return SpeedTable({**self.constants, device: {**self.constants[device], **constants}})


def number(value: float) -> str:
    """Return the value as TOML writes it: 989e12 as 9.89e14."""
    return f"{value:.10g}".replace("e+", "e")


def _key(name: str) -> str:
    return name if name.replace("_", "").isalnum() else _text(name)


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)  # JSON's escapes are also TOML's


SPEEDS = SpeedTable.read()

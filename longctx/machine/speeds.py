"""What a device, an attention kernel and a link do in a second, for forecasts and for the choice of a backend.

The table is the file speeds.toml beside this module. It has a row for each device, and a value with its source for each
constant. `python -m benchmarks.gpu --refit` replaces the constants of a GPU by values measured on it. The last rows,
GPU and CPU, stand for all other devices. The constants of a row are:

    device_bytes        memory of the device, as `torch.cuda.mem_get_info` gives its total
    peak_flops          FLOPs a second: the dense peak in bf16
    matmul_part         the part of the peak that matrices of a few thousand columns reach
    KERNEL forward,     the parts of the peak that an attention kernel reaches on long documents with heads of 128; the
    KERNEL backward     first kernel of a row is the one that a run takes for packed documents
    memory_speed        bytes a second that the device reads or writes in its own memory
    within_exchange, within_pass_on, across_exchange, across_pass_on
                        bytes a second of the links within a node and between nodes, see `Link`
    host_link           bytes a second between the device and pinned host memory
    host_memory         bytes a second that all processes of a node read and write
    message_seconds, launch_seconds, entry_seconds
                        latencies, see `Speeds`
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("speeds.toml")
FORWARD, BACKWARD = " forward", " backward"

FLOPS_FORWARD, FLOPS_BACKWARD = 4, 10
"""FLOPs of attention for each legal pair of query and key, head, and element of the head: those of FlashAttention-2
(arXiv 2307.08691, section 4.1)."""

ADAMW_TRAFFIC_BYTES = 28
"""Bytes read and written for each parameter by AdamW: weight, gradient and two moments in fp32."""

FLASH_2, CUDNN = "flash-attn 2", "cuDNN"
"""Kernels of the table that torch has, too."""


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
        rows = tomllib.loads(path.read_text(encoding="utf-8"))
        return cls(
            {
                device: {name: Constant(float(entry["value"]), entry["source"]) for name, entry in row.items()}
                for device, row in rows.items()
            }
        )

    def value(self, device: str, name: str) -> float:
        """Return the value of one constant."""
        return self.constants[device][name].value

    def values(self, name: str) -> dict[str, float]:
        """Return this constant's value on every device that has one."""
        return {device: row[name].value for device, row in self.constants.items() if name in row}

    def kernels(self, device: str) -> dict[str, tuple[float, float]]:
        """Return the parts of the peak that kernels reach on a device, forward and backward; the usual kernel first."""
        row = self.constants[device]
        names = [name.removesuffix(FORWARD) for name in row if name.endswith(FORWARD)]
        return {name: (row[name + FORWARD].value, row[name + BACKWARD].value) for name in names}

    def row(self, name: str) -> str | None:
        """Return the row for the name that torch gives a GPU, as NVIDIA H100 80GB HBM3; None for an unknown GPU."""
        return next((device for device in self.values("device_bytes") if device in name), None)


TABLE = SpeedTable.read()

PEAK_FLOPS = {device: TABLE.value(device, "peak_flops") for device in TABLE.values("device_bytes")}
"""Dense bf16 peak in FLOPs a second, of the GPUs that are known."""


class Link(NamedTuple):
    """The speed of a link, in bytes a second that every rank of a group sends while it receives as many."""

    exchange: float
    """Speed of an all-to-all."""
    pass_on: float
    """Speed of sending to one other rank."""


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """What one device and its links do in a second: FLOPs, or bytes."""

    matmul: float
    """FLOPs a second of large matrices."""
    attention_forward: float
    attention_backward: float
    """FLOPs a second of the attention kernel."""
    memory: float
    """Bytes a second that the device reads or writes in its own memory."""
    within: Link
    """Link between devices of a node."""
    across: Link
    """Link between nodes, for each device."""
    host_link: float
    """Bytes a second between a device and pinned host memory."""
    host_memory: float
    """Bytes a second that all processes of a node together read and write in host memory."""
    message_seconds: float = 20e-6
    launch_seconds: float = 5e-6
    entry_seconds: float = 0.0
    """Latency of each pair of token ranges in a call of attention; 0 for kernels that take all of them at once."""

    @property
    def attention(self) -> float:
        """FLOPs a second of attention's two passes together."""
        both = FLOPS_FORWARD / self.attention_forward + FLOPS_BACKWARD / self.attention_backward
        return (FLOPS_FORWARD + FLOPS_BACKWARD) / both if both else math.inf

    @classmethod
    def of(cls, row: str, kernel: str | None = None, table: SpeedTable = TABLE) -> Speeds:
        """Return the speeds of a row of the table, with an attention kernel of that row, by default its first.

        Raises:
            ValueError: for a device or a kernel that the table does not have, with those that it has.
        """
        if row not in table.constants:
            known = ", ".join(table.values("peak_flops"))
            raise ValueError(f"No speeds are known for the device {row!r}. Use one of {known}.")
        of, kernels = {name: constant.value for name, constant in table.constants[row].items()}, table.kernels(row)
        kernel = next(iter(kernels)) if kernel is None else kernel
        if kernel not in kernels:
            raise ValueError(
                f"No speeds are known for the kernel {kernel!r} on {row}. Use one of {', '.join(kernels)}."
            )
        forward, backward = (part * of["peak_flops"] for part in kernels[kernel])
        return cls(
            matmul=of["matmul_part"] * of["peak_flops"],
            attention_forward=forward,
            attention_backward=backward,
            memory=of["memory_speed"],
            within=Link(of["within_exchange"], of["within_pass_on"]),
            across=Link(of["across_exchange"], of["across_pass_on"]),
            **{name: of[name] for name in ("host_link", "host_memory")},
            **{name: of[name] for name in ("message_seconds", "launch_seconds", "entry_seconds")},
        )

    @classmethod
    def named(cls, name: str, kernel: str | None = None) -> Speeds:
        """Return the speeds of `CPU`, or of the GPU that torch calls so. PCIe cards have the links of the row GPU."""
        row = "CPU" if name == "CPU" else TABLE.row(name) or "GPU"
        speeds = cls.of(row, kernel)
        return replace(speeds, within=cls.of("GPU").within) if "PCI" in name.upper() else speeds

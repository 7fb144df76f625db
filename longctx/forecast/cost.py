"""What an optimizer step of a run costs on a machine, and the longest sequences that fit."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from longctx.forecast.memory import NOT_ALLOCATED, device_moments, host_moments, largest
from longctx.forecast.seconds import node_ranks, step_seconds
from longctx.forecast.shape import FP32, RunShape
from longctx.machine.here import Machine

GIB = 2**30

FREE_PART = 0.1
"""The part of the memory that a recommended run leaves free, since a forecast errs."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Bytes and seconds of an optimizer step, as predicted. Memory is that of the peak, which `moment` names."""

    device: Mapping[str, float]
    """Bytes of one device by category; empty where all memory is the host's."""
    host: Mapping[str, float]
    """Bytes of a node's host memory by category."""
    moment: str
    """When the device is fullest: loss, attention or MLP; or loading, of 4-bit weights."""
    host_moment: str
    """When the host is fullest: loading, step or saving."""
    seconds: Mapping[str, float]
    """Seconds of a step by part: linear, elementwise, attention, recurrent, recomputed, launches, weights, host copies,
    optimizer. Hidden ones are left out."""
    disk: Mapping[str, float]
    """Bytes of what a run writes: the model, or the adapter, at its end, and each checkpoint."""
    length: int
    """Tokens of a row, padding included."""
    tokens: int
    """Tokens of a step, of all ranks."""
    world_size: int
    machine: Machine

    @cached_property
    def device_bytes(self) -> float:
        """Bytes that a device needs."""
        return sum(self.device.values())

    @property
    def allocated_bytes(self) -> float:
        """The part of `device_bytes` that tensors take, as `torch.cuda.max_memory_allocated` counts it."""
        return sum(size for name, size in self.device.items() if name not in NOT_ALLOCATED)

    @cached_property
    def host_bytes(self) -> float:
        """Bytes that the host of a node needs."""
        return sum(self.host.values())

    @property
    def used(self) -> float:
        """The used part of the device's memory or of the host's, whichever is larger."""
        return max(self.of_device, self.host_bytes / self.machine.host_bytes)

    @property
    def of_device(self) -> float:
        """The used part of the device's memory; 0 where all memory is the host's."""
        return 0.0 if self.machine.is_cpu else self.device_bytes / self.machine.device_bytes

    @property
    def level(self) -> int:
        """0 for what leaves FREE_PART of the memory free, 1 for what fits, and 2 for what does not."""
        return level_of(self.used)

    @property
    def fits(self) -> bool:
        """Whether the memory suffices."""
        return self.used <= 1

    @property
    def binds(self) -> Literal["device", "host"]:
        """The memory that is fuller."""
        return "device" if self.of_device >= self.used else "host"

    @cached_property
    def step_seconds(self) -> float:
        """Seconds of an optimizer step."""
        return sum(self.seconds.values())

    @property
    def speed(self) -> float:
        """Tokens a second and device."""
        return self.tokens / self.step_seconds / self.world_size

    @property
    def known_speed(self) -> float | None:
        """`speed`; None where the device's speeds are those of others."""
        return self.speed if self.machine.is_known else None

    def describe(self) -> str:
        """Return memory and time in one line."""
        machine = self.machine
        parts = [] if machine.is_cpu else [_gib(self.device_bytes, machine.device_bytes, "GPU")]
        parts.append(_gib(self.host_bytes, machine.host_bytes, "host"))
        if machine.is_known:
            parts.append(f"{self.step_seconds:.3g} s a step, {self.speed:,.0f} tokens/s a device")
        if (runs := machine.correction.runs) > 0:
            parts.append(f"corrected by {runs} run{'s' * (runs > 1)} on this kind of GPU")
        return ", ".join(parts)


def _gib(needed: float, total: float, where: str) -> str:
    return f"{needed / GIB:.1f} of {total / GIB:.1f} GiB of {where} memory"


def cost(
    shape: RunShape,
    machine: Machine,
    length: int,
    documents: Sequence[int] | None = None,
    *,
    counts_experts: bool = False,
) -> Cost:
    """Return what an optimizer step costs.

    Args:
        length: tokens of a row, before it is padded to the shape's multiple.
        documents: lengths of a row's documents, at most `length` in all; padding is one more. None means one document.
        counts_experts: see `longctx.forecast.seconds.step_seconds`.
    """
    padded = shape.padded(length)
    ranks = node_ranks(shape, machine)
    moment, device = largest(_device(shape, machine, padded))
    host_moment, host = largest(host_moments(shape, padded, ranks, is_cpu=machine.is_cpu))
    if machine.is_cpu:
        host |= {name: host.get(name, 0.0) + size * ranks for name, size in device.items()}
        device = {}
    row = filled(documents or [length], padded)
    seconds = step_seconds(shape, machine, padded, row, counts_experts=counts_experts)
    trained = shape.model.num_trained_parameters
    return Cost(
        device=_present(device),
        host=_present(host),
        moment=moment,
        host_moment=host_moment,
        seconds=_present(seconds),
        disk={"model": FP32 * trained, "checkpoint": 3 * FP32 * trained},
        length=padded,
        tokens=padded * shape.rows * shape.dp * shape.micro_batches,
        world_size=shape.world_size,
        machine=machine.with_documents(row),
    )


def filled(documents: Sequence[int], length: int) -> list[int]:
    """Return the lengths of documents and, as one more, of the padding that makes a row of `length` tokens of them."""
    rest = length - sum(documents)
    return [*documents, rest] if rest > 0 else list(documents)


def level_of(used: float) -> int:
    """Return `Cost.level` for a used part of the memory."""
    return (used > 1 - FREE_PART) + (used > 1)


def peaks_and_seconds(shape: RunShape, machine: Machine, length: int, documents: Sequence[int]) -> tuple[Any, Any, Any]:
    """Return `Cost.used`, `Cost.step_seconds` and `Cost.host_bytes`, as arrays if the shape has arrays.

    Args:
        length: tokens of a row, padding included.
        documents: lengths of its documents, `length` in all.
    """
    device, host = _peaks(shape, machine, length)
    seconds = sum(step_seconds(shape, machine, length, documents).values())
    return np.maximum(device / (machine.device_bytes or 1.0), host / machine.host_bytes), seconds, host


def _peaks(shape: RunShape, machine: Machine, length: int) -> tuple[Any, Any]:
    """Return the bytes of a device, 0 where all memory is the host's, and those of the host, each at its peak."""
    ranks = node_ranks(shape, machine)
    moments = _device(shape, machine, length), host_moments(shape, length, ranks, is_cpu=machine.is_cpu)
    device, host = (functools.reduce(np.maximum, (sum(sizes.values()) for sizes in of.values())) for of in moments)
    return (0.0, host + ranks * device) if machine.is_cpu else (device, host)


def _device(shape: RunShape, machine: Machine, length: int) -> dict[str, dict[str, Any]]:
    """Return `device_moments`, with what is allocated as runs on this kind of device have corrected it."""
    moments, factor = device_moments(shape, length, is_cpu=machine.is_cpu), machine.memory_factor
    if factor == 1:
        return moments
    return {
        moment: {name: size * (1 if name in NOT_ALLOCATED else factor) for name, size in sizes.items()}
        for moment, sizes in moments.items()
    }


def _present(sizes: Mapping[str, Any]) -> Mapping[str, float]:
    return MappingProxyType({name: float(size) for name, size in sizes.items() if size})


class Reach(NamedTuple):
    """The longest sequence that fits."""

    length: int
    binds: Literal["device", "host"]
    """The memory that is full at this length."""


def reach(shape: RunShape, machine: Machine, *, beside_device: float = 0.0, beside_host: float = 0.0) -> Reach:
    """Return the longest sequence that fits, 0 if none does, and which memory limits it.

    Args:
        beside_device, beside_host: bytes that the prediction leaves out at any length, such as the difference to a
            measured peak.

    Raises:
        ValueError: if the machine's memory limits no length.
    """

    def full(length: int) -> Literal["device", "host"] | None:
        device, host = _peaks(shape, machine, length)
        if not machine.is_cpu and device + beside_device > machine.device_bytes:
            return "device"
        return "host" if host + beside_host > machine.host_bytes else None

    fits, too_long = 0, shape.sp
    while (binds := full(too_long)) is None:
        fits, too_long = too_long, 2 * too_long
        if too_long > 2**48:
            raise ValueError(
                f"{machine.device_bytes:.3g} bytes of the device and {machine.host_bytes:.3g} of the host limit no "
                "length. Use finite numbers."
            )
    while too_long - fits > max(shape.sp, fits // 4096):
        middle = (fits + too_long) // 2
        found = full(middle)
        fits, too_long, binds = (middle, too_long, binds) if found is None else (fits, middle, found)
    return Reach(fits, binds)

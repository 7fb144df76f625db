"""What an optimizer step of a run takes on the hardware at hand: memory and seconds, as predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longctx.attention.choice import assumed_documents
from longctx.forecast.closed_form import Breakdown, predict
from longctx.forecast.hardware import Hardware
from longctx.forecast.memory_setup import MemorySetup
from longctx.forecast.step_time import Speeds, StepTime, step_time

GIB = 2**30

FREE_PART = 0.1
"""The part of the memory that a recommended set-up leaves free, since a forecast errs."""


@dataclass(frozen=True, kw_only=True)
class ExpectedStep:
    """What an optimizer step is predicted to take."""

    memory: Breakdown
    """The peak of one device, and the host memory of its node."""
    gpu_bytes: int
    """Memory of one GPU; 0 for a run on the CPU."""
    host_bytes: int
    """Memory of the node's host."""
    seconds: float | None
    """None if the speeds of the device are unknown."""
    tokens_per_second_per_device: float | None

    @property
    def used(self) -> float:
        """The used part of the device's memory or of the host's, whichever is larger."""
        host = self.memory.host_bytes / self.host_bytes
        return max(self.memory.device_bytes / self.gpu_bytes, host) if self.gpu_bytes else host

    @property
    def fits(self) -> bool:
        return self.used <= 1

    def describe(self) -> str:
        """Return memory and time in one line."""
        parts = [_gib(self.memory.device_bytes, self.gpu_bytes, "GPU")] if self.gpu_bytes else []
        if self.memory.host_bytes:
            parts.append(_gib(self.memory.host_bytes, self.host_bytes, "host"))
        if self.seconds is not None:
            parts.append(f"{self.seconds:.3g} s a step, {self.tokens_per_second_per_device:,.0f} tokens/s a device")
        return ", ".join(parts)


def _gib(needed: float, total: float, where: str) -> str:
    return f"{needed / GIB:.1f} of {total / GIB:.1f} GiB of {where} memory"


def expect_step(
    setup: MemorySetup,
    hardware: Hardware,
    *,
    length: int,
    multiple: int,
    accumulation: int,
    packed: bool,
    documents: Sequence[int] | None = None,
    counts_experts: bool = False,
) -> ExpectedStep:
    """Predict an optimizer step.

    Args:
        length: tokens of a sequence, before it is padded to `multiple`.
        accumulation: micro-batches of the step.
        packed: whether a sequence holds several documents.
        documents: their lengths, at most `length` in all; None assumes some.
        counts_experts: whether a step of several micro-batches runs them forward once more, for the routers' auxiliary
            loss.
    """
    padded = -(-length // multiple) * multiple
    lengths = documents_of(length, padded, packed=packed, given=documents)
    speeds = None if setup.is_cpu else Speeds.of_device(hardware.gpu_name, lengths)
    seconds = speed = None
    if speeds is not None:
        time = step_time(setup, padded, speeds, documents=lengths)
        seconds = _optimizer_step(time, accumulation)
        if counts_experts and accumulation > 1:
            seconds += accumulation * _forward_seconds(time)
        speed = time.tokens * accumulation / seconds / setup.world_size
    return ExpectedStep(
        memory=predict(setup, padded),
        gpu_bytes=0 if setup.is_cpu else hardware.gpu_bytes,
        host_bytes=hardware.host_bytes,
        seconds=seconds,
        tokens_per_second_per_device=speed,
    )


def documents_of(length: int, padded: int, *, packed: bool, given: Sequence[int] | None = None) -> list[int]:
    """Return the lengths of a sequence's documents and, as one more, of its padding, `padded` in all.

    Args:
        given: lengths of the documents, at most `length` in all; None assumes some.
    """
    lengths = list(given or _assumed(length, packed=packed))
    rest = padded - sum(lengths)
    return [*lengths, rest] if rest > 0 else lengths


def _assumed(length: int, *, packed: bool) -> list[int]:
    """Return assumed lengths of documents, `length` in all."""
    assumed = assumed_documents(length, packed=packed).rows[0]
    repeated = np.tile(assumed, -(-length // int(assumed.sum())))  # a very long sequence repeats the assumed documents
    lengths = np.diff(np.minimum(np.cumsum(repeated), length), prepend=0)
    return lengths[lengths > 0].tolist()


def _forward_seconds(time: StepTime) -> float:
    """Return the seconds of a forward pass of one micro-batch; backward counts as two."""
    return sum(time.parts.get(name, 0.0) for name in ("linear", "elementwise", "attention", "launches", "weights")) / 3


def _optimizer_step(time: StepTime, accumulation: int) -> float:
    """Return the seconds of an optimizer step of several micro-batches."""
    return accumulation * time.seconds - (accumulation - 1) * time.parts.get("optimizer", 0.0)

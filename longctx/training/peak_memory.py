"""A run's peak memory by rank, the length that it could reach, and flags that save memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from longctx.forecast.closed_form import max_length, predict, reach
from longctx.forecast.hardware import host_bytes, peak_resident_bytes
from longctx.forecast.memory_setup import MemorySetup
from longctx.launch.terminal import token_label

GIB = 2**30

DIGITS = 2
"""Significant digits of predicted lengths, which are no more exact."""
IMBALANCE = 1.1
"""Ratio of the largest peak to the mean above which a run warns."""
NEGLIGIBLE_BYTES = GIB // 4
"""Bytes by which the largest peak may exceed the mean without a warning."""


@dataclass(frozen=True)
class PeakMemory:
    """Peak memory since processes began, in bytes, one number per rank."""

    allocated: tuple[int, ...]
    """Bytes of tensors on the GPU; 0 on the CPU."""
    reserved: tuple[int, ...]
    """Bytes that the GPU's caching allocator reserved."""
    host: tuple[int, ...]
    """Resident host memory, libraries included."""
    retries: tuple[int, ...]
    """GPU allocations that failed, or succeeded only after the allocator freed its cache."""
    device_total: tuple[int, ...]
    """Memory of the rank's GPU; 0 on the CPU."""
    host_total: tuple[int, ...]
    """Host memory of the rank's node."""

    @classmethod
    def here(cls, device: torch.device) -> tuple[int, ...]:
        """Return this rank's numbers, in the order of the fields."""
        own = (peak_resident_bytes(), 0, 0, host_bytes())
        if device.type != "cuda":
            return (0, 0, *own)
        stats = torch.cuda.memory_stats(device)
        retries = stats.get("num_alloc_retries", 0) + stats.get("num_ooms", 0)
        allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        return allocated, reserved, own[0], retries, torch.cuda.get_device_properties(device).total_memory, own[-1]

    @classmethod
    def of_ranks(cls, numbers: Sequence[Sequence[float]]) -> PeakMemory:
        """Combine what `here` returned on each rank."""
        return cls(*(tuple(map(int, column)) for column in zip(*numbers, strict=True)))

    @property
    def has_devices(self) -> bool:
        """Whether ranks have GPUs."""
        return self.device_total[0] > 0

    @property
    def kinds(self) -> dict[str, tuple[int, ...]]:
        """The peaks by kind of memory, without GPUs only the host's."""
        of_device = {"allocated": self.allocated, "reserved": self.reserved} if self.has_devices else {}
        return of_device | {"host": self.host}

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of trainer_state.json, in GiB."""
        return {
            name: {
                "gib_by_rank": [round(peak / GIB, 3) for peak in peaks],
                "rank_of_max": peaks.index(max(peaks)),
                "rank_of_min": peaks.index(min(peaks)),
            }
            for name, peaks in self.kinds.items()
        } | {"allocation_retries_by_rank": list(self.retries)}

    def describe(self) -> list[str]:
        """Return a line for each kind of memory."""
        return [
            f"{name:9} {max(peaks) / GIB:.2f} GiB at most, on rank {peaks.index(max(peaks))}; "
            f"{min(peaks) / GIB:.2f} at least, on rank {peaks.index(min(peaks))}; "
            f"{sum(peaks) / len(peaks) / GIB:.2f} on average"
            for name, peaks in self.kinds.items()
        ]

    def of_fullest_node(self, ranks_per_node: int) -> int:
        """Return the host bytes of the node whose ranks took most."""
        return max(sum(self.host[i : i + ranks_per_node]) for i in range(0, len(self.host), ranks_per_node))


@dataclass
class MemoryWarnings:
    """Warnings about a run's memory, each given once."""

    said: set[str] = field(default_factory=set)

    def new(self, peak: PeakMemory) -> Iterator[str]:
        """Yield the warnings that were not given before."""
        for name, message in self._all(peak):
            if name not in self.said:
                self.said.add(name)
                yield message

    def _all(self, peak: PeakMemory) -> Iterator[tuple[str, str]]:
        peaks = peak.allocated if peak.has_devices else peak.host
        most, mean = max(peaks), sum(peaks) / len(peaks)
        if most > max(IMBALANCE * mean, mean + NEGLIGIBLE_BYTES):
            rank, kind = peaks.index(most), "GPU" if peak.has_devices else "host"
            yield (
                "imbalance",
                f"{kind} memory is uneven: rank {rank} took {most / GIB:.1f} GiB, {most / mean - 1:.0%} above the mean "
                f"of {mean / GIB:.1f}. The fullest rank bounds the length; trainer_state.json has every rank's peak.",
            )
        if retries := max(peak.retries):
            yield (
                "retries",
                f"rank {peak.retries.index(retries)} ran out of GPU memory and tried again {retries} times, each time "
                "after giving back its cache, which is slow: blocks of memory are there, but none large enough. Set "
                "PYTORCH_ALLOC_CONF=expandable_segments:True, or shorten --max_length.",
            )


def describe_reach(setup: MemorySetup, peak: PeakMemory, length: int) -> str:
    """Return the run's last line: `peak 41.2 of 80.0 GiB on rank 3; these settings reach about 1.9M tokens`.

    Args:
        peak: peak of a run whose longest micro-batch had rows of `length` tokens on average; the closed form's
            difference between lengths is added to it.
    """
    predicted, node = predict(setup, length), peak.of_fullest_node(setup.ranks_per_node)
    device_total, host_total = min(peak.device_total), min(peak.host_total)
    longest = reach(
        setup,
        device_total,
        host_total,
        beside_device=max(peak.allocated) - predicted.allocated_bytes,
        beside_host=node - predicted.host_bytes,
    )
    reached = f"these settings reach about {token_label(longest.length, DIGITS)} tokens"
    on_host = f"{node / GIB:.1f} of {host_total / GIB:.1f} GiB of host memory"
    if not peak.has_devices:
        ranks = f", by the {setup.ranks_per_node} ranks of a machine" if setup.ranks_per_node > 1 else ""
        return f"peak {on_host}{ranks}; {reached}"
    rank = peak.allocated.index(max(peak.allocated))
    on_device = f"peak {max(peak.allocated) / GIB:.1f} of {device_total / GIB:.1f} GiB on rank {rank}"
    if longest.binds == "host":
        return f"{on_device}, {on_host}; {reached}, where host memory is full"
    return f"{on_device}; {reached}"


# Out of memory


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one of its causes, says that device or host memory is full."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(seen, RuntimeError) and _SAYS_OUT_OF_MEMORY.search(str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


_SAYS_OUT_OF_MEMORY = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|CUDA.*out of memory|bad_alloc"
)


def is_first_to_say() -> bool:
    """Whether no other rank ran out of memory before; true for all if they cannot communicate."""
    if not dist.is_initialized():
        return True
    with suppress(RuntimeError):  # the store ended with its rank
        return dist.distributed_c10d._get_default_store().add("longctx/out of memory", 1) == 1
    return True


def suggest_savings(
    setup: MemorySetup,
    length: int,
    device_bytes: float,
    host_bytes: float,
    memory_options: Mapping[str, MemorySetup],
) -> str:
    """Return advice for an out-of-memory error: the largest consumers, and the memory options by effect.

    Args:
        length: tokens of a row.
        device_bytes, host_bytes: memory for the step on one GPU (ignored on the CPU) and on one node.
        memory_options: flags that can be added -> the set-up with them.
    """
    peak = predict(setup, length)
    taken, place = (peak.host, "host memory") if setup.is_cpu else (peak.device, "a GPU")
    largest = sorted(taken.items(), key=lambda item: -item[1])[:4]
    fits = max_length(setup, device_bytes, host_bytes)
    lengths = {flags: max_length(changed, device_bytes, host_bytes) for flags, changed in memory_options.items()}
    helpful = sorted((flags for flags in lengths if lengths[flags] > 1.02 * fits), key=lambda flags: -lengths[flags])
    room = f"{host_bytes / GIB:.1f} GiB of host memory"
    if not setup.is_cpu:
        room = f"{device_bytes / GIB:.1f} GiB of a GPU and {room}"
    rank = f" on rank {dist.get_rank()}" if dist.is_initialized() else ""
    return "\n".join(
        [
            f"longctx: out of memory{rank}, with sequences of {length:,} tokens, {setup.local_tokens(length):,.0f} of "
            "them a rank. What would have helped, all predicted:",
            f"longctx: largest   {', '.join(f'{name} {size / GIB:.2f}' for name, size in largest)} GiB of {place}",
            f"longctx: as it is  sequences of about {token_label(fits, DIGITS)} tokens, in {room}",
            *(f"longctx: add       {flags}: about {token_label(lengths[flags], DIGITS)}" for flags in helpful),
            "longctx: or        a shorter --max_length" if fits else "longctx: or        more devices, a smaller model",
        ]
    )

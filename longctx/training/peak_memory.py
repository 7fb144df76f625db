"""A run's peak memory on all ranks, and what a log entry says of numbers that every rank has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longctx.machine.here import host_bytes, peak_resident_bytes

GIB = 2**30

MOST_RANKS = 64
"""The most ranks whose numbers are in the log one by one."""
IMBALANCE = 1.1
"""Ratio of the largest peak to the mean above which a run warns."""
NEGLIGIBLE_BYTES = GIB // 4
"""Bytes by which the largest peak may exceed the mean without a warning."""


def of_ranks(values: Tensor, names: Sequence[str], unit: str = "") -> dict[str, dict[str, Any]]:
    """Return what the log says of numbers that every rank has: `max`, `min`, `mean`, `rank_of_max` and `by_rank`.

    Runs on more than MOST_RANKS ranks have no `by_rank`, so that the size of a log entry does not grow with them.

    Args:
        values: float64 [world, numbers] on the host.
        names: of the numbers.
        unit: prefix of the keys, such as `gib_`.
    """
    extremes = torch.stack((values.amax(0), values.amin(0), values.mean(0))).round(decimals=4).T.tolist()
    keys = f"{unit}max", f"{unit}min", f"{unit}mean"
    found = {name: dict(zip(keys, of, strict=True)) for name, of in zip(names, extremes, strict=True)}
    for entry, rank in zip(found.values(), values.argmax(0).tolist(), strict=True):
        entry["rank_of_max"] = rank
    if len(values) <= MOST_RANKS:
        for entry, by_rank in zip(found.values(), values.T.round(decimals=4).tolist(), strict=True):
            entry[f"{unit}by_rank"] = by_rank
    return found


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
        host, host_total = peak_resident_bytes(), host_bytes()
        if device.type != "cuda":
            return 0, 0, host, 0, 0, host_total
        stats = torch.cuda.memory_stats(device)
        retries = stats.get("num_alloc_retries", 0) + stats.get("num_ooms", 0)
        allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        return allocated, reserved, host, retries, torch.cuda.get_device_properties(device).total_memory, host_total

    @classmethod
    def of_ranks(cls, numbers: Sequence[Sequence[float]]) -> PeakMemory:
        """Combine what `here` returned on each rank."""
        return cls(*(tuple(map(int, column)) for column in zip(*numbers, strict=True)))

    @property
    def has_devices(self) -> bool:
        """Whether ranks have GPUs."""
        return self.device_total[0] > 0

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of trainer_state.json: the peaks by kind of memory, in GiB, without GPUs only the host's."""
        kinds = {"allocated": self.allocated, "reserved": self.reserved} if self.has_devices else {}
        kinds["host"] = self.host
        peaks = torch.tensor([*kinds.values()], dtype=torch.float64).T / GIB
        retries = torch.tensor(self.retries, dtype=torch.float64)[:, None]
        return of_ranks(peaks, [*kinds], "gib_") | of_ranks(retries, ["allocation_retries"])

    def of_fullest_node(self, ranks_per_node: int) -> int:
        """Return the host bytes of the node whose ranks took most."""
        return max(sum(self.host[i : i + ranks_per_node]) for i in range(0, len(self.host), ranks_per_node))

    def warnings(self) -> Iterator[tuple[str, str]]:
        """Yield warnings of uneven memory and of the allocator's retries, each with a name."""
        peaks, kind = (self.allocated, "GPU") if self.has_devices else (self.host, "host")
        most, mean = max(peaks), sum(peaks) / len(peaks)
        if most > max(IMBALANCE * mean, mean + NEGLIGIBLE_BYTES):
            yield (
                "imbalance",
                f"{kind} memory is uneven: rank {peaks.index(most)} took {most / GIB:.1f} GiB, {most / mean - 1:.0%} "
                f"above the mean of {mean / GIB:.1f}. The fullest rank bounds the length; trainer_state.json has the "
                "peaks of the ranks.",
            )
        if retries := max(self.retries):
            yield (
                "retries",
                f"rank {self.retries.index(retries)} ran out of GPU memory and tried again {retries} times, each time "
                "after giving back its cache, which is slow: blocks of memory are there, but none large enough. Set "
                "PYTORCH_ALLOC_CONF=expandable_segments:True, or shorten --max_length.",
            )

"""The parts of a memory trace: allocations with their names and categories, and their peak."""

from __future__ import annotations

from dataclasses import dataclass

import torch

PARAMETERS = "parameters"
"""Parameters that a rank holds throughout the step."""
GATHERED = "gathered parameters"
"""Whole parameters that FSDP2 and ZeRO-3 gather for as long as a layer needs them."""
GRADIENTS = "gradients"
OPTIMIZER_STATES = "optimizer states"
ACTIVATIONS = "activations"
"""Tensors made in the forward pass and alive when the backward pass begins."""
INPUTS = "inputs"
"""The batch: tensors from before the trace that are none of the above."""
TEMPORARY = "temporary"
"""All other tensors: freed before the backward pass begins, or made in it, recomputed layers included."""
CATEGORIES = (PARAMETERS, GATHERED, GRADIENTS, OPTIMIZER_STATES, ACTIVATIONS, INPUTS, TEMPORARY)


@dataclass(eq=False, kw_only=True)
class Allocation:
    """One storage, described by the tensor that it was first seen as."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    op: str
    """The operator that made it; empty if it existed before the trace."""
    module: str
    """The innermost module that was running, or in a backward pass the autograd node."""
    phase: str
    """When it was made: `before`, `forward`, `backward` or `optimizer`."""
    category: str
    on_host: bool
    nbytes: int = 0
    """The most bytes that it held."""

    def __str__(self) -> str:
        where = "host " if self.on_host else ""
        shape = ", ".join(map(str, self.shape))
        dtype = str(self.dtype).removeprefix("torch.")
        made = f"{self.op} in {self.module or 'no module'}" if self.op else self.module
        return f"{_gib(self.nbytes)} {where}{self.category}: {dtype} [{shape}] by {made}, {self.phase}"


@dataclass(frozen=True, eq=False)
class MemoryTrace:
    """The memory of one traced step in bytes, predicted if the step ran on fake tensors."""

    peak_bytes: int
    """The most bytes that the device held at once."""
    by_category: dict[str, int]
    """`peak_bytes` by category, in the order of `CATEGORIES`."""
    host_peak_bytes: int
    """The most bytes that the host held at once on the device's behalf."""
    host_by_category: dict[str, int]
    largest: tuple[Allocation, ...]
    """The device's allocations at its peak, the largest first."""
    allocations: tuple[Allocation, ...]
    """All allocations that were seen, in order."""
    timeline: tuple[tuple[int, int], ...]
    """(device, host) bytes after every allocation and release."""
    peaks: dict[str, tuple[int, int]]
    """The most (device, host) bytes in each part of the step, such as `forward model.layers.N.mlp` or `backward
    MmBackward0`. Each is linear in the length and in the number of layers; their maximum is not."""

    def table(self, num_largest: int = 8) -> str:
        """Return a readable table by category and by tensor."""
        lines = [f"device peak {_gib(self.peak_bytes)}, host peak {_gib(self.host_peak_bytes)}"]
        for name in CATEGORIES:
            device, host = self.by_category[name], self.host_by_category[name]
            if device or host:
                lines.append(f"  {name:20} {_gib(device):>12}" + (f"   host {_gib(host)}" if host else ""))
        lines.append("largest at the peak")
        return "\n".join(lines + [f"  {allocation}" for allocation in self.largest[:num_largest]])


def by_category(held: dict[Allocation, int]) -> dict[str, int]:
    sums = dict.fromkeys(CATEGORIES, 0)
    for allocation, nbytes in held.items():
        sums[allocation.category] += nbytes
    return sums


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**27 else f"{nbytes / 2**20:.2f} MiB"

"""What a trace of memory consists of: allocations with their names and categories, and their peak."""

from __future__ import annotations

from dataclasses import dataclass

import torch

PARAMETERS = "parameters"
"""What a rank holds of them throughout."""
GATHERED = "gathered parameters"
"""Of FSDP2 and ZeRO-3: whole, for as long as a layer needs them."""
GRADIENTS = "gradients"
OPTIMIZER_STATES = "optimizer states"
ACTIVATIONS = "activations"
"""Made in the forward pass and alive when the backward pass begins."""
INPUTS = "inputs"
"""There before the trace began and none of the above: the batch."""
TEMPORARY = "temporary"
"""All else: freed before the backward pass begins, or made in it, recomputed layers included."""
CATEGORIES = (PARAMETERS, GATHERED, GRADIENTS, OPTIMIZER_STATES, ACTIVATIONS, INPUTS, TEMPORARY)


@dataclass(eq=False, kw_only=True)
class Allocation:
    """One storage, by the tensor that it was first seen as."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    op: str
    """The operator that made it; empty where it was there before."""
    module: str
    """The innermost module that was running, or in a backward pass the autograd node."""
    phase: str
    """`before`, `forward`, `backward` or `optimizer`: when it was made."""
    category: str
    on_host: bool
    nbytes: int = 0
    """The most that it held."""

    def __str__(self) -> str:
        where = "host " if self.on_host else ""
        shape = ", ".join(map(str, self.shape))
        dtype = str(self.dtype).removeprefix("torch.")
        made = f"{self.op} in {self.module or 'no module'}" if self.op else self.module
        return f"{_gib(self.nbytes)} {where}{self.category}: {dtype} [{shape}] by {made}, {self.phase}"


@dataclass(frozen=True, eq=False)
class MemoryTrace:
    """The bytes of one traced step. Predicted where the step ran on fake tensors."""

    peak_bytes: int
    """The most that the device held at once."""
    by_category: dict[str, int]
    """Of these, in the order of `CATEGORIES`."""
    host_peak_bytes: int
    """The most that the host held at once, on the device's behalf."""
    host_by_category: dict[str, int]
    largest: tuple[Allocation, ...]
    """What the device held at its peak, the largest first."""
    allocations: tuple[Allocation, ...]
    """Everything that was ever seen, in order."""
    timeline: tuple[tuple[int, int], ...]
    """(device, host) bytes after every allocation and release."""
    peaks: dict[str, tuple[int, int]]
    """The most (device, host) bytes while each part of the step ran: `forward model.layers.N.mlp`,
    `backward MmBackward0`. Each is linear in the length and in the number of layers, where their maximum has kinks."""

    def table(self, num_largest: int = 8) -> str:
        """By category and by tensor, for people."""
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

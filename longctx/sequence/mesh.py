"""All parallel degrees: how many processes there are, and which of them share a sequence."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """The degrees, validated on construction: world_size = dp_replicate × dp_shard × ring × ulysses."""

    world_size: int
    dp_replicate: int = 1
    """Copies of the sharded model (HSDP); 1 is plain FSDP or ZeRO."""
    dp_shard: int = 1
    """Groups of ranks, each with data of its own, that share one sharded copy of the model."""
    ring: int = 1
    """Ranks that pass keys and values around."""
    ulysses: int = 1
    """Ranks that exchange sequence shards for head shards."""

    def __post_init__(self) -> None:
        degrees = (self.dp_replicate, self.dp_shard, self.ring, self.ulysses)
        if min(degrees) < 1 or self.dp_replicate * self.dp_shard * self.sp != self.world_size:
            raise ValueError(
                f"{self.world_size} processes cannot be arranged as {self}. Choose degrees whose product is that."
            )

    @classmethod
    def arrange(cls, world_size: int, *, ring: int = 1, ulysses: int = 1, dp_replicate: int = 1) -> ParallelDims:
        """Assign the ranks that `ring`, `ulysses` and `dp_replicate` leave to dp_shard.

        Raises:
            ValueError: if the degrees do not divide `world_size`, with every factor and the legal values.
        """
        sp = ring * ulysses
        if sp < 1 or world_size % sp:
            legal = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
            raise ValueError(
                f"--sp {sp} does not divide the {world_size} processes: every sequence group needs {sp} of them. "
                f"Use --sp {legal.replace(', ', ' | ')}, or start a multiple of {sp} processes."
            )
        if dp_replicate < 1 or (world_size // sp) % dp_replicate:
            raise ValueError(
                f"--dp_replicate {dp_replicate} does not divide the {world_size // sp} data-parallel ranks "
                f"({world_size} processes / sp {sp}). Use a divisor of {world_size // sp}."
            )
        dp_shard = world_size // sp // dp_replicate
        return cls(world_size=world_size, dp_replicate=dp_replicate, dp_shard=dp_shard, ring=ring, ulysses=ulysses)

    @property
    def sp(self) -> int:
        """Ranks that share one sequence."""
        return self.ring * self.ulysses

    @property
    def dp(self) -> int:
        """Ranks, or groups of sp ranks, that see different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def multiple(self) -> int:
        """What B·S must be a multiple of: 2 × ring for zigzag pieces if ring is above 1, × ulysses for equal shards."""
        return (2 * self.ring if self.ring > 1 else 1) * self.ulysses

    def dp_rank(self, rank: int) -> int:
        """Return which of the dp batches global rank `rank` works on."""
        return rank // self.sp

    def sp_rank(self, rank: int) -> int:
        """Return which shard of its sequence global rank `rank` holds."""
        return rank % self.sp

    def short(self) -> str:
        """Return the degrees above 1: `8 processes = dp_shard 2 × sp 4`."""
        degrees = {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "sp": self.sp}
        split = " × ".join(f"{name} {size}" for name, size in degrees.items() if size > 1)
        return f"{self.world_size} processes = {split}" if split else "1 process"

    def __str__(self) -> str:
        return (
            f"world {self.world_size} = dp_replicate {self.dp_replicate} × dp_shard {self.dp_shard} "
            f"× sp {self.sp} (ring {self.ring} × ulysses {self.ulysses})"
        )


@dataclass(frozen=True)
class SequenceGroups:
    """The process groups that this rank shares a sequence with. A group of one rank is None."""

    sequence: dist.ProcessGroup | None
    """All sp ranks."""
    ring: dist.ProcessGroup | None
    """The ranks with the same heads."""
    ulysses: dist.ProcessGroup | None
    """The ranks with neighbouring tokens, which are neighbours in rank."""


def sequence_groups(dims: ParallelDims, device: torch.device) -> SequenceGroups:
    """Return the groups. Models with the same degrees share them. All ranks call this together.

    Args:
        device: of this rank. A GPU has to be selected before; otherwise torch's meshes select one of their own.
    """
    if dims.sp == 1:
        return SequenceGroups(None, None, None)
    return _groups(dist.group.WORLD, dims, device)


@functools.lru_cache(maxsize=8)
def _groups(world: dist.ProcessGroup, dims: ParallelDims, device: torch.device) -> SequenceGroups:
    """Make the groups of these processes. Each would take threads of gloo, or memory of NCCL, once more."""
    whole = _mesh(device, {"dp": dims.dp, "sp": dims.sp})
    if 1 in (dims.ring, dims.ulysses):
        group = whole["sp"].get_group()
        _meet(device, group)
        return SequenceGroups(group, group if dims.ring > 1 else None, group if dims.ulysses > 1 else None)
    parts = _mesh(device, {"dp": dims.dp, "ring": dims.ring, "ulysses": dims.ulysses})
    groups = [whole["sp"].get_group(), parts["ring"].get_group(), parts["ulysses"].get_group()]
    _meet(device, *groups)
    return SequenceGroups(*groups)


def _mesh(device: torch.device, axes: Mapping[str, int]) -> DeviceMesh:
    """Return a mesh with these axes. On NCCL, the groups of all axes but dp have streams of high priority.

    Attention waits for their messages. The weights that an engine gathers at the same time are needed later, and their
    kernels would keep the messages waiting.
    """
    override: Any = None
    if device.type == "cuda" and "nccl" in dist.get_backend_config():
        world: Any = dist.group.WORLD
        override = {}
        for axis in axes.keys() - {"dp"}:
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options._timeout = world._get_backend(torch.device("cuda")).options._timeout  # else 10 minutes
            override[axis] = "nccl", options
    return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes), backend_override=override)


def select_device(device: torch.device) -> torch.device:
    """Make a GPU the current one of this process, and return it with its index; return other devices as they are.

    Before this, every rank of a machine makes tensors, meshes and NCCL's communicators without an index on GPU 0.

    Args:
        device: a GPU without an index is that of LOCAL_RANK, or the current one where no launcher has set LOCAL_RANK.
            A process that sees one GPU alone has it, whatever its LOCAL_RANK.

    Raises:
        ValueError: if the process does not see that many GPUs.
    """
    if device.type != "cuda":
        return device
    index, visible = device.index, torch.cuda.device_count()
    if index is None:
        index = int(os.environ.get("LOCAL_RANK") or torch.cuda.current_device()) if visible > 1 else 0
    if index >= visible:
        raise ValueError(
            f"cuda:{index} is this rank's GPU by {'LOCAL_RANK' if device.index is None else 'the device given'}, and "
            f"{visible} GPUs are visible. Start at most {visible} processes on this machine, or show them more with "
            "CUDA_VISIBLE_DEVICES."
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _meet(device: torch.device, *groups: dist.ProcessGroup) -> None:
    """Make NCCL's communicators while all ranks take part: in a ring's first hop, some may have nothing to send."""
    if device.type == "cuda":
        for group in groups:
            dist.all_reduce(torch.zeros(1, device=device), group=group)

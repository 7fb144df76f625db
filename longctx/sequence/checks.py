"""Checks that all ranks of a sequence group have the same batches, and the message that counts a step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from longctx.data import DataError
from longctx.ranks.agreement import gather_objects
from longctx.regions import region
from longctx.sequence.layout import Layout
from longctx.sequence.mesh import ParallelDims


def check_world_size(dims: ParallelDims) -> None:
    """Check that the number of processes is still the one that `parallelize` found."""
    if (world_size := dist.get_world_size()) != dims.world_size:
        raise ValueError(
            f"parallelize was called for {dims.world_size} processes, and there are {world_size}. Call it after "
            "init_process_group, or after Accelerator() is made."
        )


def digests_of_ranks(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> list[dict[str, bytes]]:
    """Return the digest of each tensor on every rank of a group. The ranks call it together."""
    data = {name: values.cpu().flatten().view(torch.uint8).numpy().tobytes() for name, values in tensors.items()}
    return _of_ranks({name: hashlib.blake2b(values).digest() for name, values in data.items()}, group)


def check_same_batch(digest: int, group: dist.ProcessGroup | None) -> None:
    """Check that all ranks of a sequence group have cut the same batch. The ranks call it together."""
    everyone = _of_ranks(digest, group)
    if (number := len(set(everyone))) > 1:
        raise ValueError(
            f"the {len(everyone)} ranks of a sequence group have cut {number} different batches. They share every "
            "sequence: give a DataLoader's sampler the data-parallel rank and size, dims.dp_rank(rank) and dims.dp, "
            "and do not let accelerate or the Trainer deal batches out to single ranks."
        )


def _of_ranks(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    everyone = [None] * dist.get_world_size(group)
    with region("wait", "communication"):
        dist.all_gather_object(everyone, value, group=group)
    return everyone


class StepCounts:
    """The message of an optimizer step: counts of each sequence group, and a digest of its ranks' micro-batches.

    It is one MAX all-reduce of host tensors, which travels while the device works on the step before.

    Args:
        layouts: of this rank's micro-batches, which the ranks of a sequence group share.
        counts: what the group has counted in them, at least 0.
        group: of all ranks, for host tensors; None for one process.
        error: what went wrong in reading the micro-batches.
    """

    def __init__(
        self,
        layouts: Sequence[Layout],
        counts: Sequence[int],
        dims: ParallelDims,
        rank: int,
        group: dist.ProcessGroup | None,
        error: Exception | None = None,
    ):
        self._dims, self.error = dims, error
        self._digest = xxhash.xxh3_64_intdigest(repr([layout.digest for layout in layouts]).encode()) >> 2
        highest = self._digest if error is None else 1 << 62  # which no digest is, so that all ranks see it
        self._table = torch.full((dims.dp, len(counts) + 2), -(1 << 62), dtype=torch.int64)
        self._table[dims.dp_rank(rank)] = torch.tensor([*counts, highest, -self._digest])
        self._work = None
        if group is not None:
            self._work = dist.all_reduce(self._table, dist.ReduceOp.MAX, group=group, async_op=True)

    def read(self) -> list[int]:
        """Return the sums of the counts over all sequence groups, after waiting for the message.

        Raises:
            DataError: on all ranks, if one could not read its batches, or those of any group do not have the same
                batches, with the first such rank.
            Exception: any other error in reading, on the rank that met it.
        """
        if self.error is not None and not isinstance(self.error, DataError):
            raise self.error
        if self._work is not None:
            with region("wait", "communication"):
                self._work.wait()
        *counts, highest, lowest = self._table.T.tolist()
        if any(high != -low for high, low in zip(highest, lowest, strict=True)):
            digests, errors = zip(*gather_objects((self._digest, self.error and str(self.error))), strict=True)
            if any(errors):
                raise self.error or DataError(next(filter(None, errors)))
            firsts = [rank - self._dims.sp_rank(rank) for rank in range(len(digests))]
            rank, first = next(pair for pair in enumerate(firsts) if digests[pair[0]] != digests[pair[1]])
            raise DataError(
                f"rank {rank} has other batches in this step than rank {first}, and the ranks of a "
                "sequence group share every sequence. Use data and a chat template that give the same on every rank; "
                "in a training loop of your own, give the DataLoader's sampler dims.dp_rank(rank) and dims.dp."
            )
        return [sum(of_groups) for of_groups in counts]

    def of_groups(self) -> list[list[int]]:
        """Return the counts of each sequence group, after `read`."""
        return self._table[:, :-2].tolist()

"""Checks that a batch can be cut exactly, and that all ranks of a sequence group cut the same one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from longctx.data import IGNORE_INDEX, DataError
from longctx.packing.branches import branches_of
from longctx.ranks.agreement import gather_objects
from longctx.regions import region
from longctx.sequence.mesh import ParallelDims
from longctx.sequence.shard import complete_position_ids, is_right_padding, real_tokens

_UNREAD = ("inputs_embeds", "past_key_values", "cache", "pixel_values", "seq_idx")
"""Inputs of transformers' models that `shard` does not read."""


def check_batch(batch: Mapping[str, Any], dims: ParallelDims) -> None:
    """Check that a batch contains nothing that `shard` would ignore.

    Raises:
        ValueError: for inputs that are not read, documents given by `cu_seq_lens_q` alone, a mask that is not right
            padding, labels on padding, negative labels other than −100, and a `layout` or `lengths` of another batch.
    """
    if missing := [name for name in ("input_ids", "labels") if batch.get(name) is None]:
        raise ValueError(
            f"the batch has no {missing[0]}, only {', '.join(sorted(map(str, batch)))}. Make it with "
            "longctx.collate.SequenceCollator."
        )
    unread = [name for name in _UNREAD if batch.get(name) is not None]
    if (types := batch.get("token_type_ids")) is not None and types.any():
        unread.append("token_type_ids")
    if unread:
        raise ValueError(f"the batch has {unread[0]}, which is not supported: only input_ids are cut. Leave it out.")
    if batch.get("cu_seq_lens_q") is not None and batch.get("position_ids") is None:
        raise ValueError(
            "the batch has cu_seq_lens_q without position_ids, which say here where documents begin. Collate with "
            "longctx.collate.SequenceCollator, or with return_position_ids=True."
        )
    _check_layout(batch, dims)
    _check_mask(batch)
    labels, real = batch["labels"], real_tokens(batch)
    if ((labels < 0) & (labels != IGNORE_INDEX)).any():
        lowest = int(labels[labels != IGNORE_INDEX].min())
        raise ValueError(f"labels hold {lowest}. Mark tokens that are not learnt by -100.")
    if real is not None and (stray := int(((labels != IGNORE_INDEX) & ~real.to(labels.device)).sum())):
        raise ValueError(f"{stray} labels stand on padding (by attention_mask or lengths). Set them to -100.")


def _check_layout(batch: Mapping[str, Any], dims: ParallelDims) -> None:
    """Refuse a plan that was made for other degrees or another batch."""
    if (layout := batch.get("layout")) is None:
        return
    starts = branches_of(batch.get("branch_starts")).tolist()
    planned = layout.sp, layout.shape, layout.branch_starts.tolist()
    if planned != (dims.sp, tuple(batch["input_ids"].shape), starts):
        raise ValueError(
            f"the batch's layout is of sp {layout.sp} and {layout.shape} tokens, with {len(layout.branch_starts)} "
            f"branches, and the batch has sp {dims.sp}, {tuple(batch['input_ids'].shape)} tokens and {len(starts)} "
            "branches. Leave layout out, or plan it for this batch."
        )


def _check_mask(batch: Mapping[str, Any]) -> None:
    """Refuse a mask beside `position_ids` that is not right padding, since positions alone decide attention."""
    mask = batch.get("attention_mask")
    if mask is None or batch.get("position_ids") is None:
        return
    if mask.shape != batch["labels"].shape or not is_right_padding(mask):
        raise ValueError(
            f"attention_mask of shape {tuple(mask.shape)} beside position_ids must be [B, S], and ones followed by "
            "zeros in every row (right padding): position_ids alone say which tokens a document has. Set "
            "padding_side='right', or make the batch with longctx.collate.SequenceCollator."
        )


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
    everyone: list[Any] = [None] * dist.get_world_size(group)
    with region("wait", "communication"):
        dist.all_gather_object(everyone, {name: hashlib.blake2b(d).digest() for name, d in data.items()}, group=group)
    return everyone


def check_same_batch(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Check that all ranks of a sequence group have cut the same batch. The ranks call it together."""
    everyone = digests_of_ranks(tensors, group)
    if (number := len({tuple(digests.values()) for digests in everyone})) > 1:
        raise ValueError(
            f"the {len(everyone)} ranks of a sequence group have cut {number} different batches. They share every "
            "sequence: give a DataLoader's sampler the data-parallel rank and size, dims.dp_rank(rank) and dims.dp, "
            "and do not let accelerate or the Trainer deal batches out to single ranks."
        )


class SameStep:
    """Shows, by a term of a sum over all ranks, whether the ranks of a sequence group have the same micro-batches."""

    def __init__(self, batches: Sequence[Mapping[str, Any]], dims: ParallelDims, rank: int) -> None:
        self.dims, self.digest = dims, _digest(batches) if dims.sp > 1 else 0
        self.term = self.digest * (dims.sp - 1 if dims.sp_rank(rank) == 0 else -1)
        """An integer. Those of a group add up to 0 if its ranks have the same digest."""

    def check(self, total: int) -> None:
        """Check the sum of the terms. All ranks call it together.

        Raises:
            DataError: with the first rank whose batches are not those of its group.
        """
        if total:
            digests = gather_objects(self.digest)
            firsts = [rank - self.dims.sp_rank(rank) for rank in range(len(digests))]
            rank, first = next(pair for pair in enumerate(firsts) if digests[pair[0]] != digests[pair[1]])
            raise DataError(
                f"rank {rank} has other batches in this step than rank {first}, and the ranks of a "
                "sequence group share every sequence. Use data and a chat template that give the same on every rank; "
                "in a training loop of your own, give the DataLoader's sampler dims.dp_rank(rank) and dims.dp."
            )


def _digest(batches: Sequence[Mapping[str, Any]]) -> int:
    """Return 40 bits of a digest of tokens, labels and positions, so that int64 holds sums over millions of ranks."""
    state = xxhash.xxh3_64()
    for batch in batches:
        for values in (batch["input_ids"], batch["labels"], complete_position_ids(batch)):
            state.update(repr(values.shape).encode())
            state.update(values.cpu().contiguous().numpy().data)
    return int(state.intdigest()) >> 24

"""The cut of a batch over the ranks of a sequence group, and its inverse.

`plan_batch` decides which rank holds a token, and `shard_tokens` takes a rank's tokens by that decision. One function,
`SequenceParallel._shard` in longctx/parallel.py, applies both to inputs and labels. Labels are shifted before the cut,
since a token's target may lie on another rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longctx.data import IGNORE_INDEX
from longctx.packing.branches import NO_BRANCHES, Segments, branches_of
from longctx.ring.plan import RingPlan
from longctx.ring.planner import TimeOfPlan, plan_ring
from longctx.sequence.batch import BatchLayout, ShardedBatch
from longctx.sequence.host_tensors import send
from longctx.sequence.mesh import ParallelDims


def complete_position_ids(batch: Mapping[str, Tensor]) -> Tensor:
    """Return int64 [B, S] positions that restart at 0 with every document and with the padded tail.

    They are the batch's own, or are made from a right-padded `attention_mask`, or without one. Where the batch has
    `branch_starts`, they go back to the end of the trunk with every branch.

    Raises:
        ValueError: for left padding, or positions that do not count up from 0 within each row; for branches that
            positions or labels do not fit.
    """
    position_ids = batch.get("position_ids")
    if position_ids is None:
        position_ids = _positions_from_mask(batch["input_ids"], batch.get("attention_mask"))
    if len(starts := branches_of(batch.get("branch_starts"))):
        _check_branches(batch, position_ids, starts)
        return position_ids
    steps = position_ids[:, 1:] - position_ids[:, :-1]
    if (position_ids[:, 0] != 0).any() or ((steps != 1) & (position_ids[:, 1:] != 0)).any():
        raise ValueError(
            "position_ids must start at 0 in every row and then either count up by 1 or restart at 0 where a "
            "document begins; left-padded and re-ordered rows cannot be cut exactly. Make the batch with "
            "longctx.collate.SequenceCollator, or pad on the right."
        )
    return position_ids


def _check_branches(batch: Mapping[str, Tensor], position_ids: Tensor, starts: np.ndarray) -> None:
    """Raise ValueError unless the batch is what `longctx.packing.branches` describes."""
    flat = position_ids.flatten().cpu().numpy()
    segments = Segments.of(document_bounds(flat), starts)
    if (position_ids[:, 0] != 0).any() or not np.array_equal(segments.position_ids(), flat):
        raise ValueError(
            f"position_ids do not fit branch_starts {starts[:8].tolist()}: they must start at 0 in every document and "
            "at the length of its trunk in every branch. Make the batch with longctx.collate.SequenceCollator."
        )
    labels = batch["labels"].flatten().cpu().numpy()
    unlearnt = np.repeat(segments.are_trunks, np.diff(segments.bounds))
    unlearnt[starts] = True
    if learnt := int((labels[unlearnt] != IGNORE_INDEX).sum()):
        raise ValueError(
            f"{learnt} labels stand in a trunk or at the first token of a branch, which belongs to the prompt. Only "
            "later tokens of a branch are learnt: set these labels to -100."
        )


def document_bounds(flat: np.ndarray) -> np.ndarray:
    """Return int64 [n + 1], the boundaries of documents, from positions [T] that are 0 where they begin."""
    return np.append(np.flatnonzero(flat == 0), len(flat)).astype(np.int64)


def shift_labels(labels: Tensor, position_ids: Tensor) -> Tensor:
    """labels [B, S] -> [1, B·S]: the target of each token, −100 at the last token of every document."""
    targets = labels.masked_fill(position_ids == 0, IGNORE_INDEX).reshape(1, -1)
    return torch.nn.functional.pad(targets[:, 1:], (0, 1), value=IGNORE_INDEX)


def real_tokens(batch: Mapping[str, Any]) -> Tensor | None:
    """Return bool [B, S], the tokens that are not padding, or None if the batch does not say which are.

    It says so by `lengths`, the tokens of each row (of each pack in one flat row), or by an `attention_mask`.
    """
    rows, width = batch["input_ids"].shape
    if (lengths := batch.get("lengths")) is not None:
        if (rows > 1 and len(lengths) != rows) or max(lengths, default=0) > width or sum(lengths) > rows * width:
            raise ValueError(f"lengths {list(lengths)} do not fit a batch of {rows} × {width} tokens.")
        ends = torch.tensor([sum(lengths)] if rows == 1 else list(lengths), dtype=torch.int64)
        return torch.arange(width)[None] < ends[:, None]
    mask = batch.get("attention_mask")
    return None if mask is None else mask.bool()


def document_starts(batch: Mapping[str, Any]) -> Tensor:
    """Return bool [B·S], where documents begin, counted as `BatchLayout` counts them: all branches but the first do."""
    positions = complete_position_ids(batch).flatten()
    return torch.cat([torch.ones_like(positions[:1], dtype=torch.bool), positions[1:] != positions[:-1] + 1])


def is_padding_document(batch: Mapping[str, Any]) -> Tensor:
    """Return bool [documents], whether each is padding by the batch's `attention_mask`; nothing is without one."""
    starts = document_starts(batch)
    mask = batch.get("attention_mask")
    return ~mask.bool().flatten()[starts] if mask is not None else torch.zeros_like(starts[starts])


def count_labels(batch: Mapping[str, Tensor]) -> int:
    """Count the targets of the batch: labels that are not −100 and not a document's first token."""
    labels = batch["labels"].masked_fill(complete_position_ids(batch) == 0, IGNORE_INDEX)
    return int((labels != IGNORE_INDEX).sum())


def plan_batch(
    position_ids: Tensor,
    dims: ParallelDims,
    sp_rank: int | None = None,
    *,
    time_of: TimeOfPlan | None = None,
    branch_starts: np.ndarray = NO_BRANCHES,
) -> BatchLayout:
    """Decide which rank of a sequence group holds which token of a batch with these [B, S] positions.

    With a ring of at least two ranks, `plan_ring` puts the tokens into another order; otherwise they keep theirs. Rank
    r of the sp ranks then holds the r-th of sp equal slices.

    Args:
        sp_rank: the rank whose work at every hop is planned here, and not in the first layer.
        time_of: as in `plan_ring`, which plans a document with branches as one causal document.
        branch_starts: int64 [b], where branches begin in the flattened row.

    Raises:
        ValueError: if B·S is not a multiple of what the degrees need.
    """
    rows, length = position_ids.shape
    if (rows * length) % dims.multiple:
        raise ValueError(
            f"A batch of {rows} × {length} tokens cannot be cut evenly: ring {dims.ring} × ulysses {dims.ulysses} "
            f"needs a multiple of {dims.multiple} tokens. Pass pad_to_multiple_of={dims.multiple} to the collator."
        )
    cu_seqlens = document_bounds(position_ids.reshape(-1).cpu().numpy())
    plan = _plan(cu_seqlens.tobytes(), dims.ring, time_of) if dims.ring > 1 else None
    if plan is not None and sp_rank is not None:
        plan.shard(sp_rank // dims.ulysses)
    return BatchLayout(shape=(rows, length), cu_seqlens=cu_seqlens, sp=dims.sp, plan=plan, branch_starts=branch_starts)


@lru_cache(maxsize=8)
def _plan(cu_seqlens: bytes, ring: int, time_of: TimeOfPlan | None) -> RingPlan:
    """Return the plan of `plan_ring`. The last ones are kept: every pass of a policy step has the same batch."""
    return plan_ring(np.frombuffer(cu_seqlens, np.int64), ring, time_of=time_of)


def shard_tokens(tokens: Tensor, layout: BatchLayout, sp_rank: int) -> Tensor:
    """[B, S, ...] or [1, B·S, ...] -> [1, T/P, ...]: the tokens that rank `sp_rank` holds, in its order."""
    flat = tokens.reshape(1, layout.num_tokens, *tokens.shape[2:])
    held = slice(sp_rank * layout.local_length, (sp_rank + 1) * layout.local_length)
    if layout.plan is None:
        return flat[:, held]
    return flat.index_select(1, send(torch.from_numpy(layout.plan.permutation[held]), flat.device))


def unshard_tokens(shards: Tensor, layout: BatchLayout) -> Tensor:
    """[P, T/P, ...], one row a rank, -> [B, S, ...]: the exact inverse of `shard_tokens`."""
    flat = shards.reshape(layout.num_tokens, *shards.shape[2:])
    if layout.plan is not None:
        order = send(torch.from_numpy(layout.plan.permutation), flat.device)
        flat = torch.empty_like(flat).index_copy_(0, order, flat)
    return flat.reshape(*layout.shape, *shards.shape[2:])


def check_outputs(shard: ShardedBatch, log_probs: Tensor) -> None:
    """Check, after a forward pass, that the model has worked on T/P tokens and has not rounded log-probabilities.

    Without the check, a cut that did not happen would go unnoticed.

    Args:
        log_probs: of the model's output, [1, T/P] where the cut did happen.
    """
    assert log_probs.dtype.itemsize >= 4, f"per-token losses are {log_probs.dtype}; their sum would be rounded"
    assert log_probs.shape == (1, shard.layout.local_length), (
        f"the model's output has shape {tuple(log_probs.shape)}, expected one row of {shard.layout.local_length} "
        f"tokens: {shard.layout.num_tokens} over sp {shard.layout.sp}"
    )


def _positions_from_mask(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    if attention_mask is None:
        return positions
    if attention_mask.ndim != 2 or (attention_mask.long() > 1).any():
        raise ValueError(
            f"attention_mask of shape {tuple(attention_mask.shape)} must be [B, S] with the values 0 and 1 where a "
            "batch has no position_ids. Give position_ids that restart at 0 with every document."
        )
    if not is_right_padding(attention_mask):
        raise ValueError(
            "attention_mask must be ones followed by zeros in every row (right padding) where a batch has no "
            "position_ids. Set padding_side='right', or make the batch with longctx.collate.SequenceCollator."
        )
    lengths = attention_mask.sum(1, keepdim=True)
    return torch.where(positions < lengths, positions, positions - lengths)


def is_right_padding(attention_mask: Tensor) -> bool:
    """Return whether a mask [B, S] has no token after a masked one in any row."""
    return not (attention_mask[:, 1:].bool() & ~attention_mask[:, :-1].bool()).any()

"""The cut of a batch over the ranks of a sequence group, and its inverse.

A `Layout` decides which rank holds a token, and `cut` takes a rank's tokens by it. Labels are shifted before the cut,
since a token's target may lie on another rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longctx.data import IGNORE_INDEX
from longctx.sequence.batch import ShardedBatch
from longctx.sequence.host_tensors import send
from longctx.sequence.layout import Layout


@dataclass(frozen=True, eq=False, kw_only=True)
class Shard:
    """One rank's part of a batch on the host, as a data loader's worker sends it."""

    input_ids: Tensor
    """int64 [1, T/P]."""
    position_ids: Tensor
    """int64 [1, T/P]: the tokens' positions in their documents."""
    labels: Tensor
    """int64 [1, T/P]: the token that follows each input token in its document; −100 where nothing is learnt."""
    learnt: Tensor
    """int64 [n]: where labels are not −100."""
    real: Tensor
    """bool [T/P]: the tokens that are not padding, as far as the batch says."""
    layout: Layout
    """Of the whole batch, spread over the ranks."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """What a training method adds."""
    stream_read: Any = None
    """The position in the stream after this batch's step; None if the rows do not come from a stream."""


def cut(batch: Mapping[str, Tensor], layout: Layout, sp_rank: int, extras: Mapping[str, Any] | None = None) -> Shard:
    """Return the part of a batch that rank `sp_rank` of the sequence group holds.

    Args:
        batch: `input_ids` and `labels` (not shifted), int64 [B, S], and `position_ids`; without these, those of the
            layout are taken.
        layout: of the batch, spread over the ranks.
    """
    held = slice(sp_rank * layout.local_length, (sp_rank + 1) * layout.local_length)
    index = held if layout.plan is None else layout.plan.permutation[held]
    ids, labels = (batch[name].cpu().reshape(-1).numpy() for name in ("input_ids", "labels"))
    given = batch.get("position_ids")
    positions = layout.position_ids() if given is None else given.cpu().reshape(-1).numpy()
    labels = np.append(labels[1:], IGNORE_INDEX)
    labels[layout.cu_seqlens[1:] - 1] = IGNORE_INDEX  # the last token of a document has no target
    parts = ids[index], positions[index], labels[index]
    own = [torch.from_numpy(np.ascontiguousarray(part))[None] for part in parts]
    return Shard(
        input_ids=own[0],
        position_ids=own[1],
        labels=own[2],
        learnt=torch.from_numpy(np.flatnonzero(parts[2] != IGNORE_INDEX)),
        real=torch.from_numpy(np.ascontiguousarray(layout.real_tokens()[index])),
        layout=layout,
        extras=extras or {},
    )


def shard_tokens(tokens: Tensor, layout: Layout, sp_rank: int) -> Tensor:
    """[B, S, ...] or [1, B·S, ...] -> [1, T/P, ...]: the tokens that rank `sp_rank` holds, in its order."""
    flat = tokens.reshape(1, layout.num_tokens, *tokens.shape[2:])
    held = slice(sp_rank * layout.local_length, (sp_rank + 1) * layout.local_length)
    if layout.plan is None:
        return flat[:, held]
    return flat.index_select(1, send(torch.from_numpy(layout.plan.permutation[held]), flat.device))


def unshard_tokens(shards: Tensor, layout: Layout) -> Tensor:
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

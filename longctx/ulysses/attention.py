"""Ulysses attention over packed documents."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch.distributed as dist
from torch import Tensor

from longctx.attention.operator import LocalSchedule, Schedule, attend
from longctx.sequence.batch import Attend
from longctx.ulysses.exchange import exchange_attention
from longctx.ulysses.head_chunks import HeadChunks


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: np.ndarray,
    group: dist.ProcessGroup,
    scale: float | None = None,
    *,
    heads_k_stride: int | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention within each document, the row cut into contiguous slices over `group`.

    Args:
        q: [1, H, S/P, D], this rank's tokens.
        k, v: [1, K, S/P, D]; K < P is allowed: the heads are repeated.
        cu_seqlens: int [n + 1], boundaries of the documents in the whole row, from 0 to S.
        scale: of the scores before the softmax; 1/sqrt(D) where None.
        heads_k_stride: key/value heads of a rank that are exchanged and attended at a time, see `HeadChunks`; all of
            them where None.
        window: each query sees this many tokens of its document, itself included; all before it where None.
        sinks: [H], a logit a head that takes its share of every softmax and gives nothing.

    Returns:
        [1, H, S/P, D].

    Raises:
        ValueError: if H is no multiple of the group's size, the tensors do not fit `cu_seqlens`, or the
            stride is below 1.
    """
    world_size, total = dist.get_world_size(group), int(cu_seqlens[-1])
    if q.shape[0] != 1 or q.shape[2] * world_size != total:
        raise ValueError(
            f"q has shape {tuple(q.shape)} on each of {world_size} ranks, but cu_seqlens ends at {total}: "
            f"expected [1, H, {total / world_size:g}, D]. Flatten several rows to one and pad the total."
        )
    schedule = LocalSchedule(cu_seqlens, window)
    run = scheduled_attention(schedule, group, heads_k_stride, split_queries=True)
    return run(q, k, v, scale=scale, sinks=sinks)


def scheduled_attention(
    schedule: Schedule, group: dist.ProcessGroup | None, heads_k_stride: int | None, *, split_queries: bool
) -> Attend:
    """Attention by `schedule`, of heads instead of tokens where there is a group to exchange them with.

    Args:
        heads_k_stride, split_queries: a few heads at a time, as `HeadChunks` says; all at once where None.
    """
    if heads_k_stride is not None:
        return partial(attend, HeadChunks(schedule, heads_k_stride, group, split_queries=split_queries))
    whole = partial(attend, schedule)
    return whole if group is None else partial(exchange_attention, group=group, attend=whole)

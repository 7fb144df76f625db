"""Ulysses attention over packed documents."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from longctx.attention.operator import LocalSchedule, Schedule, attend
from longctx.sequence.batch import PLAIN, Attend, AttentionKind
from longctx.sequence.layout import Layout
from longctx.sequence.mesh import SequenceGroups
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
    overlap_exchange: bool = False,
    kind: AttentionKind = PLAIN,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute causal attention within each document, for a sequence cut into contiguous slices over `group`.

    Args:
        q: [1, H, S/P, D], this rank's tokens.
        k, v: [1, K, S/P, D]; K < P is allowed, and the heads are then repeated.
        cu_seqlens: int [n + 1], boundaries of the n documents in the whole sequence, increasing from 0 to S; the same
            on every rank.
        scale: factor of the scores before the softmax; 1/sqrt(D) if None.
        heads_k_stride: key/value heads of a rank that are exchanged and attended to at a time, see `HeadChunks`; all of
            them if None, or a few large groups with `overlap_exchange`.
        overlap_exchange: whether some heads are exchanged while others are attended to.
        kind: the window, the chunks and the soft cap of the layers.
        sinks: [H], for each head a logit that takes part in every softmax and adds nothing to the output.

    Returns:
        [1, H, S/P, D].

    Raises:
        ValueError: if H is not a multiple of the group's size, the tensors do not fit `cu_seqlens`, or the stride is
            below 1.
    """
    world_size, total = dist.get_world_size(group), int(cu_seqlens[-1])
    if q.shape[0] != 1 or q.shape[2] * world_size != total:
        raise ValueError(
            f"q has shape {tuple(q.shape)} on each of {world_size} ranks, but cu_seqlens ends at {total}: "
            f"expected [1, H, {total / world_size:g}, D]. Flatten several sequences into one and pad the total."
        )
    schedule = LocalSchedule(cu_seqlens, kind)
    run = scheduled_attention(schedule, group, heads_k_stride, split_queries=True, overlap_exchange=overlap_exchange)
    return run(q, k, v, scale=scale, sinks=sinks)


def exchanged_attention(
    schedule_of: Callable[..., Schedule], layout: Layout, groups: SequenceGroups, kind: AttentionKind, **options: Any
) -> Attend:
    """Return the attention of a batch by its schedule, after an exchange where there are Ulysses ranks.

    Queries of a head are split only without a ring, whose keys and values would travel once for each part.
    """
    schedule = schedule_of(layout, groups, kind)
    return scheduled_attention(schedule, groups.ulysses, split_queries=groups.ring is None, **options)


def scheduled_attention(
    schedule: Schedule,
    group: dist.ProcessGroup | None,
    heads_k_stride: int | None = None,
    *,
    split_queries: bool,
    overlap_exchange: bool = False,
) -> Attend:
    """Return attention by `schedule`, after an exchange of tokens for heads if there is a group.

    Args:
        heads_k_stride, split_queries, overlap_exchange: as in `HeadChunks`; a stride of None computes all heads at once
            unless the exchange overlaps.
    """
    if heads_k_stride is not None or (overlap_exchange and group is not None):
        stages = HeadChunks(schedule, heads_k_stride, group, split_queries=split_queries, overlaps=overlap_exchange)
        return partial(attend, stages)
    whole = partial(attend, schedule)
    return whole if group is None else partial(exchange_attention, group=group, attend=whole)

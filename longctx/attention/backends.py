"""The attention backends by name. A new one is a package of its own and a line here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from longctx.attention.operator import LocalSchedule, attend
from longctx.batch import Attend
from longctx.ring.attention import ring_schedule
from longctx.ulysses import scheduled_attention

Backend = Callable[..., Attend]
"""(layout: BatchLayout, groups: SequenceGroups, window: int | None, heads_k_stride: int | None = None) -> attention.

It serves all layers of the batch with that window, None meaning full attention. `heads_k_stride` is how many key/value
heads of a rank travel and are attended at a time; None means all of them, and for `gather` a quarter.
"""


def _local(layout, groups, window, heads_k_stride=None, *, exchanges=False):
    schedule = LocalSchedule(layout.cu_seqlens, window)
    group = groups.ulysses if exchanges else None
    return scheduled_attention(schedule, group, heads_k_stride, split_queries=True)


def _ring(layout, groups, window, heads_k_stride=None, *, exchanges=False):
    schedule = ring_schedule(layout.plan, groups.ring, window=window)
    group = groups.ulysses if exchanges else None
    return scheduled_attention(schedule, group, heads_k_stride, split_queries=False)


def _gather(layout, groups, window, heads_k_stride=None):
    stride = {"transport": "gather", "heads_k_stride": heads_k_stride}
    return partial(attend, ring_schedule(layout.plan, groups.ring, **stride, window=window))


BACKENDS: dict[str, Backend] = {
    "local": _local,
    "ring": _ring,
    "gather": _gather,
    "ulysses": partial(_local, exchanges=True),
    "hybrid": partial(_ring, exchanges=True),
}
"""`local` is attention on one device: what sp 1 means."""

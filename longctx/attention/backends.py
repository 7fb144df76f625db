"""The attention backends by name. A new one is a package of its own and a line here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from longctx.attention.operator import LocalSchedule, attend
from longctx.batch import Attend, BatchLayout
from longctx.mesh import SequenceGroups
from longctx.ring.attention import ring_schedule
from longctx.ulysses import exchange_attention

Backend = Callable[[BatchLayout, SequenceGroups, int | None], Attend]
"""(layout, groups, window) -> attention for all layers of the batch with that window, None meaning full attention."""


def _local(layout, groups, window):
    return partial(attend, LocalSchedule(layout.cu_seqlens, window))


def _ring(layout, groups, window, transport="p2p"):
    return partial(attend, ring_schedule(layout.plan, groups.ring, transport=transport, window=window))


def _ulysses(layout, groups, window):
    return partial(exchange_attention, group=groups.ulysses, attend=_local(layout, groups, window))


def _hybrid(layout, groups, window):
    return partial(exchange_attention, group=groups.ulysses, attend=_ring(layout, groups, window))


BACKENDS: dict[str, Backend] = {
    "local": _local,
    "ring": _ring,
    "gather": partial(_ring, transport="gather"),
    "ulysses": _ulysses,
    "hybrid": _hybrid,
}
"""`local` is attention on one device: what sp 1 means."""

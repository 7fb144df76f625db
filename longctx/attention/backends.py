"""The attention backends by name. A new one is a package of its own and a line here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from longctx.attention.kernels import varlen_attention
from longctx.batch import BatchLayout
from longctx.mesh import SequenceGroups
from longctx.ring import ring_attention
from longctx.ulysses import exchange_attention, ulysses_attention

Attend = Callable[[Tensor, Tensor, Tensor, BatchLayout, SequenceGroups, float | None], Tensor]
"""(q [1, H, T/P, D], k, v [1, K, T/P, D], layout, groups, scale) -> [1, H, T/P, D]"""


def _local(q, k, v, layout, groups, scale):
    return varlen_attention(q, k, v, layout.cu_seqlens, scale)


def _ring(q, k, v, layout, groups, scale, transport="p2p"):
    return ring_attention(q, k, v, layout.plan, groups.ring, scale, transport=transport)


def _ulysses(q, k, v, layout, groups, scale):
    return ulysses_attention(q, k, v, layout.cu_seqlens, groups.ulysses, scale)


def _hybrid(q, k, v, layout, groups, scale):
    ring = partial(ring_attention, plan=layout.plan, group=groups.ring, scale=scale)
    return exchange_attention(q, k, v, groups.ulysses, ring)


BACKENDS: dict[str, Attend] = {
    "local": _local,
    "ring": _ring,
    "gather": partial(_ring, transport="gather"),
    "ulysses": _ulysses,
    "hybrid": _hybrid,
}
"""`local` is attention on one device: what sp 1 means."""

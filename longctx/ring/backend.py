"""The ring and gather backends: ranks send each other keys and values hop by hop, or gather those of all others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from longctx.attention.backend import Backend, KeyValues
from longctx.attention.cost import Arrangement, Setup
from longctx.attention.operator import Schedule, attend
from longctx.ring.attention import ring_schedule
from longctx.ring.cost import gather_passes, ring_passes
from longctx.sequence.batch import Attend, AttentionKind
from longctx.sequence.layout import Layout
from longctx.sequence.mesh import SequenceGroups
from longctx.ulysses.attention import exchanged_attention


def ring_schedule_of(
    layout: Layout,
    groups: SequenceGroups,
    kind: AttentionKind,
    *,
    transport: str = "p2p",
    heads_k_stride: int | None = None,
) -> Schedule:
    """Return the schedule of a batch's ring; a stride of None is the transport's default."""
    assert layout.plan is not None, "a ring has a plan"
    assert groups.ring is not None, "a ring has a group"
    return ring_schedule(
        layout.plan,
        groups.ring,
        transport=transport,
        heads_k_stride=heads_k_stride,
        kind=kind,
        segments=layout.segments,
    )


gather_schedule_of = partial(ring_schedule_of, transport="gather")


ring_attention_of = partial(exchanged_attention, ring_schedule_of)
"""Ring attention of a batch. Ulysses ranks, where there are any, first exchange tokens for heads."""


def _gather_attention_of(
    layout: Layout,
    groups: SequenceGroups,
    kind: AttentionKind,
    heads_k_stride: int | None = None,
    overlap_exchange: bool = False,
) -> Attend:
    return partial(attend, gather_schedule_of(layout, groups, kind, heads_k_stride=heads_k_stride))


def ring_held(kv: KeyValues) -> tuple[float, float]:
    """Return `Backend.held` of a ring.

    Keys and values are there twice: attended to and arriving. Their fp32 gradients are there four times: the rank's
    own, the block's, those being sent and those arriving.
    """
    return 4 * kv.element_size * kv.elements, 32 * kv.elements


def _gather_held(kv: KeyValues) -> tuple[float, float]:
    """Return `Backend.held` of a gather.

    Keys and values of all ranks are there for two groups of heads, one attended to and one arriving. Gradients in fp32
    are those of the rank's own tokens, and of one group for all ranks.
    """
    part = min(1.0, (kv.heads_k_stride or -(-kv.num_heads // 4)) / kv.num_heads)
    held = 2 * kv.element_size * kv.elements * kv.ring * min(1, 2 * part)
    return held, 8 * kv.elements * (1 + kv.ring * part)


def _ring_of(sp: int) -> Sequence[Arrangement]:
    return [Arrangement(name="ring", ring=sp, ulysses=1)]


def _gather_of(sp: int) -> Sequence[Arrangement]:
    return [Arrangement(name="gather", ring=sp, ulysses=1)]


def _whole_ring(setup: Setup, ring_size: int | None) -> Arrangement:
    """Return a ring of all ranks, which works with any number of heads."""
    return _ring_of(setup.sp)[0]


def _whole_gather(setup: Setup, ring_size: int | None) -> Arrangement:
    return _gather_of(setup.sp)[0]


RING = Backend(
    name="ring",
    attention=ring_attention_of,
    arrangements=_ring_of,
    arrange=_whole_ring,
    has_ring_size=False,
    passes=ring_passes,
    held=ring_held,
    engine="fsdp2",
    keeps_output=True,
    has_stages=True,
    schedule=ring_schedule_of,
    has_branches=True,
    accelerate_degree="cp",
    color="#E69F00",
    marker="s",
)

GATHER = Backend(
    name="gather",
    attention=_gather_attention_of,
    arrangements=_gather_of,
    arrange=_whole_gather,
    has_ring_size=False,
    passes=gather_passes,
    held=_gather_held,
    engine="fsdp2",
    keeps_output=True,
    has_stages=False,
    schedule=gather_schedule_of,
    has_branches=True,
    accelerate_degree=None,
    color="#56B4E9",
    marker="v",
)

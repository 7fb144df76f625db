"""The ring and gather backends: ranks send each other keys and values hop by hop, or gather those of all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from longctx.attention.backend import Backend
from longctx.attention.cost import Arrangement, Setup
from longctx.attention.operator import Schedule, attend
from longctx.ring.attention import ring_schedule
from longctx.ring.cost import gather_passes, ring_passes
from longctx.sequence.batch import Attend, AttentionKind
from longctx.sequence.layout import Layout
from longctx.sequence.mesh import SequenceGroups
from longctx.ulysses.attention import exchanged_attention


def ring_schedule_of(layout: Layout, groups: SequenceGroups, kind: AttentionKind, **options: Any) -> Schedule:
    """Return the schedule of a batch's ring, with the transport and the stride of `ring_schedule`."""
    assert layout.plan is not None, "a ring has a plan"
    assert groups.ring is not None, "a ring has a group"
    return ring_schedule(layout.plan, groups.ring, kind=kind, segments=layout.segments, **options)


gather_schedule_of = partial(ring_schedule_of, transport="gather")


ring_attention_of = partial(exchanged_attention, ring_schedule_of)
"""Ring attention of a batch. Ulysses ranks, where there are any, first exchange tokens for heads."""


def _gather_attention_of(*batch: Any, heads_k_stride: int | None = None, overlap_exchange: bool = False) -> Attend:
    return partial(attend, gather_schedule_of(*batch, heads_k_stride=heads_k_stride))


def _ring_held(elements: float, element_size: int, ring: int, part: float) -> tuple[float, float]:
    """Return `Backend.held` of a ring.

    Keys and values are there twice: attended to and arriving. Their fp32 gradients are there four times: the rank's
    own, the block's, those being sent and those arriving.
    """
    return 4 * element_size * elements, 32 * elements


def _gather_held(elements: float, element_size: int, ring: int, part: float) -> tuple[float, float]:
    """Return `Backend.held` of a gather.

    Keys and values of all ranks are there for two groups of heads, one attended to and one arriving. Gradients in fp32
    are those of the rank's own tokens, and of one group for all ranks.
    """
    return 2 * element_size * elements * ring * min(1, 2 * part), 8 * elements * (1 + ring * part)


def _arrangements(name: str, sp: int) -> Sequence[Arrangement]:
    return [Arrangement(name=name, ring=sp, ulysses=1)]


def _arrange(name: str, setup: Setup, ring_size: int | None) -> Arrangement:
    """Return a ring of all ranks, which works with any number of heads."""
    return Arrangement(name=name, ring=setup.sp, ulysses=1)


RING = Backend(
    name="ring",
    attention=ring_attention_of,
    arrangements=partial(_arrangements, "ring"),
    arrange=partial(_arrange, "ring"),
    has_ring_size=False,
    passes=ring_passes,
    held=_ring_held,
    engine="fsdp2",
    keeps_output=True,
    has_stages=True,
    schedule=ring_schedule_of,
    has_branches=True,
    color="#E69F00",
    marker="s",
)

GATHER = replace(
    RING,
    name="gather",
    attention=_gather_attention_of,
    arrangements=partial(_arrangements, "gather"),
    arrange=partial(_arrange, "gather"),
    passes=gather_passes,
    held=_gather_held,
    has_stages=False,
    schedule=gather_schedule_of,
    color="#56B4E9",
    marker="v",
)

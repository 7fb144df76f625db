"""The Ulysses backend, and attention on one device, which is Ulysses without an exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from longctx.attention.backend import Backend
from longctx.attention.cost import Arrangement, Setup
from longctx.attention.operator import LocalSchedule
from longctx.ring.cost import ring_passes
from longctx.sequence.batch import AttentionKind
from longctx.sequence.layout import Layout
from longctx.sequence.mesh import SequenceGroups
from longctx.ulysses.attention import exchanged_attention
from longctx.ulysses.exchange import heads_message


def _schedule_of(layout: Layout, groups: SequenceGroups, kind: AttentionKind) -> LocalSchedule:
    return LocalSchedule(layout.cu_seqlens, kind, layout.segments)


def _exchange_over(sp: int) -> Sequence[Arrangement]:
    return [Arrangement(name="ulysses", ring=1, ulysses=sp)]


def _whole_heads(setup: Setup, ring_size: int | None) -> Arrangement:
    if setup.num_heads % setup.sp:
        raise ValueError(heads_message(setup.num_heads, setup.sp))
    return _exchange_over(setup.sp)[0]


def _alone(setup: Setup, ring_size: int | None) -> Arrangement:
    return Arrangement(name="local", ring=1, ulysses=1)


ULYSSES = Backend(
    name="ulysses",
    attention=partial(exchanged_attention, _schedule_of),
    arrangements=_exchange_over,
    arrange=_whole_heads,
    has_ring_size=False,
    passes=ring_passes,  # of a ring of one rank, which sends nothing
    held=lambda elements, element_size, ring, part: (0.0, 0.0),  # keys and values that travel while attention runs
    engine="deepspeed",
    keeps_output=False,
    has_stages=True,
    schedule=_schedule_of,
    has_branches=True,
    color="#009E73",
    marker="D",
)

LOCAL = replace(
    ULYSSES,
    name="local",
    arrangements=lambda sp: [],
    arrange=_alone,
    engine="fsdp2",
    color="#000000",
    marker="o",
)

"""Hybrid as a backend: Ulysses among neighbours, and a ring over these groups (USP, arXiv 2405.07719)."""

from __future__ import annotations

from collections.abc import Sequence

from longctx.attention.backend import Backend
from longctx.attention.cost import Arrangement, Setup
from longctx.ring.backend import RING, ring_attention_of, ring_held, ring_schedule_of
from longctx.ring.cost import ring_passes
from longctx.ulysses.backend import ULYSSES
from longctx.ulysses.exchange import heads_message


def _splits(sp: int) -> Sequence[Arrangement]:
    return [Arrangement(name="hybrid", ring=ring, ulysses=sp // ring) for ring in range(2, sp) if sp % ring == 0]


def _split(setup: Setup, ring_size: int | None) -> Arrangement:
    """Return the split that is asked for, or the one with the smallest ring whose Ulysses degree divides the heads.

    A split with one Ulysses rank per group is a ring, and one with a single ring rank is Ulysses.
    """
    sp, num_heads = setup.sp, setup.num_heads
    ways = {
        arrangement.ring: arrangement
        for arrangement in (*ULYSSES.arrangements(sp), *_splits(sp), *RING.arrangements(sp))
    }
    if ring_size is None:
        return next(
            arrangement for ring, arrangement in ways.items() if ring > 1 and num_heads % arrangement.ulysses == 0
        )
    if ring_size not in ways:
        raise ValueError(f"--ring_size {ring_size} does not divide sp {sp}. Use a divisor of {sp}.")
    arrangement = ways[ring_size]
    if num_heads % arrangement.ulysses:
        raise ValueError(
            f"--ring_size {ring_size} leaves {arrangement.ulysses} Ulysses ranks. "
            f"{heads_message(num_heads, arrangement.ulysses)}"
        )
    return arrangement


HYBRID = Backend(
    name="hybrid",
    attention=ring_attention_of,
    arrangements=_splits,
    arrange=_split,
    has_ring_size=True,
    passes=ring_passes,
    held=ring_held,
    engine="fsdp2",
    keeps_output=True,
    has_stages=True,
    schedule=ring_schedule_of,
    has_branches=True,
    accelerate_degree=None,
    color="#CC79A7",
    marker="^",
)

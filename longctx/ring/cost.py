"""Modelled seconds of a layer's attention over a ring, whose keys and values travel or are gathered.

Shape legend: P = R · U ranks, R in a ring and U of Ulysses; T tokens of a row; K key/value heads of a ring rank, D
head size, e bytes an element.

**Ring** (Ring Attention, arXiv 2310.01889): at hop h a rank receives n_h tokens of k and v, at most T/R, and in the
backward pass them again and fp32 gradients of those of the hop before:

    forward  2 · K · n_h · D · e bytes,   backward  2 · K · D · (n_h · e + n_(h-1) · 4) bytes,

while it computes the hop before, so only what outlasts that counts. n_h and the work of each hop are those of
`plan_ring` for the documents at hand. Only the first rank of a node receives over the link between nodes, and the
others wait for what it passes on.

**Gather** moves the longest n_1 of any rank to all R-1 others at once, a quarter of the heads while the quarter before
is computed, and the gradients home after the last block, which overlaps nothing; it enters a node once, over the links
of all its devices, and passes node after node.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from longctx.attention.cost import (
    Arrangement,
    AttentionTime,
    RingWork,
    Seconds,
    Setup,
    block_seconds,
    key_value_elements,
    overlapped,
    pipeline,
)


def gather_passes(setup: Setup, arrangement: Arrangement, work: RingWork) -> tuple[AttentionTime, AttentionTime]:
    """Forward and backward."""
    groups = _head_groups(setup.num_key_value_heads)
    moved = int(work.received[:, 1:2].max(initial=0)) * arrangement.ring * key_value_elements(setup, arrangement)
    latency = groups * setup.gather_latency(arrangement.ring) * (moved > 0)
    travel = setup.gather_seconds(moved * setup.element_size, arrangement.ring) + latency
    home = setup.gather_seconds(moved * 4, arrangement.ring) + latency
    forward, backward = block_seconds(setup, arrangement, work, groups)
    back = overlapped(backward, travel, groups)
    return overlapped(forward, travel, groups), replace(back, exchange=back.exchange + home, link=travel + home)


def ring_passes(setup: Setup, arrangement: Arrangement, work: RingWork) -> tuple[AttentionTime, AttentionTime]:
    """Forward and backward."""
    message, elements = setup.device.message_seconds, key_value_elements(setup, arrangement)
    received = np.pad(work.received, ((0, 0), (0, 2)))  # hops R and R + 1 bring nothing
    seconds = received * (elements / _incoming_speed(setup, arrangement))[:, None]
    keys = seconds[:, 1:] * setup.element_size + message * (received[:, 1:] > 0)
    gradients = seconds[:, :-1] * 4 + message * (received[:, :-1] > 0)
    forward, backward = block_seconds(setup, arrangement, work, 1)
    # While block h is computed, k and v of hop h + 1 travel; backward, also the gradients of block h - 1.
    return pipeline(forward, keys), pipeline(backward, keys + np.pad(gradients, ((0, 0), (1, 0)))[:, :-1])


def _incoming_speed(setup: Setup, arrangement: Arrangement) -> Seconds:
    """float64 [R]: bytes a second that ring rank r receives from r - 1, the slowest of its U ranks."""
    node = np.arange(setup.sp).reshape(arrangement.ring, arrangement.ulysses) // setup.devices_per_node
    crosses = (node != np.roll(node, 1, axis=0)).any(axis=1)
    return np.where(crosses, setup.device.across.pass_on, setup.device.within.pass_on)


def _head_groups(num_key_value_heads: int) -> int:
    """How many parts a gather goes in, as `longctx.ring.attention` has it where no stride is given."""
    return -(-num_key_value_heads // -(-num_key_value_heads // 4))

"""Modelled seconds of a layer's attention in a ring, whose keys and values travel from rank to rank or are gathered.

Shape legend: P = R · U ranks, R in a ring and U of Ulysses; T tokens of a sequence; K key/value heads of a ring rank, D
head size, e bytes an element.

**Ring** (Ring Attention, arXiv 2310.01889): at hop h a rank receives the keys and values of n_h tokens, at most T/R. In
the backward pass it receives them again, and the fp32 gradients of those of the hop before:

    forward  2 · K · n_h · D · e bytes,   backward  2 · K · D · (n_h · e + n_(h-1) · 4) bytes.

Meanwhile it computes the block of the hop before, so only the time that this does not hide counts. n_h and the work of
each hop are those of `plan_ring` for the given documents. Only the first rank of a node receives over the link between
nodes, and the others wait for what it passes on.

**Gather** sends the largest n_1 of any rank from every rank to all R-1 others, a quarter of the heads at a time, while
the quarter before is computed. After the last block it sends the gradients back, which nothing hides. The data enters
each node once, over the links of all its devices, and passes from node to node.
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
    num_stages,
    overlapped,
    pipeline,
)


def gather_passes(setup: Setup, arrangement: Arrangement, work: RingWork) -> tuple[AttentionTime, AttentionTime]:
    """Return the modelled time of a gather, forward and backward."""
    groups = _head_groups(setup.num_key_value_heads, setup.heads_k_stride)
    moved = int(work.received[:, 1:2].max(initial=0)) * arrangement.ring * key_value_elements(setup, arrangement)
    latency = groups * setup.gather_latency(arrangement.ring) * (moved > 0)
    travel = setup.gather_seconds(moved * setup.element_size, arrangement.ring) + latency
    home = setup.gather_seconds(moved * 4, arrangement.ring) + latency
    forward, backward = block_seconds(setup, arrangement, work, groups)
    back = overlapped(backward, travel, groups)
    return overlapped(forward, travel, groups), replace(back, exchange=back.exchange + home, link=travel + home)


def ring_passes(setup: Setup, arrangement: Arrangement, work: RingWork) -> tuple[AttentionTime, AttentionTime]:
    """Return the modelled time of a ring, forward and backward."""
    stages, elements = num_stages(setup, arrangement), key_value_elements(setup, arrangement)
    message = stages * setup.device.message_seconds
    received = np.pad(work.received, ((0, 0), (0, 2)))  # hops R and R + 1 bring nothing
    seconds = received * (elements / _incoming_speed(setup, arrangement))[:, None]
    keys = seconds[:, 1:] * setup.element_size + message * (received[:, 1:] > 0)
    gradients = seconds[:, :-1] * 4 + message * (received[:, :-1] > 0)
    forward, backward = block_seconds(setup, arrangement, work, stages)
    # Beside block h, k and v of hop h + 1 travel, and in the backward pass also the gradients of block h - 1.
    return pipeline(forward, keys), pipeline(backward, keys + np.pad(gradients, ((0, 0), (1, 0)))[:, :-1])


def _incoming_speed(setup: Setup, arrangement: Arrangement) -> Seconds:
    """Return float64 [R]: the bytes per second that ring rank r receives from r - 1, on the slowest of its U ranks."""
    node = np.arange(setup.sp).reshape(arrangement.ring, arrangement.ulysses) // setup.devices_per_node
    crosses = (node != np.roll(node, 1, axis=0)).any(axis=1)
    return np.where(crosses, setup.device.across.pass_on, setup.device.within.pass_on)


def _head_groups(num_key_value_heads: int, heads_k_stride: int | None) -> int:
    """Return how many groups of heads a gather collects one after the other; four, or fewer, without a stride."""
    return -(-num_key_value_heads // (heads_k_stride or -(-num_key_value_heads // 4)))

"""Modelled seconds of attention, forward and backward, for every way to spread it over a sequence group.

The model counts what each rank computes, exchanges and waits for, per layer and micro-batch. Everything else in a
layer is the same for every backend, so it is left out. A layer with a sliding window counts as one without.

**Ulysses** (DeepSpeed-Ulysses, arXiv 2309.14509, section 3.2) exchanges q, k, v for heads and the output back, and
their gradients likewise. Every rank keeps 1/U of each and sends

    2 · (2·H + 2·K·c) · s · D · e · (U-1)/U bytes,

where k and v are repeated c times if they have too few heads for the ranks. Nothing overlaps with the exchange. Data
for ranks of the same node and data that leaves the node take different links, at the same time.

A **ring** and a **gather** are modelled in `longctx.ring.cost`. **Hybrid** (USP, arXiv 2405.07719, section 3) is the
exchange among U neighbours, then the ring with 1/U of the heads.

For one long document, where all of k and v travels, the bytes of ring or gather over those of Ulysses are about
K·P/(H+K) forward.
"""

from __future__ import annotations

import numpy as np

from longctx.attention.backends import BACKENDS
from longctx.attention.cost import Arrangement, AttentionTime, RingWork, Setup, num_stages
from longctx.ring.plan import RingPlan
from longctx.ring.planner import PlanTime
from longctx.ulysses.exchange import key_value_copies

EXCHANGE_COPIES = 4
"""How often an exchanged element is also read or written: it is gathered before sending and reordered afterwards."""


def modelled_seconds(setup: Setup, arrangement: Arrangement, work: RingWork) -> float:
    """Return the seconds of attention of the slowest rank, in one layer and micro-batch, forward and backward.

    Args:
        work: work of a ring of `arrangement.ring` ranks.
    """
    return attention_time(setup, arrangement, work).seconds


def plan_time(setup: Setup, arrangement: Arrangement, plan: RingPlan) -> PlanTime:
    """Return the modelled time of attention by a plan for `arrangement.ring` ranks, in one layer and micro-batch."""
    forward, backward = BACKENDS[arrangement.name].passes(setup, arrangement, RingWork.of_plan(plan))
    time = forward + backward
    return PlanTime(seconds=time.seconds, waiting=time.seconds - float(time.compute.mean()))


def attention_time(setup: Setup, arrangement: Arrangement, work: RingWork) -> AttentionTime:
    """Return how each rank spends the seconds of `modelled_seconds`."""
    exchanged, sent = _exchange_seconds(setup, arrangement, work.num_tokens)
    if setup.in_a_node(arrangement.ulysses) and not setup.in_a_node(setup.sp):
        sent = 0.0  # the ring uses other links, those between nodes
    forward, backward = BACKENDS[arrangement.name].passes(setup, arrangement, work)
    zero = np.zeros(arrangement.ring)
    return AttentionTime(compute=zero, exchange=zero + exchanged, wait=zero, link=sent) + forward + backward


def _exchange_seconds(setup: Setup, arrangement: Arrangement, num_tokens: int) -> tuple[float, float]:
    """Return the seconds of all exchanges for heads, and how many of these a link is busy."""
    ulysses, stages = arrangement.ulysses, num_stages(setup, arrangement)
    if ulysses == 1:
        return 0.0, 0.0
    copies = key_value_copies(setup.num_heads, setup.num_key_value_heads, ulysses)
    heads = 2 * (setup.num_heads + setup.num_key_value_heads * copies)
    held = 2 * heads * setup.head_size * setup.element_size * num_tokens / setup.sp  # forward and backward
    if stages > 1:
        held *= 1.5  # the backward pass exchanges q, k, v and the output again
    sent = setup.exchange_seconds(held, ulysses)
    return 4 * stages * setup.device.message_seconds + sent + EXCHANGE_COPIES * held / setup.device.memory_speed, sent

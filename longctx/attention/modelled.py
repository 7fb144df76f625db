"""Modelled seconds of attention, forward and backward, for every way to spread it over a sequence group.

The model counts what each rank computes, exchanges and waits for, per layer and micro-batch. Everything else in a
layer is the same for every backend, so it is left out. A layer with a sliding window counts as one without.

**Ulysses** (DeepSpeed-Ulysses, arXiv 2309.14509, section 3.2) exchanges q, k, v for heads and the output back, and
their gradients likewise. Every rank keeps 1/U of each and sends

    2 · (2·H + 2·K·c) · s · D · e · (U-1)/U bytes,

where k and v are repeated c times if they have too few heads for the ranks. In stages of a few heads, the backward pass
exchanges q, k, v and the output again. Nothing overlaps with the exchange, unless some heads are exchanged while others
are attended to: then only what outlasts attention counts, and the first and the last message. Data for ranks of the
same node and data that leaves the node take different links, at the same time.

A **ring** and a **gather** are modelled in `longctx.ring.cost`. **Hybrid** (USP, arXiv 2405.07719, section 3) is the
exchange among U neighbours, then the ring with 1/U of the heads.

For one long document, where all of k and v travels, the bytes of ring or gather over those of Ulysses are about
K·P/(H+K) forward.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from longctx.attention.backends import BACKENDS
from longctx.attention.cost import EXCHANGE_COPIES, Arrangement, AttentionTime, RingWork, Setup, stages_of
from longctx.ring.plan import RingPlan
from longctx.ring.planner import PlanTime
from longctx.ulysses.stages import Stage


def plan_time(setup: Setup, arrangement: Arrangement, plan: RingPlan) -> PlanTime:
    """Return the modelled time of attention by a plan for `arrangement.ring` ranks, in one layer and micro-batch."""
    forward, backward = BACKENDS[arrangement.name].passes(setup, arrangement, RingWork.of_plan(plan))
    time = forward + backward
    return PlanTime(seconds=time.seconds, waiting=time.seconds - float(time.compute.mean()))


@functools.lru_cache(maxsize=1024)
def planned_work(documents: tuple[int, ...], setup: Setup, arrangement: Arrangement) -> RingWork:
    """Return the work of a ring for documents of these lengths in tokens, planned as in training."""
    time_of = functools.partial(plan_time, setup, arrangement)
    return RingWork.of(np.asarray(documents), arrangement.ring, time_of=time_of)


def attention_time(setup: Setup, arrangement: Arrangement, work: RingWork) -> AttentionTime:
    """Return how each rank spends the seconds of attention, in one layer and micro-batch, forward and backward.

    Args:
        work: work of a ring of `arrangement.ring` ranks.
    """
    forward, backward = BACKENDS[arrangement.name].passes(setup, arrangement, work)
    if arrangement.ulysses > 1:
        stages = stages_of(setup, arrangement)
        forward = _with_exchange(setup, arrangement, forward, _messages(stages, is_backward=False), work.num_tokens)
        backward = _with_exchange(setup, arrangement, backward, _messages(stages, is_backward=True), work.num_tokens)
    return forward + backward


class _Messages(NamedTuple):
    """What one rank exchanges for a stage, in heads of its own: before attention and after it."""

    queries: int
    """Query heads that are attended to."""
    arriving: int
    arriving_messages: int
    leaving: int


def _messages(stages: Sequence[Stage], *, is_backward: bool) -> list[_Messages]:
    """Return the messages of each stage. In several stages, the backward pass exchanges the inputs and output again."""
    again = len(stages) > 1
    found = []
    for stage in stages:
        keys = stage.keys.stop - stage.keys.start
        queries = keys * stage.sharing
        if not is_backward:
            arriving, leaving = queries + 2 * keys * stage.is_first, queries
        else:
            arriving = (3 * queries + 2 * keys * stage.is_first) if again else queries
            leaving = queries + 2 * keys * stage.is_last
        found.append(_Messages(queries, arriving, 1 + (again and stage.is_first), leaving))
    return found


def _with_exchange(
    setup: Setup, arrangement: Arrangement, attention: AttentionTime, messages: Sequence[_Messages], num_tokens: int
) -> AttentionTime:
    """Return the time of a pass with its exchange for heads."""
    ulysses, of_message = arrangement.ulysses, setup.machine.speeds.message_seconds
    head_bytes = ulysses * setup.head_size * setup.element_size * num_tokens / setup.sp
    sent, arriving, leaving, computed = 0.0, [], [], []
    heads = sum(message.queries for message in messages)
    for message in messages:
        each = [setup.exchange_seconds(n * head_bytes, ulysses) for n in (message.arriving, message.leaving)]
        sent += sum(each)
        arriving.append(message.arriving_messages * of_message + each[0])
        leaving.append(of_message + each[1])
        copied = EXCHANGE_COPIES * (message.arriving + message.leaving) * head_bytes / setup.machine.speeds.memory
        computed.append(attention.seconds * message.queries / heads + copied)
    total = _pipelined(computed, arriving, leaving) if setup.overlap_exchange else sum(computed + arriving + leaving)
    if setup.in_a_node(ulysses) and not setup.in_a_node(setup.sp):
        sent = 0.0  # the ring uses other links, those between nodes
    return replace(attention, exchange=attention.exchange + total - attention.seconds, link=attention.link + sent)


def _pipelined(computed: Sequence[float], arriving: Sequence[float], leaving: Sequence[float]) -> float:
    """Return the seconds of stages whose messages take one link in the order of `longctx.ulysses.head_chunks`.

    The next stage's tokens are sent when a stage begins, and its results when it is done.
    """
    arrived = link = arriving[0]
    done = 0.0
    for stage, seconds in enumerate(computed):
        begun = max(done, arrived)
        if stage + 1 < len(computed):
            arrived = link = max(link, begun) + arriving[stage + 1]
        done = begun + seconds
        link = max(link, done) + leaving[stage]
    return link

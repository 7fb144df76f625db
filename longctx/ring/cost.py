"""Modelled seconds of a layer's attention in a ring, whose keys and values travel from rank to rank or are gathered.

Shape legend: P = R · U ranks, R in a ring and U of Ulysses; T tokens of a sequence; K key/value heads of a ring rank, D
head size, e bytes an element.

**Ring** (Ring Attention, arXiv 2310.01889): at hop h a rank receives the keys and values of n_h tokens, at most T/R. In
the backward pass it receives them again, and fp32 gradients of as many tokens return to their owner:

    forward  2 · K · n_h · D · e bytes,   backward  2 · K · D · n_h · (e + 4) bytes.

`longctx.ring.order` says what has been sent at each block. The messages of a rank take its link one after the other,
each as soon as the ranks at both its ends have sent all before it. Only what computation does not hide counts. n_h and
the work of each hop are those of `plan_ring` for the given documents.

**Gather** sends the largest n_1 of any rank from every rank to all R-1 others, a quarter of the heads at a time, while
the quarter before is computed. The gradients of a quarter return while the rank's own block is computed. The data
enters each node once, over the links of all its devices, and passes from node to node.
"""

from __future__ import annotations

import numpy as np

from longctx.attention.cost import (
    Arrangement,
    AttentionTime,
    RingWork,
    Seconds,
    Setup,
    block_seconds,
    key_value_elements,
    stages_of,
)
from longctx.ring.order import MessageOrder, heads_at_a_time


def gather_passes(setup: Setup, arrangement: Arrangement, work: RingWork) -> tuple[AttentionTime, AttentionTime]:
    """Return the modelled time of a gather, forward and backward."""
    groups = -(-setup.num_key_value_heads // heads_at_a_time(setup.num_key_value_heads, setup.heads_k_stride))
    moved = int(work.received[:, 1:2].max(initial=0)) * arrangement.ring * key_value_elements(setup, arrangement)
    latency = groups * setup.gather_latency(arrangement.ring) * (moved > 0)
    travel = setup.gather_seconds(moved * setup.element_size, arrangement.ring) + latency
    home = setup.gather_seconds(moved * 4, arrangement.ring) + latency
    forward, backward = block_seconds(setup, arrangement, work, groups)
    return _gather_forward(forward, travel, groups), _gather_backward(backward, travel, home, groups)


def _gather_forward(compute: Seconds, travel: float, groups: int) -> AttentionTime:
    """Model a forward pass over all head groups, whose keys and values come one after the other.

    A group computes its own block, hop 0 of `compute` [R, R], before it needs its part of `travel`. All groups are
    equal, so a rank waits for the first part, for the last, or for none.
    """
    own, rest = compute[:, 0], compute[:, 1:].sum(1)
    first = travel / groups + rest + own * (groups - 1) / groups
    last = travel + rest / groups
    return _gathered(compute, np.max([own + rest, first, last], axis=0), travel)


def _gather_backward(compute: Seconds, travel: float, home: float, groups: int) -> AttentionTime:
    """Model a backward pass, in which a group ends with its own block, while its gradients return.

    The keys and values of the next group are sent before the gradients of this one, on the same link.
    """
    own, rest = compute[:, 0] / groups, compute[:, 1:].sum(1) / groups
    link = arrived = np.full(len(compute), travel / groups)
    clock: Seconds = np.zeros(len(compute))
    for group in range(groups):
        clock = np.maximum(clock, arrived)
        if group + 1 < groups:
            link = arrived = np.maximum(link, clock) + travel / groups
        clock = clock + rest
        link = np.maximum(link, clock.max()) + home / groups
        clock = np.maximum(clock + own, link)
    return _gathered(compute, clock, travel + home)


def _gathered(compute: Seconds, ended: Seconds, link: float) -> AttentionTime:
    computed = compute.sum(1)
    return AttentionTime(compute=computed, exchange=ended - computed, wait=ended.max() - ended, link=link)


def ring_passes(setup: Setup, arrangement: Arrangement, work: RingWork) -> tuple[AttentionTime, AttentionTime]:
    """Return the modelled time of a ring, forward and backward."""
    ring, stages = arrangement.ring, len(stages_of(setup, arrangement))
    rank, hop = np.ogrid[:ring, :ring]
    received = np.where(hop > 0, work.received, 0)
    message = stages * setup.machine.speeds.message_seconds * (received > 0)
    seconds = received * key_value_elements(setup, arrangement) / _speed(setup, arrangement)
    keys, gradients = seconds * setup.element_size + message, seconds * 4 + message
    order = MessageOrder.of(received.max(axis=0), work.num_tokens // ring)
    forward, backward = block_seconds(setup, arrangement, work, stages)
    return (
        _ring_forward(forward, keys, order),
        _ring_backward(backward, keys, gradients[(rank + hop) % ring, hop], order),
    )


class _Ranks:
    """The clocks of all ranks of a ring, in seconds. Shape legend: all arrays are float64 [R], one value a rank."""

    def __init__(self, keys: Seconds, order: MessageOrder):
        """
        Args:
            keys: [R, R], seconds that the keys and values received at each hop take.
        """
        self.keys, self.order = keys, order
        ring = len(keys)
        self.clock, self.link, self.exchange, self.computed = np.zeros((4, ring))
        """When each rank has computed all so far, and its link has carried all so far; seconds of waiting for messages
        that are on their way; seconds of computing."""
        self.arrived: list[Seconds] = [np.zeros(ring)]
        """By hop, when the keys and values of each hop are there."""
        self.send_up_to(order.sent[0])

    def send(self, seconds: Seconds, distance: int) -> Seconds:
        """Let every rank receive a message from the rank `distance` before it.

        Returns:
            When each rank has received its own and sent that of the rank after it, which are awaited together.
        """
        begun = np.maximum(self.link, self.clock)
        received = np.where(seconds > 0, np.maximum(begun, _turned(begun, distance)) + seconds, 0)
        self.link = np.maximum(np.maximum(self.link, received), _turned(received, -distance))
        return self.link

    def send_up_to(self, last_hop: int) -> None:
        """Send keys and values up to a hop."""
        for hop in range(len(self.arrived), last_hop + 1):
            self.arrived.append(self.send(self.keys[:, hop], hop))

    def wait(self, arrived: Seconds, seconds: Seconds) -> None:
        """Wait for messages that take so many seconds."""
        self.exchange += np.minimum(np.maximum(arrived - self.clock, 0), seconds)
        self.clock = np.maximum(self.clock, arrived)

    def compute(self, seconds: Seconds) -> None:
        """Compute a block."""
        self.clock = self.clock + seconds
        self.computed += seconds

    def receive(self, hop: int) -> None:
        """Wait for the keys and values of a hop, and send those that may be sent by then."""
        self.wait(self.arrived[hop], self.keys[:, hop])
        self.send_up_to(self.order.sent[hop])

    def time(self, link: Seconds) -> AttentionTime:
        """Return how the ranks have spent the seconds until all were done."""
        waited = self.clock.max() - self.computed - self.exchange
        return AttentionTime(compute=self.computed, exchange=self.exchange, wait=waited, link=float(link.max()))


def _ring_forward(compute: Seconds, keys: Seconds, order: MessageOrder) -> AttentionTime:
    """Model a forward pass.

    Args:
        compute: [R, R], seconds of each rank's block of each hop.
        keys: [R, R], seconds that the keys and values received at each hop take.
    """
    ranks = _Ranks(keys, order)
    ranks.compute(compute[:, 0])
    for hop in range(1, _num_hops(compute + keys)):
        ranks.receive(hop)
        ranks.compute(compute[:, hop])
    return ranks.time(keys.sum(1))


def _ring_backward(compute: Seconds, keys: Seconds, gradients: Seconds, order: MessageOrder) -> AttentionTime:
    """Model a backward pass.

    Args:
        compute, keys: as in the forward pass.
        gradients: [R, R], seconds that each rank's gradients take to return from the rank at each hop.
    """
    ranks = _Ranks(keys, order)
    returned: list[Seconds] = [np.zeros(len(keys))]
    num_hops = _num_hops(compute + keys)
    own_after, added = min(order.own_after, num_hops - 1), 0
    if own_after == 0:
        ranks.compute(compute[:, 0])
    for hop in range(1, num_hops):
        ranks.receive(hop)
        ranks.compute(compute[:, hop])
        while added < order.returned[hop]:
            added += 1
            ranks.wait(returned[added], gradients[:, added])
        returned.append(ranks.send(gradients[:, hop], -hop))
        if hop == own_after:
            ranks.compute(compute[:, 0])
    for hop in range(added + 1, num_hops):
        ranks.wait(returned[hop], gradients[:, hop])
    return ranks.time((keys + gradients).sum(1))


def _turned(values: Seconds, distance: int) -> Seconds:
    """Return `np.roll(values, distance)`, without its checks, which take ten times as long."""
    return np.concatenate((values[-distance:], values[:-distance]))


def _num_hops(seconds: Seconds) -> int:
    """Return the number of hops up to the last one at which a rank does anything, the own block included."""
    return int(np.flatnonzero(seconds.any(axis=0)).max(initial=0)) + 1


def _speed(setup: Setup, arrangement: Arrangement) -> Seconds:
    """Return float64 [R, R]: at [r, h], the bytes per second from ring rank r - h to r, the slowest of U ranks."""
    node = np.arange(setup.sp).reshape(arrangement.ring, arrangement.ulysses) // setup.machine.per_node
    rank, hop = np.ogrid[: arrangement.ring, : arrangement.ring]
    crosses = (node[(rank - hop) % arrangement.ring] != node[:, None]).any(axis=-1)
    return np.where(crosses, setup.machine.speeds.across.pass_on, setup.machine.speeds.within.pass_on)

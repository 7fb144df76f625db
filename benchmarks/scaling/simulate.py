"""A simulated training step on many devices: what every rank computes, what it exchanges, and how long it waits.

The step is made from the documents that the ranks really get. `longctx.ring.plan` gives the pairs of query and key and
the received tokens of each rank at each hop. `longctx.attention.cost` gives the seconds that they take on the machine's
links; only the first rank of a node receives over the link between nodes. `longctx.forecast.seconds` gives the rest
of the layers, the gathering of weights and the reduction of gradients.

Ranks of a sequence group wait for each other in every pass of every layer. Groups wait for the slowest group in every
micro-batch, since all gather the same weights. Weights are gathered and gradients reduced in every micro-batch while
something is computed, but not while attention's messages take the same link; what computation does not hide adds to the
step. Nothing fails, no link is shared with other jobs, and all devices are equally fast. For one sequence on one node
the result is that of `longctx.forecast.seconds`, except that it counts how evenly recomputation is balanced. All
numbers are simulated, never measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longctx.attention.cost import RingWork, Seconds
from longctx.attention.modelled import attention_time
from longctx.forecast.seconds import (
    attended_again,
    host_seconds,
    launch_seconds,
    optimizer_seconds,
    recurrent_seconds,
    tokenwise_seconds,
    weights_seconds,
)
from longctx.forecast.shape import RunShape
from longctx.machine.here import Machine
from longctx.machine.speeds import FLOPS_BACKWARD, FLOPS_FORWARD


@dataclass(frozen=True, kw_only=True, eq=False)
class SimulatedStep:
    """How every rank spends a step: float64 [world_size] seconds each, which add up to the same for all."""

    compute: Seconds
    """Seconds of computing, and of waiting for the host that goes through the layers."""
    exchange: Seconds
    """Seconds until messages and copies arrive, while nothing is computed."""
    wait: Seconds
    """Seconds of waiting for other ranks."""
    least: float
    """Seconds of a step in which all ranks only compute, and all equally long."""
    tokens: int
    """Tokens of all ranks."""

    @property
    def seconds(self) -> float:
        return float((self.compute + self.exchange + self.wait).max())

    @property
    def efficiency(self) -> float:
        """Fraction of the step that is not lost to its distribution."""
        return self.least / self.seconds

    @property
    def tokens_per_second_per_device(self) -> float:
        return self.tokens / self.seconds / len(self.compute)


def simulate(shape: RunShape, micro_batches: Sequence[Sequence[RingWork]], machine: Machine) -> SimulatedStep:
    """Simulate one optimizer step.

    Args:
        shape: degrees, engine and memory options; whether it fits in memory is not checked.
        micro_batches: [accumulation][world_size / sp], `RingWork.of` the documents of each group, whose rows are
            flattened to one, for `shape.ring` ranks. All have equally many tokens.
    """
    length = micro_batches[0][0].num_tokens // shape.rows
    distinct = {id(work): work for rows in micro_batches for work in rows}
    groups = {key: _sequence_group(shape, length, work, machine) for key, work in distinct.items()}
    total = np.zeros((3, shape.world_size))
    for rows in micro_batches:
        pairs = max(int(work.pairs.sum()) for work in rows) / shape.sp
        total += _micro_batch(shape, length, [groups[id(work)] for work in rows], pairs, machine)
    optimizer = optimizer_seconds(shape, machine)
    total[0] += optimizer
    compute, exchange, wait = total
    return SimulatedStep(
        compute=compute,
        exchange=exchange,
        wait=wait,
        least=_least_seconds(shape, length, micro_batches, machine) + optimizer,
        tokens=sum(work.num_tokens for rows in micro_batches for work in rows),
    )


def _micro_batch(
    shape: RunShape, length: int, groups: Sequence[tuple[Seconds, float]], pairs: float, machine: Machine
) -> Seconds:
    """Return [3, world_size]: the seconds that each rank computes, exchanges and waits.

    Args:
        pairs: legal pairs that a rank of the slowest group attends to.
    """
    done = np.concatenate([group for group, _ in groups], axis=1)
    done[0] += np.maximum(0.0, launch_seconds(shape, machine.speeds) - done.sum(0))
    slowest = done.sum(0).max()
    done[2] += slowest - done.sum(0)
    link = max(link for _, link in groups) if _share_links(shape, machine) else 0.0
    exposed = max(0.0, weights_seconds(shape, machine) + link - slowest)
    done[1] += exposed + host_seconds(shape, machine, length, pairs, slowest)
    return done


def _sequence_group(shape: RunShape, length: int, work: RingWork, machine: Machine) -> tuple[Seconds, float]:
    """Return [3, sp] as `_micro_batch`, before waiting for other groups, and the seconds that attention uses a link."""
    layers = shape.model.num_attended
    attention = attention_time(shape.attention(machine), shape.arrangement, work)
    again = attended_again(shape, work.pairs.sum(1) / shape.ulysses, machine.speeds)
    compute = sum(tokenwise_seconds(shape, length, machine.speeds)) + again + layers * attention.compute
    compute = compute + recurrent_seconds(shape, length, machine)
    ring = np.stack([compute, layers * attention.exchange, layers * attention.wait])
    return np.repeat(ring, shape.ulysses, axis=1), layers * attention.link


def _share_links(shape: RunShape, machine: Machine) -> bool:
    """Whether attention's messages and weights are slowest on the same kind of link."""
    node = min(machine.per_node, shape.world_size)
    return node % shape.sp != 0 or shape.shards <= node


def _least_seconds(
    shape: RunShape, length: int, micro_batches: Sequence[Sequence[RingWork]], machine: Machine
) -> float:
    pairs = sum(int(work.pairs.sum()) for rows in micro_batches for work in rows) / shape.world_size
    flops = (FLOPS_FORWARD + FLOPS_BACKWARD) * shape.model.query_size * shape.model.num_attended
    attended = pairs * flops / machine.speeds.attention + float(attended_again(shape, pairs, machine.speeds))
    each = sum(tokenwise_seconds(shape, length, machine.speeds)) + recurrent_seconds(shape, length, machine)
    launched = float(launch_seconds(shape, machine.speeds))
    return max(len(micro_batches) * each + attended, len(micro_batches) * launched)

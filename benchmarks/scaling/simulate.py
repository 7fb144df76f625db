"""A simulated training step on many devices: what every rank computes, what it exchanges, and how long it waits.

The step is made from the documents that the ranks really get. `longctx.ring.plan` gives the pairs of query and key and
the received tokens of each rank at each hop. `longctx.attention.cost` gives the seconds that they take on the machine's
links; only the first rank of a node receives over the link between nodes. `longctx.forecast.step_time` gives the rest
of the layers, the gathering of weights and the reduction of gradients.

Ranks of a sequence group wait for each other in every pass of every layer. Groups wait for the slowest group in every
micro-batch, since all gather the same weights. Weights are gathered and gradients reduced in every micro-batch while
something is computed, but not while attention's messages take the same link; what computation does not hide adds to the
step. Nothing fails, no link is shared with other jobs, and all devices are equally fast. For one sequence on one node
the result is that of `longctx.forecast.step_time`, except that it counts how evenly recomputation is balanced. All
numbers are simulated, never measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longctx.attention.cost import FLOPS_BACKWARD, FLOPS_FORWARD, RingWork, Seconds
from longctx.attention.modelled import attention_time
from longctx.forecast.memory_setup import MemorySetup
from longctx.forecast.step_time import (
    Speeds,
    attended_again_seconds,
    attention_setup,
    host_seconds,
    launch_seconds,
    optimizer_seconds,
    recurrent_seconds,
    tokenwise_seconds,
    weights_seconds,
)


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


def simulate(setup: MemorySetup, micro_batches: Sequence[Sequence[RingWork]], speeds: Speeds) -> SimulatedStep:
    """Simulate one optimizer step.

    Args:
        setup: degrees, engine and memory options; whether it fits in memory is not checked.
        micro_batches: [accumulation][world_size / sp], `RingWork.of` the documents of each group, whose rows are
            flattened to one, for `setup.ring` ranks. All have equally many tokens.
        speeds: speeds of the machine.

    Raises:
        ValueError: if there is not one row for every group, for its ring and of the same length.
    """
    _check(setup, micro_batches)
    length = micro_batches[0][0].num_tokens // setup.num_rows
    distinct = {id(work): work for rows in micro_batches for work in rows}
    groups = {key: _sequence_group(setup, length, work, speeds) for key, work in distinct.items()}
    total = np.zeros((3, setup.world_size))
    for rows in micro_batches:
        pairs = max(int(work.pairs.sum()) for work in rows) / setup.sp
        total += _micro_batch(setup, length, [groups[id(work)] for work in rows], pairs, speeds)
    optimizer = optimizer_seconds(setup, speeds)
    total[0] += optimizer
    compute, exchange, wait = total
    return SimulatedStep(
        compute=compute,
        exchange=exchange,
        wait=wait,
        least=_least_seconds(setup, length, micro_batches, speeds) + optimizer,
        tokens=sum(work.num_tokens for rows in micro_batches for work in rows),
    )


def _micro_batch(
    setup: MemorySetup, length: int, groups: Sequence[tuple[Seconds, float]], pairs: float, speeds: Speeds
) -> Seconds:
    """Return [3, world_size]: the seconds that each rank computes, exchanges and waits.

    Args:
        pairs: legal pairs that a rank of the slowest group attends to.
    """
    done = np.concatenate([group for group, _ in groups], axis=1)
    done[0] += np.maximum(0.0, launch_seconds(setup, speeds.device) - done.sum(0))
    slowest = done.sum(0).max()
    done[2] += slowest - done.sum(0)
    link = max(link for _, link in groups) if _share_links(setup) else 0.0
    exposed = max(0.0, weights_seconds(setup, speeds.device) + link - slowest)
    done[1] += exposed + host_seconds(setup, length, pairs, speeds, slowest)
    return done


def _sequence_group(setup: MemorySetup, length: int, work: RingWork, speeds: Speeds) -> tuple[Seconds, float]:
    """Return [3, sp] as `_micro_batch`, before waiting for other groups, and the seconds that attention uses a link."""
    layers = setup.model.num_attended
    attention = attention_time(*attention_setup(setup, speeds.device), work)
    again = attended_again_seconds(setup, work.pairs.sum(1) / setup.ulysses, speeds)
    compute = sum(tokenwise_seconds(setup, length, speeds)) + again + layers * attention.compute
    compute = compute + recurrent_seconds(setup, length, speeds)
    ring = np.stack([compute, layers * attention.exchange, layers * attention.wait])
    return np.repeat(ring, setup.ulysses, axis=1), layers * attention.link


def _share_links(setup: MemorySetup) -> bool:
    """Whether attention's messages and weights are slowest on the same kind of link."""
    node = setup.ranks_per_node
    return node % setup.sp != 0 or setup.world_size // setup.dp_replicate <= node


def _least_seconds(
    setup: MemorySetup, length: int, micro_batches: Sequence[Sequence[RingWork]], speeds: Speeds
) -> float:
    pairs = sum(int(work.pairs.sum()) for rows in micro_batches for work in rows) / setup.world_size
    flops = (FLOPS_FORWARD + FLOPS_BACKWARD) * setup.model.query_size * setup.model.num_attended
    attended = pairs * flops / speeds.device.attention_flops + float(attended_again_seconds(setup, pairs, speeds))
    each = sum(tokenwise_seconds(setup, length, speeds)) + recurrent_seconds(setup, length, speeds)
    launched = float(launch_seconds(setup, speeds.device))
    return max(len(micro_batches) * each + attended, len(micro_batches) * launched)


def _check(setup: MemorySetup, micro_batches: Sequence[Sequence[RingWork]]) -> None:
    groups = setup.world_size // setup.sp
    counts = {len(rows) for rows in micro_batches}
    if counts != {groups}:
        raise ValueError(
            f"Micro-batches of {', '.join(map(str, sorted(counts))) or 'no'} rows do not suit {groups} groups "
            f"({setup.world_size} devices / sp {setup.sp}). Give each group one."
        )
    rings = {len(work.pairs) for rows in micro_batches for work in rows}
    lengths = {work.num_tokens for rows in micro_batches for work in rows}
    if rings != {setup.ring}:
        raise ValueError(f"Rows planned for rings of {sorted(rings)} do not suit ring {setup.ring}. Plan them for it.")
    if len(lengths) > 1 or lengths.pop() % setup.num_rows:
        raise ValueError(
            f"Rows have to have equally many tokens, a multiple of {setup.num_rows} rows each, as training pads them."
        )

"""A training step on many devices, simulated: what every rank computes, what it exchanges, and whom it waits for.

The step is put together from the documents that the ranks really get: `longctx.ring.plan` says how many pairs of query
and key each rank has at each hop and how many tokens reach it, and `longctx.attention.cost` how long that takes on
the links of the machine, the first rank of a node receiving over the link between nodes and the others over those
within. To these come the rest of the layers by `longctx.forecast.step_time`, weights that are gathered and gradients
that are reduced.

Ranks of a sequence group wait for each other in every pass of every layer; groups with different packs wait for the
dearest of them in every micro-batch, since all gather the same weights. Weights are gathered and gradients reduced in
every micro-batch, while something is computed and, where attention's messages take the same link, none of them
travels; what does not fit in there is time of its own. Nothing fails, no link is shared with other jobs, and all
devices are equally fast. With one row on one node, this is what `longctx.forecast.step_time` says, but for the balance
of the ranks in what is computed again. All numbers are simulated, never measured.
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
    optimizer_seconds,
    tokenwise_seconds,
    weights_seconds,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class SimulatedStep:
    """Seconds of every rank, float64 [world_size], which add up to the same for all."""

    compute: Seconds
    exchange: Seconds
    """For messages and copies to arrive, as far as nothing is computed meanwhile."""
    wait: Seconds
    """For other ranks."""
    least: float
    """Seconds of a step in which ranks did nothing but compute layers and attend, all equally long."""
    tokens: int
    """Of all ranks."""

    @property
    def seconds(self) -> float:
        return float((self.compute + self.exchange + self.wait).max())

    @property
    def efficiency(self) -> float:
        """Part of the step that is not lost by spreading it."""
        return self.least / self.seconds

    @property
    def tokens_per_second_per_device(self) -> float:
        return self.tokens / self.seconds / len(self.compute)


def simulate(setup: MemorySetup, micro_batches: Sequence[Sequence[RingWork]], speeds: Speeds) -> SimulatedStep:
    """One optimizer step.

    Args:
        setup: degrees, engine and levers; its memory is not looked at.
        micro_batches: [accumulation][world_size / sp], `RingWork.of` the documents of each group, whose rows are
            flattened to one, for `setup.ring` ranks; equally many tokens each.
        speeds: of the machine.

    Raises:
        ValueError: if there is not one row for every group, for its ring and of the same length.
    """
    _check(setup, micro_batches)
    length = micro_batches[0][0].num_tokens // setup.num_rows
    distinct = {id(work): work for rows in micro_batches for work in rows}
    groups = {key: _sequence_group(setup, length, work, speeds) for key, work in distinct.items()}
    total = np.zeros((3, setup.world_size))
    for rows in micro_batches:
        total += _micro_batch(setup, length, [groups[id(work)] for work in rows], speeds)
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


def _micro_batch(setup: MemorySetup, length: int, groups: Sequence[tuple[Seconds, float]], speeds: Speeds) -> Seconds:
    """[3, world_size]: seconds that each rank computes, exchanges and waits."""
    done = np.concatenate([group for group, _ in groups], axis=1)
    slowest = done.sum(0).max()
    done[2] += slowest - done.sum(0)
    link = max(link for _, link in groups) if _share_links(setup) else 0.0
    exposed = max(0.0, weights_seconds(setup, speeds.device) + link - slowest)
    done[1] += exposed + host_seconds(setup, length, speeds, slowest)
    return done


def _sequence_group(setup: MemorySetup, length: int, work: RingWork, speeds: Speeds) -> tuple[Seconds, float]:
    """[3, sp] as `_micro_batch`, before it waits for other groups, and how long attention keeps a link busy."""
    layers = setup.model.num_layers
    attention = attention_time(*attention_setup(setup, speeds.device), work)
    again = attended_again_seconds(setup, work.pairs.sum(1) / setup.ulysses, speeds)
    compute = sum(tokenwise_seconds(setup, length, speeds)) + again + layers * attention.compute
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
    flops = (FLOPS_FORWARD + FLOPS_BACKWARD) * setup.model.query_size * setup.model.num_layers
    attended = pairs * flops / speeds.device.attention_flops + float(attended_again_seconds(setup, pairs, speeds))
    return len(micro_batches) * sum(tokenwise_seconds(setup, length, speeds)) + attended


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

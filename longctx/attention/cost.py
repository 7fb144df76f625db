"""The parts of attention's modelled time: the run's heads, the speeds of devices and links, and the work of a ring.

`longctx.attention.modelled` adds up the seconds that a rank computes, exchanges and waits for, per layer and
micro-batch. `longctx.forecast.seconds` and `benchmarks.scaling.simulate` add the rest of a step.

Shape legend: P = R · U ranks, R in a ring and U of Ulysses; T tokens of a sequence, s = T/P of them a rank; H query
heads, K key/value heads, D head size, e bytes an element.

A causal pair of query and key costs 4·D FLOPs a head forward and 10·D backward (FlashAttention-2, arXiv 2307.08691,
section 4.1). Merging a block into the results so far costs memory traffic. Every message, call and entry has a latency.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PretrainedConfig

from longctx.machine.here import Machine
from longctx.machine.speeds import FLOPS_BACKWARD, FLOPS_FORWARD
from longctx.model.allow_list import head_size, num_heads
from longctx.model.recurrent import RecurrentSizes, recurrent_sizes
from longctx.ring.plan import RingPlan
from longctx.ring.planner import plan_ring
from longctx.ulysses.exchange import key_value_copies
from longctx.ulysses.stages import Stage, head_stages

Seconds = NDArray[np.float64]

EXCHANGE_COPIES = 4
"""How often an exchanged element is also read or written: it is gathered before sending and reordered afterwards."""

MERGE_BYTES = (38, 10)
"""Bytes read and written for each element of a merged query row: forward (fp32 out) and backward (fp32 dq)."""

MERGE_LAUNCHES = 5
"""Kernels that merge a block, besides the one that computes it."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is known of a run's attention before its data is known."""

    sp: int
    """Ranks that share a sequence, neighbours in rank."""
    num_heads: int
    num_key_value_heads: int
    head_size: int
    element_size: int
    """Bytes of an element of q, k and v."""
    machine: Machine
    heads_k_stride: int | None = None
    """Key/value heads of a rank that are sent and attended at a time; None means the backend's default."""
    overlap_exchange: bool = False
    """Whether some heads are exchanged for tokens while others are attended to."""
    recurrent: RecurrentSizes | None = None
    """The sizes of a recurrent layer, or None for a model without such layers."""

    @classmethod
    def of_model(cls, config: PretrainedConfig, sp: int, *, element_size: int, machine: Machine) -> Setup:
        """Return the setup of a model on a machine."""
        query_heads, key_value_heads = num_heads(config)
        return cls(
            sp=sp,
            num_heads=query_heads,
            num_key_value_heads=key_value_heads,
            head_size=head_size(config),
            element_size=element_size,
            machine=machine,
            recurrent=recurrent_sizes(config),
        )

    def in_a_node(self, span: int) -> bool:
        """Whether every group of `span` neighbouring ranks lies in one node."""
        return self.machine.per_node % span == 0

    def neighbours(self, span: int) -> int:
        """Return how many ranks of such a group are sure to share a node."""
        return math.gcd(span, self.machine.per_node)

    def exchange_seconds(self, num_bytes: float, span: int) -> float:
        """Return the seconds of an all-to-all in such groups, whose ranks have `num_bytes` each, without latencies."""
        here = self.neighbours(span)
        within = num_bytes * (here - 1) / span / self.machine.speeds.within.exchange
        return max(within, num_bytes * (span - here) / span / self.machine.speeds.across.exchange)

    def gather_seconds(self, num_bytes: float, span: int) -> float:
        """Return the seconds to gather `num_bytes` in all on every rank of such groups, or to reduce-scatter them.

        The bytes enter each node once, over the links of all its devices. Latencies are not counted.
        """
        here = self.neighbours(span)
        within = num_bytes * (span - 1) / span / self.machine.speeds.within.exchange
        return max(within, num_bytes * (span - here) / span / (here * self.machine.speeds.across.exchange))

    def gather_latency(self, span: int) -> float:
        """Return the latency of a gather in such groups: one message for every node."""
        return self.machine.speeds.message_seconds * (span // self.neighbours(span))


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """A backend and its degrees."""

    name: str
    ring: int
    """Ranks that pass keys and values around."""
    ulysses: int
    """Ranks that exchange tokens for heads."""

    def __str__(self) -> str:
        """Return a text such as `ulysses 4 × ring 2` or `ring 8`."""
        if self.ring > 1 and self.ulysses > 1:
            return f"ulysses {self.ulysses} × ring {self.ring}"
        return f"{self.name} {self.ring * self.ulysses}" if self.ring * self.ulysses > 1 else self.name


@dataclass(frozen=True, kw_only=True, eq=False)
class RingWork:
    """The work of each rank of a ring at each hop, where hop 0 is its own tokens. All arrays are [R, R]: rank, hop."""

    pairs: NDArray[np.int64]
    """Legal pairs of query and key."""
    entries: NDArray[np.int64]
    """Pairs of token ranges."""
    merged_rows: NDArray[np.int64]
    """Queries whose results are merged with those of earlier hops."""
    received: NDArray[np.int64]
    """Tokens whose k and v are received."""
    num_tokens: int
    """Tokens of the sequence, T."""

    @classmethod
    def of(cls, document_lengths: NDArray[np.integer], ring: int, **options: Any) -> RingWork:
        """Return the work by `plan_ring`, with options of it, for a sequence whose tokens are a multiple of `ring`."""
        return cls.of_plan(plan_ring(np.concatenate(([0], np.cumsum(document_lengths))), ring, **options))

    @classmethod
    def of_plan(cls, plan: RingPlan) -> RingWork:
        """Return the work by a plan."""
        ring = plan.world_size
        pairs, entries, merged_rows = plan.work_per_hop
        merged_rows[:, 0] = 0
        rank, hop = np.ogrid[:ring, :ring]
        received = np.where(hop > 0, plan.prefix_tokens[(rank - hop) % ring, hop], 0)
        return cls(
            pairs=pairs, entries=entries, merged_rows=merged_rows, received=received, num_tokens=int(plan.num_tokens)
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionTime:
    """How the ranks of a ring spend their time, float64 [R] seconds each, which add up to the same for all.

    A ring rank stands for the U ranks that exchange tokens for heads, which all do the same.
    """

    compute: Seconds
    exchange: Seconds
    """Seconds until its own messages arrive, while it computes nothing."""
    wait: Seconds
    """Seconds of waiting for the neighbour that sends, and for the slowest rank."""
    link: float
    """Seconds that the busiest link carries data, whether or not computation hides it. A scalar."""

    def __add__(self, other: AttentionTime) -> AttentionTime:
        return AttentionTime(
            compute=self.compute + other.compute,
            exchange=self.exchange + other.exchange,
            wait=self.wait + other.wait,
            link=self.link + other.link,
        )

    @property
    def seconds(self) -> float:
        """Total seconds, the same for every rank."""
        return float((self.compute + self.exchange + self.wait).max())


def stages_of(setup: Setup, arrangement: Arrangement) -> list[Stage]:
    """Return the parts of the heads that a rank attends to one after the other; one part if all go together."""
    copies = key_value_copies(setup.num_heads, setup.num_key_value_heads, arrangement.ulysses)
    per_rank = setup.num_key_value_heads * copies // arrangement.ulysses
    sharing = setup.num_heads // (setup.num_key_value_heads * copies)
    if setup.heads_k_stride is None and not (setup.overlap_exchange and arrangement.ulysses > 1):
        return list(head_stages(per_rank, sharing, per_rank, split_queries=False))
    return list(head_stages(per_rank, sharing, setup.heads_k_stride, split_queries=arrangement.ring == 1))


def key_value_elements(setup: Setup, arrangement: Arrangement) -> float:
    """Return the elements of k and v for one token and the heads of one ring rank."""
    copies = key_value_copies(setup.num_heads, setup.num_key_value_heads, arrangement.ulysses)
    return 2 * setup.num_key_value_heads * copies / arrangement.ulysses * setup.head_size


def block_seconds(setup: Setup, arrangement: Arrangement, work: RingWork, groups: int) -> tuple[Seconds, Seconds]:
    """Return the seconds that each rank computes at each hop, [R, R], forward and backward."""
    speeds, elements = setup.machine.speeds, setup.num_heads / arrangement.ulysses * setup.head_size
    launches = (work.entries > 0) * np.where(np.arange(arrangement.ring) > 0, 1 + MERGE_LAUNCHES, 1)
    begun = groups * (work.entries * speeds.entry_seconds + launches * speeds.launch_seconds)
    forward, backward = (
        work.pairs * (flops * elements / speeds.attention)
        + work.merged_rows * (merge * elements / speeds.memory)
        + begun
        for flops, merge in zip((FLOPS_FORWARD, FLOPS_BACKWARD), MERGE_BYTES, strict=True)
    )
    return forward, backward

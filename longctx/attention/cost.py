"""The parts of attention's modelled time: the run's heads, the speeds of devices and links, and the work of a ring.

`longctx.attention.modelled` adds up the seconds that a rank computes, exchanges and waits for, per layer and
micro-batch. `longctx.forecast.step_time` and `benchmarks.scaling.simulate` add the rest of a step.

Shape legend: P = R · U ranks, R in a ring and U of Ulysses; T tokens of a sequence, s = T/P of them a rank; H query
heads, K key/value heads, D head size, e bytes an element.

A causal pair of query and key costs 4·D FLOPs a head forward and 10·D backward (FlashAttention-2, arXiv 2307.08691,
section 4.1). Merging a block into the results so far costs memory traffic. Every message, call and entry has a latency.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from transformers import PretrainedConfig

from longctx.attention.speeds import SPEEDS, Constant, SpeedTable
from longctx.model.allow_list import head_size, num_heads
from longctx.model.recurrent import RecurrentSizes, recurrent_sizes
from longctx.ring.plan import RingPlan
from longctx.ring.planner import MAX_IMBALANCE, TimeOfPlan, plan_ring
from longctx.ulysses.exchange import key_value_copies
from longctx.ulysses.stages import Stage, head_stages

Seconds = NDArray[np.float64]

EXCHANGE_COPIES = 4
"""How often an exchanged element is also read or written: it is gathered before sending and reordered afterwards."""

FLOPS_FORWARD, FLOPS_BACKWARD = 4, 10
"""FLOPs for each legal pair of query and key, head, and element of the head."""

MERGE_BYTES = (38, 10)
"""Bytes read and written for each element of a merged query row: forward (fp32 out) and backward (fp32 dq)."""

MERGE_LAUNCHES = 5
"""Kernels that merge a block, besides the one that computes it."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """The speed of a link, in bytes per second that every rank of a group sends while it receives as many."""

    exchange: float
    """Speed of an all-to-all."""
    pass_on: float
    """Speed of sending to one other rank."""

    @classmethod
    def of(cls, speed: float) -> Link:
        """Return a link with the same speed for both."""
        return cls(exchange=speed, pass_on=speed)


@dataclass(frozen=True, kw_only=True)
class Device:
    """The speeds and latencies of one device."""

    attention_flops: float
    """FLOPs a second of the attention kernel."""
    memory_speed: float
    """Bytes a second read or written."""
    within: Link
    """Link between devices of a node."""
    across: Link
    """Link between nodes, for each device."""
    message_seconds: float = 20e-6
    launch_seconds: float = 5e-6
    entry_seconds: float = 0.0
    """Latency of each pair of token ranges in a call; 0 for kernels that take all of them at once."""


def _device(constants: Mapping[str, Constant]) -> Device:
    """Return the device of one section of the table of speeds."""
    of = {name: constant.value for name, constant in constants.items()}
    return Device(
        attention_flops=of["attention_flops"],
        memory_speed=of["memory_speed"],
        within=Link(exchange=of["within_exchange"], pass_on=of["within_pass_on"]),
        across=Link(exchange=of["across_exchange"], pass_on=of["across_pass_on"]),
        message_seconds=of["message_seconds"],
        launch_seconds=of["launch_seconds"],
        entry_seconds=of["entry_seconds"],
    )


def both_passes(forward: float, backward: float) -> float:
    """Return the FLOPs per second of attention's two passes together, from those of each."""
    return (FLOPS_FORWARD + FLOPS_BACKWARD) / (FLOPS_FORWARD / forward + FLOPS_BACKWARD / backward)


def devices_of(table: SpeedTable) -> dict[str, Device]:
    """Return the devices of a table of speeds, by the keys of DEVICES."""
    return {name: _device(constants) for name, constants in table.constants.items()}


DEVICES: dict[str, Device] = devices_of(SPEEDS)
"""Devices by a part of their names. The last two, GPU and CPU, stand for all others. speeds.toml has the sources."""

PEAK_FLOPS = SPEEDS.values("peak_flops")
"""Dense bf16 peak in FLOPs per second, of devices whose name contains the key."""


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
    device: Device
    devices_per_node: int
    heads_k_stride: int | None = None
    """Key/value heads of a rank that are sent and attended at a time; None means the backend's default."""
    overlap_exchange: bool = False
    """Whether some heads are exchanged for tokens while others are attended to."""
    recurrent: RecurrentSizes | None = None
    """The sizes of a recurrent layer, or None for a model without such layers."""

    @classmethod
    def of_model(
        cls, config: PretrainedConfig, sp: int, *, element_size: int, device_name: str, devices_per_node: int
    ) -> Setup:
        """Return the setup of a model on the named device, with the speeds of DEVICES."""
        query_heads, key_value_heads = num_heads(config)
        return cls(
            sp=sp,
            num_heads=query_heads,
            num_key_value_heads=key_value_heads,
            head_size=head_size(config),
            element_size=element_size,
            device=device_named(device_name),
            devices_per_node=devices_per_node,
            recurrent=recurrent_sizes(config),
        )

    def in_a_node(self, span: int) -> bool:
        """Whether every group of `span` neighbouring ranks lies in one node."""
        return self.devices_per_node % span == 0

    def neighbours(self, span: int) -> int:
        """Return how many ranks of such a group are sure to share a node."""
        return math.gcd(span, self.devices_per_node)

    def exchange_seconds(self, num_bytes: float, span: int) -> float:
        """Return the seconds of an all-to-all in such groups, whose ranks have `num_bytes` each, without latencies."""
        here = self.neighbours(span)
        within = num_bytes * (here - 1) / span / self.device.within.exchange
        return max(within, num_bytes * (span - here) / span / self.device.across.exchange)

    def gather_seconds(self, num_bytes: float, span: int) -> float:
        """Return the seconds to gather `num_bytes` in all on every rank of such groups, or to reduce-scatter them.

        The bytes enter each node once, over the links of all its devices. Latencies are not counted.
        """
        here = self.neighbours(span)
        within = num_bytes * (span - 1) / span / self.device.within.exchange
        return max(within, num_bytes * (span - here) / span / (here * self.device.across.exchange))

    def gather_latency(self, span: int) -> float:
        """Return the latency of a gather in such groups: one message for every node."""
        return self.device.message_seconds * (span // self.neighbours(span))


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
    def of(
        cls,
        document_lengths: NDArray[np.integer],
        ring: int,
        *,
        max_imbalance: float = MAX_IMBALANCE,
        time_of: TimeOfPlan | None = None,
    ) -> RingWork:
        """Return the work by `plan_ring` for one sequence, whose tokens have to be a multiple of `ring`."""
        cu_seqlens = np.concatenate(([0], np.cumsum(document_lengths)))
        return cls.of_plan(plan_ring(cu_seqlens, ring, max_imbalance=max_imbalance, time_of=time_of))

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


def num_stages(setup: Setup, arrangement: Arrangement) -> int:
    """Return how many parts of the heads a rank attends to one after the other."""
    return len(stages_of(setup, arrangement))


def key_value_elements(setup: Setup, arrangement: Arrangement) -> float:
    """Return the elements of k and v for one token and the heads of one ring rank."""
    copies = key_value_copies(setup.num_heads, setup.num_key_value_heads, arrangement.ulysses)
    return 2 * setup.num_key_value_heads * copies / arrangement.ulysses * setup.head_size


def block_seconds(setup: Setup, arrangement: Arrangement, work: RingWork, groups: int) -> tuple[Seconds, Seconds]:
    """Return the seconds that each rank computes at each hop, [R, R], forward and backward."""
    device, elements = setup.device, setup.num_heads / arrangement.ulysses * setup.head_size
    launches = (work.entries > 0) * np.where(np.arange(arrangement.ring) > 0, 1 + MERGE_LAUNCHES, 1)
    begun = groups * (work.entries * device.entry_seconds + launches * device.launch_seconds)
    forward, backward = (
        work.pairs * (flops * elements / device.attention_flops)
        + work.merged_rows * (merge * elements / device.memory_speed)
        + begun
        for flops, merge in zip((FLOPS_FORWARD, FLOPS_BACKWARD), MERGE_BYTES, strict=True)
    )
    return forward, backward


def device_named(name: str) -> Device:
    """Return the entry of DEVICES for `CPU` or a name that CUDA gives. PCIe cards have the links of the entry GPU."""
    if name == "CPU":
        return DEVICES["CPU"]
    device = next((row for key, row in DEVICES.items() if key in name), DEVICES["GPU"])
    return replace(device, within=DEVICES["GPU"].within) if "PCI" in name.upper() else device


def devices_per_node(world_size: int, env: Mapping[str, str], visible: int) -> int:
    """Return a number n such that ranks 0..n-1, n..2n-1 and so on are sure to share a node.

    It is LOCAL_WORLD_SIZE if all nodes are full.

    Args:
        world_size: processes of the run.
        env: the environment of a launched process.
        visible: GPUs that a process sees, or 0; replaces LOCAL_WORLD_SIZE if the launcher does not set it.
    """
    local = int(env.get("LOCAL_WORLD_SIZE") or min(world_size, visible or world_size))
    return int(np.gcd(local, world_size))  # for nodes of different sizes, what divides them all


def measured(setup: Setup, device: torch.device) -> Setup:
    """Return the setup with link speeds measured among the running processes. All ranks call this together."""
    world_size, node = dist.get_world_size(), setup.devices_per_node
    across = setup.device.across
    if world_size > node:
        across = measure_link(None, device)
        across = replace(
            across, exchange=across.exchange * (world_size - node) / (world_size - 1)
        )  # what leaves a node
    within = setup.device.within
    if node == world_size > 1:
        within = measure_link(None, device)
    elif node > 1:
        within = measure_link(dist.new_subgroups(node)[0], device)
    return replace(setup, device=replace(setup.device, within=within, across=across))


def measure_link(
    group: dist.ProcessGroup | None, device: torch.device, *, num_bytes: int = 8 << 20, repetitions: int = 5
) -> Link:
    """Measure an all-to-all and a hop around the ring in a running group. All ranks of the world call this together.

    Args:
        group: this rank's group, of at least two ranks; None means all ranks.
        device: device of the buffers, as the group's backend needs.
        num_bytes: bytes that every rank sends.
        repetitions: measurements whose median counts, after one more to warm up.

    Returns:
        The slowest rank's speeds, the same on every rank of the world.
    """
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    assert world_size > 1, "one rank has no link to measure"
    sent = torch.zeros(num_bytes // world_size * world_size, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    ranks = dist.get_process_group_ranks(group)

    def exchange() -> None:
        dist.all_to_all_single(received, sent, group=group)

    def pass_on() -> None:
        to, source = ranks[(rank + 1) % world_size], ranks[rank - 1]
        operations = [dist.P2POp(dist.isend, sent, to, group), dist.P2POp(dist.irecv, received, source, group)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    away = len(sent) * (world_size - 1) / world_size
    return Link(
        exchange=away / _seconds(exchange, device, repetitions),
        pass_on=len(sent) / _seconds(pass_on, device, repetitions),
    )


def _seconds(work: Callable[[], None], device: torch.device, repetitions: int) -> float:
    """Return the median seconds of the slowest rank of the world."""
    times = []
    for _ in range(repetitions + 1):
        dist.barrier()
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    median = torch.tensor(statistics.median(times[1:]), dtype=torch.float64, device=device)
    dist.all_reduce(median, op=dist.ReduceOp.MAX)
    return float(median)

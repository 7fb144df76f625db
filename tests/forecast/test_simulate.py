"""The simulated step: nobody's time is lost, it is the step-time model's where that applies, and waits are by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.published import CONFIGS
from benchmarks.scaling import simulation
from benchmarks.scaling.pictures import LOOKS
from benchmarks.scaling.simulate import SimulatedStep, simulate
from benchmarks.scaling.simulation import Run, pays_up_to
from benchmarks.shapes import shape_of
from longctx.attention.choice import assumed_documents
from longctx.attention.cost import RingWork
from longctx.forecast.cost import cost
from longctx.forecast.model_sizes import ModelSizes
from longctx.forecast.seconds import weights_seconds
from longctx.forecast.shape import RunShape
from longctx.machine.here import Machine
from longctx.machine.speeds import Link

LLAMA = ModelSizes.of_config(CONFIGS["meta-llama/Llama-3.1-8B"])
NODE = Machine.of("H100", 8, "flash-attn 3")
ROW = 131_072

WAYS: dict[str, dict[str, Any]] = {
    "ulysses": {"ring": 1},
    "ring": {"ring": 16},
    "gather": {"ring": 16, "backend": "gather"},
    "hybrid": {"ring": 2},
}


def a_shape(world_size: int, sp: int, **values: Any) -> RunShape:
    return shape_of(LLAMA, world_size=world_size, sp=sp, engine="fsdp2", **values)


def on(**speeds: Any) -> Machine:
    """The node with other speeds."""
    return replace(NODE, speeds=replace(NODE.speeds, **speeds))


def free(**speeds: Any) -> Machine:
    """The node where only matrices, attention and these take time."""
    return on(**{"message_seconds": 0.0, "launch_seconds": 0.0, "memory": math.inf} | speeds)


def packed(length: int = ROW) -> np.ndarray:
    return assumed_documents(length, packed=True).rows[0]


def works(shape: RunShape, micro_batches: list[list[Any]]) -> list[list[RingWork]]:
    return [[RingWork.of(np.asarray(row), shape.ring) for row in rows] for rows in micro_batches]


@pytest.mark.parametrize("backend", WAYS)
def test_every_second_of_every_rank_is_accounted_for(backend) -> None:
    shape = a_shape(32, 16, **WAYS[backend])
    step = simulate(shape, works(shape, [[packed(), [ROW]], [[ROW // 2] * 2, packed()]]), NODE)
    total = step.compute + step.exchange + step.wait
    assert total.shape == (32,)
    assert total == pytest.approx(np.full(32, step.seconds), rel=1e-12)
    assert min(part.min() for part in (step.compute, step.exchange, step.wait)) >= -1e-12
    assert step.compute.mean() >= step.least  # merges and launches are not in the least there is to do
    assert 0.1 < step.efficiency < 1
    assert step.tokens == 4 * ROW


@pytest.mark.parametrize(
    "documents",
    [[8 * ROW], packed(8 * ROW), [2048]],
    ids=["one document", "packed", "a short one, which waits for the host"],
)
@pytest.mark.parametrize(
    "how",
    [
        {"ring": 1},
        {"ring": 8},
        {"ring": 8, "backend": "gather"},
        {"ring": 2},
        {"ring": 1, "activation_offloading": True, "offload_optimizer_device": "cpu"},
        {"ring": 8, "selective": True},
    ],
    ids=str,
)
def test_one_row_on_one_node_is_the_step_time_model(how, documents) -> None:
    """But for what is computed again, where it takes the mean of ranks of which here the slowest counts."""
    shape = a_shape(8, 8, **how)
    expected = cost(shape, NODE, sum(documents), [int(n) for n in documents])
    step = simulate(shape, works(shape, [[documents]]), NODE)
    assert step.seconds == pytest.approx(expected.step_seconds, rel=0.01)
    assert step.tokens_per_second_per_device == pytest.approx(expected.speed, rel=0.01)


def test_groups_wait_for_the_one_with_the_longest_document() -> None:
    speeds = free(within=Link(math.inf, math.inf), across=Link(math.inf, math.inf))
    shape = a_shape(16, 8, ring=1, selective=True)
    step = simulate(shape, works(shape, [[[ROW // 8] * 8, [ROW]]]), speeds)
    pairs = (ROW**2 - 8 * (ROW // 8) ** 2) / 2
    ahead = pairs / 8 * 14 * LLAMA.query_size * LLAMA.num_layers / NODE.speeds.attention
    assert step.wait == pytest.approx([ahead] * 8 + [0.0] * 8, rel=1e-6, abs=1e-9)
    assert step.exchange.max() == 0


def test_a_slow_link_between_nodes_keeps_all_ranks_of_a_ring_waiting() -> None:
    """At each hop some ranks receive from the other node, and the others have to wait for these to send."""
    speeds = free(across=Link(1e9, 1e9))
    shape = a_shape(16, 16, ring=16)
    step = simulate(shape, works(shape, [[[ROW]]]), speeds)
    assert step.exchange.min() > 0.7 * step.exchange.max() > 5 * step.compute.max()
    assert step.wait.min() > step.compute.max()
    hybrid = a_shape(16, 16, ring=2)
    assert simulate(hybrid, works(hybrid, [[[ROW]]]), speeds).seconds < step.seconds / 3


def test_what_computation_cannot_hide_of_the_weights_counts() -> None:
    shape = a_shape(64, 8, ring=1)
    slow = on(across=Link(1e9, 1e9))
    (fast_step, slow_step) = (simulate(shape, works(shape, [[[8192]] * 8]), s) for s in (NODE, slow))
    hidden = weights_seconds(shape, slow) - (slow_step.seconds - fast_step.seconds)
    assert weights_seconds(shape, slow) == pytest.approx(8 * LLAMA.num_parameters * 56 / 64 / 8e9, rel=0.05)
    assert 0 < hidden < fast_step.seconds
    long = works(shape, [[[4 * ROW]] * 8])
    assert simulate(shape, long, slow).seconds == pytest.approx(simulate(shape, long, NODE).seconds, rel=0.01)


def test_rows_of_the_benchmark_are_full_and_spread_as_far_as_heads_and_rows_allow() -> None:
    of = simulation.rows(1 << 15, simulation.PACKED, 4)
    assert [int(row.sum()) for row in of.documents] == [1 << 15] * 4
    case = simulation.Case(simulation.LLAMA, simulation.PACKED, 400)
    step = simulation.middle_step(case, of, 4)
    made = simulation.run(case, "ulysses", 32, 8, of, step)
    assert made is not None
    assert sum(made.share(part) for part in LOOKS) == pytest.approx(1)
    assert simulation.run(case, "ulysses", 64, 64, of, step) is None  # 32 heads
    assert simulation.run(case, "ulysses", 64, 8, of, step) is None  # 4 rows


@pytest.mark.parametrize(
    ("seconds", "last"), [([8, 4, 2, 1], 64), ([8, 4, 3, 1.5], 16), ([8, 6, 3, 1], 8), ([8, 16 / 3], 16), ([8], 8)]
)
def test_a_doubling_pays_if_it_makes_half_as_much_again(seconds, last) -> None:
    zero = np.zeros(1)
    runs = [
        Run("ring", 8 << at, 8, [SimulatedStep(compute=zero + s, exchange=zero, wait=zero, least=8 / 2**at, tokens=1)])
        for at, s in enumerate(seconds)
    ]
    assert pays_up_to(runs).devices == last

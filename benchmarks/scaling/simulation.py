"""The cases, and their simulated steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longctx.attention.backends import BACKENDS
from longctx.attention.cost import RingWork
from longctx.attention.modelled import planned_work
from longctx.forecast.cost import cost
from longctx.forecast.model_sizes import ModelSizes
from longctx.forecast.shape import RunShape
from longctx.machine.here import Machine
from longctx.machine.speeds import Link
from longctx.packing import balanced_order, pack, shuffled_order, spread_step
from longctx.ring.planner import MAX_IMBALANCE
from longctx.training.dataset import linear_cost

from ..packing import DISTRIBUTIONS
from ..published import CONFIGS
from ..shapes import shape_of
from .simulate import SimulatedStep, simulate

DEVICE, KERNEL, NODE = "H100", "flash-attn 3", 8
DEVICES = (8, 16, 32, 64, 128, 256, 512, 1024)
NAMES = ("ulysses", "hybrid", "ring", "gather")
LLAMA, QWEN = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-32B"
PACKED, ONE, AGENT = "packed documents", "one document per sequence", "agent sessions"


def agent_sessions(rng: np.random.Generator, count: int, capacity: int) -> NDArray[np.int64]:
    """Lengths as CoderForge publishes them: log-normal, median 38k, 95% below 71k, cut at 184k."""
    lengths = rng.lognormal(np.log(38_000), np.log(71 / 38) / 1.645, count // 30)
    return np.minimum(lengths, 184_000).astype(np.int64)


LENGTHS = {PACKED: DISTRIBUTIONS["histogram"], AGENT: agent_sessions}
"""The lengths of packed documents: (generator, count, most tokens) -> int64 [about count of 1,000 tokens each]."""

STRONG_ROWS, STRONG_LENGTH = 8, 1 << 20
WEAK_TOKENS = 1 << 14
"""Tokens of a device where rows or batches grow with the devices."""
LIMITS = (MAX_IMBALANCE, 1.05, 1.1, 1.25)
"""Limits of a plan's imbalance, taken by themselves."""
GOALS = {
    (LLAMA, 400): {8: 0.97, 32: 0.95, 128: 0.92, 1024: 0.89},
    (QWEN, 400): {8: 0.98, 32: 0.97, 128: 0.95, 1024: 0.94},
    (LLAMA, 100): {128: 0.87},
    (QWEN, 100): {128: 0.93},
}
"""Efficiencies that one group of all devices is to reach with the worse of two mixes of lengths."""
STEPS = 16
"""Of a window that training sorts packs in."""
SEED = 0
TOGETHER_ON = (8, 32, 128, 1024)
MOST_IN_A_RING = 32
"""Ranks of the largest ring alone that is planned for one group of all devices."""
PAYS = 1.5
"""A doubling of the devices pays if it makes at least as many times as much of the work a second."""


class Case(NamedTuple):
    """What is scaled, and on which links."""

    model: str
    documents: str
    gigabits: int
    """Of a device's link to other nodes, a second."""

    @property
    def machine(self) -> Machine:
        machine, bytes_a_second = Machine.of(DEVICE, NODE, KERNEL), self.gigabits / 8 * 1e9
        return replace(machine, speeds=replace(machine.speeds, across=Link(bytes_a_second, bytes_a_second)))

    @property
    def title(self) -> str:
        return f"{self.model.partition('/')[2]}, {self.gigabits} Gb/s"


SHOWN = ((LLAMA, 400), (LLAMA, 100), (QWEN, 400), (QWEN, 100))
"""Models and links, in the order of the pictures' rows."""


class Run(NamedTuple):
    """A backend on some devices."""

    backend: str
    devices: int
    sp: int
    steps: Sequence[SimulatedStep]

    @property
    def seconds(self) -> float:
        """Of a step, on average."""
        return sum(step.seconds for step in self.steps) / len(self.steps)

    @property
    def efficiency(self) -> float:
        return sum(step.least for step in self.steps) / len(self.steps) / self.seconds

    def share(self, part: str) -> float:
        """Of the ranks' time: least (layers and attention), blocks (all else that is computed), exchange or wait."""
        if part == "blocks":
            return self.share("compute") - self.efficiency
        if part == "least":
            return self.efficiency
        return float(sum(getattr(step, part).mean() for step in self.steps)) / len(self.steps) / self.seconds

    def __str__(self) -> str:
        """`ulysses 8 × dp 4`; the hybrid's Ulysses is a node."""
        ways = f"ulysses {NODE} × ring {self.sp // NODE}" if self.backend == "hybrid" else f"{self.backend} {self.sp}"
        return ways + (f" × dp {self.devices // self.sp}" if self.devices > self.sp else "")


class Rows:
    """Rows of one length, and what the ranks of rings of any size do with them.

    Args:
        max_imbalance: plan by balance alone, up to this; None plans as training does.
    """

    def __init__(self, length: int, documents: str, count: int, max_imbalance: float | None = None) -> None:
        self.length, self.max_imbalance = length, max_imbalance
        self.documents = [np.array([length])] * count
        if documents != ONE:
            rng = np.random.default_rng([SEED, length])
            lengths = np.minimum(LENGTHS[documents](rng, count * length // 1000, length), length)
            bins = list(pack(lengths, length).bins)[:-1]  # all but the one that is left over
            order = shuffled_order(len(bins), seed=SEED, epoch=0)[:count]
            self.documents = [_filled(lengths[bins[index]], length) for index in order]
        self._work: dict[tuple[Any, ...], RingWork] = {}

    def costs(self, model: str) -> NDArray[np.float64]:
        """As training balances rows by."""
        cost = linear_cost(CONFIGS[model])
        return np.array([(row * (row + cost)).sum() for row in self.documents])

    def work(self, chosen: Sequence[int], shape: RunShape, machine: Machine) -> RingWork:
        """The work of a group that these rows are spread over."""
        attention, arrangement = shape.attention(machine), shape.arrangement
        same = len(self.documents[chosen[0]]) == 1
        key: tuple[Any, ...] = (len(chosen) if same else tuple(chosen), arrangement.ring)
        if self.max_imbalance is None and arrangement.ring > 1:
            key += (attention, arrangement)
        if key not in self._work:
            lengths = np.concatenate([self.documents[row] for row in chosen])
            if self.max_imbalance is None:
                self._work[key] = planned_work(tuple(lengths.tolist()), attention, arrangement)
            else:
                self._work[key] = RingWork.of(lengths, arrangement.ring, max_imbalance=self.max_imbalance)
        return self._work[key]


rows = cache(Rows)
sizes = cache(lambda model: ModelSizes.of_config(CONFIGS[model]))


def _filled(row: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    return np.append(row, length - row.sum()) if row.sum() < length else row


def shape_on(model: str, backend: str, devices: int, sp: int) -> RunShape | None:
    """The model on all these devices; None where the backend cannot spread a row over so many.

    Where a backend has several arrangements, the Ulysses ranks are those of a node.
    """
    of_node = BACKENDS[backend].has_ring_size
    possible = [a for a in BACKENDS[backend].arrangements(sp) if a.ulysses == NODE or not of_node]
    if not possible or sizes(model).num_heads % possible[0].ulysses:
        return None
    return shape_of(
        sizes(model),
        world_size=devices,
        sp=sp,
        ring=possible[0].ring,
        backend=backend,
        engine="fsdp2",
        fused_layers=True,
        tiled_mlp_num_shards=0,
        selective=True,
        activation_offloading=True,
    )


def _fits(case: Case, shape: RunShape, of: Rows) -> bool:
    return cost(shape, case.machine, of.length).of_device <= 1


def run(case: Case, backend: str, devices: int, sp: int, of: Rows, steps: NDArray[np.int64]) -> Run | None:
    """Optimizer steps on rows int64 [steps, rows], spread over groups as training does; None where they cannot be."""
    shape = shape_on(case.model, backend, devices, sp)
    if shape is None or steps.shape[1] % (devices // sp):
        return None
    if not _fits(case, shape, of):
        return None
    costs, made = of.costs(case.model), []
    for step in steps:
        spread = spread_step(step, costs, micro_batch_size=1, dp=devices // sp)
        work = [[of.work(list(group), shape, case.machine) for group in micro_batch] for micro_batch in spread]
        made.append(simulate(shape, work, case.machine))
    return Run(backend, devices, sp, made)


def splits(devices: int) -> list[int]:
    """Devices that may share a row, the most first."""
    return [NODE << power for power in reversed(range((devices // NODE).bit_length()))]


def middle_step(case: Case, of: Rows, size: int) -> NDArray[np.int64]:
    """Rows of the step that costs the median, sorted into steps as training does; int64 [1, size]."""
    by_cost = np.argsort(of.costs(case.model), kind="stable")
    start = (len(by_cost) // size // 2) * size
    return by_cost[None, start : start + size]


def strong(case: Case) -> list[Run]:
    """The same rows on ever more devices, for every backend and split of the devices into groups, the largest first."""
    of = rows(STRONG_LENGTH, case.documents, STRONG_ROWS * STEPS)
    step = middle_step(case, of, STRONG_ROWS)
    found = [run(case, name, n, sp, of, step) for name in NAMES for n in DEVICES for sp in splits(n)]
    return [one for one in found if one is not None]


def widest(runs: Iterable[Run]) -> list[Run]:
    """Of each backend on so many devices, the run that has the most of them share a row."""
    last = {(run.backend, run.devices): run for run in sorted(runs, key=lambda run: run.sp)}
    return sorted(last.values(), key=lambda run: run.devices)


def longer_rows(case: Case) -> list[Run]:
    """A row that grows with the devices, which all share it."""
    found = []
    for devices in DEVICES:
        of = rows(WEAK_TOKENS * devices, case.documents, STEPS)
        step = middle_step(case, of, 1)
        found += [run(case, name, devices, devices, of, step) for name in NAMES]
    return [one for one in found if one is not None]


def more_rows(case: Case, *, balanced: bool = True) -> list[Run]:
    """More rows of the same length for more groups of eight devices; every fourth step of a window."""
    of, found = rows(WEAK_TOKENS * NODE, case.documents, STEPS * DEVICES[-1] // NODE), []
    for devices in DEVICES:
        groups = devices // NODE
        order = shuffled_order(STEPS * groups, seed=SEED, epoch=0)
        if balanced:
            order = balanced_order(of.costs(case.model)[: STEPS * groups], groups, seed=SEED, epoch=0)
        steps = order.reshape(STEPS, groups)[::4]
        found += [run(case, name, devices, NODE, of, steps) for name in NAMES]
    return [one for one in found if one is not None]


def together(case: Case, devices: int) -> dict[str, Run]:
    """Shuffled packs, 16k tokens a device, in groups of eight, and in one group of all devices.

    The steps have the same packs in each. Every fourth step of a window is taken.
    """
    of, groups = rows(WEAK_TOKENS * NODE, case.documents, STEPS * DEVICES[-1] // NODE), devices // NODE
    order = shuffled_order(STEPS * DEVICES[-1] // NODE, seed=SEED, epoch=0)[: STEPS * groups]
    steps = order.reshape(STEPS, groups)[::4]
    found = {}
    for name in NAMES:
        apart = run(case, name, devices, NODE, of, steps)
        if apart is not None:
            found[f"{name} {NODE}"] = apart
        shape = shape_on(case.model, name, devices, devices)
        if shape is None or (shape.ulysses == 1 and devices > MOST_IN_A_RING):
            continue
        shape = replace(shape, rows=groups)
        if _fits(case, shape, of):
            made = [simulate(shape, [[of.work(step.tolist(), shape, case.machine)]], case.machine) for step in steps]
            found[f"{name} of all"] = Run(name, devices, devices, made)
    return found


def pays_up_to(runs: Iterable[Run]) -> Run:
    """The last of one backend's runs before the first doubling that does not pay, or that it cannot use."""
    efficiency = {run.devices: run for run in runs}
    last = efficiency[min(efficiency)]
    while (doubled := efficiency.get(2 * last.devices)) is not None:
        if 2 * doubled.efficiency < PAYS * last.efficiency:
            break
        last = doubled
    return last


Results = Mapping[Case, list[Run]]

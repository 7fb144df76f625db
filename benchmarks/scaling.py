"""How far each backend scales, simulated: H100 nodes of eight, 8 to 1,024 devices.

    python -m benchmarks.scaling                  # the page, minutes
    python -m benchmarks.scaling --output docs    # and as docs/scaling.md with its pictures

Every step is put together by `longctx.forecast.simulate` from the plan of the documents that the ranks get: nothing
here is measured. Rows hold either one document, or documents of the length histogram in benchmarks/data, cut to the
row's length and packed best-fit-decreasing; what a pack leaves over is padding and counts as one more document.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longctx.attention.cost import Link, RingWork
from longctx.forecast.candidates import DEVICE_BYTES
from longctx.forecast.closed_form import predict
from longctx.forecast.memory_setup import MemorySetup
from longctx.forecast.model_sizes import ModelSizes
from longctx.forecast.simulate import SimulatedStep, simulate
from longctx.forecast.step_time import Speeds, attention_setup, planned_work
from longctx.packing import balanced_order, pack, shuffled_order, spread_step
from longctx.report.pictures import BACKEND_LOOKS
from longctx.ring.planner import MAX_IMBALANCE
from longctx.training.dataset import linear_cost

from .packing import DISTRIBUTIONS, line
from .published import CONFIGS

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
    def speeds(self) -> Speeds:
        speeds = Speeds.of(DEVICE, KERNEL)
        return replace(speeds, device=replace(speeds.device, across=Link.of(self.gigabits / 8 * 1e9)))

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

    def work(self, chosen: Sequence[int], setup: MemorySetup, speeds: Speeds) -> RingWork:
        """The work of a group that these rows are spread over."""
        attention, arrangement = attention_setup(setup, speeds.device)
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


def memory_setup(model: str, backend: str, devices: int, sp: int) -> MemorySetup | None:
    """The model on all these devices; None where the backend cannot spread a row over so many."""
    heads = sizes(model).num_heads
    if (backend == "ulysses" and heads % sp) or (backend == "hybrid" and sp <= NODE):
        return None
    return MemorySetup(
        model=sizes(model),
        world_size=devices,
        sp=sp,
        ring={"ulysses": 1, "hybrid": sp // NODE}.get(backend, sp),
        sp_backend=backend,
        ranks_per_node=NODE,
        engine="fsdp2",
        fused_layers=True,
        tiled_mlp_num_shards=0,
        selective_checkpointing=True,
        activation_offloading=True,
    )


def run(case: Case, backend: str, devices: int, sp: int, of: Rows, steps: NDArray[np.int64]) -> Run | None:
    """Optimizer steps on rows int64 [steps, rows], spread over groups as training does; None where they cannot be."""
    setup = memory_setup(case.model, backend, devices, sp)
    if setup is None or steps.shape[1] % (devices // sp):
        return None
    if predict(setup, of.length).device_bytes > DEVICE_BYTES[DEVICE]:
        return None
    costs, made = of.costs(case.model), []
    for step in steps:
        spread = spread_step(step, costs, micro_batch_size=1, dp=devices // sp)
        work = [[of.work(list(group), setup, case.speeds) for group in micro_batch] for micro_batch in spread]
        made.append(simulate(setup, work, case.speeds))
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
        setup = memory_setup(case.model, name, devices, devices)
        if setup is None or (name in ("ring", "gather") and devices > MOST_IN_A_RING):
            continue
        setup = replace(setup, num_rows=groups)
        if predict(setup, of.length).device_bytes <= DEVICE_BYTES[DEVICE]:
            made = [simulate(setup, [[of.work(step.tolist(), setup, case.speeds)]], case.speeds) for step in steps]
            found[f"{name} of all"] = Run(name, devices, devices, made)
    return found


def together_table(results: Mapping[tuple[Case, int], Mapping[str, Run]]) -> Iterator[str]:
    """Efficiency of groups and of one group, beside the goals."""
    yield line(["model, links", "documents", "devices", "groups of eight", "one group of all", "", "goal"])
    yield line(["---"] * 7)
    for (case, devices), found in results.items():
        if not found:
            yield line([case.title, case.documents, f"{devices:,}", "does not fit", "does not fit", "", ""])
            continue
        apart = max((one for name, one in found.items() if name.endswith(str(NODE))), key=lambda one: one.efficiency)
        whole = {name: one for name, one in found.items() if one.sp == devices}
        name = max(whole, key=lambda name: whole[name].efficiency)
        goal = GOALS.get((case.model, case.gigabits), {}).get(devices)
        yield line(
            [
                case.title,
                case.documents,
                f"{devices:,}",
                f"{apart.efficiency:.0%} ({apart.backend})",
                f"{whole[name].efficiency:.0%}",
                str(whole[name]),
                "" if goal is None else f"{goal:.0%}",
            ]
        )


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


def paying(results: Results, case: Case, backend: str) -> str:
    """`64`, or `256 †` where the backend could use no more."""
    runs = [run for run in results[case] if run.backend == backend]
    if not runs:
        return ""
    last = pays_up_to(runs)
    return f"{last.devices:,}" + (" †" if last.devices == max(run.devices for run in runs) < DEVICES[-1] else "")


def paying_table(studies: Mapping[str, Results]) -> Iterator[str]:
    yield line(["what grows", "documents", "model, links", *NAMES])
    yield line(["---"] * (3 + len(NAMES)))
    for study, results in studies.items():
        for case in results:
            yield line([study, case.documents, case.title, *(paying(results, case, name) for name in NAMES)])


def efficiency_table(runs: Sequence[Run]) -> Iterator[str]:
    """Efficiency and seconds of a step by devices and backend."""
    names = [name for name in NAMES if any(run.backend == name for run in runs)]
    by_place = {(run.devices, run.backend): run for run in runs}
    yield line(["devices", *names])
    yield line(["---"] * (1 + len(names)))
    for devices in sorted({run.devices for run in runs}):
        cells = (by_place.get((devices, name)) for name in names)
        yield line([f"{devices:,}", *(f"{run.efficiency:.0%}, {run.seconds:,.3g} s" if run else "" for run in cells)])


def fastest_table(results: Results) -> Iterator[str]:
    """The fastest backend and split for every number of devices, for each case."""
    yield line(["devices", *(f"{case.documents}, {case.title}" for case in results)])
    yield line(["---"] * (1 + len(results)))
    for devices in DEVICES:
        cells = []
        for runs in results.values():
            there = [run for run in runs if run.devices == devices]
            best = min(there, key=lambda run: run.seconds, default=None)
            cells.append(f"{best}: {best.efficiency:.0%}" if best else "does not fit")
        yield line([f"{devices:,}", *cells])


def conclusions(fixed: Results, more: Results, shuffled: Sequence[Run]) -> Iterator[str]:
    """What the numbers say, in words."""
    one, packed = Case(LLAMA, ONE, 400), Case(LLAMA, PACKED, 400)
    slow = Case(LLAMA, PACKED, 100)

    def at(results: Results, case: Case, backend: str, devices: int) -> Run:
        return next(run for run in results[case] if (run.backend, run.devices) == (backend, devices))

    def kept(results: Results, case: Case, devices: int, names: Sequence[str] = NAMES) -> str:
        return ", ".join(f"{name} {at(results, case, name, devices).efficiency:.0%}" for name in names)

    yield (
        "**On one node**, use any backend. A packed sequence on 8 devices loses little "
        f"({kept(fixed, packed, 8, ('ulysses', 'ring', 'gather'))})."
    )
    yield (
        "**Ulysses** is limited to as many devices per sequence as there are query heads. It becomes expensive before "
        "that, because no computation hides its exchange once it leaves the node. On 32 devices, a packed sequence "
        f"spends {at(fixed, packed, 'ulysses', 32).share('exchange'):.0%} of the step in the exchange, and "
        f"{at(fixed, slow, 'ulysses', 32).share('exchange'):.0%} at 100 Gb/s."
    )
    yield (
        "**Ring and gather** over nodes suit a few long documents. A sequence of one document hides their messages "
        f"(on 128 devices per sequence: {kept(fixed, one, 128, ('ring', 'gather'))}). A packed sequence has less work "
        f"to hide them behind ({kept(fixed, packed, 128, ('ring', 'gather'))}). The plan itself causes a part of this "
        "loss, see [The cost of balance](#the-cost-of-balance)."
    )
    yield (
        "**The hybrid** uses Ulysses inside a node and a ring between nodes. It is the best choice for sequences over "
        "more than one node. On 256 devices per sequence, its efficiency is "
        f"{at(fixed, packed, 'hybrid', 256).efficiency:.0%} with packed documents and "
        f"{at(fixed, one, 'hybrid', 256).efficiency:.0%} with one document. At 100 Gb/s, it is "
        f"{at(fixed, slow, 'hybrid', 256).efficiency:.0%} with packed documents."
    )
    before, after = (
        at(more, packed, "ulysses", 1024),
        next(run for run in shuffled if (run.backend, run.devices) == ("ulysses", 1024)),
    )
    worst = min(run.efficiency for run in more[packed] if run.backend == "ulysses")
    yield (
        "**Add sequences before you add devices to a sequence**, as long as the batch can grow. Groups of eight have "
        f"an efficiency of {before.efficiency:.0%} on 1,024 devices ({worst:.0%} in the worst case of the table). This "
        "needs packs of similar cost within a step, and the default order of training provides them. With a plain "
        f"shuffle, the efficiency on 1,024 devices is {after.efficiency:.0%}: {after.share('wait'):.0%} of the time is "
        "spent waiting for the group with the longest documents."
    )


def looser_table(case: Case, usual: Sequence[Run]) -> Iterator[str]:
    """Efficiency of rings and hybrids: planned as in training, and by what the imbalance may be at most."""
    yield line(["devices", "backend", "by seconds", *(f"at most {limit}" for limit in LIMITS)])
    yield line(["---"] * (3 + len(LIMITS)))
    for known in usual:
        if known.backend not in ("ring", "hybrid") or known.devices < 8 * NODE:
            continue
        found = [known]
        for limit in LIMITS:
            of = rows(STRONG_LENGTH, case.documents, STRONG_ROWS * STEPS, limit)
            step = middle_step(case, of, STRONG_ROWS)
            found += [one for one in [run(case, known.backend, known.devices, known.sp, of, step)] if one is not None]
        yield line([f"{known.devices:,}", known.backend, *(f"{one.efficiency:.0%}" for one in found)])


LOOKS = {
    "least": ("layers and attention", "#009E73", ""),
    "blocks": ("blocks begun and merged", "#56B4E9", "xx"),
    "exchange": ("exchange", "#E69F00", "//"),
    "wait": ("wait", "#999999", ".."),
}
"""Part of a step -> its name, colour and hatch."""


def curves_picture(path: Path, columns: Mapping[str, Results], title: str) -> None:
    """Efficiency over devices: columns of studies, rows of models and links; rings where a backend stops paying."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(1.5 + 3.6 * len(columns), 1.2 + 2.3 * len(SHOWN)), layout="constrained")
    grid = figure.subplots(len(SHOWN), len(columns), sharex=True, sharey=True, squeeze=False)
    for at_row, (model, gigabits) in zip(grid, SHOWN, strict=True):
        for axes, (column, results) in zip(at_row, columns.items(), strict=True):
            case = next(case for case in results if (case.model, case.gigabits) == (model, gigabits))
            for name in NAMES:
                runs = [run for run in results[case] if run.backend == name]
                look = BACKEND_LOOKS[name]
                axes.plot(
                    [run.devices for run in runs],
                    [run.efficiency for run in runs],
                    color=look.color,
                    marker=look.marker,
                    markersize=4,
                    linewidth=1.5,
                    alpha=0.9,
                )
                if runs:
                    last = pays_up_to(runs)
                    axes.plot(last.devices, last.efficiency, "o", mfc="none", mec=look.color, markersize=11)
            axes.set_title(f"{case.title}\n{column}", fontsize=9)
            axes.grid(color="0.9")
    first = grid[0, 0]
    first.set_xscale("log", base=2)
    first.set_xticks(DEVICES, [f"{devices:,}" for devices in DEVICES])
    first.set_ylim(0, 1.05)
    first.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    for axes in grid[:, 0]:
        axes.set_ylabel("efficiency")
    for axes in grid[-1]:
        axes.set_xlabel("devices")
        axes.tick_params(axis="x", labelsize=8)
    handles = [Line2D([], [], color=BACKEND_LOOKS[n].color, marker=BACKEND_LOOKS[n].marker, label=n) for n in NAMES]
    handles.append(Line2D([], [], color="0.4", marker="o", mfc="none", markersize=11, ls="", label="pays up to here"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=12)
    figure.savefig(path, dpi=130)


def time_picture(path: Path, results: Mapping[str, Sequence[Run]], title: str) -> None:
    """What ranks spend a step with, stacked, for some numbers of devices: a panel for each of the results."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(10, 1.2 + 2.6 * len(results)), layout="constrained")
    grid = figure.subplots(len(results), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, runs) in zip(grid, results.items(), strict=True):
        ticks = {}
        for at, devices in enumerate(DEVICES):
            for place, backend in enumerate(NAMES):
                one = next((run for run in runs if (run.backend, run.devices) == (backend, devices)), None)
                bottom, x = 0.0, at * (len(NAMES) + 1) + place
                ticks[x] = backend
                for part, (_, color, hatch) in LOOKS.items():
                    if one is None:
                        break
                    height = one.share(part)
                    axes.bar(x, height, 0.9, bottom, color=color, hatch=hatch, edgecolor="white", linewidth=0)
                    bottom += height
            middle = at * (len(NAMES) + 1) + (len(NAMES) - 1) / 2
            axes.annotate(f"{devices:,}", (middle, 1.02), ha="center", fontsize=9)
        axes.set_ylim(0, 1.12)
        axes.set_xticks(list(ticks), list(ticks.values()), rotation=90, fontsize=7)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set_title(f"{name}, by devices", fontsize=9)
    handles = [
        Patch(facecolor=color, hatch=hatch, edgecolor="white", label=label) for label, color, hatch in LOOKS.values()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=12)
    figure.savefig(path, dpi=130)


HEAD = f"""\
# How far each backend scales

**All numbers on this page are simulated; nothing is measured.** `python -m benchmarks.scaling --output docs` printed
them on {{date}}. `longctx.forecast.simulate` builds each training step from these parts:

- the plan that places documents on ranks: the query–key pairs of every hop, and the tokens that arrive in it;
- the published speeds of an {DEVICE} with {KERNEL} (`longctx.forecast.step_time`);
- nodes of {NODE} devices with 450 GB/s between them;
- one network adapter per device, with 400 or 100 Gb/s between nodes.

How to read the tables:

- Models train in bf16 on FSDP2 over all devices. Activation checkpoints include the output of attention and are stored
  in host memory.
- *Packed* sequences hold documents with the lengths of benchmarks/data/document_lengths.csv, packed by best-fit
  decreasing. Steps are drawn from a window of {STEPS} steps. Where the batch grows, every fourth step of the window is
  simulated. Elsewhere, only the step of median cost is simulated.
- *Efficiency* is an ideal time divided by the time of the step. The ideal time is that of layers and attention at the
  speed of the kernels, spread evenly over the devices. The rest of the step is spent on exchanges, on waiting, and on
  merging small blocks.
- A backend *pays off* as long as doubling the number of devices increases the work per second by a factor of {PAYS} or
  more.
- The hybrid is Ulysses over the {NODE} devices of a node, and a ring over nodes.
- Rings are planned as in training. Where this is needed for balance, the plan distributes documents over all ranks.
  The keys and values of these documents then travel round the whole ring, and the ring loses efficiency.
  [The cost of balance](#the-cost-of-balance) shows how much.
- The simulation leaves out other jobs on the network, differences between devices, failures, and congestion in
  switches.
"""

STUDIES = ("more devices, same sequences", "longer sequences", "larger batch")


def cases(*documents: str) -> list[Case]:
    return [Case(model, kind, gigabits) for kind in documents for model, gigabits in SHOWN]


def page(folder: Path | None) -> str:
    every_split = {case: strong(case) for case in cases(PACKED, ONE)}
    fixed: Results = {case: widest(runs) for case, runs in every_split.items()}
    longer: Results = {case: longer_rows(case) for case in cases(PACKED, ONE)}
    more: Results = {case: more_rows(case) for case in cases(PACKED)}
    studies = dict(zip(STUDIES, (fixed, longer, more), strict=True))
    packed, one = Case(LLAMA, PACKED, 400), Case(LLAMA, ONE, 400)
    shuffled = more_rows(packed, balanced=False)
    one_group = {(case, devices): together(case, devices) for case in cases(PACKED, AGENT) for devices in TOGETHER_ON}
    shown = {case: runs for case, runs in every_split.items() if case in (packed, one, Case(QWEN, PACKED, 400))}
    if folder is not None:
        images = folder / "images"
        images.mkdir(parents=True, exist_ok=True)
        of = {kind: {case: fixed[case] for case in cases(kind)} for kind in (PACKED, ONE)}
        curves_picture(images / "scaling_strong.png", of, "Simulated: the same sequences on more devices")
        growing: dict[str, Results] = {
            f"longer sequences: {kind}": {case: longer[case] for case in cases(kind)} for kind in (PACKED, ONE)
        }
        growing["more sequences: packed documents"] = more
        curves_picture(images / "scaling_weak.png", growing, "Simulated: more work on more devices")
        of_kinds = {f"{case.documents}, {case.title}": fixed[case] for case in (packed, Case(LLAMA, PACKED, 100), one)}
        time_picture(images / "scaling_time.png", of_kinds, "Simulated: how ranks spend a step, the same sequences")
    return "\n".join(
        [
            HEAD.format(date=f"{datetime.now(UTC):%Y-%m-%d}"),
            "## Conclusions",
            "",
            *(f"- {sentence}" for sentence in conclusions(fixed, more, shuffled)),
            "",
            "The table gives the number of devices up to which each backend pays off. († marks a limit by heads, "
            "sequences or memory.)",
            "",
            *paying_table(studies),
            "",
            "## The same sequences on more devices",
            "",
            f"A step has {STRONG_ROWS} sequences of {STRONG_LENGTH:,} tokens. Each sequence is spread over as many "
            "devices as the backend can use, and the sequences run one after the other. On more devices than the model "
            "has heads, Ulysses trains several sequences at a time.",
            "",
            "![efficiency over devices](images/scaling_strong.png)",
            "",
            f"Efficiency and seconds per step ({packed.documents}, {packed.title}):",
            "",
            *efficiency_table(fixed[packed]),
            "",
            "![compute, exchange and waiting](images/scaling_time.png)",
            "",
            "The fastest backend and split into groups (dp), with at least eight devices per sequence:",
            "",
            *fastest_table(shown),
            "",
            "### The cost of balance",
            "",
            "In training, longctx makes plans for several limits of the imbalance and takes the plan that is modelled "
            "to be fastest (column *by seconds*). With a single limit, `plan_ring` takes the first arrangement in "
            "which no rank has more than `max_imbalance` times the mean attention work (columns *at most*). To reach a "
            "low limit, some documents must be distributed over all ranks in a zigzag. In a ring over many nodes, the "
            "last percent of balance then costs messages that no computation hides. The table shows the efficiency for "
            f"the same sequences as above ({packed.documents}, {packed.title}):",
            "",
            *looser_table(packed, fixed[packed]),
            "",
            "## More work for more devices",
            "",
            f"In the first table, sequences grow: all devices share one sequence, which has {WEAK_TOKENS:,} tokens per "
            f"device. In the second table, the number of sequences grows: each group of {NODE} devices has one "
            f"sequence of {WEAK_TOKENS * NODE:,} tokens.",
            "",
            "![efficiency over devices](images/scaling_weak.png)",
            "",
            f"Longer sequences ({packed.documents}, {packed.title}):",
            "",
            *efficiency_table(longer[packed]),
            "",
            f"More sequences ({packed.documents}, {packed.title}):",
            "",
            *efficiency_table(more[packed]),
            "",
            "## One group of all devices",
            "",
            f"Shuffled or streamed packs differ in cost, and groups of {NODE} devices wait for the group with the "
            "longest documents. `--sp all` makes one group of all devices, which takes the sequences of all groups at "
            "once. Each document is then spread over as many devices as it needs. The table compares steps of shuffled "
            f"packs of {WEAK_TOKENS * NODE:,} tokens, with one pack for every {NODE} devices. The packs are the same "
            "for groups and for one group. *Goal* is the target for one group. The documents "
            "called agent sessions have log-normal lengths with a median of 38k tokens.",
            "",
            *together_table(one_group),
            "",
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.scaling", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write scaling.md and images/ here, too")
    options = parser.parse_args(arguments)
    text = page(options.output)
    print(text, end="")
    if options.output:
        (options.output / "scaling.md").write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

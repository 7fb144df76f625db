"""Tables and conclusions of the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .. import page
from .simulation import (
    DEVICES,
    GOALS,
    LIMITS,
    LLAMA,
    NAMES,
    NODE,
    ONE,
    PACKED,
    STEPS,
    STRONG_LENGTH,
    STRONG_ROWS,
    Case,
    Results,
    Run,
    middle_step,
    pays_up_to,
    rows,
    run,
)


def together_table(results: Mapping[tuple[Case, int], Mapping[str, Run]]) -> Iterator[str]:
    """Efficiency of groups and of one group, beside the goals."""
    yield page.head(["model, links", "documents", "devices", "groups of eight", "one group of all", "", "goal"])
    for (case, devices), found in results.items():
        if not found:
            yield page.row([case.title, case.documents, f"{devices:,}", "does not fit", "does not fit", "", ""])
            continue
        apart = max((one for name, one in found.items() if name.endswith(str(NODE))), key=lambda one: one.efficiency)
        whole = {name: one for name, one in found.items() if one.sp == devices}
        name = max(whole, key=lambda name: whole[name].efficiency)
        goal = GOALS.get((case.model, case.gigabits), {}).get(devices)
        yield page.row(
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


def paying(results: Results, case: Case, backend: str) -> str:
    """`64`, or `256 †` where the backend could use no more."""
    runs = [run for run in results[case] if run.backend == backend]
    if not runs:
        return ""
    last = pays_up_to(runs)
    return f"{last.devices:,}" + (" †" if last.devices == max(run.devices for run in runs) < DEVICES[-1] else "")


def paying_table(studies: Mapping[str, Results]) -> Iterator[str]:
    yield page.head(["what grows", "documents", "model, links", *NAMES])
    for study, results in studies.items():
        for case in results:
            yield page.row([study, case.documents, case.title, *(paying(results, case, name) for name in NAMES)])


def efficiency_table(runs: Sequence[Run]) -> Iterator[str]:
    """Efficiency and seconds of a step by devices and backend."""
    names = [name for name in NAMES if any(run.backend == name for run in runs)]
    by_place = {(run.devices, run.backend): run for run in runs}
    yield page.head(["devices", *names])
    for devices in sorted({one.devices for one in runs}):
        cells = (by_place.get((devices, name)) for name in names)
        shown = (f"{run.efficiency:.0%}, {run.seconds:,.3g} s" if run else "" for run in cells)
        yield page.row([f"{devices:,}", *shown])


def fastest_table(results: Results) -> Iterator[str]:
    """The fastest backend and split for every number of devices, for each case."""
    yield page.head(["devices", *(f"{case.documents}, {case.title}" for case in results)])
    for devices in DEVICES:
        cells = []
        for runs in results.values():
            there = [run for run in runs if run.devices == devices]
            best = min(there, key=lambda run: run.seconds, default=None)
            cells.append(f"{best}: {best.efficiency:.0%}" if best else "does not fit")
        yield page.row([f"{devices:,}", *cells])


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
        "**Ring and gather** over nodes hide their messages behind attention. One document has enough attention for "
        f"both (on 128 devices per sequence: {kept(fixed, one, 128, ('ring', 'gather'))}). Packed documents have too "
        f"little for gather ({kept(fixed, packed, 128, ('ring', 'gather'))}). The plan itself causes a part of the "
        "loss, see [The cost of balance](#the-cost-of-balance)."
    )
    yield (
        "**The hybrid** uses Ulysses inside a node and a ring between nodes. It is the best choice for sequences over "
        "many nodes. On 256 devices per sequence, its efficiency is "
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
    yield page.head(["devices", "backend", "by seconds", *(f"at most {limit}" for limit in LIMITS)])
    for known in usual:
        if known.backend not in ("ring", "hybrid") or known.devices < 8 * NODE:
            continue
        found = [known]
        for limit in LIMITS:
            of = rows(STRONG_LENGTH, case.documents, STRONG_ROWS * STEPS, limit)
            step = middle_step(case, of, STRONG_ROWS)
            found += [one for one in [run(case, known.backend, known.devices, known.sp, of, step)] if one is not None]
        yield page.row([f"{known.devices:,}", known.backend, *(f"{one.efficiency:.0%}" for one in found)])

"""The figures of a race, the goals beside them, and the page."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from benchmarks import host_time, page
from benchmarks.elsewhere.steps import PACKAGES

from .race import HERE, LOG_STEPS, TRL, Case, Turns
from .turns import Turn

TOLERANCE = 1e-6
"""Relative, of losses in fp32."""
CLOCKS = {"processor": "process", "main thread": "thread", "clock": "wall"}
Goals = dict[str, float]
"""The largest ratio that a goal allows, by what is measured: `calls`, or one of CLOCKS."""


def goals(case: Case, pair: tuple[str, str], oldest: str | None) -> Goals:
    """Return those of longctx beside TRL, or beside the first commit of --against."""
    of_time = {"ring 2 on FSDP2": 0.80, "Ulysses 2 on ZeRO-3": 0.85}
    if pair == (HERE, TRL) and case.layout == "sp 1":
        return {"calls": 1.0, "processor": 1.2 if case.mode == "selective" else 1.0}
    if pair == (HERE, TRL):
        return {"main thread": of_time[case.layout]}
    if pair == (HERE, oldest) and case.layout == "Ulysses 2 on FSDP2":
        return {"main thread": 0.88}
    return {}


def losses(turns: Sequence[Turn]) -> list[float]:
    """Return the loss of each step: the mean over ranks, as gradients are averaged."""
    return [statistics.fmean(sum(rank["losses"]) for rank in turn) for turn in turns]


def difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest relative one."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def blocks(turns: Sequence[Turn], clock: str) -> list[float]:
    """Return seconds of a step on rank 0, in blocks of as many steps as there are to an entry of the log."""
    seconds = [turn[0][clock] for turn in turns]
    return [statistics.fmean(seconds[i : i + LOG_STEPS]) for i in range(0, len(seconds), LOG_STEPS)]


def ratio(ours: Sequence[Turn], theirs: Sequence[Turn], clock: str) -> tuple[float, float, float]:
    """Return the ratio of the times of all steps, and the quartiles of the ratio of blocks.

    A full collection of Python's garbage takes as long as some steps, and falls into one of many: a median of blocks
    would leave it out.
    """
    of_blocks = [a / b for a, b in zip(blocks(ours, clock), blocks(theirs, clock), strict=True)]
    low, _, high = statistics.quantiles(of_blocks, n=4, method="inclusive")
    return mean(ours, clock) / mean(theirs, clock), low, high


def mean(turns: Sequence[Turn], clock: str) -> float:
    """Return the seconds of a step on rank 0."""
    return statistics.fmean(turn[0][clock] for turn in turns)


def calls(turns: Sequence[Turn]) -> tuple[float, float]:
    """Return the Python and C functions that rank 0's main thread calls in a step."""
    python, c = (statistics.fmean(turn[0][kind] for turn in turns) for kind in ("python", "c"))
    return python, c


def of_worker(turns: Sequence[Turn]) -> tuple[float, float]:
    """Return the calls and seconds that a micro-batch takes in the data-loading process of rank 0."""
    first, last = (turns[place][0]["worker"] for place in (0, -1))
    counted, fetched = (max(last[name] - first[name], 1) for name in ("counted", "fetched"))
    called = sum(last[kind] - first[kind] for kind in ("python", "c"))
    return called / counted, (last["seconds"] - first["seconds"]) / fetched


def figures(case: Case, turns: Mapping[str, Turns]) -> Iterator[str]:
    """Yield a row for each contestant."""
    for name, of in turns.items():
        python, c = calls(of.counted)
        last_start = [*of.timed[-LOG_STEPS:], *of.counted[-LOG_STEPS:]]
        worker, seconds = of_worker(last_start) if case.workers else (0.0, 0.0)
        times = [mean(of.timed, clock) for clock in CLOCKS.values()]
        cells = [*case, name, *(f"{number:,.0f}" for number in (python + c, python, worker))]
        cells += [f"{1000 * time:.1f}" for time in (*times, seconds)]
        yield page.row(cells)


def ratios(case: Case, turns: Mapping[str, Turns], oldest: str | None) -> Iterator[tuple[str, list[str]]]:
    """Yield the table's row for each pair of contestants, and a sentence for each of its goals: met or missed.

    Raises:
        RuntimeError: if losses differ, so that the pair has not done the same work.
    """
    for pair in combinations(turns, 2):
        ours, theirs = (turns[name] for name in pair)
        differ = difference(losses(ours.first), losses(theirs.first))
        if differ > TOLERANCE:
            raise RuntimeError(f"{case}: losses of {' and '.join(pair)} differ by {differ:.1e}, more than {TOLERANCE}")
        of = {name: ratio(ours.timed, theirs.timed, clock) for name, clock in CLOCKS.items()}
        found = {"calls": sum(calls(ours.counted)) / sum(calls(theirs.counted))}
        found |= {name: of_all for name, (of_all, _, _) in of.items()}
        asked = goals(case, pair, oldest)
        cells = [*case, " / ".join(pair), f"{found['calls']:.3f}"]
        cells += [f"{of_all:.2f} ({low:.2f}–{high:.2f})" for of_all, low, high in of.values()]
        cells += [f"{differ:.0e}", ", ".join(f"{name} ≤ {most:.2f}" for name, most in asked.items())]
        said = [
            f"{'met' if round(found[name], 3) <= most else 'missed'}: {case.layout}, {case.mode}, "
            f"loader workers {case.workers}: {name} {found[name]:.3f} of {pair[1]}'s, asked for ≤ {most:.2f}"
            for name, most in asked.items()
        ]
        yield page.row(cells), said


CONTESTANTS = ["layout", "checkpoints", "workers", "trainer", "calls", "Python's", "worker's", "processor ms"]
CONTESTANTS += ["main thread ms", "clock ms", "worker ms"]
PAIRS = ["layout", "checkpoints", "workers", "pair", "calls", *CLOCKS, "losses differ by", "goals"]


def text_of(
    command: str, of_contestants: Sequence[str], of_pairs: Sequence[str], said: Sequence[str], steps: int, starts: int
) -> str:
    facts = f"{page.device()}, gloo", f"{starts} starts of each trainer, {steps} timed steps each"
    lines = [
        *page.heading("What a step asks of the host, beside TRL's", command, *facts, page.versions(PACKAGES)),
        page.explained(host_time.__doc__),
        "",
        "All numbers are for one step on rank 0. `calls` counts calls of Python and C functions by the main thread,",
        "`Python's` only those of Python functions, and `worker's` those of the data loader's process, for one",
        "micro-batch. `processor` is the CPU time of all threads, `main thread` that of the main thread, and `clock`",
        "the elapsed time. Times are means over all timed steps, and so include pauses of Python's garbage collector.",
        "",
        page.head(CONTESTANTS),
        *of_contestants,
        "",
        f"Ratios of these numbers, with quartiles over blocks of {LOG_STEPS} steps. Losses are those of the first ten",
        "steps.",
        "",
        page.head(PAIRS),
        *of_pairs,
        "",
        *(f"- {line}" for line in sorted(said)),
        "",
    ]
    return "\n".join(lines)

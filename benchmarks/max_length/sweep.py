"""Searching and timing: one probe after the other, each of them written down before and after."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from tqdm import tqdm

from ..ranks import Ending, run_group
from . import tables
from .combinations import LONGCTX, Combination, Limits
from .rank import Task, run_task
from .results import (
    COMBINATION,
    DECIDED,
    FAIL,
    FIT,
    INIT,
    OK,
    OOM,
    REFUSED,
    RUNNING,
    TIME,
    TIMEOUT,
    Key,
    Line,
    Results,
    latest,
)
from .search import bracket, next_length

STEPS_OF_A_FIT = 2
PROBES_OF_A_SEARCH = 3
"""Expected, for the time that is left."""
PROBE_FOLDER = ".probe"
DATA = "data.parquet"
LARGEST_ID = 256
"""Of the random tokens, which all vocabularies have."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all probes of a sweep share."""

    model: str
    lengths: Sequence[int]
    """Of the rows to time, in tokens."""
    limits: Limits
    memory_fraction: float | None
    """Of a GPU's memory that torch may take; None for all of it, and on the CPU."""
    precision: float
    longest: int
    steps: int
    warmup: int
    timeout: float
    documents: Callable[[int], Sequence[int]]
    """Length of a row -> lengths of its documents."""
    commit: str


class Sweep:
    """Fills a folder with results.jsonl, table.md and the two pictures."""

    def __init__(self, folder: Path, settings: Settings, results: Results, combinations: Sequence[Combination]):
        self.folder, self.settings, self.results, self.combinations = folder, settings, results, combinations

    def run(self) -> None:
        """What the folder has already is not run again."""
        for combination in self.combinations:
            self._begin(combination)
        possible = [combination for combination in self.combinations if combination.run is not None]
        self._show()
        with tqdm(unit="probe", total=0) as self._bar:
            for number, combination in enumerate(possible):
                if self._state(combination, COMBINATION).get("longest") is None:
                    self._search(combination, still_to_search=len(possible) - number - 1, possible=len(possible))
            for number, combination in enumerate(possible):
                for at, length in enumerate(self.settings.lengths):
                    left = (len(possible) - number) * len(self.settings.lengths) - at
                    if self._state(combination, TIME, length).get("status") not in DECIDED:
                        self._expect(left)
                        self._time(combination, length)
        self._show(FIT)
        self._show(TIME)
        shutil.rmtree(self.folder / PROBE_FOLDER, ignore_errors=True)

    # Searching

    def _begin(self, combination: Combination) -> None:
        if self._state(combination, COMBINATION).get("status") is None:
            status = INIT if combination.run is not None else REFUSED
            self._add(combination, COMBINATION, 0, status, **combination.describe())

    def _search(self, combination: Combination, *, still_to_search: int, possible: int) -> None:
        settings, known = self.settings, self._state(combination, COMBINATION)
        unit = max(2, combination.multiple)
        about = combination.describe()
        if known["status"] == INIT:
            self._add(combination, COMBINATION, 0, RUNNING, **about)
        while True:
            tried = self._tried(combination)
            outcomes = {length: line["status"] == OK for length, line in tried.items()}
            guess = self._guess(combination, tried)
            shape: Any = {"multiple": unit, "precision": settings.precision, "longest": settings.longest}
            length = next_length(outcomes, guess=guess, **shape)
            if length is None:
                break
            if _always_fails(tried) and unit not in tried:
                length = unit  # memory is not what it fails for: does any length train?
            left = max(1, PROBES_OF_A_SEARCH - len(tried)) + PROBES_OF_A_SEARCH * still_to_search
            self._expect(left + possible * len(settings.lengths))
            self._probe(combination, FIT, length)
            self._show()
        fits, fails = bracket(outcomes)
        status = OK if fits else tried[fails]["status"] if fails else OOM
        self._add(combination, COMBINATION, 0, status, **about, longest=fits, fails=fails, probes=len(tried))
        self._show(FIT)

    def _tried(self, combination: Combination) -> dict[int, Line]:
        """Length -> how its probe ended."""
        of_this = (combination.backend, combination.devices)
        lines = latest(self.results.lines).items()
        return {
            key.length: line
            for key, line in lines
            if key.kind == FIT and (key.backend, key.devices) == of_this and line["status"] in DECIDED
        }

    def _guess(self, combination: Combination, tried: dict[int, Line]) -> float:
        """The longest row by the closed form and, once there are some, by the peak that is closest to the limit."""
        limits, beside = self.settings.limits, 0.0
        measured = [line for line in tried.values() if line.get("allocated")]
        if measured:
            nearest = min(measured, key=lambda line: abs(line["allocated"] - limits.device_bytes))
            beside = nearest["allocated"] - combination.predicted_peak(nearest["length"])
        return combination.predicted_length(limits, beside)

    # Timing

    def _time(self, combination: Combination, length: int) -> None:
        longest = self._state(combination, COMBINATION)["longest"]
        padded = -(-length // combination.multiple) * combination.multiple
        if padded > longest:
            self._add(combination, TIME, length, OOM, padded_length=padded, error=f"the longest row is {longest:,}")
            self._bar.update()
        else:
            self._probe(combination, TIME, length, padded_length=padded, warmup=self.settings.warmup)
            self._show(TIME)

    # Probes

    def _probe(self, combination: Combination, kind: str, length: int, **about: Any) -> None:
        settings, folder = self.settings, self.folder / PROBE_FOLDER
        self._add(combination, kind, length, INIT)
        self._bar.set_description(f"{combination.backend} on {combination.devices}, {length:,} tokens")
        folder.mkdir(exist_ok=True)
        rows = [self.settings.documents(length) for _ in range(combination.dp)]
        write_rows(folder / DATA, [document for row in rows for document in row])
        use_cpu, is_fit = settings.limits.use_cpu, kind == FIT
        task = Task(
            stack=combination.stack,
            model=settings.model,
            data=str(folder / DATA),
            length=length,
            num_steps=STEPS_OF_A_FIT if is_fit else settings.warmup + settings.steps,
            is_traced=is_fit and use_cpu,
            memory_fraction=settings.memory_fraction,
            flags=combination.flags,
            degrees=combination.degrees,
            use_cpu=use_cpu,
        )
        self._add(combination, kind, length, RUNNING)
        ending = run_group(
            combination.devices,
            run_task,
            task,
            environment=combination.environment,
            folder=folder / "ranks",
            timeout=settings.timeout,
        )
        found = _found(ending)
        if is_fit:
            found["predicted"] = combination.predicted_peak(length) if combination.stack == LONGCTX else None
            if use_cpu and ending.status == OK and found["allocated"] > settings.limits.device_bytes:
                found |= {"error": f"{found['allocated']:,} traced bytes are more than the budget"}
                ending = ending._replace(status=OOM)
        self._keep_log(combination, kind, length, ending)
        self._add(combination, kind, length, ending.status, **found, **about, wall=round(ending.seconds, 2))
        self._bar.update()

    def _keep_log(self, combination: Combination, kind: str, length: int, ending: Ending) -> None:
        """Of a rank that failed, so that one can see why."""
        if ending.status in (OK, OOM) or not ending.log:
            return
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        name = f"{combination.backend.replace(' ', '_')}_{combination.devices}_{kind}_{length}.log"
        (logs / name).write_text(ending.log)

    # Lines and pages

    def _state(self, combination: Combination, kind: str, length: int = 0) -> Line:
        return latest(self.results.lines).get(Key(kind, combination.backend, combination.devices, length), {})

    def _add(self, combination: Combination, kind: str, length: int, status: str, **found: Any) -> None:
        line: Line = {"kind": kind, "backend": combination.backend, "devices": combination.devices, "status": status}
        if kind != COMBINATION:
            line["length"] = length
        self.results.add(line | found | ({"commit": self.settings.commit} if status in DECIDED else {}))

    def _show(self, kind: str | None = None) -> None:
        tables.write_table(self.folder, self.results.lines)
        if kind is not None:
            tables.write_pictures(self.folder, self.results.lines, kind)

    def _expect(self, probes: int) -> None:
        """Tell the progress bar how many are left."""
        self._bar.total = self._bar.n + probes
        self._bar.refresh()


def _always_fails(tried: dict[int, Line]) -> bool:
    return bool(tried) and all(line["status"] in (FAIL, TIMEOUT) for line in tried.values())


def _found(ending: Ending) -> dict[str, Any]:
    """For the probe's line, from the reports of its ranks."""
    if not ending.reports:
        return {"error": ending.error} if ending.error else {}
    first, found = ending.reports[0], {}
    for name in ("loss", "padding", "tokens", "flops", "peak_flops"):
        found[name] = first[name]
    found["seconds"] = [max(step) for step in zip(*(report["seconds"] for report in ending.reports), strict=True)]
    for name in ("allocated", "reserved", "host", "offloaded", "cpu_seconds"):
        found[f"{name}_by_rank"] = [report.get(name) for report in ending.reports]
    found["allocated"] = max(found["allocated_by_rank"])
    return found


def write_rows(path: Path, documents: Sequence[int]) -> None:
    """Random tokens, the same each time, with the lengths of these documents."""
    offsets = np.concatenate(([0], np.cumsum(documents)))
    tokens = np.random.default_rng(0).integers(0, LARGEST_ID, int(offsets[-1]), dtype=np.int32)
    column = pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(tokens))
    new = path.with_suffix(".new")
    pyarrow.parquet.write_table(pa.table({"input_ids": column}), new)
    os.replace(new, path)

"""Find the longest sequences and time steps, a probe at a time; each is recorded before it runs and after.

The most telling probes come first, since the time may be up before the last one: on every backend, one of the lengths
to time that fits; the seconds at the lengths that all backends train; the longest sequences; then the other seconds.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from longctx.forecast.step_time import Speeds
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
    TimeIsUp,
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
    until: float
    """When the time is up, by `time.monotonic`; infinite without --minutes."""
    speeds: Speeds | None
    """Of the devices, as a forecast knows them; None where it does not."""
    documents: Callable[[int], Sequence[int]]
    """Length of a row -> lengths of its documents."""
    commit: str


class Sweep:
    """Fills a folder with results.jsonl, table.md and the two pictures."""

    def __init__(self, folder: Path, settings: Settings, results: Results, combinations: Sequence[Combination]):
        self.folder, self.settings, self.results, self.combinations = folder, settings, results, combinations
        self.possible = [combination for combination in combinations if combination.run is not None]
        self._left_out: TimeIsUp | None = None

    def run(self) -> None:
        """Run all probes that the folder does not have yet.

        Raises:
            TimeIsUp: with the first probe that has been left out.
        """
        for combination in self.combinations:
            self._begin(combination)
        self._show()
        with tqdm(unit="probe", total=0) as self._bar:
            for combination in self.possible:
                self._in_time(self._fit_one_length, combination)
            self._time_all(only_common=True)
            searched = self.possible
            while searched:
                searched = [combination for combination in searched if self._in_time(self._narrow, combination)]
            self._time_all(only_common=False)
        self._show(FIT)
        self._show(TIME)
        shutil.rmtree(self.folder / PROBE_FOLDER, ignore_errors=True)
        if self._left_out is not None:
            raise self._left_out

    def _in_time(self, work: Callable[..., bool | None], *about: Any) -> bool | None:
        """Return what `work` returns, or None if one of its probes takes longer than is left; a cheaper one may not."""
        try:
            return work(*about)
        except TimeIsUp as left_out:
            self._left_out = self._left_out or left_out
            return None

    # Searching

    def _begin(self, combination: Combination) -> None:
        if self._state(combination, COMBINATION).get("status") is None:
            status = INIT if combination.run is not None else REFUSED
            self._add(combination, COMBINATION, 0, status, **combination.describe())

    def _fit_one_length(self, combination: Combination) -> None:
        """Try the longest of the lengths to time that is predicted to fit on each backend, then shorter ones.

        Where none is, try the shortest.
        """
        limits, beside = self.settings.limits, [o for o in self.possible if o.devices == combination.devices]
        for length in reversed(self.settings.lengths):
            padded, tried = combination.padded(length), self._tried(combination)
            if any(line["status"] != OOM for line in tried.values()):
                return  # it fits, or fails whatever the length
            fits = padded <= min(other.predicted_length(limits) for other in beside)
            if (fits or length == self.settings.lengths[0]) and padded <= self.settings.longest and padded not in tried:
                self._probe(combination, FIT, padded)
                self._show()

    def _narrow(self, combination: Combination) -> bool:
        """Run one more probe of a search, or record its result; return whether the search goes on."""
        settings, known = self.settings, self._state(combination, COMBINATION)
        if "longest" in known:
            return False
        unit, about, tried = max(2, combination.multiple), combination.describe(), self._tried(combination)
        if known["status"] == INIT:
            self._add(combination, COMBINATION, 0, RUNNING, **about)
        outcomes = {length: line["status"] == OK for length, line in tried.items()}
        guess = self._guess(combination, tried)
        shape: Any = {"multiple": unit, "precision": settings.precision, "longest": settings.longest}
        length = next_length(outcomes, guess=guess, **shape)
        if length is not None:
            if _always_fails(tried) and unit not in tried:
                length = unit  # memory is not what it fails for: does any length train?
            self._probe(combination, FIT, length)
            self._show()
            return True
        fits, fails = bracket(outcomes)
        status = OK if fits else tried[fails]["status"] if fails else OOM
        self._add(combination, COMBINATION, 0, status, **about, longest=fits, fails=fails, probes=len(tried))
        self._show(FIT)
        return False

    def _fits(self, combination: Combination) -> int:
        """Tokens of the longest row that has trained; 0 for none."""
        return max((length for length, line in self._tried(combination).items() if line["status"] == OK), default=0)

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
        """Return the longest row by the closed form, corrected by the measured peak that is nearest to the limit.

        The closed form does not know TRL's memory, so its length is on the straight line through two measured peaks.
        """
        limits, beside = self.settings.limits, 0.0
        measured = [line for line in tried.values() if line.get("allocated")]
        nearest, *others = sorted(measured, key=lambda line: abs(line["allocated"] - limits.device_bytes)) or [{}]
        if combination.stack != LONGCTX and others and others[0]["allocated"] != nearest["allocated"]:
            per_byte = (others[0]["length"] - nearest["length"]) / (others[0]["allocated"] - nearest["allocated"])
            return nearest["length"] + per_byte * (limits.device_bytes - nearest["allocated"])
        if measured:
            beside = nearest["allocated"] - combination.predicted_peak(nearest["length"])
        return combination.predicted_length(limits, beside)

    # Timing

    def _time_all(self, *, only_common: bool) -> None:
        """Time all backends, the shortest length first.

        Args:
            only_common: leave out lengths that another backend, of those that train at all, is not known to train.
        """
        for length in self.settings.lengths:
            for combination in self.possible:
                beside = [self._fits(other) for other in self.possible if other.devices == combination.devices]
                if not only_common or length <= min(filter(None, beside), default=0):
                    self._in_time(self._time, combination, length)

    def _time(self, combination: Combination, length: int) -> None:
        """Time a length, unless it is above the longest row that trains."""
        padded, longest = combination.padded(length), self._state(combination, COMBINATION).get("longest")
        if self._state(combination, TIME, length).get("status") in DECIDED:
            return
        if padded <= self._fits(combination):
            self._probe(combination, TIME, length, padded_length=padded, warmup=self.settings.warmup)
            self._show(TIME)
        elif longest is not None:
            self._add(combination, TIME, length, OOM, padded_length=padded, error=f"the longest row is {longest:,}")

    # Probes

    def _probe(self, combination: Combination, kind: str, length: int, **about: Any) -> None:
        settings, folder = self.settings, self.folder / PROBE_FOLDER
        use_cpu, is_fit = settings.limits.use_cpu, kind == FIT
        num_steps = STEPS_OF_A_FIT if is_fit else settings.warmup + settings.steps
        forecast = self._forecast(combination, length)
        name = f"{combination.backend} on {combination.devices}, {length:,} tokens"
        self._begin_in_time(name, self._expected_seconds(combination, length, num_steps, forecast))
        self._add(combination, kind, length, INIT)
        self._expect(name)
        folder.mkdir(exist_ok=True)
        rows = [self.settings.documents(length) for _ in range(combination.dp)]
        write_rows(folder / DATA, [document for row in rows for document in row])
        task = Task(
            stack=combination.stack,
            model=settings.model,
            data=str(folder / DATA),
            length=length,
            num_steps=num_steps,
            is_traced=is_fit and use_cpu,
            memory_fraction=settings.memory_fraction,
            flags=combination.flags,
            degrees=combination.degrees,
            use_cpu=use_cpu,
        )
        self._add(combination, kind, length, RUNNING)
        left = settings.until - time.monotonic()
        ending = run_group(
            combination.devices,
            run_task,
            task,
            environment=combination.environment,
            folder=folder / "ranks",
            timeout=min(left, settings.timeout),
        )
        if ending.status == TIMEOUT and left < settings.timeout:
            self._add(combination, kind, length, INIT)  # it has not had its time yet, and gets it when this goes on
            raise TimeIsUp(f"{name}: it was cut after {ending.seconds:,.0f} s")
        found = _found(ending) | forecast
        if is_fit and use_cpu and ending.status == OK and found["allocated"] > settings.limits.device_bytes:
            found |= {"error": f"{found['allocated']:,} traced bytes are more than the budget"}
            ending = ending._replace(status=OOM)
        self._keep_log(combination, kind, length, ending)
        self._add(combination, kind, length, ending.status, **found, **about, wall=round(ending.seconds, 2))
        self._bar.update()

    def _forecast(self, combination: Combination, length: int) -> dict[str, Any]:
        """Return the predicted peak bytes, and the seconds where the speeds are known; None for TRL's steps."""
        if combination.stack != LONGCTX:
            return {"predicted": None, "predicted_seconds": None}
        documents, speeds = self.settings.documents(length), self.settings.speeds
        seconds = None if speeds is None else combination.predicted_seconds(length, documents, speeds)
        return {"predicted": combination.predicted_peak(length), "predicted_seconds": seconds}

    def _expected_seconds(self, combination: Combination, length: int, num_steps: int, forecast: Line) -> float:
        """Return how long a probe is expected to take, from the one of its backend with the most similar length.

        The seconds of a step grow with the square of the length, as attention does, and shrink in proportion to it.
        Before the first such probe, they are the forecast's.
        """
        ended = [line for line in latest(self.results.lines).values() if line.get("seconds")]
        start = max((line["wall"] - sum(line["seconds"]) for line in ended), default=0.0)
        alike = [x for x in ended if (x["backend"], x["devices"]) == (combination.backend, combination.devices)]
        if not alike:
            return start + num_steps * (forecast["predicted_seconds"] or 0.0)
        nearest = min(alike, key=lambda line: abs(line["length"] - length))
        growth = length / nearest["length"]
        return start + num_steps * statistics.median(nearest["seconds"]) * growth ** (2 if growth > 1 else 1)

    def _begin_in_time(self, name: str, expected: float) -> None:
        """
        Raises:
            TimeIsUp: where a probe is expected to take longer than what is left.
        """
        if (left := self.settings.until - time.monotonic()) <= expected:
            raise TimeIsUp(f"{name}: it would take about {expected:,.0f} s, and {max(0.0, left):,.0f} s are left")

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

    def _expect(self, name: str) -> None:
        """Tell the progress bar what runs, and how many are left."""
        left = sum(
            self._state(combination, TIME, length).get("status") not in DECIDED
            for combination in self.possible
            for length in self.settings.lengths
        )
        for combination in self.possible:
            if self._state(combination, COMBINATION).get("longest") is None:
                left += max(1, PROBES_OF_A_SEARCH - len(self._tried(combination)))
        self._bar.total = self._bar.n + left
        self._bar.set_description(name)


def _always_fails(tried: dict[int, Line]) -> bool:
    return bool(tried) and all(line["status"] in (FAIL, TIMEOUT) for line in tried.values())


def _found(ending: Ending) -> dict[str, Any]:
    """For the probe's line, from the reports of its ranks."""
    if not ending.reports:
        return {"error": ending.error} if ending.error else {}
    first, found = ending.reports[0], {}
    for name in ("loss", "grad_norm", "padding", "tokens", "flops", "peak_flops"):
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

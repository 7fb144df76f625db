"""Plant mutants one after the other in copies of the repository, and see which tests notice them."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from . import child
from .catalogue import ROOT, Mutant, digest, test_files

COPIED = ("longctx", "benchmarks", "configs", "docs", "examples", "tests")
FILES = ("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "MANIFEST.in", "mkdocs.yml")
LEAST_SECONDS, TIMES_LONGER = 90.0, 5.0
"""Tests of a mutant may take LEAST_SECONDS and this many times as long as without it."""
CONTROL_SECONDS = 1200.0
"""For the tests of a file without a mutant."""


class Outcome(NamedTuple):
    """What became of one mutant, or of tests without one."""

    key: str
    status: str
    """killed, time-out, survived; of tests without a mutant: passed, failed."""
    seconds: float
    test: str = ""
    """That failed first."""
    reason: str = ""


class Results:
    """Outcomes by key, in a file to which each is added as soon as it is known."""

    def __init__(self, path: Path):
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        read = (Outcome(**json.loads(line)) for line in lines)
        self.outcomes = {outcome.key: outcome for outcome in read if outcome.status != "failed"}

    def add(self, outcome: Outcome) -> None:
        self.outcomes[outcome.key] = outcome
        with self.path.open("a") as file:
            file.write(json.dumps(outcome._asdict()) + "\n")


class _Copy:
    """A copy of the repository, in one of whose files a mutant can be planted at a time."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._changes = 0
        self._planted: str | None = None
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in COPIED:
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        for name in FILES:
            shutil.copy(ROOT / name, folder / name)

    def plant(self, mutant: Mutant | None) -> None:
        if self._planted is not None:
            self._write(self._planted, (ROOT / self._planted).read_text())
        self._planted = None if mutant is None else mutant.file
        if mutant is not None:
            self._write(mutant.file, mutant.planted_in((ROOT / mutant.file).read_text()))

    def _write(self, name: str, text: str) -> None:
        """With a time of its own, since Python tells a stale .pyc file by the source's time and size."""
        self._changes += 1
        path = self.folder / name
        path.write_text(text)
        os.utime(path, (10**9 + self._changes,) * 2)


class Job(NamedTuple):
    """Tests to run, with a mutant until one fails, or without: then all, which are of one file."""

    key: str
    tests: tuple[str, ...]
    mutant: Mutant | None


@dataclass
class _Running:
    job: Job
    process: int
    copy: _Copy
    scratch: Path
    begun: float
    limit: float


@functools.cache
def control_key(test: str) -> str:
    """Of a test on the code as it is: only where it passes does a failure tell of a mutant."""
    sources = sorted((ROOT / "longctx").rglob("*.py"))
    return digest([test, *(path.read_text() for path in [*sources, *(ROOT / name for name in test_files((test,)))])])


def run(mutants: Sequence[Mutant], results: Results, folder: Path, processes: int) -> Iterator[tuple[Job, Outcome]]:
    """Run what has no result yet, some at a time; yields each outcome as soon as it is there.

    Args:
        folder: for copies and temporary files.
        processes: at a time.
    """
    child.import_libraries()
    free = [_Copy(folder / str(number)) for number in range(processes)]
    waiting = list(_jobs(mutants, results))
    running: list[_Running] = []
    while waiting or running:
        waiting = [job for job in waiting if not _is_hopeless(job, results)]
        job = next((job for job in waiting if free and _is_ready(job, results)), None)
        if job is not None:
            waiting.remove(job)
            running.append(_start(job, free.pop(), _limit(job, results)))
            continue
        for task in [task for task in running if _has_ended(task)]:
            running.remove(task)
            free.append(task.copy)
            for outcome in _outcomes(task):
                results.add(outcome)
                yield task.job, outcome
        time.sleep(0.05)


def _jobs(mutants: Sequence[Mutant], results: Results) -> Iterator[Job]:
    """The mutants without a result, and before the first that needs them the tests of each file without a mutant."""
    left = [mutant for mutant in mutants if mutant.key() not in results.outcomes]
    tests = dict.fromkeys(test for mutant in left for test in mutant.tests)
    unknown = {test for test in tests if _control(test, results) != "passed"}
    for mutant in left:
        for file in test_files(mutant.tests):
            if of_file := tuple(test for test in tests if test in unknown and test_files((test,)) == [file]):
                yield Job("", of_file, None)
                unknown -= set(of_file)
        yield Job(mutant.key(), mutant.tests, mutant)


def _control(test: str, results: Results) -> str:
    found = results.outcomes.get(control_key(test))
    return found.status if found is not None else "unknown"


def _is_ready(job: Job, results: Results) -> bool:
    return job.mutant is None or all(_control(test, results) == "passed" for test in job.tests)


def _is_hopeless(job: Job, results: Results) -> bool:
    """Whether a test fails without the mutant."""
    return job.mutant is not None and any(_control(test, results) == "failed" for test in job.tests)


def _limit(job: Job, results: Results) -> float:
    if job.mutant is None:
        return CONTROL_SECONDS
    alone = sum(results.outcomes[control_key(test)].seconds for test in job.tests)
    return LEAST_SECONDS + TIMES_LONGER * alone


def _start(job: Job, copy: _Copy, limit: float) -> _Running:
    scratch = copy.folder.with_name(f"{copy.folder.name}-scratch")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    copy.plant(job.mutant)
    process = child.fork(copy.folder, job.tests, scratch, stop_at_first=job.mutant is not None)
    return _Running(job, process, copy, scratch, time.monotonic(), limit)


def _has_ended(task: _Running) -> bool:
    """Whether it is over, or its time is; nothing that it has started is left then."""
    ended = os.waitpid(task.process, os.WNOHANG)[0] != 0
    if not ended and time.monotonic() - task.begun < task.limit:
        return False
    _kill(task.process, is_alive=not ended)
    return True


def _kill(process: int, *, is_alive: bool) -> None:
    descendants = psutil.Process(process).children(recursive=True) if is_alive else []
    for found in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)  # the group outlives its leader
    if is_alive:
        os.waitpid(process, 0)


def _outcomes(task: _Running) -> list[Outcome]:
    """One for the mutant, or one for each test without a mutant."""
    job, seconds, path = task.job, round(time.monotonic() - task.begun, 1), task.scratch / "result.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if job.mutant is None:
        return [_of_control(test, found.get("tests", {}), _end_of_log(task)) for test in job.tests]
    if not found and seconds >= task.limit:
        return [Outcome(job.key, "time-out", seconds)]
    found = found or {"code": -1, "test": job.tests[0], "reason": "the process was killed"}  # as by a SIGFPE
    return [Outcome(job.key, "killed" if found["code"] else "survived", seconds, found["test"], found["reason"])]


def _of_control(test: str, reports: Mapping[str, tuple[bool, float]], log: str) -> Outcome:
    """Passed if all of its cases have."""
    cases = [reports[name] for name in reports if name == test or name.startswith((f"{test}[", f"{test}::"))]
    if not cases or not all(passed for passed, _ in cases):
        return Outcome(control_key(test), "failed", 0.0, test, log[-2000:])
    return Outcome(control_key(test), "passed", round(sum(seconds for _, seconds in cases), 2), test)


def _end_of_log(task: _Running) -> str:
    return (task.scratch / "log").read_text(errors="replace")[-3000:]

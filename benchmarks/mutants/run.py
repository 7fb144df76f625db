"""Plant mutants one after the other in copies of the repository, and see which tests notice them."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from . import child
from .catalogue import ROOT, Mutant, digest, test_files

COPIED = ("longctx", "benchmarks", "configs", "docs", "examples", "tests")
FILES = ("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "MANIFEST.in", "mkdocs.yml")
LEAST_SECONDS = 90.0
TIMES_LONGER = 6.0
"""Tests of a mutant may take this many times as long as without it, and at least LEAST_SECONDS."""
_SOME_TESTS_FAILED = 1
"""pytest's exit code."""


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
        self.outcomes = {outcome.key: outcome for outcome in (Outcome(**json.loads(line)) for line in lines)}

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
        self._planted = mutant and mutant.file
        if mutant is not None:
            self._write(mutant.file, mutant.planted_in((ROOT / mutant.file).read_text()))

    def _write(self, name: str, text: str) -> None:
        """With a time of its own, since Python tells a stale .pyc file by the source's time and size."""
        self._changes += 1
        path = self.folder / name
        path.write_text(text)
        os.utime(path, (10**9 + self._changes,) * 2)


class Job(NamedTuple):
    """Tests to run, with a mutant or without."""

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
def control(tests: tuple[str, ...]) -> Job:
    """The tests on the code as it is: only where they pass does a failure tell of a mutant."""
    sources = sorted((ROOT / "longctx").rglob("*.py"))
    texts = [path.read_text() for path in sources] + [(ROOT / name).read_text() for name in test_files(tests)]
    return Job(digest([tests, *texts]), tests, None)


def run(mutants: Sequence[Mutant], results: Results, folder: Path, processes: int) -> Iterator[tuple[Job, Outcome]]:
    """Run what has no result yet, some at a time; yields each outcome as soon as it is there.

    Args:
        folder: for copies and temporary files; removed where it exists.
        processes: at a time.
    """
    child.import_libraries()
    free = [_Copy(folder / str(number)) for number in range(processes)]
    waiting = list(_jobs(mutants, results))
    running: list[_Running] = []
    while waiting or running:
        started = _next(waiting, running, results) if free else None
        if started is not None:
            waiting.remove(started)
            running.append(_start(started, free.pop(), _limit(started, results)))
            continue
        for task in [task for task in running if _has_ended(task)]:
            running.remove(task)
            free.append(task.copy)
            outcome = _outcome(task)
            results.add(outcome)
            if task.job.mutant is None and outcome.status != "passed":
                waiting = [job for job in waiting if job.tests != task.job.tests]
            yield task.job, outcome
        time.sleep(0.05)


def _jobs(mutants: Sequence[Mutant], results: Results) -> Iterator[Job]:
    """Each set of tests first without a mutant."""
    seen = set()
    for mutant in mutants:
        job = Job(mutant.key(), mutant.tests, mutant)
        if job.key in results.outcomes:
            continue
        first = control(mutant.tests)
        if first.key not in seen and results.outcomes.get(first.key, Outcome("", "", 0)).status != "passed":
            seen.add(first.key)
            yield first
        yield job


def _next(waiting: list[Job], running: list[_Running], results: Results) -> Job | None:
    """The first job whose tests are known to pass without a mutant, or that is to find that out."""
    for job in waiting:
        if job.mutant is None or _passed(job, results) is not None:
            return job
    return None


def _passed(job: Job, results: Results) -> Outcome | None:
    found = results.outcomes.get(control(job.tests).key)
    return found if found is not None and found.status == "passed" else None


def _limit(job: Job, results: Results) -> float:
    if job.mutant is None:
        return 600.0
    alone = _passed(job, results)
    assert alone is not None, "tests run without a mutant first"
    return max(LEAST_SECONDS, TIMES_LONGER * alone.seconds)


def _start(job: Job, copy: _Copy, limit: float) -> _Running:
    scratch = copy.folder.with_name(f"{copy.folder.name}-scratch")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    copy.plant(job.mutant)
    return _Running(job, child.fork(copy.folder, job.tests, scratch), copy, scratch, time.monotonic(), limit)


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


def _outcome(task: _Running) -> Outcome:
    """
    Raises:
        RuntimeError: if the tests could not be run without a mutant, with the end of their output.
    """
    key, seconds = task.job.key, round(time.monotonic() - task.begun, 1)
    path = task.scratch / "result.json"
    if not path.exists() and seconds >= task.limit:
        return Outcome(key, "failed" if task.job.mutant is None else "time-out", seconds)
    ended = {"code": -1, "test": task.job.tests[0], "reason": "the process was killed"}  # as by a SIGFPE
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else ended
    if task.job.mutant is not None:
        return Outcome(key, "killed" if found["code"] else "survived", seconds, found["test"], found["reason"])
    if found["code"] not in (0, _SOME_TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {found['code']} on {task.job.tests}:\n{_end_of_log(task)}")
    return Outcome(key, "failed" if found["code"] else "passed", seconds, found["test"], found["reason"])


def _end_of_log(task: _Running) -> str:
    return (task.scratch / "log").read_text(errors="replace")[-3000:]

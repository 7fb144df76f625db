"""Run tests on a copy of the repository, in a process that is forked from one with all libraries imported.

No test has to import torch, transformers, TRL and DeepSpeed again, nor have the ranks that `tests.workers` starts:
their fork server is another fork of this process, made before pytest begins.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIBRARIES = (
    "torch",
    "transformers.trainer",
    "trl.trainer.sft_trainer",
    "deepspeed",
    "accelerate.accelerator",
    "datasets",
    "peft",
    "pyarrow.parquet",
    "hypothesis",
    "pytest",
)
OURS = ("longctx", "tests", "benchmarks")
GUARD = {"longctx", "longctx.untrusted", "longctx.untrusted.working_directory"}
"""What every module of ours imports first; a fork forgets them."""


def import_libraries() -> None:
    """Import what tests need besides our own code, none of whose modules may be loaded before a fork."""
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", DS_ACCELERATOR="cpu", TOKENIZERS_PARALLELISM="false")
    for name in LIBRARIES:
        importlib.import_module(name)
    from multiprocessing import resource_tracker

    import torch

    torch.set_num_threads(1)
    resource_tracker.ensure_running()
    loaded = {name for name in sys.modules if name.partition(".")[0] == "longctx"}
    assert loaded <= GUARD, f"{loaded - GUARD} were imported before the fork"


def fork(copy: Path, tests: tuple[str, ...], scratch: Path, *, stop_at_first: bool) -> int:
    """Start a process that runs the tests in a copy of the repository; returns its id.

    Args:
        scratch: an empty folder, for the tests' temporary files, `log` and `result.json`.
    """
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        os.setsid()
        _enter(copy, scratch)
        with _fork_server():
            result = _run(copy, tests, stop_at_first)
        (scratch / "result.json").write_text(json.dumps(result))
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _enter(copy: Path, scratch: Path) -> None:
    """Take the copy's modules instead of ours, here and in every process that is started from here."""
    log = os.open(scratch / "log", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(copy)
    ours = Path(__file__).resolve().parents[2]
    sys.path[:] = [str(copy), *(path for path in sys.path if path and Path(path).resolve() != ours)]
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    cache = scratch / "cache"
    os.environ.update(PYTHONPATH=str(copy), TMPDIR=str(scratch), HF_HOME=str(cache))
    import tempfile

    import datasets

    tempfile.tempdir = None
    datasets.config.HF_CACHE_HOME = str(cache)  # what a mutant leaves in a cache must not reach the next one
    datasets.config.HF_DATASETS_CACHE = cache / "datasets"


@contextlib.contextmanager
def _fork_server() -> Iterator[None]:
    """A fork server for the ranks of tests: a fork of this process instead of a new interpreter."""
    from multiprocessing import forkserver, util

    start = util.spawnv_passfds

    def fork_instead(path: Any, arguments: Any, kept: Any) -> int:
        if process := os.fork():
            return process
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in kept:
                with contextlib.suppress(OSError):
                    os.close(int(name))
        try:
            exec(arguments[-1].decode() if isinstance(arguments[-1], bytes) else arguments[-1])
        finally:
            os._exit(0)

    vars(util)["spawnv_passfds"] = fork_instead
    try:
        forkserver.ensure_running()
    finally:
        vars(util)["spawnv_passfds"] = start
    yield


class _Reports:
    """What failed first, and why; and of every test whether it passed and its seconds."""

    def __init__(self) -> None:
        self.test, self.reason = "", ""
        self.tests: dict[str, tuple[bool, float]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        passed, seconds = self.tests.get(report.nodeid, (True, 0.0))
        self.tests[report.nodeid] = passed and not report.failed, seconds + report.duration
        if report.failed and not self.test:
            self.test = report.nodeid
            self.reason = str(getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longrepr))

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.test:
            self.test, self.reason = report.nodeid, str(report.longrepr)


def _run(copy: Path, tests: tuple[str, ...], stop_at_first: bool) -> dict[str, Any]:
    import pytest

    reports = _Reports()
    options = [
        "-q",
        *(["-x"] if stop_at_first else []),
        "--no-header",
        "-p",
        "no:cacheprovider",
        "--hypothesis-seed=0",
        "--rootdir",
        str(copy),
    ]
    code = int(pytest.main([*options, *tests], plugins=[reports]))
    for name in ("longctx", "tests"):
        module = sys.modules.get(name)
        origin = str(getattr(module, "__file__", None) or copy)
        assert origin.startswith(str(copy)), f"{name} was imported from {origin}, outside of {copy}"
    reason = reports.reason.strip().partition("\n")[0][:300]
    return {"code": code, "test": reports.test, "reason": reason, "tests": reports.tests}

"""The parity table, printed at the end of every pytest run that compared training with one device.

`--support-matrix PATH` writes docs/support-matrix.md from what the run has shown.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from tests import refusals

refusals.install()  # before anything imports longctx

from tests.small_model import HEADS, save_small_model  # noqa: E402

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

_rows: list[tuple[str, str, float, float, float]] = []
_outcomes: dict[str, bool] = {}


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders of small Qwen3 models with the head counts of HEADS."""
    return {name: save_small_model(tmp_path_factory.mktemp("models"), *heads) for name, heads in HEADS.items()}


@pytest.fixture
def refusal(monkeypatch, capsys):
    """Run longctx.train on the CPU; the one error that it refuses with, before weights are read or processes start."""
    from longctx.train import main

    monkeypatch.setattr("longctx.config.device_count", lambda: 0)
    monkeypatch.setattr("longctx.run.load_model", lambda *_, **__: pytest.fail("weights were read"))
    monkeypatch.setattr("longctx.launch.processes.spawn", lambda *_: pytest.fail("processes were started"))

    def run(*arguments):
        assert main(["--dataset_name", "stdlib", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.count("longctx: error: ") == 1
        return error

    return run


@pytest.fixture
def parity_table():
    """Append (case, how it was started, loss error, gradient norm error, error over the run)."""
    return _rows


class RefusalsMet:
    """Which test meets which refusal, against tests/refusals.tsv; see tests/refusals.py."""

    def __init__(self):
        self.met: dict[str, set[tuple[str, int]]] = {}
        self.collected: Counter[str] = Counter()
        self.passed: Counter[str] = Counter()
        self.partial: set[str] = set()

    @staticmethod
    def function(nodeid):
        """`tests/test_x.py::test_y` of any of its parameters."""
        return nodeid.partition("[")[0]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        refusals.met.clear()
        try:
            return (yield)
        finally:
            self.met.setdefault(self.function(item.nodeid), set()).update(refusals.met)

    def pytest_deselected(self, items):
        self.partial |= {self.function(item.nodeid) for item in items if not item.get_closest_marker("long")}

    def pytest_collection_finish(self, session):
        self.collected = Counter(self.function(item.nodeid) for item in session.items)
        if any("[" in argument for argument in session.config.args):
            self.partial |= set(self.collected)

    def pytest_runtest_logreport(self, report):
        self.passed[self.function(report.nodeid)] += report.when == "call" and report.passed

    def missed(self):
        """Refusals that the test they have in the table ran through without meeting them."""
        whole = {test for test, count in self.collected.items() if self.passed[test] == count} - self.partial
        return [
            (row, test) for row, test in refusals.read_table().items() if test in whole and not self._has(row, test)
        ]

    def _has(self, refusal, test):
        file, first, last = refusals.refusals().get(refusal, ("", 0, 0))
        return any((file, line) in self.met.get(test, ()) for line in range(first, last + 1))

    def _by_how_special(self):
        """Tests that met something, those first that met the least else; what random data meets counts for nothing."""
        return sorted((test for test in self.met if "fuzz" not in test), key=lambda test: (len(self.met[test]), test))

    def record(self):
        """Enter what this run has shown where the table has no test that holds."""
        table = refusals.read_table() if refusals.TABLE.exists() else {}
        gone = {test for test in table.values() if "::" in test and not refusals.is_test(test)}
        missed = {row for row, _ in self.missed()} if table else set()
        for row in refusals.refusals():
            if table.get(row) in {None, refusals.UNMET, *gone} or row in missed:
                table[row] = next((test for test in self._by_how_special() if self._has(row, test)), refusals.UNMET)
        refusals.write_table(table)


_refusals_met = RefusalsMet()


def pytest_configure(config):
    config.pluginmanager.register(_refusals_met)


def pytest_sessionfinish(session):
    if session.config.getoption("--record-refusals"):
        _refusals_met.record()
    elif _refusals_met.missed() and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_addoption(parser):
    parser.addoption("--record-refusals", action="store_true", help="enter into tests/refusals.tsv what this run met")
    parser.addoption("--support-matrix", type=Path, help="write what this run has shown into the support matrix")


def pytest_runtest_logreport(report):
    if report.failed or report.when == "call":
        _outcomes[report.nodeid] = report.passed and _outcomes.get(report.nodeid, True)


def pytest_terminal_summary(terminalreporter, config):
    if missed := _refusals_met.missed():
        terminalreporter.section("refusals that their tests in tests/refusals.tsv no longer meet", red=True)
        for row, test in missed:
            terminalreporter.write_line(f"{test}: {row.file} {row.function}: {row.message}")
    if path := config.getoption("--support-matrix"):
        _write_support_matrix(terminalreporter, path)
    if not _rows:
        return
    terminalreporter.section("relative error against one process, dense attention, fp32")
    terminalreporter.write_line(f"{'case':58} {'started by':18} {'loss 1':>8} {'grad 1':>8} {'losses':>8}")
    for case, start, loss, grad, run in sorted(_rows):
        terminalreporter.write_line(f"{case:58} {start:18} {loss:8.0e} {grad:8.0e} {run:8.0e}")


def _write_support_matrix(terminalreporter, path):
    from tests.support_page import differences, page

    before = path.read_text() if path.exists() else ""
    after = page(before, _outcomes)
    path.write_text(after)
    terminalreporter.section(f"support matrix: {path}")
    for line in differences(before, after) or ["no cell has changed"]:
        terminalreporter.write_line(line)

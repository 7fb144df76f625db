"""The parity table, printed at the end of every pytest run that compared training with one device."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

_rows: list[tuple[str, str, float, float, float]] = []


@pytest.fixture
def parity_table():
    """Append (case, how it was started, loss error, gradient norm error, error over the run)."""
    return _rows


def pytest_terminal_summary(terminalreporter):
    if not _rows:
        return
    terminalreporter.section("relative error against one process, dense attention, fp32")
    terminalreporter.write_line(f"{'case':58} {'started by':18} {'loss 1':>8} {'grad 1':>8} {'losses':>8}")
    for case, start, loss, grad, run in sorted(_rows):
        terminalreporter.write_line(f"{case:58} {start:18} {loss:8.0e} {grad:8.0e} {run:8.0e}")

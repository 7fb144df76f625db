"""benchmarks.host_time: only equal work is compared, and a page says which goals are met."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.host_time.__main__ import main
from benchmarks.host_time.page import figures, ratios
from benchmarks.host_time.race import HERE, LOG_STEPS, TRL, Case, Turns

ROOT = Path(__file__).parents[2]


def turns_of(*, loss=5.5, calls=100, seconds=1.0):
    """Those of two ranks, whose steps with an entry in the log take eleven times as long as others."""
    rank = {"losses": [loss], "python": calls - 10, "c": 10, "wall": 9.0, "thread": seconds, "process": seconds}
    counts = {"python": 6.0, "c": 4.0, "seconds": 0.5, "fetched": 1.0, "counted": 1.0}
    turns = []
    for step in range(2 * LOG_STEPS):
        slow = 1 if step % LOG_STEPS else 11
        worker = {name: step * count for name, count in counts.items()}
        turns.append([rank | {"thread": seconds * slow, "process": seconds * slow, "worker": worker}] * 2)
    return Turns(turns, turns, turns)


def rows_of(case, **contestants):
    rows = list(ratios(case, contestants, "abc"))
    return [row for row, _ in rows], [line for _, said in rows for line in said]


def test_ratios_have_quartiles_of_blocks_and_goals_stand_beside_them() -> None:
    case = Case("sp 1", "full", 1)
    trainers = {HERE: turns_of(calls=110, seconds=0.9), "abc": turns_of(calls=150), TRL: turns_of()}
    rows, said = rows_of(case, **trainers)
    assert "| longctx / TRL | 1.100 | 0.90 (0.90–0.90) |" in rows[1]
    assert "| abc / TRL | 1.500 | 1.00 (1.00–1.00) |" in rows[2]
    assert said == [
        "missed: sp 1, full, loader workers 1: calls 1.100 of TRL's, asked for ≤ 1.00",
        "met: sp 1, full, loader workers 1: processor 0.900 of TRL's, asked for ≤ 1.00",
    ]
    assert next(figures(case, trainers)) == (
        "| sp 1 | full | 1 | longctx | 110 | 100 | 10 | 1800.0 | 1800.0 | 9000.0 | 500.0 |"
    )


def test_trainers_whose_losses_differ_are_not_compared() -> None:
    with pytest.raises(RuntimeError, match=r"losses of longctx and TRL differ by 2.0e-06, more than 1e-06"):
        rows_of(Case("sp 1", "none", 0), **{HERE: turns_of(loss=5.5 * (1 + 2e-6)), TRL: turns_of()})
    rows_of(Case("sp 1", "none", 0), **{HERE: turns_of(loss=5.5 * (1 + 5e-7)), TRL: turns_of()})


def test_too_few_steps_for_quartiles_are_refused(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["--steps", "10", "--starts", "1"])
    assert "--steps 10 --starts 1 must be at least one block of 10 steps a start" in capsys.readouterr().err


@pytest.mark.long
def test_command_prints_and_keeps_the_page(tmp_path) -> None:
    command = [sys.executable, "-m", "benchmarks.host_time", "--layouts", "sp 1", "--modes", "none"]
    command += ["--starts", "2", "--steps", "10", "--workers", "0", "1"]
    command += ["--output", str(tmp_path / "page.md")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=1200)
    assert done.stdout.endswith((tmp_path / "page.md").read_text())  # lines of libraries may come first
    assert done.stdout.count("| longctx / TRL |") == 2
    assert "nan" not in done.stdout

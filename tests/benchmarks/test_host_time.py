"""benchmarks.host_time: contestants take turns, only equal work is compared, and a page says which goals are met."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.host_time import turns as turns_module
from benchmarks.host_time.__main__ import main
from benchmarks.host_time.page import figures, ratio, ratios
from benchmarks.host_time.race import HERE, LOG_STEPS, TRL, Case, Turns
from benchmarks.host_time.turns import Contestant

ROOT = Path(__file__).parents[2]
RANK = """
import json, os, sys
from multiprocessing.connection import Client

task = json.loads(sys.argv[2])
connection = Client(sys.argv[1])
connection.send(int(os.environ.get("RANK", "0")))
for step in range(task["steps"]):
    connection.send({"step": step, "tree": os.environ["PYTHONPATH"]})
    with open(task["order"], "a") as file:
        file.write(task["name"] + connection.recv()[0])
sys.exit("no more steps")
"""


def contestant(name, folder, *, steps=100):
    own = folder / name
    own.mkdir()
    task = {"tree": str(own), "order": str(folder / "order"), "name": name, "steps": steps}
    return Contestant(name, task, 1, own)


def test_contestants_take_turns_and_one_that_ends_is_told_with_its_output(tmp_path, monkeypatch) -> None:
    rank = tmp_path / "rank.py"
    rank.write_text(RANK)
    monkeypatch.setattr(turns_module, "RANK", rank)
    both = [contestant("a", tmp_path), contestant("b", tmp_path, steps=3)]
    try:
        for one in both:
            one.wait_until_started()
        for how in ("step", "count"):
            for one in both:
                [told] = one.step(how)
                assert told["tree"] == str(tmp_path / one.name)
        assert (tmp_path / "order").read_text() == "asbsacbc"
        with pytest.raises(RuntimeError, match=r"b has ended:\n(?s:.*)no more steps"):
            both[1].step()
    finally:
        for one in both:
            one.stop()
    assert all(one.process.poll() is not None for one in both)


def turns_of(*, loss=5.5, calls=100, seconds=1.0):
    """Those of two ranks, whose steps with an entry in the log take eleven times as long as others."""
    rank = {"losses": [loss], "python": calls - 10, "c": 10, "wall": 9.0, "thread": seconds, "process": seconds}
    counts = {"python": 6.0, "c": 4.0, "seconds": 0.5, "fetched": 1.0, "counted": 1.0}
    turns = []
    for step in range(2 * LOG_STEPS):
        slow = 1 if step % LOG_STEPS else 11
        worker = {name: step * count for name, count in counts.items()}
        turns.append([rank | {"thread": seconds * slow, "process": seconds * slow, "worker": worker}] * 2)
    return Turns(turns, turns, turns, [])


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


def test_a_pause_that_most_blocks_lack_counts() -> None:
    ours, theirs = (turns_of().timed * 4 for _ in range(2))
    theirs[5] = [rank | {"thread": 41.0} for rank in theirs[5]]  # 40 s more than the 160 s of all steps
    assert ratio(ours, theirs, "thread") == (pytest.approx(160 / 200), 1.0, 1.0)


@pytest.mark.parametrize(
    ("case", "goal"),
    [
        (Case("sp 1", "selective", 0), "processor ≤ 1.20"),
        (Case("ring 2 on FSDP2", "full", 0), "main thread ≤ 0.80"),
        (Case("Ulysses 2 on ZeRO-3", "full", 0), "main thread ≤ 0.85"),
        (Case("Ulysses 2 on FSDP2", "full", 0), "main thread ≤ 0.88"),
    ],
)
def test_each_layout_has_its_goal(case, goal) -> None:
    has_trl = case.layout != "Ulysses 2 on FSDP2"
    [row], [*_, said] = rows_of(case, **{HERE: turns_of(), TRL if has_trl else "abc": turns_of()})
    assert row.endswith(f"{goal} |")
    assert said.startswith("met" if "1.20" in goal else "missed")


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
    command += ["--owners", "3", "--output", str(tmp_path / "page.md")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=1200)
    assert done.stdout.endswith((tmp_path / "page.md").read_text())  # lines of libraries may come first
    assert done.stdout.count("| longctx / TRL |") == 2
    assert "nan" not in done.stdout
    assert "Trainer.training_step" in done.stderr

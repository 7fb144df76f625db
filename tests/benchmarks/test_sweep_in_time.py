"""A sweep within a time: what comes first, what is left out and goes on, and its summary. Its probes are simulated."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks.max_length import results as states
from benchmarks.max_length import sweep as sweeping
from benchmarks.max_length.__main__ import main
from benchmarks.max_length.combinations import ONE_DEVICE, combinations
from benchmarks.max_length.results import Results, TimeIsUp
from benchmarks.max_length.sweep import Settings, Sweep
from benchmarks.max_length.tables import summary
from benchmarks.ranks import Ending
from longctx.machine import here

BUDGET = 20 * 2**20
START, STEP = 4.0, 1 / 512  # seconds of a probe, and of each token of a step
BACKENDS = ("ulysses", "ring", "TRL ring", "TRL ulysses")
COMMON = (64, 128)  # TRL's hold no more than 200 tokens


class Machine:
    """Answers for the ranks of every probe, and moves the clock on instead of taking time."""

    def __init__(self, monkeypatch):
        self.now, self.probes = 0.0, []
        monkeypatch.setattr(sweeping, "run_group", self.run)
        monkeypatch.setattr(sweeping.tables, "write_pictures", lambda *_: None)
        monkeypatch.setattr(sweeping, "time", SimpleNamespace(monotonic=lambda: self.now))

    def run(self, devices, _, task, *, timeout, **__):
        seconds = START + task.num_steps * STEP * task.length
        self.now += min(seconds, timeout)
        self.probes.append((task.stack, task.num_steps == sweeping.STEPS_OF_A_FIT, task.length))
        if seconds > timeout:
            return Ending("timeout", error="not done in time", seconds=timeout)
        report = {"loss": 5.0, "grad_norm": 1.0, "padding": 0.0, "tokens": task.length, "flops": 1, "peak_flops": None}
        report |= {"seconds": [STEP * task.length] * task.num_steps, "host": 1, "reserved": None}
        report["allocated"] = task.length * BUDGET // (200 if task.stack == "trl" else 2000) if task.is_traced else 0
        return Ending("ok", [report] * devices, seconds=seconds)


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    backends, data = ["ulysses", "ring", "trl"], tmp_path_factory.mktemp("data") / "data.parquet"
    return list(combinations("tiny", gpus=[2], backends=backends, memory="balanced", profile=None, data=data))


def run(folder, found, machine, *, seconds=float("inf"), timeout=1800.0):
    """Sweep for so many seconds; returns why it ended, and what is decided."""
    folder.mkdir(exist_ok=True)
    results = Results(folder)
    told = {"model": "tiny", "device": "simulated", "device_kind": "CPU", "memory": "balanced", "budget_bytes": BUDGET}
    told |= {"use_cpu": True, "precision": 0.1, "warmup": 1, "command": "bench", "date": "today", "python": "3"}
    results.add({"kind": states.SWEEP, "versions": {"torch": "2"}, **told})
    settings = Settings(
        model="tiny",
        lengths=[64, 128, 512, 1024],
        machine=here.Machine.of("CPU", 2, device_bytes=BUDGET, host_bytes=1e12),
        memory_fraction=None,
        precision=0.1,
        longest=1 << 20,
        steps=4,
        warmup=1,
        timeout=timeout,
        until=machine.now + seconds,
        documents=lambda length: [length],
        commit="abc",
    )
    try:
        Sweep(folder, settings, results, found).run()
        left_out = None
    except TimeIsUp as error:
        left_out = str(error)
    finally:
        results.close()
    known = states.latest(results.lines)
    return left_out, {key: line for key, line in known.items() if line["status"] in states.DECIDED}


def outcome(decided):
    return {key: (line["status"], line.get("longest"), line.get("fails")) for key, line in decided.items()}


def test_what_tells_most_comes_first(tmp_path, found, machine) -> None:
    left_out, decided = run(tmp_path, found, machine)
    assert left_out is None
    kinds = [(key.kind, key.length) for key in decided if key.kind in (states.FIT, states.TIME)]
    first_time = next(i for i, (kind, _) in enumerate(kinds) if kind == states.TIME)
    common = kinds[first_time : first_time + len(COMMON) * len(BACKENDS)]
    assert {length for _, length in kinds[:first_time]} <= {64, 128, 512, 1024}
    assert common == [(states.TIME, length) for length in COMMON for _ in BACKENDS]
    rest = [kind for kind, _ in kinds[first_time + len(common) :]]
    assert rest == sorted(rest)  # fit before time
    assert rest[0] == states.FIT
    longest = {key.backend: line["longest"] for key, line in decided.items() if key.kind == states.COMBINATION}
    assert set(longest) == set(BACKENDS)
    assert all(1800 < longest[name] <= 2000 for name in BACKENDS[:2])
    assert all(180 < longest[name] <= 200 for name in BACKENDS[2:])
    probes = [line["probes"] for key, line in decided.items() if key.kind == states.COMBINATION]
    assert max(probes) <= 5  # three to find a length that trains, then on a straight line


@pytest.mark.parametrize("seconds", [1.0, 25.0, 50.0, 150.0])
def test_a_sweep_that_is_out_of_time_goes_on_to_the_same_result(tmp_path, found, machine, seconds) -> None:
    _, undisturbed = run(tmp_path / "undisturbed", found, machine)
    for _ in range(20):
        started = machine.now
        left_out, decided = run(tmp_path / "cut", found, machine, seconds=seconds)
        assert machine.now - started <= seconds
        assert all(line["status"] in (states.OK, states.OOM) for line in decided.values())
        if left_out is None or seconds < START:
            break
        assert "on 2, " in left_out
    if seconds < START:
        assert not decided
        assert "it was cut after 1 s" in left_out
        left_out, decided = run(tmp_path / "cut", found, machine)
    assert left_out is None
    assert outcome(decided) == outcome(undisturbed)


def test_a_cheap_probe_runs_where_an_expensive_one_is_left_out(tmp_path, found, machine) -> None:
    left_out, decided = run(tmp_path, found, machine, seconds=108.0)
    assert left_out.startswith("ulysses on 2, 2,")
    assert "it would take about" in left_out
    searched = {key.backend for key in decided if key.kind == states.FIT and key.length not in (64, 128, 512, 1024)}
    assert searched == {"TRL ring", "TRL ulysses"}  # their rows are short


def test_a_probe_that_exceeds_its_own_timeout_has_failed(tmp_path, found, machine) -> None:
    left_out, decided = run(tmp_path, found, machine, seconds=1000.0, timeout=2.0)
    assert left_out is None
    assert {line["status"] for key, line in decided.items() if key.kind == states.COMBINATION} == {states.TIMEOUT}


# The summary


def combination(backend, devices=2, *, dp=1, **more):
    line = {"kind": states.COMBINATION, "backend": backend, "devices": devices, "status": "ok", "sp": devices // dp}
    return {**line, "dp": dp, "ring": 1, "ulysses": devices // dp, "longest": 2048, **more}


def timed(backend, devices=2, *, loss, length=512, status="ok", **more):
    line = {"kind": states.TIME, "backend": backend, "devices": devices, "status": status, "length": length}
    line |= {"tokens": length, "seconds": [9.0, 2.0], "warmup": 1, "padded_length": length, "commit": "abc"}
    return {**line, "loss": loss, "grad_norm": 2 * loss, **more}


def table(*lines):
    """Of the summary: row by backend and devices, of cells by column; the rest of its text."""
    sweep = {"kind": states.SWEEP, "model": "tiny", "device": "H100", "memory": "balanced", "budget_bytes": None}
    sweep |= {"device_bytes": 80 * 2**30, "versions": {"torch": "2.13"}, "python": "3.12", "use_cpu": False}
    page = list(summary([{**sweep, "command": "longctx bench", "date": "2026-11-27"}, *lines]))
    names, _, *rows = [[c.strip() for c in row[2:-2].split(" | ")] for row in page if row[:2] == "| "]
    cells = [dict(zip(names, row, strict=True)) for row in rows]
    return {(row["backend"], row["devices"]): row for row in cells}, "\n".join(x for x in page if x[:2] != "| ")


def test_the_first_step_is_compared_with_one_reference_on_the_same_sequences() -> None:
    ours = [combination("ring"), timed("ring", loss=5.005), combination("hybrid", dp=2), timed("hybrid", loss=4.0)]
    trl = [combination("TRL ring"), timed("TRL ring", loss=5.0), combination("TRL ulysses"), combination("gather")]
    trl += [timed("TRL ulysses", loss=5.0005), timed("gather", loss=6.0, status="fail")]
    trl += [timed("TRL ring", loss=4.0, length=256)]
    rows, _ = table(*ours, *trl)
    found = {backend: row["first step"] for (backend, _), row in rows.items()}
    assert found["ring"] == "loss +0.001, norm +0.001"
    assert found["TRL ring"] == "reference"
    assert found["TRL ulysses"] == "loss +0.0001, norm +0.0001"
    assert found["hybrid"] == "reference"  # two sequences, which no other trains on
    assert found["gather"] == "—"
    assert {len(row) for row in rows.values()} == {10}
    rows, _ = table(*ours, *trl, combination(ONE_DEVICE, 1), timed(ONE_DEVICE, 1, loss=5.5))
    assert rows[ONE_DEVICE, "1"]["first step"] == "reference"
    assert rows["TRL ring", "2"]["first step"] == rows["ring", "2"]["first step"] == "loss -0.09, norm -0.09"


def test_the_summary_says_what_where_and_how_well_it_was_predicted() -> None:
    peak = {"allocated": 2 * 2**30, "predicted": 2.2 * 2**30, "predicted_seconds": 1.9}
    fit = {"kind": states.FIT, "backend": "TRL ring", "devices": 2, "status": "ok", "length": 768, "allocated": 2**30}
    unfinished = combination("TRL ring", status="running")
    del unfinished["longest"]
    refused = {
        "kind": states.COMBINATION,
        "backend": "hybrid",
        "devices": 2,
        "status": "refused",
        "error": "it is ring",
    }
    longer = timed("ring", loss=5.0, length=1024)
    lines = [combination("ring"), timed("ring", loss=5.0, **peak), longer, unfinished, timed("TRL ring", loss=5.0)]
    rows, text = table(*lines, fit, refused)
    ring, trl = rows["ring", "2"], rows["TRL ring", "2"]
    assert (ring["longest sequence"], trl["longest sequence"]) == ("2,048", "≥ 768")
    assert ring["timed at"] == trl["timed at"] == "512"  # 1,024 was timed on one of them
    assert (ring["s/step"], ring["tokens/s/device"]) == ("2", "128")
    assert (ring["peak, MiB"], trl["peak, MiB"]) == ("2,048.0", "1,024.0 at 768")
    assert ring["forecast error"] == "peak +10.0%, s/step -5.0%"
    assert trl["forecast error"] == "—"
    assert rows["hybrid", "2"]["longest sequence"] == "refused"
    for part in ("tiny on H100", "torch 2.13, Python 3.12; commit abc", "`longctx bench`, 2026-11-27", "it is ring"):
        assert part in text


# The command


def test_a_sweep_that_is_out_of_time_ends_with_3_and_prints_its_summary(tmp_path, monkeypatch, capsys) -> None:
    def cut(options, results, _):
        results.add({"kind": states.SWEEP, "model": "tiny", "device": "CPU", "memory": "fastest", "budget_bytes": None})
        results.lines[-1] |= {"device_bytes": 1, "versions": {}, "python": "3", "command": "bench", "date": "today"}
        raise TimeIsUp("ring on 2, 64 tokens: it was cut")

    monkeypatch.setattr("benchmarks.max_length.__main__._sweep", cut)
    assert main(["--output", str(tmp_path), "--minutes", "1"]) == 3
    printed = capsys.readouterr()
    assert "time is up; the same command goes on with ring on 2, 64 tokens" in printed.err
    assert "### longctx bench: tiny on CPU" in printed.out


@pytest.mark.long
def test_a_real_sweep_is_compared_with_trl_cut_and_continued(tmp_path) -> None:
    flags = ["--gpus", "2", "--backends", "ring", "--compare", "trl", "--lengths", "64", "--steps", "2"]
    command = [sys.executable, "-m", "longctx", "bench", "--output", str(tmp_path), "--precision", "0.5", *flags]

    def bench(*more):
        done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=550, env=os.environ)
        return done.returncode, done.stdout, done.stderr

    code, _, error = bench("--minutes", "0.0001")
    assert (code, "time is up" in error) == (3, True), error[-2000:]
    code, printed, error = bench("--minutes", "60")  # of a busy machine it expects seconds that are squared
    assert code == 0, error[-2000:]
    ours, *trl = [[c.strip() for c in row.split(" | ")] for row in printed.splitlines() if row[:2] == "| "][2:]
    assert [row[0] for row in trl] == ["| TRL ring", "| TRL ulysses"]
    loss, norm = (float(part.split()[1]) for part in ours[8].split(", "))
    assert abs(loss) < 1e-6  # of fp32: two units in the last place
    assert abs(norm) < 1e-5
    assert trl[0][8] == "reference"

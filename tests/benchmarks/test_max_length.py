"""The sweep for the longest row: its search, its file, what it refuses; real sweeps, repeated, hung and killed."""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.max_length import results as states
from benchmarks.max_length.__main__ import _check, _fill_in, _parser, main
from benchmarks.max_length.results import Results, read
from benchmarks.max_length.search import AIMS, bracket, next_length
from benchmarks.ranks import run_group
from longctx.attention.backends import BACKENDS
from tests.softcuda.ranks import soft_environment

ROOT = Path(__file__).parents[2]


# The search


def search(trains, guess, *, multiple=1, precision=0.02, longest=1 << 26):
    """All lengths that are tried, in their order, with whether they train."""
    outcomes: dict[int, bool] = {}
    shape = {"multiple": multiple, "precision": precision, "longest": longest}
    while (length := next_length(outcomes, guess=guess(outcomes), **shape)) is not None:
        assert length not in outcomes, f"{length} was tried before: {outcomes}"
        assert length % multiple == 0
        assert 0 < length <= max(longest, multiple)
        outcomes[length] = trains(length)
        assert len(outcomes) < AIMS + 60, f"no end: {outcomes}"
    return outcomes


@settings(deadline=None, max_examples=200)
@given(
    limit=st.integers(0, 1 << 27),
    guesses=st.lists(st.integers(0, 1 << 30), min_size=1),
    multiple=st.sampled_from([1, 2, 3, 16, 96]),
    precision=st.floats(0.001, 0.5),
    longest=st.integers(2, 1 << 26),
)
def test_finds_the_limit_whatever_is_guessed(limit, guesses, multiple, precision, longest) -> None:
    def guess(outcomes):
        return guesses[len(outcomes) % len(guesses)]

    shape = {"multiple": multiple, "precision": precision, "longest": longest}
    fits, fails = bracket(search(lambda length: length <= limit, guess, **shape))
    assert fits <= limit
    if fails is None:
        assert fits == max(multiple, longest // multiple * multiple)
    else:
        assert fails > limit
        assert fails - fits <= max(multiple, precision * fits)


@settings(deadline=None)
@given(seed=st.integers(0, 1 << 30), guess=st.integers(1, 1 << 24), odds=st.floats(0.0, 1.0))
def test_ends_with_a_bracket_where_longer_rows_may_train_and_shorter_not(seed, guess, odds) -> None:
    outcomes = search(
        lambda length: random.Random(f"{seed} {length}").random() < odds, lambda _: guess, longest=1 << 24
    )
    fits, fails = bracket(outcomes)
    assert fits == 0 or outcomes[fits]
    assert fails is None or (not outcomes[fails] and fails - fits <= max(1, 0.02 * fits))


# results.jsonl


def line(status, length=64, kind=states.FIT):
    return {"kind": kind, "backend": "ring", "devices": 2, "length": length, "status": status}


def test_a_cut_last_line_is_dropped_and_the_rest_goes_on(tmp_path) -> None:
    first = Results(tmp_path)
    first.add(line(states.RUNNING))
    first.add(line(states.OK))
    first.close()
    with (tmp_path / states.FILE).open("ab") as file:
        file.write(b'{"kind": "fit", "backend": "ri')
    again = Results(tmp_path)
    assert [x["status"] for x in again.lines] == [states.RUNNING, states.OK]
    again.add(line(states.OOM, 128))
    again.close()
    assert [x["status"] for x in read(tmp_path / states.FILE)] == [states.RUNNING, states.OK, states.OOM]
    assert {key.length: x["status"] for key, x in states.latest(again.lines).items()} == {64: "ok", 128: "oom"}


@pytest.mark.parametrize("text", ['{"loss": 1}\n', '{"loss": 1}', "notes\n"])
def test_a_file_of_something_else_is_left_as_it_is(tmp_path, text) -> None:
    (tmp_path / states.FILE).write_text(text)
    with pytest.raises(ValueError, match=r"line 1 of .*results\.jsonl is none of a sweep's"):
        Results(tmp_path)
    assert (tmp_path / states.FILE).read_text() == text


def test_two_sweeps_do_not_write_one_folder(tmp_path) -> None:
    first = Results(tmp_path)
    with pytest.raises(ValueError, match="is written by another sweep now"):
        Results(tmp_path)
    first.close()
    Results(tmp_path).close()


# Groups of processes


def _hang(folder):
    """With a process of its own, as a rank may have workers."""
    subprocess.Popen(["sh", "-c", "touch $0; sleep 600; :", f"{folder}/{os.environ['RANK']}"])
    time.sleep(600)


def _end(how):
    """Rank 1 ends so; rank 0 waits for it."""
    if os.environ["RANK"] == "0":
        time.sleep(600)
    if how == "allocate":
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
        bytearray(64 << 30)
    if how == "raise":
        raise RuntimeError("the first sentence. The second")
    if isinstance(how, int):
        os.kill(os.getpid(), how)
    os._exit(3)


def run(function, argument, tmp_path, *, timeout=60.0):
    return run_group(2, function, argument, environment={}, folder=tmp_path / "r", timeout=timeout)


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "status", "error"),
    [
        ("allocate", "oom", "MemoryError"),
        ("raise", "fail", "RuntimeError: the first sentence$"),
        ("leave", "fail", "rank 1 ended with exit code 3"),
        (signal.SIGKILL, "oom", "rank 1 was killed, as the kernel does when memory is used up"),
        (signal.SIGSEGV, "fail", "rank 1 ended with SIGSEGV"),
    ],
)
def test_a_rank_that_ends_is_told_from_one_without_memory(tmp_path, how, status, error) -> None:
    ending = run(_end, how, tmp_path)
    assert ending.status == status
    assert re.match(error, ending.error), ending.error
    assert ending.seconds < 30  # rank 0 is not waited for


@pytest.mark.long
def test_a_group_that_hangs_is_ended_with_all_that_it_has_started(tmp_path) -> None:
    assert run(_hang, tmp_path, tmp_path, timeout=4.0).status == "timeout"
    assert {"0", "1"} <= {path.name for path in tmp_path.iterdir()}, "ranks had no time to hang"
    assert not left_behind(str(tmp_path))


def left_behind(text, *, seconds=20.0):
    """Command lines of processes that hold this text, or that work in such a folder; once the kernel is through."""
    until = time.monotonic() + seconds
    while (found := list(_processes(text))) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def _processes(text):
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
            output = os.readlink(folder / "fd" / "1")
            if int(folder.name) != os.getpid() and (text in command or text in output):
                yield f"{folder.name} {command} {output}"


# Real sweeps


TABLE = ("longest", "fails", "status", "probes", "sp", "dp", "error")
"""Of a combination; times and host memory are never the same twice."""


def command(folder, *flags):
    return [sys.executable, "-m", "benchmarks.max_length", "--output", str(folder), *flags]


def sweep(folder, *flags, timeout=550, env=None):
    done = subprocess.run(command(folder, *flags), cwd=ROOT, capture_output=True, text=True, timeout=timeout, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not left_behind(str(folder))
    return found(folder)


def found(folder):
    """What a sweep has come to: each combination, and the peaks of every probe for it; the lengths that were timed."""
    lines = states.latest(list(read(folder / states.FILE)))
    combinations = {k: [x.get(n) for n in TABLE] for k, x in lines.items() if k.kind == states.COMBINATION}
    fits = {k: [x["status"], x.get("allocated_by_rank")] for k, x in lines.items() if k.kind == states.FIT}
    timed = {k: x["status"] for k, x in lines.items() if k.kind == states.TIME}
    return combinations, fits, timed


def cells(folder, heading):
    """Rows of the table below a heading, by column."""
    text = (folder / "table.md").read_text().split(f"## {heading}")[1].split("\n## ")[0]
    names, _, *rows = [[c.strip() for c in row[2:-2].split(" | ")] for row in text.splitlines() if row[:2] == "| "]
    return [dict(zip(names, row, strict=True)) for row in rows]


@pytest.mark.long
def test_a_sweep_of_two_ranks(tmp_path) -> None:
    flags = ["--gpus", "2", "--backends", "ring", "hybrid", "--lengths", "64", "1024", "--steps", "2"]
    combinations, fits, timed = sweep(tmp_path, *flags, "--memory_budget_gib", "0.008", "--precision", "0.1")
    (ring, hybrid), budget = combinations.values(), 0.008 * 2**30
    assert ring[2] == "ok"
    assert hybrid[2] == "refused"
    assert ring[0] < ring[1] <= 1.1 * ring[0] + 4
    for key, (status, peaks) in fits.items():
        assert (status == "ok") == (key.length <= ring[0]) == (max(peaks) <= budget)
    assert list(timed.values()) == ["ok", "oom"]
    longest, refused = cells(tmp_path, "Longest sequences")
    assert longest["longest sequence"] == f"{ring[0]:,}"
    assert longest["shortest that fails"] == f"{ring[1]:,} (oom)"
    assert len(longest) <= 10
    assert longest["sp × dp"] == "2 × 1"
    assert abs(float(longest["forecast error"].rstrip("%"))) < 30
    assert refused["status"] == "refused"
    assert "- hybrid on 2: refused: " in (tmp_path / "table.md").read_text()
    first, second = cells(tmp_path, "Seconds per step")
    low, high = map(float, first["p10 to p90"].split(" to "))
    assert low <= float(first["s/step"]) <= high
    assert second["s/step"] == "OOM"
    assert len(first) <= 10
    assert {path.name for path in tmp_path.iterdir()} == {
        "max_length.png",
        "results.jsonl",
        "seconds_per_step.png",
        "table.md",
    }


SHORT = ["--gpus", "1", "2", "--backends", "ring", "ulysses", "--lengths", "128", "--steps", "2"]
SHORT += ["--memory_budget_gib", "0.01"]


@pytest.mark.long
def test_a_sweep_of_two_soft_gpus(tmp_path, soft_gpus) -> None:
    """Peaks are those of the GPUs' allocator, and the sweep ends with an error if its ranks read what is not there."""
    flags = [*SHORT, "--model_name_or_path", "tiny"]  # with GPUs the default is a model of the hub
    combinations, fits, timed = sweep(tmp_path, *flags, env=soft_environment())
    assert {row[2] for row in combinations.values()} == {"ok"}
    longest = {(key.backend, key.devices): row[0] for key, row in combinations.items()}
    assert set(longest) == {("one device", 1), ("ring", 2), ("ulysses", 2)}
    for key, (status, peaks) in fits.items():
        assert (status == "ok") == (key.length <= longest[key.backend, key.devices])
        assert status == "oom" or 0 < max(peaks) <= 0.01 * 2**30
    assert set(timed.values()) == {"ok"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder, sweep(folder, *SHORT)


def assert_alike(first, second) -> None:
    """Compare outcomes, and lengths to the search's precision: a ring's peak depends on when its messages are freed."""
    for ours, others in ((first[0], second[0]), (second[0], first[0])):
        assert (ours.keys(), first[2]) == (others.keys(), second[2])
        for combination, (longest, fails, status, *_) in ours.items():
            assert status == others[combination][2] == "ok"
            assert longest < others[combination][1], f"{combination}: {fails} fails, and {longest} does not"


@pytest.mark.long
@pytest.mark.parametrize("attempt", range(2))
def test_killed_at_any_moment_it_goes_on_to_the_same_result(undisturbed, tmp_path, attempt) -> None:
    seed = int(os.environ.get("SWEEP_SEED", time.time_ns() % 2**32)) + attempt
    moments = random.Random(seed)
    print(f"SWEEP_SEED={seed}")
    folder = tmp_path / "sweep"
    for _ in range(2):
        lines, wait = _num_lines(folder) + moments.randint(0, 15), moments.uniform(0, 4)
        with (tmp_path / "output").open("w") as output:
            process = subprocess.Popen(command(folder, *SHORT), cwd=ROOT, stdout=output, stderr=output)
        while process.poll() is None and _num_lines(folder) < lines:
            time.sleep(0.02)
        time.sleep(wait)
        process.kill()
        print(f"killed {wait:.2f} s after line {lines}; exit code {process.wait()}")
        assert not left_behind(str(folder))
        lines = list(read(folder / states.FILE)) if (folder / states.FILE).exists() else []
        decided = sum(line["kind"] == states.FIT and line["status"] != states.RUNNING for line in lines)
        assert decided < 2 or (folder / "table.md").is_file(), "it is written after every probe"
    assert_alike(sweep(folder, *SHORT), undisturbed[1])


def _num_lines(folder):
    path = folder / states.FILE
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.long
def test_probes_without_end_are_ended_and_the_sweep_goes_on(tmp_path) -> None:
    combinations, fits, _ = sweep(tmp_path, *SHORT, "--timeout", "0.2")
    assert {row[2] for row in combinations.values()} == {"timeout"}
    assert {status for status, _ in fits.values()} == {"timeout"}
    assert len(fits) == 2 * len(combinations)  # what was predicted, and the smallest there is


@pytest.mark.long
def test_the_folder_of_another_sweep_is_refused_by_what_differs(undisturbed) -> None:
    folder, before = undisturbed
    flags = [*SHORT, "--precision", "0.5"]
    done = subprocess.run(command(folder, *flags), cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "has a sweep with other settings: precision 0.02 there, 0.5 here" in done.stderr
    assert found(folder) == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpus", "0"], "--gpus 0 is below 1"),
        (["--lengths", "1"], "--lengths 1 is below 2"),
        (["--steps", "0"], "--steps 0 is below 1"),
        (["--backends", "ring", "spiral"], "--backends spiral is not known. Use some of ulysses, ring"),
        (["--warmup", "-1"], "--warmup -1 is below 0"),
        (["--precision", "0"], "--precision 0.0 is not between 0 and 1"),
        (["--precision", "nan"], "--precision nan is not between"),
        (["--timeout", "0"], "--timeout 0.0 is not above 0"),
        (["--memory_budget_gib", "nan"], "--memory_budget_gib nan is not above 0"),
        (["--max_length", "1"], "--max_length 1 is below 2"),
        (["--document_lengths", "/nowhere.csv"], "--document_lengths /nowhere.csv is not a file"),
        (["--minutes", "0"], "--minutes 0.0 is not above 0"),
        (["--compare", "trl", "--document_lengths", __file__], "TRL spreads one document over devices, not several"),
    ],
)
def test_flags_that_make_no_sense_are_refused(tmp_path, capsys, flags, message) -> None:
    assert main(["--output", str(tmp_path / "sweep"), *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "sweep").exists()


def test_an_interrupted_sweep_ends_with_130(tmp_path, monkeypatch, capsys) -> None:
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.max_length.__main__._sweep", interrupted)
    assert main(["--output", str(tmp_path)]) == 130
    assert "the same command goes on from here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("use_cpu", "expected"), [(True, ("tiny", 0.02, 5, 1)), (False, ("Qwen/Qwen3-8B", None, 10, 3))]
)
def test_defaults_depend_on_whether_there_are_gpus(use_cpu, expected) -> None:
    options = _parser().parse_args(["--output", "sweep"])
    _fill_in(options, use_cpu)
    assert (options.model_name_or_path, options.memory_budget_gib, options.steps, options.warmup) == expected
    assert (options.gpus, options.memory, options.precision) == ([1, 2, 4, 8], "balanced", 0.02)
    assert (options.max_length, options.timeout) == (67_108_864, 1800)
    _check(options)
    assert set(options.backends) == set(BACKENDS.spread) - {"gather"}


def test_an_output_that_is_no_folder_is_refused(tmp_path, capsys) -> None:
    (tmp_path / "file").touch()
    assert main(["--output", str(tmp_path / "file")]) == 2
    assert "is not a folder that can be written" in capsys.readouterr().err
    assert main(["--output", str(tmp_path / "file" / "below")]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model_name_or_path", "no/such-model-anywhere"], "no/such-model-anywhere"),
        (["--accelerate_config", "no-such-profile"], "--accelerate_config no-such-profile is neither a file nor one"),
    ],
)
def test_what_is_not_there_is_refused_before_a_probe(tmp_path, flags, message) -> None:
    done = subprocess.run(command(tmp_path, *flags), cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "table.md").exists()

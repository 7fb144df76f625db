"""Ranks that are killed, hang, stop or raise in the middle of a step, under the launchers that there are."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from longctx.launch.failures import _is_consequence
from longctx.launch.spawn import spawn
from longctx.train import main
from longctx.training.checkpoint.folder import RunRecord
from tests.hosts import wait_until
from tests.training.test_resume import values, weights
from tests.training.test_training import COMMON, make_documents, write_jsonl

BOUND = 30
"""Seconds from a fault to the end of all ranks, by the promise."""
TIMEOUT = 5
"""Seconds of --ddp_timeout."""
OWN = [sys.executable, "-m"]
TORCHRUN = ["torchrun", "--standalone", "--nproc_per_node", "2", "-m"]
STARTS = {"ours": OWN, "torchrun": TORCHRUN}
SAVING = ["--save_strategy", "steps", "--save_steps", "2"]
RING, ULYSSES = ["--sp", "2", "--sp_backend", "ring"], ["--sp", "2", "--sp_backend", "ulysses"]


@pytest.fixture
def flags(models, tmp_path):
    return flags_of(models, tmp_path)


def flags_of(models, tmp_path):
    data = write_jsonl(tmp_path / "data.jsonl", make_documents([90, 7, 41, 130, 64, 2, 33, 17, 88, 120]))
    flags = [*COMMON, "--dataset_name", data, "--model_name_or_path", models["GQA 4:2"], "--max_length", "160"]
    return [*flags, "--overlong", "split", "--output_dir", str(tmp_path / "out")]


def run(start, flags, fault=None, **environment):
    """Exit code, all lines, and the seconds from the fault to the end."""
    env = os.environ | {"OMP_NUM_THREADS": "1"} | ({"FAULT": fault} if fault else {}) | environment
    printed = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run([*start, "tests.faulty_train", *flags], env=env, timeout=500, **printed)
    ended = time.time()
    met = re.search(r"FAULT at ([\d.]+)", done.stdout)
    assert (met is not None) == (fault is not None), done.stdout
    return done.returncode, done.stdout, ended - float(met[1]) if met else 0.0


def lines_of_error(output):
    return [line for line in output.splitlines() if "longctx: error: " in line]


@pytest.mark.long
@pytest.mark.parametrize(("start", "layout"), [("ours", ULYSSES), ("torchrun", RING), ("torchrun", ULYSSES)], ids=str)
def test_a_killed_rank_ends_the_run_and_is_named(start, layout, flags):
    """As does the run of tests/launch/test_security_launch.py."""
    check_killed(start, *run(STARTS[start], [*flags, *layout, *SAVING], "kill 1 3"))


@pytest.mark.long
def test_the_first_rank_that_is_left_gives_the_folder_free(flags, tmp_path):
    """On another host, a run that resumes could not tell that rank 0 has died; here, no launcher ends rank 1."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    common = {"OMP_NUM_THREADS": "1", "FAULT": "kill 0 3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    command = [*OWN, "tests.faulty_train", *flags, *RING, *SAVING]
    ranks = [
        subprocess.Popen(command, env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    assert [rank.wait(timeout=300) for rank in ranks] == [-signal.SIGKILL, 1]
    assert RunRecord.read(tmp_path / "out").pid is None
    assert (tmp_path / "out" / "checkpoint-2").is_dir()


def check_killed(start, code, output, seconds, checkpoint="checkpoint-2"):
    """The end of a run with `SAVING` whose rank 1 was killed, by default in its third step."""
    assert code == 1
    assert seconds < BOUND
    assert output.count("Traceback (most recent call last)") == (start == "torchrun"), output  # the launcher's own
    (error,) = lines_of_error(output)
    how = "was killed by SIGKILL" if start == "ours" else "has died"
    assert re.search(rf"rank 1 \(pid \d+.*\) {how}.*out-of-memory killer.*auto goes on from .*{checkpoint}", error)
    if start == "ours":
        assert output.rstrip().endswith(error)
    else:
        _, _, cause = output.rpartition("Root Cause")
        assert re.search(r"rank +: 1 ", cause)
        assert "(SIGKILL)" in cause


@pytest.mark.long
def test_a_rank_that_is_stuck_ends_once_another_one_was_killed(flags):
    """Over NCCL, a collective may wait for a dead rank without an error. torchrun itself would wait for 30 s."""
    code, output, seconds = run(TORCHRUN, [*flags, *RING, *SAVING], "kill 1 3, hang 0 3")
    assert code == 1
    assert seconds < BOUND
    assert re.search(r"Root Cause.*rank +: 1 .*\(SIGKILL\)", output, re.DOTALL)


@pytest.mark.long
def test_a_worker_that_the_launcher_stops_is_not_the_cause(flags):
    flags = [*flags, *RING, *SAVING, "--dataloader_num_workers", "1", "--max_steps", "40"]
    check_killed("ours", *run(OWN, flags, "kill 1 3, stopped worker 0 3"))


@pytest.mark.long
@pytest.mark.parametrize(("start", "layout"), [("ours", ULYSSES), ("torchrun", RING)], ids=str)
def test_the_error_of_the_rank_that_raises_is_the_one_shown(start, layout, flags):
    code, output, seconds = run(STARTS[start], [*flags, *layout], "raise 1 3")
    assert code == 1
    assert seconds < BOUND
    assert output.count("\n[rank1]: RuntimeError: the fault of this test\n") == 1
    assert "[rank0]" not in output
    error, *repeated = [line.partition("longctx: error: ")[2] for line in lines_of_error(output)]
    assert "rank 1 (pid " in error
    assert "stopped with RuntimeError: the fault of this test. There is no checkpoint in " in error
    assert repeated == [error] * (start == "torchrun")  # with the traceback, in its report


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "start", "layout"),
    [("hang", "ours", RING), ("hang", "torchrun", ULYSSES), ("stop", "ours", ULYSSES), ("stop", "torchrun", RING)],
    ids=str,
)
def test_a_rank_that_does_not_come_is_named_with_its_place(fault, start, layout, flags):
    flags = [*flags, *layout, "--ddp_timeout", str(TIMEOUT)]
    code, output, seconds = run(STARTS[start], flags, f"{fault} 1 3")
    assert code == 1
    # An agent gives a stopped process, which cannot end by itself, 30 s to do so.
    assert seconds < TIMEOUT + BOUND + (BOUND if fault == "stop" else 0)
    said = [line.removeprefix("longctx: error: ") for line in lines_of_error(output)]
    name = r"rank 1 \(pid \d+ on .*\)"
    assert re.fullmatch(rf"the run ends after {TIMEOUT} s \(--ddp_timeout\); in no collective: {name}", said[0])
    assert any(re.match(r"  rank 0 in a collective: \S+:\d+ in ", line) for line in said[1:]), output
    stacks = {path.name: path.read_text() for path in Path(flags[flags.index("--output_dir") + 1], "hang").iterdir()}
    if fault == "hang":
        assert re.match(r"  rank 1 in no collective: tests/faulty_train.py:\d+ in meet < ", said[1])
        assert "time.sleep(3600)" in stacks["rank-1.txt"].partition("\n\n")[0]
    else:
        assert said[1] == "  rank 1 without a stack, so stopped or in C code"
    assert set(stacks) == {"rank-0.txt", "rank-1.txt"} - ({"rank-1.txt"} if fault == "stop" else set())
    assert said[-1].endswith("to go on from (--save_steps writes some).")


def spawn_sleepers():
    sys.exit(spawn(2, ["-n1", "-r1", "__import__('time').sleep(60)"], module="timeit"))


def test_a_signal_before_ranks_can_save_ends_the_launcher_with_its_number(capfd):
    launcher = multiprocessing.get_context("fork").Process(target=spawn_sleepers)
    launcher.start()
    wait_until(lambda: len(psutil.Process(launcher.pid).children()) == 2, "two ranks", 60)
    os.kill(launcher.pid, signal.SIGTERM)
    launcher.join()
    assert launcher.exitcode == 128 + signal.SIGTERM
    assert "longctx: error" not in capfd.readouterr().err


def test_an_error_among_its_own_causes_is_looked_at_once():
    """A stream's reader raises its error again, which closes the chain of causes to a circle."""
    error, other = ValueError("line 601"), KeyError("a")
    error.__context__, other.__context__ = other, error
    assert not _is_consequence(error)


@pytest.mark.long
def test_a_killed_data_loader_worker_is_named(flags):
    flags = [*flags, *RING, "--dataloader_num_workers", "1", "--max_steps", "40"]
    code, output, seconds = run(OWN, flags, "worker 1 3")
    assert code == 1
    assert seconds < BOUND
    (error,) = lines_of_error(output)
    assert re.search(r"rank 1 \(pid .* stopped with RuntimeError: DataLoader worker \(pid\(?s?\)? ?\d+\)", error)
    assert "[rank0]" not in output


def test_restarts_on_several_nodes_need_a_store_of_each_attempt(monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert main(["--dry_run"]) == 0
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert main(["--dry_run"]) == 2
    assert "Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("layout", [RING, ULYSSES], ids=str)
def test_torchrun_starts_again_and_the_run_is_the_one_that_went_on(layout, flags, tmp_path):
    flags = [*flags, *layout, "--save_strategy", "steps", "--save_steps", "1", "--resume_from_checkpoint", "auto"]
    restarting = ["torchrun", "--standalone", "--max_restarts", "1", *TORCHRUN[2:]]
    for name, fault in (("whole", None), ("killed", "kill 1 4")):
        once = {"FAULT_ONCE": str(tmp_path / "once")}
        code, output, _ = run(restarting, [*flags, "--output_dir", str(tmp_path / name)], fault, **once)
        assert code == 0, output
    whole, killed = (json.loads(Path(tmp_path, name, "trainer_state.json").read_text()) for name in ("whole", "killed"))
    logs = [[entry for entry in state["log_history"] if "loss" in entry] for state in (whole, killed)]
    assert values(logs[0]) == values(logs[1])
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert all(torch.equal(found[name], expected[name]) for name in expected)

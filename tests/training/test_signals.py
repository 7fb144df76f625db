"""Ctrl-C and a scheduler's signals end a run with a checkpoint, or at once where there is nothing to save."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from transformers import TrainerControl, TrainerState

from longctx.launch.terminal import HAS_STARTED
from longctx.train import main
from longctx.training.callbacks import StopOnSignal
from longctx.training.checkpoint.folder import checkpoints
from tests.training.test_checkpoint import LENGTHS, flags
from tests.training.test_training import make_documents, write_jsonl


@pytest.mark.parametrize(
    ("processes", "number"),
    [
        (1, signal.SIGINT),
        *(
            pytest.param(processes, number, marks=pytest.mark.long)
            for processes, number in ((1, signal.SIGUSR1), (2, signal.SIGTERM), (2, signal.SIGINT))
        ),
    ],
)
def test_a_signal_ends_a_run_with_a_checkpoint_and_another_goes_on(processes, number, models, tmp_path, capsys):
    """Sent to the process that a scheduler knows, which started the ranks; Ctrl-C also to workers, as by a terminal."""
    data = write_jsonl(tmp_path / "data.jsonl", make_documents(LENGTHS))
    given = [*flags(models, data, tmp_path / "out"), "--sp", str(processes), "--save_steps", "1000"]
    given += ["--resume_from_checkpoint", "auto", "--use_cpu", "--dataloader_num_workers", "1"]
    command = [sys.executable, "-m", "longctx.train", *given]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, "--max_steps", "100000"], env=environment, **options) as run:
        lines = []
        for line in run.stdout:
            lines.append(line)
            if re.match(r" *1/100000 ", line):
                os.killpg(run.pid, number) if number == signal.SIGINT else run.send_signal(number)
                break
        after = run.stdout.readlines()
    assert run.returncode == 75, "".join([*lines, *after])
    assert sum(f"longctx: {number.name}: the run finishes step" in line for line in after) == 1
    assert len(after) <= 10, "".join(after)
    lines += after
    (step,) = [int(line.split()[6][:-1]) for line in lines if f"stopped by {number.name} after step" in line]
    assert [path.name for path in checkpoints(tmp_path / "out")] == [f"checkpoint-{step}"]
    page = tmp_path / "out" / "run_report.html"
    assert f"Stopped by {number.name} after step {step} of 100,000" in page.read_text()
    capsys.readouterr()
    assert main([*given, "--max_steps", str(step + 1)]) == 0
    if processes == 1:  # others print it themselves
        assert f"resume    from {tmp_path}/out/checkpoint-{step}" in capsys.readouterr().out
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    logged = [entry for entry in state["log_history"] if "loss" in entry]
    assert [entry["step"] for entry in logged] == list(range(1, step + 2))
    assert f"Finished after {step + 1} steps" in page.read_text()
    assert all(f"<td>{entry['loss']:.4f}</td>" in page.read_text() for entry in (logged[0], logged[-1]))


def test_ctrl_c_before_training_ends_at_once() -> None:
    command = [sys.executable, "-m", "longctx.train"]
    environment = {name: value for name, value in os.environ.items() if name != HAS_STARTED}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, env=environment) as run:
        assert "is starting" in run.stdout.readline()
        run.send_signal(signal.SIGINT)
        printed, errors = run.communicate()
    assert (run.returncode, printed) == (130, "")
    assert errors.strip() == "longctx: interrupted. Nothing more is saved."


def ending_of(step) -> int:
    """Call `step` in a process that handles signals as training does, and return the exit code of the process."""
    if not (process := os.fork()):
        try:
            StopOnSignal(prints=True).on_train_begin(None, TrainerState(), TrainerControl())
            step()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def test_a_second_ctrl_c_ends_a_step_at_once(capfd) -> None:
    def step() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        until = time.monotonic() + 30
        while time.monotonic() < until:
            time.sleep(1)  # goes on after the first signal
            os.kill(os.getpid(), signal.SIGINT)

    assert ending_of(step) == 130
    assert capfd.readouterr().out.count("SIGINT: the run finishes step 1 and saves a checkpoint.") == 1


def test_a_signal_that_comes_twice_at_once_counts_once(capfd) -> None:
    """A terminal sends Ctrl-C to every process, and a launcher may pass it on to the same ones."""

    def step() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        os._exit(7)

    assert ending_of(step) == 7
    assert capfd.readouterr().out.count("SIGINT: the run finishes step 1 and saves a checkpoint.") == 1


def test_handlers_are_those_from_before_once_training_has_ended() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    stop = StopOnSignal(prints=False)
    stop.on_train_begin(None, TrainerState(), TrainerControl())
    stop.restore_handlers()
    assert {number: signal.getsignal(number) for number in before} == before
    assert signal.set_wakeup_fd(-1) == -1

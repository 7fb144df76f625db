"""A run prints one line for each step, to a file as to a terminal."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import termios
from dataclasses import replace
from types import SimpleNamespace

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from longctx.training.peak_memory import GIB, PeakMemory
from longctx.training.progress import StepLines, describe_evaluation

LOGS = {"loss": 2.3456, "tokens_per_second": 12345.6, "tokens_per_second_per_device": 3086.4, "grad_norm": 1.0}
LOGS |= {"learning_rate": 2e-5, "attention_imbalance": 1.02}
PAIRS = {"rewards/accuracies": 0.625, "rewards/margins": -0.1234}
HOST = PeakMemory.of_ranks([(0, 0, 2 * GIB, 0, 0, 24 * GIB), (0, 0, 3 * GIB, 0, 0, 24 * GIB)])
GPU = replace(HOST, allocated=(61 * GIB, 73 * GIB), device_total=(80 * GIB, 80 * GIB))


def follow(output, *, is_first=True, steps=(5, 6), logs=LOGS, memory=HOST, max_steps=10):
    """What a resumed run of these steps, with an evaluation after each, prints on `output`."""
    with contextlib.redirect_stdout(output):
        lines, control = StepLines(SimpleNamespace(peak_memory=memory), ranks_per_node=2), TrainerControl()
        args = TrainingArguments(output_dir="unused", use_cpu=True)
        state = TrainerState(max_steps=max_steps, global_step=steps[0] - 1, is_world_process_zero=is_first)
        lines.on_train_begin(args, state, control)
        for state.global_step in steps:
            lines.on_log(args, state, control, logs=logs | {"loss": 2.3456 + state.global_step})
            for _ in range(2):
                lines.on_prediction_step(args, state, control, eval_dataloader=[1, 2])
            lines.on_log(args, state, control, logs={"eval_loss": 1.5, "eval_runtime": 75.0})
        lines.on_log(args, state, control, logs={"train_runtime": 5000.0, "train_loss": 2.0})
    return output.getvalue() if isinstance(output, io.StringIO) else None


def test_a_file_has_one_plain_line_a_step_under_its_header():
    header, *lines, empty, end = follow(io.StringIO()).splitlines()
    titles = "step loss grad norm learn. rate tokens/s per device memory GiB imbalance time left"
    assert header.split() == titles.split()
    assert [len(line) for line in (lines[0], lines[2])] == [len(header)] * 2
    assert lines[0].split() == ["5/10", "7.346", "1.00", "2.0e-05", "12.3k", "3.09k", "5.0/24.0", "1.02", "0", "s"]
    assert lines[1::2] == [f"evaluated after step {step}: loss 1.5, in 1:15" for step in (5, 6)]
    assert (empty, end) == ("", "trained   2 steps in 1:23:20, mean loss 2 over all 6 steps")
    assert follow(io.StringIO(), is_first=False) == ""


def test_a_gpu_has_its_utilisation_and_its_own_memory():
    _, line, *_ = follow(io.StringIO(), logs=LOGS | {"mfu": 0.4167}, memory=GPU).splitlines()
    assert line.split()[5:8] == ["3.09k", "42%", "73.0/80.0"]


def test_pairs_of_answers_have_their_accuracy_and_margin():
    header, line, *_ = follow(io.StringIO(), logs=LOGS | PAIRS).splitlines()
    assert header.split()[:4] == ["step", "loss", "accuracy", "margin"]
    assert line.split()[1:4] == ["7.346", "62%", "-0.12"]
    evaluated = {"eval_loss": 1.5, **{f"eval_{name}": value for name, value in PAIRS.items()}}
    assert describe_evaluation(evaluated) == "loss 1.5, accuracy 62.5%, margin -0.1234"


def test_the_header_comes_again():
    printed = follow(io.StringIO(), steps=range(1, 22), max_steps=30).splitlines()
    headers = [index for index, line in enumerate(printed) if line.split()[:1] == ["step"]]
    assert headers == [0, 1 + 2 * 20]


def test_the_time_left_is_that_of_the_steps_after_the_first(monkeypatch):
    """The first of 10 steps takes 100 s, and the others take 2 s each."""
    times = iter([0, 100, 102, 104])
    monkeypatch.setattr("longctx.training.progress.time", SimpleNamespace(monotonic=lambda: next(times)))
    left = [line.split()[-2:] for line in follow(io.StringIO(), steps=(1, 2, 3)).splitlines() if "/10 " in line]
    assert left[1:] == [["16", "s"], ["14", "s"]]


def read_all(leader):
    """What has been written to a terminal until its other end is closed."""
    seen = b""
    with contextlib.suppress(OSError):  # that it is closed
        while read := os.read(leader, 2**16):
            seen += read
    os.close(leader)
    return seen.decode()


@pytest.mark.parametrize(
    ("columns", "title", "no_color", "pairs"),
    [(80, "mem GiB", "", {}), (80, "mem GiB", "", PAIRS), (120, "memory GiB", "", {}), (120, "memory GiB", "1", {})],
)
def test_a_row_fits_into_the_terminal_and_is_coloured(columns, title, no_color, pairs, monkeypatch):
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("COLUMNS", str(columns))  # rich asks the standard streams, which are pytest's here
    monkeypatch.setenv("TERM", "xterm-256color")
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (24, columns))
    with open(follower, "w") as terminal:
        follow(terminal, logs=LOGS | {"mfu": 0.4} | pairs, memory=GPU, steps=(5, 6, 1000), max_steps=1000)
    seen = read_all(leader)
    assert "evaluation: batch 1 of 2" in seen
    yellow = re.search(r"\x1b\[33m *73.0/80.0\x1b\[0m", seen)
    assert (yellow is None) == bool(no_color), "memory that is nearly full is yellow"
    assert bool(re.search(r"\x1b\[[\d;]*3\d", seen)) != bool(no_color)
    lines = re.sub(r"\x1b\[[\d;]*m", "", seen).splitlines()
    assert title in lines[0]
    assert max(map(len, lines)) <= columns

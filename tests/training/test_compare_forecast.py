"""What a step took, printed beside what was predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import TrainerControl, TrainerState
from trl import SFTConfig

from longctx.forecast.cost import Cost
from longctx.machine.here import Machine
from longctx.training.callbacks import CompareForecast

GIB = 2**30
SPEED = 1766.4
EXPECTED = Cost(
    device={"parameters": 40.0 * GIB, "checkpoints": 10.0 * GIB, "fixed": 5.0 * GIB},
    host={},
    moment="loss",
    host_moment="step",
    seconds={"linear": 4.0},
    disk={},
    length=1,
    tokens=round(4 * SPEED),
    world_size=1,
    machine=Machine.of("H100", 1),
)
LOGS = {"tokens_per_second_per_device": 1702.2, "peak_memory_gib_max": 48.12}


def printed(capsys, expected, logs, *, steps, max_steps=20):
    """Return what is printed after each of these steps."""
    callback, lines = CompareForecast(expected), []
    for step in steps:
        state = TrainerState(global_step=step, max_steps=max_steps)
        callback.on_log(SFTConfig(use_cpu=True, bf16=False), state, TrainerControl(), logs=logs)
        lines.append(capsys.readouterr().out)
    return lines


LINE = (
    "longctx: measured 1,702 tokens/s a device, and 1,766 were predicted; 48.1 GiB of tensors on the fullest GPU, and "
    "50.0 were predicted\n"
)


def test_the_third_step_is_compared_once(capsys):
    assert printed(capsys, EXPECTED, LOGS, steps=[1, 2, 3, 4, 5]) == ["", "", LINE, "", ""]


@pytest.mark.parametrize(("steps", "max_steps"), [([1, 2], 2), ([10, 20], 20)])
def test_a_short_run_is_compared_at_its_end_and_one_that_logs_rarely_at_its_first_entry(capsys, steps, max_steps):
    lines = printed(capsys, EXPECTED, LOGS, steps=steps, max_steps=max_steps)
    assert lines == (["", LINE] if max_steps == 2 else [LINE, ""])


def test_other_entries_of_the_log_are_passed_over(capsys):
    of_the_whole_run = {"train_loss": 1.0, "tokens_per_second_per_device": 1702.2}
    for logs in ({"eval_loss": 1.0}, of_the_whole_run):
        assert printed(capsys, EXPECTED, logs, steps=[3]) == [""]


def test_only_what_is_predicted_is_compared(capsys):
    unknown = replace(EXPECTED, machine=Machine.of("Some Other GPU", 1))
    assert printed(capsys, unknown, LOGS, steps=[3]) == [
        "longctx: measured 48.1 GiB of tensors on the fullest GPU, and 50.0 were predicted\n"
    ]

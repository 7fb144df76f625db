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


def printed(capsys, expected, logs, *given, steps=(3,), max_steps=20, **options):
    """Return what CompareForecast prints after each of these steps. It gets `given` and `options` as arguments."""
    callback, lines = CompareForecast(expected, *given, **options), []
    for step in steps:
        state = TrainerState(global_step=step, max_steps=max_steps)
        callback.on_log(SFTConfig(use_cpu=True, bf16=False), state, TrainerControl(), logs=logs)
        lines.append(capsys.readouterr().out)
    return lines


LINE = (
    "longctx: measured 1,702 tokens/s a device, and 1,766 were predicted; 48.1 GiB of tensors on the fullest GPU, and "
    "50.0 were predicted\n"
)


def test_the_third_step_is_compared_once_or_the_last_of_a_short_run_or_the_first_entry_of_a_rare_log(capsys):
    assert printed(capsys, EXPECTED, LOGS, steps=[1, 2, 3, 4, 5]) == ["", "", LINE, "", ""]
    assert printed(capsys, EXPECTED, LOGS, steps=[1, 2], max_steps=2) == ["", LINE]
    assert printed(capsys, EXPECTED, LOGS, steps=[10, 20]) == [LINE, ""]


def test_only_what_is_predicted_of_a_step_is_compared(capsys):
    of_the_whole_run = {"train_loss": 1.0, "tokens_per_second_per_device": 1702.2}
    for logs in ({"eval_loss": 1.0}, of_the_whole_run):
        assert printed(capsys, EXPECTED, logs, steps=[3]) == [""]
    unknown = replace(EXPECTED, machine=Machine.of("Some Other GPU", 1))
    assert printed(capsys, unknown, LOGS, steps=[3]) == [
        "longctx: measured 48.1 GiB of tensors on the fullest GPU, and 50.0 were predicted\n"
    ]


@pytest.mark.parametrize(("reserved", "says"), [(76, False), (78, True)])
def test_memory_that_is_nearly_full_is_said(capsys, reserved, says):
    """From 97% of the 79.2 GiB of an H100, by what the allocator of the fullest rank has reserved."""
    [line] = printed(capsys, EXPECTED, LOGS, lambda: (10 * GIB, reserved * GIB))
    assert (f"memory is nearly full: {reserved}.0 of 79.2 GiB" in line) == says


def test_what_was_measured_is_learned_where_a_kernel_is_named(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for kernel, files in (("", 0), ("cuDNN", 1)):
        printed(capsys, EXPECTED, LOGS, kernel=kernel)
        assert len(list(tmp_path.rglob("*.json"))) == files

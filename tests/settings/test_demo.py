"""The demo on a machine with fewer GPUs than its --sp, and its closing line about exactness."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from longctx.run.training import _first_step_report
from longctx.settings.flags import parse_flags
from longctx.settings.profile import read_profile
from longctx.settings.resolve import resolve
from tests.settings.test_flags import OWN, resolved


def test_the_demo_runs_on_the_cpu_where_its_processes_have_no_gpu_each(monkeypatch):
    """The process that starts the ranks and every rank make the same choice, and print it."""
    monkeypatch.setattr("longctx.settings.resolve.device_count", lambda: 1)
    group = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    for env in ({}, group):
        run = resolve(parse_flags(["--sp", "4"]), read_profile(dict(env)), env)
        assert (run.use_cpu, run.dims.sp, run.settings["bf16"]) == (True, 4, False)
        assert any("runs on the CPU: 4 processes need 4 GPUs, and 1 is visible" in note for note in run.notes)
    run = resolved("--sp", "1")
    assert (run.use_cpu, run.settings["bf16"]) == (False, True)


@pytest.mark.parametrize("gpus", [2, 3])
def test_the_demo_shares_a_sequence_over_the_gpus_that_a_launcher_has_taken(gpus, monkeypatch):
    monkeypatch.setattr("longctx.settings.resolve.device_count", lambda: gpus)
    env = {"RANK": "1", "WORLD_SIZE": str(gpus), "LOCAL_WORLD_SIZE": str(gpus)}
    run = resolve(parse_flags(["--sp", "4"]), read_profile(dict(env)), env)
    assert (run.use_cpu, run.dims.sp) == (False, gpus)
    assert any(f"the demo runs at sp {gpus}" in note for note in run.notes)


@pytest.mark.parametrize(
    ("bf16", "said"), [(True, "step 1 in bf16 matched one device in fp32"), (False, "step 1 matched")]
)
def test_the_demos_closing_line_says_what_was_computed_in_bf16(bf16, said, monkeypatch):
    trainer = SimpleNamespace(
        args=SimpleNamespace(bf16=bf16, label_smoothing_factor=0.0),
        state=SimpleNamespace(log_history=[{}, {"loss": 2.002, "grad_norm": 4.0}]),
    )
    monkeypatch.setattr("longctx.run.training.first_step_batches", lambda *_: [])
    monkeypatch.setattr("longctx.run.training.load_model", lambda *_: None)
    monkeypatch.setattr("longctx.run.training.single_device_step", lambda *_: (2.0, 4.0))
    result, numbers = _first_step_report(trainer, resolved())
    assert result.startswith(said)
    assert result.endswith("to 1e-03")
    assert numbers == "loss 2.002000 and 2.000000, gradient norm 4.000000 and 4.000000"


def test_what_a_user_names_is_refused_instead(monkeypatch):
    """A model of one's own, or the device by its flag."""
    monkeypatch.setattr("longctx.settings.resolve.device_count", lambda: 1)
    for named in (OWN, ["--use_cpu", "False"]):
        with pytest.raises(ValueError, match="4 processes on this machine need 4 GPUs, and 1 are visible"):
            resolved(*named, "--sp", "4")

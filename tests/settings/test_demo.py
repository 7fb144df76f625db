"""The demo on a machine with fewer GPUs than its --sp."""

from __future__ import annotations

import pytest

from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
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


def test_what_a_user_names_is_refused_instead(monkeypatch):
    """A model of one's own, or the device by its flag."""
    monkeypatch.setattr("longctx.settings.resolve.device_count", lambda: 1)
    for named in (OWN, ["--use_cpu", "False"]):
        with pytest.raises(ValueError, match="4 processes on this machine need 4 GPUs, and 1 are visible"):
            resolved(*named, "--sp", "4")

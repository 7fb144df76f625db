"""A run that goes on takes what auto chose when it began; on other devices, or with other flags, auto chooses anew."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from longctx.training.checkpoint.files import read_manifest, write_manifest
from tests.workers import run_main

FLAGS = ["--model_name_or_path", "tiny", "--dataset_name", "stdlib", "--overlong", "split", "--max_length", "512"]
AUTO = ["--sp", "auto", "--memory", "auto"]
OTHER = {"sp": 2, "memory": "balanced", "num_processes": 2, "gradient_checkpointing": True}
"""What the forecast does not choose for these flags."""


@pytest.fixture(scope="module")
def began(tmp_path_factory):
    """The checkpoint of a run of two processes whose manifest says that auto chose OTHER, and what it really chose."""
    folder = tmp_path_factory.mktemp("run")
    run_main(2, "longctx.train", [*FLAGS, *AUTO, "--max_steps", "1", "--output_dir", str(folder)])
    checkpoint = folder / "checkpoint-1"
    manifest = read_manifest(checkpoint)
    assert manifest.choice == json.loads((folder / "run.json").read_text())["choice"]
    write_manifest(checkpoint, replace(manifest, choice=manifest.choice | {"chosen": OTHER, "reason": "by forecast"}))
    return checkpoint, manifest.choice["chosen"]


def resumed(checkpoint, *flags):
    arguments = [*FLAGS, "--output_dir", str(checkpoint.parent), "--resume_from_checkpoint", str(checkpoint), *flags]
    return resolve(parse_flags(arguments), read_profile({}), {})


@pytest.mark.long
def test_a_resumed_run_takes_what_was_chosen_when_it_began(began) -> None:
    checkpoint, forecast = began
    assert forecast != OTHER
    run = resumed(checkpoint, *AUTO, "--num_processes", "2")
    assert {name: run.settings[name] for name in OTHER} == OTHER
    assert run.layout_reason == "by forecast, as when the run began"


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ((*AUTO, "--num_processes", "1"), "had 2 × CPU, and this one has 1 × CPU"),
        (("--sp", "1", "--memory", "auto", "--num_processes", "2"), "was started with other flags"),
        ((*AUTO, "--num_processes", "2", "--activation_checkpointing", "False"), "was started with other flags"),
    ],
    ids=["other devices", "another flag is auto", "a flag that was chosen is given"],
)
def test_auto_chooses_anew_on_other_devices_and_with_other_flags(began, flags, why) -> None:
    checkpoint, _ = began
    run = resumed(checkpoint, *flags)
    assert f"auto chooses anew: the run of {checkpoint} {why}" in run.notes
    assert run.dims.sp == 1
    asked_for = resumed(checkpoint, "--sp", "2", "--memory", "balanced", "--num_processes", "2")
    assert not [note for note in asked_for.notes if "auto" in note]

"""Odd input that must be refused in one line, before torch is imported, or be taken with the meaning that it has."""

from __future__ import annotations

import json
import re

import pytest

from longctx.settings.data import Source
from longctx.settings.launcher import read_profile
from longctx.settings.read import Refused, parse_flags
from longctx.settings.rules import fill

HUGE = "9" * 400
"""A whole number that no float holds."""
TINY = "model_name_or_path: tiny"


def _bomb() -> str:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"{n}: &{n} [{', '.join([f'*{p}'] * 10)}]" for p, n in zip("abcdefgh", "bcdefghi", strict=True)]
    return "\n".join([*lines, "max_length: *i"])


WRONG_FILES = {
    "a number beyond floats": (f"learning_rate: {HUGE}", "is out of range"),
    "an empty integer": ('max_steps: !!int ""', "a value does not fit its !!tag"),
    "no truth value": ("packing: !!bool perhaps", "a value does not fit its !!tag"),
    "no time": ("run_name: !!timestamp soon", "a value does not fit its !!tag"),
    "a list as a mapping": ("!!map [a]", "expected a mapping node"),
    "aliases of aliases": (_bomb(), "more than 100,000 values"),
    "a list in itself": ("report_to: &a [*a]", "more than 100,000 values"),
    "a megabyte": (f"run_name: {'x' * 10**6}", "has 1,000,010 bytes, and settings at most 1,000,000"),
    "a variable without a name": ('env: {"": x}', "env has a variable that cannot be set"),
    "a variable with an equals sign": ("env: {A=B: x}", "env has a variable that cannot be set"),
    "no block of variables": ("env: 0", "env is 0, expected a block"),
    "keys of several types": (f"{TINY}\ndatasets: [{{path: x, 3: 1, other: 2}}]", "sets 3, which is not"),
    "a list as a name": (f"{TINY}\ndatasets: [{{path: x, name: [a]}}]", "expected one value"),
    "a truth value as a share": (f"{TINY}\ndatasets: [{{path: x, fraction: true}}]", "expected a number"),
    "no path": (f"{TINY}\ndatasets: [{{path: ''}}]", "is not a data set"),
    "a data set without a share": (f"{TINY}\ndatasets: [{{path: x, fraction: 0}}]", "--datasets x with fractions"),
    "no service and another": ("report_to: [none, tensorboard]", "has none beside others"),
    "all services and another": ("report_to: [all, tensorboard]", "has all beside others"),
}


def filled(folder, text):
    """The settings of a run whose file of flags has this text."""
    file = folder / "run.yaml"
    file.write_text(text)
    return fill(parse_flags(["--config", str(file)]), read_profile({}))


@pytest.mark.parametrize("name", WRONG_FILES)
def test_odd_files_are_refused(name, tmp_path):
    text, message = WRONG_FILES[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        filled(tmp_path, text)


def test_entries_of_data_sets_are_read_as_flags_are(tmp_path):
    entry = "{path: x, name: 20220301, split: null, fraction: 5e-1}"
    settings = filled(tmp_path, f"{TINY}\ndatasets: [{entry}]")
    assert settings["datasets"] == [Source(path="x", name="20220301", split="train", fraction=0.5)]
    assert filled(tmp_path, f"{TINY}\ndataset_name: x\ndatasets: []")["dataset_name"] == "x"


def test_two_files_of_flags_are_refused(tmp_path):
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text("max_steps: 3")
    with pytest.raises(ValueError, match="--config is given 2 times"):
        parse_flags(["--config", str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml")])


def test_a_mistake_has_one_line_of_a_refusal():
    with pytest.raises(Refused) as refused:
        parse_flags(["--sp", "2\nlongctx: error: another", "--max_steps", "x"])
    assert len(str(refused.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimization": {"stage": 2}, "optimizer.params.lr": 0.1}, "optimizer.params.lr has a dot"),
        ({"zero_optimization": {"stage": 2}, "comms_logger": {"x": "a" * 64000}}, "at most 64,000 fit the environment"),
    ],
)
def test_odd_files_of_deepspeed_are_refused(config, message, tmp_path):
    file = tmp_path / "zero.json"
    file.write_text(json.dumps(config))
    env = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
    with pytest.raises(ValueError, match=message):
        read_profile(env)

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
    "keys of several types": (
        "model_name_or_path: tiny\ndatasets: [{path: x, 3: 1, other: 2}]",
        "sets 3, which is not",
    ),
    "a list as a name": ("model_name_or_path: tiny\ndatasets: [{path: x, name: [a]}]", "expected one value"),
    "a truth value as a share": (
        "model_name_or_path: tiny\ndatasets: [{path: x, fraction: true}]",
        "expected a number",
    ),
    "no path": ("model_name_or_path: tiny\ndatasets: [{path: ''}]", "is not a data set"),
    "a data set without a share": (
        "model_name_or_path: tiny\ndatasets: [{path: x, fraction: 0}]",
        "--datasets x with fractions",
    ),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_odd_files_are_refused(name, tmp_path):
    text, message = WRONG_FILES[name]
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        fill(parse_flags(["--config", str(file)]), read_profile({}))


def test_entries_of_data_sets_are_read_as_flags_are(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model_name_or_path: tiny\ndatasets: [{path: x, name: 20220301, split: null, fraction: 5e-1}]")
    settings = fill(parse_flags(["--config", str(file)]), read_profile({}))
    assert settings["datasets"] == [Source(path="x", name="20220301", split="train", fraction=0.5)]


def test_an_empty_list_of_data_sets_leaves_the_one_that_is_named(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model_name_or_path: tiny\ndataset_name: x\ndatasets: []")
    assert fill(parse_flags(["--config", str(file)]), read_profile({}))["dataset_name"] == "x"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config="], "--config  is neither a file"),
        (["--model_name_or_path="], "--model_name_or_path  is empty"),
        (["--dataset_name", ""], "--dataset_name  is empty"),
    ],
)
def test_words_that_would_go_unheard_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        parse_flags(arguments)


def test_two_files_of_flags_are_refused(tmp_path):
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text("max_steps: 3")
    with pytest.raises(ValueError, match="--config is given 2 times"):
        parse_flags(["--config", str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml")])


@pytest.mark.parametrize("word", ["none", "all"])
def test_a_word_for_services_stands_alone(word, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(f"report_to: [{word}, tensorboard]")
    with pytest.raises(ValueError, match=f"has {word} beside others"):
        fill(parse_flags(["--config", str(file)]), read_profile({}))


def test_a_number_beyond_floats_is_no_error_in_an_object():
    assert parse_flags(["--model_init_kwargs", f'{{"a": {HUGE}}}'])["model_init_kwargs"] == {"a": int(HUGE)}


def test_a_mistake_has_one_line_of_a_refusal():
    with pytest.raises(Refused) as refused:
        parse_flags(["--sp", "2\nlongctx: error: another", "--max_steps", "x"])
    assert len(str(refused.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "FP16"}, "not verified"),
        ({"ACCELERATE_MIXED_PRECISION": "half"}, "mixed_precision half .* is not supported. Use bf16"),
        ({"ACCELERATE_USE_FSDP": "on"}, "use_fsdp on .* Use true or false"),
        ({"ACCELERATE_USE_DEEPSPEED": "t"}, "use_deepspeed t .* Use true or false"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "3"}, "fsdp_version 3 .* Use 2"),
        ({"RANK": "first", "WORLD_SIZE": "2"}, "RANK is first, expected a whole number"),
    ],
)
def test_odd_variables_are_refused(env, message):
    with pytest.raises(ValueError, match=message):
        read_profile(env)


def test_a_switch_is_on_for_each_word_that_accelerate_takes():
    fsdp = {"ACCELERATE_MIXED_PRECISION": "BF16", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    values = read_profile(fsdp | {"FSDP_ACTIVATION_CHECKPOINTING": "on", "FSDP_OFFLOAD_PARAMS": "t"}).values
    assert {"bf16", "activation_checkpointing", "offload_param_device"} <= set(values)


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

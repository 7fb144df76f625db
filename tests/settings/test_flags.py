"""Flags of the command line and of a file, their defaults, and what a run does with them. Rows: test_schema.py."""

from __future__ import annotations

import os

import pytest
import yaml

from longctx.attention.backends import BACKENDS
from longctx.settings.dpo import DPO
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from longctx.settings.rules import demo
from longctx.settings.schema import FLOAT, FLOATS
from longctx.train import main

OWN = ["--model_name_or_path", "tiny", "--dataset_name", "stdlib"]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr("longctx.settings.resolve.device_count", lambda: 0)


def resolved(*arguments):
    return resolve(parse_flags(arguments), read_profile({}), {})


def write(folder, text):
    path = folder / "run.yaml"
    path.write_text(text)
    return str(path)


# ------------------------------------------------------------------------------------------------
# What is given
# ------------------------------------------------------------------------------------------------


def test_command_line_wins_over_the_file_and_both_are_explicit(tmp_path):
    path = write(tmp_path, "max_steps: 5\nlearning_rate: 2e-5\nsp: 2\npacking: false\n")
    given = ("--config", path, "--max_steps", "7", "--sp_backend=ring", "--run_name", "--my own run")
    flags = parse_flags(given)
    assert [flags[name] for name in ("max_steps", "learning_rate", "sp", "packing")] == [7, 2e-5, 2, False]
    assert flags.explicit == {"max_steps", "learning_rate", "sp", "packing", "sp_backend", "run_name"}
    assert (flags["run_name"], flags.arguments) == ("--my own run", given)


@pytest.mark.parametrize(
    ("arguments", "value"),
    [([], True), (["--no_gradient_checkpointing"], False), (["--no-gradient-checkpointing"], False)]
    + [(["--gradient_checkpointing", word], word in ("True", "true", "1")) for word in ("True", "true", "False", "0")]
    + [(["--gradient_checkpointing"], True)],
)
def test_booleans(arguments, value):
    assert parse_flags(arguments)["gradient_checkpointing"] is value


@pytest.mark.parametrize(("given", "value"), [("False", False), ("me/runs", "me/runs")])
def test_a_space_or_none(given, value, tmp_path):
    path = write(tmp_path, f"trackio_static_space_id: {given}")
    for arguments in (["--trackio_static_space_id", given], ["--config", path]):
        assert parse_flags(arguments)["trackio_static_space_id"] == value


def test_yaml_null_list_mapping_and_unquoted_no(tmp_path, monkeypatch):
    monkeypatch.delenv("LONGCTX_TEST", raising=False)
    text = "max_length: null\nreport_to: [tensorboard]\neval_strategy: no\nmodel_init_kwargs: {rms_norm_eps: 1.0e-5}\n"
    text += "learning_rate: 1e-5\nlr_scheduler_kwargs: '{\"num_cycles\": 2}'\nlora_target_modules: q_proj\n"
    expected = {"report_to": ["tensorboard"], "eval_strategy": "no", "model_init_kwargs": {"rms_norm_eps": 1e-5}}
    expected |= {"lr_scheduler_kwargs": {"num_cycles": 2}, "lora_target_modules": ["q_proj"]}
    expected["learning_rate"] = 1e-5  # text in YAML 1.1
    flags = parse_flags(["--config", write(tmp_path, text + "env:\n  LONGCTX_TEST: 3\n")])
    assert {name: flags[name] for name in flags.explicit} == expected
    assert flags["max_length"] is None
    assert os.environ.pop("LONGCTX_TEST") == "3"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_step: 5\n", ("max_step", "Did you mean --max_steps?")),
        ("num_generations: 4\n", ("num_generations", "one of another method: longctx train does", "preference.md")),
        ("loss_type: sigmoid\n", ("run.yaml is refused", "of longctx dpo", "Use nll or chunked_nll")),
        ("sp: 2.5\n", ("run.yaml is not understood. Use a whole number",)),
        ("max_steps: true\n", ("max_steps True in",)),
        ("max_steps: 1\nmax_steps: 2\n", ("YAML", "max_steps stands there twice")),
        ("dataset_test_split: [a, b]\n", ("dataset_test_split to ['a', 'b']", "one value", "joined: test+validation")),
        ("dataset_name: [a, b]\n", ("dataset_name to ['a', 'b']", "Several data sets are --datasets.")),
        ("overlong: shorten\n", ("run.yaml is unknown", "Use raise, truncate, drop, split or turns")),
        ("engine: fsdp3\n", ("engine fsdp3 in", "Use auto, deepspeed or fsdp2")),
        ("- 5\n", ("list", "'flag: value'")),
        ("a: [\n", ("run.yaml", "YAML")),
        ("env: 5\n", ("env", "VARIABLE: value")),
        ("dataset_weights: [a, b]\n", ("dataset_weights ['a', 'b']", "list of numbers")),
        ("accelerate_config: fsdp2\n", ("accelerate_config fsdp2", "command line")),
    ],
)
def test_wrong_files_are_refused(text, message, tmp_path, capsys):
    assert main(["--config", write(tmp_path, text)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") <= 1 or "YAML" in error
    for part in message:
        assert part in error


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"none\.yaml is neither a file nor one of the recipes, such as .*gemma"):
        parse_flags(["--config", str(tmp_path / "none.yaml")])


# ------------------------------------------------------------------------------------------------
# Defaults
# ------------------------------------------------------------------------------------------------


def test_without_model_and_data_the_demo_preset_applies_and_is_printed():
    run = resolved()
    assert run.flags.is_demo
    assert {name: run.settings[name] for name in demo()} == demo()
    preset = next(line for line in run.describe() if line.startswith("preset"))
    for name in ("model_name_or_path tiny", "dataset_name stdlib", "max_length 8192", "overlong split", "max_steps 20"):
        assert f"--{name}" in preset


def test_a_run_of_ones_own_packs_up_to_the_models_context_and_says_so():
    run = resolved(*OWN)
    assert not run.flags.is_demo
    assert run.settings["max_length"] == run.model_config.max_position_embeddings
    assert run.settings["overlong"] == "raise"
    ours = {"packing": True, "max_length": run.settings["max_length"], "logging_steps": 1}
    assert run.changed == ours | {"per_device_train_batch_size": 1}
    defaults = next(line for line in run.describe() if line.startswith("defaults"))
    assert f"--max_length {run.settings['max_length']} (TRL: 1024)" in defaults
    assert "--packing True (TRL: False)" in defaults
    assert "--per_device_train_batch_size 1 (TRL: 8)" in defaults
    assert "--logging_steps 1 (TRL: 10)" in defaults


@pytest.mark.parametrize(("given", "eval_steps"), [("", 10), ("--eval_steps 4", 4), ("--logging_steps 3", None)])
def test_evaluation_has_trls_interval_and_a_batch_of_one_sequence(given, eval_steps):
    run = resolved(*OWN, "--eval_strategy", "steps", "--dataset_test_split", "train", *given.split())
    assert (run.settings["eval_steps"], run.settings["per_device_eval_batch_size"]) == (eval_steps, 1)
    arguments = run.training_arguments()
    assert (arguments["eval_steps"] or arguments["logging_steps"]) == (eval_steps or 3)


DEFAULTS = {
    "balance_packs": True,
    "dataset_stopping_strategy": "first_exhausted",
    "ddp_timeout": 1800,
    "hub_strategy": "every_save",
    "metric_for_best_model": "loss",
    "on_nonfinite": "stop",
    "overlong": "raise",
    "profile_steps": 3,
    "report_to": "none",
    "router_aux_loss_coef": None,
}


def test_defaults_that_the_pages_name():
    evaluates = ["--eval_strategy", "steps", "--dataset_test_split", "train", "--early_stopping_patience", "3"]
    found = resolved(*OWN, *evaluates).settings
    assert {name: getattr(found[name], "value", found[name]) for name in DEFAULTS} == DEFAULTS


def test_what_is_set_is_kept():
    given = {"packing": False, "max_length": 64, "per_device_train_batch_size": 2, "logging_steps": 5}
    run = resolved(*OWN, *(word for name, value in given.items() for word in (f"--{name}", str(value))))
    assert ({name: run.settings[name] for name in given}, run.changed) == (given, {})


@pytest.mark.parametrize(
    ("given", "missing"), [("model_name_or_path", "dataset_name"), ("dataset_name", "model_name_or_path")]
)
def test_one_of_model_and_data_asks_for_the_other(given, missing):
    with pytest.raises(ValueError, match=f"--{missing} is missing"):
        resolved(f"--{given}", "tiny")


@pytest.mark.parametrize("backend", BACKENDS.spread)
def test_ulysses_runs_on_zero_3_and_other_backends_on_fsdp2_unless_asked(backend):
    run = resolved(*OWN, "--sp", "4", "--sp_backend", backend)
    assert (run.engine, run.zero_stage) == (("deepspeed", 3) if backend == "ulysses" else ("fsdp2", None))


def test_no_clipping_still_measures_the_norm():
    assert resolved("--max_grad_norm", "0").settings["max_grad_norm"] == float("inf")


# ------------------------------------------------------------------------------------------------
# Every flag
# ------------------------------------------------------------------------------------------------

NUMBERS = [flag.name for flag in DPO.flags.values() if flag.kind in (FLOAT, FLOATS) and not flag.values]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_are_not_finite_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"--{name} {value} is out of range: expected a finite number"):
        parse_flags([f"--{name}={value}"], DPO)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("learning_rate", "-1e-3", "is out of range. Use a number of at least 0 and below 3.4e+38."),
        ("max_grad_norm", "-1", "is out of range: 0 stands for no clipping. Use a number of at least 0."),
        ("model_name_or_path", "", "is empty. Name one, or leave the flag out."),
        ("data_seed", "4294967296", "is out of range. Use a number of at least 0 and up to 4,294,967,295."),
        ("label_smoothing_factor", "1.5", "is out of range. Use a number of at least 0 and up to 1."),
        ("adam_beta1", "1.0", "is out of range. Use a number of at least 0 and below 1."),
        ("profile_steps", "0", "is below 1: there would be nothing to trace. Use a number of at least 1."),
        ("fp16", "True", "is refused: float16 needs a scaled loss and skips the steps that overflow, which is not"),
        ("optim", "adafactor", "is refused: it has not been compared with one device under sequence parallelism. Use"),
        ("eval_strategy", "epochs", "Use no, steps or epoch."),
        ("fsdp", "full_shard", "would shard the model a second time: choose the engine with --engine fsdp2 or an FSDP"),
    ],
)
def test_what_a_flag_does_not_take_is_refused_by_the_command(name, value, said, capsys):
    assert main([f"--{name}={value}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"longctx: error: --{name} {value} ")
    assert said in error


@pytest.mark.parametrize("text", ['{"min_lr": ', "[1]", '{"min_lr": NaN}', "min_lr", "5"])
def test_schedule_arguments_that_are_no_json_object_are_refused(text, tmp_path):
    for arguments in (["--lr_scheduler_kwargs", text], ["--config", write(tmp_path, f"lr_scheduler_kwargs: '{text}'")]):
        with pytest.raises(ValueError, match=r"lr_scheduler_kwargs .* is not understood. Use a JSON object") as error:
            parse_flags(arguments)
        assert text in str(error.value)


@pytest.mark.parametrize("name", ["lora_r", "eval_steps", "local_rank", "ddp_bucket_cap_mb"])
def test_what_changes_nothing_earns_a_note(name):
    assert [note for note in resolved(f"--{name}", "4").notes if f"--{name} has no effect" in note]
    assert not resolved().notes


def test_flags_of_evaluation_act_with_their_strategy():
    given = ["--eval_steps", "4", "--per_device_eval_batch_size", "4", "--eval_packing", "False"]
    assert not resolved("--eval_strategy", "steps", *given).notes
    notes = resolved("--eval_strategy", "epoch", *given).notes
    assert notes == ("--eval_steps has no effect without --eval_strategy steps",)


@pytest.mark.parametrize("name", ["resume_from_checkpoint", "dataset_name", "model_name_or_path", "chat_template_path"])
@pytest.mark.parametrize(("value", "reason"), [("x" * 5000, "File name too long"), ("a\0b", "embedded null byte")])
def test_what_cannot_be_a_path_is_refused_by_its_flag(name, value, reason, tmp_path):
    config = write(tmp_path, yaml.safe_dump({name: value}))
    with pytest.raises(ValueError, match=rf"--{name} .* cannot be a path: {reason}\. Correct it\.$"):
        parse_flags(["--config", config])

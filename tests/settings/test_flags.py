"""Reading flags: the command line over a YAML file, older names, defaults, and what becomes of every flag of TRL's."""

from __future__ import annotations

import os
import re
from dataclasses import fields

import pytest
import yaml
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig

from longctx.attention.backends import BACKENDS
from longctx.settings.flags import SequenceArguments, parse_flags
from longctx.settings.help import check_names, installed_name
from longctx.settings.profile import read_profile
from longctx.settings.resolve import resolve
from longctx.settings.trl_flags import ACTS, ACTS_WITH, GIVEN_ELSEWHERE, IDLE, NOT_BUILT, REASONS
from longctx.settings.values import DEMO
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
    flags = parse_flags(["--config", path, "--max_steps", "7", "--sp_backend=ring"])
    assert (flags.max_steps, flags.learning_rate, flags.sp, flags.packing) == (7, 2e-5, 2, False)
    assert flags.explicit == {"max_steps", "learning_rate", "sp", "packing", "sp_backend"}
    assert flags.arguments == ("--config", path, "--max_steps", "7", "--sp_backend=ring")


def test_nothing_is_explicit_by_itself():
    assert parse_flags([]).explicit == frozenset()


def test_a_value_equal_to_the_default_is_explicit():
    assert parse_flags(["--packing", "False"]).explicit == {"packing"}


@pytest.mark.parametrize("name", ["max_seq_length", "max-seq-length", "max-length"])
def test_older_and_dashed_names_of_max_length(name, tmp_path):
    for flags in (
        parse_flags([f"--{name}", "99"]),
        parse_flags([f"--{name}=99"]),
        parse_flags(["--config", write(tmp_path, f"{name}: 99\n")]),
    ):
        assert flags.max_length == 99
        assert flags.explicit == {"max_length"}


def test_both_names_of_checkpointing_are_taken_by_every_transformers(tmp_path):
    """Before 5.23, it has the older ones alone."""
    for prefix in ("gradient", "activation"):
        text = f"{prefix}_checkpointing: true\n{prefix}-checkpointing_kwargs: '{{\"every_n_layers\": 2}}'\n"
        arguments = [*OWN, "--config", write(tmp_path, text)]
        check_names(arguments)
        memory_options = resolved(*arguments).memory_options
        assert memory_options.activation_checkpointing
        assert memory_options.every_n_layers == 2
    older = {"gradient_checkpointing", "gradient_checkpointing_kwargs", "packing"}
    assert installed_name("activation_checkpointing_kwargs", older) == "gradient_checkpointing_kwargs"
    both = {*older, "activation_checkpointing"}
    assert installed_name("activation_checkpointing", both) == "activation_checkpointing"
    assert installed_name("activation_checkpoints", older) == "activation_checkpoints"


@pytest.mark.parametrize("name", ["torch_dtype", "torch-dtype", "dtype"])
def test_older_and_dashed_names_of_dtype(name, tmp_path):
    assert parse_flags([f"--{name}", "bfloat16"]).dtype == "bfloat16"
    assert parse_flags(["--config", write(tmp_path, f"{name}: bfloat16\n")]).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("arguments", "value"),
    [([], True), (["--no_gradient_checkpointing"], False), (["--no-gradient-checkpointing"], False)]
    + [(["--gradient_checkpointing", word], word in ("True", "true", "1")) for word in ("True", "true", "False", "0")]
    + [(["--gradient_checkpointing"], True)],
)
def test_booleans(arguments, value):
    assert parse_flags(arguments).gradient_checkpointing is value


@pytest.mark.parametrize(("given", "value"), [("False", False), ("me/runs", "me/runs")])
def test_a_space_or_none(given, value, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"trackio_static_space_id: {given}")
    for arguments in (["--trackio_static_space_id", given], ["--config", str(path)]):
        assert parse_flags(arguments).values["trackio_static_space_id"] == value


def test_yaml_null_list_mapping_and_unquoted_no(tmp_path, monkeypatch):
    monkeypatch.delenv("LONGCTX_TEST", raising=False)
    text = "max_length: null\nreport_to: [tensorboard]\neval_strategy: no\nmodel_init_kwargs: {rms_norm_eps: 1.0e-5}\n"
    flags = parse_flags(["--config", write(tmp_path, text + "env:\n  LONGCTX_TEST: 3\n")])
    assert flags.max_length is None
    assert flags.report_to == ["tensorboard"]
    assert flags.eval_strategy == "no"
    assert flags.model_init_kwargs == {"rms_norm_eps": 1e-5}
    assert os.environ.pop("LONGCTX_TEST") == "3"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_step: 5\n", ("max_step", "Did you mean --max_steps?")),
        (
            "num_generations: 4\n",
            ("num_generations", "It belongs to GRPO and RLOO: longctx train does", "preference.md"),
        ),
        ("loss_type: sigmoid\n", ("'sigmoid'", "longctx train does supervised fine-tuning", "longctx dpo")),
        ("sp: 2.5\n", ("--sp", "2.5")),
        ("dataset_test_split: [a, b]\n", ("dataset_test_split to ['a', 'b']", "one value", "joined: test+validation")),
        ("dataset_name: [a, b]\n", ("dataset_name to ['a', 'b']", "Several data sets are --datasets.")),
        ("overlong: shorten\n", ("shorten", "'raise', 'truncate', 'drop', 'split'")),
        ("engine: fsdp3\n", ("fsdp3", "'auto', 'deepspeed', 'fsdp2'")),
        ("- 5\n", ("list", "'flag: value'")),
        ("a: [\n", ("run.yaml", "YAML")),
        ("env: 5\n", ("env", "VARIABLE: value")),
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
    with pytest.raises(ValueError, match=r"none\.yaml cannot be read"):
        parse_flags(["--config", str(tmp_path / "none.yaml")])


def test_parsing_leaves_the_parser_as_it_is(tmp_path):
    before = parse_flags([])
    text = "max_length: null\nreport_to: [tensorboard]\nmodel_init_kwargs: {rms_norm_eps: 1.0e-5}\n"
    parse_flags(["--config", write(tmp_path, text), "--sp", "4", "--lora_target_modules", "a", "b"])
    before.values["datasets"].append("mine")
    after = parse_flags(["--sp", "2"])
    assert after.explicit == {"sp"}
    assert after.values == {**before.values, "sp": 2, "datasets": []}


# ------------------------------------------------------------------------------------------------
# Defaults
# ------------------------------------------------------------------------------------------------


def test_without_model_and_data_the_demo_preset_applies_and_is_printed():
    run = resolved()
    assert run.is_demo
    assert {name: run.settings[name] for name in DEMO} == DEMO
    preset = next(line for line in run.describe() if line.startswith("preset"))
    for name in ("model_name_or_path tiny", "dataset_name stdlib", "max_length 8192", "overlong split", "max_steps 20"):
        assert f"--{name}" in preset


def test_the_demo_preset_is_under_the_flags():
    run = resolved("--max_steps", "3", "--max_length", "256")
    assert (run.settings["max_steps"], run.settings["max_length"]) == (3, 256)
    assert run.settings["overlong"] == "split"
    assert not {"max_steps", "max_length"} & set(run.changed)


def test_a_run_of_ones_own_packs_up_to_the_models_context_and_says_so():
    run = resolved(*OWN)
    assert not run.is_demo
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

OF_TRL = (SFTConfig, ModelConfig, ScriptArguments, DatasetMixtureConfig)
ALL_FIELDS = {f.name: f for arguments in OF_TRL for f in fields(arguments) if f.init}
TABLES = {
    "ACTS": ACTS,
    "ACTS_WITH": ACTS_WITH,
    "NOT_BUILT": NOT_BUILT,
    "GIVEN_ELSEWHERE": GIVEN_ELSEWHERE,
    "IDLE": IDLE,
}


@pytest.mark.parametrize("name", ALL_FIELDS)
def test_every_flag_is_classified_once(name):
    tables = [table for table, names in TABLES.items() if name in names]
    assert len(tables) == 1, (
        f"--{name} is in {tables or 'no table'} of longctx/settings/trl_flags.py. Find out whether it acts in "
        "SequenceTrainer exactly as on one device, and enter it in one table."
    )


def test_every_field_of_trl_is_a_flag_of_its_name():
    assert parse_flags([]).values.keys() >= ALL_FIELDS.keys()


def test_no_table_names_a_flag_that_is_gone():
    newer = {"activation_checkpointing", "activation_checkpointing_kwargs"}  # since transformers 5.18
    ours = {field.name for field in fields(SequenceArguments)}
    for names in TABLES.values():
        assert not set(names) - set(ALL_FIELDS) - ours - newer


OTHER_VALUES = {
    "accelerator_config": {"split_batches": True},
    "dataset_kwargs": {"skip_prepare_dataset": True},
    "ddp_backend": "gloo",
    "debug": "underflow_overflow",
    "deepspeed": "zero3.json",
    "dtype": "float16",
    "fsdp": "full_shard",
    "fsdp_config": {"version": 2},
    "include_num_input_tokens_seen": True,
    "label_names": ["labels"],
    "loss_type": "dft",
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "neftune_noise_alpha": 0.5,
    "optim": "adafactor",
    "optim_args": "beta1=0.5",
    "optim_target_modules": "all-linear",
    "parallelism_config": {"cp_size": 2},
    "resume_from_checkpoint": "checkpoint-5",
    "ring_size": 2,
    "save_strategy": "best",
    "torch_compile_backend": "inductor",
    "torch_compile_mode": "default",
    "train_sampling_strategy": "group_by_length",
    "truncation_mode": "keep_end",
}
"""For each flag that is no switch a value that is not built."""


@pytest.mark.parametrize("name", [*NOT_BUILT, *GIVEN_ELSEWHERE])
def test_what_is_not_built_is_refused_by_name(name, capsys, tmp_path):
    value = OTHER_VALUES[name] if name in OTHER_VALUES else not parse_flags([]).values[name]
    assert main(["--config", write(tmp_path, yaml.safe_dump({name: value}))]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"longctx: error: --{name} ")
    assert str(value) in error or name == "debug"  # TRL's parser shows its own enumeration
    assert "Use " in error or "Leave it out" in error or GIVEN_ELSEWHERE.get(name, "?") in error


@pytest.mark.parametrize("name", REASONS)
def test_a_reason_of_ones_own_takes_the_place_of_the_general_one(name, tmp_path):
    value = OTHER_VALUES.get(name, True)
    with pytest.raises(ValueError, match=f"--{name} .* is refused: ") as refusal:
        resolved("--config", write(tmp_path, yaml.safe_dump({name: value})))
    assert REASONS[name] in str(refusal.value)
    assert "has not been compared with one device" not in str(refusal.value)


@pytest.mark.parametrize("factor", ["-0.1", "1.5"])
def test_smoothing_is_a_part(factor):
    with pytest.raises(
        ValueError, match=f"--label_smoothing_factor {factor} is out of range: expected a finite number from 0 to 1"
    ):
        resolved("--label_smoothing_factor", factor)


FLOATS = [
    field.name
    for arguments in (SequenceArguments, DatasetMixtureConfig, SFTConfig, ModelConfig)
    for field in fields(arguments)
    if field.init and "float" in str(field.type)
]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("name", FLOATS)
def test_numbers_that_are_not_finite_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"--{name} \[?{value}\]? is out of range: expected a finite number"):
        resolved(f"--{name}={value}")


def test_the_flags_that_take_numbers_are_known():
    """Else the test above would compare nothing."""
    assert {"learning_rate", "weight_decay", "adam_epsilon", "warmup_steps", "early_stopping_threshold"} <= {*FLOATS}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("learning_rate", -1e-3, "of at least 0"),
        ("weight_decay", -0.1, "of at least 0"),
        ("learning_rate", 1e39, r"of at least 0 and below 3\.4e\+38"),
        ("weight_decay", 1e39, r"of at least 0 and below 3\.4e\+38"),
        ("adam_beta1", 1.0, "of at least 0 and below 1"),
        ("adam_beta2", -0.5, "of at least 0 and below 1"),
        ("adam_epsilon", -1e-8, "of at least 0"),
        ("max_grad_norm", -1.0, "of at least 0.* Use 0 for no clipping"),
        ("warmup_steps", -2.0, "of at least 0"),
        ("num_train_epochs", -1.0, "of at least 0"),
        ("seed", -1, "from 0 to 4,294,967,295"),
        ("data_seed", 2**32, "from 0 to 4,294,967,295"),
        ("dataloader_num_workers", -1, "of at least 0"),
    ],
)
def test_numbers_out_of_range_are_refused(name, value, expected):
    with pytest.raises(ValueError, match=rf"--{name} .* is out of range: expected a finite number {expected}"):
        resolved(f"--{name}={value}")


@pytest.mark.parametrize("text", ['{"min_lr": ', "[1]", '{"min_lr": NaN}', "min_lr"])
def test_schedule_arguments_that_are_no_json_object_are_refused(text):
    message = f": {text} is not a JSON object. Example: '{{\"min_lr\": 1e-6}}'"
    with pytest.raises(ValueError, match=f"--lr_scheduler_kwargs.*{re.escape(message)}"):
        resolved("--lr_scheduler_kwargs", text)


@pytest.mark.parametrize("name", NOT_BUILT)
def test_what_is_built_is_accepted(name):
    for value in NOT_BUILT[name]:
        if value not in (None, "", []):
            assert name in resolved(f"--{name}", str(value)).flags.explicit


@pytest.mark.parametrize("name", ["lora_r", "eval_steps", "per_device_eval_batch_size", "ddp_bucket_cap_mb"])
def test_what_changes_nothing_earns_a_note(name):
    assert [note for note in resolved(f"--{name}", "4").notes if f"--{name} has no effect" in note]
    assert not resolved().notes


def test_flags_of_evaluation_act_with_their_strategy():
    given = ["--eval_steps", "4", "--per_device_eval_batch_size", "4", "--eval_packing", "False"]
    assert not resolved("--eval_strategy", "steps", *given).notes
    notes = resolved("--eval_strategy", "epoch", *given).notes
    assert notes == ("--eval_steps has no effect without --eval_strategy steps",)


def test_a_flag_of_a_newer_trl_is_refused():
    flags = parse_flags(["--save_steps", "4"])
    newer = type(flags)(flags.values | {"brand_new": 1}, flags.explicit | {"brand_new"}, flags.arguments)
    with pytest.raises(ValueError, match="--brand_new 1 is refused: it is newer"):
        resolve(newer, read_profile({}), {})


@pytest.mark.parametrize("name", ["resume_from_checkpoint", "dataset_name", "model_name_or_path", "chat_template_path"])
@pytest.mark.parametrize(("value", "reason"), [("x" * 5000, "File name too long"), ("a\0b", "embedded null byte")])
def test_what_cannot_be_a_path_is_refused_by_its_flag(name, value, reason, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({name: value}))
    with pytest.raises(ValueError, match=rf"--{name} .* cannot be a path: {reason}\. Correct it\.$"):
        parse_flags(["--config", str(config)])

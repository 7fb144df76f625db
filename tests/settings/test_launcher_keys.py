"""Every key of accelerate's config and of a deepspeed_config_file is read, changes no result, or is refused by name.

profile_keys.tsv lists them: where a key stands, a value that acts, and what becomes of it. Accelerate's own code makes
the environment of each file; the start of processes is left out.
"""

from __future__ import annotations

import base64
import copy
import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve

with Path(__file__).with_name("profile_keys.tsv").open(encoding="utf-8") as file:
    ROWS = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))

FSDP2 = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
DEEPSPEED: dict[str, Any] = {"distributed_type": "DEEPSPEED", "num_processes": 2}
BASES: dict[str, dict[str, Any]] = {
    "plain": {"distributed_type": "MULTI_GPU", "num_processes": 2},
    "no": {"distributed_type": "NO", "num_processes": 1},
    "one": {"distributed_type": "MULTI_CPU", "num_processes": 2, "use_cpu": True},
    "fsdp1": {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"fsdp_version": 1}},
    "fsdp2": {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": FSDP2},
    "sp": {**DEEPSPEED, "parallelism_config": {"parallelism_config_sp_size": 2}},
    "deepspeed": {**DEEPSPEED, "deepspeed_config": {"zero_stage": 2}},
    "file": {**DEEPSPEED, "deepspeed_config": {"deepspeed_config_file": "ds.json"}},
    "yaml beside file": {**DEEPSPEED, "deepspeed_config": {"deepspeed_config_file": "ds.json"}},
}
BASES["cp"] = {**BASES["fsdp2"], "parallelism_config": {"parallelism_config_cp_size": 2}}
JSON: dict[str, Any] = {"zero_optimization": {"stage": 2}}
OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
WARMUP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
SCHEDULER = {"type": "WarmupLR", "params": WARMUP}


@pytest.fixture
def exported(launch, monkeypatch, tmp_path):
    """`exported(profile, JSON)` -> the environment in which accelerate starts the first process of a profile."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("accelerate.utils.launch.is_fp8_available", lambda: True)
    monkeypatch.setattr("accelerate.utils.launch._get_mpirun_args", lambda: ("mpirun", "-f", "-n", "-ppn", ""))

    def export(profile, config=JSON):
        Path("ds.json").write_text(json.dumps(config))
        Path("profile.yaml").write_text(yaml.safe_dump(profile))
        started = launch("profile.yaml")
        env = dict(started["env"])
        if started.get("command", [""])[0] == "mpirun":
            return env | {"OMPI_COMM_WORLD_SIZE": str(profile["num_processes"])}
        if "nproc_per_node" in started:
            env |= {"RANK": "0", "WORLD_SIZE": started["nproc_per_node"]}
        return env

    return export


def with_key(tree, path, value):
    """A copy of nested objects with the value at `a.b.c`."""
    tree = copy.deepcopy(tree)
    *above, last = path.split(".")
    node = tree
    for name in above:
        node = node.setdefault(name, {})
    node[last] = value
    return tree


def at(tree, path):
    for name in path.split("."):
        tree = tree[name]
    return tree


def found(launcher):
    """What is asked for, by name and as text."""
    names = ("engine", "zero_stage", "dp_shard")
    asked = {flag: value for flag, (value, _) in launcher.values.items()}
    asked |= {name: getattr(launcher, name) for name in names} | {"layer_classes": " ".join(launcher.layer_classes)}
    asked |= {"train_batch_size": launcher.train_batch_size and launcher.train_batch_size.value}
    return {name: str(value) for name, value in asked.items()}


def seen_by_deepspeed(env):
    return json.loads(base64.urlsafe_b64decode(env["ACCELERATE_DEEPSPEED_CONFIG_FILE"]))


# The table


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['in']}-{row['key']}-{row['value']}")
def test_key(row, exported):
    place, key, value, detail = row["in"], row["key"], json.loads(row["value"]), row["detail"]
    if place == "variable":
        base = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "true"}
        envs = [base, base | {key: value}]
    elif place == "file":
        envs = [exported(BASES[place], config) for config in (JSON, with_key(JSON, key, value))]
    elif row["outcome"] == "refused by accelerate":
        with pytest.raises(ValueError, match=detail):
            exported(with_key(BASES[place], key, value))
        return
    else:
        envs = [exported(profile) for profile in (BASES[place], with_key(BASES[place], key, value))]
    *_, given = envs
    if row["outcome"] == "refused":
        with pytest.raises(ValueError, match=detail) as refused:
            read_profile(given)
        assert "\n" not in str(refused.value)
        assert place != "file" or "in deepspeed_config_file ds.json" in str(refused.value)
        return
    launcher = read_profile(given)
    if place == "file":  # of an earlier call, which the second one has written over
        Path("ds.json").write_text(json.dumps(JSON))
    before, now = found(read_profile(envs[0])), found(launcher)
    if row["outcome"] == "read":
        name, _, wanted = detail.partition("=")
        assert (now[name], before.get(name)) != (before.get(name), now[name])
        assert now[name] == wanted
        return
    assert now == before
    if row["outcome"] == "translated":
        assert re.search(detail, launcher.notes[0])
        assert "optimizer" not in seen_by_deepspeed(given)
        return
    assert row["outcome"] == "passed on"
    assert len(launcher.notes) == (detail == "note")
    if place == "variable":
        assert given[key] == value
    elif place == "file":
        assert at(seen_by_deepspeed(given), key) == value


# Sections of a DeepSpeed file that become flags


def test_sections_with_auto_become_flags_and_leave_the_engine(exported):
    config = {**JSON, "optimizer": OPTIMIZER, "scheduler": {"type": "WarmupDecayLR"}}
    config["scheduler"]["params"] = {**WARMUP, "total_num_steps": "auto"}
    env = exported(BASES["file"], config)
    launcher = read_profile(env)
    assert launcher.values == {
        "lr_scheduler_type": ("linear", "scheduler.type WarmupDecayLR in deepspeed_config_file ds.json")
    }
    optimizer, scheduler = launcher.notes
    assert re.search(r"AdamW of deepspeed_config_file ds.json is left to --optim", optimizer)
    assert re.search(r"WarmupDecayLR .*--lr_scheduler_type linear, unless .*linear, where .*logarithmic", scheduler)
    assert seen_by_deepspeed(env) == {
        "zero_optimization": {"stage": 2},
        **dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"),
        "train_batch_size": "auto",
    }


@pytest.mark.parametrize("missing", ["warmup_max_lr", "warmup_num_steps"])
def test_scheduler_that_leaves_a_key_to_deepspeed_is_refused(missing, exported):
    """DeepSpeed's own defaults are a rate of 0.001 after 1,000 steps."""
    params = {key: value for key, value in WARMUP.items() if key != missing}
    env = exported(BASES["file"], {**JSON, "scheduler": {"type": "WarmupLR", "params": params}})
    with pytest.raises(ValueError, match=rf"scheduler.params.{missing} is not in .*--lr_scheduler_type constant_with"):
        read_profile(env)


def test_null_and_auto_that_nobody_fills_in_are_left_out(exported):
    sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    zero = {"stage": 3, "overlap_comm": "auto", **dict.fromkeys(sizes, "auto")}
    zero |= {"offload_optimizer": None}
    env = exported(BASES["file"], {"zero_optimization": zero, "communication_data_type": "auto", "bf16": None})
    assert read_profile(env).values == {}
    seen = seen_by_deepspeed(env)
    assert seen["zero_optimization"] == {"stage": 3, **dict.fromkeys(sizes, "auto")}
    assert not {"communication_data_type", "bf16"} & seen.keys()


def test_accelerate_and_transformers_take_what_the_engine_sees(exported, monkeypatch):
    """Their own classes read it from the environment, and fill `auto` in from the flags."""
    from accelerate.utils import DeepSpeedPlugin
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    config = {"optimizer": OPTIMIZER, "scheduler": SCHEDULER, "bf16": {"enabled": True}, "gradient_clipping": "4.0"}
    env = exported(BASES["file"], {"zero_optimization": {"stage": "3"}, **config})
    assert read_profile(env).values["max_grad_norm"].value == "4.0"
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        monkeypatch.setenv(name, env[name])
    plugin = DeepSpeedPlugin()
    assert (plugin.zero_stage, plugin.zero3_init_flag) == (3, True)
    filled = HfTrainerDeepSpeedConfig(plugin.deepspeed_config)
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED")
    args = TrainingArguments("out", per_device_train_batch_size=2, max_grad_norm=4.0, bf16=True, use_cpu=True)
    filled.trainer_config_process(args)
    assert filled.mismatches == []
    assert (filled.config["train_batch_size"], filled.config["gradient_clipping"]) == (2, 4.0)
    assert filled.config["bf16"] == {"enabled": True}
    assert not {"optimizer", "scheduler"} & filled.config.keys()


def test_train_batch_size_is_the_product_or_refused(exported):
    """The number stays in the engine's configuration, where transformers compares it, too."""
    env = exported(BASES["file"], {**JSON, "train_batch_size": 16})
    launcher = read_profile(env)
    assert seen_by_deepspeed(env)["train_batch_size"] == 16
    tiny = ["--model_name_or_path", "tiny", "--dataset_name", "stdlib", "--use_cpu", "--per_device_train_batch_size"]
    assert resolve(parse_flags([*tiny, "4", "--gradient_accumulation_steps", "2"]), launcher, env).dims.dp == 2
    with pytest.raises(ValueError, match=r"^train_batch_size in .*ds.json is 16.* 1 × .* 1 × 2 processes is 2\. "):
        resolve(parse_flags([*tiny, "1"]), launcher, env)
    env = exported(BASES["file"])
    assert resolve(parse_flags([*tiny, "1"]), read_profile(env), env).dims.dp == 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[1]", "expected an object"),
        ("{", "cannot be read as JSON"),
        ('{"zero_optimization": {"stage": 2}, "gradient_clipping": 1, "gradient_clipping": 2}', "more than once"),
        ('{"optimizer": [1], "zero_optimization": {"stage": 2}}', r"optimizer \[1\]"),
        ('{"fp16": true, "zero_optimization": {"stage": 2}}', r"fp16\.enabled true"),
        ('{"zero_optimization": 2}', "zero_optimization 2"),
        ("{}", r"zero_optimization\.stage is not in"),
        ('{"zero_optimization": {"stage": "auto"}}', None),
    ],
)
def test_damaged_file(text, why, exported):
    env = exported(BASES["file"])
    Path("ds.json").write_text(text)
    if why is None:
        assert read_profile(env).zero_stage == 2  # accelerate's default
        return
    with pytest.raises(ValueError, match=why):
        read_profile(env)


# Processes


def test_what_accelerate_must_not_act_on_is_taken_out_and_read_again(exported):
    """A process that starts from what is left, or a second call, reads the same; a new launcher's values go first."""
    profile = {**BASES["file"], "parallelism_config": {"parallelism_config_sp_size": 2}}
    env = exported(profile, {**JSON, "optimizer": OPTIMIZER})
    env["FSDP_ACTIVATION_CHECKPOINTING"] = "false"
    launcher = read_profile(env)
    assert not [name for name in env if name.startswith(("PARALLELISM", "FSDP_ACT")) or "USE_PARALLELISM" in name]
    assert seen_by_deepspeed(env).keys() & {"optimizer"} == set()
    started = dict(env)
    assert [repr(read_profile(started)) for _ in range(2)] == [repr(launcher)] * 2
    again = env | {"PARALLELISM_CONFIG_SP_SIZE": "4", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "other.json"}
    Path("other.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    relaunched = read_profile(again)
    assert (relaunched.values["sp"].value, relaunched.zero_stage, relaunched.notes) == (4, 3, ())


def test_two_keys_that_ask_for_different_values_are_refused(exported):
    env = exported(BASES["file"], {**JSON, "gradient_clipping": 1.0}) | {"ACCELERATE_GRADIENT_CLIPPING": "0.5"}
    with pytest.raises(ValueError, match=r"^gradient_clipping is 0\.5, and gradient_clipping in .*ds\.json is 1\.0"):
        read_profile(env)

"""The specification's commands, profiles and settings as they stand there, and launch profiles that others publish.

Accelerate's own code launches each profile, as in test_profiles.py, and the first process of that launch resolves its
flags on a machine with as many GPUs as are started there. Each case of specification.json and launch_profiles.json
holds its outcome:

    resolved                what the run is, and which of its settings are given or differ from a plain run's
    resolved with a note    as well, and the notes
    refused                 our message
    refused by accelerate   its message: no process is started

A case whose outcome, message, run or settings have changed fails, and prints them before and after. If the change is
intended, enter it into the case.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import yaml
from transformers import AutoConfig

import longctx.settings.model_config
from benchmarks.published import CONFIGS, MODELS
from longctx.launch.accelerate import relaunch
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from tests.test_docs import machine_of

HERE = Path(__file__).parent
SPECIFICATION = json.loads((HERE / "specification.json").read_text(encoding="utf-8"))
PUBLISHED = json.loads((HERE / "launch_profiles.json").read_text(encoding="utf-8"))
FOUND = ("outcome", "message", "run", "settings")
TINY = {"model_name_or_path": "tiny", "dataset_name": "stdlib", "max_length": "256"}
"""Flags of a case that does not give them itself."""

PLAIN = {"bf16": True, "gradient_checkpointing": True, "gradient_accumulation_steps": 1, "max_grad_norm": 1.0}
PLAIN |= {"offload_optimizer_device": "none", "offload_param_device": "none", "communication_data_type": "auto"}
PLAIN |= {"lr_scheduler_type": "linear"}
"""Settings that a profile may decide, as a run without one has them."""

SIZES = CONFIGS | {
    name: AutoConfig.for_model(**MODELS[name]["config"]) for name in ("Qwen/Qwen2-0.5B", "Qwen/Qwen2.5-0.5B")
}
"""The models that the specification names, by the sizes in their config.json."""


@pytest.fixture
def outcome_of(launch, monkeypatch, tmp_path):
    """`outcome_of(profile or None, flags, launcher's flags)` -> what becomes of that launch."""
    load, model_config = longctx.settings.model_config.load_config, longctx.settings.model_config
    monkeypatch.setattr(model_config, "load_config", lambda name, *a, **k: SIZES.get(name) or load(name, *a, **k))
    monkeypatch.setattr(model_config, "load_whole_config", lambda *_, **__: None)
    for module in ("accelerate.commands.launch", "accelerate.commands.config.config_args"):
        monkeypatch.setattr(f"{module}.default_config_file", str(tmp_path / "none"))
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # longctx names the default config in its messages
    monkeypatch.setattr("accelerate.utils.launch.is_fp8_available", lambda: True)
    monkeypatch.setattr("accelerate.utils.launch._get_mpirun_args", lambda: ("mpirun", "-f", "-n", "-ppn", ""))

    def outcome(profile, flags=(), launcher=()):
        profile, flags, launcher = by_name(profile, [*flags], [*launcher])
        path = tmp_path / "profile.yaml" if profile is not None else None
        if path is not None:
            path.write_text(yaml.safe_dump(profile))
        with patch.multiple(torch.cuda, is_available=lambda: True, device_count=lambda: 8):
            try:
                started = launch(path, *launcher)
            except Exception as error:
                return {"outcome": "refused by accelerate", "message": without(tmp_path, error)}
        env, gpus = environment(started)
        with machine_of(gpus):
            try:
                return described(resolve(parse_flags(flags), read_profile(env), env))
            except ValueError as error:
                return {"outcome": "refused", "message": without(tmp_path, error)}

    return outcome


def by_name(profile, flags, launcher):
    """What `--accelerate_config NAME` starts in the place of its process: a launch with that profile."""
    if "--accelerate_config" not in flags:
        return profile, flags, launcher
    with patch.dict(os.environ), patch.object(os, "execv") as execv:
        settings = parse_flags(flags)
        relaunch(settings, settings.arguments, is_launched=False)
    words = execv.call_args.args[1]
    config, module = words.index("--config_file") + 1, words.index("longctx.train")
    return yaml.safe_load(Path(words[config]).read_text()), words[module + 1 :], words[config + 1 : module - 1]


def environment(started):
    """What the first process of a node finds in its environment, and how many GPUs it has."""
    env, command = dict(started["env"]), started.get("command", ["torchrun"])
    if command[0] == "mpirun":
        return env | {"OMPI_COMM_WORLD_SIZE": command[command.index("-n") + 1]}, 0
    if command[0] == sys.executable:  # the only process of its launch
        return env, 1
    assert command[0] == "torchrun"
    local, node = int(started["nproc_per_node"]), int(started["node_rank"])
    nodes = int(str(started["nnodes"]).partition(":")[0])
    env |= {"RANK": str(node * local), "WORLD_SIZE": str(nodes * local), "GROUP_RANK": str(node)}
    return env | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(local)}, local


def described(run):
    engine = run.engine if run.zero_stage is None else f"{run.engine} ZeRO-{run.zero_stage}"
    changed = {name for name in PLAIN if run.settings[name] != PLAIN[name]}
    given = parse_flags(run.flags.arguments).explicit  # also where the profile acts in a flag's place
    named = (changed | given) - TINY.keys() - {"output_dir"} | {"max_length"}
    found = {
        "outcome": "resolved with a note" if run.notes else "resolved",
        "message": "\n".join(run.notes),
        "run": f"{'CPU' if run.use_cpu else 'GPU'}, {engine}, {run.backend.name}, {run.dims}",
        "settings": ", ".join(f"{name} {run.settings[name]}" for name in sorted(named)),
    }
    return {name: text for name, text in found.items() if text}


def with_tiny(flags):
    """Flags, with TINY's where they are not among them."""
    given = {"max_length" if flag in ("--max_seq_length", "--config") else flag[2:] for flag in flags}
    return [*flags, *(word for flag, value in TINY.items() if flag not in given for word in (f"--{flag}", value))]


def without(folder, error):
    """An error's message, with the folder of the test named alike everywhere."""
    return str(error).replace(str(folder), "FOLDER").strip()


def check(case, now):
    before = {name: case[name] for name in FOUND if name in case}
    shown = (json.dumps(found, ensure_ascii=False) for found in (before, now))
    assert now == before, "\nbefore: {}\nnow:    {}".format(*shown)


@pytest.mark.parametrize("name", SPECIFICATION["cases"])
def test_specification(name, outcome_of, tmp_path):
    case = SPECIFICATION["cases"][name]
    flags, profile = list(case.get("flags", ())), case.get("profile")
    if isinstance(profile, str):
        profile = SPECIFICATION["profiles"].get(profile) or PUBLISHED["profiles"][profile]["keys"]
    if "settings_file" in case:
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(SPECIFICATION["settings"][case["settings_file"]]))
        flags += ["--config", "run.yaml"]
    for path, keys in case.get("files", {}).items():
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(yaml.safe_dump(SPECIFICATION["profiles"][keys]))
    check(case, outcome_of(profile, with_tiny(flags), case.get("launcher", ())))


@pytest.mark.parametrize("name", [*PUBLISHED["profiles"], *PUBLISHED["deepspeed"]])
def test_published_launch_profile(name, outcome_of, tmp_path, monkeypatch):
    """Configurations of DeepSpeed alone are tried with the smallest profile that names them."""
    for path, deepspeed in PUBLISHED["deepspeed"].items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(deepspeed["keys"]))
    case = PUBLISHED["profiles"].get(name)
    if case is None:
        case, config = PUBLISHED["deepspeed"][name], {"deepspeed_config_file": name}
        config["zero3_init_flag"] = case["keys"]["zero_optimization"]["stage"] == 3
        profile = {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": config}
    else:
        profile = case["keys"]
        (tmp_path / case.get("started_in", "")).mkdir(parents=True, exist_ok=True)
        monkeypatch.chdir(tmp_path / case.get("started_in", ""))
    check(case, outcome_of(profile, with_tiny(case.get("flags", ())), case.get("launcher", ())))

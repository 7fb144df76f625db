"""The shipped Accelerate profiles and run YAMLs, and what people's own config files may say.

What `accelerate launch` makes of a file is taken from its own code, with the start of the processes left out.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml

from longctx.__main__ import main as longctx_main
from longctx.launch.accelerate import find_config, shipped_configs
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from longctx.train import take_over

REPOSITORY = Path(__file__).parents[2]
CONFIGS = REPOSITORY / "configs"
PROFILES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
RUNS = sorted(path.stem for path in CONFIGS.glob("run/*.yaml"))
TINY = ["--model_name_or_path", "tiny", "--dataset_name", "stdlib", "--max_length", "256"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
TRAIN = ["-m", "longctx.train"]


# What the launcher makes of a file


def resolve_launched(started, arguments):
    """The run that `longctx.train arguments` resolves to in the first process of a launch."""
    env = dict(started["env"])
    if "nproc_per_node" in started:
        env |= {"RANK": "0", "WORLD_SIZE": started["nproc_per_node"], "LOCAL_WORLD_SIZE": started["nproc_per_node"]}
    profile = read_profile(env)
    return resolve(parse_flags(arguments), profile, env)


@pytest.mark.parametrize("path", [f"{name}.yaml" for name in PROFILES] + [f"run/{name}.yaml" for name in RUNS])
def test_launch_command_on_top(path):
    """A comment says what the file is for and how to start it, with files that exist."""
    comment = "".join(re.match(r"(#.*\n)+", (CONFIGS / path).read_text()).group())
    assert "accelerate launch" in comment
    named = re.findall(r"configs/[\w/]+\.yaml", comment)
    assert f"configs/{path}" in named
    assert all((REPOSITORY / file).is_file() for file in named)
    sentence = comment.lstrip("# ").split("\n")[0]
    assert len(sentence.split()) >= 5


DEGREES = {
    "context_parallel_2gpu": ("fsdp2", "ring", 2, 1),
    "alst_ulysses_4gpu": ("deepspeed", "ulysses", 2, 2),
    "zero1": ("deepspeed", "local", 1, 8),
    "zero2": ("deepspeed", "local", 1, 8),
    "zero3": ("deepspeed", "local", 1, 8),
    "fsdp2": ("fsdp2", "local", 1, 8),
    "multi_gpu": ("fsdp2", "local", 1, 8),
    "single_gpu": ("none", "local", 1, 1),
}


@pytest.mark.parametrize("name", DEGREES)
def test_profile_decides_engine_and_degrees(name, launch):
    run = resolve_launched(launch(CONFIGS / f"{name}.yaml"), TINY)
    assert (run.engine, run.backend.name, run.dims.sp, run.dims.dp) == DEGREES[name]
    if name.startswith("zero"):
        assert run.zero_stage == int(name[-1])
    assert run.facts.launcher.values.keys() <= {"sp", "sp_backend", "activation_checkpointing"}, "left to flags"


@pytest.mark.parametrize("name", RUNS)
def test_run_yaml_resolves_with_its_profile(name, launch):
    profile = name if name in PROFILES else "zero3"
    arguments = ["--config", str(CONFIGS / "run" / f"{name}.yaml"), "--model_name_or_path", "tiny"]
    run = resolve_launched(launch(CONFIGS / f"{profile}.yaml"), arguments)
    for key, value in yaml.safe_load((CONFIGS / "run" / f"{name}.yaml").read_text()).items():
        if key != "model_name_or_path":
            assert run.settings[key] == value, key


def test_demo_yaml_is_the_demo_preset():
    """A run of the file, which names model and data, is the run that names neither."""
    of_file, of_preset = (
        resolve(parse_flags([*config, "--use_cpu", "True", "--output_dir", "out"]), read_profile({}), {}).settings
        for config in (["--config", str(CONFIGS / "run/demo.yaml")], [])
    )
    assert of_file == of_preset


def test_fsdp1_is_refused_on_the_cpu_and_above_sp_1(launch):
    started = launch(CONFIGS / "fsdp1.yaml")
    with pytest.raises(ValueError, match=r"fsdp_version 1 .*does not run on the CPU.*fsdp_version: 2"):
        resolve_launched(started, [*TINY, "--use_cpu", "True"])
    with pytest.raises(ValueError, match=r"sp 2 needs FSDP2 or DeepSpeed"):
        resolve_launched(started, [*TINY, "--use_cpu", "True", "--sp", "2"])


# Finding a profile


def test_profiles_are_found_by_name_and_by_path(tmp_path):
    assert find_config("accelerate_config", "zero3").read_text() == (CONFIGS / "zero3.yaml").read_text()
    own = tmp_path / "own.yaml"
    own.write_text("distributed_type: 'NO'\n")
    assert find_config("accelerate_config", str(own)) == own
    for name in ("run", "zero4"):
        with pytest.raises(ValueError, match=rf"--accelerate_config {name} .*alst_ulysses_4gpu.*zero3"):
            find_config("accelerate_config", name)
    assert shipped_configs().is_dir()


def started_by(*flags):
    """The command in whose favour `longctx train` with these flags gives up its process."""
    with patch.dict(os.environ), patch.object(os, "execv") as execv:
        take_over(parse_flags(flags), "longctx.train")
    _, command = execv.call_args.args
    return command


def launched_with(*flags):
    """What `accelerate launch` is told beside the profile zero3, by name."""
    command = started_by(*flags, "--sp", "2")
    zero3, train = ["--config_file", str(shipped_configs() / "zero3.yaml")], [*TRAIN, "--sp", "2"]
    assert (command[:5], command[-4:]) == ([*ACCELERATE, *zero3], train)
    words = command[5:-4]
    return dict(zip(words[::2], words[1::2], strict=True))


def test_accelerate_config_replaces_the_process_by_accelerate_launch():
    """--num_processes goes before that of the profile, and stays for the processes to compare."""
    rest = ["--num_processes", "2", "--max_steps", "3", "--run_name", "machine_rank"]
    profile = ["--config_file", str(shipped_configs() / "fsdp2.yaml"), "--num_processes", "2"]
    assert started_by("--accelerate_config", "fsdp2", *rest) == [*ACCELERATE, *profile, *TRAIN, *rest]


@pytest.mark.parametrize(("command", "hello"), [("train", "longctx "), ("verify", "")])
def test_what_stands_on_stdout_before_accelerate_launch(command, hello, capsys):
    """A run says that it starts. A verification prints its result alone, and DeepSpeed does not speak of GPUs there."""
    with patch.dict(os.environ), patch.object(os, "execv", side_effect=SystemExit) as execv:
        for name in ("LONGCTX_HAS_STARTED", "DS_ACCELERATOR"):
            os.environ.pop(name, None)
        with pytest.raises(SystemExit):
            longctx_main([command, "--accelerate_config", "fsdp2"])
        assert os.environ.get("DS_ACCELERATOR") == "cpu"
    assert execv.called
    said = capsys.readouterr().out
    assert said.startswith(hello) if hello else said == ""


def test_accelerate_config_hands_the_machine_on():
    flags = ["--machine-rank=1", "--accelerate_config", "zero3", "--main_process_ip", "10.0.0.1"]
    given = {"--machine_rank": "1", "--main_process_ip": "10.0.0.1", "--deepspeed_multinode_launcher": "standard"}
    assert launched_with(*flags) == given


def test_accelerate_config_takes_the_machine_from_srun(monkeypatch):
    told = {"STEP_NUM_TASKS": "2", "STEP_TASKS_PER_NODE": "1(x2)", "STEP_NODELIST": "node[3-4]", "JOB_ID": "0"}
    for name, value in (told | {"STEP_ID": "5", "NODEID": "1", "LOCALID": "0", "PROCID": "1"}).items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert launched_with("--accelerate_config=zero3") == {
        "--num_processes": "16",
        "--num_machines": "2",
        "--machine_rank": "1",
        "--main_process_ip": "node3",
        "--main_process_port": "12005",
        "--deepspeed_multinode_launcher": "standard",
    }


@pytest.mark.parametrize("env", [{"RANK": "0", "WORLD_SIZE": "2"}, {"ACCELERATE_MIXED_PRECISION": "no"}], ids=str)
def test_accelerate_config_is_too_late_inside_a_launch(env, monkeypatch):
    """accelerate sets no rank where it starts one process."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"--accelerate_config zero3 comes too late.*accelerate launch --config_file"):
        started_by("--accelerate_config", "zero3")


# Flags against a file of one's own


@pytest.mark.parametrize("offload", [False, True])
def test_the_trainer_checkpoints_in_the_place_of_fsdp(offload):
    """accelerate's own checkpointing would run the ring a second time."""
    env = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_ACTIVATION_CHECKPOINTING": "true"}
    env |= {"FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": str(offload).lower(), "RANK": "0", "WORLD_SIZE": "2"}
    flags = parse_flags([*TINY, "--use_cpu", "True", "--sp", "2", "--gradient_checkpointing", "False"])
    run = resolve(flags, read_profile(env), env)
    assert run.settings["gradient_checkpointing"] is True
    assert run.settings["activation_offloading"] is offload
    assert not any(name.startswith("FSDP_ACTIVATION_CHECKPOINTING") for name in env)


CP, SP, COPIES = ({f"PARALLELISM_CONFIG_{name}_SIZE": "2"} for name in ("CP", "SP", "DP_REPLICATE"))
CONTRADICTIONS = {
    "sp": (CP, "--sp 4", ["cp_size 2"], ("sp", 2)),
    "cp": (SP, "--cp 2", ["sp_size"], ("sp", 2)),
    "sp_backend": (CP, "--sp_backend ulysses", ["cp_size"], ("sp_backend", "ring")),
    "dp_replicate": (COPIES, "--dp_replicate 4", ["dp_replicate_size 2"], ("dp_replicate", 2)),
    "engine": ({"ACCELERATE_USE_DEEPSPEED": "true"}, "--engine fsdp2", ["starts deepspeed"], ("engine", "deepspeed")),
    "accumulation": (
        {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2"},
        "--gradient_accumulation_steps 4",
        ["accelerate's config", "gradient_accumulation_steps 2"],
        ("gradient_accumulation_steps", 2),
    ),
    "clipping": (
        {"ACCELERATE_GRADIENT_CLIPPING": "0.5"},
        "--max_grad_norm 1.0",
        ["gradient_clipping 0.5"],
        ("max_grad_norm", 0.5),
    ),
    "micro batch": (
        {"train_micro_batch_size_per_gpu": 4},
        "--per_device_train_batch_size 2",
        ["ds.json", "train_micro_batch_size_per_gpu 4"],
        ("per_device_train_batch_size", 4),
    ),
    "learning rate": (
        {"optimizer": {"params": {"lr": 1e-3}}},
        "--learning_rate 0.0001",
        ["ds.json", "optimizer.params.lr 0.001"],
        ("learning_rate", 1e-3),
    ),
    "precision": ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "--bf16 False", ["mixed_precision"], ("bf16", True)),
}
"""Variables of accelerate's or keys of a DeepSpeed file, flags against them, what is told after the flag, and what they
set alone."""


def resolve_against(asked, flags, folder):
    """The run of four processes with these variables or keys, and these flags."""
    env = {"RANK": "0", "WORLD_SIZE": "4", "ACCELERATE_MIXED_PRECISION": "no"}
    if any(name.isupper() for name in asked):
        env |= asked
    else:
        (folder / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, **asked}))
        env |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(folder / "ds.json")}
    return resolve(parse_flags([*TINY, "--use_cpu", "True", *flags]), read_profile(env), env)


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_flag_that_contradicts_the_file_is_an_error_with_both_values(case, tmp_path):
    """The same file without the flag resolves."""
    asked, flags, told, (name, value) = CONTRADICTIONS[case]
    shown = flags.replace("--cp 2", "--sp_backend ring")
    with pytest.raises(ValueError, match=".*".join(map(re.escape, [shown, *told]))):
        resolve_against(asked, flags.split(), tmp_path)
    run = resolve_against(asked, [], tmp_path)
    assert {**run.settings, "engine": run.engine}[name] == value


def test_deepspeed_config_file_is_read(launch, tmp_path):
    """Numbers in the file are the run's, `auto` is left to the flags."""
    values = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2, "gradient_clipping": "auto"}
    values |= {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "optimizer": {"params": {"lr": 1e-3}}}
    (tmp_path / "ds.json").write_text(json.dumps(values))
    deepspeed = {"deepspeed_config_file": str(tmp_path / "ds.json"), "zero3_init_flag": False}
    config = {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": deepspeed}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(config))
    run = resolve_launched(launch(tmp_path / "own.yaml"), [*TINY, "--use_cpu", "True", "--max_grad_norm", "0.7"])
    assert (run.engine, run.zero_stage, run.settings["bf16"]) == ("deepspeed", 2, True)
    assert run.settings["per_device_train_batch_size"] == 3
    assert run.settings["gradient_accumulation_steps"] == 2
    assert run.settings["learning_rate"] == 1e-3
    assert run.settings["max_grad_norm"] == 0.7

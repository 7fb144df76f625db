"""The shipped Accelerate profiles and run YAMLs, and what people's own config files may say.

What `accelerate launch` makes of a file is taken from its own code, with the start of the processes left out; a few
runs are real. Losses are compared to relative 1e-5, the promise for a first step in fp32.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from longctx.settings.flags import parse_flags
from longctx.settings.profile import find_profile, read_profile, relaunch, shipped_configs
from longctx.settings.resolve import resolve
from tests.workers import run_main, run_ranks

REPOSITORY = Path(__file__).parents[2]
CONFIGS = REPOSITORY / "configs"
PROFILES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
RUNS = sorted(path.stem for path in CONFIGS.glob("run/*.yaml"))
NO_PROFILE = read_profile({})
TINY = ["--model_name_or_path", "tiny", "--dataset_name", "stdlib", "--max_length", "256"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
TRAIN = ["-m", "longctx.train"]


# What the launcher makes of a file


@pytest.fixture
def launch(monkeypatch, tmp_path):
    """`launch(config file or None, *launcher flags)` -> what `accelerate launch` would start, its environment added."""
    import torch.distributed.run as torchrun
    from accelerate.commands import launch as command

    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_", "MASTER_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("accelerate.utils.launch.is_port_in_use", lambda port: False)
    before, started = dict(os.environ), {}

    def record(environment, **what):
        started.update(what, env={k: v for k, v in environment.items() if before.get(k) != v})
        return SimpleNamespace(wait=lambda: 0, returncode=0)

    monkeypatch.setattr(torchrun, "run", lambda args: record(os.environ, **_where(args)))
    monkeypatch.setattr(command, "subprocess", SimpleNamespace(Popen=lambda cmd, env: record(env, command=cmd)))
    monkeypatch.chdir(tmp_path)  # accelerate leaves a .deepspeed_env file where it is called

    def run(config_file, *flags):
        started.clear()
        chosen = ["--config_file", str(config_file)] if config_file else []
        command.launch_command(command.launch_command_parser().parse_args([*chosen, *flags, *TRAIN]))
        return dict(started)

    return run


def _where(args):
    names = ("nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "rdzv_endpoint")
    return {name: getattr(args, name) for name in names}


def resolve_launched(started, arguments):
    """The run that `longctx.train arguments` resolves to in the first process of a launch."""
    env = dict(started["env"])
    if "nproc_per_node" in started:
        env |= {"RANK": "0", "WORLD_SIZE": started["nproc_per_node"], "LOCAL_WORLD_SIZE": started["nproc_per_node"]}
    profile = read_profile(env)
    return resolve(parse_flags(arguments), profile, env)


def leaves(profile):
    for key, value in profile.items():
        yield from ((key, inner) for inner in value) if isinstance(value, dict) else [(key,)]


CHANGED = {
    "distributed_type": lambda old: "MULTI_GPU" if old == "NO" else "NO",
    "deepspeed_multinode_launcher": lambda old: "pdsh",
    "gradient_accumulation_steps": lambda old: 4,
    "gradient_clipping": lambda old: 0.5,
    "fsdp_auto_wrap_policy": lambda old: "SIZE_BASED_WRAP",
    "fsdp_backward_prefetch": lambda old: "BACKWARD_POST",
    "fsdp_state_dict_type": lambda old: "SHARDED_STATE_DICT",
    "main_process_ip": lambda old: "10.0.0.2",
}


def changed(key, old):
    if key in CHANGED:
        return CHANGED[key](old)
    if old == "FULL_SHARD":
        return "SHARD_GRAD_OP"
    return (
        not old if isinstance(old, bool) else old % 3 + 1 if key.startswith(("zero", "fsdp_version")) else old * 2 or 1
    )


READ_BY_LONGCTX = ("parallelism_config_", "zero_stage", "gradient_", "fsdp_activation_checkpointing", "fsdp_version")
SEVERAL_MACHINES = ["--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "10.0.0.1"]


@pytest.mark.parametrize(
    ("name", "key"),
    [(name, key) for name in PROFILES for key in leaves(yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()))],
    ids=lambda value: value if isinstance(value, str) else value[-1],
)
def test_every_key_of_a_profile_acts(name, key, launch, tmp_path):
    """Another value starts other processes or gives them another environment; what longctx reads reaches it."""
    flags = SEVERAL_MACHINES if key[-1] == "deepspeed_multinode_launcher" else []
    shipped = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    other = copy.deepcopy(shipped)
    node = other[key[0]] if len(key) == 2 else other
    node[key[-1]] = changed(key[-1], node[key[-1]])
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(other))
    as_shipped = launch(CONFIGS / f"{name}.yaml", *flags)
    if key[-1] == "fsdp_sync_module_states":  # accelerate refuses false beside fsdp_cpu_ram_efficient_loading
        with pytest.raises(ValueError, match="fsdp_sync_module_states"):
            launch(tmp_path / "other.yaml", *flags)
        return
    as_changed = launch(tmp_path / "other.yaml", *flags)
    assert as_changed != as_shipped
    if key[-1].startswith(READ_BY_LONGCTX):
        assert read_profile(as_changed["env"]) != read_profile(as_shipped["env"])


@pytest.mark.parametrize("name", PROFILES)
def test_profiles_leave_to_the_flags_what_flags_set(name, launch):
    profile = read_profile(launch(CONFIGS / f"{name}.yaml")["env"])
    assert profile.mixed_precision is None
    assert profile.gradient_accumulation_steps is None
    assert profile.gradient_clipping is None
    assert profile.micro_batch_size is None


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


@pytest.mark.parametrize("name", RUNS)
def test_run_yaml_resolves_with_its_profile(name, launch):
    profile = name if name in PROFILES else "zero3"
    arguments = ["--config", str(CONFIGS / "run" / f"{name}.yaml"), "--model_name_or_path", "tiny"]
    run = resolve_launched(launch(CONFIGS / f"{profile}.yaml"), arguments)
    for key, value in yaml.safe_load((CONFIGS / "run" / f"{name}.yaml").read_text()).items():
        if key != "model_name_or_path":
            assert run.settings[key] == value, key


def test_hybrid_profile_carries_fsdp2_and_its_run_yaml_the_degrees(launch):
    started = launch(CONFIGS / "hybrid_8gpu.yaml")
    profile = read_profile(dict(started["env"]))
    assert (profile.engine, profile.cp, profile.sp) == ("fsdp2", None, None)
    arguments = ["--config", str(CONFIGS / "run/hybrid_8gpu.yaml"), "--model_name_or_path", "tiny"]
    run = resolve_launched(started, arguments)
    assert (run.engine, run.backend.name, run.dims.ring, run.dims.ulysses) == ("fsdp2", "hybrid", 2, 4)


def test_demo_yaml_is_the_demo_preset():
    from longctx.settings.values import DEMO

    assert yaml.safe_load((CONFIGS / "run/demo.yaml").read_text()) == DEMO


def test_fsdp1_is_refused_on_the_cpu_and_above_sp_1(launch):
    started = launch(CONFIGS / "fsdp1.yaml")
    with pytest.raises(ValueError, match=r"fsdp_version 1 .*does not run on the CPU.*fsdp_version: 2"):
        resolve_launched(started, [*TINY, "--use_cpu", "True"])
    with pytest.raises(ValueError, match=r"sp 2 needs FSDP2 or DeepSpeed"):
        resolve_launched(started, [*TINY, "--use_cpu", "True", "--sp", "2"])


def test_degrees_of_a_profile_are_taken_out_of_the_environment(launch):
    env = launch(CONFIGS / "alst_ulysses_4gpu.yaml")["env"]
    assert env["PARALLELISM_CONFIG_SP_SIZE"] == "2"
    assert env["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
    profile = read_profile(env)
    assert (profile.sp, profile.dp_shard) == (2, 2)
    assert not [name for name in env if "PARALLELISM_CONFIG" in name]


# Finding a profile


def test_profiles_are_found_by_name_and_by_path(tmp_path):
    assert find_profile("zero3").read_text() == (CONFIGS / "zero3.yaml").read_text()
    own = tmp_path / "own.yaml"
    own.write_text("distributed_type: 'NO'\n")
    assert find_profile(str(own)) == own
    for name in ("run", "zero4"):
        with pytest.raises(ValueError, match=rf"--accelerate_config {name} .*alst_ulysses_4gpu.*zero3"):
            find_profile(name)
    assert shipped_configs().is_dir()


def test_accelerate_config_replaces_the_process_by_accelerate_launch(monkeypatch):
    started = []
    monkeypatch.setattr(os, "execv", lambda program, command: started.extend(command))
    relaunch(parse_flags(["--sp", "2", "--accelerate_config", "fsdp2", "--max_steps", "3"]), NO_PROFILE)
    assert started[:5] == [*ACCELERATE, "--config_file", str(shipped_configs() / "fsdp2.yaml")]
    assert started[5:] == [*TRAIN, "--sp", "2", "--max_steps", "3"]


def test_num_processes_goes_before_that_of_the_profile(monkeypatch):
    started = []
    monkeypatch.setattr(os, "execv", lambda program, command: started.extend(command))
    relaunch(parse_flags(["--accelerate_config", "zero3", "--num_processes", "2"]), NO_PROFILE)
    assert started[5:] == ["--num_processes", "2", *TRAIN, "--num_processes", "2"]


def started_by(monkeypatch, *flags):
    started = []
    monkeypatch.setattr(os, "execv", lambda program, command: started.extend(command))
    relaunch(parse_flags([*flags, "--sp", "2"]), NO_PROFILE)
    assert started[:5] == [*ACCELERATE, "--config_file", str(shipped_configs() / "zero3.yaml")]
    assert started[-len(TRAIN) - 2 :] == [*TRAIN, "--sp", "2"]
    words = started[5 : -len(TRAIN) - 2]
    return dict(zip(words[::2], words[1::2], strict=True))


def test_accelerate_config_hands_the_machine_on(monkeypatch):
    flags = ["--machine-rank=1", "--accelerate_config", "zero3", "--main_process_ip", "10.0.0.1"]
    given = {"--machine_rank": "1", "--main_process_ip": "10.0.0.1", "--deepspeed_multinode_launcher": "standard"}
    assert started_by(monkeypatch, *flags) == given


def test_accelerate_config_takes_the_machine_from_srun(monkeypatch):
    told = {"STEP_NUM_TASKS": "2", "STEP_TASKS_PER_NODE": "1(x2)", "STEP_NODELIST": "node[3-4]", "JOB_ID": "0"}
    for name, value in (told | {"STEP_ID": "5", "NODEID": "1", "LOCALID": "0", "PROCID": "1"}).items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert started_by(monkeypatch, "--accelerate_config=zero3") == {
        "--num_machines": "2",
        "--machine_rank": "1",
        "--main_process_ip": "node3",
        "--main_process_port": "12005",
        "--deepspeed_multinode_launcher": "standard",
    }


@pytest.mark.parametrize("by", ["launched", "by_accelerate"])
def test_accelerate_config_is_too_late_inside_a_launch(by):
    with pytest.raises(ValueError, match=r"--accelerate_config zero3 comes too late.*accelerate launch --config_file"):
        relaunch(parse_flags(["--accelerate_config", "zero3"]), replace(NO_PROFILE, **{by: True}))


@pytest.mark.long  # .ci/run installs the wheel
def test_wheel_holds_the_profiles(tmp_path):
    """Built from the sources and installed elsewhere, the package finds a profile by its name."""
    for folder in ("longctx", "configs", "benchmarks"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / folder, tmp_path / "source" / folder, symlinks=True, ignore=ignored)
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(REPOSITORY / file, tmp_path / "source")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheels, target = tmp_path / "wheels", tmp_path / "target"
    _check_call([*pip, "wheel", ".", "--no-deps", "--no-build-isolation", "-w", str(wheels)], cwd=tmp_path / "source")
    _check_call([*pip, "install", "--no-deps", "--target", str(target), str(next(wheels.glob("*.whl")))], cwd=tmp_path)
    look_up = "from longctx.settings.profile import find_profile as f; print(f('zero3')); print(f('zero3').read_text())"
    env = os.environ | {"PYTHONPATH": str(target)}
    path, _, text = _check_call([sys.executable, "-c", look_up], cwd=tmp_path, env=env).partition("\n")
    assert Path(path) == target / "longctx/configs/zero3.yaml"
    assert yaml.safe_load(text) == yaml.safe_load((CONFIGS / "zero3.yaml").read_text())
    installed = {str(file.relative_to(target / "longctx/configs")) for file in target.glob("longctx/configs/**/*.yaml")}
    assert installed == {f"{name}.yaml" for name in PROFILES} | {f"run/{name}.yaml" for name in RUNS}


def _check_call(command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# Flags against a file of one's own


CONTRADICTIONS = {
    "sp": ({"cp": 2}, ["--sp", "4"], ["--sp 4", "cp_size 2"]),
    "cp": ({"sp": 2}, ["--cp", "2"], ["--sp_backend ring", "sp_size 2"]),
    "sp_backend": ({"cp": 2}, ["--sp_backend", "ulysses"], ["--sp_backend ulysses", "cp_size 2 (ring)"]),
    "dp_replicate": ({"dp_replicate": 2}, ["--dp_replicate", "4"], ["--dp_replicate 4", "dp_replicate_size 2"]),
    "engine": ({"engine": "deepspeed"}, ["--engine", "fsdp2"], ["--engine fsdp2", "starts deepspeed"]),
    "accumulation": (
        {"gradient_accumulation_steps": 2},
        ["--gradient_accumulation_steps", "4"],
        ["--gradient_accumulation_steps 4", "gradient_accumulation_steps 2"],
    ),
    "clipping": (
        {"gradient_clipping": 0.5},
        ["--max_grad_norm", "1.0"],
        ["--max_grad_norm 1.0", "gradient_clipping 0.5"],
    ),
    "micro batch": (
        {"micro_batch_size": 4},
        ["--per_device_train_batch_size", "2"],
        ["--per_device_train_batch_size 2", "train_micro_batch_size_per_gpu 4"],
    ),
    "learning rate": (
        {"deepspeed_values": {"learning_rate": 1e-3}},
        ["--learning_rate", "1e-4"],
        ["--learning_rate 0.0001", "optimizer.params.lr 0.001"],
    ),
    "precision": ({"mixed_precision": "bf16"}, ["--bf16", "False"], ["--bf16 False", "mixed_precision bf16"]),
}


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


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_flag_that_contradicts_the_file_is_an_error_with_both_values(case):
    fields, arguments, both = CONTRADICTIONS[case]
    env = {"RANK": "0", "WORLD_SIZE": "4"}
    profile = replace(NO_PROFILE, launched=True, by_accelerate=True, **fields)
    with pytest.raises(ValueError, match=".*".join(map(re.escape, both))):
        resolve(parse_flags([*TINY, "--use_cpu", "True", *arguments]), profile, env)


@pytest.mark.parametrize("case", [case for case in CONTRADICTIONS if case not in ("cp", "sp_backend", "dp_replicate")])
def test_the_file_alone_is_no_contradiction(case):
    """The same file without the flag resolves: the error above is about the two together."""
    profile = replace(NO_PROFILE, launched=True, by_accelerate=True, **CONTRADICTIONS[case][0])
    run = resolve(parse_flags([*TINY, "--use_cpu", "True"]), profile, {"RANK": "0", "WORLD_SIZE": "4"})
    wanted = {
        "accumulation": ("gradient_accumulation_steps", 2),
        "clipping": ("max_grad_norm", 0.5),
        "micro batch": ("per_device_train_batch_size", 4),
        "learning rate": ("learning_rate", 1e-3),
        "precision": ("bf16", True),
        "checkpointing": ("gradient_checkpointing", False),
    }
    name, value = wanted.get(case, ("use_cpu", True))
    assert run.settings[name] == value
    assert case != "sp" or (run.dims.sp, run.backend.name) == (2, "ring")


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


# A default_config.yaml that `accelerate config` left


WIZARD = {"machine_rank": 0, "main_training_function": "main", "mixed_precision": "no", "num_machines": 1}
WIZARD |= {"compute_environment": "LOCAL_MACHINE", "debug": False, "rdzv_backend": "static", "same_network": True}
WIZARD |= {"downcast_bf16": "no", "enable_cpu_affinity": False, "tpu_env": [], "tpu_use_cluster": False}
ZERO3 = {"gradient_accumulation_steps": 1, "offload_optimizer_device": "none", "offload_param_device": "none"}
ZERO3 |= {"zero3_init_flag": True, "zero3_save_16bit_model": True, "zero_stage": 3}
FSDP2 = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_cpu_ram_efficient_loading": True, "fsdp_version": 2}
FSDP2 |= {"fsdp_reshard_after_forward": True, "fsdp_state_dict_type": "SHARDED_STATE_DICT"}
LEFT_BEHIND = {
    "NO": {"num_processes": 1, "use_cpu": True},
    "MULTI_CPU": {"num_processes": 2, "use_cpu": True},
    "MULTI_GPU": {"num_processes": 2, "use_cpu": False, "gpu_ids": "all"},
    "DEEPSPEED": {"num_processes": 2, "use_cpu": False, "deepspeed_config": ZERO3},
    "FSDP": {"num_processes": 2, "use_cpu": False, "fsdp_config": FSDP2},
    "MEGATRON_LM": {"num_processes": 2, "use_cpu": False, "megatron_lm_config": {"megatron_lm_tp_degree": 2}},
}


def leave_default_config(folder, kind):
    path = folder / "accelerate/default_config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(yaml.safe_dump(WIZARD | LEFT_BEHIND[kind] | {"distributed_type": kind}))
    return path


@pytest.fixture
def default_config(launch, tmp_path, monkeypatch):
    """`default_config(kind)` -> what `accelerate launch -m longctx.train` starts with such a file left behind."""

    def left(kind):
        path = str(leave_default_config(tmp_path, kind))
        for module in ("accelerate.commands.launch", "accelerate.commands.config.config_args"):
            monkeypatch.setattr(f"{module}.default_config_file", path)
        return launch(None)

    return left


@pytest.mark.parametrize("kind", ["NO", "MULTI_CPU", "MULTI_GPU", "DEEPSPEED", "FSDP"])
def test_default_config_left_behind_works(kind, default_config):
    run = resolve_launched(default_config(kind), [*TINY, "--use_cpu", "True", "--sp", "2", "--sp_backend", "ring"])
    assert (run.dims.world_size, run.dims.sp) == (2, 2)
    assert run.engine == ("deepspeed" if kind == "DEEPSPEED" else "fsdp2")
    assert run.must_spawn == (kind in ("NO", "MULTI_CPU"))


def test_use_cpu_of_a_default_config_is_ours(default_config, monkeypatch):
    monkeypatch.setattr("longctx.settings.resolve.device_count", lambda: 8)
    assert resolve_launched(default_config("NO"), TINY).use_cpu


def test_default_config_of_another_engine_is_refused_with_its_path(default_config, tmp_path):
    with pytest.raises(ValueError, match=rf"MEGATRON_LM .*{tmp_path}/accelerate/default_config.yaml"):
        resolve_launched(default_config("MEGATRON_LM"), TINY)


@pytest.mark.parametrize(
    ("env", "named"),
    [({"MASTER_ADDR": "10.0.0.1"}, "main_process_ip is 10.0.0.1"), ({"OMPI_COMM_WORLD_SIZE": "4"}, "mpirun started 4")],
)
def test_processes_that_nobody_connects_are_refused(env, named):
    """Several machines without GPUs, or mpirun: accelerate starts processes there and tells them nothing."""
    env = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "True"} | env
    with pytest.raises(ValueError, match=rf"{named}.*torchrun"):
        read_profile(dict(env))
    assert read_profile(env | {"RANK": "0", "WORLD_SIZE": "4"}).launched
    assert not read_profile(env | {"ACCELERATE_USE_CPU": "False"}).use_cpu


# Real runs


ROWS = [20, 60, 90, 200, 256, 31, 77, 150, 64, 12, 240, 180]


def common(output, data):
    flags = ["--model_name_or_path", "tiny", "--dataset_name", data, "--max_length", "256", "--max_steps", "2"]
    flags += ["--logging_steps", "1", "--save_strategy", "no", "--gradient_checkpointing", "False"]
    return [
        *flags,
        "--disable_tqdm",
        "True",
        "--report_to",
        "none",
        "--output_dir",
        str(output),
        "--use_cpu",
        "--explain",
    ]


def logged(output):
    state = output / "trainer_state.json"
    history = json.loads(state.read_text())["log_history"] if state.is_file() else []
    return [entry for entry in history if "loss" in entry]


def start(command, tmp_path, *arguments, data, output="out", env=None):
    """Run a training of two steps; returns (exit code, everything printed, {step: log entry})."""
    done = subprocess.run(
        [*command, *common(tmp_path / output, data), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (env or {}),
    )
    return done.returncode, done.stdout + done.stderr, logged(tmp_path / output)


def profile_command(name, *launcher_flags):
    # Port 0: a free one, where two test runs share a machine.
    flags = ["--config_file", f"configs/{name}.yaml", "--main_process_port", "0", *launcher_flags]
    return [*ACCELERATE, *flags, *TRAIN]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = [{"input_ids": [3 + (7 * i + 11 * j * j) % 240 for j in range(n)]} for i, n in enumerate(ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def one_device(data, tmp_path_factory):
    """`longctx train --sp 1` with two sequences a step: (printed, log)."""
    arguments = ["--sp", "1", "--per_device_train_batch_size", "2", "--attn_implementation", "flash_attention_2"]
    folder = tmp_path_factory.mktemp("one")
    [(code, printed, errors)] = run_main(1, "longctx.train", [*common(folder / "out", data), *arguments])
    assert code == 0, errors
    return printed, logged(folder / "out")


def check_first_step(outcome, one_device):
    code, printed, log = outcome
    assert code == 0, printed
    for key in ("loss", "grad_norm"):
        assert log[0][key] == pytest.approx(one_device[1][0][key], rel=1e-5), key
    assert printed.count("mesh  ") == 1
    assert "FutureWarning" not in printed


def test_kernel_that_is_used_is_printed(one_device):
    """A kernel name asks for packed-exact attention; on the CPU another kernel does it, and its name is printed."""
    line = next(line for line in one_device[0].splitlines() if "attention kernel" in line)
    assert re.search(r"attention kernel .*CPU.*packed-exact, flash_attention_2 was asked for", line)


def test_context_parallel_2gpu_equals_one_device(one_device, data, tmp_path):
    command = profile_command("context_parallel_2gpu")
    outcome = start(command, tmp_path, "--per_device_train_batch_size", "2", data=data)
    check_first_step(outcome, one_device)
    assert "sp 2 (ring 2 × ulysses 1)" in outcome[1]
    assert "engine    fsdp2" in outcome[1]


@pytest.mark.long
def test_alst_ulysses_4gpu_equals_one_device(one_device, data, tmp_path):
    outcome = start(profile_command("alst_ulysses_4gpu"), tmp_path, "--per_device_train_batch_size", "1", data=data)
    check_first_step(outcome, one_device)
    assert "dp_shard 2 × sp 2 (ring 1 × ulysses 2)" in outcome[1]
    assert "engine    deepspeed ZeRO-3" in outcome[1]
    assert (tmp_path / "out/model.safetensors").is_file()


@pytest.mark.long  # test_refusals.py has an error of a launch in a plain run
def test_contradiction_in_a_launch_is_one_line_before_the_processes_meet(data, tmp_path):
    code, printed, log = start(profile_command("context_parallel_2gpu"), tmp_path, "--sp", "4", data=data)
    assert code != 0
    assert not log
    lines = [line for line in printed.splitlines() if line.startswith("longctx:")]
    assert len(lines) == 1
    assert re.search(r"error: --sp 4 .*parallelism_config_cp_size 2", lines[0])
    assert printed.rstrip().splitlines()[-2].startswith("  traceback : --sp 4")  # the launcher's closing report


def stock_sharding(arguments):
    """Train in this process; returns what accelerate knows of sequence parallelism, and the variables left over.

    torch's own mesh is of GPUs on a machine that has some, whatever the group runs on: FSDP2 must not be left to it.
    """
    from torch.distributed.fsdp._fully_shard import _fully_shard

    from longctx.run import fit, load, prepare

    def mesh_of_any_accelerator():
        raise AssertionError("FSDP2 was given no mesh")

    _fully_shard._init_default_mesh = mesh_of_any_accelerator
    run = resolve(parse_flags(arguments), read_profile(), os.environ)
    prepared = prepare(run)
    trainer = fit(prepared, load(prepared))
    accelerator = trainer.accelerator
    assert {parameter.device_mesh.device_type for parameter in trainer.model.parameters()} == {"cpu"}
    config = accelerator.parallelism_config
    degrees = (config.cp_size, config.sp_size, config.tp_size) if config is not None else (1, 1, 1)
    return run.dims.sp, degrees, [name for name in os.environ if "PARALLELISM_CONFIG" in name]


def test_stock_sharding_is_never_switched_on(launch, data, tmp_path, monkeypatch):
    """With the environment that the profile makes the launcher export, the Accelerator knows of no cp and no sp."""
    for name, value in launch(CONFIGS / "context_parallel_2gpu.yaml")["env"].items():
        monkeypatch.setenv(name, value)
    arguments = ["--model_name_or_path", "tiny", "--dataset_name", data, "--max_length", "256", "--max_steps", "1"]
    arguments += ["--use_cpu", "True", "--report_to", "none", "--output_dir", str(tmp_path), "--save_strategy", "no"]
    arguments += ["--disable_tqdm", "True"]
    assert os.environ["PARALLELISM_CONFIG_CP_SIZE"] == "2"
    assert run_ranks(2, f"{__name__}:stock_sharding", arguments) == [(2, (1, 1, 1), [])] * 2


# Real runs that take minutes together


@pytest.mark.long
@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "fsdp2", "multi_gpu"])
@pytest.mark.parametrize("sp", ["1", "2"])
def test_profile_equals_one_device(name, sp, one_device, data, tmp_path):
    arguments = ["--sp", sp, "--per_device_train_batch_size", sp]
    check_first_step(start(profile_command(name, "--num_processes", "2"), tmp_path, *arguments, data=data), one_device)
    assert (tmp_path / "out/model.safetensors").is_file()


@pytest.mark.long
def test_hybrid_8gpu_on_four_processes_equals_one_device(one_device, data, tmp_path):
    command = profile_command("hybrid_8gpu", "--num_processes", "4")
    arguments = ["--sp", "4", "--sp_backend", "hybrid", "--per_device_train_batch_size", "2"]
    outcome = start(command, tmp_path, *arguments, data=data)
    check_first_step(outcome, one_device)
    assert "sp 4 (ring 2 × ulysses 2)" in outcome[1]


@pytest.mark.long
@pytest.mark.parametrize(("sp", "micro"), [("1", "1"), ("2", "2")])
def test_replicas_equal_one_device(sp, micro, data, tmp_path):
    """HSDP on four processes: two copies of a model sharded over two, with data- and sequence-parallel shards."""
    single = start([sys.executable, *TRAIN], tmp_path, "--per_device_train_batch_size", "4", data=data, output="one")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4", *TRAIN]
    arguments = ["--dp_replicate", "2", "--sp", sp, "--sp_backend", "ring", "--per_device_train_batch_size", micro]
    outcome = start(torchrun, tmp_path, *arguments, data=data)
    check_first_step(outcome, (None, single[2]))
    assert "dp_replicate 2" in outcome[1]


@pytest.mark.long
def test_replicas_of_a_profile(data, one_device, tmp_path):
    profile = yaml.safe_load((CONFIGS / "fsdp2.yaml").read_text()) | {"num_processes": 4}
    profile["parallelism_config"] = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_cp_size": 2}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(profile))
    command = [*ACCELERATE, "--config_file", str(tmp_path / "own.yaml"), "--main_process_port", "0", *TRAIN]
    outcome = start(command, tmp_path, "--per_device_train_batch_size", "1", data=data)
    check_first_step(outcome, one_device)
    assert "dp_replicate 2 × dp_shard 1 × sp 2" in outcome[1]


@pytest.mark.long
def test_torchrun_and_accelerate_config(one_device, data, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4", *TRAIN]
    flags = ["--per_device_train_batch_size", "1", "--sp", "2"]
    check_first_step(start(torchrun, tmp_path, *flags, data=data, output="torchrun"), one_device)
    named = [sys.executable, *TRAIN, "--accelerate_config", "context_parallel_2gpu"]
    flags = ["--per_device_train_batch_size", "2"]
    check_first_step(start(named, tmp_path, *flags, data=data, output="named"), one_device)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["NO", "MULTI_CPU", "MULTI_GPU", "DEEPSPEED", "FSDP"])
def test_default_config_left_behind_trains(kind, one_device, data, tmp_path):
    leave_default_config(tmp_path, kind)
    flags = ["--sp", "2", "--per_device_train_batch_size", "2"]
    outcome = start([*ACCELERATE, *TRAIN], tmp_path, *flags, data=data, env={"HF_HOME": str(tmp_path)})
    check_first_step(outcome, one_device)
    assert (tmp_path / "out/model.safetensors").is_file()


@pytest.mark.long
def test_deepspeed_config_file_trains(one_device, data, tmp_path):
    values = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "train_batch_size": "auto"}
    values |= {"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"}
    (tmp_path / "ds.json").write_text(json.dumps(values))
    deepspeed = {"deepspeed_config_file": str(tmp_path / "ds.json"), "zero3_init_flag": False}
    config = {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": deepspeed}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(config))
    command = [*ACCELERATE, "--config_file", str(tmp_path / "own.yaml"), "--main_process_port", "0", *TRAIN]
    check_first_step(start(command, tmp_path, "--sp", "2", data=data), one_device)

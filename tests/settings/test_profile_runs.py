"""What `accelerate config` left behind, and real runs with profiles.

Losses are compared to relative 1e-5, the promise for a first step in fp32.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import yaml

from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from tests.jsonl import write_lines
from tests.settings.test_profiles import ACCELERATE, CONFIGS, REPOSITORY, TINY, TRAIN, resolve_launched
from tests.workers import run_main, run_ranks

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


@pytest.fixture
def default_config(launch, tmp_path, monkeypatch):
    """`default_config(kind)` -> what `accelerate launch -m longctx.train` starts with such a file left behind."""

    def left(kind):
        path = tmp_path / "accelerate/default_config.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(yaml.safe_dump(WIZARD | LEFT_BEHIND[kind] | {"distributed_type": kind}))
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        # accelerate works the path out when it is imported, longctx when it reads the profile.
        for module in ("accelerate.commands.launch", "accelerate.commands.config.config_args"):
            monkeypatch.setattr(f"{module}.default_config_file", str(path))
        return launch(None)

    return left


@pytest.mark.parametrize("kind", ["NO", "MULTI_CPU", "MULTI_GPU", "DEEPSPEED", "FSDP"])
def test_default_config_left_behind_works(kind, default_config):
    run = resolve_launched(default_config(kind), [*TINY, "--use_cpu", "True", "--sp", "2", "--sp_backend", "ring"])
    assert (run.dims.world_size, run.dims.sp) == (2, 2)
    assert run.engine == ("deepspeed" if kind == "DEEPSPEED" else "fsdp2")
    assert run.facts.launcher.launched == (kind not in ("NO", "MULTI_CPU"))


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
    assert "use_cpu" not in read_profile(env | {"ACCELERATE_USE_CPU": "False"}).values


# Real runs


ROWS = [20, 60, 90, 200, 256, 31, 77, 150, 64, 12, 240, 180]


def common(output, data):
    flags = "--model_name_or_path tiny --max_length 256 --max_steps 2 --logging_steps 1 --save_strategy no --use_cpu"
    flags += " --gradient_checkpointing False --disable_tqdm True --report_to none --explain"
    return [*flags.split(), "--dataset_name", data, "--output_dir", str(output)]


def logged(output):
    state = output / "trainer_state.json"
    history = json.loads(state.read_text())["log_history"] if state.is_file() else []
    return [entry for entry in history if "loss" in entry]


def start(command, tmp_path, *arguments, data, output="out"):
    """Run a training of two steps; returns (exit code, everything printed, {step: log entry})."""
    command = [*command, *common(tmp_path / output, data), *arguments]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=REPOSITORY, env=env)
    return done.returncode, done.stdout + done.stderr, logged(tmp_path / output)


def profile_command(name, *launcher_flags):
    # Port 0: a free one, where two test runs share a machine.
    flags = ["--config_file", f"configs/{name}.yaml", "--main_process_port", "0", *launcher_flags]
    return [*ACCELERATE, *flags, *TRAIN]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = [{"input_ids": [3 + (7 * i + 11 * j * j) % 240 for j in range(n)]} for i, n in enumerate(ROWS)]
    return write_lines(path, rows)


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
    assert os.environ["PARALLELISM_CONFIG_CP_SIZE"] == "2"
    assert run_ranks(2, f"{__name__}:stock_sharding", common(tmp_path, data)) == [(2, (1, 1, 1), [])] * 2


# Real runs that take minutes together


PROFILES = {
    **{
        f"{name} at sp {sp}": (name, "--num_processes 2", sp, f"--sp {sp}", [])
        for name in ("zero1", "zero2", "zero3", "fsdp2", "multi_gpu")
        for sp in (1, 2)
    },
    "ring": ("context_parallel_2gpu", "", 2, "", ["sp 2 (ring 2 × ulysses 1)", "engine    fsdp2"]),
    "Ulysses": (
        "alst_ulysses_4gpu",
        "",
        1,
        "",
        ["dp_shard 2 × sp 2 (ring 1 × ulysses 2)", "engine    deepspeed ZeRO-3"],
    ),
    "hybrid": ("hybrid_8gpu", "--num_processes 4", 2, "--sp 4 --sp_backend hybrid", ["sp 4 (ring 2 × ulysses 2)"]),
}
"""Profiles with their launcher's flags, the run's micro-batch and other flags, and what is printed."""


@pytest.mark.long
@pytest.mark.parametrize("case", PROFILES)
def test_profile_equals_one_device(case, one_device, data, tmp_path):
    name, launcher, micro_batch, flags, printed = PROFILES[case]
    flags = ["--per_device_train_batch_size", str(micro_batch), *flags.split()]
    outcome = start(profile_command(name, *launcher.split()), tmp_path, *flags, data=data)
    check_first_step(outcome, one_device)
    assert all(part in outcome[1] for part in printed)
    assert (tmp_path / "out/model.safetensors").is_file()


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
def test_torchrun_and_accelerate_config(one_device, data, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4", *TRAIN]
    flags = ["--per_device_train_batch_size", "1", "--sp", "2"]
    check_first_step(start(torchrun, tmp_path, *flags, data=data, output="torchrun"), one_device)
    named = [sys.executable, *TRAIN, "--accelerate_config", "context_parallel_2gpu"]
    flags = ["--per_device_train_batch_size", "2"]
    check_first_step(start(named, tmp_path, *flags, data=data, output="named"), one_device)


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

"""The launcher's profile: its settings, read from the environment that `accelerate launch` exports, and its launch.

longctx carries out the profile's parallel degrees itself, so the variables that would make accelerate shard are removed
before anything reads them. `relaunch` replaces this process by an `accelerate launch` with the profile.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from longctx.launch.slurm import Step, read_step
from longctx.settings.flags import MACHINE_FLAGS, Flags
from longctx.untrusted.files import check_file
from longctx.untrusted.working_directory import without_working_directory

_PARALLELISM = "PARALLELISM_CONFIG_"
_HANDLED_HERE = (
    "ACCELERATE_USE_PARALLELISM_CONFIG",
    "FSDP_ACTIVATION_CHECKPOINTING",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
)

DEEPSPEED_FLAGS = {
    "learning_rate": "optimizer.params.lr",
    "weight_decay": "optimizer.params.weight_decay",
    "adam_epsilon": "optimizer.params.eps",
}
"""Flags that a deepspeed_config_file can also set, with their keys there; `auto` leaves them to the flag."""

_OFFLOADS = {
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
}
"""Flags with their keys in a deepspeed_config_file; accelerate's own keys have the flags' names."""

_SECTIONS = ("bf16", "fp16", "optimizer", "zero_optimization")
"""Sections of a deepspeed_config_file that are read."""

_COMMUNICATION = {"bf16": "bf16", "bfp16": "bf16", "fp32": "fp32"}
"""DeepSpeed's names for the types that gradients are reduced in."""


@dataclass(frozen=True, kw_only=True)
class LaunchProfile:
    """Settings of a config file; None where it leaves them to the flags."""

    launched: bool
    """Whether a launcher (accelerate, torchrun, deepspeed, srun) has set this process's rank and world size."""
    by_accelerate: bool
    """Whether that launcher was `accelerate launch`."""
    engine: str | None
    """deepspeed, fsdp2 or fsdp1; None for plain or single-device launches."""
    zero_stage: int | None
    cp: int | None
    """Ranks of ring attention, parallelism_config_cp_size."""
    sp: int | None
    """Ranks of Ulysses, parallelism_config_sp_size."""
    dp_replicate: int | None
    dp_shard: int | None
    tp: int
    mixed_precision: str | None
    """bf16, fp16 or fp8."""
    gradient_accumulation_steps: int | None
    gradient_clipping: float | None
    micro_batch_size: int | None
    activation_checkpointing: bool
    """fsdp_activation_checkpointing. The trainer carries it out, since accelerate's would run the ring twice."""
    activation_checkpointing_offload: bool
    """fsdp_activation_checkpointing_offload: what checkpoints save is kept in host memory."""
    unsupported: str | None
    """A distributed type that longctx cannot use, such as Megatron-LM."""
    use_cpu: bool = False
    """use_cpu: true, or accelerate launch --cpu."""
    only_one_started: bool = False
    """Whether num_processes asks for several and accelerate, without a GPU, started this one alone."""
    deepspeed_values: Mapping[str, Any] = field(default_factory=dict)
    """The deepspeed_config_file's values, by flag; see DEEPSPEED_FLAGS."""
    memory_options: Mapping[str, str] = field(default_factory=dict)
    """Non-default offloading and reduction, by flag; see PROFILE_OPTIONS."""


def read_profile(env: MutableMapping[str, str] | None = None) -> LaunchProfile:
    """Read the launcher's environment, and remove the settings that accelerate must not act on.

    Raises:
        ValueError: if the launcher started processes without connecting them, or a file cannot be read.
    """
    env = os.environ if env is None else env
    _check_connected(env)
    if "LOCAL_SIZE" in env:  # DeepSpeed's launcher
        env.setdefault("LOCAL_WORLD_SIZE", env["LOCAL_SIZE"])
    by_accelerate = "ACCELERATE_MIXED_PRECISION" in env
    degrees = {name: _integer(env.get(_PARALLELISM + name)) for name in _degree_names()}
    deepspeed_file = _deepspeed_file(env)
    precision = _deepspeed_precision(deepspeed_file) or env.get("ACCELERATE_MIXED_PRECISION", "no")
    profile = LaunchProfile(
        launched=_launched(env),
        by_accelerate=by_accelerate,
        engine=_engine(env),
        zero_stage=_zero_stage(env, deepspeed_file),
        cp=_above_one(degrees["CP_SIZE"]),
        sp=_above_one(degrees["SP_SIZE"]),
        dp_replicate=_above_one(degrees["DP_REPLICATE_SIZE"]),
        dp_shard=_above_one(degrees["DP_SHARD_SIZE"]),
        tp=degrees["TP_SIZE"] or 1,
        mixed_precision=precision if precision in ("bf16", "fp16", "fp8") else None,
        gradient_accumulation_steps=_integer(
            env.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS") or deepspeed_file.get("gradient_accumulation_steps")
        ),
        gradient_clipping=_number(env.get("ACCELERATE_GRADIENT_CLIPPING") or deepspeed_file.get("gradient_clipping")),
        micro_batch_size=_integer(deepspeed_file.get("train_micro_batch_size_per_gpu")),
        activation_checkpointing=_flag(env, "ACCELERATE_USE_FSDP") and _flag(env, "FSDP_ACTIVATION_CHECKPOINTING"),
        activation_checkpointing_offload=_flag(env, "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"),
        unsupported=_unsupported(env),
        use_cpu=_flag(env, "ACCELERATE_USE_CPU"),
        only_one_started=by_accelerate and not _launched(env) and "MASTER_ADDR" in env,
        deepspeed_values=_deepspeed_values(deepspeed_file),
        memory_options=_memory_options(env, deepspeed_file),
    )
    for name in [name for name in env if name.startswith(_PARALLELISM)] + list(_HANDLED_HERE):
        env.pop(name, None)
    return profile


def default_config_file() -> Path | None:
    """Return the file that `accelerate config` writes and `accelerate launch` reads by default, if it exists."""
    from accelerate.commands.config.config_args import default_config_file as path

    return Path(path) if Path(path).is_file() else None


def _launched(env: Mapping[str, str]) -> bool:
    return "RANK" in env and "WORLD_SIZE" in env


def _check_connected(env: Mapping[str, str]) -> None:
    """Check that accelerate or mpirun started no unconnected processes on the CPU, which would each train alone."""
    if _launched(env):
        return
    if not _flag(env, "ACCELERATE_USE_CPU"):
        return
    by_mpi = next((env[name] for name in ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE") if name in env), "1")
    address = env.get("MASTER_ADDR", "localhost")
    if by_mpi != "1" or address not in ("localhost", "127.0.0.1", "::1"):
        started = f"mpirun started {by_mpi} processes" if by_mpi != "1" else f"main_process_ip is {address}"
        raise ValueError(
            f"{started}, and on the CPU accelerate does not connect processes: each would train alone. Run "
            "torchrun --nnodes N --nproc_per_node M --rdzv_backend c10d --rdzv_endpoint HOST:29500 -m longctx.train … "
            "on each machine."
        )


def _degree_names() -> tuple[str, ...]:
    return ("CP_SIZE", "SP_SIZE", "DP_REPLICATE_SIZE", "DP_SHARD_SIZE", "TP_SIZE")


def _engine(env: MutableMapping[str, str]) -> str | None:
    if _flag(env, "ACCELERATE_USE_DEEPSPEED"):
        return "deepspeed"
    if _flag(env, "ACCELERATE_USE_FSDP"):
        return "fsdp2" if env.get("FSDP_VERSION", "1") == "2" else "fsdp1"
    return None


def _zero_stage(env: MutableMapping[str, str], deepspeed_file: dict) -> int | None:
    stage = _integer(env.get("ACCELERATE_DEEPSPEED_ZERO_STAGE"))
    return _integer(deepspeed_file.get("zero_optimization", {}).get("stage", stage))


def _deepspeed_file(env: MutableMapping[str, str]) -> dict:
    path = env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if not path or path == "none":
        return {}
    try:
        values = json.loads(check_file(Path(path)).read_text())
        for name, part in [("the file", values), *((name, values.get(name, {})) for name in _SECTIONS)]:
            if not isinstance(part, dict):
                raise ValueError(f"{name} is {str(part)[:60]!r}, expected an object")
        return values
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"deepspeed_config_file {path} cannot be read as JSON ({error}). Correct the path or the file."
        ) from error


def _deepspeed_precision(deepspeed_file: Mapping[str, Any]) -> str | None:
    """Return bf16 or fp16 if the file enables it; `auto` follows --bf16."""
    enabled = (name for name in ("bf16", "fp16") if deepspeed_file.get(name, {}).get("enabled") is True)
    return next(enabled, None)


def _deepspeed_values(deepspeed_file: Mapping[str, Any]) -> dict[str, Any]:
    """Return {flag: number} for the DEEPSPEED_FLAGS with numbers in the file."""
    values = {flag: _number(_at(deepspeed_file, path)) for flag, path in DEEPSPEED_FLAGS.items()}
    return {flag: value for flag, value in values.items() if value is not None}


def _at(deepspeed_file: Mapping[str, Any], path: str) -> Any:
    """Return the file's value at `a.b.c`, or None."""
    node: Any = deepspeed_file
    for key in path.split("."):
        node = node.get(key) if isinstance(node, dict) else None
    return node


def _memory_options(env: Mapping[str, str], deepspeed_file: Mapping[str, Any]) -> dict[str, str]:
    """Return the profile's offloading and reduction; `none` and `auto` leave them to the flags."""
    if _flag(env, "ACCELERATE_USE_FSDP"):
        return {"offload_param_device": "cpu"} if _flag(env, "FSDP_OFFLOAD_PARAMS") else {}
    memory_options: dict[str, Any] = {}
    for flag, path in _OFFLOADS.items():
        memory_options[flag] = (
            _at(deepspeed_file, path) if deepspeed_file else env.get(f"ACCELERATE_DEEPSPEED_{flag.upper()}")
        )
    given = deepspeed_file.get("communication_data_type")
    memory_options["communication_data_type"] = _COMMUNICATION.get(given, given) if given else None
    return {flag: str(value) for flag, value in memory_options.items() if value not in (None, "none", "auto")}


def _unsupported(env: MutableMapping[str, str]) -> str | None:
    if _flag(env, "ACCELERATE_USE_MEGATRON_LM"):
        return "MEGATRON_LM"
    if _flag(env, "ACCELERATE_USE_SAGEMAKER"):
        return "SAGEMAKER"
    if env.get("PJRT_DEVICE") == "TPU":
        return "XLA"
    return None


def _flag(env: Mapping[str, str], name: str) -> bool:
    return env.get(name, "false").lower() in ("true", "1", "yes")


def _integer(value: object) -> int | None:
    """Return an int, or None for a missing value or `auto`."""
    try:
        return int(str(value))
    except ValueError:
        return None


def _number(value: object) -> float | None:
    try:
        return float(str(value))
    except ValueError:
        return None


def _above_one(value: int | None) -> int | None:
    return value if value is not None and value > 1 else None


def who_starts(profile: LaunchProfile, num_processes: int, module: str = "longctx.train") -> str:
    """Return a message on why this process starts the others."""
    if profile.only_one_started:
        return (
            "accelerate starts one process on a machine without a GPU, whatever its num_processes says, so "
            f"{module} starts {num_processes}; --num_processes after -m {module} asks for more."
        )
    return f"no launcher started {num_processes} processes, so {module} does."


def relaunch(flags: Flags, profile: LaunchProfile, module: str = "longctx.train") -> None:
    """Replace this process by `accelerate launch --config_file … -m longctx.train …` for --accelerate_config.

    --num_processes overrides the profile's. In a step of `srun` with one task per node, the nodes become accelerate's
    machines.

    Raises:
        ValueError: inside a launched process, where a profile comes too late; with several tasks per node; or if there
            is no such profile.
    """
    name = flags.accelerate_config
    if profile.launched or profile.by_accelerate:
        raise ValueError(
            f"--accelerate_config {name} comes too late: the launcher has started this process already. "
            f"Use accelerate launch --config_file {name} -m {module} …, or python -m {module}."
        )
    path = find_profile(name)
    machines = _machines(read_step(os.environ), name)
    arguments: list[str] = []
    left = iter(flags.arguments)
    for argument in left:
        flag, equals, _ = argument.partition("=")
        if flag.replace("-", "_") not in ("__accelerate_config", *(f"__{machine}" for machine in MACHINE_FLAGS)):
            arguments.append(argument)
        elif not equals:
            next(left)
    machines |= {flag: flags.values[flag] for flag in MACHINE_FLAGS if flags.values[flag] is not None}
    processes = {} if flags.num_processes is None else {"num_processes": flags.num_processes}
    if machines:  # else accelerate starts DeepSpeed's other nodes from the first one, by pdsh
        machines["deepspeed_multinode_launcher"] = "standard"
    os.environ.update(without_working_directory())
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(path)]
    launcher += [word for flag, value in (processes | machines).items() for word in (f"--{flag}", str(value))]
    sys.stdout.flush()
    os.execv(sys.executable, [*launcher, "-m", module, *arguments])


def _machines(step: Step | None, name: str) -> dict[str, object]:
    """Return accelerate's flags for a step of `srun`."""
    if step is None:
        return {}
    if max(step.tasks) > 1:
        raise ValueError(
            f"--accelerate_config {name} in {max(step.tasks)} tasks on a node: accelerate launch starts the processes "
            "of a node itself. Start one task a node (srun --ntasks-per-node 1), or leave the flag out and set what "
            "the profile sets by flags."
        )
    where = {"machine_rank": step.node, "main_process_ip": step.address, "main_process_port": step.port}
    return {"num_machines": step.nodes, **where}


def find_profile(name: str) -> Path:
    """Return the path of a profile, given as that path or by its name in configs/.

    Raises:
        ValueError: if it is neither; the message lists the names.
    """
    if Path(name).is_file():
        return Path(name)
    shipped = {path.stem: path for path in shipped_configs().glob("*.yaml")}
    if name not in shipped:
        raise ValueError(
            f"--accelerate_config {name} is neither a file nor one of the profiles {', '.join(sorted(shipped))}."
        )
    return shipped[name]


def shipped_configs() -> Path:
    """Return the folder of shipped profiles: the repository's configs/, which the wheel holds as longctx/configs."""
    return Path(str(files("longctx") / "configs"))

"""Who starts a run's processes: a launcher, this process, or `accelerate launch` in its place."""

from __future__ import annotations

import os
import sys
from importlib.resources import files
from pathlib import Path

from longctx.launch.slurm import Step, read_step
from longctx.settings.flags import MACHINE_FLAGS, Flags
from longctx.settings.profile import LaunchProfile
from longctx.untrusted.working_directory import without_working_directory


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

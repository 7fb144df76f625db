"""`accelerate launch` with a profile, in the place of this process."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

from longctx.launch.slurm import read_step
from longctx.untrusted.files import check_file
from longctx.untrusted.working_directory import without_working_directory

MACHINE_FLAGS = ("machine_rank", "main_process_ip", "main_process_port")
"""Flags that --accelerate_config passes on to `accelerate launch`."""


def relaunch(
    values: Mapping[str, Any], arguments: Sequence[str], *, is_launched: bool, module: str = "longctx.train"
) -> None:
    """Replace this process by `accelerate launch --config_file … -m longctx.train …` for --accelerate_config.

    --num_processes overrides the profile's. In a step of `srun` with one task per node, the nodes become accelerate's
    machines, each with as many processes as a machine of the profile has.

    Args:
        values: the values of flags; `accelerate_config` names the profile.
        arguments: the command line.
        is_launched: whether a launcher has started this process.

    Raises:
        ValueError: inside a launched process, where a profile comes too late; with several tasks per node; or if there
            is no such profile.
    """
    name = values["accelerate_config"]
    if is_launched:
        raise ValueError(
            f"--accelerate_config {name} comes too late: the launcher has started this process already. "
            f"Use accelerate launch --config_file {name} -m {module} …, or python -m {module}."
        )
    path = check_file(find_config("accelerate_config", name))
    chosen = {} if values["num_processes"] is None else {"num_processes": values["num_processes"]}
    machines: dict[str, Any] = {}
    if (step := read_step(os.environ)) is not None:
        nodes = int(step["GROUP_WORLD_SIZE"])
        if (tasks := math.ceil(int(step["WORLD_SIZE"]) / nodes)) > 1:
            raise ValueError(
                f"--accelerate_config {name} in {tasks} tasks on a node: accelerate launch starts the "
                "processes of a node itself. Start one task a node (srun --ntasks-per-node 1), or leave the flag out "
                "and set what the profile sets by flags."
            )
        machines = {"num_machines": nodes, "machine_rank": step["GROUP_RANK"]}
        machines |= {"main_process_ip": step["MASTER_ADDR"], "main_process_port": step["MASTER_PORT"]}
        if not chosen:
            import yaml

            profile = yaml.safe_load(path.read_bytes()) or {}
            if total := profile.get("num_processes"):
                chosen = {"num_processes": nodes * (int(total) // int(profile.get("num_machines") or 1))}
    machines |= {flag: values[flag] for flag in MACHINE_FLAGS if values[flag] is not None}
    if machines:  # else accelerate starts DeepSpeed's other nodes from the first one, by pdsh
        machines["deepspeed_multinode_launcher"] = "standard"
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("accelerate_config", *MACHINE_FLAGS):
        own.add_argument(f"--{flag}", f"--{flag.replace('_', '-')}")
    rest = own.parse_known_args(arguments)[1]
    os.environ.update(without_working_directory())
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(path)]
    launcher += [word for flag, value in (chosen | machines).items() for word in (f"--{flag}", str(value))]
    sys.stdout.flush()
    os.execv(sys.executable, [*launcher, "-m", module, *rest])


def find_config(flag: str, name: str, folder: str = "") -> Path:
    """Return the path of a YAML file, given as that path or by its name in a folder of configs/: a profile, a recipe.

    Raises:
        ValueError: if it is neither; the message lists the names that are most like it.
    """
    shipped = {path.stem: path for path in (shipped_configs() / folder).glob("*.yaml")}
    if name not in shipped and not os.path.lexists(name):
        near = ", ".join(sorted(get_close_matches(os.path.basename(name), shipped, 12, 0.0)))
        raise ValueError(f"--{flag} {name} is neither a file nor one of the {folder or 'profiles'}, such as {near}.")
    return Path(name) if os.path.isfile(name) else shipped.get(name, Path(name))


def shipped_configs() -> Path:
    """Return the folder of shipped profiles and recipes: the repository's configs/, in the wheel longctx/configs."""
    return Path(str(files("longctx") / "configs"))


def default_config_file() -> Path | None:
    """Return the file that `accelerate config` writes and `accelerate launch` reads by default, if it exists."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    path = Path(home).expanduser() / "accelerate" / "default_config.yaml"
    return path if path.is_file() else None


def who_starts(num_processes: int, module: str = "longctx.train", *, only_one_started: bool) -> str:
    """Return a message on why this process starts the others."""
    if only_one_started:
        return (
            "accelerate starts one process on a machine without a GPU, whatever its num_processes says, so "
            f"{module} starts {num_processes}; --num_processes after -m {module} asks for more."
        )
    return f"{module} starts {num_processes} processes, since no launcher did."

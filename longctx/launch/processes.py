"""Start the processes of a run where no launcher has: on one machine, `accelerate launch` starts one without GPUs."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from types import FrameType

import psutil

from longctx.flags import MACHINE_FLAGS, Flags
from longctx.launch.failures import OWN_RUN, died
from longctx.launch.profile import LaunchProfile
from longctx.launch.slurm import Step, read_step
from longctx.watch import FAILED
from longctx.working_directory import without_working_directory


def device_count() -> int:
    """GPUs that this process can see."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def who_starts(profile: LaunchProfile, num_processes: int, module: str = "longctx.train") -> str:
    """Why this process starts the others."""
    if profile.only_one_started:
        return (
            "accelerate starts one process on a machine without a GPU, whatever its num_processes says, so "
            f"{module} starts {num_processes}; --num_processes after -m {module} asks for more."
        )
    return f"no launcher started {num_processes} processes, so {module} does."


def spawn(
    num_processes: int, arguments: list[str], module: str = "longctx.train", advice: Callable[[], str] = str
) -> int:
    """Run `python -m` our module with these arguments in `num_processes` processes, under torch's elastic agent.

    Returns the exit code: 0, or that of the process that failed first. When one fails the agent stops the others.

    Args:
        advice: what to do when a process was killed.
    """
    from longctx.launch.store import private_folder, store_file

    variables = without_working_directory()
    variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # with "0" torch's agent listens on every interface
    variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(
        max(1, (os.cpu_count() or 1) // num_processes)
    )
    with private_folder() as folder, _environment(variables | store_file(folder)):
        return _run_agent(num_processes, folder, module, arguments, advice)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _run_agent(num_processes: int, folder: Path, module: str, arguments: list[str], advice: Callable[[], str]) -> int:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=f"{OWN_RUN}{uuid.uuid4().hex}",
        rdzv_backend="c10d",
        rdzv_endpoint=str(folder / "agent"),
        rdzv_configs={"store_type": "file"},
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.2,
        signals_to_handle="SIGINT,SIGHUP,SIGQUIT",  # a rank stops by itself on the others
    )
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # how it ends is said below
    before = {number: signal.signal(number, _pass_on) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        elastic_launch(config, sys.executable)("-u", "-m", module, *arguments)
    except ChildFailedError as error:
        ended_by_agent = -signal.SIGTERM  # after another failure
        rank, failure = min(error.failures.items(), key=lambda f: (f[1].exitcode == ended_by_agent, f[1].timestamp))
        told = failure.error_file_data["message"]
        if failure.exitcode < 0:
            message = died(f"rank {rank} (pid {failure.pid})", failure.signal_name())
            print(f"longctx: error: {message} {advice()}", file=sys.stderr, flush=True)
        elif isinstance(told, dict) and told["extraInfo"].get("is_left"):
            print(f"longctx: error on rank {rank}: {failure.message}", file=sys.stderr, flush=True)
        return failure.exitcode if failure.exitcode > 0 else FAILED
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def _pass_on(number: int, frame: FrameType | None) -> None:
    for process in psutil.Process().children():
        process.send_signal(number)


def relaunch(flags: Flags, profile: LaunchProfile, module: str = "longctx.train") -> None:
    """Replace this process by `accelerate launch --config_file … -m longctx.train …` for --accelerate_config.

    --num_processes goes before that of the profile. In a step of `srun` with one task a node, these become accelerate's
    machines.

    Raises:
        ValueError: inside a launched process, where a profile comes too late, with several tasks a node, or if there is
            no such profile.
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
    """accelerate's flags for a step of `srun`."""
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
    """A profile of configs/ by its name, or a path to a YAML file.

    Raises:
        ValueError: if it is neither, with the names there are.
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
    """The folder of the shipped profiles: configs/ of the repository, which the wheel holds as longctx/configs."""
    return Path(str(files("longctx") / "configs"))

"""Start a machine's processes where no launcher has; without GPUs, `accelerate launch` starts only one."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil

from longctx.launch.failures import OWN_RUN, died
from longctx.ranks.peers import FAILED
from longctx.untrusted.working_directory import without_working_directory


def device_count() -> int:
    """Return the number of GPUs that this process can see."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def spawn(
    num_processes: int, arguments: list[str], module: str = "longctx.train", how_to_resume: Callable[[], str] = str
) -> int:
    """Run `python -m MODULE ARGUMENTS` in `num_processes` processes, under torch's elastic agent.

    Return the exit code: 0, or that of the process that failed first. When one fails, the agent stops the others.

    Args:
        how_to_resume: returns how to resume after a process was killed.
    """
    from longctx.launch.store import private_folder, store_file

    variables = without_working_directory()
    variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # with "0" torch's agent listens on every interface
    variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(
        max(1, (os.cpu_count() or 1) // num_processes)
    )
    with private_folder() as folder, _environment(variables | store_file(folder)):
        return _run_agent(num_processes, folder, module, arguments, how_to_resume)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within the context."""
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


def _run_agent(
    num_processes: int, folder: Path, module: str, arguments: list[str], how_to_resume: Callable[[], str]
) -> int:
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
        signals_to_handle="SIGHUP,SIGQUIT",  # ranks stop by themselves on the others
    )
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # its end is reported below
    # Ranks have sessions of their own, so that Ctrl-C reaches this process alone.
    before = {number: signal.signal(number, _pass_on) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    try:
        elastic_launch(config, sys.executable)("-u", "-m", module, *arguments)
    except ChildFailedError as error:
        ended_by_agent = -signal.SIGTERM  # after another failure
        rank, failure = min(error.failures.items(), key=lambda f: (f[1].exitcode == ended_by_agent, f[1].timestamp))
        told = failure.error_file_data["message"]
        if failure.exitcode < 0:
            message = died(f"rank {rank} (pid {failure.pid})", failure.signal_name())
            print(f"longctx: error: {message} {how_to_resume()}", file=sys.stderr, flush=True)
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

"""Run a function on several gloo processes and collect what each returns."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import pkgutil
import runpy
import socket
import sys
from pathlib import Path

import pytest

import longctx.launch.spawn
from benchmarks.ranks import run_group, start_server
from longctx.launch.network import choose_interface
from longctx.launch.store import STORE_FILE, meeting_point, private_folder, store_file


def start_warm_server():
    """Begin to import what ranks of tests need, in the process that they are forked from."""
    start_server("tests.warm")


def run_ranks(world_size: int, target: str, *arguments, timeout: float = 300, backend: str | None = "gloo"):
    """Call `module:function(*arguments)` on every rank of a group; returns the results by rank.

    Args:
        timeout: seconds.
        backend: of the process group; with None the function starts one itself, or none. Each rank of soft GPUs also
            fails for the hazards that its device has found.

    Raises AssertionError with the output of all ranks if one fails or the time-out passes.
    """
    start_warm_server()
    with private_folder() as private:
        folder, environment = Path(private, "ranks"), os.environ | store_file(private) | {"OMP_NUM_THREADS": "1"}
        argument = _Target(target), arguments, environment, backend
        ended = run_group(world_size, _on_rank, argument, environment={}, folder=folder, timeout=timeout, grace=timeout)
        logs = "\n".join(f"--- rank {rank}\n{_log(folder, rank)}" for rank in range(world_size))
        assert ended.status == "ok", f"{ended.status}: {ended.error}\n{logs}"
        return list(ended.reports)


MAINS = {
    **{module: f"{module}:main" for module in ("longctx.train", "longctx.dpo")},
    "longctx.verify": "longctx.verify.__main__:main",
}
"""What `python -m` of a module calls."""


def start_rank_0_alone(patch) -> None:
    """Where longctx would start processes, be rank 0 of them in this process, up to where it would prepare the run.

    So tests see what that rank refuses, without the seconds that processes take to import all.
    """

    def spawn(num_processes, arguments, module, **_):
        with private_folder() as folder, patch.context() as ended:
            for name, value in longctx.launch.spawn.environment_of(0, num_processes, folder).items():
                ended.setenv(name, value)
            for work in ("longctx.train._train", "longctx.verify.__main__._compare"):
                ended.setattr(work, lambda *_, **__: pytest.fail("rank 0 refused nothing"))
            return pkgutil.resolve_name(MAINS[module])(arguments)

    patch.setattr("longctx.launch.spawn.spawn", spawn)


def one_by_one(cases):
    """Yield the name and the value of each case, with the state of libraries and the environment as before the first.

    So a rank can train one case after the other, on any engine. Accelerate remembers its engine, and transformers would
    load a part of the weights for FSDP2 after ZeRO-3.
    """
    from accelerate.state import AcceleratorState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    environment = dict(os.environ)
    for name, case in cases.items():
        AcceleratorState._reset_state()
        unset_hf_deepspeed_config()
        os.environ.clear()
        os.environ.update(environment)
        yield name, case


class _Target(str):
    """`module:function`, which unpickles as the function: only the process that forks the ranks imports the module."""

    def __reduce__(self):
        return pkgutil.resolve_name, (str(self),)


def _log(folder, rank):
    path = Path(folder, f"{rank}.log")
    return path.read_text(errors="replace") if path.exists() else ""


def run_script(world_size: int, path: Path, folder: Path, *arguments: str, timeout: float = 300) -> str:
    """Run a Python file on ranks with the environment of `torchrun`; returns what rank 0 has printed.

    The ranks are forked from a process that has imported all, which spares each of them 8 s.

    Args:
        folder: the working directory.
        arguments: of the command line.
        timeout: seconds.
    """
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    target = f"{__name__}:_run_file"
    return run_ranks(world_size, target, str(path), str(folder), port, arguments, timeout=timeout, backend=None)[0]


def run_main(world_size: int, module: str, arguments: list[str], timeout: float = 300) -> list[tuple[int, str, str]]:
    """Call `main(arguments)` of a module on ranks that a launcher has started; returns what each rank ended with.

    That is its exit code and what it printed on stdout and stderr. What is not about launchers runs in this way, since
    `python -m longctx.train` costs three times as much.

    Args:
        timeout: seconds.
    """
    return run_ranks(world_size, f"{__name__}:call_main", module, arguments, timeout=timeout)


def call_main(module, arguments):
    """What `main(arguments)` of a module ends with on this rank: exit code, stdout, stderr."""
    printed, errors = io.StringIO(), io.StringIO()
    sys.__stdout__ = printed
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        code = importlib.import_module(module).main(arguments)
    return code, printed.getvalue(), errors.getvalue()


def _run_file(path, folder, port, arguments):
    del os.environ[STORE_FILE]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.chdir(folder)
    sys.argv, sys.path = [path, *arguments], [str(Path(path).parent), *sys.path]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def _on_rank(argument):
    call, arguments, environment, backend = argument
    group = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    os.environ.clear()
    os.environ.update(environment | group)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.set_threshold(100_000)  # more collections would take a twentieth of a rank's time
    soft_device = sys.modules.get("tests.softcuda.library")
    if soft_device:
        soft_device.watch_for_hazards()
    choose_interface(os.environ)
    if backend is not None:
        dist.init_process_group(backend, **meeting_point(os.environ))
    result = call(*arguments)
    if soft_device:
        soft_device.check_hazards()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return result

"""Run a function on several gloo processes and collect what each returns."""

from __future__ import annotations

import contextlib
import importlib
import io
import multiprocessing
import os
import pickle
import runpy
import socket
import sys
import time
import traceback
from multiprocessing import connection
from pathlib import Path

from benchmarks.max_length.processes import PRELOAD
from longctx.launch.network import choose_interface
from longctx.launch.store import STORE_FILE, meeting_point, private_folder, store_file


def run_ranks(world_size: int, target: str, *arguments, timeout: float = 300, backend: str | None = "gloo"):
    """Call `module:function(*arguments)` on every rank of a group; returns the results by rank.

    Args:
        timeout: seconds.
        backend: of the process group; with None the function starts one itself, or none. Each rank of soft GPUs also
            fails for the hazards that its device has found.

    Raises AssertionError with the output of all ranks if one fails or the time-out (seconds) passes.
    """
    module, function = target.split(":")
    call = getattr(importlib.import_module(module), function)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)  # imported once: 6 s of a rank's life otherwise
    group = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"}
    with private_folder() as folder:
        group |= store_file(folder)
        ranks = []
        for rank in range(world_size):
            environment = os.environ | group | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            path = Path(folder, str(rank))
            ranks.append(context.Process(target=_be_rank, args=(call, arguments, environment, path, backend)))
            ranks[-1].start()
        try:
            _wait(ranks, timeout)
        finally:
            codes = [rank.exitcode for rank in ranks]
            for rank in ranks:
                rank.kill()
                rank.join()
        logs = "\n".join(f"--- rank {r}\n{Path(folder, f'{r}.log').read_text()}" for r in range(world_size))
        assert codes == [0] * world_size, f"exit codes {codes} (None: timed out)\n{logs}"
        return [pickle.loads(Path(folder, f"{rank}.pkl").read_bytes()) for rank in range(world_size)]


def run_script(world_size: int, path: Path, folder: Path, timeout: float = 300) -> str:
    """Run a Python file on ranks with the environment of `torchrun`; returns what rank 0 has printed.

    The ranks are forked from a process that has imported all, which spares each of them 8 s.

    Args:
        folder: the working directory.
        timeout: seconds.
    """
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    target = f"{__name__}:_run_file"
    return run_ranks(world_size, target, str(path), str(folder), port, timeout=timeout, backend=None)[0]


def _run_file(path, folder, port):
    del os.environ[STORE_FILE]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.chdir(folder)
    sys.argv, sys.path = [path], [str(Path(path).parent), *sys.path]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def _wait(ranks, timeout):
    until = time.monotonic() + timeout
    running = [rank.sentinel for rank in ranks]
    while running and time.monotonic() < until:
        ended = connection.wait(running, until - time.monotonic())
        running = [sentinel for sentinel in running if sentinel not in ended]


def _be_rank(function, arguments, environment, path, backend):
    os.environ.clear()
    os.environ.update(environment)
    output = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    code = 1
    soft_device = sys.modules.get("tests.softcuda.library")
    try:
        if soft_device:
            soft_device.watch_for_hazards()
        choose_interface(os.environ)
        if backend is not None:
            dist.init_process_group(backend, **meeting_point(os.environ))
        path.with_suffix(".pkl").write_bytes(pickle.dumps(function(*arguments)))
        if soft_device:
            soft_device.check_hazards()
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a group whose members failed at different places cannot be left

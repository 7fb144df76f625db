"""Ranks of benchmarks and tests: processes forked from one that has imported everything, and ended whatever happens.

    caller ── fork server (has imported torch, transformers, DeepSpeed, longctx)
                └── leader of a group, of a session and process group of its own
                      ├── rank 0
                      └── rank 1 …

The caller kills the whole process group when its time is up. A leader kills it when the caller is gone, however that
ended, and the kernel kills ranks whose leader is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

from longctx.launch.store import private_folder, store_file

PRELOAD = [
    "transformers.trainer",
    "trl.trainer.sft_trainer",
    "deepspeed",
    "accelerate.accelerator",
]
GRACE_SECONDS = 2.0
"""For other ranks to say why they fail, once one has, unless a caller gives them longer."""
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


class Ending(NamedTuple):
    """What became of a group."""

    status: str
    """ok, oom, timeout or fail."""
    reports: Sequence[Any] = ()
    """What each rank has returned, in the order of ranks, where all is well."""
    error: str = ""
    """`Type: first sentence` of the rank that failed first, or how it ended."""
    log: str = ""
    """All that this rank wrote."""
    seconds: float = 0.0


def start_server(*modules: str) -> None:
    """Begin to import PRELOAD and `modules`, in a process of its own; the environment is what it is now.

    Libraries ask for GPUs when they are imported. The server must not start CUDA for an answer, which no rank that is
    forked from it could then use: torch asks the driver's management library instead.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *modules])
    from multiprocessing import forkserver

    forkserver.ensure_running()


_ALONE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""Where a single rank meets itself: accelerate makes its group before longctx could name a file."""


def run_group(
    processes: int,
    function: Callable[..., Any],
    argument: Any,
    *,
    environment: Mapping[str, str],
    folder: Path,
    timeout: float,
    grace: float = GRACE_SECONDS,
) -> Ending:
    """Call `function(argument)` on every rank of a new process group, and wait until none of it is left.

    Argument and results are pickled.

    Args:
        environment: variables of the ranks; RANK and the like are set for several processes.
        folder: for the ranks' output, emptied before.
        timeout: seconds.
        grace: seconds for other ranks to end once one has failed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    started = time.monotonic()
    receiver, sender = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("forkserver")
    with private_folder() as meeting:
        variables = {**environment, "TMPDIR": str(meeting), **(store_file(meeting) if processes > 1 else _ALONE)}
        arguments = (processes, function, argument, variables, str(folder), grace, sender)
        leader = context.Process(target=_lead, args=arguments)
        leader.start()
        sender.close()
        try:
            ended: list[tuple[int, int]] | None = receiver.recv() if connection.wait([receiver], timeout) else None
            ending = _ending(ended, processes, folder)
        except EOFError:
            ending = Ending("fail", error="the process that leads the ranks has ended")
        finally:
            _kill(leader.pid)
            leader.join()
            receiver.close()
    return ending._replace(seconds=time.monotonic() - started)


def results_of(processes: int, function: Callable[..., Any], *arguments: Any, timeout: float = 7200.0) -> list[Any]:
    """Call `function(*arguments)` on every rank of a new process group, and return the results by rank.

    Args:
        timeout: seconds.

    Raises:
        RuntimeError: with the output of the rank that failed first.
    """
    start_server()
    environment = {"OMP_NUM_THREADS": "1"}
    with private_folder() as private:
        folder, argument = Path(private, "ranks"), (function, arguments)
        ending = run_group(processes, _call, argument, environment=environment, folder=folder, timeout=timeout)
    if ending.status != "ok":
        raise RuntimeError(f"{ending.error}\n{ending.log}")
    return list(ending.reports)


def _call(argument: tuple[Callable[..., Any], tuple[Any, ...]]) -> Any:
    function, arguments = argument
    return function(*arguments)


def _kill(leader: int | None) -> None:
    """And all that it has started; it makes its group before it starts anything."""
    assert leader is not None, "started before"
    with contextlib.suppress(ProcessLookupError):
        try:
            os.killpg(leader, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(leader, signal.SIGKILL)


def _ending(ended: list[tuple[int, int]] | None, processes: int, folder: Path) -> Ending:
    """
    Args:
        ended: (rank, exit code) in the order in which they ended; None where they did not in time.
    """
    if ended is None:
        return Ending("timeout", error="not done in time", log=_text(folder / "0.log"))
    failed = [_failure(rank, code, folder) for rank, code in ended if code]
    if not failed and len(ended) == processes:
        return Ending("ok", [_report(folder, rank) for rank in range(processes)])
    # Others fail because they have lost the one that ran out of memory.
    return next((failure for failure in failed if failure.status == "oom"), failed[0])


def _failure(rank: int, code: int, folder: Path) -> Ending:
    log = _text(folder / f"{rank}.log")
    if _report_file(folder, rank).exists():
        return Ending(log=log, **_report(folder, rank))
    if code == -signal.SIGKILL:
        return Ending("oom", error=f"rank {rank} was killed, as the kernel does when memory is used up", log=log)
    ending = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return Ending("fail", error=f"rank {rank} ended with {ending}", log=log)


def _report_file(folder: Path | str, rank: int) -> Path:
    return Path(folder, f"{rank}.pickle")


def _report(folder: Path, rank: int) -> Any:
    return pickle.loads(_report_file(folder, rank).read_bytes())


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


# The leader and its ranks


def _lead(
    processes: int,
    function: Callable[..., Any],
    argument: Any,
    environment: dict[str, str],
    folder: str,
    grace: float,
    sender: connection.Connection,
) -> None:
    os.setsid()
    caller = multiprocessing.parent_process()
    assert caller is not None, "started by the caller"
    context: Any = multiprocessing.get_context("spawn" if _has_used_cuda() else "fork")
    os.environ.update(environment)
    gc.freeze()  # no collection in a rank walks through what the server has imported
    ranks = [
        context.Process(target=_be_rank, args=(rank, processes, function, argument, folder, os.getpid()))
        for rank in range(processes)
    ]
    for rank in ranks:
        rank.start()
    ended = _wait(ranks, caller, grace)
    if ended is not None:
        sender.send(ended)
        connection.wait([caller.sentinel])  # the caller ends this group, or has ended itself
    os.killpg(0, signal.SIGKILL)


def _has_used_cuda() -> bool:
    """Whether the server that this process was forked from has, as it has once bitsandbytes is imported on a machine
    with GPUs: a fork of it can use none, and ranks import everything themselves.
    """
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda._is_in_bad_fork()


def _wait(ranks: Sequence[Any], caller: Any, grace: float) -> list[tuple[int, int]] | None:
    """Return (rank, exit code) of those that have ended, in their order, and None if the caller has ended.

    Where a rank has failed, those that have not ended `grace` seconds later are left out.
    """
    ended: dict[int, int] = {}
    until = float("inf")
    while len(ended) < len(ranks) and time.monotonic() < until:
        running = [rank.sentinel for number, rank in enumerate(ranks) if number not in ended]
        left = None if until == float("inf") else max(0.0, until - time.monotonic())
        if caller.sentinel in connection.wait([caller.sentinel, *running], left):
            return None
        for number, rank in enumerate(ranks):
            if number not in ended and rank.exitcode is not None:
                ended[number] = rank.exitcode
                if rank.exitcode:
                    until = min(until, time.monotonic() + grace)
    return list(ended.items())


def _be_rank(
    rank: int,
    processes: int,
    function: Callable[..., Any],
    argument: Any,
    folder: str,
    leader: int,
) -> None:
    """A rank's environment, its output in a file, its report in another."""
    _end_with(leader)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(processes)}
    tempfile.tempdir = None  # what TMPDIR says, and not what the server found
    output = os.open(Path(folder, f"{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        report, code = function(argument), 0
    except BaseException as error:
        traceback.print_exc()
        report, code = {"status": "oom" if _is_out_of_memory(error) else "fail", "error": first_sentence(error)}, 1
    sys.stdout.flush()
    sys.stderr.flush()
    path = _report_file(folder, rank)
    path.with_suffix(".tmp").write_bytes(pickle.dumps(report))
    path.with_suffix(".tmp").rename(path)
    os._exit(code)  # a group whose members failed at different places cannot be left


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    with contextlib.suppress(OSError, AttributeError):  # no Linux: the leader has to live on
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _is_out_of_memory(error: BaseException) -> bool:
    """Nothing is imported for it, as there may be no memory for that; what has torch has this module since its fork."""
    report = sys.modules.get("longctx.report.memory_advice")
    return isinstance(error, MemoryError) or (report is not None and report.is_out_of_memory(error))


def first_sentence(error: BaseException) -> str:
    """`Type: message` up to the first full stop."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message.split('. ')[0].removesuffix('.')}"

"""Start a machine's processes where no launcher has. Nothing here imports torch: the launcher stays as long as they."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path

from longctx.launch.store import decision_in, private_folder, store_file
from longctx.ranks import FAILED
from longctx.untrusted.working_directory import without_working_directory

SPAWNED = "LONGCTX_SPAWNED"
"""Environment variable of ranks that longctx has started. It sees how they end, so they need not report it."""
PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that ranks get from the launcher. They have sessions of their own, so that Ctrl-C reaches it alone."""
POLL_SECONDS = 0.1
STOP_SECONDS = 30
"""Time for ranks to end by themselves once one has failed."""

_DRIVERS = ("/dev/nvidiactl", "/dev/nvhost-ctrl", "/dev/dxg", "/dev/kfd")
"""Devices of drivers with which torch may find GPUs, by NVIDIA, on Jetson, in WSL, and by AMD."""

_LIKELY = {
    "SIGKILL": "Most often that is the kernel's out-of-memory killer (dmesg says so): give the run more host memory, "
    "or fewer processes and data loader workers per node.",
    "SIGABRT": "So ends a rank that has waited for others for --ddp_timeout in NCCL. Where every rank was is "
    "written above, before torch's report.",
}


def device_count() -> int:
    """Return the number of GPUs that this process can see. torch is imported only where the driver does not say."""
    counted = None if "torch" in sys.modules else _counted_by_driver()
    if counted is not None:
        return counted
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _counted_by_driver() -> int | None:
    """Return what torch would count by NVIDIA's driver; None if only torch can tell, as for GPUs named by UUIDs."""
    if version("torch").endswith("+cpu") or not any(map(os.path.exists, _DRIVERS)):
        return 0
    count = ctypes.c_int(-1)
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return count.value
    names = [name.strip() for name in visible.split(",")]
    if len(set(names)) < len(names) or not all(name.lstrip("-").isdecimal() for name in names if name):
        return None
    return len(list(takewhile(lambda name: name.isdecimal() and int(name) < count.value, names)))


def spawn(
    num_processes: int,
    arguments: list[str],
    module: str = "longctx.train",
    how_to_resume: Callable[[str], str] | None = None,
) -> int:
    """Run `python -m MODULE ARGUMENTS` in `num_processes` processes, and stop the others when one fails.

    Return the exit code: 0, or that of the process that failed first.

    Args:
        how_to_resume: returns how to go on from a run in a folder, after a process was killed.
    """
    asked: list[int] = []
    ranks: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _: object) -> None:
        asked.append(number)
        for rank in ranks:
            rank.send_signal(number)

    with private_folder() as folder:
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()  # by nohup
        before = {number: signal.signal(number, pass_on) for number in PASSED_ON if number not in ignored}
        try:
            while len(ranks) < num_processes and not asked:
                env = environment_of(len(ranks), num_processes, folder)
                command = [sys.executable, "-u", "-m", module, *arguments]
                ranks.append(subprocess.Popen(command, env=env, start_new_session=True))
            while not any(codes := [rank.poll() for rank in ranks]) and None in codes:
                time.sleep(POLL_SECONDS)
            seen = time.time()
        finally:
            _stop(ranks)
            for number, handler in before.items():
                signal.signal(number, handler)
        is_killed = bool(asked) and (len(ranks) < num_processes or -asked[0] in codes)
        is_early = is_killed and not decision_in(folder)  # nothing has begun, so that there is nothing to say
        code = 0 if is_early else _report(codes, [rank.pid for rank in ranks], seen, folder, how_to_resume)
        return 128 + asked[0] if is_killed else code


def environment_of(rank: int, num_processes: int, folder: Path) -> dict[str, str]:
    """Return the environment of a rank: its place, and files for its store and its error in the run's folder."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_processes, "LOCAL_WORLD_SIZE": num_processes}
    alone = {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0, SPAWNED: 1}
    threads = os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 1) // num_processes)
    own = {"OMP_NUM_THREADS": threads, "TORCHELASTIC_ERROR_FILE": _error_file(folder, rank)}
    values = {name: str(value) for name, value in (place | alone | own).items()}
    return {**os.environ, **without_working_directory(), **store_file(folder), **values}


def _error_file(folder: Path, rank: int) -> Path:
    return folder / f"error-{rank}.json"


def _stop(ranks: list[subprocess.Popen[bytes]]) -> None:
    """End ranks with their data loader workers: by SIGTERM, and after STOP_SECONDS by SIGKILL."""
    for number, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, STOP_SECONDS)):
        running = [rank for rank in ranks if rank.poll() is None]
        for rank in running:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, number)
        until = time.monotonic() + seconds
        for rank in running:
            with suppress(subprocess.TimeoutExpired):
                rank.wait(max(0.0, until - time.monotonic()))


def _report(
    codes: list[int | None],
    pids: list[int],
    seen: float,
    folder: Path,
    how_to_resume: Callable[[str], str] | None,
) -> int:
    """Print why the process that failed first did, unless it has itself, and return its exit code; 0 if none failed."""
    files = {rank: _error_file(folder, rank) for rank, code in enumerate(codes) if code}
    told = {
        rank: json.loads(file.read_text())["message"] if file.exists() else {"extraInfo": {}}
        for rank, file in files.items()
    }
    if not told:
        return 0

    def when(rank: int) -> tuple[bool, float]:
        """Others may have ended because of it: by SIGTERM, or saying that they failed later."""
        return codes[rank] == -signal.SIGTERM, float(told[rank]["extraInfo"].get("timestamp", int(seen)))

    first = min(told, key=when)
    code = codes[first] or FAILED
    if code < 0:
        message = died(f"rank {first} (pid {pids[first]})", signal.Signals(-code).name)
        output_dir = decision_in(folder).get("output_dir")
        resume = how_to_resume(output_dir) if how_to_resume and output_dir else ""
        print(f"longctx: error: {message} {resume}".rstrip(), file=sys.stderr, flush=True)
    elif told[first]["extraInfo"].get("is_left"):
        print(f"longctx: error on rank {first}: {told[first]['message']}", file=sys.stderr, flush=True)
    return code if code > 0 else FAILED


def died(rank: str, by: str = "") -> str:
    """Return a message on a rank that has ended without an error of its own.

    Args:
        by: name of the signal, if known.
    """
    how = f"was killed by {by}" if by else "has died without an error of its own"
    return f"{rank} {how}. {_LIKELY.get(by or 'SIGKILL', 'Its last lines, above, may say why.')}"

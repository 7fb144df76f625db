"""Run the command lines of a case, in ranks that are forked from a server or through a real launcher."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..ranks import run_group
from .commands import Command

STACKS_BEFORE_THE_END = 3.0
"""Seconds before a case's time is up at which every rank writes the stacks of its threads."""
LAUNCHER_SECONDS = 2.5
"""Times the limit for a case through a real launcher, which has everything to import."""
GRACE_SECONDS = 20.0
"""For other ranks to end once one has failed: the rank that says why may come last on a busy machine."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What became of one command."""

    codes: tuple[int | None, ...]
    """Exit codes by rank, None for one that had to be ended; of a launcher, its own alone."""
    log: str
    """All that was printed, rank by rank."""
    seconds: float
    is_late: bool
    """Whether its time was up."""


def run_command(command: Command, *, folder: Path, timeout: float, plant: Callable[[], None] | None = None) -> Ran:
    """Run one command to its end.

    Args:
        folder: for what the ranks write.
        timeout: seconds.
        plant: called in every forked rank before the run, to put a bug there.
    """
    if command.launcher:
        return _run_launcher(command, folder, timeout * LAUNCHER_SECONDS)
    folder.mkdir(parents=True, exist_ok=True)
    argument = {"arguments": list(command.arguments), "folder": str(folder), "timeout": timeout, "plant": plant}
    argument["module"] = command.module
    ending = run_group(
        command.processes,
        _train,
        argument,
        environment=command.environment,
        folder=folder,
        timeout=timeout,
        grace=GRACE_SECONDS,
    )
    codes = tuple(_code(folder, rank) for rank in range(command.processes))
    log = "\n".join(_log(folder, rank) for rank in range(command.processes))
    return Ran(codes=codes, log=log, seconds=ending.seconds, is_late=ending.status == "timeout")


def call(function: Callable[..., dict[str, Any]], argument: Any, *, folder: Path, timeout: float) -> dict[str, Any]:
    """Call a function in a process of its own.

    Raises:
        RuntimeError: with its output where it raised or took too long.
    """
    ending = run_group(1, function, argument, environment={}, folder=folder, timeout=timeout)
    if ending.status != "ok":
        raise RuntimeError(f"{ending.error}\n{ending.log}")
    return dict(ending.reports[0])


def _code(folder: Path, rank: int) -> int | None:
    path = folder / f"{rank}.code"
    return int(path.read_text()) if path.exists() else None


def _log(folder: Path, rank: int) -> str:
    log = folder / f"{rank}.log"
    told = folder / f"{rank}.error.json"
    text = log.read_text(errors="replace") if log.exists() else ""
    left = f"\nleft to the launcher: {_told(told)}" if told.exists() and rank else ""
    return f"--- rank {rank}\n{text}{left}"


def _told(path: Path) -> str:
    try:
        return str(json.loads(path.read_text())["message"]["message"])
    except (ValueError, KeyError, TypeError):
        return path.read_text()


def _train(argument: Mapping[str, Any]) -> dict[str, Any]:
    """`python -m` of the command's module on one rank, and its exit code in a file."""
    main = importlib.import_module(argument["module"]).main
    folder, rank = Path(argument["folder"]), os.environ["RANK"]
    faulthandler.dump_traceback_later(max(1.0, argument["timeout"] - STACKS_BEFORE_THE_END))
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / f"{rank}.error.json")
    os.chdir(folder)
    if argument["plant"] is not None:
        argument["plant"]()
    sys.argv = [argument["module"], *argument["arguments"]]
    try:
        code = main(argument["arguments"])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    (folder / f"{rank}.code").write_text(str(code))
    if code:
        os._exit(code)  # the leader ends the others
    return {}


def without_launcher(code: int | None, log: str) -> tuple[int | None, str]:
    """The exit code and output of what accelerate or torchrun started: they end with 1 and a traceback of their own."""
    found = re.search(
        r"Traceback \(most recent call last\):\n(?:  .*\n)+"
        r"(?:subprocess\.CalledProcessError: Command .* returned non-zero exit status (\d+)\.\s*\Z|"
        r"torch\.distributed\.elastic\.\S+ChildFailedError:(?:.*\n)+? *exitcode *: (\d+))",
        log,
    )
    return (int(found[1] or found[2]), log[: found.start()]) if found and code else (code, log)


def _run_launcher(command: Command, folder: Path, timeout: float) -> Ran:
    """Through a process of a session of its own, which is ended whole."""
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    variables = {name: value for name, value in os.environ.items() if not re.match("RANK|WORLD_SIZE|LOCAL_", name)}
    with (folder / "launcher.log").open("w+") as output:
        process = subprocess.Popen(
            [*command.launcher, *command.arguments],
            env=variables | dict(command.environment),
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        code, log = without_launcher(code, output.read())
    return Ran(codes=(code,), log=log, seconds=time.monotonic() - started, is_late=code is None)

"""A thread in every rank that runs even while the rank is stuck: it reports where the rank is, and learns of failures.

Ranks communicate through the process group's store. Each counts up there to show that it lives, and checks that the
other processes of its machine still run. The first to know why the run fails writes it down for all. A rank whose main
thread has not left some seconds later is ended.

A gloo collective that waits too long raises an error, and longctx reports where the other ranks are. An NCCL collective
raises none: NCCL's own watchdog aborts the process. Over NCCL, the thread therefore checks that the main thread moves,
and reports where all ranks are before the abort.
"""

from __future__ import annotations

import atexit
import itertools
import json
import linecache
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

import psutil
import torch.distributed as dist

BEAT_SECONDS = 1.0
LEAVE_SECONDS = 10.0
"""Time for the main thread to leave after the run has failed."""
ANSWER_SECONDS = 5.0
FAILED = 1
SHOWN_FRAMES = 5

_WAITING_IN = ("/torch/distributed/", "/deepspeed/comm/")
_WRAPPERS = ("/torch/nn/modules/", "/torch/_dynamo/", "/torch/utils/_contextlib.py", "c10d_logger.py")
_COLLECTIVES = "/torch/distributed/distributed_c10d.py"
_PHASES: dict[CodeType, str] = {}
"""Names of the parts of a training step, by their functions' code; see `phase`."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def phase(name: str) -> Callable[[_Function], _Function]:
    """Return a decorator that names a function's part of a step, for reports of where ranks are.

    The name applies to this function only, not to functions of the same name.
    """

    def enter(function: _Function) -> _Function:
        _PHASES[function.__code__] = name
        return function

    return enter


class Failure(NamedTuple):
    """Why a run fails, written down by the first rank to know."""

    teller: int
    """The rank that wrote it."""
    kind: str
    """died, raised or waited."""
    message: str


class Position(NamedTuple):
    """Where a thread is in its program."""

    step: int
    """Optimizer step that is under way, from 1; 0 outside training."""
    phase: str
    """Part of the step; empty if unknown."""
    collective: str
    """Collective it waits in; empty if it does not wait for other ranks."""
    frames: tuple[str, ...]
    """Innermost frames, as `file:line in function`, without wrappers."""

    @classmethod
    def of(cls, stack: Sequence[tuple[CodeType, int]], step: int) -> Position:
        """Return the position that a stack shows.

        Args:
            stack: code and line of frames, innermost first.
        """
        innermost, line = stack[0]
        waiting_line = linecache.getline(innermost.co_filename, line)
        waits = any(part in innermost.co_filename for part in _WAITING_IN) or ".wait()" in waiting_line
        calls = [code.co_name for code, _ in stack[: 4 * SHOWN_FRAMES] if code.co_filename.endswith(_COLLECTIVES)]
        phase = next((_PHASES[code] for code, _ in stack if code in _PHASES), "")
        shown = [
            f"{_short(code.co_filename)}:{line} in {code.co_name}"
            for code, line in stack
            if not any(part in code.co_filename for part in (*_WRAPPERS, _COLLECTIVES))
        ]
        return cls(step, phase, (calls[-1] if calls else "a collective") if waits else "", tuple(shown[:SHOWN_FRAMES]))

    def __str__(self) -> str:
        doing = f"waits in {self.collective}" if self.collective else "is at"
        when = ", ".join([f"step {self.step}"] * bool(self.step) + [self.phase] * bool(self.phase))
        return f"{doing}{f' ({when})' if when else ''}: {' < '.join(self.frames)}"


class Watchdog:
    """The watchdog of this process's rank, on one process group's store."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        group_store = dist.distributed_c10d._get_default_store()
        # A separate connection, since a rank that waits on the shared one blocks it.
        self.store = dist.PrefixStore("longctx/watch", group_store.clone())  # type: ignore[attr-defined]
        self.group_store = group_store
        self.step = 0
        self.failure: Failure | None = None
        self.tell: Callable[[Failure, int], None] | None = None
        self._left = threading.Event()
        self._asked = 0
        self._has_waited = False
        self._others: dict[int, psutil.Process] = {}
        self._met = 0
        self.timeout: float | None = None
        """Seconds after which a collective aborts the process without raising an error; None where it raises one."""
        self._place: Position | None = None
        """Where the main thread has been since `_arrived`, in seconds of time.monotonic."""
        self._arrived = 0.0
        self._thread = threading.Thread(target=self._beat, name="longctx-watch", daemon=True)
        self._thread.start()
        atexit.register(self.leave)

    def register(self, tell: Callable[[Failure, int], None] | None = None) -> None:
        """Register this rank, so that others notice if it ends without leaving. All ranks call it.

        Args:
            tell: called with the failure and this rank before the thread ends a rank whose main thread is stuck.
        """
        self.tell = tell
        me = psutil.Process()
        who = {"pid": me.pid, "host": socket.gethostname(), "created": me.create_time()}
        self.store.set(f"who/{self.rank}", json.dumps(who))
        position = self.store.add(f"host/{who['host']}", 1)
        self.store.set(f"host/{who['host']}/{position}", str(self.rank))

    def leave(self) -> None:
        """Record that this rank ends in order, and stop the thread."""
        if self._left.is_set():
            return
        self._left.set()
        with suppress(RuntimeError):  # the store is gone with the rank that kept it
            self.store.set(f"left/{self.rank}", "")
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def fail(self, kind: str, message: str) -> Failure:
        """Write down why the run fails, unless another rank has, and return what is written."""
        mine = Failure(self.rank, kind, message)
        try:
            said = self.store.compare_set("failure", "", json.dumps(mine))
            self.store.set("news", "")
        except RuntimeError:
            self.failure = mine
        else:
            self.failure = Failure(*json.loads(said))
        return self.failure

    def wait_for_failure(self, seconds: float) -> Failure | None:
        """Wait for a failure that another rank writes down, and return it, or None.

        A rank that is silent meanwhile has died. Only the first call waits.
        """
        if self._has_waited:
            return self.failure
        self._has_waited = True
        before = self._beats_of_others()
        until = time.monotonic() + seconds
        while self.failure is None and time.monotonic() < until:
            time.sleep(0.1)
        silent = before.items() & self._beats_of_others().items() if self.failure is None else set()
        return self.fail("died", self.name(min(silent)[0])) if silent else self.failure

    def _beats_of_others(self) -> dict[int, bytes]:
        """Return the heartbeats of other ranks that have not left; empty without the store."""
        with suppress(RuntimeError):
            others = [rank for rank in range(self.world_size) if rank != self.rank]
            return {rank: self.beats(rank) for rank in others if not self.store.check([f"left/{rank}"])}
        return {}

    def ask_all(self, seconds: float = ANSWER_SECONDS) -> dict[int, Position | None]:
        """Return where every other rank is; None for those that do not answer."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        answers: dict[int, Position | None] = dict.fromkeys(others)
        with suppress(RuntimeError):
            question = self.store.add("questions", 1)
            self.store.set("news", "")
            until = time.monotonic() + seconds
            while missing := [rank for rank in others if answers[rank] is None]:
                for rank in missing:
                    key = f"answer/{question}/{rank}"
                    if self.store.check([key]):
                        step, phase, collective, frames = json.loads(self.store.get(key))
                        answers[rank] = Position(step, phase, collective, tuple(frames))
                if time.monotonic() > until:
                    break
                time.sleep(0.1)
        return answers

    def name(self, rank: int) -> str:
        """Return the rank with its process, as text."""
        with suppress(RuntimeError):
            if self.store.check([f"who/{rank}"]):
                who = json.loads(self.store.get(f"who/{rank}"))
                return f"rank {rank} (pid {who['pid']} on {who['host']})"
        return f"rank {rank}"

    def state_of(self, rank: int) -> str:
        """Describe a rank that does not answer, as far as this machine sees it."""
        process = self._others.get(rank)
        if process is None:
            return "does not answer"
        if _has_ended(process):
            return "has ended"
        with suppress(psutil.Error):
            if process.status() == psutil.STATUS_STOPPED:
                return "does not answer: it is stopped (SIGSTOP)"
        return "does not answer"

    def beats(self, rank: int) -> bytes:
        """Return a number that grows while the rank lives; raise RuntimeError without the store."""
        return self.store.get(f"alive/{rank}") if self.store.check([f"alive/{rank}"]) else b""

    # The thread

    def _beat(self) -> None:
        with suppress(RuntimeError):  # the store is gone, as the main thread will notice
            for count in itertools.count():
                self.store.set(f"alive/{self.rank}", str(count))
                self._meet_others()
                if self.failure is None and self.store.check(["news"]):
                    self._hear()
                if self.failure is None and (rank := self._missed()) is not None:
                    self.fail("died", self.name(rank))
                if self.failure is None and self.timeout is not None:
                    self._look_for_hang(self.timeout)
                if self.failure is not None:
                    break
                if self._left.wait(BEAT_SECONDS):
                    return
        if self.failure is not None and not self._left.wait(LEAVE_SECONDS):
            try:
                if self.tell is not None:
                    self.tell(self.failure, self.rank)
                sys.stdout.flush()
            finally:
                os._exit(FAILED)

    def _meet_others(self) -> None:
        """Find the other ranks' processes on this machine, by pid and creation time."""
        host = socket.gethostname()
        while self.store.check([f"host/{host}/{self._met + 1}"]):
            self._met += 1
            rank = int(self.store.get(f"host/{host}/{self._met}"))
            if rank == self.rank:
                continue
            who = json.loads(self.store.get(f"who/{rank}"))
            with suppress(psutil.Error):
                process = psutil.Process(who["pid"])
                if process.create_time() == who["created"]:  # else in a container of the same name
                    self._others[rank] = process

    def _missed(self) -> int | None:
        """Return a rank of this machine whose process has ended without leaving."""
        for rank, process in self._others.items():
            if _has_ended(process) and not self.store.check([f"left/{rank}"]):
                return rank
        return None

    def _hear(self) -> None:
        """Read a failure, and answer a question."""
        if self.store.check(["failure"]):
            self.failure = Failure(*json.loads(self.store.get("failure")))
        question = self.store.add("questions", 0)
        if question > self._asked:
            self._asked = question
            self.store.set(f"answer/{question}/{self.rank}", json.dumps(self.position()))

    def _look_for_hang(self, timeout: float) -> None:
        """Print where all ranks are if the main thread has not moved for so long that NCCL will soon abort.

        The first rank to notice prints it, once per step. The run continues, since missing ranks may still come.
        """
        here, now = self.position(), time.monotonic()
        if here != self._place:
            self._place, self._arrived = here, now
        waited = now - self._arrived
        if waited < speaks_after(timeout):
            return
        self._arrived = now
        if self.store.compare_set(f"hang/{here.step}", "", str(self.rank)) != str(self.rank).encode():
            return
        lines = describe_positions(self, here, self.ask_all())
        head = f"no progress for {waited:.0f} s; NCCL ends the run after {timeout:.0f} s (--ddp_timeout): {lines[0]}"
        print("\n".join([f"longctx: {head}", *lines[1:]]), file=sys.stderr, flush=True)

    def position(self) -> Position:
        """Return where the main thread is."""
        main = threading.main_thread().ident
        assert main is not None, "it runs"
        return Position.of(_stack(sys._current_frames()[main]), self.step)


_current: Watchdog | None = None


def current_watchdog() -> Watchdog | None:
    """Return this process's watchdog, which the first call in a process group starts; None for a single process."""
    global _current
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if _current is None or _current.group_store is not dist.distributed_c10d._get_default_store():
        if _current is not None:
            _current.leave()
        _current = Watchdog()
    return _current


def leave() -> None:
    """Stop the watchdog before the process group ends in order."""
    if _current is not None:
        _current.leave()


def limit_waiting(timeout: timedelta) -> None:
    """Give every existing process group this time-out; torch gives new ones its default of 10 or 30 minutes."""
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # public since torch 2.15
    for group in list(dist.distributed_c10d._world.pg_map):
        set_timeout(timeout, group)
    if (watchdog := current_watchdog()) and "nccl" in dist.get_backend_config():
        watchdog.timeout = timeout.total_seconds()


def speaks_after(timeout: float) -> float:
    """Return the seconds without progress after which a hang is described, before NCCL's watchdog aborts.

    NCCL counts from the call of a collective, but the main thread runs ahead by the work it has queued. A tenth of the
    time-out, at least a minute and at most half of it, is left for that and for the other ranks' answers.
    """
    return timeout - min(timeout / 2, max(60.0, timeout / 10))


def describe_positions(watchdog: Watchdog, here: Position, others: dict[int, Position | None]) -> list[str]:
    """Return lines on who did not come and where ranks are; those at the same place share a line."""
    places: dict[Position, list[int]] = {}
    for rank, position in sorted({**others, watchdog.rank: here}.items()):
        if position is not None:
            places.setdefault(position, []).append(rank)
    silent = [rank for rank, position in others.items() if position is None]
    elsewhere = [rank for position, ranks in places.items() if not position.collective for rank in ranks]
    absent = [watchdog.name(rank) for rank in sorted({*silent, *elsewhere} - {watchdog.rank})]
    who = f"{', '.join(absent)} did not come to" if absent else "ranks wait for each other: they are not all in"
    lines = [f"{who} {here.collective or 'the collective'} that rank {watchdog.rank} waited in."]
    lines += [f"  rank {rank} {watchdog.state_of(rank)}" for rank in silent]
    for position, ranks in sorted(places.items(), key=lambda place: bool(place[0].collective)):
        lines.append(f"  rank{'s' * (len(ranks) > 1)} {_numbers(ranks)} {position}")
    return lines


def _stack(frame: FrameType | None) -> list[tuple[CodeType, int]]:
    found = []
    while frame is not None:
        found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return found


def position_of(error: BaseException, step: int) -> Position:
    """Return where the error was raised."""
    found: list[tuple[CodeType, int]] = []
    traceback = error.__traceback__
    while traceback is not None:
        found.append((traceback.tb_frame.f_code, traceback.tb_lineno))
        traceback = traceback.tb_next
    return Position.of(found[::-1], step)


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _short(file: str) -> str:
    """Return the path below site-packages or the working directory."""
    _, found, rest = file.rpartition("/site-packages/")
    if found:
        return rest
    with suppress(ValueError):
        return str(Path(file).relative_to(Path.cwd()))
    return file


def _numbers(ranks: Iterable[int]) -> str:
    """Return ranks as text, such as `0–3, 5`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)

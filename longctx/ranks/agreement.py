"""Let ranks take turns, and end together when one of them cannot continue.

Preparing data can take one rank hours. The others do not wait in a collective, which fails after the process group's
time-out. They poll the group's store for as long as that rank's process lives.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from longctx.ranks import hang
from longctx.ranks.peers import LEAVE_SECONDS, Peers, current_peers

Result = TypeVar("Result")


class RefusedOnAllRanks(ValueError):
    """Raised on every rank when one cannot continue, so that none waits for another."""

    def __init__(self, message: str, *, is_mine: bool):
        super().__init__(message)
        self.is_mine = is_mine
        """Whether this rank reports the reason."""


def own_channel(name: str) -> dist.Store:
    """Return a connection of this thread's own to the process group's store, under keys of its own.

    Ranks count their meetings, so that a thread may not use the main thread's keys. All ranks give the same name.
    """
    if not dist.is_initialized():
        return dist.HashStore()
    store = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore(f"longctx/{name}", store.clone())  # type: ignore[attr-defined]


def on_all_ranks(work: Callable[[], Result], channel: dist.Store | None = None) -> Result:
    """Run `work` on all ranks at once, and return when all have finished, however long that takes.

    Args:
        channel: the thread's `own_channel`, where several threads meet.

    Raises:
        RefusedOnAllRanks: on every rank once `work` raises ValueError on one; on the other ranks after another error.
            A single process raises the ValueError itself.
    """
    return _meet(work, channel=channel)


def gathered_on_first(work: Callable[[], Result], channel: dist.Store | None = None) -> list[Result]:
    """Run `work` as `on_all_ranks` does, and return what it returned on every rank, by rank, on rank 0; [] elsewhere.

    Args:
        work: returns what JSON can hold.
    """
    return _meet(work, channel=channel, gather=True)


def main_process_first(work: Callable[[], Result], folder: str | Path) -> Result:
    """Run `work` on rank 0 first, so that the others find its results in `folder` (created if it is missing).

    On a node that does not share rank 0's file system, the first rank does not wait, and the others wait for it.

    Raises:
        RefusedOnAllRanks: as in `on_all_ranks`.
    """
    first = storage_of_ranks(Path(folder))[dist.get_rank() if dist.is_initialized() else 0]
    return _meet(work, after=first)


def check_agreement(mine: Mapping[str, Any]) -> None:
    """Check that this rank's values equal those of rank 0. All ranks call it.

    Args:
        mine: this rank's values, by name.

    Raises:
        RefusedOnAllRanks: with a rank and its differing values.
    """
    rank, theirs = dist.get_rank(), broadcast_object(dict(mine))
    names = [name for name in {**theirs, **mine} if theirs.get(name) != mine.get(name)]

    def compare() -> None:
        if names:
            differing = "; ".join(f"{name} {mine.get(name)} here, {theirs.get(name)} on rank 0" for name in names)
            raise ValueError(
                f"rank {rank} on {socket.gethostname()} would not run as rank 0 does: {differing}. Start all nodes "
                "with the same flags, files and releases."
            )

    on_all_ranks(compare)


def broadcast_object(value: Result) -> Result:
    """Return rank 0's value. All ranks call it."""
    if not dist.is_initialized() or dist.get_backend() == "fake":  # torch's group without messages, for traces
        return value
    values = [value]
    dist.broadcast_object_list(values, group=host_group(dist.group.WORLD))
    return values[0]


def gather_objects(value: Result) -> list[Result]:
    """Return every rank's value, by rank. All ranks call it.

    Each rank receives as many bytes from every rank as the largest value has, so keep values small.
    """
    if not dist.is_initialized():
        return [value]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, value, group=host_group(dist.group.WORLD))
    return ranks


@functools.lru_cache(maxsize=1)
def host_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of all ranks whose messages stay in host memory. All ranks make the first call together.

    Over NCCL alone, which is what DeepSpeed starts, Python objects would travel as tensors through GPU memory, on the
    stream and in the order of the model's own collectives.
    """
    if "cpu:" in (devices := dist.get_backend_config(world)):
        return world
    backend = cast(Any, world)._get_backend(torch.device(devices.partition(":")[0]))
    return dist.new_group(backend="gloo", timeout=backend.options._timeout)


def storage_of_ranks(folder: Path) -> list[int]:
    """Return, for every rank, the first rank that sees the same files in `folder` (created if it is missing).

    All are 0 if all nodes share a file system. Nodes that see no files of others count as sharing nothing. All ranks
    call it.
    """
    if not dist.is_initialized():
        return [0]
    rank = dist.get_rank()
    first = rank - int(os.environ.get("LOCAL_RANK", "0"))
    token = gather_objects(uuid.uuid4().hex)[0]

    def marker(of: int) -> Path:
        return folder / f".longctx-{token}-{of}"

    def mark() -> None:
        if rank == first:
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                marker(rank).touch()

    on_all_ranks(mark)
    found = gather_objects(
        min((other for other in set(gather_objects(first)) if marker(other).exists()), default=first)
    )
    with suppress(OSError):
        marker(rank).unlink()
    return found


def exit_with_others() -> None:
    """After RefusedOnAllRanks, wait up to LEAVE_SECONDS for the other ranks to call this too.

    A launcher stops all processes once one has ended, so the reason must be reported before.
    """
    hang.WATCH.stop()
    if not dist.is_initialized():
        return
    with suppress(RuntimeError):  # the store is gone with the rank that kept it
        store = dist.distributed_c10d._get_default_store()
        store.add("longctx/left", 1)
        until = time.monotonic() + LEAVE_SECONDS
        while time.monotonic() < until and store.add("longctx/left", 0) < dist.get_world_size():
            time.sleep(0.05)
        dist.destroy_process_group()


def _meet(
    work: Callable[[], Any], *, after: int | None = None, channel: dist.Store | None = None, gather: bool = False
) -> Any:
    """Run `work` on all ranks; on those other than `after`, if it is a rank, once that one is through with it."""
    peers = current_peers()
    if peers is None:
        return [work()] if gather else work()
    meeting = _Meeting(peers, channel)
    try:
        if after is not None and after != meeting.rank:
            meeting.wait_for(after)
        result = work()
        meeting.store.set(f"ready/{meeting.rank}", json.dumps(result) if gather else "")
        meeting.wait_for_all()
        if gather:
            result = meeting.results()
    except (RefusedOnAllRanks, dist.DistError):
        raise
    except ValueError as error:
        raise meeting.refuse(str(error)) from error
    except BaseException as error:
        meeting.refuse(f"rank {meeting.rank} stopped with {type(error).__name__}: {error}")
        raise
    return result


def wait_until(is_over: Callable[[], bool]) -> None:
    """Wait, however long that takes, unless the run fails meanwhile or the process of the rank before this one ends.

    Raises:
        DistError: in these cases.
    """
    _poll(is_over, current_peers())


def _poll(is_over: Callable[[], bool], peers: Peers | None, watched: int | None = None) -> None:
    """Ask often at first, then about once a second. The main thread alone looks at the other ranks.

    Args:
        watched: rank whose process must not end; None means the rank before this one.
    """
    if threading.current_thread() is not threading.main_thread():
        peers = None
    for attempt in itertools.count():
        rank = -1 if peers is None else peers.before if watched is None else watched
        has_ended = peers is not None and peers.has_ended(rank)  # in order, if it is over now
        if is_over():
            return
        if peers is not None:
            if failure := peers.look([rank] * has_ended):
                raise dist.DistError(failure.message + " has died" * (failure.kind == "died"))
            hang.WATCH.go_on()
        time.sleep(0.01 * 1.5 ** min(attempt, 11))


class _Meeting:
    """The keys of one call in the process group's store. All ranks make the same calls in the same order."""

    def __init__(self, peers: Peers, channel: dist.Store | None) -> None:
        self.peers, self.rank, self.world_size = peers, peers.rank, peers.world_size
        store = channel or dist.distributed_c10d._get_default_store()
        number = store.add(f"longctx/calls/{self.rank}", 1)
        self.store = dist.PrefixStore(f"longctx/{number}", store)

    def refuse(self, message: str) -> RefusedOnAllRanks:
        """Tell all ranks to stop; the first call decides the message."""
        mine = json.dumps([self.rank, message])
        try:
            said = self.store.compare_set("refused", "", mine)
        except RuntimeError:
            return RefusedOnAllRanks(message, is_mine=True)
        rank, message = json.loads(said)
        return RefusedOnAllRanks(message, is_mine=rank == self.rank)

    def wait_for(self, rank: int) -> None:
        """Wait for this rank's turn, after another has finished its work."""
        self._wait(functools.partial(self.store.check, [f"ready/{rank}"]))

    def wait_for_all(self) -> None:
        """Wait until every rank has finished its work."""
        if self.rank != 0:
            self._wait(lambda: self.store.check(["all ready"]))
            self.peers.who(0)  # to name it, should the store end with it
            return
        for rank in range(1, self.world_size):
            self._wait(functools.partial(self.store.check, [f"ready/{rank}"]), watched=rank)
        self.store.set("all ready", "")

    def results(self) -> list[Any]:
        """Return on rank 0 what the work of every rank has returned."""
        keys = [f"ready/{rank}" for rank in range(self.world_size)] if self.rank == 0 else []
        found = [json.loads(self.store.get(key)) for key in keys]
        for key in keys:  # which may be long
            self.store.delete_key(key)
        return found

    def _wait(self, is_over: Callable[[], bool], watched: int | None = None) -> None:
        """Wait as `_poll` does, or until a rank has refused."""

        def is_over_or_refused() -> bool:
            if is_over():
                return True
            if self.store.check(["refused"]):
                raise self.refuse("")
            return False

        _poll(is_over_or_refused, self.peers, watched)

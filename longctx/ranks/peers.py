"""The processes of the other ranks: which of them have ended, and why the run fails.

Every rank listens at a port of its own, where it accepts and reads nothing. The kernel closes a connection to that port
when the rank's process ends, and keeps it open while the process is busy, even in C code. A machine without power or
network closes nothing. The kernel therefore asks on an idle connection whether the other end still answers, and closes
it where that has not answered for 15 s. So ranks send no messages to show that they live.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch.distributed as dist

LEAVE_SECONDS = 10.0
"""Time for ranks to learn why the run has failed, and to leave."""
_LINK_OPTIONS = {
    "TCP_KEEPIDLE": 5,  # seconds without data before the kernel asks
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 2,  # questions without an answer
    "TCP_USER_TIMEOUT": 15_000,  # milliseconds without an answer to what is sent
    "TCP_SYNCNT": 2,  # so a connection that nobody answers fails after 7 s
}
_NAMED = 4
"""Ranks that a message names with their processes."""


class Failure(NamedTuple):
    """Why a run fails, written down by the first rank to know."""

    teller: int
    """The rank that wrote it."""
    kind: str
    """died, raised or waited."""
    message: str


class Peers:
    """The ranks of a process group. Every rank makes one."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.group_store = dist.distributed_c10d._get_default_store()
        self.store = dist.PrefixStore("longctx/peers", self.group_store)
        self.before = (self.rank - 1) % self.world_size
        """The rank that this one watches. So one that lives watches the first of neighbours that end."""
        self.listener = _listen()
        self._links: dict[int, socket.socket] = {}
        self._until = 0.0
        """When `wait_for_failure` gives up, in seconds of time.monotonic."""
        for connection, _, remote in _connections():
            if remote[1] == int(os.environ.get("MASTER_PORT", "0")):  # of the store
                _keep_alive(connection)
        me: dict[str, Any] = {"pid": os.getpid(), "host": socket.gethostname(), "machine": _machine()}
        me["address"] = self.listener.getsockname()
        self._who: dict[int, dict[str, Any]] = {self.rank: me}
        self.store.set(f"who/{self.rank}", json.dumps(me))

    def who(self, rank: int) -> dict[str, Any] | None:
        """Return a rank's pid, host and address; None if the rank has not come yet, or without the store."""
        with suppress(RuntimeError):
            if rank not in self._who and self.store.check([f"who/{rank}"]):
                self._who[rank] = json.loads(self.store.get(f"who/{rank}"))
        return self._who.get(rank)

    def names(self, ranks: Sequence[int]) -> str:
        """Return ranks with their processes, as text."""
        found = [(rank, self.who(rank)) for rank in ranks[:_NAMED]]
        named = [f"rank {rank} (pid {who['pid']} on {who['host']})" if who else f"rank {rank}" for rank, who in found]
        return ", ".join(named + [f"{len(ranks) - _NAMED} more"] * (len(ranks) > _NAMED))

    def has_ended(self, rank: int) -> bool:
        """Return whether a rank's process has ended; a machine that does not answer has, after 7 to 15 s."""
        if rank not in self._links:
            who = self.who(rank)
            if who is None or (who["address"][0].startswith("127.") and who["machine"] != _machine()):
                return False
            self._links[rank] = link = socket.socket()
            link.setblocking(False)
            _keep_alive(link)
            link.connect_ex(tuple(who["address"]))
        try:
            return not self._links[rank].recv(1)
        except BlockingIOError:  # it is open, or being opened
            return False
        except OSError:
            return True

    def fail(self, kind: str, message: str) -> Failure:
        """Write down why the run fails, unless another rank has, and return what is written."""
        mine = Failure(self.rank, kind, message)
        try:
            return Failure(*json.loads(self.store.compare_set("failure", "", json.dumps(mine))))
        except RuntimeError:  # the store is gone with rank 0, so another rank of each node tells it
            return mine._replace(teller=self.rank - int(os.environ.get("LOCAL_RANK", "0")) or 1)

    def look(self, ranks: Iterable[int]) -> Failure | None:
        """Return why the run fails, if a rank has written that down or if the process of one of these has ended."""
        with suppress(RuntimeError):
            if self.store.check(["failure"]):
                return Failure(*json.loads(self.store.get("failure")))
        ended = [rank for rank in ranks if self.has_ended(rank)]
        return self.fail("died", self.names(ended)) if ended else None

    def wait_for_failure(self, seconds: float) -> Failure | None:
        """Wait until a rank has written down why the run fails, and return it, or None. Only the first call waits.

        The first rank that waits looks for processes that have ended, on behalf of all.
        """
        try:
            looks = self.store.add("waiting", 1) == 1
        except RuntimeError:
            looks = True
        others = [rank for rank in range(self.world_size) if rank != self.rank] if looks else []
        self._until = self._until or time.monotonic() + seconds
        while (failure := self.look(others)) is None and time.monotonic() < self._until:
            time.sleep(0.2)
        return failure

    def cut_connections(self, rank: int) -> None:
        """Close connections to the machine of a rank, so that calls that wait for its ranks raise an error."""
        for connection, _, remote in _connections():
            if remote[0] == self._who[rank]["address"][0] and not remote[0].startswith("127."):
                connection.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        """Say that this rank knows why the run fails. If its process keeps the store, wait for others to know it, too.

        They look once this rank's connections are closed. It waits until none has said so for 2 s.
        """
        port = int(os.environ.get("MASTER_PORT", "0"))
        with suppress(RuntimeError):
            before, left = 0, self.store.add("left", 1)
            if not any(here[1] == port for _, here, _ in _connections()):
                return
            for connection, here, remote in _connections():
                if port not in (here[1], remote[1]):
                    connection.shutdown(socket.SHUT_RDWR)
            while before < left < self.world_size:
                time.sleep(2.0)
                before, left = left, self.store.add("left", 0)


_current: Peers | None = None


def current_peers() -> Peers | None:
    """Return the ranks of the process group, which every rank's first call makes known; None for a single process."""
    global _current
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if _current is None or _current.group_store is not dist.distributed_c10d._get_default_store():
        _current = Peers()
    return _current


def _connections() -> Iterator[tuple[socket.socket, Any, Any]]:
    """Yield this process's TCP connections with their addresses here and there. Linux alone lists them."""
    for name in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd") else ():
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                yield connection, connection.getsockname(), connection.getpeername()


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _LINK_OPTIONS.items():
        if hasattr(socket, option):  # as on Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _listen() -> socket.socket:
    """Listen at gloo's interface: that of GLOO_SOCKET_IFNAME, or of this machine's name."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    entries = psutil.net_if_addrs().get(interface, [])
    address = next((entry.address for entry in entries if entry.family == socket.AF_INET), socket.gethostname())
    try:
        return socket.create_server((address, 0), backlog=1024)
    except OSError:  # a name without an address
        return socket.create_server(("127.0.0.1", 0), backlog=1024)


def _machine() -> str:
    """Return what no other machine has: its last boot."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text() if boot.exists() else socket.gethostname()

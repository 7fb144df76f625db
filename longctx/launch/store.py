"""Where ranks meet: a file in a folder that no other user can open, or the store of another launcher, renewed.

torch's stores have no passwords. Whoever reaches a TCPStore can read and set its keys, some of which torch unpickles.
A file store is protected by the file system's permissions.

The last process that holds a run's folder removes it: the launcher or, if that was killed, a rank. If all were killed,
the next run removes it.

torchrun's agent keeps one store for all its attempts (in torch 2.13 and earlier; see pytorch issue 135712). A rank of
the second attempt may read what the first wrote there, such as an address of gloo or NCCL, before it is overwritten. So
a restarted group gets a store without the keys of ended processes.
"""

from __future__ import annotations

import atexit
import fcntl
import itertools
import json
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longctx.ranks import is_first_rank
from longctx.untrusted.files import written_whole

if TYPE_CHECKING:
    from torch.distributed import TCPStore

STORE_FILE = "LONGCTX_STORE_FILE"
"""The environment variable that names the file to the ranks."""
_PREFIX = "longctx-run-"


@contextmanager
def private_folder() -> Iterator[Path]:
    """Make a folder of mode 0700 for a run's stores, and remove it at the end."""
    _remove_abandoned()
    new = Path(tempfile.mkdtemp(prefix="longctx-new-", dir=_temporary_folder()))
    lock = _hold(new)
    folder = new.rename(new.with_name(_PREFIX + new.name.removeprefix("longctx-new-")))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def store_file(folder: Path) -> dict[str, str]:
    """Return the environment of ranks whose store is in this folder."""
    return {STORE_FILE: str(folder / "store")}


def meeting_point(env: Mapping[str, str]) -> dict[str, Any]:
    """Return the keywords of `init_process_group` for a rank: the file store it was given, else torch's defaults."""
    if STORE_FILE not in env:
        return {}
    path = Path(env[STORE_FILE])
    lock = _hold(path.parent)
    atexit.register(_leave, path.parent, lock)
    return {"init_method": f"file://{path}", "rank": int(env["RANK"]), "world_size": int(env["WORLD_SIZE"])}


def listen_on_loopback() -> TCPStore:
    """Start the server of a TCPStore that other machines cannot reach; torch's own listens on every interface."""
    from torch.distributed import TCPStore

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(socket.SOMAXCONN)
        port = listener.getsockname()[1]
        return TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )


def _temporary_folder() -> str:
    """Return where folders are made: TMPDIR, unless torch would take a part of its name for the query of a URL."""
    folder = tempfile.gettempdir()
    return "/tmp" if re.search(r"[?#\s]", folder) else folder


def _hold(folder: Path) -> int:
    """Share a lock on the folder, which ends with this process or with the returned file descriptor."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _leave(folder: Path, lock: int) -> None:
    """Give up a lock, and remove the folder if no other process holds one."""
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _remove_abandoned() -> None:
    """Remove this user's folders that no process holds any more."""
    for folder in Path(_temporary_folder()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder.lstat().st_uid == os.getuid():
                _leave(folder, _hold(folder))


_SHARED = "TORCHELASTIC_USE_AGENT_STORE"
_server: TCPStore | None = None  # lives as long as its process


def check_restarts() -> None:
    """Raise ValueError if torchrun may restart the ranks of several nodes with the same store."""
    restarts, nodes = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")), os.environ.get("GROUP_WORLD_SIZE", "1")
    if os.environ.get(_SHARED) == "True" and restarts > 0 and int(nodes) > 1:
        raise ValueError(
            f"--max_restarts {restarts} on {nodes} nodes: torch's store keeps the addresses of processes that have "
            "ended, and those that are started anew would find them. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in "
            "torchrun's environment on every node."
        )


def renew_store() -> None:
    """On one node, give a restarted process group its own store. Call this before the group is made."""
    global _server
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if os.environ.get(_SHARED) != "True" or attempt == "0":
        return
    from torch.distributed import TCPStore

    agents = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    key = f"longctx/port/{attempt}"
    if is_first_rank():
        _server = listen_on_loopback()
        agents.set(key, str(_server.port))
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", agents.get(key).decode()
    os.environ[_SHARED] = "False"


# What rank 0 decides, before there is a process group

READ_SECONDS = 60.0
"""Time for ranks to read what rank 0 has decided, if its process keeps the store and is to end."""
_decisions = itertools.count()
_kept: dict[str, TCPStore] = {}  # by the key of what it holds; the process group's store shares its server


def share_decision(decided: Mapping[str, Any] | None, seconds: float) -> dict[str, Any]:
    """Return on every rank what rank 0 has decided. All ranks call this, before they start a process group.

    Args:
        decided: values that JSON can express; None on other ranks.
        seconds: time to wait for rank 0.

    Raises:
        ValueError: if rank 0 cannot be reached.
    """
    number = next(_decisions)
    if STORE_FILE in os.environ:
        return _share_by_file(decided, Path(os.environ[STORE_FILE]).with_name(f"decision-{number}"), seconds)
    renew_store()
    from torch.distributed import TCPStore

    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts = decided is not None and os.environ.get(_SHARED) != "True"
    key = f"longctx/decision/{os.environ['WORLD_SIZE']}/{number}"
    try:
        store = TCPStore(
            *place, is_master=hosts, wait_for_workers=False, multi_tenant=True, timeout=timedelta(seconds=seconds)
        )
        if decided is None:
            decided = json.loads(store.get(key))
            store.add(f"{key}/read", 1)
            return dict(decided)
        store.set(key, json.dumps(decided))
    except RuntimeError as error:
        raise ValueError(
            f"rank {os.environ['RANK']} on {socket.gethostname()} and rank 0 do not meet at {place[0]}:{place[1]} "
            f"({str(error).splitlines()[0]}). Check that all nodes reach this address."
        ) from error
    if hosts:
        _kept[key] = store
    return dict(decided)


def decision_in(folder: Path) -> dict[str, Any]:
    """Return what rank 0 of the run of a private folder has decided; nothing if it has not yet."""
    path = folder / "decision-0"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def wait_for_readers() -> None:
    """Keep the store until all ranks have read what rank 0 has decided, before its process ends."""
    until = time.monotonic() + READ_SECONDS
    for key, store in _kept.items():
        while store.add(f"{key}/read", 0) < int(os.environ["WORLD_SIZE"]) - 1 and time.monotonic() < until:
            time.sleep(0.05)


def _share_by_file(decided: Mapping[str, Any] | None, path: Path, seconds: float) -> dict[str, Any]:
    if decided is not None:
        with written_whole(path) as unfinished:
            unfinished.write_text(json.dumps(decided))
    until = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > until:
            raise ValueError(f"rank 0 has decided nothing for {seconds:.0f} s (--ddp_timeout). Start the run anew.")
        time.sleep(0.05)
    return dict(json.loads(path.read_text()))

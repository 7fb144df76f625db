"""Where ranks meet: a file in a folder that no other user can open, or the store of another launcher, renewed.

torch's stores have no passwords. Whoever reaches a TCPStore can read and set its keys, some of which torch unpickles.
A file store is protected by the file system's permissions.

The last process that holds a run's folder removes it: the launcher or, if that was killed, a rank. If all were killed,
the next run removes it.

torchrun's agent keeps one store for all its attempts (in torch 2.13 and earlier; see pytorch issue 135712). A rank of
the second attempt may read what the first wrote there, such as an address of gloo or NCCL, before it is overwritten. So
a restarted group meets in a folder of its own, too.
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
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longctx.untrusted.files import written_whole

if TYPE_CHECKING:
    from torch.distributed import TCPStore

STORE_FILE = "LONGCTX_STORE_FILE"
"""The environment variable that names the file to the ranks."""
_PREFIX = "longctx-run-"


@contextmanager
def private_folder() -> Iterator[Path]:
    """Make a folder of mode 0700 for a run's stores, and remove it at the end."""
    folder, lock = _new_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def store_file(folder: Path) -> dict[str, str]:
    """Return the environment of ranks whose store is in this folder."""
    return {STORE_FILE: str(folder / "store")}


def meeting_point(env: MutableMapping[str, str]) -> dict[str, Any]:
    """Return the keywords of `init_process_group` for a rank: the file store it was given, else torch's defaults."""
    renew_store(env)
    if STORE_FILE not in env:
        return {}
    path = Path(env[STORE_FILE])
    atexit.register(_leave, path.parent, _hold(path.parent))
    return {"init_method": f"file://{path}", "rank": int(env["RANK"]), "world_size": int(env["WORLD_SIZE"])}


def _new_folder() -> tuple[Path, int]:
    """Make a private folder and hold it, after removing this user's folders that no process holds any more."""
    temporary = tempfile.gettempdir()
    if re.search(r"[?#\s]", temporary):  # of which torch would take a part for the query of a URL
        temporary = "/tmp"
    for folder in Path(temporary).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder.lstat().st_uid == os.getuid():
                _leave(folder, _hold(folder))
    new = Path(tempfile.mkdtemp(prefix="longctx-new-", dir=temporary))  # not yet under the name that is looked for
    lock = _hold(new)
    return new.rename(new.with_name(_PREFIX + new.name.removeprefix("longctx-new-"))), lock


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


_SHARED = "TORCHELASTIC_USE_AGENT_STORE"


def check_restarts() -> None:
    """Raise ValueError if torchrun may restart the ranks of several nodes with the same store."""
    restarts, nodes = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")), os.environ.get("GROUP_WORLD_SIZE", "1")
    if os.environ.get(_SHARED) == "True" and restarts > 0 and int(nodes) > 1:
        raise ValueError(
            f"--max_restarts {restarts} on {nodes} nodes: torch's store keeps the addresses of processes that have "
            "ended, and those that are started anew would find them. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in "
            "torchrun's environment on every node."
        )


def renew_store(env: MutableMapping[str, str]) -> None:
    """On one node, give a restarted process group a file store in a folder of rank 0's."""
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    if env.get(_SHARED) != "True" or attempt == "0" or STORE_FILE in env:
        return
    from torch.distributed import TCPStore

    agents = TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False)
    key = f"longctx/folder/{attempt}"
    if env["RANK"] == "0":
        folder, lock = _new_folder()
        agents.set(key, str(folder))
    else:
        folder = Path(agents.get(key).decode())
        lock = _hold(folder)
    atexit.register(_leave, folder, lock)
    env.update(store_file(folder))


# What rank 0 decides, before there is a process group

READ_SECONDS = 10.0
"""By how much other ranks may be slower than rank 0, whose process keeps the store until they have read it and ends."""
_decisions = itertools.count()


def share_decision(decided: Mapping[str, Any] | None, seconds: float) -> dict[str, Any]:
    """Return on every rank what rank 0 has decided. All ranks call this, before they start a process group.

    Args:
        decided: values that JSON can express; None on other ranks.
        seconds: time to wait for rank 0.

    Raises:
        ValueError: if rank 0 cannot be reached.
    """
    number = next(_decisions)
    renew_store(os.environ)
    if STORE_FILE in os.environ:
        return _share_by_file(decided, Path(os.environ[STORE_FILE]).parent, number, seconds)
    from torch.distributed import TCPStore

    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts = decided is not None and os.environ.get(_SHARED) != "True"
    key = f"longctx/decision/{os.environ['WORLD_SIZE']}/{number}"
    options: dict[str, Any] = {"wait_for_workers": False, "multi_tenant": True, "timeout": timedelta(seconds=seconds)}
    try:
        store = TCPStore(*place, is_master=hosts, **options)  # the process group's store will share its server
        if decided is None:
            decided = json.loads(store.get(key))
            store.add(f"{key}/read", 1)
        else:
            store.set(key, json.dumps(decided))
    except RuntimeError as error:
        raise ValueError(
            f"rank {os.environ['RANK']} on {socket.gethostname()} and rank 0 do not meet at {place[0]}:{place[1]} "
            f"({str(error).splitlines()[0]}). Check that all nodes reach this address."
        ) from error
    if hosts:
        import psutil

        until = time.monotonic() + READ_SECONDS + time.time() - psutil.Process().create_time()
        atexit.register(_wait_for_readers, store, f"{key}/read", int(os.environ["WORLD_SIZE"]) - 1, until)
    return dict(decided)


def _wait_for_readers(store: TCPStore, key: str, readers: int, until: float) -> None:
    """Keep the store of a process that ends until all ranks have read what it has decided.

    They started when it did, so those that have not come after twice the time that it took to decide, and READ_SECONDS,
    do not come.
    """
    while store.add(key, 0) < readers and time.monotonic() < until:
        time.sleep(0.05)


def _share_by_file(decided: Mapping[str, Any] | None, folder: Path, number: int, seconds: float) -> dict[str, Any]:
    if decided is not None:
        with written_whole(folder / f"decision-{number}") as unfinished:
            unfinished.write_text(json.dumps(decided))
    until = time.monotonic() + seconds
    while not (found := decision_in(folder, number)):
        if time.monotonic() > until:
            raise ValueError(f"rank 0 has decided nothing for {seconds:.0f} s (--ddp_timeout). Start the run anew.")
        time.sleep(0.05)
    return found


def decision_in(folder: Path, number: int = 0) -> dict[str, Any]:
    """Return what rank 0 of the run of a private folder has decided; nothing if it has not yet."""
    path = folder / f"decision-{number}"
    return dict(json.loads(path.read_text())) if path.exists() else {}

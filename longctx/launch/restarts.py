"""A store without the keys of ended processes, after a restart by torchrun.

torchrun's agent keeps one store for all its attempts (in torch 2.13 and earlier; see pytorch issue 135712). A rank of
the second attempt may read what the first wrote there, such as an address of gloo or NCCL, before it is overwritten.
"""

from __future__ import annotations

import os

import torch.distributed as dist

from longctx.launch.store import listen_on_loopback
from longctx.ranks.first import is_first_rank

_SHARED = "TORCHELASTIC_USE_AGENT_STORE"
_server: dist.TCPStore | None = None  # lives as long as its process


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
    agents = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    key = f"longctx/port/{attempt}"
    if is_first_rank():
        _server = listen_on_loopback()
        agents.set(key, str(_server.port))
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", agents.get(key).decode()
    os.environ[_SHARED] = "False"

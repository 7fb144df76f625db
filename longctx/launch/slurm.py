"""Make ranks of `srun` tasks: set the variables that a launcher would set, from SLURM's.

The shell of `salloc` or `sbatch` is not a task. A single task is no rank, since it may start processes of its own.
"""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Mapping, MutableMapping

_PORTS = range(12_000, 32_000)
"""Ports below those that Linux gives to outgoing connections."""
_STEPS_OF_A_JOB = 101
"""The first 101 steps of jobs whose numbers differ by at most 190 have distinct ports."""


def read_step(env: Mapping[str, str]) -> dict[str, str] | None:
    """Return what a launcher would set in this process; None if the process is no task of `srun`, or the only one.

    Ranks of a node are consecutive, whatever --distribution is. The user's MASTER_ADDR and MASTER_PORT stay.
    """
    if int(env.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return None
    if "SLURM_PTY_PORT" in env and sys.stdin.isatty():  # in a shell of srun --pty
        return None
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", env["SLURM_STEP_TASKS_PER_NODE"])  # such as 4(x2),3
    tasks = [int(number) for number, nodes in groups for _ in range(int(nodes or 1))]
    node, local_rank = int(env["SLURM_NODEID"]), int(env["SLURM_LOCALID"])
    job, step = int(env["SLURM_JOB_ID"]), int(env["SLURM_STEP_ID"])
    reserved = env.get("SLURM_STEP_RESV_PORTS", "").split("-")[0]
    known = {
        "RANK": sum(tasks[:node]) + local_rank,
        "WORLD_SIZE": sum(tasks),
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": tasks[node],
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": len(tasks),
        "MASTER_ADDR": env.get("MASTER_ADDR") or first_host(env["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": env.get("MASTER_PORT") or reserved or _PORTS[(job * _STEPS_OF_A_JOB + step) % len(_PORTS)],
    }
    return {name: str(value) for name, value in known.items()}


def join_step(env: MutableMapping[str, str]) -> None:
    """Set RANK, WORLD_SIZE and the like in a task of `srun`, unless a launcher in the task has.

    Raises:
        ValueError: for `accelerate launch` in every task, which it does not connect, and for an unknown address.
    """
    step = read_step(env)
    if step is None or "RANK" in env:
        return
    if "ACCELERATE_MIXED_PRECISION" in env:
        raise ValueError(
            f"accelerate launch started one process in each of srun's {step['WORLD_SIZE']} tasks and does not connect "
            "them. Leave it out, srun then connects its tasks: srun longctx train …; or start one task a node and in "
            "it accelerate launch with --num_machines, --machine_rank and --main_process_ip."
        )
    try:
        socket.getaddrinfo(step["MASTER_ADDR"], step["MASTER_PORT"])
    except OSError as error:
        raise ValueError(
            f"{socket.gethostname()} finds no address of {step['MASTER_ADDR']}, the first node of this step ({error}). "
            "Set MASTER_ADDR to an address that all nodes reach."
        ) from error
    env.update(step)


def first_host(nodes: str) -> str:
    """Return the first host of SLURM's list: rack1n03 for `rack1n[03-05,9],login`."""
    first = re.match(r"(?:[^,\[]|\[[^]]*])+", nodes)
    if first is None:
        raise ValueError(f"SLURM_STEP_NODELIST {nodes!r} names no host. Set MASTER_ADDR to the first node's address.")
    return re.sub(r"\[([^],-]+)[^]]*]", r"\1", first[0])

"""Make ranks of `srun` tasks: set the variables that a launcher would set, from SLURM's.

The shell of `salloc` or `sbatch` is not a task. A single task is no rank, since it may start processes of its own.
"""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

_PORTS = range(12_000, 32_000)
"""Ports below those that Linux gives to outgoing connections."""
_STEPS_OF_A_JOB = 101
"""The first 101 steps of jobs whose numbers differ by at most 190 have distinct ports."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one task of `srun` knows of its step."""

    tasks: tuple[int, ...]
    """Tasks on each node."""
    node: int
    """Index of this task's node."""
    local_rank: int
    """Index of this task on its node."""
    address: str
    """Address of the first node."""
    port: int

    @property
    def rank(self) -> int:
        """This task's rank, counted node by node whatever --distribution is: ranks of a node are consecutive."""
        return sum(self.tasks[: self.node]) + self.local_rank

    @property
    def nodes(self) -> int:
        return len(self.tasks)


def read_step(env: Mapping[str, str]) -> Step | None:
    """Return this process's step; None if the process is no task, or the only one."""
    if int(env.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return None
    if "SLURM_PTY_PORT" in env and sys.stdin.isatty():  # in a shell of srun --pty
        return None
    tasks = _tasks(env["SLURM_STEP_TASKS_PER_NODE"])
    job, step = int(env["SLURM_JOB_ID"]), int(env["SLURM_STEP_ID"])
    reserved = env.get("SLURM_STEP_RESV_PORTS", "").split("-")[0]
    return Step(
        tasks=tasks,
        node=int(env["SLURM_NODEID"]),
        local_rank=int(env["SLURM_LOCALID"]),
        address=env.get("MASTER_ADDR") or first_host(env["SLURM_STEP_NODELIST"]),
        port=int(env.get("MASTER_PORT") or reserved or _PORTS[(job * _STEPS_OF_A_JOB + step) % len(_PORTS)]),
    )


def join_step(env: MutableMapping[str, str]) -> None:
    """Set RANK, WORLD_SIZE and the like in a task of `srun`, unless a launcher in the task has.

    The user's MASTER_ADDR and MASTER_PORT stay.

    Raises:
        ValueError: for `accelerate launch` in every task, which it does not connect, and for an unknown address.
    """
    step = read_step(env)
    if step is None or "RANK" in env:
        return
    if "ACCELERATE_MIXED_PRECISION" in env:
        raise ValueError(
            f"accelerate launch started one process in each of srun's {sum(step.tasks)} tasks and does not connect "
            "them. Leave it out, srun then connects its tasks: srun longctx train …; or start one task a node and in "
            "it accelerate launch with --num_machines, --machine_rank and --main_process_ip."
        )
    try:
        socket.getaddrinfo(step.address, step.port)
    except OSError as error:
        raise ValueError(
            f"{socket.gethostname()} finds no address of {step.address}, the first node of this step ({error}). "
            "Set MASTER_ADDR to an address that all nodes reach."
        ) from error
    known = {
        "RANK": step.rank,
        "WORLD_SIZE": sum(step.tasks),
        "LOCAL_RANK": step.local_rank,
        "LOCAL_WORLD_SIZE": step.tasks[step.node],
        "GROUP_RANK": step.node,
        "GROUP_WORLD_SIZE": step.nodes,
        "MASTER_ADDR": step.address,
        "MASTER_PORT": step.port,
    }
    env.update({name: str(value) for name, value in known.items()})


def first_host(nodes: str) -> str:
    """Return the first host of SLURM's list: rack1n03 for `rack1n[03-05,9],login`."""
    first = re.match(r"(?:[^,\[]|\[[^]]*])+", nodes)
    if first is None:
        raise ValueError(f"SLURM_STEP_NODELIST {nodes!r} names no host. Set MASTER_ADDR to the first node's address.")
    return re.sub(r"\[([^],-]+)[^]]*]", r"\1", first[0])


def _tasks(per_node: str) -> tuple[int, ...]:
    """Return each node's tasks: (4, 4, 3) for SLURM's `4(x2),3`."""
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", per_node)
    return tuple(int(tasks) for tasks, nodes in groups for _ in range(int(nodes or 1)))

"""Tasks of `srun` as ranks: what a launcher would have told them, worked out from what SLURM tells them.

The shell of `salloc` or `sbatch` is no task, nor is a task alone, which may start processes of its own.
"""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

_PORTS = range(12_000, 32_000)
"""Below those that Linux gives to outgoing connections."""
_STEPS_OF_A_JOB = 101
"""A step's port is no other's among the jobs numbered within 190 of its own, for the first hundred steps of each."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one task of `srun` knows of its step."""

    tasks: tuple[int, ...]
    """On each node."""
    node: int
    """This task's, from 0."""
    local_rank: int
    """Of this task on its node."""
    address: str
    """Of the first node."""
    port: int

    @property
    def rank(self) -> int:
        """Node by node, however --distribution has numbered the tasks: ranks of a node are neighbours."""
        return sum(self.tasks[: self.node]) + self.local_rank

    @property
    def nodes(self) -> int:
        return len(self.tasks)


def read_step(env: Mapping[str, str]) -> Step | None:
    """The step of several tasks that this process is one of; None in a process that is none, or the only one."""
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

    MASTER_ADDR and MASTER_PORT of the user's stay.

    Raises:
        ValueError: for `accelerate launch` in every task where it connects none, and an address that is none here.
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
    """Of SLURM's list, `rack1n[03-05,9],login`: its bracket's first number."""
    first = re.match(r"(?:[^,\[]|\[[^]]*])+", nodes)
    if first is None:
        raise ValueError(f"SLURM_STEP_NODELIST {nodes!r} names no host. Set MASTER_ADDR to the first node's address.")
    return re.sub(r"\[([^],-]+)[^]]*]", r"\1", first[0])


def _tasks(per_node: str) -> tuple[int, ...]:
    """Of each node, from SLURM's `4(x2),3`."""
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", per_node)
    return tuple(int(tasks) for tasks, nodes in groups for _ in range(int(nodes or 1)))

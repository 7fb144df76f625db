"""What only NCCL asks for: a hang described before the process aborts, and objects that stay out of GPU memory."""

from __future__ import annotations

import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from longctx.ranks import agreement
from longctx.ranks.agreement import broadcast_object, gather_objects, gather_on_first
from longctx.ranks.watchdog import LEAVE_SECONDS, Position, _stack, current_watchdog, limit_waiting, phase, speaks_after
from tests.workers import run_ranks

NCCL_ALONE = "cuda:nccl"
"""What `dist.get_backend_config` says of the group that DeepSpeed starts on GPUs."""


@pytest.mark.parametrize(("timeout", "seconds"), [(1800, 1620), (7200, 6480), (300, 240), (60, 30), (4, 2)])
def test_a_hang_is_described_before_nccl_aborts(timeout, seconds):
    assert speaks_after(timeout) == seconds


def one_rank_does_not_come():
    """Rank 1 is elsewhere, while rank 0 waits for it with a time-out of 4 s."""
    dist.get_backend_config = lambda group=None: NCCL_ALONE
    watchdog = current_watchdog()
    watchdog.register()
    watchdog.step = 7
    limit_waiting(timedelta(seconds=4))
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timedelta(seconds=60), dist.group.WORLD)  # gloo would raise an error in time
    if dist.get_rank() == 1:
        is_elsewhere()
    dist.barrier()
    failure = watchdog.failure
    watchdog.leave()
    return failure


def is_elsewhere():
    """Until the hang has been described, for which a busy machine takes longer."""
    until = time.monotonic() + 50
    while "rank 1" not in Path(os.environ["HANG_LOG"]).read_text() and time.monotonic() < until:
        time.sleep(0.1)


def test_who_did_not_come_is_said_once_and_the_run_goes_on(monkeypatch, tmp_path):
    log = tmp_path / "log"
    monkeypatch.setenv("HANG_LOG", str(log))
    assert run_ranks(2, f"{__name__}:told_in_a_file") == [None, None]
    lines = log.read_text().splitlines()
    assert len([line for line in lines if "no progress for" in line]) == 1
    assert "NCCL ends the run after 4 s (--ddp_timeout)" in lines[0]
    assert "rank 1 is at (step 7): " in log.read_text()
    assert "in is_elsewhere" in log.read_text()
    assert "rank 0 waits in barrier (step 7)" in log.read_text()


def told_in_a_file():
    """The same, with what both ranks write to their stderr in one file."""
    output = os.open(os.environ["HANG_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 2)
    return one_rank_does_not_come()


def one_node_is_gone():
    """Rank 1 is on a node of its own, and falls silent without leaving."""
    rank = dist.get_rank()
    socket.gethostname = lambda: f"node{rank}"
    watchdog = current_watchdog()
    watchdog.register()
    dist.barrier()
    if rank == 1:
        watchdog._left.set()  # ends its thread alone
        watchdog._thread.join()
    dist.barrier()
    failure = watchdog.wait_for_failure(3.0) if rank == 0 else None
    watchdog.leave()
    dist.barrier()
    return failure and (failure.kind, failure.message.partition(" (")[0], failure.message.rpartition(" ")[2])


def test_a_node_that_falls_silent_is_named():
    assert LEAVE_SECONDS == 10  # how long a run that has lost a connection listens
    assert run_ranks(2, f"{__name__}:one_node_is_gone") == [("died", "rank 1", "node1)"), None]


def objects_over_nccl():
    """The groups that objects travel in, over a group that is said to be one of NCCL alone; and what arrives."""
    dist.get_backend_config = lambda group=None: NCCL_ALONE
    groups = []
    for name in ("all_gather_object", "gather_object", "broadcast_object_list"):
        call = getattr(dist, name)

        def recorded(*arguments, call=call, group=None):
            groups.append(group)
            return call(*arguments, group=group)

        setattr(dist, name, recorded)
    rank = dist.get_rank()
    arrived = gather_objects(rank), gather_objects("x"), gather_on_first(rank), broadcast_object(f"of {rank}")
    assert len(set(groups)) == 1
    assert groups[0] is not dist.group.WORLD
    return dist.get_backend(groups[0]), arrived


def test_objects_do_not_travel_through_gpu_memory():
    assert run_ranks(2, f"{__name__}:objects_over_nccl") == [
        ("gloo", ([0, 1], ["x", "x"], on_first, "of 0")) for on_first in ([0, 1], [])
    ]


def test_objects_go_over_the_group_itself_where_it_has_a_cpu(monkeypatch):
    world = object()
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(dist, "new_group", lambda **_: pytest.fail("another group was made"))
    assert agreement._host_group(world) is world


def test_a_phase_is_known_by_its_function_and_not_by_the_functions_name():
    class Trainer:
        @phase("forward")
        def compute_loss(self):
            return Position.of(_stack(sys._getframe()), 3)

    class Other:
        def compute_loss(self):
            return Position.of(_stack(sys._getframe()), 3)

    assert str(Trainer().compute_loss()).startswith("is at (step 3, forward): ")
    assert str(Other().compute_loss()).startswith("is at (step 3): ")

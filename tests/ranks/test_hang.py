"""Ranks that hang or end while others wait for them, and objects that stay out of GPU memory."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from longctx.launch.failures import failures_told
from longctx.launch.store import meeting_point, private_folder, store_file
from longctx.ranks.agreement import broadcast_object, gather_objects, main_process_first, on_all_ranks
from longctx.ranks.hang import WATCH, describe_hang, limit_waiting, patience, record_collectives
from longctx.ranks.peers import current_peers
from tests.hosts import wait_until
from tests.workers import run_ranks, start_warm_server

NCCL_ALONE = "cuda:nccl"
"""What `dist.get_backend_config` says of the group that DeepSpeed starts on GPUs."""
TIMEOUT = 4
"""Seconds of --ddp_timeout."""


# Ranks without a launcher that would stop them


class Ended(NamedTuple):
    """What became of ranks, one of which has met a fault."""

    codes: list[int]
    reported: dict[int, str]
    """Why the run has failed, by the ranks that say so."""
    store_calls: int
    """Calls to the store from the fault on, of all ranks."""
    printed: list[str]
    stacks: dict[str, str]
    seconds: float
    """From the fault to the end of all."""


def run_with_fault(fault, bad, world_size, *, keeps_store=False):
    """Have rank `bad` meet a fault. With `keeps_store`, rank 0 keeps the store, as in srun."""
    start_warm_server()
    context = multiprocessing.get_context("forkserver")
    with private_folder() as folder:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            served = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused.getsockname()[1])}
        arguments = world_size, fault, bad, folder, served if keeps_store else store_file(folder)
        ranks = [context.Process(target=be_rank, args=(rank, *arguments)) for rank in range(world_size)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(60)
        seconds, codes = time.time() - os.path.getmtime(folder / "fault"), [rank.exitcode for rank in ranks]
        for rank in ranks:
            rank.kill()
        reports = {int(path.name.split("-")[1]): json.loads(path.read_text()) for path in folder.glob("error-*")}
        return Ended(
            codes,
            {rank: report["message"]["message"] for rank, report in reports.items()},
            sum(int(path.read_text()) for path in folder.glob("calls-*")),
            [line for line in (folder / "log").read_text().splitlines() if line.startswith("longctx: error: ")],
            {path.name: path.read_text() for path in folder.glob("hang/*")},
            seconds,
        )


def be_rank(rank, world_size, fault, bad, folder, store):
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {name: str(value) for name, value in place.items()} | store
    os.environ |= {"TORCHELASTIC_ERROR_FILE": str(folder / f"error-{rank}"), "GLOO_SOCKET_IFNAME": "lo"}
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    dist.init_process_group("gloo", **meeting_point(os.environ))
    calls = count_calls()
    try:
        with failures_told(lambda: "Resume.", TIMEOUT, folder):
            on_all_ranks(lambda: None)
            if fault == "killed before its turn":
                if rank == bad:
                    threading.Timer(1.0, meet, [fault, folder]).start()
                report = folder / "error-2"
                main_process_first(
                    lambda: wait_until(report.exists, "rank 2's report", 20) if rank == 0 else None, folder
                )
            limit_waiting(TIMEOUT, folder)
            dist.barrier()
            calls.clear()
            if fault == "killed in a meeting":
                on_all_ranks(lambda: meet(fault, folder) if rank == bad else None)
            if rank == bad:
                meet(fault, folder)
            dist.all_reduce(torch.ones(1))
    finally:
        (folder / f"calls-{rank}").write_text(str(len(calls)))


def count_calls():
    """The names of calls to stores from here on."""
    calls = []
    for name in ("set", "get", "add", "check", "compare_set", "multi_get", "wait"):
        call = getattr(dist.Store, name)
        setattr(dist.Store, name, lambda *arguments, name=name, call=call: calls.append(name) or call(*arguments))
    return calls


def meet(fault, folder):
    (folder / "fault").touch()
    if fault == "hangs":
        time.sleep(3600)
    elif fault == "raises":
        raise ValueError("the fault of this test")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("fault", "bad", "keeps_store"),
    [
        ("killed", 1, False),
        ("killed", 0, True),
        ("killed in a meeting", 1, True),
        ("killed in a meeting", 0, True),
        ("killed before its turn", 1, True),
    ],
    ids=str,
)
def test_a_killed_rank_is_named_by_all_and_printed_once(fault, bad, keeps_store):
    ended = run_with_fault(fault, bad, 3, keeps_store=keeps_store)
    others = {0, 1, 2} - {bad}
    assert ended.codes == [-signal.SIGKILL if rank == bad else 1 for rank in range(3)]
    assert set(ended.reported) == others
    for message in ended.reported.values():
        assert re.search(rf"rank {bad} \(pid \d+ on .*\) has died.*out-of-memory killer.* Resume\.", message)
    assert len(ended.printed) == 1
    assert ended.seconds < 15
    assert ended.stacks == {}


def test_what_a_rank_raises_is_known_to_all_although_it_keeps_the_store():
    ended = run_with_fault("raises", 0, 3, keeps_store=True)
    assert ended.codes == [1, 1, 1]
    stopped = r"rank 0 \(pid \d+ on .*\) stopped with ValueError: the fault of this test\. Resume\."
    assert ended.reported[0] == "ValueError: the fault of this test"
    for rank in (1, 2):
        assert re.fullmatch(f"another rank failed first: {stopped}", ended.reported[rank])
    assert len(ended.printed) == 1  # beside the traceback


def test_a_failure_takes_a_few_calls_to_the_store_from_each_rank():
    """If each asked about all others, they would be three times as many on three times as many ranks."""
    small, large = (run_with_fault("killed", 1, ranks).store_calls / ranks for ranks in (4, 12))
    assert 0 < large < small + 4


@pytest.mark.long
def test_a_rank_that_hangs_is_named_with_its_place_and_ends():
    ended = run_with_fault("hangs", 1, 3)
    assert ended.codes == [1, 1, 1]
    assert ended.seconds < TIMEOUT + 15
    assert set(ended.reported) == {0, 2}
    said = [line.removeprefix("longctx: error: ") for line in ended.printed]
    name = r"rank 1 \(pid \d+ on .*\)"
    assert re.fullmatch(rf"the run ends after {TIMEOUT} s \(--ddp_timeout\); in no collective: {name}", said[0])
    assert re.match(r"  rank 1 in no collective: tests/ranks/test_hang.py:\d+ in meet < ", said[1])
    assert re.match(r"  ranks 0, 2 in a collective: tests/ranks/test_hang.py:\d+ in be_rank < ", said[2])
    assert re.fullmatch(r"  The stacks of all threads are in .*/hang\.", said[3])
    assert said[4:] == ["  Resume."]
    assert set(ended.stacks) == {f"rank-{rank}.txt" for rank in range(3)}
    assert "    time.sleep(3600)\n\nrank 1 (pid " in ended.stacks["rank-1.txt"]


# Ranks that go on


@pytest.mark.parametrize(("timeout", "seconds"), [(1800, 1620), (7200, 6480), (300, 240), (60, 30), (4, 2)])
def test_stacks_are_written_before_the_time_out(timeout, seconds):
    assert patience(timeout) == seconds


def one_rank_comes_late(folder):
    """Rank 1 is elsewhere until the hang has been described, while rank 0 waits for it with a time-out of 4 s."""
    output = os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 2)
    dist.get_backend_config = lambda group=None: NCCL_ALONE
    limit_waiting(TIMEOUT, Path(folder))
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timedelta(seconds=60), dist.group.WORLD)  # gloo would raise an error in time
    if dist.get_rank() == 1:
        is_elsewhere(folder)
    dist.barrier()
    written = sorted(os.listdir(f"{folder}/hang"))
    dist.barrier()
    WATCH.go_on()
    dist.barrier()
    return written, os.path.exists(f"{folder}/hang")


def is_elsewhere(folder):
    wait_until(lambda: "rank 1" in Path(folder, "log").read_text(), "the description of the hang", 50)


def test_who_did_not_come_is_said_once_over_nccl_and_the_run_goes_on(tmp_path):
    (tmp_path / "hang").mkdir()
    (tmp_path / "hang" / "rank-7.txt").touch()  # of an earlier attempt
    assert run_ranks(2, f"{__name__}:one_rank_comes_late", str(tmp_path)) == [(["rank-0.txt", "rank-1.txt"], False)] * 2
    log = (tmp_path / "log").read_text()
    assert log.count("no progress for") == 1
    assert "NCCL ends the run after 4 s (--ddp_timeout); in no collective: rank 1 (pid " in log
    assert re.search(r"  rank 1 in no collective: .* in is_elsewhere < ", log)
    assert re.search(r"  rank 0 in a collective: .* in one_rank_comes_late < ", log)


def work_while_another_waits(folder):
    """Rank 1 works for longer than ranks wait for each other, in a meeting: what is there of a hang meanwhile."""
    limit_waiting(TIMEOUT, Path(folder))
    rank = dist.get_rank()

    def work():
        time.sleep(TIMEOUT * rank)
        return os.listdir(f"{folder}/hang") if os.path.exists(f"{folder}/hang") else []

    return on_all_ranks(work), os.path.exists(f"{folder}/hang")


@pytest.mark.long
def test_a_rank_that_waits_in_a_meeting_does_not_hang(tmp_path):
    assert run_ranks(2, f"{__name__}:work_while_another_waits", str(tmp_path)) == [([], False), (["rank-1.txt"], False)]


def many_places(folder):
    """What is said of a hang of 40 ranks at 20 places."""
    peers, folder = current_peers(), Path(folder, os.environ["RANK"])
    peers.world_size = 40
    folder.mkdir()
    stack = '  File "/code/part.py", line {}, in part\n    work()\n'
    for rank in range(40):
        (folder / f"rank-{rank}.txt").write_text(stack.format(rank % 20) + "\nrank, innermost frames first:\n")
    return describe_hang(peers, folder)


def test_a_hang_at_many_places_takes_few_lines(tmp_path):
    first, *lines = run_ranks(2, f"{__name__}:many_places", str(tmp_path))[0]
    assert re.fullmatch(r"in no collective: rank 0 \(.*\), rank 1.*, rank 2, rank 3, 36 more", first)
    assert lines[0] == "  ranks 0, 20 in no collective: /code/part.py:0 in part"
    assert lines[10] == "  and 10 more places"
    assert len(lines) == 12


def test_variables_of_the_flight_recorder_that_are_set_stay(tmp_path):
    env = {"TORCH_FR_BUFFER_SIZE": "7"}
    record_collectives(tmp_path, env)
    assert env == {
        "TORCH_FR_BUFFER_SIZE": "7",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/hang/collectives-",
    }


# Objects


def objects_over_nccl():
    """The groups that objects travel in, over a group that is said to be one of NCCL alone; and what arrives."""
    dist.get_backend_config = lambda group=None: NCCL_ALONE
    groups = []
    for name in ("all_gather_object", "broadcast_object_list"):
        call = getattr(dist, name)

        def recorded(*arguments, call=call, group=None):
            groups.append(group)
            return call(*arguments, group=group)

        setattr(dist, name, recorded)
    rank = dist.get_rank()
    arrived = gather_objects(rank), gather_objects("x"), broadcast_object(f"of {rank}")
    assert len(set(groups)) == 1
    assert groups[0] is not dist.group.WORLD
    return dist.get_backend(groups[0]), arrived


def test_objects_do_not_travel_through_gpu_memory():
    assert run_ranks(2, f"{__name__}:objects_over_nccl") == [("gloo", ([0, 1], ["x", "x"], "of 0"))] * 2

"""Bugs in GPU code that the soft device finds.

PLANTED and IN_PROGRAMS are the table of benchmarks/results/planted_gpu_bugs.md.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.softcuda.ranks import soft_environment

FAILED = 70
"""As in tests/softcuda/program.py, which cannot be imported without the device."""
TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "planted_gpu_bugs.md"

# Planted bugs: each function ends with the error that gives it away


def cpu_tensor_in_a_kernel() -> None:
    torch.ones(3, device="cuda") + torch.ones(3)


def boundaries_on_the_cpu() -> None:
    torch.ones(3, device="cuda").index_add_(0, torch.tensor([0, 1]), torch.ones(2, device="cuda"))


def tensors_of_two_gpus() -> None:
    torch.ones(3, device="cuda:0") @ torch.ones(3, device="cuda:1")


def gpu_that_is_not_there() -> None:
    torch.cuda.set_device(torch.cuda.device_count())


def host_copy_read_too_soon() -> None:
    host = torch.zeros(4, pin_memory=True)
    host.copy_(torch.ones(4, device="cuda"), non_blocking=True)
    assert host.sum() == 4, f"read {host.tolist()}"


def wait_for_an_event_before_the_copy() -> None:
    host, event = torch.zeros(4, pin_memory=True), torch.cuda.Event()
    event.record()
    host.copy_(torch.ones(4, device="cuda"), non_blocking=True)
    event.synchronize()
    assert host.sum() == 4, f"read {host.tolist()}"


def missing_event_wait() -> None:
    host, out, back = torch.zeros(4, pin_memory=True), torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(out):
        host.copy_(torch.ones(4, device="cuda"), non_blocking=True)
    with torch.cuda.stream(back):  # back.wait_stream(out) is missing
        host.to("cuda", non_blocking=True)


def source_changed_under_its_copy() -> None:
    host = torch.ones(4, pin_memory=True)
    host.to("cuda", non_blocking=True)
    host.fill_(2)


def kernels_of_two_streams() -> None:
    x = torch.ones(4, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):  # its wait_stream(torch.cuda.current_stream()) is missing
        x.mul_(2)


def memory_that_another_stream_uses() -> None:
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()
    del x  # x.record_stream(side) is missing
    torch.empty(4, device="cuda")


def uninitialised_memory() -> None:
    total = torch.empty(4, device="cuda")
    total += 1
    assert total.sum() == 4, f"computed {total.tolist()}"


def cpu_tensor_handed_to_nccl() -> None:
    dist.all_reduce(torch.ones(3))


def gpu_tensor_handed_to_gloo() -> None:
    dist.all_reduce(torch.ones(3, device="cuda"), group=dist.new_group(backend="gloo"))


def two_ranks_on_one_gpu() -> None:
    dist.all_reduce(torch.ones(3, device="cuda"))  # torch.cuda.set_device(rank) is missing
    dist.barrier()


def result_read_before_it_is_there() -> None:
    torch.cuda.set_device(dist.get_rank())
    total = torch.ones(3, device="cuda")
    work = dist.all_reduce(total, async_op=True)
    read = total.tolist()
    work.wait()
    assert read == [2, 2, 2], f"read {read}"


def buffer_reused_before_it_is_sent() -> None:
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    keys, received = torch.ones(3, device="cuda"), torch.empty(3, device="cuda")
    pair = [dist.P2POp(dist.isend, keys, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    works = dist.batch_isend_irecv(pair)
    keys.zero_()
    for work in works:
        work.wait()


def wrong_order_of_collectives() -> None:
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    small, large = torch.ones(3, device="cuda"), torch.ones(5, device="cuda")
    for tensor in (small, large) if rank == 0 else (large, small):
        dist.all_reduce(tensor)


def all_send_first() -> None:
    rank, number = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    works = [dist.isend(torch.ones(3, device="cuda"), (rank + 1) % number)]
    works.append(dist.irecv(torch.empty(3, device="cuda"), (rank - 1) % number))
    for work in works:
        work.wait()


def all_send_first_in_a_ring_of_three() -> None:
    all_send_first()


def single_messages_for_a_group() -> None:
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    own, received = torch.ones(3, device="cuda"), torch.empty(3, device="cuda")
    dist.all_reduce(own)
    if rank == 0:
        works = [dist.isend(own, 1), dist.irecv(received, 1)]
    else:
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, own, 0), dist.P2POp(dist.irecv, received, 0)])
    for work in works:
        work.wait()


def first_exchange_without_all_ranks() -> None:
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    dist.group.WORLD._get_backend(torch.device("cuda")).wrapped_pg._set_default_timeout(timedelta(seconds=2))
    if rank < 2:  # and the third has nothing to send
        keys = torch.ones(3, device="cuda")
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend if rank == 0 else dist.irecv, keys, 1 - rank)]):
            work.wait()


def gradient_on_another_thread() -> None:
    """A hook on a host tensor, as of the layers of the sequence-chunked step, and a parameter on the GPU."""
    parameter, found = torch.ones(3, device="cuda", requires_grad=True), []
    host = torch.ones(3, requires_grad=True)
    parameter.register_hook(lambda _: time.sleep(0.05))  # as if its kernels took long
    for _ in range(20):
        parameter.grad = None
        x = host.clone()
        x.register_hook(lambda _: found.append(parameter.grad is not None))
        _ThroughTheHost.apply(x, parameter).sum().backward()
    assert all(found), f"the hook found {sum(found)} of 20 gradients"


class _ThroughTheHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, parameter):
        ctx.save_for_backward(x, parameter)
        return x * parameter.detach().cpu()

    @staticmethod
    def backward(ctx, grad):
        x, parameter = ctx.saved_tensors
        return grad * parameter.detach().cpu(), grad.cuda() * x.cuda()


class Planted(NamedTuple):
    """A bug, and how it is caught."""

    plant: Callable[[], None]
    error: str
    """What the ranks' output says, a regular expression."""
    how: str
    ranks: int = 1


PLANTED = [
    Planted(cpu_tensor_in_a_kernel, r"cuda:0 and cpu", "error of the operator, as on a GPU"),
    Planted(boundaries_on_the_cpu, r"\(self\) cuda:0, \(index\) cpu", "error of the operator, as on a GPU"),
    Planted(tensors_of_two_gpus, r"cuda:0 and cuda:1", "error of the operator, as on a GPU"),
    Planted(gpu_that_is_not_there, r"invalid device ordinal", "error of torch.cuda, as on a GPU"),
    Planted(host_copy_read_too_soon, r"read \[nan", "the host tensor is NaN until its copy is waited for"),
    Planted(wait_for_an_event_before_the_copy, r"read \[nan", "the host tensor is NaN until its copy is waited for"),
    Planted(missing_event_wait, r"reads host memory that stream \d has yet to write", "hazard"),
    Planted(source_changed_under_its_copy, r"was changed while its copy to the device was under way", "hazard"),
    Planted(kernels_of_two_streams, r"aten::mul.* does not wait for aten::fill_", "race"),
    Planted(memory_that_another_stream_uses, r"was freed while aten::sum.* may use it", "race"),
    Planted(uninitialised_memory, r"computed \[nan", "fresh memory is NaN"),
    Planted(
        cpu_tensor_handed_to_nccl, r"No backend type associated with device type cpu", "error of torch.distributed", 2
    ),
    Planted(
        gpu_tensor_handed_to_gloo, r"No backend type associated with device type cuda", "error of torch.distributed", 2
    ),
    Planted(two_ranks_on_one_gpu, r"Duplicate GPU detected", "error of NCCL", 2),
    Planted(result_read_before_it_is_there, r"read \[nan", "results are NaN until the work is waited for", 2),
    Planted(buffer_reused_before_it_is_sent, r"was changed while send was reading it", "hazard", 2),
    Planted(wrong_order_of_collectives, r"(?s)mismatch between collectives.*ALLREDUCE", "TORCH_DISTRIBUTED_DEBUG", 2),
    Planted(
        all_send_first, r"NCCL would hang: rank \d sends to rank \d, rank \d sends", "error in place of NCCL's hang", 2
    ),
    Planted(
        all_send_first_in_a_ring_of_three,
        r"NCCL would hang: rank \d sends to rank \d, rank \d sends to rank \d, rank \d sends",
        "error in place of NCCL's hang",
        3,
    ),
    Planted(
        single_messages_for_a_group,
        r"NCCL would hang: .*rank 1 sends to rank 0 and receives from rank 0 in a group",
        "error in place of NCCL's hang",
        2,
    ),
    Planted(
        first_exchange_without_all_ranks,
        r"rank 2 has not come to the first operation",
        "error in place of NCCL's hang",
        3,
    ),
    Planted(gradient_on_another_thread, r"the hook found \d+ of 20 gradients", "autograd has a thread for each GPU"),
]


def plant(number: int) -> None:
    """Make the bug, on every rank."""
    planted = PLANTED[number]
    if planted.ranks > 1:
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        dist.set_debug_level_from_env()
        from longctx.launch.store import meeting_point

        dist.init_process_group("nccl", timeout=timedelta(seconds=20), **meeting_point(os.environ))
    planted.plant()


@pytest.mark.parametrize("number", range(len(PLANTED)), ids=[planted.plant.__name__ for planted in PLANTED])
def test_a_planted_bug_is_caught(number, soft_gpus):
    planted = PLANTED[number]
    with pytest.raises(AssertionError) as caught:
        soft_gpus.run(planted.ranks, f"{__name__}:plant", number, backend=None, timeout=60)
    assert re.search(planted.error, str(caught.value)), caught.value


# Bugs in programs that tests start as processes of their own: tests/faulty_program.py


class InPrograms(NamedTuple):
    error: str
    """What the program says, a regular expression, with the place."""
    how: str


IN_PROGRAMS = {
    "read_on_the_host": InPrograms(
        r"soft GPU: the host waits: aten::_local_scalar_dense in __main__\.read_on_the_host",
        "the program ends with an error: hidden wait",
    ),
    "use_on_another_stream": InPrograms(
        r"soft GPU: .*aten::sum.* \(longctx\.attention\.\S+:\d+\) on stream \d+ (does not wait for aten::|may use it)",
        "the program ends with an error: race",
    ),
    "change_under_a_copy": InPrograms(
        r"soft GPU: a host tensor of shape \[4\] was changed while its copy to the device was under way.* \(seen in "
        r"longctx\.\S+:\d+\)",
        "the program ends with an error: hazard",
    ),
}
"""Bug -> how it is caught."""
TRAIN = ["--sp", "2", "--sp_backend", "ring", "--bf16", "True", "--max_steps", "4", "--model_name_or_path", "tiny"]
TRAIN += ["--dataset_name", "stdlib", "--max_length", "512", "--overlong", "truncate", "--save_strategy", "no"]
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]


def ending(folder, bugs, *launch):
    """(exit code, output) of a program with these bugs."""
    command = [sys.executable, "-m", *launch, "tests.faulty_program"]
    command += [*TRAIN, "--output_dir", str(folder)] if launch else []
    env = soft_environment() | {"BUGS": " ".join(bugs)}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    return done.returncode, done.stdout


@pytest.mark.long
def test_planted_bugs_are_caught_in_a_program(tmp_path, soft_gpus):
    """A loop on one GPU. Each of the bugs is reported, and the exit code is none of the program's own."""
    code, output = ending(tmp_path, IN_PROGRAMS)
    assert code == FAILED, output
    for bug, (error, _) in IN_PROGRAMS.items():
        assert re.search(error, output), f"{bug}: {output}"


@pytest.mark.long
@pytest.mark.parametrize("bug", [None, *IN_PROGRAMS])
def test_a_planted_bug_is_caught_in_training_that_torchrun_starts(bug, tmp_path, soft_gpus):
    code, output = ending(tmp_path, [] if bug is None else [bug], *TORCHRUN)
    assert (code == 0) == (bug is None), output
    found = re.findall("soft GPU:.*", output)
    assert not found if bug is None else re.search(IN_PROGRAMS[bug].error, output), output


def test_the_table_of_planted_bugs_is_this_one():
    rows = [line for line in TABLE.read_text().splitlines() if line.startswith("| ")][2:]
    wanted = [f"| {p.plant.__name__.replace('_', ' ')} | {p.ranks} | {p.how} |" for p in PLANTED]
    wanted += [f"| {bug.replace('_', ' ')}, in a program | 1 and 2 | {how} |" for bug, (_, how) in IN_PROGRAMS.items()]
    assert rows == wanted, "\n".join(wanted)

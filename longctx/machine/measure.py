"""Speeds of this machine, measured on all its devices at once, as a run uses them, in well under a minute.

    python -m longctx.machine.measure RESULT.json    # one process of a group, as `measure_speeds` starts them

GPUs compute in bf16, a CPU in fp32. Every value is that of the slowest process. Only one node is measured, so links to
other nodes are assumed to be as fast as those within it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from longctx.attention.kernels.choose import choose_kernel
from longctx.attention.kernels.entries import Entries, Inputs
from longctx.launch.network import choose_interface
from longctx.launch.spawn import device_count, spawn
from longctx.launch.store import meeting_point
from longctx.machine.here import Machine
from longctx.machine.speeds import ADAMW_TRAFFIC_BYTES, FLOPS_BACKWARD, FLOPS_FORWARD, Link, Speeds
from longctx.ranks.agreement import gather_objects

REPETITIONS = 5
"""Measurements of each value, whose median counts, after one more to warm up."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The sizes of what is timed, large enough to keep a GPU busy and small enough to be done soon."""

    dtype: torch.dtype = torch.bfloat16
    tokens: int = 8192
    hidden_size: int = 4096
    intermediate_size: int = 14336
    row: int = 32768
    """Tokens of the document that attention is timed on."""
    num_heads: int = 32
    num_key_value_heads: int = 8
    head_size: int = 128
    num_elements: int = 1 << 27
    """Elements of the fp32 tensors that are copied and updated, more than caches hold."""


_ON_GPU = Work()
_ON_CPU = Work(
    dtype=torch.float32,
    tokens=1024,
    hidden_size=512,
    intermediate_size=1536,
    row=2048,
    num_heads=4,
    num_key_value_heads=2,
    head_size=64,
    num_elements=1 << 24,
)


def measure_speeds(num_devices: int) -> Speeds:
    """Measure the speeds of this machine, with as many processes as a run on these devices has.

    The devices are GPUs, or the CPU if there is no GPU.

    Raises:
        ValueError: for less than one device, or more than there are GPUs.
        RuntimeError: if a process fails; its messages are on stderr.
    """
    gpus = device_count()
    if num_devices < 1:
        raise ValueError(f"Speeds of {num_devices} devices cannot be measured. Ask for 1 or more.")
    if gpus and num_devices > gpus:
        raise ValueError(
            f"Speeds of {num_devices} devices cannot be measured where there are {gpus} GPUs. "
            f"Use --gpus_per_node {gpus}, and --gpus {gpus} for this machine alone."
        )
    with tempfile.TemporaryDirectory(prefix="longctx-measure-") as folder:
        result = Path(folder, "speeds.json")
        code = spawn(num_devices, [str(result)], module=__name__)
        if code:
            raise RuntimeError(f"A process that measured this machine ended with code {code}.")
        values = json.loads(result.read_text())
        return Speeds(**values | {name: Link(*values[name]) for name in ("within", "across")})


def measure_together(clock: Callable[[], float] = time.perf_counter, work: Work | None = None) -> Speeds:
    """Measure speeds with all processes of a group, one a device, which call this together.

    Args:
        clock: returns seconds; links have their own clock. On a CPU with one thread, `time.process_time` leaves out the
            work of other processes.
        work: what is timed; by default enough to keep a GPU, or a CPU, busy.
    """
    rank = dist.get_rank()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    work = work or (_ON_GPU if on_gpu else _ON_CPU)
    if on_gpu:
        torch.cuda.set_device(device)
    known = Speeds.named(torch.cuda.get_device_name(device) if on_gpu else "CPU")
    seconds = partial(_seconds, device=device, clock=clock)
    forward, backward = _attention_flops(work, device, seconds)
    within = measure_link(None, device) if dist.get_world_size() > 1 else known.within
    return replace(
        known,
        matmul=_matmul_flops(work, device, seconds),
        attention_forward=forward,
        attention_backward=backward,
        memory=_memory_speed(work, device, seconds),
        within=within,
        across=within,
        host_link=_host_link(work, device, seconds),
        host_memory=_host_memory(work, seconds) * dist.get_world_size(),
        launch_seconds=_launch_seconds(device, seconds),
    )


Seconds = Callable[[Callable[[], object]], float]


def _matmul_flops(work: Work, device: torch.device, seconds: Seconds) -> float:
    """Return the FLOPs per second of a layer's widest matrix, forward and backward together."""
    layer = nn.Linear(work.hidden_size, work.intermediate_size, bias=False, device=device, dtype=work.dtype)
    x = torch.randn(work.tokens, work.hidden_size, device=device, dtype=work.dtype, requires_grad=True)
    flops = 3 * 2 * work.tokens * work.hidden_size * work.intermediate_size
    return flops / seconds(lambda: layer(x).sum().backward())


def _attention_flops(work: Work, device: torch.device, seconds: Seconds) -> tuple[float, float]:
    """Return the FLOPs per second of the kernel that a run takes, forward and backward."""
    shapes = [(1, heads, work.row, work.head_size) for heads in (work.num_heads, *[work.num_key_value_heads] * 2)]
    q, k, v = (torch.randn(shape, device=device, dtype=work.dtype) for shape in shapes)
    kernel = choose_kernel(Inputs(device, work.dtype, work.head_size, work.num_heads // work.num_key_value_heads))
    scale = work.head_size**-0.5
    for _ in range(2):  # batches: a kernel with plans for each shape takes a shape from its second batch on
        entries = Entries.of_documents(np.array([0, work.row]))
        out, lse = kernel.forward(q, k, v, entries, scale)
    elements = work.row * (work.row + 1) / 2 * work.num_heads * work.head_size
    forward = seconds(lambda: kernel.forward(q, k, v, entries, scale))
    backward = seconds(lambda: kernel.backward(out, q, k, v, out, lse, entries, scale))
    return FLOPS_FORWARD * elements / forward, FLOPS_BACKWARD * elements / backward


def _memory_speed(work: Work, device: torch.device, seconds: Seconds) -> float:
    x = torch.ones(work.num_elements, device=device)
    y = torch.empty_like(x)
    return 2 * x.nbytes / seconds(lambda: torch.add(x, 1, out=y))


def _host_link(work: Work, device: torch.device, seconds: Seconds) -> float:
    """Return the bytes per second of copies to a device and back; on a CPU, of copies within its memory."""
    host = torch.empty(work.num_elements, pin_memory=device.type == "cuda")
    there = torch.empty_like(host, device=device)

    def copy() -> None:
        there.copy_(host, non_blocking=True)
        host.copy_(there, non_blocking=True)

    return 2 * host.nbytes / seconds(copy)


def _host_memory(work: Work, seconds: Seconds) -> float:
    """Return the bytes per second of one process, while all update parameters as an optimizer on the host does."""
    parameter = nn.Parameter(torch.zeros(work.num_elements))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return ADAMW_TRAFFIC_BYTES * work.num_elements / seconds(optimizer.step)


def _launch_seconds(device: torch.device, seconds: Seconds) -> float:
    x, times = torch.zeros(1, device=device), 200

    def launch() -> None:
        for _ in range(times):
            x.add_(1)

    return seconds(launch) / times


def _seconds(
    work: Callable[[], object],
    *,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
    repetitions: int = REPETITIONS,
) -> float:
    """Return the median seconds of the slowest process; all processes start together."""
    times = []
    for _ in range(repetitions + 1):
        dist.barrier()
        started = clock()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(clock() - started)
    return max(gather_objects(statistics.median(times[1:])))


def with_measured_links(machine: Machine, device: torch.device) -> Machine:
    """Return the machine with link speeds measured among the running processes. All ranks call this together."""
    world_size, node = dist.get_world_size(), machine.per_node
    across = machine.speeds.across
    if world_size > node:
        across = measure_link(None, device)
        leaving = (world_size - node) / (world_size - 1)  # the part of the bytes that leaves a node
        across = across._replace(exchange=across.exchange * leaving)
    within = machine.speeds.within
    if node == world_size > 1:
        within = measure_link(None, device)
    elif node > 1:
        within = measure_link(dist.new_subgroups(node)[0], device)
    return replace(machine, speeds=replace(machine.speeds, within=within, across=across))


def measure_link(
    group: dist.ProcessGroup | None, device: torch.device, *, num_bytes: int = 8 << 20, repetitions: int = REPETITIONS
) -> Link:
    """Measure an all-to-all and a hop around the ring in a running group. All ranks of the world call this together.

    Args:
        group: this rank's group, of at least two ranks; None means all ranks.
        device: device of the buffers, as the group's backend needs.
        num_bytes: bytes that every rank sends.
        repetitions: measurements whose median counts, after one more to warm up.

    Returns:
        The slowest rank's speeds, the same on every rank of the world.
    """
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    assert world_size > 1, "one rank has no link to measure"
    sent = torch.zeros(num_bytes // world_size * world_size, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    ranks = dist.get_process_group_ranks(group)

    def exchange() -> None:
        dist.all_to_all_single(received, sent, group=group)

    def pass_on() -> None:
        to, source = ranks[(rank + 1) % world_size], ranks[rank - 1]
        operations = [dist.P2POp(dist.isend, sent, to, group), dist.P2POp(dist.irecv, received, source, group)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    away = len(sent) * (world_size - 1) / world_size
    return Link(
        exchange=away / _seconds(exchange, device=device, repetitions=repetitions),
        pass_on=len(sent) / _seconds(pass_on, device=device, repetitions=repetitions),
    )


def _main(result: str) -> None:
    choose_interface(os.environ)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", **meeting_point(os.environ))
    try:
        speeds = measure_together()
        if dist.get_rank() == 0:
            Path(result).write_text(json.dumps(asdict(speeds)))
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    _main(sys.argv[1])

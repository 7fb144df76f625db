"""Errors and seconds of each way, on gloo ranks and on ranks of one device in turn."""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from longctx.attention.operator import varlen_attention
from longctx.launch.store import meeting_point

from .. import page
from ..ranks import results_of
from .ways import CASES, TOLERANCE, WAYS, ZIGZAG, Attend, Heads, Part
from .zigzag import Ints


def forward_backward(
    attend: Attend, tensors: Sequence[Tensor], clock: Callable[[], float]
) -> tuple[list[Tensor], tuple[float, float]]:
    """([out, dq, dk, dv], seconds of forward and of backward) for q, k, v and the output's gradient."""
    *inputs, grad_out = tensors
    leaves = [x.detach().requires_grad_() for x in inputs]
    start = clock()
    out = attend(*leaves)
    middle = clock()
    grads = torch.autograd.grad(out, leaves, grad_out)
    return [out.detach(), *grads], (middle - start, clock() - middle)


def measure(
    parts: dict[str, Part | None], tensors: Sequence[Tensor], repeats: int
) -> tuple[NDArray, NDArray, list[float]]:
    """Seconds of the slowest rank and CPU seconds of all, [repeats, ways] each, and each way's error; on every rank.

    Raises:
        RuntimeError: if a way's result is not that of the first one, which has the whole pack on rank 0.
    """
    local = {name: part.of(tensors) for name, part in parts.items() if part is not None}
    whole = [torch.empty_like(tensors[i]) for i in (3, 0, 1, 2)]
    errors: list[float] = []
    for name, part in parts.items():
        results, _, _ = run(part, local.get(name))
        if not errors:
            for reference, result in zip(whole, results or whole, strict=True):
                dist.broadcast(reference.copy_(result), 0)
        errors.append(relative_error(part, results, whole))
        if not errors[-1] <= TOLERANCE[tensors[0].dtype]:
            raise RuntimeError(f"{name} is wrong: relative error {errors[-1]:.1e} of {TOLERANCE[tensors[0].dtype]:.0e}")
    seconds, cpu_seconds = torch.zeros(2, repeats, len(parts), dtype=torch.float64)
    names = list(parts)
    for repeat in range(repeats):
        for i in np.roll(range(len(names)), repeat):
            dist.barrier()
            _, seconds[repeat, i], cpu_seconds[repeat, i] = run(parts[names[i]], local.get(names[i]))
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    dist.all_reduce(cpu_seconds)
    return seconds.numpy(), cpu_seconds.numpy(), errors


def run(part: Part | None, tensors: Sequence[Tensor] | None) -> tuple[list[Tensor] | None, float, float]:
    """Results, seconds and CPU seconds of a forward and backward with the part's threads; None, 0, 0 without one."""
    if part is None or tensors is None:
        return None, 0.0, 0.0
    torch.set_num_threads(part.num_threads)
    try:
        cpu_start = time.process_time()
        results, seconds = forward_backward(part.attend, tensors, time.perf_counter)
        return results, sum(seconds), time.process_time() - cpu_start
    finally:
        torch.set_num_threads(1)


def relative_error(part: Part | None, results: Sequence[Tensor] | None, whole: Sequence[Tensor]) -> float:
    """Largest error over the results, each relative to the norm of the whole pack's (to 1 if that is less)."""
    squares = torch.zeros(len(whole), dtype=torch.float64)
    if part is not None and results is not None:
        real = (part.rows < whole[0].shape[2]).nonzero().flatten()
        for i, (result, reference) in enumerate(zip(results, whole, strict=True)):
            expected = reference.index_select(2, part.rows[real])
            squares[i] = (result.index_select(2, real).double() - expected.double()).square().sum()
    dist.all_reduce(squares)
    norms = torch.stack([x.double().norm().clamp(min=1.0) for x in whole])  # dq of one-token documents is 0
    return float((squares.sqrt() / norms).max())


def heads_of(options: argparse.Namespace) -> Heads:
    return Heads(query=options.heads[0], key_value=options.heads[1], dim=options.head_dim)


def spread(values: NDArray) -> str:
    """Median (lowest–highest)."""
    return f"{np.median(values):.2f} ({values.min():.2f}–{values.max():.2f})"


RANK_HEADER = ["documents", "in a pack", "dtype", "way", "seconds", "tokens/s", "speed", "over zigzag", "CPU", "error"]


def rank_rows(case: str, packs: list[Ints], dtype: torch.dtype, options: argparse.Namespace) -> Iterator[list[str]]:
    """Return the table rows of one case, which all ranks measure together."""
    group = dist.group.WORLD
    assert group is not None, "no process group"
    tensors = heads_of(options).tensors(int(packs[0].sum()), dtype, torch.device("cpu"))
    measured = []
    for lengths in packs:
        cu_seqlens = np.append(0, np.cumsum(lengths))
        parts = {name: WAYS[name](cu_seqlens, group) for name in WAYS}
        measured.append(measure(parts, tensors, options.repeats))
    seconds, cpu_seconds = (np.concatenate(values) for values in zip(*(m[:2] for m in measured), strict=True))
    errors = np.max([pack_errors for *_, pack_errors in measured], axis=0)
    zigzag = seconds[:, list(WAYS).index(ZIGZAG)]
    documents = f"{np.mean([len(lengths) for lengths in packs]):.0f}"
    for i, name in enumerate(WAYS):
        yield [
            case,
            documents,
            str(dtype).removeprefix("torch."),
            name,
            f"{np.median(seconds[:, i]):.3f}",
            f"{packs[0].sum() / np.median(seconds[:, i]):,.0f}",
            spread(seconds[:, 0] / seconds[:, i]),
            spread(zigzag / seconds[:, i]),
            spread(cpu_seconds[:, i] / cpu_seconds[:, 0]),
            f"{errors[i]:.1e}",
        ]


def measured_rows(options: argparse.Namespace, case: str, num_tokens: int) -> list[list[str]]:
    """Measure one case as one of the ranks; return its table rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=30), **meeting_point(os.environ))
    packs = CASES[case](num_tokens, options.packs)
    rows = [row for dtype in options.dtype for row in rank_rows(case, packs, getattr(torch, dtype), options)]
    dist.destroy_process_group()
    return rows


def measure_ranks(options: argparse.Namespace, report: page.Report) -> None:
    """Measure all cases on ranks of this machine, and report the rows of rank 0."""
    for num_tokens in options.tokens:
        report.add("", f"{num_tokens:,} tokens, {options.ranks} ranks", "")
        report.add(page.head(RANK_HEADER))
        for case in options.cases:
            report.add(*map(page.row, results_of(options.ranks, measured_rows, options, case, num_tokens)[0]))


# --- timing virtual ranks -----------------------------------------------------------------------------------------

VIRTUAL_WAYS = ("ring", ZIGZAG)
VIRTUAL_HEADER = ["documents", "tokens", "dtype", "one call s", "P", "way", "slowest x P"]
VIRTUAL_HEADER += ["its forward", "its backward", "mean x P"]


def virtual_seconds(way: str, cu_seqlens: Ints, world_size: int, tensors: Sequence[Tensor]) -> NDArray:
    """Seconds [P, 2] of each rank's forward and backward, one rank after another.

    Messages are not sent, so a rank works on whatever its receive buffers hold; that takes the same time.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    seconds = []
    for rank in range(world_size):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        try:
            assert dist.group.WORLD is not None, "no process group"
            part = WAYS[way](cu_seqlens, dist.group.WORLD)
            assert part is not None, f"{way} has no part for rank {rank}"
            seconds.append(forward_backward(part.attend, part.of(tensors), clock_of(tensors[0]))[1])
        finally:
            dist.destroy_process_group()
    return np.array(seconds)


def clock_of(x: Tensor) -> Callable[[], float]:
    """Seconds: of the device when all its work is done; on the CPU, where one thread works, that thread's own."""

    def synchronized() -> float:
        torch.cuda.synchronize(x.device)
        return time.perf_counter()

    return synchronized if x.is_cuda else time.process_time


def virtual_rows(case: str, packs: list[Ints], dtype: torch.dtype, options: argparse.Namespace) -> Iterator[list[str]]:
    """Table rows of one case: each number of ranks, each way."""
    num_tokens = int(packs[0].sum())
    tensors = heads_of(options).tensors(num_tokens, dtype, torch.device(options.device))
    ways = list(itertools.product(options.virtual_ranks, VIRTUAL_WAYS))
    whole, ranks = [], {way: list[NDArray]() for way in ways}
    for lengths in packs:
        cu_seqlens = np.append(0, np.cumsum(lengths))
        one_call = partial(varlen_attention, cu_seqlens=cu_seqlens)
        for repeat in range(options.repeats + 1):
            one = forward_backward(one_call, tensors, clock_of(tensors[0]))[1]
            each = [virtual_seconds(way, cu_seqlens, world_size, tensors) for world_size, way in ways]
            if repeat:  # the first warms up: bf16 kernels for the CPU are compiled for every new shape
                whole.append(one)
                for key, seconds in zip(ways, each, strict=True):
                    ranks[key].append(seconds)
    one_calls = np.array(whole)  # [n, 2]
    for world_size, way in ways:
        times_p = np.array(ranks[world_size, way]) * world_size  # [n, P, 2]
        total = times_p.sum(-1)
        slowest = np.take_along_axis(times_p, total.argmax(1)[:, None, None], axis=1)[:, 0]  # [n, 2]
        yield [
            case,
            f"{num_tokens:,}",
            str(dtype).removeprefix("torch."),
            f"{np.median(one_calls.sum(-1)):.3f}",
            str(world_size),
            way,
            spread(slowest.sum(-1) / one_calls.sum(-1)),
            *(spread(slowest[:, i] / one_calls[:, i]) for i in range(2)),
            spread(total.mean(1) / one_calls.sum(-1)),
        ]


def measure_virtual(options: argparse.Namespace, report: page.Report) -> None:
    report.add("", page.head(VIRTUAL_HEADER))
    torch.set_num_threads(1)
    for num_tokens in options.tokens:
        for case in options.cases:
            packs = CASES[case](num_tokens, options.packs)
            for dtype in options.dtype:
                for row in virtual_rows(case, packs, getattr(torch, dtype), options):
                    report.add(page.row(row))

"""Attention over several ranks against one process with as many threads: time of forward and backward.

    python -m benchmarks.attention                                 # two gloo ranks, 32k tokens, fp32 and bf16
    python -m benchmarks.attention --tokens 2048 --repeats 2       # quicker
    python -m benchmarks.attention --virtual_ranks 2 4 8 --tokens 16384 32768
    python -m benchmarks.attention --virtual_ranks 2 4 8 --tokens 65536 524288 --device cuda --dtype bfloat16

*Ranks.* Every rank has one thread; "one process" has as many threads as there are ranks, and the whole pack; all have
huge pages, as in training. All ways take turns within each repetition, from a barrier to the slowest rank's end.
"speed" is the time of one process over a way's own, "over zigzag" the time of the per-document zigzag over it, "CPU"
the processor time of all ranks, which waiting does not count in, over that of one process; each in the same
repetition: median (lowest to highest). Before the timing, each way's output and gradients are compared with one
process: "error" is the largest of the four, relative in norm.

*Per-document zigzag* is the ring as published: every document, padded to a multiple of 2P, is cut into 2P pieces, of
which rank r has the r-th and the r-th from the end, and all keys and values visit every rank.

*Virtual ranks.* One device works off the ranks one after another, each calling `ring_attention` (or the zigzag) in a
process group that sends nothing: what is left is a rank's blocks, copies and merges, without communication. "slowest
x P", with its forward and backward, and "mean x P" are over one `varlen_attention` of the whole pack in the same
repetition. On the CPU one thread works and its own seconds are counted.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

import longctx
from longctx.attention.kernels import Entries, block_backward, block_forward
from longctx.attention.operator import varlen_attention
from longctx.launch.store import meeting_point
from longctx.packing import pack
from longctx.ring import plan_ring, ring_attention
from longctx.training.engines import prefer_huge_pages
from longctx.ulysses import ulysses_attention

from .packing import device, histogram, line
from .plan import arrange_document_zigzag
from .ranks import results_of

Ints = NDArray[np.int64]
Attend = Callable[..., Tensor]

SHORT = 1024  # longest document of the case "short documents"
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Relative in norm; sums of up to a pack's terms in another order, and bf16's 8 bits once for each block."""


# --- what is computed ---------------------------------------------------------------------------------------------


def draw_packs(num_tokens: int, longest: int, num_packs: int) -> list[Ints]:
    """Document lengths of packs drawn from data/document_lengths.csv, none above `longest`; each sums to num_tokens."""
    rng = np.random.default_rng(0)
    lengths = histogram(rng, 1000 + 50 * num_packs * num_tokens // min(longest, num_tokens), num_tokens)
    lengths = lengths[lengths <= longest]
    packs = [lengths[np.asarray(documents)] for documents in pack(lengths, num_tokens).bins]
    full = [np.append(p, num_tokens - p.sum()) if p.sum() < num_tokens else p for p in packs[:-1] or packs]
    return [full[i] for i in rng.permutation(len(full))[:num_packs]]


CASES: dict[str, Callable[[int, int], list[Ints]]] = {
    "packed": lambda num_tokens, num_packs: draw_packs(num_tokens, num_tokens, num_packs),
    "short documents": lambda num_tokens, num_packs: draw_packs(num_tokens, min(SHORT, num_tokens), num_packs),
    "one document": lambda num_tokens, num_packs: [np.array([num_tokens])],
}


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Shape of the attention layer."""

    query: int
    key_value: int
    dim: int

    def tensors(self, num_tokens: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """q, k, v and the output's gradient of a whole pack, [1, H or K, T, D], the same on every rank.

        A token's heads lie together, as a model's projections leave them.
        """
        generator = torch.Generator(device).manual_seed(0)
        heads = (self.query, self.key_value, self.key_value, self.query)
        shapes = [(1, num_tokens, h, self.dim) for h in heads]
        return [torch.randn(s, generator=generator, device=device).to(dtype).transpose(1, 2) for s in shapes]


@dataclass(frozen=True)
class Part:
    """What one rank has of a pack and does with it."""

    rows: Tensor
    """int64 [S]: the pack's tokens that lie on this rank, in its order; T stands for padding."""
    attend: Attend
    """(q [1, H, S, D], k, v [1, K, S, D]) -> [1, H, S, D]."""
    num_threads: int = 1

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """[1, h, T, D] each -> [1, h, S, D], zero where padding is."""
        tokens = [F.pad(x, (0, 0, 0, 1)).transpose(1, 2) for x in tensors]
        return [x.index_select(1, self.rows.to(x.device)).transpose(1, 2) for x in tokens]


def one_process(cu_seqlens: Ints, group: dist.ProcessGroup) -> Part | None:
    if dist.get_rank(group):
        return None
    rows = torch.arange(int(cu_seqlens[-1]))
    return Part(rows, partial(varlen_attention, cu_seqlens=cu_seqlens), dist.get_world_size(group))


def ring(cu_seqlens: Ints, group: dist.ProcessGroup, transport: str = "p2p") -> Part:
    plan = plan_ring(cu_seqlens, dist.get_world_size(group))
    rows = _share(plan.permutation, group)
    return Part(rows, partial(ring_attention, plan=plan, group=group, transport=transport))


def gather(cu_seqlens: Ints, group: dist.ProcessGroup) -> Part:
    return ring(cu_seqlens, group, "gather")


def ulysses(cu_seqlens: Ints, group: dist.ProcessGroup) -> Part:
    rows = _share(np.arange(cu_seqlens[-1]), group)
    return Part(rows, partial(ulysses_attention, cu_seqlens=cu_seqlens, group=group))


def document_zigzag(cu_seqlens: Ints, group: dist.ProcessGroup) -> Part:
    arranged = arrange_document_zigzag(np.diff(cu_seqlens), dist.get_world_size(group))
    document = np.repeat(np.arange(len(arranged.lengths)), arranged.lengths)
    position = np.arange(len(document)) - (np.cumsum(arranged.lengths) - arranged.lengths)[document]
    original = np.where(position < np.diff(cu_seqlens)[document], cu_seqlens[document] + position, cu_seqlens[-1])
    blocks = ZigzagBlocks.of(arranged.lengths // dist.get_world_size(group), group)
    rows = _share(original[arranged.permutation], group)
    return Part(rows, lambda q, k, v: _ZigzagRing.apply(q, k, v, blocks))


def _share(rows: Ints, group: dist.ProcessGroup) -> Tensor:
    """This rank's equal slice."""
    return torch.from_numpy(rows.reshape(dist.get_world_size(group), -1)[dist.get_rank(group)])


ZIGZAG = "per-document zigzag"
WAYS: dict[str, Callable[[Ints, dist.ProcessGroup], Part | None]] = {
    "one process": one_process,
    "ring": ring,
    "gather": gather,
    "Ulysses": ulysses,
    ZIGZAG: document_zigzag,
}


# --- the per-document zigzag ring ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ZigzagBlocks:
    """The blocks of a rank in a ring whose documents all lie on all ranks: pieces r and 2P-1-r of each, in order."""

    group: dist.ProcessGroup
    own: Entries
    """Causal, over the rank's own tokens."""
    earlier: Entries
    """All queries over the first pieces of a rank before this one."""
    later: Entries
    """The second pieces' queries over all tokens of a rank after this one."""
    first_pieces: Tensor
    """int64 [S/2]: rows of the first pieces."""
    second_pieces: Tensor

    @classmethod
    def of(cls, lengths: Ints, group: dist.ProcessGroup) -> ZigzagBlocks:
        """From the even lengths of the documents' parts on one rank."""
        end = np.cumsum(lengths)
        whole = np.stack((end - lengths, end), axis=1)
        first, second = (np.stack((end - lengths + n, end - lengths // 2 + n), axis=1) for n in (0, lengths // 2))
        return cls(
            group,
            Entries(whole, whole, causal=True),
            Entries(whole, first, causal=False),
            Entries(second, whole, causal=False),
            *(torch.from_numpy(np.concatenate([np.arange(*r) for r in ranges])) for ranges in (first, second)),
        )

    def exchange(self, x: Tensor) -> tuple[Tensor, list[dist.Work]]:
        """Send `x` to the next rank; the buffer that the previous rank's will fill, and what to wait for."""
        rank, world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        received = torch.empty_like(x)
        operations = [
            dist.P2POp(dist.isend, x, group=self.group, group_peer=(rank + 1) % world_size),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=(rank - 1) % world_size),
        ]
        return received, dist.batch_isend_irecv(operations)

    def visits(self, kv: Tensor) -> Iterator[tuple[bool, Tensor]]:
        """(whether the owner is an earlier rank, its `kv`) at each hop, the next one on its way meanwhile."""
        rank, world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        coming, works = self.exchange(kv)
        for hop in range(1, world_size):
            for work in works:
                work.wait()
            kv = coming
            if hop + 1 < world_size:
                coming, works = self.exchange(kv)
            yield hop <= rank, kv


class _ZigzagRing(torch.autograd.Function):
    """In the manner of ring-flash-attention's zigzag varlen ring (github.com/zhuzilin/ring-flash-attention)."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, blocks: ZigzagBlocks) -> Tensor:
        scale, visits = q.shape[-1] ** -0.5, blocks.visits(torch.stack((k, v)))
        out, lse = block_forward(q, k, v, blocks.own, scale)
        out = out.to(lse.dtype)
        for earlier, (k_there, v_there) in visits:
            if earlier:
                out, lse = _merged(out, lse, *block_forward(q, k_there, v_there, blocks.earlier, scale))
            else:
                rows = blocks.second_pieces
                there = block_forward(q, k_there, v_there, blocks.later, scale)
                merged = _merged(out.index_select(2, rows), lse.index_select(2, rows), *there)
                out.index_copy_(2, rows, merged[0])
                lse.index_copy_(2, rows, merged[1])
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.blocks = blocks
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        blocks: ZigzagBlocks = ctx.blocks
        scale, visits = q.shape[-1] ** -0.5, blocks.visits(torch.stack((k, v)))
        dq, *dkv = block_backward(grad_out, q, k, v, out, lse, blocks.own, scale)
        dq, grad_kv = dq.to(lse.dtype), torch.stack(dkv).to(lse.dtype)
        travelling, works = blocks.exchange(grad_kv)
        for earlier, (k_there, v_there) in visits:
            entries = blocks.earlier if earlier else blocks.later
            dq_there, *dkv = block_backward(grad_out, q, k_there, v_there, out, lse, entries, scale)
            for work in works:
                work.wait()
            grad_kv = travelling
            if earlier:
                dq += dq_there
                grad_kv.index_add_(3, blocks.first_pieces, torch.stack(dkv).to(lse.dtype))
            else:
                dq.index_add_(2, blocks.second_pieces, dq_there.to(lse.dtype))
                grad_kv += torch.stack(dkv)
            travelling, works = blocks.exchange(grad_kv)
        for work in works:
            work.wait()
        return dq.to(q.dtype), *travelling.to(k.dtype), None


def _merged(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over two sets of keys from the softmax over each."""
    weight = torch.sigmoid(block_lse - lse)[..., None]
    return torch.lerp(out, block_out.to(out.dtype), weight), lse - F.logsigmoid(lse - block_lse)


# --- timing on ranks ----------------------------------------------------------------------------------------------


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


class Report:
    """Lines that are printed as they come, and kept in a file where one is given."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        if path is not None:
            path.write_text("")

    def add(self, *lines: str) -> None:
        print(*lines, sep="\n", flush=True)
        if self.path is not None:
            with self.path.open("a") as file:
                print(*lines, sep="\n", file=file)


def spread(values: NDArray) -> str:
    """Median (lowest–highest)."""
    return f"{np.median(values):.2f} ({values.min():.2f}–{values.max():.2f})"


RANK_HEADER = ["documents", "in a pack", "dtype", "way", "seconds", "tokens/s", "speed", "over zigzag", "CPU", "error"]


def rank_rows(case: str, packs: list[Ints], dtype: torch.dtype, options: argparse.Namespace) -> Iterator[list[str]]:
    """Table rows of one case, measured by all ranks together."""
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


def measure_ranks(options: argparse.Namespace, report: Report) -> None:
    """Measure all cases on ranks of this machine, and report the rows of rank 0."""
    for num_tokens in options.tokens:
        report.add("", f"{num_tokens:,} tokens, {options.ranks} ranks", "")
        report.add(line(RANK_HEADER), line(["---"] * len(RANK_HEADER)))
        for case in options.cases:
            report.add(*map(line, results_of(options.ranks, measured_rows, options, case, num_tokens)[0]))


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


def measure_virtual(options: argparse.Namespace, report: Report) -> None:
    report.add("", line(VIRTUAL_HEADER), line(["---"] * len(VIRTUAL_HEADER)))
    torch.set_num_threads(1)
    for num_tokens in options.tokens:
        for case in options.cases:
            packs = CASES[case](num_tokens, options.packs)
            for dtype in options.dtype:
                for row in virtual_rows(case, packs, getattr(torch, dtype), options):
                    report.add(line(row))


# --- the command --------------------------------------------------------------------------------------------------


def heads_of(options: argparse.Namespace) -> Heads:
    return Heads(query=options.heads[0], key_value=options.heads[1], dim=options.head_dim)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768], help="tokens in a pack")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--packs", type=int, default=3, help="packs of each case")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions for each pack")
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--heads", type=int, nargs=2, default=[8, 2], help="query and key/value heads")
    parser.add_argument("--head_dim", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=2, help="gloo processes, one thread each")
    parser.add_argument("--virtual_ranks", type=int, nargs="+", metavar="P", help="time P ranks on one device instead")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the virtual ranks")
    parser.add_argument("--output", type=Path, help="also write the report here")
    options = parser.parse_args(arguments)
    if error := misfit(options):
        parser.error(error)
    return options


def misfit(options: argparse.Namespace) -> str | None:
    """Why these options cannot run, and what would."""
    query, key_value = options.heads
    sizes = options.virtual_ranks or [options.ranks]
    if min(options.packs, options.repeats, key_value, *sizes) < 1 or query % key_value:
        return f"--packs, --repeats, ranks and heads start at 1, query heads divide by key/value heads; got {options}"
    if uneven := [(n, p) for n in options.tokens for p in sizes if n < p or n % p]:
        return f"--tokens {uneven[0][0]} cannot be divided over {uneven[0][1]} ranks; use a multiple of the ranks"
    if not options.virtual_ranks and (options.ranks < 2 or query % options.ranks):
        return f"--ranks {options.ranks} must be at least 2 and divide the {query} query heads, which Ulysses spreads"
    if options.device == "cuda" and not (options.virtual_ranks and torch.cuda.is_available()):
        return "--device cuda is for --virtual_ranks on a machine with a CUDA device"
    return None


def main(arguments: list[str] | None = None) -> None:
    prefer_huge_pages()
    options = parse(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    report = Report(options.output)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy"))
    versions += f", longctx {longctx.__version__}"
    where = torch.cuda.get_device_name() if options.device == "cuda" else device()
    report.add("`" + " ".join(["python -m benchmarks.attention", *given]) + f"`, {date.today()}  ")
    report.add(f"{where}; Python {platform.python_version()}, {versions}  ")
    report.add(
        f"{options.heads[0]} query heads, {options.heads[1]} key/value heads, head size {options.head_dim}; "
        f"{options.packs} packs, {options.repeats} repetitions each"
    )
    (measure_virtual if options.virtual_ranks else measure_ranks)(options, report)


if __name__ == "__main__":
    main()

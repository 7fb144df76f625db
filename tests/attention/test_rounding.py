"""Sums of bf16 runs are kept in fp32, over hops, stages, blocks, tiles and tokens: rounded once, not once a term.

Where the terms of a sum are exact, the result is the bf16 number nearest to their sum in fp64, but for a few sums that
lie at the middle of two. So kernels, which round a block's results to bf16, give them in fp32 here (`WideKernel`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import longctx
from longctx.attention.kernels import DenseKernel, choose
from longctx.attention.kernels.entries import Entries
from longctx.attention.operator import LocalSchedule, attend
from longctx.layers.chunked.attention import HostAttention
from longctx.layers.chunked.copies import Copies
from longctx.layers.chunked.tiles import ParameterGradients
from longctx.layers.loss import TokenOutputs, fused_token_outputs, token_losses
from longctx.model.tiny import tiny_model
from longctx.ring import plan_ring, ring_attention
from longctx.ring.attention import ring_schedule
from longctx.sequence.batch import PLAIN, AttentionKind
from longctx.sequence.shard import cut
from longctx.training.metrics import StepMetrics
from longctx.ulysses.head_chunks import HeadChunks, _Heads
from longctx.ulysses.stages import head_stages
from tests.attention.test_attention import make_inputs, out_and_gradients
from tests.reference import layout_of
from tests.workers import run_ranks

BF16 = torch.bfloat16
FEW = 0.01
"""Part of the numbers that may lie so near the middle of two bf16 numbers that fp32 rounds them the other way: an
error of 1e-6 and a spacing of 4e-3 make it 1e-3. A second rounding changes a fifth of them and more."""


def rounded_otherwise(actual, exact):
    """The part of the numbers that is not the bf16 number nearest to the exact one."""
    return float((actual != exact.to(actual.dtype)).double().mean())


class WideKernel(DenseKernel):
    """Attention of a block in fp32, of bf16 inputs too, and not rounded."""

    name = "wide"

    def forward(self, q, k, v, entries, scale):
        return super().forward(q.float(), k.float(), v.float(), entries, scale)

    def backward(self, grad_out, q, k, v, out, lse, entries, scale):
        return super().backward(*(x.float() for x in (grad_out, q, k, v, out)), lse, entries, scale)


@pytest.fixture
def exact_blocks(monkeypatch):
    monkeypatch.setattr(choose, "choose_kernel", lambda *_: WideKernel())


def run_and_differentiate(run, inputs, grad):
    """out, dq, dk, dv [heads, T, D] of `run`, given [heads, T, D]."""
    return [x[0] for x in out_and_gradients(run, *(x[None] for x in (*inputs, grad)))]


def check_rounded_once(actual, inputs, grad, lengths, window=None):
    """Against fp64 from the same numbers, also from the same rounded output, which the backward pass is given."""
    entries = Entries.of_documents(np.cumsum([0, *lengths]), window)
    q, k, v, grad, out = (x.double()[None] for x in (*inputs, grad, actual[0]))
    exact, lse = DenseKernel().forward(q, k, v, entries, q.shape[-1] ** -0.5)
    grads = DenseKernel().backward(grad, q, k, v, out, lse, entries, q.shape[-1] ** -0.5)
    found = [rounded_otherwise(a, e[0]) for a, e in zip(actual, (exact, *grads), strict=True)]
    assert max(found) <= FEW, found


class Arithmetic(TorchDispatchMode):
    """The operators that compute something in bf16, other than a kernel's: copies and casts round nothing again."""

    OPERATORS = ("add", "addmm", "div", "exp", "index_add", "mul", "sigmoid", "sub", "sum")

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == BF16 and func._opname.rstrip("_") in self.OPERATORS:
            self.found.add(func._opname)
        return out


def arithmetic_of(schedule, q, k, v, grad):
    """What a schedule computes in bf16, forward and backward, with a kernel that returns bf16."""
    with torch.no_grad(), Arithmetic() as arithmetic:
        out, lse = schedule.forward(q[None], k[None], v[None], 0.25)
        schedule.backward(grad[None], q[None], k[None], v[None], out.to(BF16), lse, 0.25)
    return arithmetic.found


LENGTHS = [300, 52, 40]
RINGS = {"p2p": {}, "gather": {"transport": "gather"}, "window": {"kind": AttentionKind(window=130)}}
RANKS = 4


def results_of_rings():
    """{ring: (out, dq, dk, dv) of this rank's tokens}, with their places in the row."""
    plan = plan_ring(np.cumsum([0, *LENGTHS]), RANKS)
    mine = torch.from_numpy(plan.permutation.reshape(RANKS, -1)[dist.get_rank()].copy())
    *inputs, grad = make_inputs(LENGTHS, (4, 1), BF16)
    local = [x[:, mine] for x in inputs]
    for options in RINGS.values():
        assert not arithmetic_of(ring_schedule(plan, dist.group.WORLD, **options), *local, grad[:, mine])
    choose.choose_kernel = lambda *_: WideKernel()
    return mine, {
        name: run_and_differentiate(
            partial(ring_attention, plan=plan, group=dist.group.WORLD, **options), local, grad[:, mine]
        )
        for name, options in RINGS.items()
    }


def test_sums_over_hops_are_kept_in_fp32():
    """Merges forward, gradients of queries, and those of keys and values on their way home."""
    ranks = run_ranks(RANKS, f"{__name__}:results_of_rings")
    *inputs, grad = make_inputs(LENGTHS, (4, 1), BF16)
    order = torch.cat([mine for mine, _ in ranks]).argsort()
    for name, options in RINGS.items():
        parts = zip(*(found[name] for _, found in ranks), strict=True)
        whole = [torch.cat(part, dim=1)[:, order] for part in parts]
        check_rounded_once(whole, inputs, grad, LENGTHS, options.get("kind", PLAIN).window)


def test_stages_and_blocks_compute_nothing_in_bf16():
    *inputs, grad = make_inputs(LENGTHS, (16, 1), BF16)
    cu_seqlens = np.cumsum([0, *LENGTHS])
    stages = HeadChunks(LocalSchedule(cu_seqlens), 1, split_queries=True)
    assert arithmetic_of(stages, *inputs, grad) <= {"index_add_"}  # of each key/value head once, to zeros
    with Arithmetic() as arithmetic:
        host_attention(*(x[None] for x in inputs), cu_seqlens, 16, grad[None], torch.zeros(16))
    assert not arithmetic.found


def test_gradients_of_copies_are_added_up_in_fp32():
    """Of one key/value head with 16 copies, which come one stage after the other."""
    heads = _Heads(ranks=1, copies=16, per_rank=16, sharing=1)
    parts = torch.randn(16, 1, 1, 64, 32, generator=torch.Generator().manual_seed(0)).to(BF16)
    total = heads.zeros(torch.zeros(1, 1, 64, 32, dtype=BF16))
    for stage, part in zip(head_stages(16, 1, 1, split_queries=False), parts, strict=True):
        heads.add_keys(total, stage, part)
    assert rounded_otherwise(total.to(BF16), parts.double().sum(0)) <= FEW


def test_the_dense_kernel_rounds_its_results_alone():
    entries = Entries.of_documents(np.cumsum([0, *LENGTHS]))
    *inputs, grad = (x[None] for x in make_inputs(LENGTHS, (8, 2), BF16))
    kernel, exact = DenseKernel(), [x.double() for x in inputs]
    out, lse = kernel.forward(*inputs, entries, 1.0)
    exact_out, exact_lse = kernel.forward(*exact, entries, 1.0)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)
    grads = kernel.backward(grad, *inputs, exact_out.float(), exact_lse.float(), entries, 1.0)
    exact_grads = kernel.backward(grad.double(), *exact, exact_out, exact_lse, entries, 1.0)
    for actual, wanted in zip((out, *grads), (exact_out, *exact_grads), strict=True):
        assert rounded_otherwise(actual, wanted) <= FEW


def host_attention(q, k, v, cu_seqlens, block, grad, sinks=None):
    """out, dq, dk, dv [1, heads, S, D], the log-sum-exp [S, H] and the sinks' gradient, of attention in blocks."""
    attention = HostAttention(cu_seqlens, block=block, scale=q.shape[-1] ** -0.5, copies=Copies(torch.device("cpu")))
    q_host = q.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    kv_host = torch.cat((k, v), dim=1).transpose(1, 2).contiguous()
    out, lse = attention.forward(q_host, kv_host, sinks)
    kept = out.clone()
    grad_sinks = attention.backward(grad.transpose(1, 2).contiguous(), q_host, kv_host, out, lse, sinks)
    results = [kept, q_host, *kv_host.chunk(2, dim=2)]
    return [x.transpose(1, 2) for x in results], lse[0], grad_sinks


@pytest.mark.usefixtures("exact_blocks")
def test_sums_over_blocks_in_host_memory_are_kept_in_fp32():
    """Merges, gradients of queries over blocks of keys, and of keys over blocks of queries."""
    *inputs, grad = make_inputs(LENGTHS, (4, 2), BF16)
    results, *_ = host_attention(*(x[None] for x in inputs), np.cumsum([0, *LENGTHS]), 16, grad[None])
    check_rounded_once([x[0] for x in results], inputs, grad, LENGTHS)


def test_gradients_of_parameters_are_added_up_in_fp32():
    """Of 200 chunks."""
    parts = torch.randn(200, 50, 20, generator=torch.Generator().manual_seed(0)).to(BF16)
    sums = ParameterGradients([torch.zeros(50, 20, dtype=BF16)])
    for part in parts:
        sums.add([part])
    assert rounded_otherwise(sums.result()[0], parts.double().sum(0)) <= FEW


def test_the_heads_gradients_are_added_up_in_fp32():
    """200 tiles of one token give what one tile of all gives, but for the order of sums in fp32."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 200, 24), (37, 24), (37,))
    leaves = [torch.randn(shape, generator=generator).to(BF16).requires_grad_() for shape in shapes]
    targets = torch.randint(0, 37, (1, 200), generator=generator)
    found = [
        torch.autograd.grad(fused_token_outputs(*leaves, targets, tile_bytes=size).losses.sum(), leaves)
        for size in (1, 1 << 20)
    ]
    for tiles, one in zip(*found, strict=True):
        assert rounded_otherwise(tiles, one) <= FEW


def test_losses_from_logits_are_fp32():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 50, 300, generator=generator).to(BF16)
    targets = torch.randint(0, 300, (1, 50), generator=generator)
    expected = torch.nn.functional.cross_entropy(logits[0].double(), targets[0], reduction="none")
    torch.testing.assert_close(token_losses(logits, targets)[0].double(), expected, rtol=1e-6, atol=1e-6)


def test_gradients_of_sinks_are_added_up_in_fp32():
    """At once and in blocks: the formula in fp64, from what is kept for the backward pass."""
    lengths = [300, 7, 205]
    cu_seqlens = np.cumsum([0, *lengths])
    *inputs, grad = (x[None] for x in make_inputs(lengths, (4, 2), BF16))
    sinks = torch.linspace(-1, 2, 4).requires_grad_()
    schedule = LocalSchedule(cu_seqlens)
    out = attend(schedule, *inputs, sinks=sinks)
    lse = torch.logaddexp(schedule.forward(*inputs, inputs[0].shape[-1] ** -0.5)[1], sinks.detach()[:, None])
    out.backward(grad)

    def exact(out, lse):
        delta = (grad.double() * out.double()).sum(-1)
        return -(torch.exp(sinks.detach().double()[:, None] - lse.double()) * delta).sum((0, 2))

    torch.testing.assert_close(sinks.grad.double(), exact(out.detach(), lse), rtol=1e-5, atol=1e-5)
    results, lse, grad_sinks = host_attention(*inputs, cu_seqlens, 64, grad, sinks.detach())
    torch.testing.assert_close(grad_sinks.double(), exact(results[0], lse.T[None]), rtol=1e-5, atol=1e-5)


def test_log_probs_of_long_documents_are_summed_in_fp64():
    """What two models differ by is far below a rounding of such a sum in fp32."""
    model, sequence = longctx.parallelize(tiny_model(), sp=1)
    length = 40_000
    batch = {"input_ids": torch.ones(1, length, dtype=torch.long)}
    batch |= {"labels": batch["input_ids"].clone(), "position_ids": torch.arange(length)[None]}
    losses = torch.rand(1, length, generator=torch.Generator().manual_seed(0)) + 3
    losses[:, -1] = 0  # which has no next token

    def outputs(**inputs):
        return TokenOutputs(losses, -losses, losses, losses > 0)

    [found] = sequence.document_log_probs(outputs, batch).tolist()
    assert abs(found / -float(losses.double().sum()) - 1) <= 1e-12
    assert model.config.vocab_size > 1


def test_tokens_of_a_step_are_counted_exactly():
    """Beyond 2**24, where fp32 counts in twos."""
    metrics = StepMetrics(sp=1, sp_rank=0, config=tiny_model().config, flops_per_token=1, device=torch.device("cpu"))
    tokens, nothing = torch.full((1, 8), -100), torch.zeros(1, 8)
    for num_tokens in (2**24, 1, 1, 1):
        layout = replace(layout_of([0, 8]), lengths=[num_tokens])
        shard = cut({"input_ids": tokens, "labels": tokens}, layout, 0)
        metrics.add(shard=shard, correct=nothing, entropy=nothing)
    assert metrics.tokens_so_far() == 2**24 + 3

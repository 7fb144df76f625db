"""Sums of bf16 runs are kept in fp32, over hops, stages, blocks, tiles and tokens: rounded once, not once a term.

Two yardsticks. Where parts are exact and only their sum is rounded, the result is the bf16 number nearest to the sum in
fp64, but for a few sums that lie at the middle of two. Where a kernel rounds its parts by itself, the error is that of
one call of the kernel; sums in bf16 come to 2 to 10 times that at the numbers of terms below.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
import torch.distributed as dist

import longctx
from longctx.attention.kernels import DenseKernel
from longctx.attention.kernels.check import make_entries, make_inputs
from longctx.attention.operator import LocalSchedule, attend, varlen_attention
from longctx.chunked import HostAttention
from longctx.chunked.tiles import ParameterGradients
from longctx.loss import TokenOutputs, fused_token_outputs, token_losses
from longctx.ring import plan_ring, ring_attention
from longctx.tiny import tiny_model
from longctx.ulysses.head_chunks import HeadChunks, _Heads
from tests.test_attention import dense_attention, padded, relative_error
from tests.test_attention import make_inputs as random_inputs
from tests.test_models import make_model
from tests.workers import run_ranks

BF16 = torch.bfloat16
FEW = 0.01
"""Part of the numbers that may lie so near the middle of two bf16 numbers that fp32 rounds them the other way: an
error of 1e-6 and a spacing of 4e-3 make it 1e-3. A second rounding changes a fifth of them and more."""


def rounded_otherwise(actual, exact):
    """The part of the numbers that is not the bf16 number nearest to the exact one."""
    return float((actual != exact.to(actual.dtype)).double().mean())


def errors_of(run, inputs, grad, expected, expected_grads):
    """Relative errors of out, dq, dk, dv of `run` in bf16."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = run(*leaves)
    out.backward(grad)
    actual = [out.detach(), *(x.grad for x in leaves)]
    return [relative_error(a[0], e) for a, e in zip(actual, [expected, *expected_grads], strict=True)]


def in_fp64(inputs, grad, lengths, window=None):
    """out, and dq, dk, dv, of the same bf16 numbers [H, T, D]."""
    wide = [x.double().requires_grad_() for x in inputs]
    out = dense_attention(*wide, lengths, window)
    out.backward(grad.double())
    return out.detach(), [x.grad for x in wide]


RINGS = {"p2p": {}, "gather": {"transport": "gather"}, "window": {"window": 300}}
RANKS, RING_LENGTHS, RING_HEADS = 6, [1000, 160, 40], (4, 1)


def results_of_rings():
    """{ring: (out, dq, dk, dv) of this rank's tokens}, with their places in the row."""
    plan = plan_ring(np.cumsum([0, *RING_LENGTHS]), RANKS)
    mine = torch.from_numpy(plan.permutation.reshape(RANKS, -1)[dist.get_rank()].copy())
    *inputs, grad = random_inputs(RING_LENGTHS, RING_HEADS, BF16)
    found = {}
    for name, options in RINGS.items():
        local = [x[:, mine][None].clone().requires_grad_() for x in inputs]
        out = ring_attention(*local, plan, dist.group.WORLD, **options)
        out.backward(grad[:, mine][None])
        found[name] = [out.detach()[0], *(x.grad[0] for x in local)]
    return mine, found


def test_sums_over_hops_are_kept_in_fp32():
    """Five hops: merges forward, gradients of queries, and those of keys and values on their way home."""
    ranks = run_ranks(RANKS, f"{__name__}:results_of_rings")
    *inputs, grad = random_inputs(RING_LENGTHS, RING_HEADS, BF16)
    cu_seqlens = np.cumsum([0, *RING_LENGTHS])
    order = torch.cat([mine for mine, _ in ranks]).argsort()
    for name, options in RINGS.items():
        window = options.get("window")
        expected, expected_grads = in_fp64(inputs, grad, RING_LENGTHS, window)
        alone = partial(varlen_attention, cu_seqlens=cu_seqlens, window=window)
        one = errors_of(alone, [x[None] for x in inputs], grad[None], expected, expected_grads)
        parts = zip(*(found[name] for _, found in ranks), strict=True)
        whole = [torch.cat(part, dim=1)[:, order] for part in parts]
        ring = [relative_error(a, e) for a, e in zip(whole, [expected, *expected_grads], strict=True)]
        print(name, [r / o for r, o in zip(ring, one, strict=True)])
        assert all(r <= 1.5 * o for r, o in zip(ring, one, strict=True)), (name, ring, one)


def test_sums_over_stages_are_kept_in_fp32():
    """Sixteen query heads that share a key/value head, one at a time: their gradients of keys and values add up."""
    lengths = [700, 90, 234]
    *inputs, grad = random_inputs(lengths, (16, 1), BF16)
    expected, expected_grads = in_fp64(inputs, grad, lengths)
    cu_seqlens = np.cumsum([0, *lengths])
    whole = LocalSchedule(cu_seqlens)
    stages = HeadChunks(whole, 1, split_queries=True)
    given = [x[None] for x in inputs], grad[None], expected, expected_grads
    one, many = (errors_of(partial(attend, schedule), *given) for schedule in (whole, stages))
    print(one, many)
    assert all(m <= 1.25 * o for m, o in zip(many, one, strict=True)), (one, many)


def test_gradients_of_copies_are_added_up_in_fp32():
    """Of one key/value head that 16 ranks attend a copy of."""
    heads = _Heads(ranks=16, copies=16, per_rank=1, sharing=1)
    [stage] = heads.stages(1, False)
    k = torch.zeros(1, 1, 64, 32, dtype=BF16)
    parts = torch.randn(16, 1, 64, 32, generator=torch.Generator().manual_seed(0)).to(BF16)
    total = heads.zeros(k)
    heads.add_keys(total, stage, parts)
    assert rounded_otherwise(total[0].to(BF16), parts.double().sum(0)) <= FEW


def test_the_dense_kernel_rounds_its_results_alone():
    sizes = [(130, 130), (1, 1), (70, 70)]
    entries = make_entries(sizes, True)
    *inputs, grad = make_inputs(sizes, (8, 2), 16, BF16)
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
    attention = HostAttention(
        cu_seqlens,
        num_heads=q.shape[1],
        num_key_value_heads=k.shape[1],
        block=block,
        window=None,
        scale=q.shape[-1] ** -0.5,
        device=q.device,
    )
    q_host = q[0].transpose(0, 1).clone(memory_format=torch.contiguous_format)
    kv_host = torch.cat((k, v), dim=1)[0].transpose(0, 1).contiguous()
    out, lse = attention.forward(q_host, kv_host, sinks)
    kept = out.clone()
    grad_sinks = attention.backward(grad[0].transpose(0, 1).contiguous(), q_host, kv_host, out, lse, sinks)
    results = [kept, q_host, *kv_host.split(k.shape[1], dim=1)]
    return [x.transpose(0, 1)[None] for x in results], lse, grad_sinks


def test_host_attention_is_as_near_as_attention_at_once():
    """64 blocks of 16 tokens: merges, gradients of queries over blocks of keys, and of keys over blocks of queries."""
    lengths = [900, 3, 121]
    cu_seqlens = np.cumsum([0, *lengths])
    *inputs, grad = random_inputs(lengths, (4, 2), BF16)
    expected, expected_grads = in_fp64(inputs, grad, lengths)
    whole = partial(varlen_attention, cu_seqlens=cu_seqlens)
    batched = [x[None] for x in inputs]
    one = errors_of(whole, batched, grad[None], expected, expected_grads)
    results, *_ = host_attention(*batched, cu_seqlens, 16, grad[None])
    many = [relative_error(a[0], e) for a, e in zip(results, [expected, *expected_grads], strict=True)]
    assert all(m <= 1.5 * o for m, o in zip(many, one, strict=True)), (one, many)


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
    *inputs, grad = (x[None] for x in random_inputs(lengths, (4, 2), BF16))
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


def test_gated_delta_layers_in_bf16_are_those_of_transformers():
    """Which computes the decay in fp32: rounded, it would be off by its power over a document."""
    from longctx.shard import plan_batch

    ids = torch.randint(3, 64, (1, 96), generator=torch.Generator().manual_seed(0))
    stock = make_model("qwen3_next").to(BF16)
    with torch.no_grad():
        expected = stock(ids, use_cache=False).logits
        model, sequence = longctx.parallelize(make_model("qwen3_next").to(BF16), sp=1)
        batch = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(96)[None]}
        shard = sequence.shard(batch)
        assert plan_batch(batch["position_ids"], sequence.dims).num_tokens == 96
        actual = model(**shard.inputs).logits
    print(float((actual - expected).norm() / expected.norm()), float((actual != expected).double().mean()))
    assert float((actual - expected).norm() / expected.norm()) <= 1e-3

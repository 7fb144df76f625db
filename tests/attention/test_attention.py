"""Ring and Ulysses attention on real gloo processes against dense attention per document on one process."""

from __future__ import annotations

import itertools
import re
from functools import cache, lru_cache, partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

from longctx.ring import plan_ring, ring_attention
from longctx.ring.attention import ring_schedule
from longctx.sequence.batch import PLAIN, AttentionKind
from longctx.ulysses.attention import scheduled_attention, ulysses_attention
from tests.workers import run_ranks

HEADS = {"MHA": (4, 4), "GQA": (8, 2), "MQA": (4, 1)}
PACKS = {
    "mixed": [150, 7, 120, 1, 1, 64, 33, 100, 16, 8],
    "one document": [400],
    "one-token documents": [1] * 48,
    "odd lengths": [51, 3, 111, 5, 47, 63],
    "long and ones": [201] + [1] * 39,
}
# (in what it differs from plain attention, whether there are sinks)
KINDS = {
    "full": (PLAIN, False),
    "full, sinks": (PLAIN, True),
    "window 1": (AttentionKind(window=1), False),
    "window 50, sinks": (AttentionKind(window=50), True),
    "window 137": (AttentionKind(window=137), False),
    "window beyond all": (AttentionKind(window=5000), False),
    "chunks of 1": (AttentionKind(chunk_size=1), False),
    "chunks of 40, sinks": (AttentionKind(chunk_size=40), True),
    "chunks of 90, soft cap, window 50": (AttentionKind(chunk_size=90, softcap=1.5, window=50), False),
    "chunks beyond all": (AttentionKind(chunk_size=5000), False),
    "soft cap": (AttentionKind(softcap=1.5), False),  # of scores whose standard deviation is 1
    "soft cap, window 50, sinks": (AttentionKind(window=50, softcap=1.5), True),
}
FEW_KINDS = ("full", "chunks of 40, sinks", "soft cap", "soft cap, window 50, sinks")
"""Kinds over four ranks and more, beside the windows of `chunked_cases`."""
# fp64 sums of a few hundred terms in another order; fp32 accordingly. Both are the bounds users are promised.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def dense_attention(q, k, v, lengths, kind=PLAIN, sinks=None):
    """The reference, written on its own: softmax over each document's lower triangle; q [H, S, D], sinks [H]."""
    parts = []
    for q_doc, k_doc, v_doc in zip(*(x.split(lengths, dim=1) for x in (q, k, v)), strict=True):
        tokens = torch.arange(q_doc.shape[1])
        age = tokens[:, None] - tokens
        visible = (age >= 0) & (age < (kind.window or len(tokens)))
        if kind.chunk_size is not None:
            chunk = tokens // kind.chunk_size
            visible &= chunk[:, None] == chunk
        parts.append(masked_attention(q_doc, k_doc, v_doc, visible, q.shape[-1] ** -0.5, kind.softcap, sinks)[0])
    return torch.cat(parts, dim=1)


def masked_attention(q, k, v, visible, scale, softcap=None, sinks=None):
    """Output and log-sum-exp, both differentiable, of one softmax over all keys that a mask [N, M] lets queries see.

    Args:
        q: [..., H, N, D]
        k, v: [..., K, M, D]; H a multiple of K.
        sinks: [H]
    """
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, scores.shape[-2], 1)), dim=-1)
    return scores.softmax(-1)[..., : k.shape[-2]] @ v, scores.logsumexp(-1)


def make_inputs(lengths, heads, dtype, seed=0):
    return [x.clone() for x in _inputs(sum(lengths), heads, dtype, seed)]


@cache
def _inputs(total, heads, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads[0], total, 16), (heads[1], total, 16), (heads[1], total, 16), (heads[0], total, 16)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def padded(lengths, multiple):
    tail = -sum(lengths) % multiple
    return [*lengths, tail] if tail else list(lengths)


def relative_error(actual, expected):
    """Against the reference's norm; where it vanishes (dq of a token that sees itself alone), against the inputs'."""
    norm, of_inputs = float(expected.double().norm()), expected.numel() ** 0.5
    return float((actual.double() - expected.double()).norm()) / (norm if norm > 0.01 * of_inputs else of_inputs)


@cache  # a group has a thread that wakes up a hundred times a second
def subgroups(ring, ulysses):
    """(ring group, Ulysses group) of this rank; Ulysses ranks are neighbours."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    return mesh["ring"].get_group(), mesh["ulysses"].get_group()


def attend(backend, groups, cu_seqlens, kind=PLAIN, stride=None, overlap_exchange=False):
    """(order of the tokens over the ranks, attention function) of "p2p", "gather", "ulysses" or "hybrid"."""
    ring_group, ulysses_group = groups
    plan = plan_ring(cu_seqlens, dist.get_world_size(ring_group))
    if backend == "ulysses":
        chunks = {"heads_k_stride": stride, "kind": kind, "overlap_exchange": overlap_exchange}
        return np.arange(cu_seqlens[-1]), partial(
            ulysses_attention, cu_seqlens=cu_seqlens, group=ulysses_group, **chunks
        )
    if backend == "gather":
        chunks = {"heads_k_stride": stride, "kind": kind}
        return plan.permutation, partial(ring_attention, plan=plan, group=ring_group, transport="gather", **chunks)
    schedule = ring_schedule(plan, ring_group, kind=kind)
    exchanged = ulysses_group if backend == "hybrid" else None
    return plan.permutation, scheduled_attention(
        schedule, exchanged, stride, split_queries=False, overlap_exchange=overlap_exchange
    )


@lru_cache(maxsize=32)  # the cases of a plain pytest, which every backend has
def dense_results(lengths, heads, dtype, kind, has_sinks):
    """out, dq, dk, dv (and dsinks) of the dense reference on `make_inputs`."""
    return results_of_run(partial(dense_attention, lengths=lengths, kind=kind), lengths, heads, dtype, has_sinks)


def results_of_run(run, lengths, heads, dtype, has_sinks, mine=slice(None)):
    """out, dq, dk, dv (and dsinks) of the tokens `mine` of `make_inputs`, by attention of [H or K, T, D]."""
    *inputs, grad = (x[:, mine] for x in make_inputs(lengths, heads, dtype))
    leaves = [x.clone().requires_grad_() for x in inputs]
    sinks = torch.linspace(-2, 3, heads[0], dtype=dtype).requires_grad_() if has_sinks else None
    out = run(*leaves, sinks=sinks)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves), *([sinks.grad] if has_sinks else [])]


def errors_of_run(run, expected, lengths, heads, dtype, mine=slice(None)):
    """Errors of `results_of_run`, of attention of [1, H or K, T, D], relative to those expected for all tokens."""
    found = results_of_run(
        lambda *x, sinks: run(*(each[None] for each in x), sinks=sinks)[0],
        lengths,
        heads,
        dtype,
        len(expected) == 5,
        mine,
    )
    if len(expected) == 5 and dist.is_initialized():
        dist.all_reduce(found[4])  # every rank has the part of its own queries or heads
    wanted = [*(x[:, mine] for x in expected[:4]), *expected[4:]]
    return [relative_error(x, y) for x, y in zip(found, wanted, strict=True)]


def sharded_case(backend, groups, lengths, heads, dtype, kind="full", stride=None, overlap_exchange=False):
    """Errors of out, dq, dk, dv (and dsinks) on this rank, relative to the dense reference."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    kind, has_sinks = KINDS[kind]
    order, attention = attend(backend, groups, np.cumsum([0, *lengths]), kind, stride, overlap_exchange)
    mine = torch.from_numpy(order.reshape(world_size, -1)[rank].copy())
    expected = dense_results(tuple(lengths), heads, dtype, kind, has_sinks)
    return errors_of_run(attention, expected, lengths, heads, dtype, mine)


def is_covering(kind, heads, pack, dtype):
    """Whether a plain pytest runs a case: all packs with GQA, all heads with two packs, fp32 and windows on one."""
    if dtype != torch.float64 or kind != "full":
        return heads == "GQA" and pack == "mixed"
    return heads == "GQA" or pack in ("mixed", "odd lengths")


def all_cases(covering):
    """Every backend × kind × heads × pack × dtype on one process group; returns the worst error of each.

    Args:
        covering: those alone that `is_covering` chooses, or none of them; None for all.
    """
    world_size, errors = dist.get_world_size(), {}
    for backend, (ring, ulysses) in factorisations(world_size):
        groups = subgroups(ring, ulysses)
        for kind, heads, pack, dtype in itertools.product(KINDS, HEADS, PACKS, TOLERANCE):
            if HEADS[heads][0] % ulysses:
                continue
            if world_size == 8 and (dtype != torch.float64 or pack == "one-token documents"):
                continue  # adds nothing to 4 ranks but time
            if world_size in (4, 8) and kind not in FEW_KINDS:
                continue  # nor do these
            if kind != "full" and (world_size != 2 or heads == "MHA") and (heads, dtype) != ("GQA", torch.float64):
                continue  # nor do heads and dtypes add anything to two ranks with windows and sinks
            if covering is not None and covering != is_covering(kind, heads, pack, dtype):
                continue
            lengths = padded(PACKS[pack], 2 * world_size)
            case = sharded_case(backend, groups, lengths, HEADS[heads], dtype, kind)
            errors[f"{backend} {ring}×{ulysses}", kind, heads, pack, dtype] = max(case)
        if covering is not False:
            errors |= chunked_cases(f"{backend} {ring}×{ulysses}", groups, ulysses)
    return errors


CHUNKED_HEADS = [(12, 6), (12, 4), (8, 2)]
"""On 2, 3 and 4 ranks: one to four key/value heads a rank, own ones and copies, on 3 ranks one head twice on a rank."""


def chunked_cases(name, groups, ulysses):
    """The same a few heads at a time, with a stride that divides a rank's heads and one that does not always.

    Where heads are exchanged, some cases exchange heads while others are attended to.
    """
    lengths, errors = padded(PACKS["mixed"], 2 * dist.get_world_size()), {}
    ways = [(1, "window 50, sinks", False), (2, "full", False)]
    if ulysses > 1:
        ways += [(None, "full", True), (1, "window 50, sinks", True)]
    for heads, (stride, kind, overlaps) in itertools.product(CHUNKED_HEADS, ways):
        if heads[0] % ulysses == 0 and dist.get_world_size() <= 4:
            case = sharded_case(name.split()[0], groups, lengths, heads, torch.float64, kind, stride, overlaps)
            errors[name, kind, heads, f"{stride} at a time, overlapping {overlaps}", torch.float64] = max(case)
    return errors


def factorisations(world_size):
    """Each backend with its (ring, Ulysses) degrees; hybrid with every real product."""
    cases = [("p2p", (world_size, 1)), ("gather", (world_size, 1)), ("ulysses", (1, world_size))]
    products = [(world_size // n, n) for n in range(2, world_size) if world_size % n == 0]
    return cases + [("hybrid", product) for product in products]


@pytest.mark.parametrize(
    ("world_size", "covering"),
    [
        *(pytest.param(n, True, id=str(n)) for n in (1, 4)),
        *(pytest.param(n, False, id=f"{n}-others", marks=pytest.mark.long) for n in (1, 4)),
        *(pytest.param(n, None, id=str(n), marks=pytest.mark.long) for n in (2, 3, 8)),
    ],
)
def test_sharded_attention_equals_dense(world_size, covering):
    for errors in run_ranks(world_size, f"{__name__}:all_cases", covering):
        wrong = {case: error for case, error in errors.items() if not error <= TOLERANCE[case[-1]]}
        assert errors
        assert not wrong


LEAKS = ("full", "chunks of 40, sinks", "soft cap, window 50, sinks")


def out_and_gradients(attention, q, k, v, grad):
    """out, dq, dk, dv"""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def rerun_and_leak():
    """Whether a rerun is bitwise the same, and which documents' outputs change with one key of one document."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    lengths = padded(PACKS["mixed"], 2 * world_size)
    cu_seqlens = np.cumsum([0, *lengths])
    *inputs, grad = make_inputs(lengths, (4, 4), torch.float32)
    changed = [x.clone() for x in inputs]
    for x in changed:
        x[:, cu_seqlens[2] + 1] += 1.0  # in document 2
    results = {}
    for (backend, degrees), kind in itertools.product(factorisations(world_size), LEAKS):
        order, attention = attend(backend, subgroups(*degrees), cu_seqlens, KINDS[kind][0])
        mine = order.reshape(world_size, -1)[rank].copy()
        first, again, other = (
            out_and_gradients(attention, *(x[:, torch.from_numpy(mine)][None] for x in (*given, grad)))
            for given in (inputs, inputs, changed)
        )
        document = np.searchsorted(cu_seqlens, mine, side="right") - 1
        touched = (first[0] != other[0]).any(-1).any(1)[0].numpy()
        is_same = all(map(torch.equal, first, again))
        results[backend, kind] = is_same, sorted(set(document[touched].tolist()))
    return results


def test_rerun_is_bitwise_equal_and_documents_do_not_leak():
    results = run_ranks(4, f"{__name__}:rerun_and_leak")
    for case in itertools.product(("p2p", "gather", "ulysses", "hybrid"), LEAKS):
        assert all(result[case][0] for result in results)
        assert {doc for result in results for doc in result[case][1]} == {2}


def delayed():
    """The fp64 errors of every backend where each rank sleeps for random times between its messages."""
    import random
    import time

    randomness = random.Random(dist.get_rank())

    def late(call):
        def delayed_call(*args, **kwargs):
            time.sleep(randomness.choice([0, 0, 0.005, 0.03]))
            return call(*args, **kwargs)

        return delayed_call

    for name in ("batch_isend_irecv", "all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor"):
        setattr(dist, name, late(getattr(dist, name)))
    lengths = padded(PACKS["mixed"], 2 * dist.get_world_size())
    return {
        (backend, kind, round): max(
            sharded_case(backend, subgroups(*degrees), lengths, HEADS["GQA"], torch.float64, kind, None, round == 2)
        )
        for backend, degrees in factorisations(dist.get_world_size())
        for kind in ("full", "window 50, sinks")
        for round in range(3)
    }


def test_delays_of_ranks_change_nothing():
    for errors in run_ranks(4, f"{__name__}:delayed", timeout=120):
        assert len(errors) == 6 * len({backend for backend, *_ in errors})
        assert max(errors.values()) <= TOLERANCE[torch.float64]


def refused_calls():
    """Check that calls whose arguments do not fit together are refused, and return their number."""
    group = dist.group.WORLD
    q, fits = torch.randn(1, 3, 8, 4), plan_ring([0, 16], 2)
    two, bounds = q[:, :2], np.array([0, 16])
    ring, ulysses = partial(ring_attention, group=group), partial(ulysses_attention, group=group)
    calls = [
        ("plan_ring(cu_seqlens, 2)", lambda: ring(q, q, q, plan_ring([0, 32], 4))),
        ("expected [1, heads, 16, D]", lambda: ring(q, q, q, plan_ring([0, 32], 2))),
        ("--sp 1, 3", lambda: ulysses(q, q, q, bounds)),
        ("cu_seqlens ends at 20", lambda: ulysses(two, two, two, np.array([0, 20]))),
        ("group has 1", lambda: ring_attention(q, q, q, fits, dist.new_subgroups(1)[0])),
        ("transport='gather'", lambda: ring(q, q, q, fits, heads_k_stride=2)),
        ("heads_k_stride 0 must be at least 1", lambda: ulysses(two, two, two, bounds, heads_k_stride=0)),
        ("--sp 1, 3", lambda: ulysses(q, q, q, bounds, heads_k_stride=1)),
        ("window 0 must be at least 1", lambda: ring(q, q, q, fits, kind=AttentionKind(window=0))),
        ("chunk_size 0 must be at least 1", lambda: ring(q, q, q, fits, kind=AttentionKind(chunk_size=0))),
        ("softcap 0.0 must be above 0", lambda: ring(q, q, q, fits, kind=AttentionKind(softcap=0.0))),
        ("use one of p2p, gather", lambda: ring(q, q, q, fits, transport="pigeon")),
        ("Cast them", lambda: ring(q, q.double(), q, fits)),
        ("torch.int32", lambda: ring(q.int(), q.int(), q.int(), fits)),
        ("k on meta", lambda: ring(q, q.to("meta"), q, fits)),
        ("expected [3]", lambda: ring(q, q, q, fits, sinks=torch.zeros(2))),
    ]
    for words, call in calls:
        with pytest.raises(ValueError, match=re.escape(words)):
            call()
    return len(calls)


def test_arguments_that_do_not_fit_are_refused_on_every_rank():
    assert run_ranks(2, f"{__name__}:refused_calls") == [16, 16]

"""Documents with branches (`longctx.sequence.layout`) against dense attention with the mask of a tree, in fp64.

The ranks are gloo processes, and their shares cut trunks and branches at many places. Every backend is compared.
"""

from __future__ import annotations

import itertools
import re
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

import longctx
from longctx.attention.backends import BACKENDS
from longctx.attention.operator import LocalSchedule, attend
from longctx.collate import SequenceCollator
from longctx.model.tiny import tiny_model
from longctx.policy import PolicyLoss
from longctx.ring.planner import plan_ring
from longctx.sequence.batch import PLAIN, AttentionKind
from longctx.sequence.mesh import SequenceGroups
from tests.attention.test_attention import (
    TOLERANCE,
    errors_of_run,
    factorisations,
    masked_attention,
    padded,
    relative_error,
    results_of_run,
    subgroups,
)
from tests.layers.test_log_probs import dense_log_probs, dense_model
from tests.reference import layout_of
from tests.workers import run_ranks

HEADS = (8, 2)
# Documents as lists of the tokens of their trunk and of each branch; a list of one number does not branch.
PACKS = {
    "pairs": [[50, 25, 31], [7], [3, 45, 1], [1, 1, 1], [60], [20, 2, 17]],
    "one pair": [[250, 60, 90]],
    "short trunk": [[2, 150, 125], [33]],
    "groups": [[32, 20, 1, 35, 17, 40], [5], [30, 30, 30, 30]],
}
KINDS = {"full": (PLAIN, False), "soft cap, sinks": (AttentionKind(softcap=1.5), True)}


def tree(pack, multiple):
    """(cu_seqlens, branch_starts) of a pack, with padding at its end."""
    documents = [*pack, *([tail] for tail in padded([sum(map(sum, pack))], multiple)[1:])]
    cu_seqlens = np.cumsum([0, *map(sum, documents)])
    starts = [
        begin + sum(parts[:i])
        for begin, parts in zip(cu_seqlens, documents, strict=False)
        for i in range(1, len(parts))
    ]
    return cu_seqlens, np.array(starts, dtype=np.int64)


def visible(cu_seqlens, branch_starts):
    """bool [T, T], which key each query sees, written on its own: a walk from each token to its document's start."""
    length = int(cu_seqlens[-1])
    seen = torch.zeros(length, length, dtype=torch.bool)
    starts, firsts = set(branch_starts.tolist()), set(cu_seqlens.tolist())
    for begin, end in itertools.pairwise(cu_seqlens.tolist()):
        trunk_end = min([start for start in starts if begin < start < end], default=end)
        branch = begin
        for token in range(begin, end):
            branch = token if token in starts | firsts else branch
            seen[token, branch : token + 1] = True
            seen[token, begin : min(trunk_end, token + 1)] = True
    return seen


def dense(pack, multiple, kind, has_sinks):
    """out, dq, dk, dv (and dsinks) of all tokens."""
    cu_seqlens, starts = tree(pack, multiple)
    seen = visible(cu_seqlens, starts)

    def run(q, k, v, sinks):
        return masked_attention(q, k, v, seen, q.shape[-1] ** -0.5, kind.softcap, sinks)[0]

    return results_of_run(run, [len(seen)], HEADS, torch.float64, has_sinks)


def attention_of(backend, degrees, cu_seqlens, starts, kind, **options):
    """(this rank's tokens, attention) of a backend with these degrees."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ring, ulysses = subgroups(*degrees)
    groups = SequenceGroups(sequence=dist.group.WORLD, ring=ring, ulysses=ulysses if degrees[1] > 1 else None)
    plan = plan_ring(cu_seqlens, degrees[0]) if degrees[0] > 1 else None
    layout = layout_of(cu_seqlens, starts, ring=degrees[0], ulysses=degrees[1], plan=plan)
    order = np.arange(cu_seqlens[-1]) if plan is None else plan.permutation
    mine = torch.from_numpy(order.reshape(world_size, -1)[rank].copy())
    return mine, BACKENDS[backend].attention(layout, groups, kind, **options)


def cases_of(world_size):
    """(backend, degrees, options)."""
    for backend, degrees in factorisations(world_size):
        if HEADS[0] % degrees[1]:
            continue
        name = {"p2p": "ring"}.get(backend, backend)
        yield name, degrees, {}
        if degrees[1] > 1:
            yield name, degrees, {"overlap_exchange": True}
        if name != "gather":
            yield name, degrees, {"heads_k_stride": 1}


def all_cases():
    """{case: the worst error of out and gradients} on this rank."""
    world_size, errors = dist.get_world_size(), {}
    for (pack, documents), (name, (kind, has_sinks)) in itertools.product(PACKS.items(), KINDS.items()):
        expected = dense(documents, 2 * world_size, kind, has_sinks)
        cu_seqlens, starts = tree(documents, 2 * world_size)
        for backend, degrees, options in cases_of(world_size):
            mine, attend = attention_of(backend, degrees, cu_seqlens, starts, kind, **options)
            run = partial(attend, scale=None)
            case = errors_of_run(run, expected, cu_seqlens[-1:], HEADS, torch.float64, mine)
            errors[backend, degrees, *options, pack, name] = max(case)
    return errors


@pytest.mark.parametrize("world_size", [4, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3, 8))])
def test_every_backend_equals_dense_attention_over_the_tree(world_size):
    found = run_ranks(world_size, f"{__name__}:all_cases")
    for errors in found:
        assert {case: error for case, error in errors.items() if not error <= TOLERANCE[torch.float64]} == {}
    assert len({case[0] for case in found[0]}) >= 2


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("kind", KINDS)
def test_one_device_equals_dense_attention_over_the_tree(pack, kind):
    kind, has_sinks = KINDS[kind]
    cu_seqlens, starts = tree(PACKS[pack], 8)
    segments = layout_of(cu_seqlens, starts).segments
    schedule = LocalSchedule(cu_seqlens, kind, segments)
    expected = dense(PACKS[pack], 8, kind, has_sinks)
    errors = errors_of_run(partial(attend, schedule), expected, cu_seqlens[-1:], HEADS, torch.float64)
    assert max(errors) <= TOLERANCE[torch.float64]
    pairs = sum(int((part.num_queries * part.num_keys).sum()) for part in schedule.parts[1:])
    pairs += int((schedule.parts[0].num_queries * (schedule.parts[0].num_queries + 1) // 2).sum())
    assert pairs == layout_of(cu_seqlens, starts).work(0) == int(visible(cu_seqlens, starts).sum())
    assert segments.num_repeated() == sum(parts[0] * (len(parts) - 2) for parts in PACKS[pack] if len(parts) > 1)


PROMPTS, ANSWERS = (20, 1, 45, 3), ((13, 30), (4, 5), (1, 1), (40, 2, 17))
"""Tokens of prompts, and of the answers to each."""


def make_answers():
    """[(prompt, answers)] of random tokens."""
    rng = np.random.default_rng(3)
    return [
        (rng.integers(3, 250, prompt), [rng.integers(3, 250, length) for length in lengths])
        for prompt, lengths in zip(PROMPTS, ANSWERS, strict=True)
    ]


def sharing_row(prompts):
    """A row in which the answers to a prompt share it, but for its last token; a prompt of one token is not shared."""
    ids, labels, lengths, starts = [], [], [], []
    for prompt, answers in prompts:
        trunk, last = prompt[:-1], prompt[-1:]
        parts = [np.concatenate([last, answer]) for answer in answers]
        begin = sum(map(len, ids))
        ids += [trunk, *parts]
        labels += [np.full(len(trunk), -100), *(np.append(-100, answer) for answer in answers)]
        if len(trunk):
            lengths.append(len(trunk) + sum(map(len, parts)))
            starts += [begin + len(trunk) + sum(map(len, parts[:i])) for i in range(len(parts))]
        else:
            lengths += map(len, parts)
    row = {"input_ids": np.concatenate(ids), "labels": np.concatenate(labels), "seq_lengths": np.array(lengths)}
    return row | {"branch_starts": np.array(starts)}


def whole_documents(prompts):
    """Every answer after its own prompt."""
    for prompt, answers in prompts:
        for answer in answers:
            ids = np.concatenate([prompt, answer])
            yield {"input_ids": ids, "labels": np.where(np.arange(len(ids)) < len(prompt), -100, ids)}


def batch_of(sequence, *rows):
    return SequenceCollator(pad_token_id=0, pad_to_multiple_of=sequence.dims.multiple, padding_free=True)(rows)


def on_model(cases):
    """{backend: (sums, gradient, whether a rerun with other tokens in one answer changes that answer's sum alone)}."""
    results = {}
    prompts = make_answers()
    row = sharing_row(prompts)
    changed = {name: values.copy() for name, values in row.items()}
    place = PROMPTS[0] + 5  # of the first answer
    changed["input_ids"][place] = changed["labels"][place] = 251
    for backend, sp in cases:
        model, sequence = longctx.parallelize(tiny_model(torch.float64), sp=sp, sp_backend=backend)
        sums = sequence.document_log_probs(model, batch_of(sequence, row))[: sum(map(len, ANSWERS))]
        (sums * torch.linspace(-1, 2, len(sums))).sum().backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        if dist.is_initialized():
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        with torch.no_grad():
            first, other = (sequence.log_probs(model, batch_of(sequence, x))[0] for x in (row, changed))
        results[backend] = sums.detach(), gradient, (first != other).nonzero()[:, 0].tolist()
    return results


def check_on_model(results):
    prompts, reference = make_answers(), dense_model()
    expected = dense_log_probs(reference, list(whole_documents(prompts)))[1]
    (expected * torch.linspace(-1, 2, len(expected))).sum().backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in reference.parameters()])
    for sums, found, touched in results.values():
        torch.testing.assert_close(sums, expected.detach(), rtol=1e-6, atol=0)
        assert relative_error(found, gradient) < 1e-6  # transformers' norms round to fp32, as in test_log_probs.py
        # The changed token and those after it in its answer, bitwise: no other answer, no other prompt.
        assert touched == list(range(PROMPTS[0] + 5, PROMPTS[0] + ANSWERS[0][0]))


def test_log_probs_are_those_of_whole_documents_and_answers_do_not_leak():
    check_on_model(on_model([("auto", 1)]))


def test_log_probs_are_those_of_whole_documents_on_every_backend():
    cases = [(backend, 4) for backend in BACKENDS.spread]
    for results in run_ranks(4, f"{__name__}:on_model", cases):
        check_on_model(results)


@pytest.mark.parametrize("normalization", ["token", "sequence", "group"])
def test_a_policy_step_on_answers_that_share_prompts_is_that_on_whole_documents(normalization):
    """Both batches have the same answers in the same order, so advantages and groups are the same."""
    prompts, results = make_answers(), []
    advantages = torch.linspace(-1, 1.5, sum(map(len, ANSWERS)), dtype=torch.float64)
    groups = torch.tensor([number for number, answers in enumerate(ANSWERS) for _ in answers])
    policy = PolicyLoss(normalization=normalization, importance_sampling_level="sequence")
    for shares in (True, False):
        model, sequence = longctx.parallelize(tiny_model(torch.float64), sp=1)
        batch = batch_of(sequence, *([sharing_row(prompts)] if shares else whole_documents(prompts)))
        counts = sequence.count_policy_step([batch], [groups])
        outputs = sequence.policy_loss(model, batch, advantages, counts=counts, policy=policy, groups=groups)
        outputs.loss.backward()
        learnt = batch["labels"][0] != -100
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        results.append((outputs.loss.detach(), outputs.entropy[0, learnt], gradient))
    for shared, alone in zip(*results, strict=True):
        assert relative_error(shared, alone) < 1e-6


def test_a_batch_has_branches_where_its_rows_have_them():
    """The example of `longctx.sequence.layout`, in the second of two rows, and after it a document as it is."""
    row = {"input_ids": [11, 12, 13, 14, 15, 13, 16, 17, 18], "seq_lengths": [7, 2], "branch_starts": [2, 5]}
    for padding_free, start in ((True, 2), (False, 12)):
        batch = SequenceCollator(pad_token_id=0, pad_to_multiple_of=12, padding_free=padding_free)(
            [{"input_ids": [21, 22]}, row]
        )
        at = slice(start, start + 9)
        assert batch["branch_starts"].tolist() == [start + 2, start + 5]
        assert batch["position_ids"].flatten()[at].tolist() == [0, 1, 2, 3, 4, 2, 3, 0, 1]
        assert batch["labels"].flatten()[at].tolist() == [-100, 12, -100, 14, 15, -100, 16, -100, 18]
    plain = SequenceCollator(pad_token_id=0)([{"input_ids": [21, 22]}])
    assert "branch_starts" not in plain


def test_branches_that_a_batch_cannot_have_are_refused():
    sequence = longctx.parallelize(tiny_model(), sp=1)[1]
    batch = batch_of(sequence, sharing_row(make_answers()))
    learnt = batch["labels"].clone()
    learnt[0, 4] = 7
    with pytest.raises(ValueError, match="1 labels stand in a trunk"):
        sequence.shard(batch | {"labels": learnt})
    with pytest.raises(ValueError, match="position_ids do not fit branch_starts"):
        sequence.shard(batch | {"branch_starts": batch["branch_starts"] + 1})
    for wrong in ([0], [5, 4], [10**6]):
        with pytest.raises(ValueError, match="do not ascend within documents"):
            sequence.shard(batch | {"branch_starts": torch.tensor(wrong)})
    for kind in (AttentionKind(window=5), AttentionKind(chunk_size=5)):
        with pytest.raises(ValueError, match="documents with branches under attention with window="):
            LocalSchedule(np.array([0, 9]), kind, layout_of([0, 9], [2, 5]))
    sequence.branch_obstacle = "since layers have a sliding window"
    with pytest.raises(ValueError, match=re.escape("documents cannot share their beginnings here, since")):
        sequence.shard(batch)

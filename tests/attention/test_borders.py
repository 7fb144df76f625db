"""Lengths at which one token more or less matters: windows, shards, blocks, heads and limits that fit exactly."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from longctx.attention.interface import _check_calls, longctx_attention
from longctx.attention.kernels import block_backward, block_forward, choose
from longctx.attention.kernels.entries import Entries
from longctx.attention.operator import varlen_attention
from longctx.model.tiny import tiny_config
from longctx.packing.lookahead import LookAhead
from longctx.sequence.batch import AttentionContext, AttentionKind
from longctx.sequence.layout import Layout
from longctx.sequence.mesh import ParallelDims
from longctx.settings.machine_checks import LARGEST_INT32, check_row_length
from longctx.training.metrics import StepMetrics
from longctx.training.trainer import SequenceTrainer
from tests.attention.test_attention import KINDS, dense_results, errors_of_run, sharded_case, subgroups
from tests.reference import layout_of
from tests.workers import run_ranks

TOLERANCE = 1e-12  # fp64; a token too many or too few changes the first digits

WINDOW = 70
"""More than the 64 queries that a block has at least, so that blocks and windows end at different places."""
PACKS = {
    "exactly the window": [WINDOW, 1, WINDOW],
    "one token longer": [WINDOW + 1, WINDOW, WINDOW - 1, 1],
    "two tokens longer": [WINDOW + 2, WINDOW + 1, WINDOW],
    "blocks and one token": [2 * WINDOW, 2 * WINDOW + 1, WINDOW + 1, 1, 1],
    "one-token documents": [1] * 5,
}


@pytest.mark.parametrize("window", [1, 2, WINDOW])
@pytest.mark.parametrize("pack", PACKS)
def test_windows_of_documents_that_are_about_as_long(pack, window):
    lengths = PACKS[pack]
    kind, heads = AttentionKind(window=window), (4, 2)
    expected = dense_results(tuple(lengths), heads, torch.float64, kind, has_sinks=False)
    run = partial(varlen_attention, cu_seqlens=np.cumsum([0, *lengths]), kind=kind)
    assert max(errors_of_run(run, expected, lengths, heads, torch.float64)) <= TOLERANCE


def test_kernels_are_chosen_by_whether_there_is_a_window_or_a_cap(monkeypatch):
    """Those that are wrong with windows or soft caps are passed over only where these are compared."""
    asked, real = [], choose.choose_kernel
    monkeypatch.setattr(choose, "choose_kernel", lambda inputs: (asked.append(inputs[-2:]), real(inputs))[1])
    q = torch.randn(1, 2, 6, 8)
    for window, softcap in ((None, None), (2, None), (None, 1.0)):
        entries = Entries.of_documents(np.array([0, 6]), window, softcap)
        out, lse = block_forward(q, q, q, entries, 1.0)
        block_backward(q, q, q, q, out, lse, entries, 1.0)
    assert asked == [(False, False)] * 2 + [(True, False)] * 2 + [(False, True)] * 2


SHARE = 12
RING_PACKS = {
    "a document for each rank": [SHARE] * 4,
    "two shares and two of one": [2 * SHARE, SHARE, SHARE],
    "one token beyond a share": [SHARE + 1, SHARE - 1, 2 * SHARE],
    "one document": [4 * SHARE],
    "all but one token": [4 * SHARE - 1, 1],
    "one-token documents": [1] * (4 * SHARE),
    "a long one and ones": [2 * SHARE + 1] + [1] * (2 * SHARE - 1),
}
RING_WINDOWS = (None, 1, SHARE - 1, SHARE, SHARE + 1)


def ring_errors():
    groups, errors = subgroups(4, 1), {}
    for window in RING_WINDOWS:
        KINDS[f"window {window}"] = (AttentionKind(window=window), False)
    for pack, window in itertools.product(RING_PACKS, RING_WINDOWS):
        for backend, stride in (("p2p", None), ("gather", None), ("gather", 1)):
            if window is None or stride is None:
                case = sharded_case(
                    backend, groups, RING_PACKS[pack], (4, 2), torch.float64, f"window {window}", stride
                )
                errors[backend, stride, pack, window] = max(case)
    return errors


def test_a_ring_of_documents_that_end_with_shards():
    for errors in run_ranks(4, f"{__name__}:ring_errors"):
        assert not {case: error for case, error in errors.items() if not error <= TOLERANCE}
        assert len(errors) > 2 * len(RING_PACKS) * len(RING_WINDOWS)


HEADS = [(4, 4), (4, 1), (8, 2), (12, 2), (12, 4), (16, 8)]
"""On four ranks: one to four heads a rank, key/value heads of their own, and two or four copies of each."""


def ulysses_errors():
    groups, errors = subgroups(1, 4), {}
    ways = [(None, False), (1, False), (2, False), (None, True), (1, True)]
    for heads, (stride, overlaps), kind in itertools.product(HEADS, ways, ("full, sinks", "window 50, sinks")):
        case = sharded_case("ulysses", groups, [61, 1, 2], heads, torch.float64, kind, stride, overlaps)
        errors[heads, stride, overlaps, kind] = max(case)
    return errors


def test_ulysses_with_any_number_of_heads():
    for errors in run_ranks(4, f"{__name__}:ulysses_errors"):
        assert not {case: error for case, error in errors.items() if not error <= TOLERANCE}


def test_the_last_row_that_kernels_can_count():
    """In int32: borders of documents in a row, and one log-sum-exp for each head and token of a rank."""
    check_row_length(LARGEST_INT32, 1, heads=1, ring=1)
    check_row_length(2**30, 1, heads=4, ring=3)  # 1,431,655,768 of a rank
    for length, rows, heads, ring in ((2**31, 1, 1, 1), (2**30, 2, 1, 1), (2**30, 1, 2, 1), (2**30, 1, 4, 2)):
        with pytest.raises(ValueError, match="2,147,483,648"):
            check_row_length(length, rows, heads=heads, ring=ring)


@pytest.mark.parametrize("positions", [[0, 1, 3], [0, 2, 3], [0, 1, 1], [0, 1, -1], [1, 2, 3]])
def test_positions_that_do_not_count_up_are_refused(positions):
    tokens = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="position_ids must start at 0"):
        Layout.of_batch({"input_ids": tokens, "labels": tokens, "position_ids": torch.tensor([[0, 1, 0], positions])})


def a_context(length):
    layout = layout_of([0, length])

    def make(kind):
        return lambda q, k, v, *, scale, sinks: varlen_attention(q, k, v, layout.cu_seqlens, scale, sinks=sinks)

    return AttentionContext(layout, None, make)


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, "a mask"),
        ({"is_causal": False}, "is_causal=False"),
    ],
)
def test_layers_that_are_no_plain_causal_attention_are_refused(keywords, named):
    q = torch.randn(1, 2, 4, 8)
    given = {"attention_mask": None, "sequence": a_context(4)}
    assert longctx_attention(SimpleNamespace(is_causal=True), q, q, q, **given)[0].shape == (1, 4, 2, 8)
    module = SimpleNamespace(is_causal=keywords.get("is_causal", True))
    with pytest.raises(ValueError, match=f"asks for .*{named}"):
        longctx_attention(module, q, q, q, **given | {k: v for k, v in keywords.items() if k != "is_causal"})


@pytest.mark.parametrize("missing", [1, -1])
def test_layers_that_bypass_our_attention_stop_the_first_step(missing):
    """One layer too few that was counted, or one too many: every rank would see its own tokens alone in it."""
    config, context = tiny_config(), a_context(8)
    check = partial(_check_calls, config.num_hidden_layers, None, (), {"sequence": context}, None)
    context.calls = config.num_hidden_layers - missing
    with pytest.raises(ValueError, match=f"{context.calls} of {config.num_hidden_layers} attention layers"):
        check()
    context.calls = config.num_hidden_layers
    check()


def test_no_more_tokens_wait_than_asked_for():
    """However many packs were taken that had room left: 3 of 10 tokens in each here."""
    ahead: LookAhead[int] = LookAhead(capacity=10, packs=2)
    for number in range(200):
        ahead.add(7, number)
        while ahead.full:
            assert len(ahead.take()) == 1
        assert sum(ahead.sizes) < 2 * 10


@pytest.mark.parametrize(("data_seed", "used"), [(None, 1), (2, 2), (0, 0)])
def test_the_order_of_the_data_has_a_seed_of_its_own(data_seed, used):
    args = SimpleNamespace(seed=1, data_seed=data_seed, gradient_accumulation_steps=1, dataloader_drop_last=False)
    args.train_sampling_strategy, args.train_batch_size = "random", 1
    sequence = SimpleNamespace(dims=ParallelDims(world_size=1))
    trainer = SimpleNamespace(train_dataset=range(8), args=args, sequence=sequence, costs=None)
    assert SequenceTrainer.step_sampler(trainer, 0).seed == used


def test_attention_work_of_a_hybrid_is_that_of_the_ring_rank():
    """Two ring ranks with 10 and 42 pairs, each of two Ulysses ranks, which share them by heads."""
    plan = SimpleNamespace(world_size=2, area_per_rank=np.array([10, 42]))
    layout = replace(layout_of([0, 16]), ring=2, ulysses=2, plan=plan)
    assert [layout.work(rank) for rank in range(4)] == [5, 5, 21, 21]


@pytest.mark.parametrize(("rank", "tokens"), [(0, 100 + 7 + 5), (1, 100)])
def test_sums_of_another_number_of_ranks_are_gone_on_with_once(rank, tokens):
    """By rank 0 of the run that goes on, whatever number of ranks it has."""
    metrics = StepMetrics(sp=1, sp_rank=0, config=tiny_config(), flops_per_token=1, device=torch.device("cpu"))
    before = {"total_tokens": 100, "longest_row": 8}
    states = [before | {"sums": [number, 8, 0, 0, 0, 0, 0]} for number in (7, 5)]
    metrics.load_state_dicts(states, [], rank=rank)
    assert metrics.tokens_so_far() == tokens

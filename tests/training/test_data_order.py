"""Which rank reads which row: every row once an epoch, the same steps in every layout, even costs."""

from __future__ import annotations

import sys
from collections import Counter
from multiprocessing import get_context

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from benchmarks.published import CONFIGS
from longctx.data import DataError
from longctx.model.tiny import tiny_model
from longctx.packing import Packing, balanced_order, pack, pack_costs
from longctx.packing.balance import LINEAR_COST, WINDOW_STEPS
from longctx.training import data_order
from longctx.training.data_order import StepSampler, end_with_parent
from longctx.training.dataset import linear_cost

LAYOUTS = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))  # micro-batch size, dp, accumulation
NUM_ROWS = st.integers(0, 150)
MODES = st.sampled_from(["balanced", "shuffled", "sequential"])


def costs_of(num_rows):
    """Heavy-tailed, as packs of documents are, with equal ones among them."""
    return np.random.default_rng(num_rows).pareto(2.0, num_rows).round(1) + 1


def samplers(num_rows, layout, mode, *, seed=7, epoch=0, **options):
    """One sampler for each data-parallel rank."""
    options |= dict(zip(("micro_batch_size", "dp", "accumulation_steps"), layout, strict=True))
    options["seed"] = None if mode == "sequential" else seed
    options["costs"] = costs_of(num_rows) if mode == "balanced" else None
    return [StepSampler(num_rows, dp_rank=rank, epoch=epoch, **options) for rank in range(layout[1])]


def steps_read(ranks, accumulation_steps):
    """The rows that all ranks together read in each optimizer step, as sorted lists."""
    batches = [list(rank) for rank in ranks]
    assert len({len(rank) for rank in batches}) == 1
    return [
        sorted(row for rank in batches for batch in rank[start : start + accumulation_steps] for row in batch)
        for start in range(0, len(batches[0]), accumulation_steps)
    ]


@given(num_rows=NUM_ROWS, layout=LAYOUTS, mode=MODES, drop_last=st.booleans(), epoch=st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_every_row_once_an_epoch(num_rows, layout, mode, drop_last, epoch):
    micro_batch_size, dp, accumulation = layout
    size = micro_batch_size * dp * accumulation
    ranks = samplers(num_rows, layout, mode, drop_last=drop_last, epoch=epoch)
    batches = [list(sampler) for sampler in ranks]
    assert {len(rank) for rank in batches} == {len(ranks[0])}
    assert all(len(batch) <= micro_batch_size for rank in batches for batch in rank)
    rows = Counter(row for rank in batches for batch in rank for row in batch)
    assert set(rows.values()) <= {1}
    assert set(rows) <= set(range(num_rows))
    assert len(rows) == (num_rows // size * size if drop_last else num_rows)
    full = [rank[: num_rows // size * accumulation] for rank in batches]
    assert all(len(batch) == micro_batch_size for rank in full for batch in rank)


@given(num_rows=NUM_ROWS, layout=LAYOUTS, mode=MODES, drop_last=st.booleans(), epoch=st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_a_step_holds_the_same_rows_in_every_layout(num_rows, layout, mode, drop_last, epoch):
    size = layout[0] * layout[1] * layout[2]
    alone = samplers(num_rows, (1, 1, size), mode, drop_last=drop_last, epoch=epoch)
    ranks = samplers(num_rows, layout, mode, drop_last=drop_last, epoch=epoch)
    expected = steps_read(alone, size)
    assert steps_read(ranks, layout[2]) == expected
    for sampler in ranks:
        assert [sorted(step.tolist()) for step in sampler.steps()] == expected


@pytest.mark.parametrize("mode", ["balanced", "shuffled"])
def test_every_epoch_has_an_order_of_its_own(mode):
    (sampler,) = samplers(64, (1, 1, 4), mode)
    first, again = list(sampler), list(sampler)
    sampler.epoch = 1
    assert first == again
    assert list(sampler) != first


def test_steps_are_in_random_order_within_a_window():
    """Neither from cheap to dear nor the reverse: training should not see the lengths rise and fall."""
    costs = costs_of(WINDOW_STEPS * 4 * 50)
    steps = costs[balanced_order(costs, 4, seed=0, epoch=0)].reshape(50, WINDOW_STEPS, 4).sum(-1)
    trend = [np.corrcoef(np.arange(WINDOW_STEPS), window.argsort().argsort())[0, 1] for window in steps]
    assert abs(np.mean(trend)) < 0.15  # of 50 windows; 1 or -1 when sorted


def test_incomplete_last_step_is_neither_the_cheapest_nor_the_dearest():
    """--dataloader_drop_last leaves it out, which must not favour short documents."""
    costs = np.arange(44.0)
    last = [balanced_order(costs, 8, seed=seed, epoch=0)[40:].mean() for seed in range(300)]
    assert np.mean(last) == pytest.approx(costs.mean(), abs=3)


def test_ranks_of_a_micro_batch_read_packs_of_similar_cost():
    """Σ max / Σ mean; costs as spread out as those of packs of 131k tokens."""
    costs = np.random.default_rng(0).lognormal(0, 0.5, 2048)
    options = {"micro_batch_size": 1, "accumulation_steps": 2, "dp": 8, "seed": 7}
    for order, low, high in ((costs, 1.0, 1.06), (None, 1.5, 9.9)):
        batches = [list(StepSampler(2048, dp_rank=rank, costs=order, **options)) for rank in range(8)]
        cost = np.array([[costs[batch].sum() for batch in rank] for rank in batches])
        assert low <= cost.max(0).sum() / cost.mean(0).sum() <= high


@given(lengths=st.lists(st.integers(0, 40), max_size=40), strategy=st.sampled_from(["bfd_split", "wrapped"]))
def test_costs_are_those_of_the_pieces(lengths, strategy):
    packing = pack(lengths, 10, strategy)
    pieces = packing.piece_lengths(np.array(lengths, dtype=np.int64))
    costs = pack_costs(packing, np.array(lengths, dtype=np.int64), linear_cost=3.0)
    assert len(costs) == len(packing)
    for index, cost in enumerate(costs):
        own = pieces[packing.offsets[index] : packing.offsets[index + 1]]
        assert cost == pytest.approx(own.sum() * 3.0 + (own**2).sum())


def test_a_token_costs_what_the_model_s_linear_layers_do():
    """Against a model's own matrices; the default is near that of an 8B model."""
    model = tiny_model()
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed_tokens" not in name)
    head = 0 if any("lm_head" in name for name, _ in model.named_parameters()) else model.lm_head.weight.numel()
    per_layer = model.config.num_attention_heads * model.config.head_dim
    expected = (matrices + head) / (model.config.num_hidden_layers * per_layer)
    assert linear_cost(model.config) == pytest.approx(expected)
    assert linear_cost(CONFIGS["Qwen/Qwen3-8B"]) == pytest.approx(LINEAR_COST, rel=0.1)


def test_cost_of_a_long_pack():
    one = Packing(indices=np.zeros(1, np.uint8), offsets=np.array([0, 1]), capacity=1 << 20)
    assert pack_costs(one, np.array([1 << 20]))[0] == pytest.approx((1 << 20) * LINEAR_COST + (1 << 40))


def _errors_shown(pipe):
    errors = []
    sys.excepthook = lambda *error: errors.append(repr(error[1]))
    data_order.PARENT_ENDS_SECONDS = 0.01
    end_with_parent(0)
    for error in (ConnectionResetError(), EOFError(), ValueError()):
        sys.excepthook(type(error), error, None)
    pipe.send(errors)


def test_a_worker_shows_all_errors_while_it_has_a_parent():
    """tests/launch/test_security_launch.py kills the parent."""
    receiver, sender = get_context("fork").Pipe(duplex=False)
    worker = get_context("fork").Process(target=_errors_shown, args=(sender,))
    worker.start()
    sender.close()
    assert receiver.recv() == ["ConnectionResetError()", "EOFError()", "ValueError()"]
    worker.join()
    assert worker.exitcode == 0


class Broken(Dataset):
    """Rows of which the third cannot be read."""

    def __len__(self):
        return 4

    def __getitem__(self, number):
        if number == 2:
            raise DataError("data.jsonl:3: 'text' is no text. Use a string.")
        return number


def test_a_worker_s_error_in_data_is_told_without_its_traceback():
    with pytest.raises(DataError, match=r"^data\.jsonl:3: 'text' is no text\. Use a string\.$"):
        list(DataLoader(Broken(), num_workers=1))

"""States and halos between ranks: operators in fp64, models against stock transformers, and a leak probe of bits."""

from __future__ import annotations

import functools
import inspect
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import CONFIG_MAPPING

from longctx import parallelize
from longctx.model.allow_list import RECURRENT_MODELS
from longctx.recurrent.gated_delta import delta_rule
from longctx.recurrent.layers import recurrent_layers
from longctx.recurrent.pieces import Pieces
from tests.model import test_models
from tests.model.test_models import gradients, largest_error, make_batch, make_model, sharded_step, stock_step
from tests.recurrent import cases
from tests.workers import run_ranks

TOLERANCE = 1e-12

# Borders at and beside the cuts of four slices of 8; documents of one token, and over three and four slices.
BORDERS = [[32], [8, 16, 8], [7, 18, 7], [9, 14, 1, 8], [1, 1, 1, 5, 1, 20, 1, 1, 1], [31, 1], [1, 31]]
ARRANGEMENTS = {2: [(1, 2), (2, 1)], 4: [(1, 4), (4, 1), (2, 2)]}


def operator_errors(all_lengths: list[list[int]]) -> dict[str, float]:
    """Every arrangement of the group's ranks."""
    found = {}
    for lengths in all_lengths:
        for ring, ulysses in ARRANGEMENTS[dist.get_world_size()]:
            for name, error in cases.errors(lengths, ring, ulysses).items():
                found[f"{name}, ring {ring}, ulysses {ulysses}, {lengths}"] = error
    return found


@pytest.mark.parametrize(
    ("ranks", "documents"),
    [
        (4, BORDERS),
        pytest.param(2, [*BORDERS, *(cases.random_lengths(40, seed) for seed in range(8))], marks=pytest.mark.long),
        pytest.param(4, [cases.random_lengths(48, seed) for seed in range(16)], marks=pytest.mark.long),
    ],
    ids=["4, borders", "2, random", "4, random"],
)
def test_operators_equal_each_document_alone(ranks, documents):
    for found in run_ranks(ranks, f"{__name__}:operator_errors", documents):
        wrong = {case: error for case, error in found.items() if not error <= TOLERANCE}
        assert not wrong


@pytest.mark.parametrize("lengths", [[32], [7, 18, 7], [9, 14, 1, 8]])
@pytest.mark.parametrize(("ring", "ulysses"), ARRANGEMENTS[4])
def test_pieces_cover_the_tokens_in_their_order(lengths, ring, ulysses):
    """Each rank's pieces are its tokens, every given row is another one's predecessor, and chains begin at a start."""
    layout = cases.layout_of(lengths, ring, ulysses)
    pieces = [Pieces.of(layout, rank) for rank in range(4)]
    assert [int(x.lengths.sum()) for x in pieces] == [8] * 4
    assert sum(len(x.gives) for x in pieces) == sum(len(x.receives) for x in pieces)
    assert sum(len(x.lengths) - len(x.receives) for x in pieces) == len(lengths)
    for x in pieces:
        receivers = [to for chain in x.chains for _, to in chain if to >= 0]
        assert sorted(receivers) == list(range(len(x.receives)))
        assert x.slots == max(len(x.gives) for x in pieces)


def test_documents_that_end_with_a_rank_need_no_messages():
    layout = cases.layout_of([8, 8, 3, 5, 8], 1, 4)
    assert [Pieces.of(layout, rank).slots for rank in range(4)] == [0] * 4
    assert np.concatenate([Pieces.of(layout, rank).lengths for rank in range(4)]).tolist() == [8, 8, 3, 5, 8]


def test_segments_of_kimi_delta_attention_equal_whole_documents(monkeypatch):
    """Outputs, states and gradients; the backward pass keeps no more than the segments' inputs and states."""
    monkeypatch.setattr("longctx.recurrent.gated_delta.SEGMENT", 5)
    lengths, inputs = [13, 1, 5, 21], cases.delta_inputs(40, of_channels=True)
    states = list(torch.randn(4, 8, 3, 2, dtype=torch.float64).split(1))
    rule = cases.recurrent_delta_rule

    def by_segments(*given):
        before = torch.cat(given[5:])
        return delta_rule(rule, given[:5], np.array(lengths), before, gives=True)

    def alone(*given):
        documents = zip(*(x.split(lengths, dim=1) for x in given[:5]), strict=True)
        results = [rule(*document, state, True) for document, state in zip(documents, given[5:], strict=True)]
        return torch.cat([out for out, _ in results], dim=1), torch.cat([state for _, state in results])

    def step(compute):
        given = [x.clone().requires_grad_() for x in (*inputs, *states)]
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            outputs = compute(*given)
        upstream = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x) for x in outputs]
        return [*(x.detach() for x in outputs), *torch.autograd.grad(outputs, given, upstream)], len(kept)

    (found, few), (wanted, many) = step(by_segments), step(alone)
    assert max(float((x - y).norm() / y.norm()) for x, y in zip(found, wanted, strict=True)) <= TOLERANCE
    assert few < many / 5


# ------------------------------------------------------------------------------------------------
# Models
# ------------------------------------------------------------------------------------------------


def either_way(by_heads: bool):
    """Spread recurrent layers by heads where the ranks can share them, or by states, whatever that costs."""
    return mock.patch("longctx.parallel.prefers_heads", return_value=by_heads)


def model_errors(given: list[tuple[str, str, bool]]) -> dict[str, dict[str, float]]:
    """Of each family, backend and way, against stock transformers."""
    found = {}
    for family, backend, by_heads in given:
        with either_way(by_heads):
            found[f"{family}, {backend}, by heads {by_heads}"] = sharded_step(family, dist.get_world_size(), backend)
    return found


BACKENDS = ("ulysses", "ring", "gather", "hybrid")
BOTH_WAYS = [
    *(("qwen3_next", "ring", True), ("qwen3_next", "ring", False), ("qwen3_5_text", "ulysses", False)),
    *(("kimi_linear", "gather", True), ("kimi_linear", "ring", False)),
]
KINDS = [
    next(name for name, (kind, _) in test_models.FAMILIES.items() if kind == each)
    for each in RECURRENT_MODELS
    if each in CONFIG_MAPPING
]
FAMILIES = [name for name in KINDS if name not in ("qwen3_next", "qwen3_5_text")]


@pytest.mark.parametrize(
    ("ranks", "given"),
    [
        pytest.param(2, BOTH_WAYS, id="2 ranks"),
        pytest.param(
            2,
            [(family, backend, False) for family in FAMILIES for backend in BACKENDS]
            + [("qwen3_5_text", backend, by_heads) for backend in BACKENDS for by_heads in (True, False)],
            id="2 ranks, all",
            marks=pytest.mark.long,
        ),
        pytest.param(
            4,
            [(family, backend, False) for family in KINDS for backend in BACKENDS],
            id="4 ranks",
            marks=pytest.mark.long,
        ),
    ],
)
def test_models_equal_stock_transformers(ranks, given):
    for found in run_ranks(ranks, f"{__name__}:model_errors", given):
        assert len(found) == len(given)
        wrong = {case: errors for case, errors in found.items() if not max(errors.values()) <= test_models.TOLERANCE}
        assert not wrong


def changed_documents(family: str, backend: str, by_heads: bool) -> dict[int, list[int]]:
    """{document of which one token is changed: documents whose logits are no longer the same, bit for bit}."""
    with either_way(by_heads):
        model, sequence = parallelize(make_model(family).eval(), dist.get_world_size(), sp_backend=backend)
    batch = make_batch()
    bounds = np.append(0, np.cumsum(test_models.LENGTHS))

    @torch.no_grad()
    def logits(input_ids):
        shard = sequence.shard(batch | {"input_ids": input_ids})
        return sequence.unshard(model(**shard.inputs).logits, shard.layout)[0]

    before, found = logits(batch["input_ids"]), {}
    for document, start in enumerate(bounds[:-1]):
        changed = batch["input_ids"].clone()
        changed[0, start] = 3 + (changed[0, start] - 2) % 60
        after = logits(changed)
        same = [torch.equal(before[a:b], after[a:b]) for a, b in pairwise(bounds)]
        found[document] = [i for i, is_same in enumerate(same) if not is_same]
    return found


@pytest.mark.parametrize(
    ("ranks", "family", "backend", "by_heads"),
    [
        (2, "qwen3_5_text", "ring", False),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [
                (2, "qwen3_5_text", "ring", True),
                (2, "falcon_h1", "ulysses", False),
                (4, "qwen3_5_text", "ring", False),
                (4, "bamba", "ring", False),
                (4, "nemotron_h, no experts", "hybrid", False),
                (2, "kimi_linear, no experts", "ulysses", True),
                (4, "kimi_linear, no experts", "ring", False),
                (4, "lfm2", "gather", False),
            ]
        ),
    ],
)
def test_a_token_changes_nothing_in_other_documents(ranks, family, backend, by_heads):
    """Whichever rank they share, and whichever states are gathered together.

    Kimi Linear and Nemotron-H have no experts here. Experts take the tokens of all documents in one product, whose
    rounding depends on how many there are, in models without recurrent layers too.
    """
    for found in run_ranks(ranks, f"{__name__}:changed_documents", family, backend, by_heads):
        assert found == {document: [document] for document in range(len(test_models.LENGTHS))}


def test_recurrent_layers_refuse_batches_that_were_not_cut():
    """Until the model is to be used as before."""
    model, _ = parallelize(make_model("qwen3_next"), 1)
    with pytest.raises(ValueError, match=r"Qwen3NextGatedDeltaNet was put in place .* needs batches cut by its second"):
        model(input_ids=make_batch()["input_ids"], use_cache=False)
    model.set_attn_implementation("sdpa")
    assert model(input_ids=make_batch()["input_ids"], use_cache=False).logits.isfinite().all()


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")  # its older name works everywhere
@pytest.mark.parametrize("family", ["lfm2", "lfm2_moe"])
def test_layers_that_take_named_keywords_alone(family, monkeypatch):
    """As LFM2's do before transformers 5.22, here with any release. Recomputation needs the keyword as well."""
    model, batch = make_model(family), make_batch()
    _, expected_loss, expected_gradients = stock_step(model)
    (layer,) = recurrent_layers(model)
    stock = type(layer).forward

    def forward(self, hidden_states, seq_idx=None):
        return stock(self, hidden_states)

    signature = inspect.signature(forward)
    functools.update_wrapper(forward, stock)
    forward.__signature__ = signature
    monkeypatch.setattr(type(layer), "forward", forward)

    def leave_out(_, args, kwargs):
        return args, {name: kwargs[name] for name in signature.parameters if name in kwargs}

    layer.register_forward_pre_hook(leave_out, with_kwargs=True)
    model, sequence = parallelize(model, 1)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    shard = sequence.shard(batch)
    logits = model(**shard.inputs).logits
    loss = sequence.loss(logits, shard.shift_labels, sequence.count_label_tokens([batch]))
    loss.backward()
    assert shard.context.calls == 2 * len(model.model.layers)  # each layer ran again in the backward pass
    assert float((loss.detach() / expected_loss - 1).abs()) <= test_models.TOLERANCE
    assert largest_error(gradients(model), expected_gradients) <= test_models.TOLERANCE
    with pytest.raises(ValueError, match=r"ShortConv was put in place .* needs batches cut by its second"):
        model(input_ids=batch["input_ids"], use_cache=False)
    model.set_attn_implementation("sdpa")
    assert model(input_ids=batch["input_ids"], use_cache=False).logits.isfinite().all()

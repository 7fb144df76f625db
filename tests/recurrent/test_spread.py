"""States and halos between ranks: operators in fp64, models against stock transformers, and a leak probe of bits."""

from __future__ import annotations

import functools
import inspect
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
from tests.model import test_models
from tests.model.test_models import make_batch, make_model, sharded_step, step_errors, stock_step
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


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")  # its older name works everywhere
@pytest.mark.parametrize("family", ["lfm2", "lfm2_moe"])
def test_layers_that_take_named_keywords_alone(family, monkeypatch):
    """As LFM2's do before transformers 5.22, here with any release. Recomputation needs the keyword as well."""
    model = make_model(family)
    expected = stock_step(model)
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
    errors = step_errors(model, sequence, expected, recomputes=True)
    assert max(errors.values()) <= test_models.TOLERANCE, errors
    ids = make_batch()["input_ids"]
    with pytest.raises(ValueError, match=r"ShortConv was put in place .* needs batches cut by its second"):
        model(input_ids=ids, use_cache=False)
    model.set_attn_implementation("sdpa")
    assert model(input_ids=ids, use_cache=False).logits.isfinite().all()

"""The sequence-chunked step against attention and layers over all tokens at once.

What of it is on the device is in tests/forecast/test_memory_trace.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from longctx import parallelize
from longctx.attention.operator import varlen_attention
from longctx.layers.chunked.attention import HostAttention
from longctx.layers.chunked.copies import Copies
from longctx.layers.chunked.tiles import check_one_thread
from longctx.model.allow_list import RECURRENT_MODELS
from longctx.model.tiny import tiny_model
from longctx.sequence.batch import PLAIN, AttentionKind
from tests.few import few, together
from tests.model.test_models import FAMILIES, SHARED_KEYS, TOLERANCE, make_batch, make_model, step_errors, stock_step
from tests.workers import run_ranks

CU_SEQLENS = np.array([0, 7, 8, 30, 31, 33, 61, 64])
DEFAULT_FAMILIES = ("llama", "gpt_oss, sinks and windows", "olmo", "qwen3_moe")


@pytest.mark.parametrize("block", [1, 5, 16, 64, 100])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("kind", "has_sinks"),
    [
        (PLAIN, False),
        (AttentionKind(window=1), False),
        (AttentionKind(window=6), False),
        (AttentionKind(window=6), True),
        (PLAIN, True),
        (AttentionKind(softcap=0.5), False),
        (AttentionKind(chunk_size=9), True),
        (AttentionKind(window=6, softcap=0.5), True),
    ],
    ids=str,
)
def test_attention_in_blocks_equals_attention_at_once(block, groups, kind, has_sinks):
    """fp64 to 1e-12: sums over keys in another order, nothing else."""
    torch.manual_seed(0)
    q = torch.randn(1, 8, 64, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, 4, 64, 8, dtype=torch.float64, requires_grad=True) for _ in "kv")
    sinks = torch.randn(8, dtype=torch.float64, requires_grad=True) if has_sinks else None
    inputs = [q, k, v] if sinks is None else [q, k, v, sinks]
    expected = varlen_attention(q, k, v, CU_SEQLENS, 0.3, kind=kind, sinks=sinks)
    grad = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, inputs, grad)

    attention = HostAttention(CU_SEQLENS, block=block, kind=kind, scale=0.3, copies=Copies(torch.device("cpu")))
    q_host, kv_host = on_host(q, groups), torch.cat([on_host(x, groups) for x in (k, v)], dim=2)
    given_sinks = None if sinks is None else sinks.detach()
    out, lse = attention.forward(q_host, kv_host, given_sinks)
    torch.testing.assert_close(from_host(out), expected.detach(), rtol=1e-12, atol=1e-12)
    grad_sinks = attention.backward(on_host(grad, groups), q_host, kv_host, out, lse, given_sinks)
    actual = [from_host(x) for x in (q_host, *kv_host.chunk(2, dim=2))]
    for found, wanted in zip(actual, expected_grads[:3], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    if has_sinks:
        torch.testing.assert_close(grad_sinks, expected_grads[3], rtol=1e-12, atol=1e-12)


def on_host(x, groups):
    """[1, G·h, S, D] -> [G, S, h, D]"""
    return x.detach()[0].unflatten(0, (groups, -1)).transpose(1, 2).contiguous()


def from_host(x):
    """[G, S, h, D] -> [1, G·h, S, D]"""
    return x.transpose(1, 2).flatten(0, 1)[None]


ON_DEVICE = 1
"""Keep attention's output in this many layers, the last ones, on the device."""


def chunked_errors(
    family: str, sp: int, size: int, keep_attention: bool | int, backend: str = "auto"
) -> dict[str, float]:
    """Relative errors of logits, loss and gradients against stock transformers, one document at a time."""
    model = make_model(family)
    expected = stock_step(model)
    model, sequence = parallelize(
        model,
        sp,
        sp_backend=backend,
        sequence_chunk_size=size,
        selective_checkpointing=keep_attention,
        offloaded_layers=0 if keep_attention is ON_DEVICE else None,
    )
    return step_errors(model, sequence, expected)


def splittable() -> list[str]:
    refused = (*RECURRENT_MODELS, "gemma4_text", "gemma4_unified_text")
    return [name for name, (model_type, _) in FAMILIES.items() if model_type not in refused]


@pytest.mark.parametrize("keep_attention", [False, True, ON_DEVICE])
@pytest.mark.parametrize("size", [5, 100])
@pytest.mark.parametrize("family", few(splittable(), DEFAULT_FAMILIES))
def test_every_family_in_chunks_equals_stock_transformers(family, size, keep_attention):
    errors = chunked_errors(family, 1, size, keep_attention)
    assert max(errors.values()) <= TOLERANCE, errors


KEEPING = ((3, False), (100, True), (5, ON_DEVICE))
"""Tokens of a chunk, and whether or in how many layers attention's output is kept."""


def families_on_ranks(families: tuple[str, ...], backends: tuple[str, ...]) -> dict[tuple, dict[str, float]]:
    return {
        (backend, family, size, keep): chunked_errors(family, dist.get_world_size(), size, keep, backend)
        for backend in backends
        for family in families
        for size, keep in KEEPING
    }


@pytest.mark.parametrize("families", together(splittable(), DEFAULT_FAMILIES))
def test_two_ulysses_ranks_in_chunks_equal_stock_transformers(families):
    check_families(2, families, ("ulysses",))


@pytest.mark.parametrize(
    ("ranks", "families", "backends"),
    [
        (2, ("gpt_oss, sinks and windows",), ("ring", "gather")),
        pytest.param(2, tuple(splittable()), ("ring", "gather"), marks=pytest.mark.long),
        pytest.param(4, tuple(splittable()), ("ring", "gather", "hybrid"), marks=pytest.mark.long),
        pytest.param(4, ("gpt_oss, sinks and windows",), ("hybrid",)),
    ],
)
def test_rings_in_chunks_equal_stock_transformers(ranks, families, backends):
    check_families(ranks, families, backends)


def check_families(ranks, families, backends):
    for results in run_ranks(ranks, f"{__name__}:families_on_ranks", families, backends, timeout=1800):
        wrong = {case: errors for case, errors in results.items() if not max(errors.values()) <= TOLERANCE}
        assert not wrong
        assert len(results) == len(KEEPING) * len(families) * len(backends)


def test_chunks_of_no_tokens_are_refused():
    with pytest.raises(ValueError, match=r"sequence_chunk_size 0 is below 1\. Use a few thousand"):
        parallelize(tiny_model(), 1, sequence_chunk_size=0)


def test_leaf_modules_of_zero3_find_their_gradients_behind_frozen_embeddings():
    """DeepSpeed reduces a layer's gradients in such a hook, and takes those that are not there for zeros."""
    model, sequence = parallelize(tiny_model(), 1, sequence_chunk_size=8)
    model.model.embed_tokens.requires_grad_(False)
    found = []
    for layer in model.model.layers:
        layer.register_full_backward_hook(
            lambda module, *_: found.append(all(p.grad is not None for p in module.parameters()))
        )
    shard = sequence.shard(make_batch())
    outputs = model(**shard.inputs, shift_labels=shard.shift_labels, token_outputs=True)
    outputs.losses.sum().backward()
    assert found == [True] * len(model.model.layers)


def test_a_backward_pass_in_several_threads_is_refused():
    """Of a GPU; tests/gpu/test_soft_training.py has the passes themselves."""
    with torch.autograd.set_multithreading_enabled(True):
        check_one_thread(torch.device("cpu"))
        with pytest.raises(ValueError, match="sequence_chunk_size: this backward pass runs in several threads"):
            check_one_thread(torch.device("cuda"))
    with torch.autograd.set_multithreading_enabled(False):
        check_one_thread(torch.device("cuda"))


@pytest.mark.parametrize(
    ("family", "words"), [("qwen3_next", "carry a state through all tokens"), (SHARED_KEYS, "share keys and values")]
)
def test_layers_that_need_more_than_a_chunk_are_refused(family, words):
    with pytest.raises(ValueError, match=words):
        parallelize(make_model(family), 1, sequence_chunk_size=8)


def test_a_layer_that_is_given_an_unknown_tensor_is_refused():
    model, sequence = parallelize(tiny_model(), 1, sequence_chunk_size=8)
    layer = model.model.layers[0]
    shard = sequence.shard(make_batch())
    with pytest.raises(ValueError, match=r"tensor bias of shape \(1, 32\)"):
        layer(torch.zeros(1, 32, model.config.hidden_size), bias=torch.zeros(1, 32), sequence=shard.context)

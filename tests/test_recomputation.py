"""What the backward pass computes again is what the forward pass computed: precision, order, scale."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import longctx
from longctx.attention.interface import longctx_attention
from longctx.attention.operator import selective_checkpoint_contexts, varlen_attention
from longctx.tiny import tiny_model
from tests.test_borders import a_context
from tests.test_chunked import chunked_errors
from tests.test_models import TOLERANCE
from tests.test_parallel import packed_batch

LEVERS = {
    "MLPs in tiles": {"tiled_mlp_num_shards": 7},
    "chunks": {"sequence_chunk_size": 130},
    "chunks, attention kept": {"sequence_chunk_size": 130, "selective_checkpointing": True},
}


def gradient_of_embeddings(*, autocast, **levers):
    """[1, S, h], of one step of tiny: fp32 weights, products in bf16 under autocast.

    Each token's own, unlike those of weights, whose sums over tokens tiles round in another order.
    """
    model, sequence = longctx.parallelize(tiny_model(), sp=1, **levers)
    found = []
    embeddings = model.get_input_embeddings()
    embeddings.register_forward_hook(lambda module, args, out: out.register_hook(found.append) and None)
    batch = packed_batch(8)
    shard = sequence.shard(batch)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = model(**shard.inputs, shift_labels=shard.shift_labels, token_outputs=True)
    sequence.reduce(outputs.losses, sequence.count_label_tokens([batch])).backward()
    return found[0]


@pytest.fixture(scope="module")
def plain():
    """With nothing computed again, in fp32 and under autocast."""
    return gradient_of_embeddings(autocast=False), gradient_of_embeddings(autocast=True)


@pytest.mark.parametrize("lever", LEVERS)
def test_autocast_is_the_same_in_both_passes(lever, plain):
    """The error that autocast makes is made again in the backward pass, not another one."""
    exact, expected = plain
    actual = gradient_of_embeddings(autocast=True, **LEVERS[lever])
    print(lever, float((actual - expected).norm() / (expected - exact).norm()))
    assert float((actual - expected).norm()) <= 0.3 * float((expected - exact).norm())


def test_queries_that_norms_left_in_fp32_are_attended_in_autocasts_dtype():
    q, k, v = torch.randn(3, 1, 2, 30, 8, generator=torch.Generator().manual_seed(0))
    module = SimpleNamespace(is_causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = longctx_attention(module, q, k.bfloat16(), v.bfloat16(), None, sequence=a_context(30))
    expected = varlen_attention(*(x.bfloat16() for x in (q, k, v)), np.array([0, 30]))
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected.transpose(1, 2))


def test_a_checkpointed_layer_may_attend_twice():
    """Saved outputs are used in the order in which they were made."""
    bounds = np.array([0, 5, 12])

    def layer(x):
        first = varlen_attention(x, x, x, bounds)
        return first * varlen_attention(2 * x, x, first, bounds)

    x = torch.randn(1, 2, 12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    grads = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False, context_fn=selective_checkpoint_contexts)):
        leaf = x.clone().requires_grad_()
        run(leaf).square().sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", ["granite", "gemma3_text, windows"])
def test_chunks_of_models_that_scale_scores_in_their_own_way(family):
    errors = chunked_errors(family, 1, 5, False)
    assert max(errors.values()) <= TOLERANCE, errors

"""What the backward pass computes again is what the forward pass computed: precision, order, scale."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import longctx
from longctx.attention.interface import longctx_attention
from longctx.attention.operator import selective_checkpoint_contexts, varlen_attention
from longctx.model.tiny import tiny_model
from tests.attention.test_borders import a_context
from tests.layers.test_chunked import chunked_errors
from tests.model.test_models import TOLERANCE
from tests.test_parallel import packed_batch

MEMORY_OPTIONS = {
    "MLPs in tiles": {"tiled_mlp_num_shards": 7},
    "chunks": {"sequence_chunk_size": 50},
    "chunks, attention kept": {"sequence_chunk_size": 50, "selective_checkpointing": True},
}


class _Products(TorchDispatchMode):
    """The dtypes of all matrix products but outer ones, which RoPE's angles are, in fp32 whatever autocast says."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._opname in ("mm", "addmm", "bmm"):
            *_, a, b = (x for x in args if isinstance(x, torch.Tensor))
            if a.shape[-1] > 1:
                self.dtypes |= {a.dtype, b.dtype}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("memory_option", MEMORY_OPTIONS)
def test_autocast_is_the_same_in_both_passes(memory_option):
    """Weights are fp32; every product of the backward pass, which has no autocast itself, is in bf16."""
    model, sequence = longctx.parallelize(tiny_model(), sp=1, **MEMORY_OPTIONS[memory_option])
    batch = packed_batch(8)
    shard = sequence.shard(batch)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(**shard.inputs, shift_labels=shard.shift_labels, token_outputs=True)
    loss = sequence.reduce(outputs.losses, sequence.count_label_tokens([batch]))
    with _Products() as products:
        loss.backward()
    assert products.dtypes == {torch.bfloat16}


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

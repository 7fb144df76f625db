"""Scores of ±10,000: no exponential overflows, and nothing that counts is rounded to nothing.

Queries and keys are whole numbers, so that scores are exact in fp32 and all that can be lost is lost in the softmax.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from longctx.attention.kernels import CpuFlashKernel, DenseKernel
from longctx.attention.kernels.check import make_entries
from longctx.attention.operator import varlen_attention
from longctx.layers.loss import fused_token_outputs
from tests.attention.test_attention import dense_attention
from tests.attention.test_rounding import host_attention
from tests.layers.test_loss import dense

LENGTHS = [20, 1, 11]
TOLERANCE = 0.03
"""fp32 numbers near 10,000, such as these log-sum-exps, are 1e-3 apart: weights are as much off, and gradients, which
queries of up to 100 multiply, twenty times. A term that overflows or vanishes is off by 1 or is not finite."""
CU_SEQLENS = np.cumsum([0, *LENGTHS])
SCALES = {"around 0": 0, "far above 0": 10_000, "far below 0": -10_000}


def whole_numbers(offset, *, heads=(4, 2), size=4):
    """q, k, v, and an output gradient [heads, T, D]: scores are spread over thousands, around the offset."""
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    q = torch.randint(-30, 31, (heads[0], total, size), generator=generator).double()
    k = torch.randint(-30, 31, (heads[1], total, size), generator=generator).double()
    q[..., 0], k[..., 0] = 100, offset / 100 * 2  # 1/sqrt(4) scales
    v, grad = (torch.randn(n, total, size, generator=generator, dtype=torch.float64) for n in (heads[1], heads[0]))
    return q, k, v, grad


def reference(tensors, sinks=None):
    """out, and the gradients of q, k, v and the sinks, in fp64."""
    leaves = [x.clone().requires_grad_() for x in (*tensors[:3], *([] if sinks is None else [sinks]))]
    out = dense_attention(*leaves[:3], LENGTHS, sinks=None if sinks is None else leaves[3])
    return out.detach(), torch.autograd.grad(out, leaves, tensors[3])


def close(actual, expected):
    for found, wanted in zip(actual, expected, strict=True):
        scale = max(float(wanted.abs().max()), 1.0)
        torch.testing.assert_close(found.double() / scale, wanted / scale, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("kernel", [CpuFlashKernel(), DenseKernel()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("offset", SCALES)
def test_kernels(kernel, offset):
    tensors = whole_numbers(SCALES[offset])
    expected, expected_grads = reference(tensors)
    entries = make_entries([(n, n) for n in LENGTHS], True)
    q, k, v, grad = (x.float()[None] for x in tensors)
    out, lse = kernel.forward(q, k, v, entries, 0.5)
    assert torch.isfinite(lse).all()
    close([x[0] for x in (out, *kernel.backward(grad, q, k, v, out, lse, entries, 0.5))], [expected, *expected_grads])


@pytest.mark.parametrize("sink", [None, -10_000.0, 0.0, 10_000.0])
@pytest.mark.parametrize("offset", SCALES)
def test_attention_at_once_and_in_blocks(offset, sink):
    """With sinks that outweigh all scores, none, or some."""
    tensors = whole_numbers(SCALES[offset])
    sinks = None if sink is None else torch.tensor([sink, sink + 5, sink - 700, sink + 300], dtype=torch.float64)
    expected, expected_grads = reference(tensors, sinks)
    q, k, v, grad = (x.float()[None] for x in tensors)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    own_sinks = None if sinks is None else sinks.float().requires_grad_()
    out = varlen_attention(*leaves, CU_SEQLENS, sinks=own_sinks)
    out.backward(grad)
    grads = [x.grad[0] for x in leaves] + ([] if own_sinks is None else [own_sinks.grad])
    close([out.detach()[0], *grads], [expected, *expected_grads])
    given = None if own_sinks is None else own_sinks.detach()
    results, _, grad_sinks = host_attention(q, k, v, CU_SEQLENS, 4, grad, given)
    close([*(x[0] for x in results), *([] if given is None else [grad_sinks])], [expected, *expected_grads])


@pytest.mark.parametrize("offset", SCALES)
def test_loss(offset):
    """Losses, entropies and gradients from logits of whole numbers."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randint(-30, 31, (1, 12, 4), generator=generator).double()
    weight = torch.randint(-30, 31, (19, 4), generator=generator).double()
    hidden[..., 0], weight[:, 0] = 100, SCALES[offset] / 100
    targets = torch.randint(0, 19, (1, 12), generator=generator)
    results = []
    for run, dtype in ((dense, torch.float64), (fused_token_outputs, torch.float32)):
        leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
        outputs = run(*leaves, None, targets)
        grads = torch.autograd.grad(outputs.losses.sum(), leaves)
        results.append([outputs.losses.detach(), outputs.log_probs, outputs.entropy, *grads])
    close(results[1], results[0])

"""Local kernels against plain attention with a mask over all tokens, forward and backward."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from longctx.attention.kernels import CpuFlashKernel, DenseKernel, Entries, blockwise

KERNELS = {"cpu": CpuFlashKernel(), "dense": DenseKernel()}
HEADS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (4, 1)}
# Sums of some hundred terms in another order. The bounds users are promised.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}

DOCUMENTS = [(n, n) for n in (150, 1, 1, 700, 64, 5)]
# (queries, keys) of each entry. LED has more keys than queries, as shards have that hold the end of a document.
LED = [(40, 40), (1, 90), (30, 31), (600, 1100), (1, 1), (64, 700)]
CASES = {
    "documents": (DOCUMENTS, True, None),
    "window": (DOCUMENTS, True, 100),
    "window 1": (DOCUMENTS, True, 1),
    "window of the longest document": (DOCUMENTS, True, 700),
    "window over all": (DOCUMENTS, True, 10_000),
    "one-token documents, window": ([(1, 1)] * 20, True, 3),
    "led": (LED, True, None),
    "led, window": (LED, True, 70),
    "led, long window": (LED, True, 650),
    "led, window 1": (LED, True, 1),
    "full": ([(30, 7), (1, 90), (200, 1), (64, 64)], False, None),
}


def make_entries(sizes, causal, window):
    """Entries of (queries, keys) sizes one behind the other, and what each query sees, bool [queries, keys]."""
    ends = np.cumsum(sizes, axis=0)
    starts = ends - sizes
    ranges = np.stack((starts, ends), axis=1)
    visible = torch.zeros(*ends[-1], dtype=torch.bool)
    for (q_start, kv_start), (q_end, kv_end) in zip(starts, ends, strict=True):
        for q in range(q_start, q_end):
            own = kv_end - (q_end - q)
            stop = own + 1 if causal else kv_end
            visible[q, kv_start if window is None else max(kv_start, stop - window) : stop] = True
    return Entries(ranges[:, :, 0], ranges[:, :, 1], causal, window), visible


def make_inputs(sizes, heads, dtype, head_dim=16):
    """q, k, v and an output gradient, [1, heads, tokens, D]."""
    generator = torch.Generator().manual_seed(0)
    num_queries, num_keys = np.sum(sizes, axis=0)
    shapes = [(heads[0], num_queries), (heads[1], num_keys), (heads[1], num_keys), (heads[0], num_queries)]
    return [torch.randn(1, *shape, head_dim, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def masked_attention(q, k, v, visible, scale):
    """The reference, written on its own: one softmax over all keys, differentiable."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.transpose(2, 3) * scale).masked_fill(~visible, float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def relative_error(actual, expected):
    """Against the reference's norm; against that of ones, an input's, where it vanishes (dq of a single key)."""
    actual, expected = actual.detach().double(), expected.detach()
    return float((actual - expected).norm() / (expected.norm() or expected.numel() ** 0.5))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_equals_masked_attention(kernel, case, heads, dtype):
    sizes, causal, window = CASES[case]
    entries, visible = make_entries(sizes, causal, window)
    *inputs, grad = make_inputs(sizes, HEADS[heads], dtype)
    out, lse = KERNELS[kernel].forward(*inputs, entries, 0.3)
    grads = KERNELS[kernel].backward(grad, *inputs, out, lse, entries, 0.3)
    reference = [x.double().requires_grad_() for x in inputs]
    expected, expected_lse = masked_attention(*reference, visible, 0.3)
    expected.backward(grad.double())
    for actual, wanted in zip((out, lse, *grads), (expected, expected_lse, *(x.grad for x in reference)), strict=True):
        assert relative_error(actual, wanted) <= TOLERANCE[dtype]


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("kernel", KERNELS)
def test_backward_of_a_part_of_a_wider_softmax(kernel, window):
    """With the out and lse of attention to more keys, the gradients are those of the wider softmax."""
    entries, visible = make_entries(LED, True, window)
    *inputs, grad = make_inputs(LED, HEADS["GQA"], torch.float64)
    wider = [torch.cat((x, y[:, :, :50]), dim=2) for x, y in zip(inputs[1:], inputs[:0:-1], strict=True)]
    reference = [x.clone().requires_grad_() for x in (inputs[0], *wider)]
    more = torch.cat((visible, torch.ones(len(visible), 50, dtype=torch.bool)), dim=1)
    out, lse = masked_attention(*reference, more, 0.3)
    out.backward(grad)
    full, _ = make_entries([(len(visible), 50)], False, None)
    added = [x[:, :, -50:] for x in wider]
    part = KERNELS[kernel].backward(grad, *inputs, out.detach(), lse.detach(), entries, 0.3)
    rest = KERNELS[kernel].backward(grad, inputs[0], *added, out.detach(), lse.detach(), full, 0.3)
    actual = [part[0] + rest[0], *(torch.cat(pair, dim=2) for pair in zip(part[1:], rest[1:], strict=True))]
    for got, wanted in zip(actual, (x.grad for x in reference), strict=True):
        assert relative_error(got, wanted) <= 1e-12


def test_bfloat16_sums_blocks_in_fp32(monkeypatch):
    """Gradients of keys that many blocks of queries share are as good as those of one call with all queries."""
    sizes = [(4096, 4096)]
    *inputs, grad = make_inputs(sizes, (1, 1), torch.bfloat16)
    entries, visible = make_entries(sizes, True, 3000)
    reference = [x.double().requires_grad_() for x in inputs]
    masked_attention(*reference, visible, 0.3)[0].backward(grad.double())
    errors = []
    for block in (blockwise.MAX_QUERY_BLOCK, 4096):
        monkeypatch.setattr(blockwise, "MAX_QUERY_BLOCK", block)
        out, lse = CpuFlashKernel().forward(*inputs, entries, 0.3)
        grads = CpuFlashKernel().backward(grad, *inputs, out, lse, entries, 0.3)
        errors.append([relative_error(actual, x.grad) for actual, x in zip(grads, reference, strict=True)])
    assert all(blocks <= 1.05 * one for blocks, one in zip(*errors, strict=True)), errors


@pytest.mark.parametrize(("causal", "window"), [(True, 0), (True, -1), (False, 4)])
def test_impossible_windows_are_refused(causal, window):
    ranges = np.array([[0, 4]])
    with pytest.raises(ValueError, match=f"window of {window}"):
        Entries(ranges, ranges, causal, window)

"""Local kernels against plain attention with a mask over all tokens, forward and backward."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from longctx.attention.kernels import (
    CappedDenseKernel,
    CpuFlashKernel,
    DenseKernel,
    Entries,
    block_backward,
    block_forward,
    blockwise,
    choose_kernel,
)
from longctx.attention.kernels.check import make_entries, make_inputs, why_not_exact
from longctx.attention.kernels.entries import Inputs, upload
from tests.attention.test_attention import TOLERANCE, masked_attention, relative_error

HEADS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (4, 1)}

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
SOFTCAP = 0.8
"""It changes most scores of these cases, whose standard deviation is 1.2."""


def visible_pairs(sizes, causal, window):
    """What each query sees of entries of (queries, keys) sizes, bool [queries, keys]."""
    ends = np.cumsum(sizes, axis=0)
    visible = torch.zeros(*ends[-1], dtype=torch.bool)
    for (num_queries, num_keys), (q_end, kv_end) in zip(sizes, ends, strict=True):
        for i in range(num_queries):
            stop = kv_end - num_queries + i + 1 if causal else kv_end
            visible[q_end - num_queries + i, max(kv_end - num_keys, stop - (window or stop)) : stop] = True
    return visible


class SmallCallsKernel(CappedDenseKernel):
    """With fewer queries in a call than most entries of CASES have."""

    name = "dense, small calls"
    max_scores = 4 * 700 * 20


def is_covering(case, heads):
    """Whether a plain pytest runs it: all cases with GQA, other heads with one case of each set of sizes."""
    return heads == "GQA" or case in ("window", "led, window", "full")


@pytest.mark.parametrize(
    ("case", "heads"),
    [
        pytest.param(case, heads, marks=[pytest.mark.long] * (not is_covering(case, heads)))
        for case, heads in itertools.product(CASES, HEADS)
    ],
)
@pytest.mark.parametrize("softcap", [None, SOFTCAP])
def test_kernels_equal_masked_attention(case, heads, softcap):
    sizes, _, _ = CASES[case]
    entries, visible = make_entries(*CASES[case], softcap), visible_pairs(*CASES[case])
    reference = [x.requires_grad_() for x in make_inputs(sizes, HEADS[heads], 16, torch.float64)]
    expected, expected_lse = masked_attention(*reference[:3], visible, 0.3, softcap)
    expected.backward(reference[3].detach())
    wanted = (expected, expected_lse, *(x.grad for x in reference[:3]))
    kernels = [
        kernel for kernel in (CpuFlashKernel(), DenseKernel(), SmallCallsKernel()) if kernel.caps_scores or not softcap
    ]
    assert len(kernels) > 1
    for kernel, (dtype, tolerance) in itertools.product(kernels, TOLERANCE.items()):
        *inputs, grad = make_inputs(sizes, HEADS[heads], 16, dtype)
        out, lse = kernel.forward(*inputs, entries, 0.3)
        actual = (out, lse, *kernel.backward(grad, *inputs, out, lse, entries, 0.3))
        errors = [relative_error(a, w) for a, w in zip(actual, wanted, strict=True)]
        assert max(errors) <= tolerance, (kernel.name, dtype, errors)


def test_bfloat16_sums_blocks_in_fp32(monkeypatch):
    """Gradients of keys that 48 blocks of queries share are as good as those of one call with all queries."""
    sizes = [(4096, 4096)]
    *inputs, grad = make_inputs(sizes, (1, 1), 16, torch.bfloat16)
    entries, visible = make_entries(sizes, True, 3000), visible_pairs(sizes, True, 3000)
    reference = [x.double().requires_grad_() for x in inputs]
    masked_attention(*reference, visible, 0.3)[0].backward(grad.double())
    errors = []
    for block in (64, 4096):
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


def test_autocast_leaves_the_dense_kernel_alone():
    """It would make the scores bf16, an error of 1e-2."""
    *inputs, grad = make_inputs(DOCUMENTS, HEADS["GQA"], 16, torch.float32)
    entries = make_entries(DOCUMENTS, True)
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out, lse = DenseKernel().forward(*inputs, entries, 0.3)
            results.append([out, lse, *DenseKernel().backward(grad, *inputs, out, lse, entries, 0.3)])
    assert all(torch.equal(plain, autocast) for plain, autocast in zip(*results, strict=True))


def test_rows_go_to_a_device_once(monkeypatch):
    """However many layers use them; contiguous ones do not go at all."""
    uploads = []
    counting = lambda x, device: (uploads.append(len(x)), upload(x, device))[1]  # noqa: E731
    monkeypatch.setattr("longctx.attention.kernels.entries.upload", counting)
    entries = Entries(np.array([[0, 3], [5, 9]]), np.array([[2, 9], [0, 2]]), causal=False)
    q, k, v, grad = (torch.randn(1, 2, 9, 8) for _ in range(4))
    for _ in range(3):
        out, lse = block_forward(q, k, v, entries, 0.3)
        block_backward(grad, q, k, v, torch.zeros_like(q), torch.zeros(1, 2, 9), entries, 0.3)
    assert sorted(uploads) == [7, 9]
    expected, expected_lse = choose_kernel(Inputs(q.device, q.dtype, 8)).forward(
        q[:, :, [0, 1, 2, 5, 6, 7, 8]], k[:, :, [*range(2, 9), 0, 1]], v[:, :, [*range(2, 9), 0, 1]], entries, 0.3
    )
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    uploads.clear()
    block_forward(q, k, v, Entries.of_documents(np.array([0, 4, 9])), 0.3)
    assert not uploads


def test_boundaries_for_varlen_kernels():
    entries = Entries(np.array([[0, 3], [5, 6]]), np.array([[2, 9], [0, 2]]), causal=True, window=4)
    varlen = entries.varlen(torch.device("cpu"))
    assert varlen is entries.varlen(torch.device("cpu"))
    assert (varlen.cu_seqlens_q.tolist(), varlen.cu_seqlens_k.tolist()) == ([0, 3, 4], [0, 7, 9])
    assert (varlen.max_seqlen_q, varlen.max_seqlen_k, varlen.causal) == (3, 7, True)
    assert (varlen.window_size_left, varlen.window_size_right) == (3, 0)


def test_an_error_that_is_no_number_is_none_of_an_exact_kernel():
    errors = [(1e-9, 1e-5), (float("nan"), 1e-5)]
    assert why_not_exact(torch.float32, lambda: errors[:1]) is None
    assert (
        why_not_exact(torch.float32, lambda: errors) == "is off by nan on this machine in float32, and 1e-05 is allowed"
    )

"""Branches that only tensors on a GPU take, with stand-ins for the operators that are not on this machine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from longctx import regions
from longctx.attention.kernels import DenseKernel, block_backward, choose
from longctx.attention.kernels.check import make_entries, make_inputs
from longctx.attention.kernels.entries import Entries
from longctx.attention.kernels.varlen import AtenFlashKernel
from longctx.layers.chunked.copies import synchronize
from longctx.layers.loss import _add_product
from longctx.recurrent import gated_delta
from tests.attention.test_attention import relative_error
from tests.attention.test_kernel_choice import aten_on_cpu  # noqa: F401

BOUND = 1.6e-2
"""The error that `longctx.attention.kernels.check` allows in bf16."""


@pytest.mark.usefixtures("aten_on_cpu")
@pytest.mark.parametrize("window", [None, 30])
def test_the_varlen_kernel_takes_the_scale_that_it_is_given(window):
    """Forward and backward: the check of kernels has one scale, 1/sqrt(D)."""
    sizes = [(130, 130), (1, 1), (70, 70)]
    entries = make_entries(sizes, True, window)
    *inputs, grad = make_inputs(sizes, (4, 2), 64, torch.bfloat16)
    kernel, exact = AtenFlashKernel(), [x.double() for x in inputs]
    out, lse = kernel.forward(*inputs, entries, 0.05)
    expected = DenseKernel().forward(*exact, entries, 0.05)
    grads = kernel.backward(grad, *inputs, out, lse, entries, 0.05)
    expected_grads = DenseKernel().backward(grad.double(), *exact, *expected, entries, 0.05)
    for actual, wanted in zip((out, lse, *grads), (*expected, *expected_grads), strict=True):
        assert relative_error(actual, wanted) <= BOUND


@pytest.mark.usefixtures("aten_on_cpu")
def test_the_varlen_kernel_goes_backward_through_a_part_of_the_queries(monkeypatch):
    """As a ring's hop does: out and log-sum-exp are those of all queries, of which the entries are a middle part."""
    monkeypatch.setattr(choose, "choose_kernel", lambda *_: AtenFlashKernel())
    q_ranges, kv_ranges = np.array([[40, 90]]), np.array([[10, 70]])
    entries = Entries(q_ranges, kv_ranges, causal=False)
    *inputs, grad = make_inputs([(130, 130)], (4, 2), 64, torch.bfloat16)
    out, lse = (0.5 * inputs[0].float()).to(torch.bfloat16), torch.full((1, 4, 130), 6.0) + torch.arange(130) / 100
    grads = block_backward(grad, *inputs, out, lse, entries, 0.1)
    exact = [x.double() for x in (grad, *inputs, out, lse)]
    monkeypatch.setattr(choose, "choose_kernel", lambda *_: DenseKernel())
    expected = block_backward(*exact, entries, 0.1)
    assert max(relative_error(actual, wanted) for actual, wanted in zip(grads, expected, strict=True)) <= BOUND


class OnCuda(torch.Tensor):
    """A tensor that says that it is on a GPU, whose matrix product has an `out_dtype` as cuBLAS does."""

    is_cuda = True

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in (torch.addmm, torch.mm):
            *total, a, b = (x.as_subclass(torch.Tensor) for x in args)
            assert a.dtype == b.dtype == torch.bfloat16
            wide = kwargs.pop("out_dtype")
            out = kwargs.pop("out").as_subclass(torch.Tensor)
            assert not kwargs
            return out.copy_(sum(total, torch.zeros((), dtype=wide)) + a.to(wide) @ b.to(wide))
        return super().__torch_function__(function, types, args, kwargs)


def test_products_of_the_head_are_added_in_fp32_on_a_gpu():
    """Over 64 tiles: the bf16 number nearest to the sum in fp64, but for sums at the middle of two."""
    a, b = (torch.randn(64, *shape, generator=torch.Generator().manual_seed(0)) for shape in ((37, 5), (5, 24)))
    a, b = a.bfloat16(), b.bfloat16()
    total = torch.zeros(37, 24).as_subclass(OnCuda)
    for left, right in zip(a, b, strict=True):
        _add_product(total, left.as_subclass(OnCuda), right.as_subclass(OnCuda))
    expected = torch.einsum("nij,njk->ik", a.double(), b.double())
    torch.testing.assert_close(total.as_subclass(torch.Tensor).double(), expected, rtol=1e-5, atol=1e-5)


def test_the_delta_rules_kernel_is_told_where_documents_begin():
    """It then runs once over all of them, as transformers calls flash-linear-attention."""
    calls = []

    def rule(q, k, v, g, beta, **kwargs):
        calls.append((q.shape[1], kwargs))
        return v, None

    inputs = [torch.randn(1, 9, 2, 4) for _ in range(5)]
    assert gated_delta._in_one_call(rule, inputs, np.array([4, 1, 4]))[0] is inputs[2]
    [(length, keywords)] = calls
    assert length == 9
    assert keywords["cu_seqlens"].tolist() == [0, 4, 5, 9]


def test_copies_to_the_host_are_waited_for_on_a_gpu(monkeypatch):
    waited = []

    class Stream:
        def synchronize(self):
            waited.append(self)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    synchronize(torch.device("cpu"))
    assert not waited
    synchronize(torch.device("cuda"))
    assert len(waited) == 1


class Event:
    """A CUDA event on a device that takes as long as the test says, in milliseconds."""

    now = 0.0

    def record(self):
        self.at = Event.now

    def query(self):
        return True

    def elapsed_time(self, other):
        return other.at - self.at


def a_clock(monkeypatch):
    clock = regions.Clock()
    monkeypatch.setattr(clock, "_event", Event)
    Event.now = 0.0
    clock.start(torch.device("cuda"))
    return clock


def test_parts_of_a_step_on_a_gpu_are_seconds(monkeypatch):
    clock = a_clock(monkeypatch)
    Event.now += 500
    assert clock.switch("attention") == "rest"
    Event.now += 2000
    clock.switch("rest")
    Event.now += 250
    assert clock.read() == {"data": 0, "attention": 2.0, "communication": 0, "saving": 0, "rest": 0.75}


def test_what_is_paused_is_in_no_part_of_a_step(monkeypatch):
    clock = a_clock(monkeypatch)
    Event.now += 500
    with clock.paused():
        clock.switch("attention")
        Event.now += 3000
    Event.now += 100
    assert clock.read() == {"data": 0, "attention": 0, "communication": 0, "saving": 0, "rest": 0.6}

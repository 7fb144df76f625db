"""A backend that longctx does not have: every rank gathers all keys and values and attends to them with a dense mask.

It is what a stranger would write first: one record, registered in one line, and nothing else of longctx knows it.
"""

from __future__ import annotations

import io
import sys
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from longctx.attention.backends import BACKENDS
from longctx.attention.cost import Arrangement
from longctx.ring.backend import RING


class _GatherTokens(torch.autograd.Function):
    """[1, K, T/P, D] of each of P ranks -> [1, K, T, D] on all of them."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx, grad: Tensor):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), dim=2)[ctx.group.rank()], None


def _attention_of(layout, groups, kind, heads_k_stride=None, overlap_exchange=False):
    order = layout.plan.permutation
    document = np.searchsorted(layout.cu_seqlens, order, side="right")
    own = np.split(np.arange(len(order)), groups.ring.size())[groups.ring.rank()]
    back = order[own][:, None] - order[None]
    allowed = (document[own][:, None] == document[None]) & (back >= 0)
    assert kind.softcap is kind.chunk_size is None, "the toy has windows alone"
    if kind.window is not None:
        allowed &= back < kind.window
    mask = torch.from_numpy(allowed)

    def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, sinks: Tensor | None = None) -> Tensor:
        assert sinks is None, "the toy has no attention sinks"
        k, v = (_GatherTokens.apply(x, groups.ring) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)

    return attend


def _toys(sp):
    return [Arrangement(name="toy", ring=sp, ulysses=1)]


TOY = replace(
    RING,
    name="toy",
    attention=_attention_of,
    schedule=None,
    arrangements=_toys,
    arrange=lambda setup, ring_size: _toys(setup.sp)[0],
    held=lambda kv: (2 * kv.element_size * kv.elements * kv.ring, 2 * kv.element_size * kv.elements * kv.ring),
    engine="deepspeed",  # by default, as no other ring
    keeps_output=False,
    has_stages=False,
    has_branches=False,
    accelerate_degree=None,
    color="#F0E442",
    marker="*",
)


def train(cases):
    """On each rank: what `tests.training.test_training.run_cases` returns, with the toy registered."""
    BACKENDS.register(TOY)
    from tests.training.test_training import run_cases

    return run_cases(cases)


def verify(arguments):
    """On each rank: the exit code of `longctx verify`, with the toy registered, and what it prints."""
    BACKENDS.register(TOY)
    from longctx.verify.__main__ import main

    sys.__stdout__ = printed = io.StringIO()  # type: ignore[misc]  # where the result goes
    return main(arguments), printed.getvalue()

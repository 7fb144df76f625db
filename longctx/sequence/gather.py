"""A differentiable gather and sum over a sequence group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from longctx.regions import region


def gather(tokens: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather [n, ...] of each of P ranks to [P, n, ...] on all of them. A gradient is the sum of those of all ranks."""
    return _Gather.apply(group, tokens)[0]


def gather_beside(tokens: Tensor, group: dist.ProcessGroup, anchors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Gather as `gather` does where not every rank reads the result, or has anything to give.

    In the backward pass all ranks have to sum gradients together. Autograd calls the sum on a rank only if the loss
    depends on the result there. So tensors that every rank uses afterwards pass through, unchanged.

    Args:
        anchors: the tensors that `tokens` is made of. They are differentiable on all ranks or on none.

    Returns:
        The gathered tensor, and the anchors, to use in their place.
    """
    gathered, *passed = _Gather.apply(group, tokens, *anchors)
    return gathered, passed


def all_reduce(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of the tensors of all ranks, on all of them. A gradient is the sum of those of all ranks."""
    return _AllReduce.apply(values, group)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = values.clone(memory_format=torch.contiguous_format)
        with region("communication"):
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _AllReduce.apply(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group: dist.ProcessGroup, tokens: Tensor, *anchors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        shards = [torch.empty_like(tokens, memory_format=torch.contiguous_format) for _ in range(group.size())]
        with region("exchange", "communication"):
            dist.all_gather(shards, tokens.contiguous(), group=group)
        return torch.stack(shards), *(anchor.view_as(anchor) for anchor in anchors)

    @staticmethod
    def backward(ctx, grad: Tensor, *of_anchors: Tensor):
        mine = torch.empty_like(grad[0], memory_format=torch.contiguous_format)
        with region("exchange", "communication"):
            dist.reduce_scatter_tensor(mine, grad.flatten(0, 1).contiguous(), group=ctx.group)
        return None, mine, *of_anchors

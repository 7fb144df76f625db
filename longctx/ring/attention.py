"""Ring attention over packed documents (Ring Attention, arXiv 2310.01889; the plan is in `longctx.ring.plan`).

Every rank keeps its queries. Keys and values travel to the next rank, hop by hop, while the block of the hop
before is computed; backwards they travel again, and each block's key/value gradients follow one step behind.
K and V travel as one buffer with tokens first, [S, 2, K, D], so that the prefix others need is contiguous.

Shape legend: P ranks, S tokens a rank, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from longctx.attention.kernels import Entries, add, block_backward, block_forward, put, take
from longctx.ring.plan import RingPlan
from longctx.ring.transport import TRANSPORTS, Transport


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: RingPlan,
    group: dist.ProcessGroup,
    scale: float | None = None,
    *,
    transport: str = "p2p",
) -> Tensor:
    """Causal attention within each document, over tokens cut as `plan` says.

    Args:
        q: [1, H, T/P, D], this rank's tokens in the plan's order.
        k, v: [1, K, T/P, D], H a multiple of K.
        plan: of the whole row of T tokens, the same on every rank of `group`.
        scale: of the scores before the softmax; 1/sqrt(D) where None.
        transport: "p2p" passes keys and values on from rank to rank; "gather" collects all that travel at once,
            which takes more memory and fewer messages.

    Returns:
        [1, H, T/P, D] of q's dtype. Sums over blocks are kept in fp32 or wider, forward and backward.

    Raises:
        ValueError: if plan, tensors and group do not fit each other, or the transport is unknown.
    """
    _check(q, k, v, plan, group)
    if transport not in TRANSPORTS:
        raise ValueError(f"transport {transport!r} is unknown, use one of {', '.join(TRANSPORTS)}")
    context = _Context(group, plan, TRANSPORTS[transport], q.shape[-1] ** -0.5 if scale is None else scale)
    return _RingAttention.apply(q, k, v, context)


class _Context:
    """What forward and backward share besides tensors."""

    def __init__(self, group: dist.ProcessGroup, plan: RingPlan, transport: type[Transport], scale: float):
        self.shard = plan.shard(dist.get_rank(group))
        self.causal = Entries.of_documents(self.shard.cu_seqlens)
        self.scale = scale
        prefixes = np.append(plan.prefix_tokens, np.zeros((plan.world_size, 1), np.int64), axis=1)
        self.send = partial(transport, group, self.shard.rank, prefixes)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, context: _Context) -> Tensor:
        transport = context.send(_fuse(k, v))
        out, lse = block_forward(q, k, v, context.causal, context.scale)
        out = out.to(lse.dtype)
        for step in context.shard.steps:
            received = transport.receive(step)
            if len(step.entries):
                entries = _entries(step.entries)
                block = block_forward(q, *_split(received), entries, context.scale)
                _merge(out, lse, entries.q_rows, *block)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.context = context
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        context: _Context = ctx.context
        transport = context.send(_fuse(k, v))
        own = block_backward(grad_out, q, k, v, out, lse, context.causal, context.scale)
        dq, dk, dv = (grad.to(lse.dtype) for grad in own)
        transport.collect_gradients(_fuse(dk, dv))
        for step in context.shard.steps:
            received = transport.receive(step)
            grad_kv = torch.zeros_like(received, dtype=lse.dtype)
            if len(step.entries):
                entries = _entries(step.entries)
                grads = block_backward(grad_out, q, *_split(received), out, lse, entries, context.scale)
                add(dq, entries.q_rows, grads[0])
                for grad, part in zip(_split(grad_kv), grads[1:], strict=True):
                    add(grad, entries.kv_rows, part)
            transport.give(step, grad_kv)
        dk, dv = _split(transport.gradients())
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def _fuse(k: Tensor, v: Tensor) -> Tensor:
    """Two [1, K, S, D] -> [S, 2, K, D]."""
    return torch.stack((k[0], v[0])).permute(2, 0, 1, 3).contiguous()


def _split(kv: Tensor) -> tuple[Tensor, Tensor]:
    """[S, 2, K, D] -> two views [1, K, S, D]."""
    k, v = kv.permute(1, 2, 0, 3)
    return k[None], v[None]


def _entries(rectangles: np.ndarray) -> Entries:
    return Entries(rectangles[:, :2], rectangles[:, 2:], causal=False)


def _merge(out: Tensor, lse: Tensor, rows: slice | np.ndarray, block_out: Tensor, block_lse: Tensor) -> None:
    """Join a block's softmax into the running one, for the given query rows, in place."""
    old_out, old_lse = take(out, rows), take(lse, rows)
    weight = torch.sigmoid(block_lse - old_lse)[..., None]
    put(out, rows, old_out - weight * (old_out - block_out))
    put(lse, rows, old_lse - F.logsigmoid(old_lse - block_lse))


def _check(q: Tensor, k: Tensor, v: Tensor, plan: RingPlan, group: dist.ProcessGroup) -> None:
    world_size = dist.get_world_size(group)
    if plan.world_size != world_size:
        raise ValueError(
            f"The plan is for {plan.world_size} ranks and the group has {world_size}. "
            f"Make it with plan_ring(cu_seqlens, {world_size})."
        )
    length = plan.num_tokens // world_size
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or x.shape[0] != 1 or x.shape[2] != length or x.shape[1] == 0:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, expected [1, heads, {length}, D]: {plan.num_tokens} tokens on "
                f"{world_size} ranks. Flatten several rows to one, and shard with the same plan."
            )
    if q.shape[1] % k.shape[1] or k.shape != v.shape:
        raise ValueError(f"{q.shape[1]} query heads cannot share k {tuple(k.shape)} and v {tuple(v.shape)} evenly.")

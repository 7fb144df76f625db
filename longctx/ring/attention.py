"""Ring attention over packed documents (Ring Attention, arXiv 2310.01889; the plan is in `longctx.ring.plan`).

Every rank keeps its queries. Keys and values travel to the next rank, hop by hop, while the block of the hop
before is computed; backwards they travel again, and each block's key/value gradients follow one step behind.
K and V travel as one buffer with tokens first, [S, 2, K, D], so that the prefix others need is contiguous.

Shape legend: P ranks, S tokens a rank, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from longctx.attention.kernels import Entries, add, block_backward, block_forward, put, take
from longctx.ring.plan import RankShard, RingPlan


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: RingPlan, group: dist.ProcessGroup, scale: float | None = None
) -> Tensor:
    """Causal attention within each document, over tokens cut as `plan` says.

    Args:
        q: [1, H, T/P, D], this rank's tokens in the plan's order.
        k, v: [1, K, T/P, D], H a multiple of K.
        plan: of the whole row of T tokens, the same on every rank of `group`.
        scale: of the scores before the softmax; 1/sqrt(D) where None.

    Returns:
        [1, H, T/P, D] of q's dtype. Sums over blocks are kept in fp32 or wider, forward and backward.

    Raises:
        ValueError: if plan, tensors and group do not fit each other.
    """
    _check(q, k, v, plan, group)
    shard = plan.shard(dist.get_rank(group))
    prefixes = np.append(plan.prefix_tokens, np.zeros((plan.world_size, 1), np.int64), axis=1)
    return _RingAttention.apply(q, k, v, shard, prefixes, group, q.shape[-1] ** -0.5 if scale is None else scale)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, shard: RankShard, prefixes: np.ndarray, group: dist.ProcessGroup, scale: float):
        ring = _Ring(group, shard.rank, prefixes)
        kv = _fuse(k, v)
        pending = ring.pass_on(kv, hop=1)
        out, lse = block_forward(q, k, v, Entries.of_documents(shard.cu_seqlens), scale)
        out = out.to(lse.dtype)
        for step in shard.steps:
            received = pending.wait()
            pending = ring.pass_on(received, hop=step.hop + 1)
            if len(step.entries):
                entries = _entries(step.entries)
                block = block_forward(q, *_split(received), entries, scale)
                _merge(out, lse, entries.q_rows, *block)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.shard, ctx.ring, ctx.scale = shard, ring, scale
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, out, lse = ctx.saved_tensors
        shard, ring, scale = ctx.shard, ctx.ring, ctx.scale
        kv = _fuse(k, v)
        pending = ring.pass_on(kv, hop=1)
        causal = Entries.of_documents(shard.cu_seqlens)
        dq, dk, dv = (grad.to(lse.dtype) for grad in block_backward(grad_out, q, k, v, out, lse, causal, scale))
        own_grad = _fuse(dk, dv)
        travelling = own_grad[:0]  # gradient of the K/V held at the hop before, on its way home
        for step in shard.steps:
            received = pending.wait()
            pending = ring.pass_on(received, hop=step.hop + 1)
            following = ring.send_home(travelling, hop=step.hop)
            grad_kv = own_grad.new_zeros(received.shape)
            if len(step.entries):
                entries = _entries(step.entries)
                grads = block_backward(grad_out, q, *_split(received), out, lse, entries, scale)
                add(dq, entries.q_rows, grads[0])
                for grad, part in zip(_split(grad_kv), grads[1:], strict=True):
                    add(grad, entries.kv_rows, part)
            travelling = following.collect(grad_kv, own_grad)
        ring.send_home(travelling, hop=ring.world_size).collect(own_grad[:0], own_grad)
        dk, dv = _split(own_grad)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


class _Ring:
    """Who sends how much to whom. `prefixes` int64 [P, P + 1]: at [s, h], tokens of shard s that travel at hop h."""

    def __init__(self, group: dist.ProcessGroup, rank: int, prefixes: np.ndarray):
        self.group, self.rank, self.prefixes = group, rank, prefixes
        self.world_size = len(prefixes)

    def pass_on(self, held: Tensor, hop: int) -> _Transfer:
        """Send the prefix of `held` that travels at `hop` to the next rank, and receive the previous rank's."""
        received = held.new_empty(self._length(self.rank - hop, hop), *held.shape[1:])
        sends = [(held[: self._length(self.rank - hop + 1, hop)], self.rank + 1)]
        return _Transfer(self._exchange(sends, [(received, self.rank - 1)]), received)

    def send_home(self, travelling: Tensor, hop: int) -> _GradTransfer:
        """Move gradients of the K/V held at hop - 1: what travels on at `hop` to the next rank, the rest home."""
        source, distance = self.rank - hop + 1, hop - 1
        onward = self._length(source, hop) if distance else 0
        head = travelling.new_empty(self._length(self.rank - hop, hop) if distance else 0, *travelling.shape[1:])
        home = slice(self._length(self.rank, hop), self._length(self.rank, distance)) if distance else slice(0, 0)
        tail = travelling.new_empty(home.stop - home.start, *travelling.shape[1:])
        sends = [(travelling[:onward], self.rank + 1), (travelling[onward:], source)]
        receives = [(head, self.rank - 1), (tail, self.rank + distance)]
        return _GradTransfer(self._exchange(sends, receives), head, tail, home, travelling)

    def _length(self, source: int, hop: int) -> int:
        return int(self.prefixes[source % self.world_size, hop])

    def _exchange(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> list[dist.Work]:
        """Post all non-empty messages at once; between two ranks they match in the order given."""
        operations = [
            dist.P2POp(op, tensor, dist.get_global_rank(self.group, peer % self.world_size), self.group)
            for op, messages in ((dist.isend, sends), (dist.irecv, receives))
            for tensor, peer in messages
            if len(tensor)
        ]
        return dist.batch_isend_irecv(operations) if operations else []


class _Transfer:
    """K/V on their way to this rank."""

    def __init__(self, works: list[dist.Work], received: Tensor):
        self._works, self._received = works, received

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._received


class _GradTransfer:
    """Gradients on their way: a head that travels on with this rank's block, a tail that has come home."""

    def __init__(self, works: list[dist.Work], head: Tensor, tail: Tensor, home: slice, sent: Tensor):
        self._works, self._head, self._tail, self._home = works, head, tail, home
        self._sent = sent  # kept until it has left

    def collect(self, grad_kv: Tensor, own_grad: Tensor) -> Tensor:
        """Add the head to `grad_kv`, which is returned, and the tail to `own_grad`."""
        for work in self._works:
            work.wait()
        grad_kv[: len(self._head)] += self._head
        own_grad[self._home] += self._tail
        return grad_kv


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

"""Ring attention over packed documents (Ring Attention, arXiv 2310.01889). `longctx.ring.plan` describes its plan.

Every rank keeps its queries. Keys and values go to the ranks that attend to them, hop by hop, while blocks of earlier
hops are computed. In the backward pass they travel again, and the gradients of each block's keys and values return to
the rank that owns them. K and V are one buffer with tokens first, [S, 2, K, D], so that the prefix that other ranks
need is contiguous.

Shape legend: P ranks, S tokens a rank, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from longctx.attention.branches import (
    add_gradients,
    full_entries,
    other_entries,
    own_entries,
    parts_forward,
    refuse_branches,
    segments_of_tokens,
)
from longctx.attention.kernels import Entries, block_backward, block_forward, merge
from longctx.attention.operator import Schedule, attend, binding_window
from longctx.regions import region
from longctx.ring.order import heads_at_a_time
from longctx.ring.plan import RingPlan
from longctx.ring.transport import TRANSPORTS, Transport, check_shard, fuse, split
from longctx.ring.window import WindowSchedule
from longctx.sequence.batch import PLAIN, AttentionKind
from longctx.sequence.layout import Layout


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: RingPlan,
    group: dist.ProcessGroup,
    scale: float | None = None,
    *,
    transport: str = "p2p",
    heads_k_stride: int | None = None,
    kind: AttentionKind = PLAIN,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute causal attention within each document, for tokens that `plan` distributes over the ranks.

    Args:
        q: [1, H, T/P, D], this rank's tokens in the plan's order.
        k, v: [1, K, T/P, D]; H must be a multiple of K.
        plan: the plan of the whole sequence of T tokens, the same on every rank of `group`.
        scale: factor of the scores before the softmax; 1/sqrt(D) if None.
        transport: "p2p" sends keys and values to each rank that needs them, hop by hop; "gather" collects all that a
            rank needs at once, which takes more memory and fewer messages.
        heads_k_stride: key/value heads that "gather" collects at a time, while it computes the ones before; a quarter
            of them if None.
        kind: the window, the chunks and the soft cap of the layers. With windows or chunks, only the tokens that these
            reach on other ranks travel, whatever the transport.
        sinks: [H], attention sinks: for each head a logit that takes part in every softmax and adds nothing to the
            output.

    Returns:
        [1, H, T/P, D] of q's dtype. Sums over blocks are kept in fp32 or wider, forward and backward.

    Raises:
        ValueError: if the plan, the tensors and the group do not fit each other, or an option is not valid.
    """
    schedule = ring_schedule(plan, group, transport=transport, heads_k_stride=heads_k_stride, kind=kind)
    return attend(schedule, q, k, v, scale, sinks)


def ring_schedule(
    plan: RingPlan,
    group: dist.ProcessGroup,
    *,
    transport: str = "p2p",
    heads_k_stride: int | None = None,
    kind: AttentionKind = PLAIN,
    segments: Layout | None = None,
) -> Schedule:
    """Return the schedule that `ring_attention` runs with these arguments. All layers of a batch can share it.

    Args:
        segments: of documents that branch, which the plan has as causal documents; None if none does.
    """
    world_size = dist.get_world_size(group)
    if plan.world_size != world_size:
        raise ValueError(
            f"The plan is for {plan.world_size} ranks and the group has {world_size}. "
            f"Make it with plan_ring(cu_seqlens, {world_size})."
        )
    if transport not in TRANSPORTS:
        raise ValueError(f"transport {transport!r} is unknown, use one of {', '.join(TRANSPORTS)}")
    if heads_k_stride is not None and (transport != "gather" or heads_k_stride < 1):
        raise ValueError(f"heads_k_stride {heads_k_stride} must be at least 1, and goes with transport='gather'.")
    boundaries = kind.boundaries(plan.cu_seqlens)
    window = binding_window(kind.window, boundaries)
    if window is None and len(boundaries) == len(plan.cu_seqlens):
        return RingSchedule(plan, group, TRANSPORTS[transport], heads_k_stride, kind.softcap, segments)
    if segments is not None:
        refuse_branches(kind)
    return WindowSchedule(plan, group, boundaries, window, kind.softcap)


class RingSchedule:
    """Full causal attention: within the rank's own shard, and hop by hop with the keys of other ranks' shards.

    The forward pass begins with the own shard, while the first keys arrive. In the backward pass it comes late, while
    gradients of other shards return.
    """

    def __init__(
        self,
        plan: RingPlan,
        group: dist.ProcessGroup,
        transport: type[Transport],
        heads_k_stride: int | None = None,
        softcap: float | None = None,
        segments: Layout | None = None,
    ):
        self.plan, self.heads_k_stride = plan, heads_k_stride
        shard = plan.shard(dist.get_rank(group))
        if segments is None:
            self.own = [Entries.of_documents(shard.cu_seqlens, softcap=softcap)]
            self.steps = [(step, full_entries([step.entries], softcap)) for step in shard.steps]
        else:
            of_ranks = segments_of_tokens(segments, plan.permutation).reshape(plan.world_size, -1)
            mine = of_ranks[shard.rank]
            self.own = own_entries(segments, mine, softcap)
            self.steps = [
                (step, other_entries(segments, step.entries, mine, of_ranks[step.source], softcap))
                for step in shard.steps
            ]
        self.longest_prefix = int(plan.prefix_tokens[:, 1:].max(initial=0))
        self.in_head_groups = transport.in_head_groups
        self.send = partial(transport, group, shard.rank, plan.prefix_tokens)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        check_shard(self.plan, q, k, v)
        parts = [self._forward(transport, heads, scale) for transport, heads in self._head_groups(q, k, v)]
        out, lse = (torch.cat(x, dim=1) if len(x) > 1 else x[0] for x in zip(*parts, strict=True))
        return out, lse

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        groups = self._head_groups(q, k, v, grad_out, out, lse)
        parts = [self._backward(transport, heads, scale) for transport, heads in groups]
        dq, dk, dv = (torch.cat(x, dim=1) if len(x) > 1 else x[0] for x in zip(*parts, strict=True))
        return dq, dk, dv

    def _head_groups(
        self, q: Tensor, k: Tensor, v: Tensor, *of_queries: Tensor
    ) -> Iterator[tuple[Transport, list[Tensor]]]:
        """Yield the transport and tensors of each group of `heads_k_stride` key/value heads.

        The keys and values of a group are sent while the group before is computed.
        """
        num_heads = k.shape[1]
        stride = heads_at_a_time(num_heads, self.heads_k_stride) if self.in_head_groups else num_heads
        bounds = range(0, num_heads, stride)
        groups = [[_heads(x, num_heads, at, at + stride) for x in (q, k, v, *of_queries)] for at in bounds]
        travelling = (fuse(*(x.narrow(2, 0, self.longest_prefix) for x in group[1:3])) for group in groups)
        coming = self.send(next(travelling))
        for i, group in enumerate(groups):
            transport = coming
            if i + 1 < len(groups):
                coming = self.send(next(travelling))
            yield transport, group

    def _forward(self, transport: Transport, heads: list[Tensor], scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = heads
        with region("ring step 0"):
            out, lse = parts_forward(q, k, v, self.own, scale, wide=True)
        for step, parts in self.steps:
            with region(f"ring step {step.hop}"):
                received = transport.receive(step)
                for entries in parts:
                    merge(out, lse, entries.q_rows, *block_forward(q, *split(received), entries, scale))
        return out, lse

    def _backward(self, transport: Transport, heads: list[Tensor], scale: float) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, grad_out, out, lse = heads
        _, num_heads, num_tokens, head_size = k.shape
        dq = torch.zeros_like(q, dtype=lse.dtype)
        own_grad = dq.new_zeros(num_tokens, 2, num_heads, head_size)
        transport.collect_gradients(own_grad)

        def add_own_block() -> None:
            with region("ring step 0"):
                for entries in self.own:
                    grads = block_backward(grad_out, q, k, v, out, lse, entries, scale)
                    add_gradients((dq, *split(own_grad)), entries, grads)

        if transport.own_after == 0:
            add_own_block()
        for step, parts in self.steps:
            with region(f"ring step {step.hop}"):
                received = transport.receive(step)
                grad_kv = torch.zeros_like(received, dtype=lse.dtype)
                for entries in parts:
                    grads = block_backward(grad_out, q, *split(received), out, lse, entries, scale)
                    add_gradients((dq, *split(grad_kv)), entries, grads)
                transport.give(step, grad_kv)
            if step.hop == transport.own_after:
                add_own_block()
        return dq, *split(transport.gradients())


def _heads(x: Tensor, num_key_value_heads: int, start: int, stop: int) -> Tensor:
    """Return the heads of x [1, H or K, S(, D)] that belong to key/value heads start..stop-1."""
    if stop - start >= num_key_value_heads:
        return x
    share = x.shape[1] // num_key_value_heads
    return x[:, start * share : stop * share]

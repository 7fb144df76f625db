"""Ulysses: ranks exchange their tokens of all heads for all tokens of some heads (DeepSpeed-Ulysses, arXiv 2309.14509).

Shape legend: P ranks, S tokens of the whole sequence, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longctx.regions import region


def usable_sizes(num_heads: int) -> str:
    """Return the settings of --sp with which Ulysses divides the query heads, for messages: `one of --sp 1, 2, 4`."""
    sizes = ", ".join(str(size) for size in range(1, num_heads + 1) if num_heads % size == 0)
    return f"one of --sp {sizes}" if num_heads > 1 else "--sp 1"


@functools.cache
def key_value_copies(num_heads: int, num_key_value_heads: int, world_size: int) -> int:
    """Return how often each key/value head is repeated so that every rank gets those its query heads use.

    It is the least number with which they divide evenly over the ranks and each is shared by equally many query heads.
    """
    group = num_heads // num_key_value_heads
    return next(n for n in range(1, group + 1) if group % n == 0 and num_key_value_heads * n % world_size == 0)


def _exchange(x: Tensor, group: dist.ProcessGroup, *, overlaps: bool) -> tuple[Tensor, dist.Work | None]:
    """Return what arrives when slice p of x [P, ...] goes to rank p, and the work to wait for if it still travels."""
    x = x.contiguous()
    received = torch.empty_like(x)
    with region("exchange", "communication"):
        work = dist.all_to_all_single(received, x, group=group, async_op=overlaps)
    return received, work


class _AllToAll(torch.autograd.Function):
    """[P, ...] -> [P, ...]: slice p goes to rank p. The operation is its own transpose."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(x, group, overlaps=False)[0]

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _AllToAll.apply(grad, ctx.group), None


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[P, ...] -> [P, ...]: slice p goes to rank p; differentiable."""
    return _AllToAll.apply(x, group)


class Message:
    """Tensors that arrive from all ranks of a group, without autograd.

    Args:
        received: the tensors, or one buffer that `read` makes them from.
        work: the exchange to wait for; None if it is done.
    """

    def __init__(
        self,
        received: list[Tensor] | Tensor,
        read: Callable[[Any], list[Tensor]] = list,
        work: dist.Work | None = None,
    ):
        self._received: list[Tensor] | Tensor | None = received
        self._read, self._work = read, work

    @classmethod
    def send(
        cls, x: Tensor, group: dist.ProcessGroup, read: Callable[[Tensor], list[Tensor]], *, overlaps: bool
    ) -> Message:
        """Send slice p of x [P, ...] to rank p. All ranks send messages of a group in the same order.

        Args:
            read: makes the tensors from what arrives, which has the shape of x.
            overlaps: whether the message travels while this rank computes; else it has arrived on return.
        """
        received, work = _exchange(x, group, overlaps=overlaps)
        return cls(received, read, work)

    def wait(self) -> list[Tensor]:
        """Return the tensors, once; this object no longer refers to them."""
        received, self._received = self._received, None
        if self._work is not None:
            with region("exchange", "communication"):
                self._work.wait()
            self._work = None
        return self._read(received)


def tokens_to_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[1, h, S, D] -> [1, P·h, S/P, D]: all heads, for this rank's tokens.

    In messages the heads of a token lie together, as in the kernels' results and in what the next layer reads.
    """
    tokens = x[0].transpose(0, 1).unflatten(0, (dist.get_world_size(group), -1))  # [P, S/P, h, D] by destination
    heads = all_to_all(tokens, group)  # [P, S/P, h, D] by source
    return heads.transpose(0, 1).flatten(1, 2).transpose(0, 1)[None]


def exchange_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup,
    attend: Callable[..., Tensor],
    *,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute any attention over all tokens of `group`, with a part of the heads on each rank.

    Args:
        q, k, v: [1, H or K, S/P, D], this rank's tokens.
        attend: (q [1, H/P, S, D], k, v [1, K', S, D], scale=, sinks= [H/P]) -> [1, H/P, S, D].
        scale, sinks: passed to `attend`; sinks [H] are those of all heads.

    Returns:
        [1, H, S/P, D].

    Raises:
        ValueError: if H is not a multiple of the group's size.
    """
    world_size = dist.get_world_size(group)
    if q.shape[1] % world_size:
        raise ValueError(heads_message(q.shape[1], world_size))
    copies = key_value_copies(q.shape[1], k.shape[1], world_size)
    heads = [x.repeat_interleave(n, dim=1) if n > 1 else x for x, n in ((q, 1), (k, copies), (v, copies))]
    per_rank = [x.shape[1] // world_size for x in heads]
    # [1, P·n, S/P, D] three times -> one exchange of [P, S/P, n of q, k and v, D]
    fused = torch.cat([x[0].unflatten(0, (world_size, -1)).transpose(1, 2) for x in heads], dim=2)
    rows = all_to_all(fused, group).flatten(0, 1)  # [S, n of q, k and v, D]: all tokens, this rank's heads
    mine = [x.transpose(0, 1)[None] for x in rows.split(per_rank, dim=1)]
    own_sinks = None if sinks is None else sinks.chunk(world_size)[dist.get_rank(group)]
    return tokens_to_ranks(attend(*mine, scale=scale, sinks=own_sinks), group)


def heads_message(num_heads: int, sp: int) -> str:
    """Return the message that Ulysses cannot divide this many heads by sp, with the remedy."""
    return (
        f"Ulysses gives every rank whole attention heads, and {_heads(num_heads)} cannot be divided by sp {sp}. "
        f"Use {usable_sizes(num_heads)}, or --sp_backend ring, which works with any number of heads."
    )


def _heads(count: int) -> str:
    return f"{count} head" if count == 1 else f"{count} heads"


def ulysses_remedy(num_heads: int, sp: int) -> str:
    """Return the remedy for a setting that runs only on Ulysses, in a run with another backend or unfit heads."""
    if num_heads % sp == 0:
        return "Use --sp_backend ulysses, or leave it out."
    return (
        f"Ulysses alone runs it, and {_heads(num_heads)} cannot be divided by sp {sp}. "
        f"Use {usable_sizes(num_heads)}, or leave it out."
    )

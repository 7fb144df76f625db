"""Attention for a few heads at a time, to hold less at once, or to hide the exchange behind attention.

The idea is that of Untied Ulysses (arXiv 2602.21196). A rank keeps q, k, v, attention's output and their gradients for
its own tokens and all heads. Messages, other ranks' tokens and the kernel's buffers are made for one stage after the
other. No attention is computed twice, since the backward pass exchanges the output, too.

Shape legend: P ranks, S tokens of the whole sequence, H query heads, K key/value heads, D head size. Every rank attends
to M key/value heads, some of them repeated if K < P, each shared by G query heads: H = P·M·G. A stage has n heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from longctx.attention.operator import Schedule
from longctx.ulysses.exchange import Message, heads_message, key_value_copies
from longctx.ulysses.stages import Stage, check_stride, head_stages


class HeadChunks:
    """A schedule that runs another schedule stage by stage, for a few heads each.

    Args:
        schedule: attention of some heads, over all tokens of `group`.
        heads_k_stride: key/value heads of a rank at a time; None for `OVERLAPPED_STAGES` stages.
        group: the ranks that exchange tokens for heads; None if `schedule` takes only this rank's tokens.
        split_queries: whether query heads that share a key/value head can have stages of their own, while keys and
            values stay. Else they share one, which is better if `schedule` sends keys and values on.
        overlaps: whether messages travel while attention runs: those of the next stage's tokens, and of the results of
            the stage before. Else a stage's tokens are sent only after those of the stage before are freed, which
            takes less memory.

    Raises:
        ValueError: for a stride below 1.
    """

    def __init__(
        self,
        schedule: Schedule,
        heads_k_stride: int | None,
        group: dist.ProcessGroup | None = None,
        *,
        split_queries: bool,
        overlaps: bool = False,
    ):
        if heads_k_stride is not None:
            check_stride(heads_k_stride)
        self.schedule, self.heads_k_stride = schedule, heads_k_stride
        self.group, self.split_queries, self.overlaps = group, split_queries, overlaps and group is not None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        heads = _Heads.of(q, k, self.group)
        out = _tokens_first(q)
        own_lse = q.new_empty(1, q.shape[1] // heads.ranks, q.shape[2] * heads.ranks, dtype=_wide(q.dtype))

        def arrive(stage: Stage, message: Message) -> None:
            [home] = message.wait()
            heads.queries(out, stage)[:] = _by_key(home, stage)

        leaving: list[tuple[Stage, Message]] = []
        for stage, (q_part,), (k_part, v_part) in self._stages(heads, [q], [k, v]):
            out_part, lse_part = self.schedule.forward(q_part, k_part, v_part, scale)
            del q_part, k_part, v_part  # before another stage's tokens arrive
            heads.own(own_lse, stage)[:] = _by_key(lse_part, stage)
            leaving.append((stage, _to_tokens([out_part.to(q.dtype)], self.group, self.overlaps)))
            del out_part
            if not self.overlaps or len(leaving) > 1:
                arrive(*leaving.pop(0))
        for last in leaving:
            arrive(*last)
        [lse] = _to_tokens([own_lse[..., None]], self.group).wait()
        return out, lse.flatten(0, 1)[None, ..., 0]

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = _Heads.of(q, k, self.group)
        [own_lse] = _to_heads([lse[0].unflatten(0, (heads.ranks, -1))[..., None]], self.group).wait()
        dq = _tokens_first(q)
        sums: list[Tensor] = []
        key_grads: list[Tensor] = []

        def arrive(stage: Stage, message: Message) -> None:
            home, *keys_home = message.wait()
            heads.queries(dq, stage)[:] = _by_key(home, stage)
            if stage.is_last and not key_grads:
                key_grads.extend(heads.zeros(x) for x in (k, v))
            for total, grad in zip(key_grads, keys_home, strict=False):  # only a last stage brings some
                heads.add_keys(total, stage, grad)

        leaving: list[tuple[Stage, Message]] = []
        for stage, (grad_part, q_part, out_part), (k_part, v_part) in self._stages(heads, [grad_out, q, out], [k, v]):
            lse_part = heads.own(own_lse[..., 0], stage).flatten(1, 2)
            dq_part, *grads = self.schedule.backward(grad_part, q_part, k_part, v_part, out_part, lse_part, scale)
            del grad_part, q_part, out_part, k_part, v_part  # before another stage's tokens arrive
            sums = _added(sums, grads, is_all=stage.is_first and stage.is_last)
            going = [dq_part.to(q.dtype)]
            del dq_part, grads
            if stage.is_last:
                going += [sums.pop(0).to(q.dtype) for _ in (k, v)]
            leaving.append((stage, _to_tokens(going, self.group, self.overlaps)))
            if not self.overlaps or len(leaving) > 1:
                arrive(*leaving.pop(0))
        for last in leaving:
            arrive(*last)
        dk, dv = key_grads
        return dq, dk, dv

    def _stages(
        self, heads: _Heads, of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]
    ) -> Iterator[tuple[Stage, list[Tensor], list[Tensor]]]:
        """Yield each stage with its heads of the given tensors, [1, n, S, D]."""
        stages = list(head_stages(heads.per_rank, heads.sharing, self.heads_k_stride, split_queries=self.split_queries))
        keys: list[Tensor] = []
        coming = self._send(heads, stages[0], of_queries, of_keys)
        for stage, following in pairwise([*stages, None]):
            assert stage is not None, "only the last one has none that follows"
            key_message, query_message = coming
            if self.overlaps and following is not None:
                coming = self._send(heads, following, of_queries, of_keys)
            if key_message is not None:
                keys = key_message.wait()
            del key_message
            # No local name refers to what is yielded, so that the caller can free it.
            yield stage, query_message.wait(), [keys.pop(0) for _ in of_keys] if stage.is_last else keys
            if not self.overlaps and following is not None:
                coming = self._send(heads, following, of_queries, of_keys)

    def _send(
        self, heads: _Heads, stage: Stage, of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]
    ) -> tuple[Message | None, Message]:
        """Send a stage's heads: those of keys, if it is the first stage that attends to them, and those of queries."""
        keys = [heads.keys(x, stage) for x in of_keys] if stage.is_first else None
        message = None if keys is None else _to_heads(keys, self.group, self.overlaps)
        queries = [heads.queries(x, stage).flatten(1, 2) for x in of_queries]  # views
        return message, _to_heads(queries, self.group, self.overlaps)


@dataclass(frozen=True, kw_only=True)
class _Heads:
    """The heads of each rank and stage.

    Views of query heads are [P, keys, queries, ...] or, of a rank's own, [1, keys, queries, ...].
    """

    ranks: int
    copies: int
    """How often each of the K heads is repeated."""
    per_rank: int
    """Key/value heads of a rank, M."""
    sharing: int
    """Query heads that share a key/value head, G."""

    @classmethod
    def of(cls, q: Tensor, k: Tensor, group: dist.ProcessGroup | None) -> _Heads:
        """Return the heads for q [1, H, S/P, D] and k [1, K, S/P, D]."""
        ranks = 1 if group is None else dist.get_world_size(group)
        if q.shape[1] % ranks:
            raise ValueError(heads_message(q.shape[1], ranks))
        copies = key_value_copies(q.shape[1], k.shape[1], ranks)
        attended = k.shape[1] * copies
        return cls(ranks=ranks, copies=copies, per_rank=attended // ranks, sharing=q.shape[1] // attended)

    def queries(self, x: Tensor, stage: Stage) -> Tensor:
        """[1, H, ...] -> [P, keys, queries, ...], a view."""
        return x[0].unflatten(0, (self.ranks, self.per_rank, self.sharing))[:, stage.keys, stage.queries]

    def own(self, x: Tensor, stage: Stage) -> Tensor:
        """[1, H/P, ...] -> [1, keys, queries, ...], a view."""
        return x.unflatten(1, (self.per_rank, self.sharing))[:, stage.keys, stage.queries]

    def keys(self, x: Tensor, stage: Stage) -> Tensor:
        """[1, K, S/P, D] -> [P, n, S/P, D]."""
        if self.copies == 1:
            return x[0].unflatten(0, (self.ranks, self.per_rank))[:, stage.keys]
        return x[0][self._originals(stage, x.device)]

    def zeros(self, x: Tensor) -> Tensor:
        """Return zeros for gradients of x [1, K, S/P, D], in fp32 or wider if those of copies are added up."""
        return torch.zeros_like(x, dtype=x.dtype if self.copies == 1 else _wide(x.dtype))

    def add_keys(self, total: Tensor, stage: Stage, part: Tensor) -> None:
        """Add [P, n, S/P, D] to [1, K, S/P, D]: the adjoint of `keys`."""
        heads = self._originals(stage, total.device).flatten()
        total[0].index_add_(0, heads, part.flatten(0, 1).to(total.dtype))

    def _originals(self, stage: Stage, device: torch.device) -> Tensor:
        """Return int64 [P, n]: which of the K heads every rank gets in a stage."""
        attended = torch.arange(self.ranks * self.per_rank, device=device).view(self.ranks, -1)
        return attended[:, stage.keys] // self.copies


def _to_heads(parts: Sequence[Tensor], group: dist.ProcessGroup | None, overlaps: bool = False) -> Message:
    """Each [P, n, S/P, D], the heads of each rank -> [1, n, S, D], this rank's of all tokens, in one message."""
    if group is None:
        return Message(list(parts))
    sizes = [part.shape[1] for part in parts]
    message = torch.cat([part.transpose(1, 2) for part in parts], dim=2)  # [P, S/P, n of each part, D]

    def read(received: Tensor) -> list[Tensor]:
        return [row.transpose(0, 1)[None] for row in received.flatten(0, 1).split(sizes, dim=1)]

    return Message.send(message, group, read, overlaps=overlaps)


def _to_tokens(parts: list[Tensor], group: dist.ProcessGroup | None, overlaps: bool = False) -> Message:
    """Each [1, n, S, D], this rank's heads -> [P, n, S/P, D], those of each rank. The inverse of `_to_heads`.

    The list is emptied, so that the parts are freed while they travel.
    """
    if group is None:
        return Message(list(parts))
    sizes = [part.shape[1] for part in parts]
    rows = torch.cat([part[0].transpose(0, 1) for part in parts], dim=1)  # [S, n of each part, D]
    parts.clear()

    def read(received: Tensor) -> list[Tensor]:
        shares = received.unflatten(0, (dist.get_world_size(group), -1))  # [P, S/P, n of each part, D]
        return [part.transpose(1, 2) for part in shares.split(sizes, dim=2)]

    return Message.send(rows, group, read, overlaps=overlaps)


def _added(sums: list[Tensor], grads: Sequence[Tensor], *, is_all: bool) -> list[Tensor]:
    """Return the sums with one stage's gradients added, in fp32 or wider unless one stage is all there is."""
    if sums:
        return [total.add_(grad) for total, grad in zip(sums, grads, strict=True)]
    return [grad if is_all else grad.to(_wide(grad.dtype)) for grad in grads]


def _by_key(x: Tensor, stage: Stage) -> Tensor:
    """[P or 1, n, ...] -> [P or 1, keys, queries, ...]."""
    return x.unflatten(1, (-1, stage.sharing))


def _tokens_first(x: Tensor) -> Tensor:
    """Return an empty tensor of x's shape [1, H, S, D] with a token's heads together, as in the layers around it."""
    return x.new_empty(1, x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums: fp32 or wider."""
    return torch.promote_types(dtype, torch.float32)

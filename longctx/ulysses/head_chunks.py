"""Attention for a few heads at a time, whose memory besides its inputs and outputs shrinks with the number of heads.

The idea is that of Untied Ulysses (arXiv 2602.21196). A rank keeps q, k, v, attention's output and their gradients for
its own tokens and all heads. Messages, other ranks' tokens and the kernel's buffers are made for one stage after the
other. No attention is computed twice, since the backward pass exchanges the output, too.

Shape legend: P ranks, S tokens of the whole sequence, H query heads, K key/value heads, D head size. Every rank attends
to M key/value heads, some of them repeated if K < P, each shared by G query heads: H = P·M·G. A stage has n heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from longctx.attention.operator import Schedule
from longctx.ulysses.exchange import all_to_all, heads_message, key_value_copies


class HeadChunks:
    """A schedule that runs another schedule stage by stage, for a few heads each.

    A stage's tokens are sent only after those of the stage before are freed. Sending them earlier would take the memory
    of another stage and save little, since attention takes far longer at the lengths that need stages.

    Args:
        schedule: attention of some heads, over all tokens of `group`.
        heads_k_stride: key/value heads of a rank at a time.
        group: the ranks that exchange tokens for heads; None if `schedule` takes only this rank's tokens.
        split_queries: whether query heads that share a key/value head have a stage each, while keys and values stay.
            Else they share one, which is better if `schedule` sends keys and values on.

    Raises:
        ValueError: for a stride below 1.
    """

    def __init__(
        self, schedule: Schedule, heads_k_stride: int, group: dist.ProcessGroup | None = None, *, split_queries: bool
    ):
        check_stride(heads_k_stride)
        self.schedule, self.heads_k_stride = schedule, heads_k_stride
        self.group, self.split_queries = group, split_queries

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        heads = _Heads.of(q, k, self.group)
        out = _tokens_first(q)
        own_lse = q.new_empty(1, q.shape[1] // heads.ranks, q.shape[2] * heads.ranks, dtype=_wide(q.dtype))
        for stage, (q_part,), (k_part, v_part) in self._stages(heads, [q], [k, v]):
            out_part, lse_part = self.schedule.forward(q_part, k_part, v_part, scale)
            del q_part, k_part, v_part  # before another stage's tokens arrive
            heads.own(own_lse, stage)[:] = _by_key(lse_part, stage)
            [home] = _to_tokens([out_part.to(q.dtype)], self.group)
            heads.queries(out, stage)[:] = _by_key(home, stage)
            del out_part, home
        [lse] = _to_tokens([own_lse[..., None]], self.group)
        return out, lse.flatten(0, 1)[None, ..., 0]

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = _Heads.of(q, k, self.group)
        [own_lse] = _to_heads([lse[0].unflatten(0, (heads.ranks, -1))[..., None]], self.group)
        dq = _tokens_first(q)
        sums: list[Tensor] = []
        key_grads: list[Tensor] = []
        for stage, (grad_part, q_part, out_part), (k_part, v_part) in self._stages(heads, [grad_out, q, out], [k, v]):
            lse_part = heads.own(own_lse[..., 0], stage).flatten(1, 2)
            dq_part, *grads = self.schedule.backward(grad_part, q_part, k_part, v_part, out_part, lse_part, scale)
            del grad_part, q_part, out_part, k_part, v_part  # before another stage's tokens arrive
            sums = _added(sums, grads, is_all=stage.is_first and stage.is_last)
            going = [dq_part.to(q.dtype)]
            del dq_part, grads
            if stage.is_last:
                going += [sums.pop(0).to(q.dtype) for _ in (k, v)]
            home, *keys_home = _to_tokens(going, self.group)
            heads.queries(dq, stage)[:] = _by_key(home, stage)
            if stage.is_last:
                key_grads = key_grads or [heads.zeros(x) for x in (k, v)]
                for total, grad in zip(key_grads, keys_home, strict=True):
                    heads.add_keys(total, stage, grad)
            del home, keys_home
        dk, dv = key_grads
        return dq, dk, dv

    def _stages(
        self, heads: _Heads, of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]
    ) -> Iterator[tuple[_Stage, list[Tensor], list[Tensor]]]:
        """Yield each stage with its heads of the given tensors, [1, n, S, D]."""
        keys: list[Tensor] = []
        for stage in heads.stages(self.heads_k_stride, self.split_queries):
            if stage.is_first:
                keys = []  # freed before those of the next heads arrive
                keys = _to_heads([heads.keys(x, stage) for x in of_keys], self.group)
            queries = [heads.queries(x, stage).flatten(1, 2) for x in of_queries]  # views
            # No local name refers to what is yielded, so that the caller can free it.
            yield stage, _to_heads(queries, self.group), [keys.pop(0) for _ in of_keys] if stage.is_last else keys


def check_stride(heads_k_stride: int) -> None:
    """Raise ValueError for a stride below 1."""
    if heads_k_stride < 1:
        raise ValueError(
            f"heads_k_stride {heads_k_stride} must be at least 1, the key/value heads of a rank that are exchanged at "
            "a time. Leave it out to exchange all of them at once."
        )


@dataclass(frozen=True, kw_only=True)
class _Stage:
    keys: slice
    """The stage's part of every rank's M key/value heads."""
    queries: slice
    """The stage's part of the G query heads that share each of them."""
    is_first: bool
    """Whether it is the first stage of its key/value heads."""
    is_last: bool

    @property
    def sharing(self) -> int:
        """Query heads in the stage for each of its key/value heads."""
        return self.queries.stop - self.queries.start


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

    def stages(self, stride: int, split_queries: bool) -> list[_Stage]:
        step = 1 if split_queries else self.sharing
        return [
            _Stage(
                keys=slice(start, min(start + stride, self.per_rank)),
                queries=slice(query, query + step),
                is_first=query == 0,
                is_last=query + step == self.sharing,
            )
            for start in range(0, self.per_rank, stride)
            for query in range(0, self.sharing, step)
        ]

    def queries(self, x: Tensor, stage: _Stage) -> Tensor:
        """[1, H, ...] -> [P, keys, queries, ...], a view."""
        return x[0].unflatten(0, (self.ranks, self.per_rank, self.sharing))[:, stage.keys, stage.queries]

    def own(self, x: Tensor, stage: _Stage) -> Tensor:
        """[1, H/P, ...] -> [1, keys, queries, ...], a view."""
        return x.unflatten(1, (self.per_rank, self.sharing))[:, stage.keys, stage.queries]

    def keys(self, x: Tensor, stage: _Stage) -> Tensor:
        """[1, K, S/P, D] -> [P, n, S/P, D]."""
        if self.copies == 1:
            return x[0].unflatten(0, (self.ranks, self.per_rank))[:, stage.keys]
        return x[0][self._originals(stage, x.device)]

    def zeros(self, x: Tensor) -> Tensor:
        """Return zeros for gradients of x [1, K, S/P, D], in fp32 or wider if those of copies are added up."""
        return torch.zeros_like(x, dtype=x.dtype if self.copies == 1 else _wide(x.dtype))

    def add_keys(self, total: Tensor, stage: _Stage, part: Tensor) -> None:
        """Add [P, n, S/P, D] to [1, K, S/P, D]: the adjoint of `keys`."""
        heads = self._originals(stage, total.device).flatten()
        total[0].index_add_(0, heads, part.flatten(0, 1).to(total.dtype))

    def _originals(self, stage: _Stage, device: torch.device) -> Tensor:
        """Return int64 [P, n]: which of the K heads every rank gets in a stage."""
        attended = torch.arange(self.ranks * self.per_rank, device=device).view(self.ranks, -1)
        return attended[:, stage.keys] // self.copies


def _to_heads(parts: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Each [P, n, S/P, D], the heads of each rank -> [1, n, S, D], this rank's of all tokens, in one message."""
    if group is None:
        return list(parts)
    message = torch.cat([part.transpose(1, 2) for part in parts], dim=2)  # [P, S/P, n of each part, D]
    rows = all_to_all(message, group).flatten(0, 1)
    return [row.transpose(0, 1)[None] for row in rows.split([part.shape[1] for part in parts], dim=1)]


def _to_tokens(parts: list[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Each [1, n, S, D], this rank's heads -> [P, n, S/P, D], those of each rank. The inverse of `_to_heads`.

    The list is emptied, so that the parts are freed while they travel.
    """
    if group is None:
        return list(parts)
    sizes = [part.shape[1] for part in parts]
    rows = torch.cat([part[0].transpose(0, 1) for part in parts], dim=1)  # [S, n of each part, D]
    parts.clear()
    shares = all_to_all(rows, group).unflatten(0, (dist.get_world_size(group), -1))  # [P, S/P, n of each part, D]
    return [part.transpose(1, 2) for part in shares.split(sizes, dim=2)]


def _added(sums: list[Tensor], grads: Sequence[Tensor], *, is_all: bool) -> list[Tensor]:
    """Return the sums with one stage's gradients added, in fp32 or wider unless one stage is all there is."""
    if sums:
        return [total.add_(grad) for total, grad in zip(sums, grads, strict=True)]
    return [grad if is_all else grad.to(_wide(grad.dtype)) for grad in grads]


def _by_key(x: Tensor, stage: _Stage) -> Tensor:
    """[P or 1, n, ...] -> [P or 1, keys, queries, ...]."""
    return x.unflatten(1, (-1, stage.sharing))


def _tokens_first(x: Tensor) -> Tensor:
    """Return an empty tensor of x's shape [1, H, S, D] with a token's heads together, as in the layers around it."""
    return x.new_empty(1, x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums: fp32 or wider."""
    return torch.promote_types(dtype, torch.float32)

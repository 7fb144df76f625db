"""Packed causal attention over tensors in host memory, a block of queries against a block of keys at a time.

Heads are attended in groups: some key/value heads with the query heads that share them. The fewer heads a group has,
the longer are the blocks for the same memory, and the fewer blocks there are to copy and to launch.

Shape legend: G groups of heads, S tokens of the whole sequence, h query heads and m key/value heads of a group, D head
size, B tokens of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from longctx.attention.kernels import Entries, add, block_backward, block_forward, merge
from longctx.attention.kernels.varlen import heads_first, tokens_first
from longctx.attention.operator import Schedule, binding_window, sinks_gradient, with_sinks
from longctx.layers.chunked.copies import Copies
from longctx.sequence.batch import PLAIN, AttentionKind
from longctx.sequence.host_tensors import host_empty


@dataclass(frozen=True, eq=False)
class Block:
    """A block of queries, and the parts of the keys that they see."""

    queries: slice
    parts: list[tuple[slice, Entries]]
    """Token range of the keys, and what of it attends to what, in rows of the two ranges. The first part has the
    queries' own tokens, and so an entry for every query."""


def num_head_groups(num_chunks: int, num_key_value_heads: int) -> int:
    """Return G for a rank's key/value heads: as many groups as tokens have chunks, so that one group of all tokens has
    the bytes of a chunk of all heads; or more where groups would not be equal, and at most one for each head."""
    fewest = min(num_chunks, num_key_value_heads)
    return next(count for count in range(fewest, num_key_value_heads + 1) if num_key_value_heads % count == 0)


class HostAttention:
    """Causal attention within each document over host tensors, q [G, S, h, D] and kv [G, S, 2·m, D]: keys, then values.

    On the device are two blocks of B queries and of B keys of a group (with a window: B + window keys), with their
    gradients, and in the backward pass the fp32 gradients of all keys and values of a group: 8·m·D bytes a token.

    Args:
        cu_seqlens: int [n + 1], boundaries of the documents, from 0 to S.
        block: B.
        kind: the window, the chunks and the soft cap of the layer.
        scale: of the scores before the softmax.
        copies: to and from the device that computes.
    """

    def __init__(
        self, cu_seqlens: np.ndarray, *, block: int, kind: AttentionKind = PLAIN, scale: float, copies: Copies
    ):
        self.cu_seqlens, self.block = kind.boundaries(cu_seqlens), block
        self.window, self.softcap = binding_window(kind.window, self.cu_seqlens), kind.softcap
        self.scale, self.copies = scale, copies
        self._entries: dict[tuple[bytes, bytes, bool], Entries] = {}

    @cached_property
    def blocks(self) -> list[Block]:
        """The blocks in the order of the sequence.

        Parts that attend alike share their entries, whose tables are then copied to the device once. A long document
        has one or two kinds of part on the diagonal, and as many beside it.
        """
        total = int(self.cu_seqlens[-1])
        return [self._block(start, min(start + self.block, total)) for start in range(0, total, self.block)]

    def _block(self, start: int, stop: int) -> Block:
        first = int(self.cu_seqlens[np.searchsorted(self.cu_seqlens, start, side="right") - 1])
        bounds = np.unique(np.clip(self.cu_seqlens, start, stop))
        queries = np.stack((bounds[:-1], bounds[1:]), axis=1)
        if self.window is not None:  # one part: what the first document has before the block is short
            lead = max(first, start - self.window + 1)
            seen = queries.copy()
            seen[0, 0] = lead
            return Block(slice(start, stop), [(slice(lead, stop), self._shared(queries - start, seen - lead))])
        parts = [(slice(start, stop), self._shared(queries - start, queries - start))]
        crossing = np.array([[0, bounds[1] - start]])  # queries of the document that began before the block
        for at in range(first // self.block * self.block, start, self.block):
            keys = slice(max(first, at), min(at + self.block, start))
            seen = np.array([[0, keys.stop - keys.start]])
            parts.append((keys, self._shared(crossing, seen, causal=False)))
        return Block(slice(start, stop), parts)

    def _shared(self, queries: np.ndarray, keys: np.ndarray, *, causal: bool = True) -> Entries:
        window = self.window if causal else None
        found = Entries(queries, keys, causal=causal, window=window, softcap=self.softcap)
        return self._entries.setdefault((queries.tobytes(), keys.tobytes(), causal), found)

    def forward(
        self, q: Tensor, kv: Tensor, sinks: Tensor | None = None, *, on_device: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return out [G, S, h, D] and lse [G, S, h], fp32 or wider, in host memory.

        Args:
            sinks: [G·h] on the device.
            on_device: leave out and lse on the device.
        """
        all_out, all_lse = _results(q, self.copies.device, on_device=on_device)
        wide = all_lse.dtype
        steps = [(group, block) for group in range(len(q)) for block in self.blocks]
        keys = self._keys(kv, steps)
        for (group, block), (rows,) in self.copies.arriving(steps, lambda step: [q[step[0], step[1].queries]]):
            queries = heads_first(rows)
            for i, (_, entries) in enumerate(block.parts):
                part = block_forward(queries, *next(keys), entries, self.scale)
                if i == 0:
                    out, lse = part[0].to(wide), part[1]
                else:
                    merge(out, lse, entries.q_rows, *part)
            if sinks is not None:
                out, lse = with_sinks(out, lse, sinks.view(len(q), -1)[group])
            self.copies.leave(
                (all_out[group, block.queries], tokens_first(out)), (all_lse[group, block.queries], lse[0].T)
            )
        return all_out, all_lse

    def backward(
        self, grad_out: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None = None
    ) -> Tensor | None:
        """Put the gradients of `q` and `kv` in their places in memory; return the gradient of the sinks, [G·h].

        Blocks go from the last to the first: with a block done nobody needs its queries, keys and values any more, and
        nobody adds to their gradients.
        """
        steps = [(group, block) for group in range(len(q)) for block in reversed(self.blocks)]
        keys = self._keys(kv, steps)
        grad_kv: list[Tensor] = []
        grad_sinks = None if sinks is None else torch.zeros(len(q), q.shape[2], dtype=lse.dtype, device=sinks.device)
        for (group, block), arrived in self.copies.arriving(
            steps, lambda step: [x[step[0], step[1].queries] for x in (q, grad_out, out, lse)]
        ):
            queries, grad, block_out = map(heads_first, arrived[:3])
            block_lse = arrived[3].T[None].contiguous()
            if block is self.blocks[-1]:
                shape = 1, kv.shape[2] // 2, kv.shape[1], kv.shape[3]
                grad_kv = [queries.new_zeros(shape, dtype=lse.dtype) for _ in "kv"]
            grad_queries = torch.zeros_like(queries, dtype=lse.dtype)
            for at, entries in block.parts:
                grads = block_backward(grad, queries, *next(keys), block_out, block_lse, entries, self.scale)
                add(grad_queries, entries.q_rows, grads[0])
                for total, part in zip(grad_kv, grads[1:], strict=True):
                    add(total[:, :, at], entries.kv_rows, part)
            if sinks is not None and grad_sinks is not None:
                grad_sinks[group] += sinks_gradient(grad, block_out, block_lse, sinks.view(len(q), -1)[group])
            done = torch.cat([total[:, :, block.queries] for total in grad_kv], dim=1)
            self.copies.leave(
                (q[group, block.queries], tokens_first(grad_queries)), (kv[group, block.queries], tokens_first(done))
            )
        return None if grad_sinks is None else grad_sinks.flatten()

    def _keys(self, kv: Tensor, steps: list[tuple[int, Block]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield k and v [1, m, N, D] on the device of each part of each block."""
        parts = [(group, at) for group, block in steps for at, _ in block.parts]
        for _, (rows,) in self.copies.arriving(parts, lambda part: [kv[part]]):
            yield _split(rows)


class ScheduledAttention:
    """Attention by a backend's schedule over host tensors like those of `HostAttention`, with the same methods.

    Ranks send each other keys and values from device memory, so a group of heads is there for all tokens of a rank.
    """

    def __init__(self, schedule: Schedule, *, scale: float, copies: Copies):
        self.schedule, self.scale, self.copies = schedule, scale, copies

    def forward(
        self, q: Tensor, kv: Tensor, sinks: Tensor | None = None, *, on_device: bool = False
    ) -> tuple[Tensor, Tensor]:
        all_out, all_lse = _results(q, self.copies.device, on_device=on_device)
        for group, (queries, keys) in self.copies.arriving(range(len(q)), lambda group: [q[group], kv[group]]):
            out, lse = self.schedule.forward(heads_first(queries), *_split(keys), self.scale)
            if sinks is not None:
                out, lse = with_sinks(out, lse, sinks.view(len(q), -1)[group])
            self.copies.leave((all_out[group], tokens_first(out)), (all_lse[group], lse[0].T))
        return all_out, all_lse

    def backward(
        self, grad_out: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None = None
    ) -> Tensor | None:
        grad_sinks = []

        def of_group(group: int, *arrived: Tensor) -> None:
            grad, queries, group_out = map(heads_first, arrived[:3])
            group_lse = arrived[3].T[None].contiguous()
            grads = self.schedule.backward(grad, queries, *_split(arrived[4]), group_out, group_lse, self.scale)
            if sinks is not None:
                grad_sinks.append(sinks_gradient(grad, group_out, group_lse, sinks.view(len(q), -1)[group]))
            grad_q, *grad_kv = map(tokens_first, grads)
            self.copies.leave((q[group], grad_q), (kv[group], torch.cat(grad_kv, dim=1)))

        self.copies.each(range(len(q)), lambda group: [x[group] for x in (grad_out, q, out, lse, kv)], of_group)
        return torch.cat(grad_sinks) if grad_sinks else None


def _results(q: Tensor, device: torch.device, *, on_device: bool) -> tuple[Tensor, Tensor]:
    """Return memory for out [G, S, h, D] and lse [G, S, h], fp32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    shapes = (q.shape, q.dtype), (q.shape[:3], wide)
    if on_device:
        out, lse = (torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes)
    else:
        out, lse = (host_empty(*shape, dtype=dtype, device=device) for shape, dtype in shapes)
    return out, lse


def _split(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[N, 2·m, D] -> k and v [1, m, N, D], views."""
    k, v = rows.chunk(2, dim=1)
    return heads_first(k), heads_first(v)

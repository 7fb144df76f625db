"""Packed causal attention over tensors in host memory, a block of queries against a block of keys at a time.

Shape legend: S tokens of the whole row, H query heads, K key/value heads, D head size, B tokens of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from longctx.attention.kernels import Entries, add, block_backward, block_forward, merge
from longctx.attention.operator import binding_window
from longctx.layers.chunked.tiles import to_device, to_host
from longctx.sequence.host_tensors import host_empty


@dataclass(frozen=True, eq=False)
class Block:
    """A block of queries, and the parts of the keys that they see."""

    queries: slice
    parts: list[tuple[slice, Entries]]
    """Token range of the keys, and what of it attends to what, in rows of the two ranges. The first part has the
    queries' own tokens, and so an entry for every query."""


class HostAttention:
    """Causal attention within each document over host tensors, q [S, H, D] and kv [S, 2·K, D]: keys, then values.

    On the device are at most B queries and B keys of all heads (with a window: B + window keys), with their gradients.

    Args:
        cu_seqlens: int [n + 1], boundaries of the documents, from 0 to S.
        num_heads, num_key_value_heads: H and K.
        block: B.
        window: each query sees this many tokens of its document, itself included; all before it where None.
        scale: of the scores before the softmax.
        device: to compute on.
    """

    def __init__(
        self,
        cu_seqlens: np.ndarray,
        *,
        num_heads: int,
        num_key_value_heads: int,
        block: int,
        window: int | None,
        scale: float,
        device: torch.device,
    ):
        self.cu_seqlens, self.block = np.asarray(cu_seqlens), block
        self.window = binding_window(window, self.cu_seqlens)
        self.num_heads, self.num_key_value_heads = num_heads, num_key_value_heads
        self.scale, self.device = scale, device
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
            return Block(slice(start, stop), [(slice(lead, stop), self._causal(queries - start, seen - lead))])
        parts = [(slice(start, stop), self._causal(queries - start, queries - start))]
        crossing = np.array([[0, bounds[1] - start]])  # queries of the document that began before the block
        for at in range(first // self.block * self.block, start, self.block):
            keys = slice(max(first, at), min(at + self.block, start))
            seen = np.array([[0, keys.stop - keys.start]])
            parts.append((keys, self._shared(crossing, seen, causal=False)))
        return Block(slice(start, stop), parts)

    def _causal(self, queries: np.ndarray, keys: np.ndarray) -> Entries:
        return self._shared(queries, keys, causal=True)

    def _shared(self, queries: np.ndarray, keys: np.ndarray, *, causal: bool) -> Entries:
        window = self.window if causal else None
        found = Entries(queries, keys, causal=causal, window=window)
        return self._entries.setdefault((queries.tobytes(), keys.tobytes(), causal), found)

    def forward(self, q: Tensor, kv: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return out [S, H, D] and lse [S, H], fp32 or wider, in host memory.

        Args:
            sinks: [H] on the device.
        """
        wide = torch.promote_types(q.dtype, torch.float32)
        out_host = host_empty(*q.shape, dtype=q.dtype, device=self.device)
        lse_host = host_empty(*q.shape[:2], dtype=wide, device=self.device)
        for block in self.blocks:
            queries = _heads_first(to_device(q[block.queries], self.device))
            for i, (keys, entries) in enumerate(block.parts):
                part = block_forward(queries, *self._keys(kv, keys), entries, self.scale)
                if i == 0:
                    out, lse = part[0].to(wide), part[1]
                else:
                    merge(out, lse, entries.q_rows, *part)
            if sinks is not None:
                logits = sinks.to(wide)[:, None]
                out = out * torch.sigmoid(lse - logits)[..., None]
                lse = torch.logaddexp(lse, logits)
            to_host(out_host[block.queries], _tokens_first(out).to(q.dtype))
            to_host(lse_host[block.queries], lse[0].T)
        return out_host, lse_host

    def backward(
        self, grad_out: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None = None
    ) -> Tensor | None:
        """Put the gradients of `q` and `kv` in their places in memory; return the gradient of the sinks, [H].

        Blocks go from the last to the first: with a block done nobody needs its queries, keys and values any more, and
        nobody adds to their gradients.
        """
        grad_kv = host_empty(*kv.shape, dtype=lse.dtype, device=self.device).zero_()
        grad_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=lse.dtype)
        for block in reversed(self.blocks):
            rows = block.queries
            queries, grad, block_out = (_heads_first(to_device(x[rows], self.device)) for x in (q, grad_out, out))
            block_lse = to_device(lse[rows], self.device).T[None].contiguous()
            grad_queries = torch.zeros_like(queries, dtype=lse.dtype)
            for keys, entries in block.parts:
                k, v = self._keys(kv, keys)
                parts = block_backward(grad, queries, k, v, block_out, block_lse, entries, self.scale)
                add(grad_queries, entries.q_rows, parts[0])
                total = to_device(grad_kv[keys], self.device)
                for x, part in zip(total.split(self.num_key_value_heads, dim=1), parts[1:], strict=True):
                    add(_heads_first(x), entries.kv_rows, part)
                to_host(grad_kv[keys], total)
            if sinks is not None and grad_sinks is not None:
                delta = (grad.to(lse.dtype) * block_out.to(lse.dtype)).sum(-1)
                grad_sinks -= (torch.exp(sinks.to(lse.dtype)[:, None] - block_lse) * delta).sum((0, 2))
            to_host(q[rows], _tokens_first(grad_queries).to(q.dtype))
            to_host(kv[rows], to_device(grad_kv[rows], self.device).to(kv.dtype))
        return grad_sinks

    def _keys(self, kv: Tensor, keys: slice) -> tuple[Tensor, Tensor]:
        """Return k and v [1, K, N, D] of a token range, on the device."""
        k, v = to_device(kv[keys], self.device).split(self.num_key_value_heads, dim=1)
        return _heads_first(k), _heads_first(v)


def _heads_first(x: Tensor) -> Tensor:
    """[N, H, D] -> [1, H, N, D], a view."""
    return x.transpose(0, 1)[None]


def _tokens_first(x: Tensor) -> Tensor:
    """[1, H, N, D] -> [N, H, D], a view."""
    return x[0].transpose(0, 1)

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
from longctx.host import host_empty


@dataclass(frozen=True, eq=False)
class Block:
    """Queries, and the keys that they see a part at a time."""

    queries: slice
    parts: list[tuple[slice, Entries]]
    """Token range of the keys, and what of it attends to what, in rows of the two ranges. The first part has the
    queries' own tokens, and so an entry for every query."""


class HostAttention:
    """Causal attention within each document; q, k and v are one host tensor [S, H + 2·K, D].

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
        self.heads = [num_heads, num_key_value_heads, num_key_value_heads]
        self.scale, self.device = scale, device

    @cached_property
    def blocks(self) -> list[Block]:
        """In the order of the row."""
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
            parts.append((keys, Entries(crossing, seen, causal=False)))
        return Block(slice(start, stop), parts)

    def _causal(self, queries: np.ndarray, keys: np.ndarray) -> Entries:
        return Entries(queries, keys, causal=True, window=self.window)

    def forward(self, qkv: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """qkv [S, H + 2·K, D], sinks [H] on the device -> out [S, H, D] and lse [S, H], fp32 or wider, on the host."""
        total, num_heads = len(qkv), self.heads[0]
        out_host = host_empty(total, num_heads, qkv.shape[-1], dtype=qkv.dtype, device=self.device)
        wide = torch.promote_types(qkv.dtype, torch.float32)
        lse_host = host_empty(total, num_heads, dtype=wide, device=self.device)
        for block in self.blocks:
            q, k, v = self._load(qkv, block.queries, block.parts[0][0])
            out, lse = block_forward(q, k, v, block.parts[0][1], self.scale)
            out = out.to(lse.dtype)
            for keys, entries in block.parts[1:]:
                k, v = self._load_keys(qkv, keys)
                merge(out, lse, entries.q_rows, *block_forward(q, k, v, entries, self.scale))
            if sinks is not None:
                logits = sinks.to(lse.dtype)[:, None]
                out = out * torch.sigmoid(lse - logits)[..., None]
                lse = torch.logaddexp(lse, logits)
            out_host[block.queries].copy_(_tokens_first(out), non_blocking=True)
            lse_host[block.queries].copy_(lse[0].T, non_blocking=True)
        return out_host, lse_host

    def backward(
        self, grad_out: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None = None
    ) -> Tensor | None:
        """The gradient of `qkv`, which takes its place in memory; returns that of the sinks, [H] on the device.

        Blocks go from the last to the first: with a block done nobody needs its queries, keys and values any more, and
        nobody adds to their gradients.
        """
        num_key_value_heads = self.heads[1]
        grad_kv = host_empty(len(qkv), 2 * num_key_value_heads, qkv.shape[-1], dtype=lse.dtype, device=self.device)
        grad_kv.zero_()
        grad_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=lse.dtype)
        for block in reversed(self.blocks):
            rows = block.queries
            q, *_ = self._load(qkv, rows, slice(0, 0))
            grad, block_out = (_heads_first(x[rows].to(self.device, non_blocking=True)) for x in (grad_out, out))
            block_lse = lse[rows].to(self.device, non_blocking=True).T[None].contiguous()
            dq = torch.zeros_like(q, dtype=lse.dtype)
            for keys, entries in block.parts:
                k, v = self._load_keys(qkv, keys)
                grads = block_backward(grad, q, k, v, block_out, block_lse, entries, self.scale)
                add(dq, entries.q_rows, grads[0])
                total = grad_kv[keys].to(self.device, non_blocking=True)
                for part, grad_part in zip(total.split(num_key_value_heads, dim=1), grads[1:], strict=True):
                    add(_heads_first(part), entries.kv_rows, grad_part)
                grad_kv[keys].copy_(total, non_blocking=True)
            if sinks is not None and grad_sinks is not None:
                delta = (grad.to(lse.dtype) * block_out.to(lse.dtype)).sum(-1)
                grad_sinks -= (torch.exp(sinks.to(lse.dtype)[:, None] - block_lse) * delta).sum((0, 2))
            done = torch.cat((_tokens_first(dq), grad_kv[rows].to(self.device, non_blocking=True)), dim=1)
            qkv[rows].copy_(done.to(qkv.dtype), non_blocking=True)
        return grad_sinks

    def _load(self, qkv: Tensor, queries: slice, keys: slice) -> tuple[Tensor, Tensor, Tensor]:
        """q [1, H, B, D] of the one range, k and v [1, K, N, D] of the other, on the device."""
        q = qkv[queries, : self.heads[0]].to(self.device, non_blocking=True)
        return _heads_first(q), *self._load_keys(qkv, keys)

    def _load_keys(self, qkv: Tensor, keys: slice) -> tuple[Tensor, Tensor]:
        kv = qkv[keys, self.heads[0] :].to(self.device, non_blocking=True)
        k, v = kv.split(self.heads[1:], dim=1)
        return _heads_first(k), _heads_first(v)


def _heads_first(x: Tensor) -> Tensor:
    """[N, H, D] -> [1, H, N, D], a view."""
    return x.transpose(0, 1)[None]


def _tokens_first(x: Tensor) -> Tensor:
    """[1, H, N, D] -> [N, H, D], a view."""
    return x[0].transpose(0, 1)

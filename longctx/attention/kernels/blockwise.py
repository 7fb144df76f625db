"""Kernels that compute one entry per call: torch's CPU attention, and plain torch.

Shape legend: H query heads, K key/value heads (H a multiple of K), N queries, M keys, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from longctx.attention.kernels.entries import Entries, Kernel, Operator, count_backward

MAX_QUERY_BLOCK = 512
"""Most queries in a call with a mask, which has as many rows. A window, or more keys than queries, needs a mask."""

DENSE_TOKENS = 8192
"""Most tokens in one call of the dense fallback: scores in fp32 then take 256 MiB a head, several times over."""


class Call(NamedTuple):
    """What a call does with scores: it has a causal flag, or a mask, or neither."""

    causal: bool
    """For as many keys as queries."""
    mask: Tensor | None
    """Additive, [queries, keys]."""
    scale: float
    softcap: float | None


class BlockwiseKernel(Kernel):
    """A kernel that computes one entry per call, or a block of its queries if the entry needs a mask.

    Subclasses implement a call in `_forward` and `_backward`.
    """

    max_scores: int | None = None
    """Most scores of all heads in one call, which then has fewer queries; None for as many queries as an entry has."""

    def forward(self, q, k, v, entries, scale):
        if entries.is_one_call and self.max_scores is None:
            out, lse = self._forward(q, k, v, Call(entries.causal, None, scale, entries.softcap))
            return out, lse.contiguous()
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3], dtype=_wide(q))
        for at_q, at_kv, causal, mask in _calls(entries, q, self.max_scores):
            rows = q[:, :, at_q], k[:, :, at_kv], v[:, :, at_kv]
            out[:, :, at_q], lse[:, :, at_q] = self._forward(*rows, Call(causal, mask, scale, entries.softcap))
        return out, lse

    def backward(self, grad_out, q, k, v, out, lse, entries, scale):
        if entries.is_one_call and self.max_scores is None:
            return self._backward(grad_out, q, k, v, out, lse, Call(entries.causal, None, scale, entries.softcap))
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros_like(x, dtype=_wide(x)) for x in (k, v))
        for at_q, at_kv, causal, mask in _calls(entries, q, self.max_scores):
            rows = grad_out[:, :, at_q], q[:, :, at_q], k[:, :, at_kv], v[:, :, at_kv], out[:, :, at_q], lse[:, :, at_q]
            dq[:, :, at_q], *grads = self._backward(*rows, Call(causal, mask, scale, entries.softcap))
            for total, grad in zip((dk, dv), grads, strict=True):
                total[:, :, at_kv] += grad  # blocks of one entry share keys
        return dq, dk.to(k.dtype), dv.to(v.dtype)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError


class CpuFlashKernel(BlockwiseKernel):
    """torch's blocked CPU attention, with native GQA, for fp64 to bf16."""

    name = "aten flash for CPU"

    def _forward(self, q, k, v, call):
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return forward(q, k, v, 0.0, call.causal, attn_mask=call.mask, scale=call.scale)

    def _backward(self, grad_out, q, k, v, out, lse, call):
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return backward(grad_out, q, k, v, out, lse, 0.0, call.causal, attn_mask=call.mask, scale=call.scale)

    def operator(self, entries: Entries) -> Operator | None:
        if not entries.is_one_call:
            return None
        call, causal = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, entries.causal
        return lambda q, k, v, scale: count_backward(call(q, k, v, 0.0, causal, scale=scale)[0])


class DenseKernel(BlockwiseKernel):
    """The reference in plain torch, with one score matrix per call: any device and dtype, O(L²) memory."""

    name = "dense"
    caps_scores = True

    def _forward(self, q, k, v, call):
        with torch.autocast(q.device.type, enabled=False):
            scores, _ = self._scores(q, k, call)
            lse = scores.logsumexp(-1)
            weights = (scores - lse[..., None]).exp()
            return (weights @ repeat_heads(v, q).to(weights)).to(q.dtype), lse

    def _backward(self, grad_out, q, k, v, out, lse, call):
        with torch.autocast(q.device.type, enabled=False):
            scores, slope = self._scores(q, k, call)
            weights = (scores - lse[..., None]).exp()
            grad_out, out = grad_out.to(weights), out.to(weights)
            grad_weights = grad_out @ repeat_heads(v, q).to(weights).transpose(-1, -2)
            grad_scores = weights * (grad_weights - (grad_out * out).sum(-1, keepdim=True)) * call.scale
            if slope is not None:
                grad_scores *= slope
            dq = grad_scores @ repeat_heads(k, q).to(weights)
            dk = sum_heads(grad_scores.transpose(-1, -2) @ q.to(weights), k)
            dv = sum_heads(weights.transpose(-1, -2) @ grad_out, v)
            return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    @staticmethod
    def _scores(q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor | None]:
        """Return scores [1, H, N, M], and where they are capped, their derivative by the scores before the cap."""
        causal, mask, scale, softcap = call
        scores = q.to(_wide(q)) @ repeat_heads(k, q).to(_wide(q)).transpose(-1, -2) * scale
        slope = None
        if softcap is not None:
            part = torch.tanh(scores / softcap)
            scores, slope = part * softcap, 1 - part.square()
        if causal:
            mask = _mask(q.shape[2], k.shape[2], k.shape[2], q)
        return scores if mask is None else scores + mask, slope


class CappedDenseKernel(DenseKernel):
    """The dense kernel with few queries in a call, for soft-capped scores where no other kernel has them.

    Its memory does not grow with the square of the tokens.
    """

    name = "dense, a few queries at a time"
    max_scores = 1 << 25


class ShortDenseKernel(DenseKernel):
    """The fallback if no other kernel is exact: the dense kernel, which raises ValueError above DENSE_TOKENS tokens."""

    name = f"dense, up to {DENSE_TOKENS:,} tokens"

    @staticmethod
    def _scores(q, k, call):
        if q.shape[2] * k.shape[2] > DENSE_TOKENS**2:
            raise ValueError(dense_refusal(max(q.shape[2], k.shape[2])))
        return DenseKernel._scores(q, k, call)


def dense_refusal(tokens: int) -> str:
    """Return the message that refuses more tokens than the dense fallback takes."""
    return (
        f"attention over {tokens:,} tokens: no kernel but the dense one is exact here, whose memory grows with their "
        f"square, and it is for {DENSE_TOKENS:,} tokens at most. The log says why others are passed over. Use bf16 on "
        "a GPU of compute capability 8.0 or later (pip install flash-attn adds kernels), or shorter "
        "sequences."
    )


def _calls(entries: Entries, q: Tensor, max_scores: int | None) -> Iterator[tuple[slice, slice, bool, Tensor | None]]:
    """Yield queries, keys, causal flag and additive mask of each call; every query sees a key."""
    longest = int(entries.num_keys.max(initial=1))
    window = min(entries.window or longest, longest)
    block = min(max(window, 64), MAX_QUERY_BLOCK, int(entries.num_queries.max(initial=1)))
    if max_scores is not None:
        block = min(block, max(1, max_scores // (longest * q.shape[1])))
    mask = None
    for at_q, at_kv in entries.compact:
        num_queries, num_keys = at_q.stop - at_q.start, at_kv.stop - at_kv.start
        fits = max_scores is None or num_queries * num_keys * q.shape[1] <= max_scores
        if fits and (not entries.causal or num_queries == num_keys <= window):
            yield at_q, at_kv, entries.causal, None
            continue
        if not entries.causal:
            for start in range(at_q.start, at_q.stop, block):
                yield slice(start, min(start + block, at_q.stop)), at_kv, False, None
            continue
        if mask is None:
            mask = _mask(block, block + window - 1, window, q)
        shift = at_kv.stop - at_q.stop
        for start in range(at_q.start, at_q.stop, block):
            stop = min(start + block, at_q.stop)
            keys = slice(max(start + shift + 1 - window, at_kv.start), stop + shift)
            corner = mask[start - stop :, keys.start - keys.stop :]
            yield slice(start, stop), keys, False, corner


def _mask(num_queries: int, num_keys: int, window: int, like: Tensor) -> Tensor:
    """Return a mask that is 0 where a query sees a key, else -inf; the last query and the last key are of one token.

    It has the dtype of `like`, since the CPU operator misreads an fp32 mask beside fp64 queries.
    """
    ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=like.device)
    own = num_keys - num_queries
    hidden = ones.triu(own + 1) | ones.tril(own - window)
    return torch.zeros_like(ones, dtype=like.dtype).masked_fill_(hidden, float("-inf"))


def _wide(x: Tensor) -> torch.dtype:
    """Return the dtype for sums over tensors of x's dtype: fp32 or wider."""
    return torch.promote_types(x.dtype, torch.float32)


def repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """[1, K, M, D] -> [1, H, M, D]: repeat each key/value head for every query head that uses it."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def sum_heads(grad: Tensor, x: Tensor) -> Tensor:
    """[1, H, M, D] -> [1, K, M, D]: the adjoint of `repeat_heads`."""
    return grad.unflatten(1, (x.shape[1], -1)).sum(2)

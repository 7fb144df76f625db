"""FlashAttention kernels, which compute all entries in one varlen call: their base class, and torch's own.

They return the natural log-sum-exp as fp32 [H, N]. Their backward takes any `out` and `lse`. FlashAttention-2 is
described in arXiv 2307.08691.

Shape legend: H query heads, K key/value heads, N queries, M keys, D head size.
"""

from __future__ import annotations

from operator import attrgetter

import torch
from torch import Tensor

from longctx.attention.kernels.entries import Entries, Kernel, Operator, Varlen, count_backward


class VarlenKernel(Kernel):
    """The base class of FlashAttention kernels, for fp16 and bf16.

    A library implements `_forward` and `_backward` on tensors [N, H, D] and [M, K, D].
    """

    min_capability = (8, 0)
    """Lowest CUDA compute capability that the kernel is made for."""

    def fits(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        return (
            device.type == "cuda"
            and dtype in (torch.float16, torch.bfloat16)
            and head_dim % 8 == 0
            and head_dim <= 256
            and torch.cuda.get_device_capability(device) >= self.min_capability
        )

    def forward(self, q, k, v, entries, scale):
        out, lse = self._forward(tokens_first(q), tokens_first(k), tokens_first(v), entries.varlen(q.device), scale)
        return heads_first(out), lse[None]

    def backward(self, grad_out, q, k, v, out, lse, entries, scale):
        varlen, lse = entries.varlen(q.device), lse[0].contiguous()
        grad_out, q, k, v, out = (tokens_first(x) for x in (grad_out, q, k, v, out))
        dq, dk, dv = self._backward(grad_out, q, k, v, out, lse, varlen, scale)
        return heads_first(dq), heads_first(dk), heads_first(dv)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, scale: float) -> tuple[Tensor, Tensor]:
        """Return out [N, H, D] and lse [H, N]."""
        raise NotImplementedError

    def _backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, varlen: Varlen, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq [N, H, D], dk and dv [M, K, D]."""
        raise NotImplementedError


class AtenFlashKernel(VarlenKernel):
    """torch's own build of FlashAttention-2."""

    name = "aten varlen flash"

    def _forward(self, q, k, v, varlen, scale):
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *(q, k, v, *_sequences(varlen), 0.0, varlen.causal, False), scale=scale, **_window(varlen)
        )
        return out, lse

    def _backward(self, grad_out, q, k, v, out, lse, varlen, scale):
        no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        return torch.ops.aten._flash_attention_backward(
            *(grad_out, q, k, v, out, lse, *_sequences(varlen), 0.0, varlen.causal, *no_dropout),
            scale=scale,
            **_window(varlen),
        )

    def operator(self, entries: Entries) -> Operator:
        def run(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            rows = tokens_first(q), tokens_first(k), tokens_first(v)
            return heads_first(count_backward(self._forward(*rows, entries.varlen(q.device), scale)[0]))

        return run


_sequences = attrgetter("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def _window(varlen: Varlen) -> dict[str, int]:
    return {"window_size_left": varlen.window_size_left, "window_size_right": varlen.window_size_right}


def tokens_first(x: Tensor) -> Tensor:
    """[1, H, N, D] -> [N, H, D], a view."""
    return x[0].transpose(0, 1)


def heads_first(x: Tensor) -> Tensor:
    """[N, H, D] -> [1, H, N, D], a view."""
    return x.transpose(0, 1)[None]

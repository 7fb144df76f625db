"""torch's memory-efficient attention, the only one on CUDA that computes in fp32 without a matrix of all scores."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from longctx.attention.kernels.blockwise import BlockwiseKernel, repeat_heads, sum_heads

ALIGNMENT = 8
"""The distance of a mask's rows has to be a multiple of this many elements."""

LSE_ALIGNMENT = 32
"""The log-sum-exp has to have a multiple of this many queries, and is infinite beyond the last one."""


class MemoryEfficientKernel(BlockwiseKernel):
    """One call per entry, with key/value heads repeated. Slower than the flash kernels, which have no fp32.

    As in torch's own context parallelism, backward takes the `out` and log-sum-exp of a merged softmax.
    """

    name = "aten memory-efficient"

    def fits(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        if device.type != "cuda":
            return False
        if dtype in (torch.float16, torch.bfloat16):  # heads that are too large for the flash kernels
            return head_dim > 256 and head_dim % 8 == 0
        return dtype == torch.float32 and head_dim % 4 == 0

    def _forward(self, q, k, v, call):
        forward = torch.ops.aten._scaled_dot_product_efficient_attention
        causal, mask, scale, _ = call
        bias = _as_bias(mask, q)
        out, lse, *_ = forward(q, repeat_heads(k, q), repeat_heads(v, q), bias, True, 0.0, causal, scale=scale)
        return out, lse[:, :, : q.shape[2]]

    def _backward(self, grad_out, q, k, v, out, lse, call):
        backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        causal, mask, scale, _ = call
        lse = F.pad(lse, (0, -q.shape[2] % LSE_ALIGNMENT), value=math.inf)
        no_seed = torch.empty((), dtype=torch.int64, device=q.device)
        dq, dk, dv, _ = backward(
            *(grad_out, q, repeat_heads(k, q), repeat_heads(v, q), _as_bias(mask, q), out, lse, no_seed, no_seed, 0.0),
            *([True, True, True, False], causal),
            scale=scale,
        )
        return dq, sum_heads(dk, k), sum_heads(dv, v)


def _as_bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """[N, M] -> [1, H, N, M], a view whose rows are aligned as the kernel needs."""
    if mask is None:
        return None
    aligned = F.pad(mask, (0, -mask.shape[1] % ALIGNMENT))[:, : mask.shape[1]]
    return aligned.expand(1, q.shape[1], *mask.shape)

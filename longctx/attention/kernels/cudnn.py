"""cuDNN's attention through torch, for entries of one document. It builds a plan for every new length."""

from __future__ import annotations

import torch
from torch import Tensor

from longctx.attention.kernels.entries import Entries, Kernel, Operator, count_backward


class CudnnKernel(Kernel):
    """cuDNN's attention over one entry, in fp16 and bf16.

    A causal entry has to have as many keys as queries, since cuDNN aligns them at the first key. As in torch's own
    context parallelism, lse is the natural logarithm, and backward takes the one of a merged softmax.
    """

    name = "cuDNN"

    def __init__(self) -> None:
        self._lse_shape: tuple[int, ...] | None = None
        """Dimensions of lse after the third: [1, H, N] in some versions of torch is [1, H, N, 1] in others."""

    def fits(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        return (
            device.type == "cuda"
            and torch.version.cuda is not None
            and dtype in (torch.float16, torch.bfloat16)
            and head_dim % 8 == 0
            and head_dim <= 128
            and torch.cuda.get_device_capability(device) >= (9, 0)
        )

    def takes(self, entries: Entries) -> bool:
        return entries.is_one_call

    def forward(self, q, k, v, entries, scale):
        out, lse, *_ = _cudnn_attention(q, k, v, None, True, 0.0, entries.causal, False, scale=scale)
        self._lse_shape = lse.shape[3:]
        return out, lse.reshape(q.shape[:3])

    def backward(self, grad_out, q, k, v, out, lse, entries, scale):
        assert self._lse_shape is not None, "a forward call, if only that of the check, comes first"
        grad_out, out = (_heads_together(x) for x in (grad_out, out))
        no_seed = torch.empty((), dtype=torch.int64, device=q.device)
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(grad_out, q, k, v, out, lse.reshape(*lse.shape, *self._lse_shape).contiguous()),
            *(no_seed, no_seed, None, None, None, q.shape[2], k.shape[2], 0.0, entries.causal),
            scale=scale,
        )

    def operator(self, entries: Entries) -> Operator:
        def run(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            out = _cudnn_attention(q, k, v, None, True, 0.0, entries.causal, False, scale=scale)[0]
            if out.requires_grad:
                out.register_hook(_heads_together)
            return count_backward(out)

        return run


_cudnn_attention = torch.ops.aten._scaled_dot_product_cudnn_attention.default


def _heads_together(x: Tensor) -> Tensor:
    """Return x [1, H, N, D] in the layout of a model's layers, whose heads of a row lie together; there it is x itself.

    torch keeps a plan of a backward pass without asking for the layouts of out and its gradient, so that these always
    have to be the same. The one of out follows from that of q, for which torch does ask.
    """
    return x.transpose(1, 2).contiguous().transpose(1, 2)

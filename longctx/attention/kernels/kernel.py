"""The interface of all kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from longctx.attention.kernels.entries import Entries


class Kernel:
    """Attention of one list of entries, over rows that are already taken in entry order.

    Shape legend: H query heads, K key/value heads (H a multiple of K), N queries, M keys, D head size.
    """

    name: str

    def fits(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        """Whether the kernel supports such tensors; `check` finds out whether it is exact on them."""
        return True

    def takes(self, entries: Entries) -> bool:
        """Whether the kernel computes such entries."""
        return True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, entries: Entries, scale: float) -> tuple[Tensor, Tensor]:
        """q [1, H, N, D], k and v [1, K, M, D] -> out [1, H, N, D] of q's dtype, lse [1, H, N] fp32 or wider.

        lse is the natural logarithm of the sum of the exponentials of a query's scaled scores.
        """
        raise NotImplementedError

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        entries: Entries,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v.

        `out` and `lse` may be those of a wider softmax, of which these entries are a part.
        """
        raise NotImplementedError

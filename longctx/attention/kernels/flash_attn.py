"""The flash-attn libraries, called by keyword, so that a version with other arguments fails instead of misreading them.

Signatures: flash_attn 2.7.0 to 2.8.3; `flash_attn_interface` of flash_attn_3 since 2025-08 (in earlier ones the window
is one argument, and they are passed over); flash_attn.cute of flash-attn-4 4.0.0b0 to b36.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import torch

from longctx.attention.kernels.entries import Varlen
from longctx.attention.kernels.varlen import VarlenKernel


class FlashAttentionKernel(VarlenKernel):
    """A version of flash-attn.

    Args:
        release: release of the installed distribution, for the kernel's name.
        module: the module that defines its functions; None means the installed one, imported at the first call.
    """

    distribution: str
    module_name: str
    caps_scores = True

    def __init__(self, release: str, module: ModuleType | None = None):
        self.name = f"{self.distribution} {release}"
        self.release = release
        self._module = module

    @property
    def is_loaded(self) -> bool:
        """Whether this process has imported the library."""
        return self._module is not None

    @property
    def module(self) -> ModuleType:
        if self._module is None:
            self._module = importlib.import_module(self.module_name)
        return self._module


def _written(call, grad_out, q, k, v, out, lse, scale):
    """Return the gradients that versions 2 and 3 write to tensors that they are given."""
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    call(
        **{"dout": grad_out, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse},
        **{"dq": dq, "dk": dk, "dv": dv},
        softmax_scale=scale,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return dq, dk, dv


class FlashAttention2(FlashAttentionKernel):
    """FlashAttention-2, for Ampere and newer GPUs."""

    distribution = "flash-attn"
    module_name = "flash_attn.flash_attn_interface"

    def _forward(self, q, k, v, varlen, scale):
        out, lse, *_ = self.module._flash_attn_varlen_forward(
            q=q, k=k, v=v, dropout_p=0.0, softmax_scale=scale, **vars(varlen)
        )
        return out, lse

    def _backward(self, grad_out, q, k, v, out, lse, varlen, scale):
        call = partial(self.module._flash_attn_varlen_backward, dropout_p=0.0, alibi_slopes=None, **vars(varlen))
        return _written(call, grad_out, q, k, v, out, lse, scale)


class FlashAttention3(FlashAttentionKernel):
    """FlashAttention-3, for Hopper only (arXiv 2407.08608)."""

    distribution = "flash-attn-3"
    module_name = "flash_attn_interface"

    def fits(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        return super().fits(device, dtype, head_dim) and torch.cuda.get_device_capability(device)[0] == 9

    def _forward(self, q, k, v, varlen, scale):
        out, lse, *_ = self.module._flash_attn_forward(q=q, k=k, v=v, softmax_scale=scale, **vars(varlen))
        return out, lse

    def _backward(self, grad_out, q, k, v, out, lse, varlen, scale):
        arguments = vars(varlen) | {"is_causal": varlen.causal}
        del arguments["causal"]
        return _written(partial(self.module._flash_attn_backward, **arguments), grad_out, q, k, v, out, lse, scale)


class FlashAttention4(FlashAttentionKernel):
    """FlashAttention-4, written for Blackwell, for Hopper and newer.

    It returns the gradients, and takes None for a window without an end. Some releases have no soft cap backward: the
    check finds it out.
    """

    distribution = "flash-attn-4"
    module_name = "flash_attn.cute.interface"
    min_capability = (9, 0)

    def _forward(self, q, k, v, varlen, scale):
        out, lse, *_ = self.module._flash_attn_fwd(
            q=q, k=k, v=v, softmax_scale=scale, return_lse=True, **self._arguments(varlen)
        )
        return out, lse

    def _backward(self, grad_out, q, k, v, out, lse, varlen, scale):
        return self.module._flash_attn_bwd(
            **{"q": q, "k": k, "v": v, "out": out, "dout": grad_out, "lse": lse},
            softmax_scale=scale,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **self._arguments(varlen),
        )

    @staticmethod
    def _arguments(varlen: Varlen) -> dict[str, Any]:
        sides = ("window_size_left", "window_size_right")
        ends = {side: size if (size := getattr(varlen, side)) >= 0 else None for side in sides}
        arguments = vars(varlen) | ends
        if not varlen.softcap:  # one pass has None for it, the other 0
            del arguments["softcap"]
        return arguments


def is_installed(kernel: type[FlashAttentionKernel]) -> bool:
    """Whether the kernel's package is installed, which is not imported."""
    return any(isinstance(found, kernel) for found in installed())


def installed() -> Iterator[FlashAttentionKernel]:
    """Yield the installed versions, the fastest first, without importing them."""
    for kernel in (FlashAttention3, FlashAttention4, FlashAttention2):
        try:
            yield kernel(version(kernel.distribution))
        except PackageNotFoundError:
            continue

"""A function of every token by itself, a few tokens at a time; what goes in and comes out lies in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from longctx.host import host_empty


def chunks_of(length: int, size: int) -> list[slice]:
    """0..length in slices of `size`, the last one maybe shorter."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


class ParameterGradients:
    """Sums over chunks, in fp32 or wider, of the gradients of parameters.

    Functions of chunks take parameters as inputs and return these sums, so that FSDP2, ZeRO and DDP see one gradient
    of each, as of any other layer.
    """

    def __init__(self, parameters: Sequence[Tensor]):
        self.parameters = parameters
        self.sums: list[Tensor | None] = [None] * len(parameters)

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """What one chunk gives each of the parameters, None where it does not use it."""
        for i, (parameter, grad) in enumerate(zip(self.parameters, grads, strict=True)):
            if grad is None:
                continue
            total = self.sums[i]
            if total is None:
                self.sums[i] = grad.to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
            else:
                total += grad

    def result(self) -> list[Tensor | None]:
        """In the parameters' dtypes."""
        pairs = zip(self.sums, self.parameters, strict=True)
        return [None if total is None else total.to(parameter.dtype) for total, parameter in pairs]


class Autocast:
    """The autocast state at hand, to be entered again in a backward pass, which has none."""

    def __init__(self, device: torch.device):
        self.settings = {
            "device_type": device.type,
            "dtype": torch.get_autocast_dtype(device.type),
            "enabled": torch.is_autocast_enabled(device.type),
        }

    @contextmanager
    def with_grad(self) -> Iterator[None]:
        with torch.enable_grad(), torch.autocast(**self.settings):
            yield


def trained(module: nn.Module) -> list[nn.Parameter]:
    """The module's parameters that are not frozen."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def settle(device: torch.device) -> None:
    """Wait until copies to the host are there: what follows may read them on the CPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def run_in_tiles(
    module: nn.Module, run: Callable[[Tensor], Tensor], size: int, device: torch.device, x: Tensor
) -> Tensor:
    """run(x [1, S, ...]) -> [1, S, ...], in host memory, differentiable; recomputed in backward.

    Args:
        run: `module`'s function, of each token by itself.
        size: tokens at a time.
        device: that the module is on.
        x: on the host or on the device.
    """
    return _Tiles.apply(run, size, device, x, *trained(module))


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run: Callable, size: int, device: torch.device, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.run, ctx.size, ctx.device, ctx.parameters = run, size, device, parameters
        ctx.autocast = Autocast(device)
        ctx.save_for_backward(x)
        out: Any = None
        for at in chunks_of(x.shape[1], size):
            tile = run(x[:, at].to(device, non_blocking=True))
            if out is None:
                out = host_empty(1, x.shape[1], *tile.shape[2:], dtype=tile.dtype, device=device)
            out[:, at].copy_(tile, non_blocking=True)
        settle(device)
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        (x,) = ctx.saved_tensors
        needs_x = x.is_floating_point() and ctx.needs_input_grad[3]
        grad_x = host_empty(*x.shape, dtype=x.dtype, device=ctx.device) if needs_x else None
        sums = ParameterGradients(ctx.parameters)
        for at in chunks_of(x.shape[1], ctx.size):
            tile = x[:, at].to(ctx.device, non_blocking=True).detach().requires_grad_(needs_x)
            with ctx.autocast.with_grad():
                out = ctx.run(tile)
            inputs = [*([tile] if needs_x else []), *ctx.parameters]
            grad = grad_out[:, at].to(ctx.device, non_blocking=True)
            grads = torch.autograd.grad(out, inputs, grad, allow_unused=True)
            if grad_x is not None:
                grad_x[:, at].copy_(grads[0], non_blocking=True)
            sums.add(grads[len(inputs) - len(ctx.parameters) :])
        settle(ctx.device)
        return None, None, None, grad_x, *sums.result()

"""Functions of single tokens, run for a few tokens at a time, whose inputs and outputs lie in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from longctx.layers.chunked.copies import Copies
from longctx.sequence.host_tensors import host_empty

TILE_NUMBERS = 1 << 24
"""Least numbers of a tile's hidden states. An element-wise kernel then computes for several times as long as the host
takes to launch it."""


def tile_tokens(hidden_size: int) -> int:
    """Return the tokens of a tile of an MLP, where no number of tiles is asked for.

    There are as many as the model is wide, as in ALST (arXiv 2506.13996), and more in a model that is narrower than
    4,096. A kernel over 1,024 tokens of a model that is 1,024 wide moves about 10 MB, in 3 µs of an H200, and its host
    takes 6 µs to launch the next one.
    """
    return max(hidden_size, -(-TILE_NUMBERS // hidden_size))


def chunks_of(length: int, size: int) -> list[slice]:
    """Return 0..length in slices of `size`, of which the last one may be shorter."""
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
        """Add the gradients of one chunk, None for a parameter that it does not use."""
        for i, (parameter, grad) in enumerate(zip(self.parameters, grads, strict=True)):
            if grad is None:
                continue
            total = self.sums[i]
            if total is None:
                self.sums[i] = grad.to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
            else:
                total += grad

    def result(self) -> list[Tensor | None]:
        """Return the sums in the parameters' dtypes."""
        pairs = zip(self.sums, self.parameters, strict=True)
        return [None if total is None else total.to(parameter.dtype) for total, parameter in pairs]


def current_autocast(device: torch.device) -> Callable[[], torch.autocast]:
    """Return what makes contexts with the current autocast state, for a backward pass, which has none."""
    dtype, enabled = torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type)
    return partial(torch.autocast, device.type, dtype, enabled)


def trained(module: nn.Module) -> list[nn.Parameter]:
    """Return the module's parameters that are not frozen."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def ask_for_gradient(part: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """Make the part's first input require a gradient, behind frozen embeddings, too. This is a forward pre-hook.

    ZeRO-3 reduces the gradients of a leaf module when that of its input is there. Without one it would reduce them
    before they are computed, as zeros.
    """
    if torch.is_grad_enabled() and args and not args[0].requires_grad and trained(part):
        return args[0].detach().requires_grad_(), *args[1:]
    return None


def keep_backward_in_one_thread() -> None:
    """Have backward passes that this thread starts stay in it, instead of also using a thread for each device.

    Hidden states in host memory put the nodes between layers on the CPU's thread, and the layers' parameters put theirs
    on the device's. Engines reduce a layer's gradients in a hook on its input, which must come after the gradients. One
    thread takes the nodes in that order, as on a machine without a GPU; of two threads, the CPU's comes first, and the
    engine reduces gradients that are not there yet.
    """
    torch.autograd.set_multithreading_enabled(False)


def check_one_thread(device: torch.device) -> None:
    """Check in a backward pass that `keep_backward_in_one_thread` holds for it.

    Raises:
        ValueError: if a device's thread takes a part in it.
    """
    if device.type != "cpu" and torch.autograd.is_multithreading_enabled():
        raise ValueError(
            "sequence_chunk_size: this backward pass runs in several threads, and FSDP2 and DeepSpeed would reduce "
            "gradients before they are computed. Call backward in the thread that called parallelize, or under "
            "torch.autograd.set_multithreading_enabled(False)."
        )


def run_in_tiles(module: nn.Module, run: Callable[[Tensor], Tensor], size: int, copies: Copies, x: Tensor) -> Tensor:
    """run(x [1, S, ...]) -> [1, S, ...], in host memory, differentiable; recomputed in backward.

    Args:
        run: `module`'s function, of each token by itself.
        size: tokens at a time.
        copies: to and from the device that the module is on.
        x: on the host or on the device.
    """
    return _Tiles.apply(run, size, copies, x, *trained(module))


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run: Callable, size: int, copies: Copies, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.run, ctx.size, ctx.copies, ctx.parameters = run, size, copies, parameters
        ctx.autocast = current_autocast(copies.device)
        ctx.save_for_backward(x)
        out: Any = None
        for at, (tile,) in copies.arriving(chunks_of(x.shape[1], size), lambda at: [x[:, at]]):
            y = run(tile)
            if out is None:
                out = host_empty(1, x.shape[1], *y.shape[2:], dtype=y.dtype, device=copies.device)
            copies.leave((out[:, at], y))
        copies.synchronize()
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        copies = ctx.copies
        check_one_thread(copies.device)
        (x,) = ctx.saved_tensors
        needs_x = x.is_floating_point() and ctx.needs_input_grad[3]
        grad_x = host_empty(*x.shape, dtype=x.dtype, device=copies.device) if needs_x else None
        sums = ParameterGradients(ctx.parameters)
        chunks = chunks_of(x.shape[1], ctx.size)
        for at, (tile, grad) in copies.arriving(chunks, lambda at: [x[:, at], grad_out[:, at]]):
            tile.requires_grad_(needs_x)
            with torch.enable_grad(), ctx.autocast():
                out = ctx.run(tile)
            inputs = [*([tile] if needs_x else []), *ctx.parameters]
            grads = torch.autograd.grad(out, inputs, grad, allow_unused=True)
            if grad_x is not None:
                copies.leave((grad_x[:, at], grads[0]))
            sums.add(grads[len(inputs) - len(ctx.parameters) :])
        copies.synchronize()
        return None, None, None, grad_x, *sums.result()

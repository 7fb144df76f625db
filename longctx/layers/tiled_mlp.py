"""MLPs, and the norms beside them, over tiles of tokens, forward and backward (tiled MLP of ALST, arXiv 2506.13996).

They see each token by itself, experts included, so that tiles of tokens give the same as all at once; only one tile's
wide intermediate tensors exist at a time, and backward computes them again. Once MLPs are tiled, the fp32 tensors of
norms are the largest: seven of [T, h] in backward, in transformers' own RMSNorm. Parameters are inputs of one
autograd function, which returns one gradient for each, summed over the tiles in fp32: FSDP2, ZeRO and DDP see what
they see of any layer. Under activation checkpointing nothing is computed more often than without tiles.

Shape legend: T tokens of this rank, h hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from longctx.layers.chunked.tiles import (
    ParameterGradients,
    ask_for_gradient,
    chunks_of,
    current_autocast,
    tile_tokens,
    trained,
)
from longctx.layers.routers import keep_pass
from longctx.sequence.host_tensors import saved_in_place
from longctx.upstream.deepspeed_internals import gather_once
from longctx.upstream.transformers_internals import replace_forward


def install_tiled_mlp(model: PreTrainedModel, num_shards: int) -> None:
    """Make every MLP of `model` work on tiles. Call this before FSDP2 or DeepSpeed wraps the model.

    Args:
        num_shards: tiles of each sequence; 0 for tiles of `tile_tokens`.

    Raises:
        ValueError: for a negative number, or a model whose layers have no part of which it is known to be an MLP.
    """
    if num_shards < 0:
        raise ValueError(
            f"tiled_mlp_num_shards {num_shards} is not a number of tiles. Use 0 for tiles that suit the "
            "model's width, or a number of at least 1."
        )
    mlps: list[Any] = list(find_mlps(model))
    if not mlps:
        raise ValueError(f"No MLP was found in {type(model).__name__}. Leave tiled MLPs out for this model.")
    automatic = tile_tokens(model.config.get_text_config().hidden_size)
    for part in [*mlps, *_norms(model)]:
        replace_forward(part, partial(_forward, part, part.forward, num_shards, automatic))
        part.register_forward_pre_hook(ask_for_gradient)  # `_Keep` needs it, too
    for mlp in mlps:
        gather_once(mlp)


def find_mlps(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the MLPs of the decoder layers: the parts that take hidden states alone and have modules of their own.

    Mixers take more than hidden states, and norms have no modules. Gemma 4's routers are left out by their name.
    """
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            for part in layer.children():
                if _takes_one(part) and any(True for _ in part.children()) and "Router" not in type(part).__name__:
                    yield part


def _norms(model: nn.Module) -> Iterator[nn.Module]:
    """Return the norms that take one tensor, including those of queries and keys."""
    return (part for part in model.modules() if "Norm" in type(part).__name__ and _takes_one(part))


def _takes_one(part: nn.Module) -> bool:
    return len(inspect.signature(part.forward).parameters) == 1


@torch.compiler.disable  # it differentiates while it is being differentiated
def _forward(
    mlp: nn.Module, run: Callable[[Tensor], Any], num_shards: int, automatic: int, hidden_states: Tensor
) -> Any:
    """hidden_states [B, S, ...], or [T, h] -> what `run` gives: a tensor of this shape, or a tuple that starts with it.

    Llama 4's experts give [T, h] for any shape.

    A sequence that is a single tile goes the same way as others: ZeRO-1 and ZeRO-2 reduce gradients in the order in
    which they come, and data-parallel ranks have sequences of different lengths.
    """
    if num_shards == 1:
        return run(hidden_states)
    x = hidden_states[None] if hidden_states.dim() == 2 else hidden_states.reshape(1, -1, *hidden_states.shape[2:])
    size = -(-x.shape[1] // num_shards) if num_shards else automatic
    kept = _Keep.apply(x)
    out = _Tiles.apply(mlp, keep_pass(run), size, kept.grad_fn, kept, *trained(mlp))
    first, *others = out if isinstance(out, tuple) else (out,)
    first = first.view(hidden_states.shape) if first.dim() == x.dim() else first
    return (first, *others) if isinstance(out, tuple) else first


class _Keep(torch.autograd.Function):
    """x, saved for `_Tiles` before it runs.

    This ends the second forward of a checkpointed layer in which nothing behind the MLP saves anything more, so that
    the MLP is not computed there, but tile by tile in `_Tiles.backward` alone.
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor | None) -> Tensor | None:
        return grad


class _Tiles(torch.autograd.Function):
    """run(x [1, T, h]) by tiles of `size` tokens."""

    @staticmethod
    def forward(ctx, mlp: nn.Module, run: Callable, size: int, keeper: Any, x: Tensor, *parameters: Tensor):
        ctx.mlp, ctx.run, ctx.size, ctx.keeper = mlp, run, size, keeper
        ctx.autocast = current_autocast(x.device)
        ctx.set_materialize_grads(False)
        num_tokens = x.shape[1]
        results: list[Tensor] = []
        for at in chunks_of(num_tokens, size):
            tile = run(x[:, at])
            ctx.is_tuple = isinstance(tile, tuple)
            parts = tile if ctx.is_tuple else (tile,)
            if not results:
                results = [_whole(part, at.stop, num_tokens) for part in parts]
            for result, part in zip(results, parts, strict=True):
                _tokens(result, at, num_tokens).copy_(part)
            del tile, parts
        ctx.mark_non_differentiable(*(result for result in results if not result.is_floating_point()))
        return tuple(results) if ctx.is_tuple else results[0]

    @staticmethod
    def backward(ctx, *grads: Tensor | None):
        (x,) = ctx.keeper.saved_tensors
        parameters = trained(ctx.mlp)
        sums = ParameterGradients(parameters)
        dx = torch.empty_like(x)
        for at in chunks_of(x.shape[1], ctx.size):
            tile = x[:, at].detach().requires_grad_()
            with torch.enable_grad(), ctx.autocast(), saved_in_place():  # no offloading of what one tile saves
                out = ctx.run(tile)
            pairs = [
                (part, _tokens(grad, at, x.shape[1]))
                for part, grad in zip(out if ctx.is_tuple else (out,), grads, strict=True)
                if grad is not None
            ]
            del out
            outputs, of_tile = zip(*pairs, strict=True)
            dx[:, at], *of_parameters = torch.autograd.grad(outputs, [tile, *parameters], of_tile, allow_unused=True)
            sums.add(of_parameters)
            del pairs, outputs, of_tile, of_parameters
        return None, None, None, None, dx, *sums.result()


def _whole(part: Tensor, tile_tokens: int, num_tokens: int) -> Tensor:
    """Empty, for all tokens what `part` is for a tile: [1, tile, ...] or, as routers give, [tile, ...]."""
    dim = 1 if part.shape[:2] == (1, tile_tokens) else 0
    assert part.shape[dim] == tile_tokens, f"an MLP gave {tuple(part.shape)} for {tile_tokens} tokens"
    return part.new_empty(*part.shape[:dim], num_tokens, *part.shape[dim + 1 :])


def _tokens(x: Tensor, at: slice, num_tokens: int) -> Tensor:
    """The tile of what `_whole` made, or of its gradient."""
    return x[:, at] if x.shape[:2] == (1, num_tokens) else x[at]

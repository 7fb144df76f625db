"""Install the sequence-chunked step in a model: in its layers, and in the modules before and after them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from longctx.layers.checkpointed_layers import LayerCheckpoints
from longctx.layers.chunked.copies import Copies
from longctx.layers.chunked.layer import ChunkedLayer, KeptOutput, LazyTokens, RunChunked
from longctx.layers.chunked.tiles import ask_for_gradient, keep_backward_in_one_thread, run_in_tiles, trained
from longctx.model.recurrent import recurrent_sizes


def install_chunked(model: PreTrainedModel, size: int, device: torch.device, kept: LayerCheckpoints) -> None:
    """Make every decoder layer of `model` run over `size` tokens at a time, in training and evaluation.

    Embeddings, layers and the final norm then hand on host tensors [1, S/P, h]. A layer keeps its input there; all
    else is computed again in the backward pass, so that activation checkpointing has nothing left to do and stays off.
    Call this in the thread that will call backward: see `keep_backward_in_one_thread`.

    Args:
        device: what computes.
        kept: the layers that keep what attention returned, as large as one more input of each, so that attention is not
            computed again: the `selective` last ones, in host memory, or on the device for those after the first
            `offloaded` ones.

    Raises:
        ValueError: if `size` is below 1, or the model has layers that mix tokens in another way than by attention.
    """
    if size < 1:
        raise ValueError(f"sequence_chunk_size {size} is below 1. Use a few thousand tokens.")
    if recurrent_sizes(model.config):
        raise ValueError(
            f"sequence_chunk_size {size}: recurrent layers of {model.config.model_type} carry a state through "
            "all tokens, and cannot be split at their attention. Leave it out."
        )
    keep_backward_in_one_thread()
    copies = Copies(device)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    blocks = next(m for m in model.modules() if any(child is layers[0] for child in m.children()))
    backbone = next(m for m in model.modules() if any(child is blocks for child in m.children()))
    for number, layer in enumerate(layers):
        layer._z3_leaf = True  # ZeRO-3 then gathers the layer once for all chunks, not each of its modules for each
        forward = inspect.unwrap(type(layer).forward)
        where = _kept_by(number, kept, len(layers))
        layer.forward = partial(_layer_forward, layer, partial(forward, layer), size, copies, where)
        layer.register_forward_pre_hook(ask_for_gradient)
    for child in backbone.children():
        if any(name.endswith("inv_freq") for name, _ in child.named_buffers()):
            child.forward = partial(_lazy_forward, child.forward, device)
        elif child is not blocks:
            child.forward = partial(run_in_tiles, child, child.forward, size, copies)
    model._set_gradient_checkpointing = lambda *args, **kwargs: None


def _kept_by(number: int, kept: LayerCheckpoints, num_layers: int) -> KeptOutput:
    """Return where a layer, counted from 0, keeps what its attention returned."""
    if kept.selective is not None and number < num_layers - kept.selective:
        return None
    return "host" if kept.offloaded is None or number < kept.offloaded else "device"


def _layer_forward(
    layer: nn.Module,
    forward: Callable[..., Tensor],
    size: int,
    copies: Copies,
    kept: KeptOutput,
    hidden_states: Tensor,
    **keywords: Any,
) -> Tensor:
    step = ChunkedLayer(
        forward,
        {name: value for name, value in keywords.items() if name != "sequence"},
        sequence=keywords["sequence"],
        size=size,
        kept=kept,
        copies=copies,
    )
    return RunChunked.apply(step, hidden_states, *trained(layer))


def _lazy_forward(
    forward: Callable[..., Any], device: torch.device, x: Tensor, position_ids: Tensor, *args: Any, **keywords: Any
) -> LazyTokens:
    """RoPE's table for a chunk when a layer asks, instead of one of all tokens; `x` says dtype and device alone."""
    empty = torch.empty(0, dtype=x.dtype, device=device)
    return LazyTokens(lambda at: forward(empty, position_ids[:, at], *args, **keywords))

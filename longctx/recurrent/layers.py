"""Recurrent layers of transformers on the batches of `SequenceParallel.shard`.

A layer mixes tokens in two of its module's functions alone: a short causal convolution, and a scan that carries a
state. All else in it works on one token at a time. So the layer's own forward runs, on this rank's tokens, with these
functions exchanged for ours, which know where documents begin and what the other ranks hold.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from longctx.recurrent.gated_delta import DeltaHeads, check_delta_rule, delta_rule_by_heads, delta_rule_by_states
from longctx.recurrent.mamba2 import mamba2_by_states
from longctx.recurrent.passing import convolve_pieces
from longctx.recurrent.pieces import Pieces
from longctx.sequence.batch import AttentionContext, refuse_uncut
from longctx.sequence.layout import Layout
from longctx.upstream.transformers_internals import attention_implementation, decoder_of, replace_forward, with_names

CONVOLUTION = "causal_conv1d_fn"
DELTA_RULE = "torch_chunk_gated_delta_rule"
DELTA_ATTENTION = "chunk_kimi_delta_attention"
MAMBA2_SCAN = "mamba2_chunk_scan"
MAMBA2_IN_ONE = "mamba2_split_conv1d_scan_combined"
"""transformers' names of the functions that mix tokens, the same in the modules of all models."""

PrefersHeads = Callable[[Layout, Pieces], bool]
"""Whether the ranks exchange tokens for heads in the gated delta rules of a batch; else states pass between them."""

DOCUMENTS_KEYWORD = "seq_idx"
"""transformers' name of the keyword that tells recurrent layers where documents begin, for kernels that need it."""

STATE_KEYWORDS = ("cache", "cache_params", "past_key_values", "attention_mask")


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that mix tokens by a convolution or a scan, without the norms and MLPs beside them."""
    return [layer for layer in model.modules() if CONVOLUTION in _called_by(layer)]


def delta_rule_layers(model: nn.Module, rule: str = DELTA_RULE) -> list[nn.Module]:
    """Return those of them that call the function of this name, a gated delta rule."""
    return [layer for layer in recurrent_layers(model) if rule in _called_by(layer)]


def functions_of(layer: nn.Module) -> ModuleType:
    """Return the module of transformers that has the layer's functions."""
    return sys.modules[type(layer).__module__]


def install_recurrent(model: PreTrainedModel, name: str, prefers_heads: PrefersHeads) -> None:
    """Make every recurrent layer of `model` compute exactly on the batches of `SequenceParallel.shard`.

    Args:
        name: our `attn_implementation`. While a model has it, its recurrent layers need batches that were cut.
        prefers_heads: asked once for each batch.
    """
    layers = recurrent_layers(model)
    if not all(_takes_every_keyword(layer) for layer in layers):
        decoder_of(model).register_forward_pre_hook(_pass_as_documents, with_kwargs=True)
    for layer in layers:
        replace_forward(layer, partial(_forward, layer, layer.forward, model, name, prefers_heads))


def _takes_every_keyword(layer: nn.Module) -> bool:
    """Whether a layer's own forward has **kwargs, so that its decoder layer passes `sequence` on to it."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(layer.forward).parameters.values())


@torch.compiler.disable
def _pass_as_documents(decoder: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Pass `sequence` under a second name, the only one that LFM2 passes on before transformers 5.22."""
    sequence = kwargs.get("sequence")
    return None if sequence is None else (args, kwargs | {DOCUMENTS_KEYWORD: sequence})


@torch.compiler.disable  # its messages cannot be compiled; torch.compile takes the rest of the layer
def _forward(
    layer: nn.Module,
    stock_forward: Callable[..., Tensor],
    model: PreTrainedModel,
    name: str,
    prefers_heads: PrefersHeads,
    hidden_states: Tensor,
    *args: Any,
    sequence: AttentionContext | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute a layer in transformers' signature: hidden_states [1, s, h] -> [1, s, h]."""
    if isinstance(kwargs.get(DOCUMENTS_KEYWORD), AttentionContext):  # see `_pass_as_documents`
        sequence = kwargs[DOCUMENTS_KEYWORD]
    if sequence is None:
        if attention_implementation(model) == name:
            refuse_uncut(type(layer).__name__)
        return stock_forward(hidden_states, *args, **kwargs)
    given = [name for name in STATE_KEYWORDS if kwargs.get(name) is not None]
    assert not given, f"batches of shard() carry no {' and no '.join(given)}"
    assert hidden_states.shape[1] == sequence.local_length, (
        f"a recurrent layer sees {hidden_states.shape[1]} tokens where this rank's shard has "
        f"{sequence.local_length}: the model was called with a batch that was not cut"
    )
    sequence.calls += 1
    pieces = sequence.shared(Pieces, lambda: Pieces.of(sequence.layout, sequence.rank))
    by_heads = sequence.shared("recurrent by heads", lambda: prefers_heads(sequence.layout, pieces))
    own = {
        CONVOLUTION: partial(_convolve, functions_of(layer), pieces, sequence.ranks),
        **{
            name: partial(_delta_rule, functions_of(layer), name, pieces, sequence, by_heads)
            for name in (DELTA_RULE, DELTA_ATTENTION)
        },
        MAMBA2_SCAN: partial(_mamba2_scan, functions_of(layer), pieces, sequence.ranks),
        MAMBA2_IN_ONE: lambda *_, **__: None,  # as where its kernel is not installed: the layer then calls the others
    }
    return with_names(_forward_of(layer), own)(layer, hidden_states)


def _forward_of(layer: nn.Module) -> FunctionType:
    return inspect.unwrap(type(layer).forward)


def _called_by(layer: nn.Module) -> tuple[str, ...]:
    """Return the global names in the source of a layer's forward."""
    code = getattr(_forward_of(layer), "__code__", None)
    return () if code is None else code.co_names


def check_recurrent(model: nn.Module, device: torch.device, *, with_states: bool) -> None:
    """Check the kernels that recurrent layers use on this device with `check_delta_rule`."""
    for name in (DELTA_RULE, DELTA_ATTENTION):
        for layer in delta_rule_layers(model, name)[:1]:  # the others have the same heads
            rule = getattr(functions_of(layer), name)
            check_delta_rule(rule, DeltaHeads.of(layer), device, with_states=with_states)


def _convolve(
    functions: ModuleType,
    pieces: Pieces,
    group: dist.ProcessGroup | None,
    channels: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """Compute in place of `causal_conv1d_fn`: channels [1, C, s], weight [C, reach + 1] -> [1, C, s]."""
    convolution = getattr(functions, CONVOLUTION)
    convolution = convolution if channels.is_cuda else inspect.unwrap(convolution)
    convolve = partial(convolution, weight=weight, bias=bias, activation=activation)
    return convolve_pieces(channels, pieces, group, convolve, reach=weight.shape[1] - 1)


def _delta_rule(
    functions: ModuleType,
    name: str,
    pieces: Pieces,
    sequence: AttentionContext,
    by_heads: bool,
    *qkv: Tensor,
    g: Tensor,
    beta: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute in place of the function of this name, from a state of 0 in every document."""
    rule, inputs = getattr(functions, name), (*qkv, g, beta)
    if by_heads:
        return delta_rule_by_heads(rule, inputs, sequence.layout, sequence.ranks), None
    return delta_rule_by_states(rule, inputs, pieces, sequence.ranks), None


_SCAN_OPTIONS = ("chunk_size", "D", "dt_bias", "dt_softplus", "dt_limit")


def _mamba2_scan(
    functions: ModuleType,
    pieces: Pieces,
    group: dist.ProcessGroup | None,
    x: Tensor,
    steps: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    **options: Any,
) -> Tensor:
    """Compute in place of `mamba2_chunk_scan`, from a state of 0 in every document."""
    assert options.get("z") is None, "transformers applies the gate behind the scan"
    options = {name: options[name] for name in _SCAN_OPTIONS if name in options}
    return mamba2_by_states(getattr(functions, MAMBA2_SCAN), (x, steps, B, C), A, pieces, group, options)

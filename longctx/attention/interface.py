"""The attention function that transformers calls in every layer of a parallelized model."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AttentionInterface, PreTrainedModel

from longctx.attention.temperature import has_temperature, install_temperature, with_temperature
from longctx.model.recurrent import num_mixing_layers
from longctx.recurrent.layers import PrefersHeads, install_recurrent
from longctx.sequence.batch import AttentionContext, AttentionKind, refuse_uncut
from longctx.upstream.transformers_internals import (
    attention_implementation,
    decoder_of,
    leave_only_present_layers,
)

NAME = "longctx"
"""Our `attn_implementation`. It is left out of transformers' mask interface, so that no mask is ever built."""

REFUSED_KEYWORDS = ("position_bias",)
"""Keywords that layers pass if their scores are not products of queries and keys alone."""


@torch.compiler.disable  # its messages and plans cannot be compiled; torch.compile takes the rest of the layer
def longctx_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    sequence: AttentionContext | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Compute the attention of a layer, in transformers' signature.

    query and key [1, H or K, S/P, D], value [1, K, S/P, E] -> [1, S/P, H, E].

    Args:
        sliding_window: tokens that each query sees, itself included.
        s_aux: [H], attention sinks.
        softcap: c of scores c·tanh(s/c).
        sequence: context that comes with every batch of `SequenceParallel.shard`.

    Raises:
        ValueError: if `sequence` is missing, or the layer does not compute plain causal attention.
    """
    if sequence is None:
        refuse_uncut("This model's attention")
    refused = [name for name in REFUSED_KEYWORDS if kwargs.get(name) is not None]
    if dropout:
        refused.append(f"dropout={dropout}")
    if not getattr(module, "is_causal", True):
        refused.append("is_causal=False")
    if refused or attention_mask is not None:
        what = ", ".join([*refused, *(["a mask"] if attention_mask is not None else [])])
        raise ValueError(
            f"{type(module).__name__} asks for {what}, which is not supported exactly; see docs/limits.md."
        )
    assert query.shape[2] == sequence.local_length, (
        f"attention sees {query.shape[2]} tokens where this rank's shard has {sequence.local_length}: "
        "the model was called with a batch that was not cut"
    )
    if not key.shape[2] == value.shape[2] == query.shape[2]:
        raise ValueError(
            f"{type(module).__name__} attends to {key.shape[2]} keys from {query.shape[2]} tokens. Caches and adapters "
            "that add keys, such as prefix tuning, are not supported."
        )
    sequence.calls += 1
    if has_temperature(module):
        assert sequence.position_ids is not None, "known of a batch that was cut"
        query = with_temperature(module, query, sequence.position_ids)
    if torch.is_autocast_enabled(query.device.type):  # norms and RoPE may have left fp32 queries beside bf16 values
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale, size = query.shape[-1] ** -0.5 if scaling is None else scaling, value.shape[-1]
    query, key, value = _of_one_size(query, key, value)
    kind = AttentionKind(window=sliding_window, chunk_size=_chunk_size(module), softcap=softcap)
    out = sequence.attend(kind)(query, key, value, scale=scale, sinks=s_aux)
    return out[..., :size].transpose(1, 2).contiguous(), None


@torch.compiler.disable
def _check_call(decoder: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> None:
    """Refuse a call with a cut batch if the model's attention is another one, or if the call adds a mask or a cache.

    transformers would drop the mask, since it does not know this implementation.
    """
    sequence: AttentionContext | None = kwargs.get("sequence")
    if sequence is None:
        return
    if (name := attention_implementation(decoder)) != NAME:
        raise ValueError(
            f"the model was called with a batch that was cut, and its attention is {name!r}, which sees the tokens of "
            f"this rank alone. Call model.set_attn_implementation({NAME!r}) first."
        )
    if given := [name for name in ("attention_mask", "past_key_values", "cache") if kwargs.get(name) is not None]:
        raise ValueError(
            f"the model was called with {given[0]} beside a batch that was cut, which would be ignored. Leave it out: "
            "sequence.shard(batch).inputs has all that the model needs."
        )
    is_traced = isinstance(kwargs.get("position_ids"), FakeTensor)  # without other ranks
    if sequence.before_first_pass is not None and not is_traced:
        sequence.before_first_pass()
        sequence.before_first_pass = None
    sequence.calls_before = sequence.calls


@torch.compiler.disable
def _check_calls(num_layers: int, decoder: PreTrainedModel, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    """Refuse a forward pass in which a layer has bypassed `longctx_attention` and seen this rank's tokens alone."""
    sequence: AttentionContext | None = kwargs.get("sequence")
    if sequence is not None and (calls := sequence.calls - sequence.calls_before) != num_layers:
        raise ValueError(
            f"{calls} of {num_layers} attention layers went through longctx; the others have not seen the other ranks' "
            f"tokens. A layer of {type(decoder).__name__} whose forward was replaced has to call transformers' "
            "attention interface."
        )


def _chunk_size(module: Any) -> int | None:
    """Return the tokens of a chunk, which transformers tells the mask and not the layer; None without chunks."""
    types = getattr(getattr(module, "config", None), "layer_types", None) or ()
    is_chunked = "chunked_attention" in types and types[module.layer_idx] == "chunked_attention"
    return module.config.attention_chunk_size if is_chunked else None


def _of_one_size(*heads: Tensor) -> list[Tensor]:
    """Return queries, keys and values with zeros up to the largest head size, which change neither scores nor outputs.

    Multi-head latent attention has values of another size than its queries and keys, and kernels take one size.
    """
    size = max(x.shape[-1] for x in heads)
    return [F.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x for x in heads]


def install(model: PreTrainedModel, prefers_heads: PrefersHeads) -> None:
    """Make every attention layer of `model` call `longctx_attention`, and every recurrent layer our functions.

    Args:
        prefers_heads: as in `install_recurrent`.
    """
    AttentionInterface.register(NAME, longctx_attention)
    model.set_attn_implementation(NAME)
    decoder = decoder_of(model)
    decoder.register_forward_pre_hook(_check_call, with_kwargs=True)
    decoder.register_forward_hook(partial(_check_calls, num_mixing_layers(model.config)), with_kwargs=True)
    install_temperature(model)
    install_recurrent(model, NAME, prefers_heads)
    leave_only_present_layers(model)

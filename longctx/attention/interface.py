"""The attention function that transformers calls in every layer of a parallelized model."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from longctx.attention.temperature import has_temperature, install_temperature, with_temperature
from longctx.model.recurrent import num_mixing_layers
from longctx.recurrent.layers import PrefersHeads, install_recurrent
from longctx.sequence.batch import AttentionContext, AttentionKind, refuse_uncut
from longctx.upstream.transformers_internals import attention_implementation, decoder_of, leave_only_present_layers

NAME = "longctx"
"""Our `attn_implementation`. It is left out of transformers' mask interface, so that no mask is ever built."""


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
    length, is_causal, bias = query.shape[2], getattr(module, "is_causal", True), kwargs.get("position_bias")
    if attention_mask is not None or dropout or not is_causal or bias is not None:
        asked = {
            "position_bias": bias is not None,
            f"dropout={dropout}": dropout,
            "is_causal=False": not is_causal,
            "a mask": attention_mask is not None,
        }
        raise ValueError(
            f"{type(module).__name__} asks for {', '.join(filter(asked.get, asked))}, which is not supported exactly; "
            "see docs/limits.md."
        )
    assert length == sequence.local_length, (
        f"attention sees {length} tokens where this rank's shard has {sequence.local_length}: "
        "the model was called with a batch that was not cut"
    )
    if not key.shape[2] == value.shape[2] == length:
        raise ValueError(
            f"{type(module).__name__} attends to {key.shape[2]} keys from {length} tokens. Caches and adapters "
            "that add keys, such as prefix tuning, are not supported."
        )
    sequence.calls += 1
    chunk_size, scales_by_position = vars(module).get(_TRAITS) or _know_traits(module)
    if scales_by_position:
        assert sequence.position_ids is not None, "known of a batch that was cut"
        query = with_temperature(module, query, sequence.position_ids)
    device = query.device.type
    if torch.is_autocast_enabled(device):  # norms and RoPE may have left fp32 queries beside bf16 values
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale, size = query.shape[-1] ** -0.5 if scaling is None else scaling, value.shape[-1]
    attend = sequence.attend(_kind(sliding_window, chunk_size, softcap))
    if query.shape[-1] == key.shape[-1] == size:
        out = attend(query, key, value, scale=scale, sinks=s_aux)
    else:
        out = attend(*_of_one_size(query, key, value), scale=scale, sinks=s_aux)[..., :size]
    return out.transpose(1, 2).contiguous(), None


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
    if kwargs.get("position_ids") is None:
        raise ValueError(
            "the model was called with a batch that was cut, and without its position_ids: each rank would count its "
            "tokens from 0. Pass all of sequence.shard(batch).inputs."
        )
    if sequence.before_first_pass is not None:
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


_TRAITS = "_longctx_traits"


def _know_traits(module: Any) -> tuple[int | None, bool]:
    """Return the tokens of a layer's chunks, or None, and whether it scales queries by position; the layer keeps both.

    transformers tells chunks to the mask and not to the layer.
    """
    types = getattr(getattr(module, "config", None), "layer_types", None) or ()
    is_chunked = "chunked_attention" in types and types[module.layer_idx] == "chunked_attention"
    traits = module.config.attention_chunk_size if is_chunked else None, has_temperature(module)
    setattr(module, _TRAITS, traits)
    return traits


@cache
def _kind(window: int | None, chunk_size: int | None, softcap: float | None) -> AttentionKind:
    return AttentionKind(window=window, chunk_size=chunk_size, softcap=softcap)


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

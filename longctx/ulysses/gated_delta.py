"""Gated delta-rule layers (linear attention, arXiv 2412.06464) over a sequence group, as in Qwen3-Next and Qwen3.5.

Such a layer convolves q, k and v over neighbouring tokens and carries a state from token to token, for every head on
its own. So every rank takes all tokens of some heads, as in `exchange`, with the convolution's channels that belong
to them. Both start afresh with every document, padding included. Projections, gated norm and output see one token at
a time and stay with the rank's own tokens.

Shape legend: P ranks, S tokens of the whole row, K key heads of size D, V value heads of size E, V a multiple of K.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.import_utils import is_flash_linear_attention_available

from longctx.attention.kernels.entries import upload
from longctx.sequence.batch import AttentionContext
from longctx.ulysses.exchange import all_to_all, tokens_to_ranks


def install_gated_delta(model: PreTrainedModel) -> None:
    """Make every gated delta-rule layer of `model` compute exactly on the batches of `SequenceParallel.shard`."""
    for layer in gated_delta_layers(model):
        layer.forward = partial(_forward, layer, layer.forward)


def gated_delta_layers(model: nn.Module) -> list[nn.Module]:
    """The layers themselves, without the norms and MLPs beside them."""
    return [layer for layer in model.modules() if type(layer).__name__.endswith("GatedDeltaNet")]


@torch.compiler.disable  # its messages are no graph; torch.compile takes the rest of the layer
def _forward(
    layer: Any,
    stock_forward: Callable[..., Tensor],
    hidden_states: Tensor,
    cache_params: object | None = None,
    attention_mask: Tensor | None = None,
    sequence: AttentionContext | None = None,
    **kwargs,
) -> Tensor:
    """hidden_states [1, S/P, h] -> [1, S/P, h], in transformers' signature; the stock layer without `sequence`."""
    if sequence is None:
        return stock_forward(hidden_states, cache_params=cache_params, attention_mask=attention_mask, **kwargs)
    assert cache_params is None, "batches of shard() carry no cache"
    assert attention_mask is None, "batches of shard() carry no mask"
    assert hidden_states.shape[1] == sequence.local_length, (
        f"a linear-attention layer sees {hidden_states.shape[1]} tokens where this rank's shard has "
        f"{sequence.local_length}: the model was called with a batch that was not cut"
    )
    sequence.calls += 1
    *parts, gate = _projections(layer, hidden_states)
    mixed = _mix(layer, _to_heads([part[0] for part in parts], sequence.group), sequence)
    mixed = mixed if sequence.group is None else tokens_to_ranks(mixed.transpose(1, 2), sequence.group).transpose(1, 2)
    normed = layer.norm(mixed.reshape(-1, layer.head_v_dim), gate.reshape(-1, layer.head_v_dim))
    return layer.out_proj(normed.reshape(*hidden_states.shape[:2], -1))


def _projections(layer: Any, hidden_states: Tensor) -> tuple[Tensor, ...]:
    """[1, s, h] -> q and k [1, s, K, D], v [1, s, V, E], b and a [1, s, V, 1], and the norm's gate [1, s, V, E]."""
    if hasattr(layer, "in_proj_qkvz"):  # Qwen3-Next
        q, k, v, gate, b, a = layer.fix_query_key_value_ordering(
            layer.in_proj_qkvz(hidden_states), layer.in_proj_ba(hidden_states)
        )
    else:  # Qwen3.5
        q, k, v = layer.in_proj_qkv(hidden_states).split([layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
        q, k, v = (x.unflatten(-1, (-1, size)) for x, size in zip((q, k, v), _head_sizes(layer), strict=True))
        gate, b, a = (project(hidden_states) for project in (layer.in_proj_z, layer.in_proj_b, layer.in_proj_a))
    return q, k, v, b[..., None], a[..., None], gate


def _head_sizes(layer: Any) -> tuple[int, int, int]:
    return layer.head_k_dim, layer.head_k_dim, layer.head_v_dim


def _to_heads(parts: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Each [S/P, n, size] -> [S, n/P, size]: all tokens, this rank's heads. One exchange for all of them."""
    if group is None:
        return list(parts)
    shares = [x.unflatten(1, (dist.get_world_size(group), -1)) for x in parts]  # [S/P, P, n/P, size]
    fused = torch.cat([x.flatten(2) for x in shares], dim=2).transpose(0, 1)
    rows = all_to_all(fused, group).flatten(0, 1)  # [S, n/P · size of each part]
    widths = [x.shape[2:].numel() for x in shares]
    return [x.unflatten(1, share.shape[2:]) for x, share in zip(rows.split(widths, dim=1), shares, strict=True)]


def _mix(layer: Any, parts: Sequence[Tensor], sequence: AttentionContext) -> Tensor:
    """Convolution and delta rule over all tokens, by the functions of the model's own module.

    Args:
        parts: q and k [S, K/P, D], v [S, V/P, E], b and a [S, V/P, 1].

    Returns:
        [1, S, V/P, E]
    """
    functions = sys.modules[type(layer).__module__]
    *qkv, b, a = parts
    sizes = layer.key_dim, layer.key_dim, layer.value_dim
    weight = torch.cat([_own(x, sequence.group) for x in layer.conv1d.weight.squeeze(1).split(sizes)])
    convolve = partial(functions.causal_conv1d_fn, weight=weight, bias=None, activation=layer.activation)
    channels = torch.cat([x.flatten(1) for x in qkv], dim=1).T[None]  # [1, channels, S]
    channels = _convolve_documents(channels, sequence.cu_seqlens, convolve, reach=weight.shape[1] - 1)
    convolved = channels[0].T.split([x.shape[1:].numel() for x in qkv], dim=1)
    q, k, v = (x.unflatten(1, like.shape[1:])[None] for x, like in zip(convolved, qkv, strict=True))
    decay = -_own(layer.A_log, sequence.group).float().exp()  # as the model has it: in fp32, or -inf in fp16
    g = decay * nn.functional.softplus(a[None, ..., 0].float() + _own(layer.dt_bias, sequence.group))
    rule = partial(functions.torch_chunk_gated_delta_rule, use_qk_l2norm_in_kernel=True)
    return _by_document(rule, (q, k, v, g, b[None, ..., 0].sigmoid()), sequence.cu_seqlens)


def _own(per_head: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The part of a parameter that belongs to this rank's heads."""
    return per_head if group is None else per_head.chunk(dist.get_world_size(group))[dist.get_rank(group)]


def _convolve_documents(
    channels: Tensor, cu_seqlens: np.ndarray, convolve: Callable[[Tensor], Tensor], reach: int
) -> Tensor:
    """[1, C, S] -> [1, C, S]: no token sees another document, since as many zeros as `convolve` looks back lie between.

    Works with every implementation of the model's convolution, in one call.
    """
    lengths = np.diff(cu_seqlens)
    places = np.arange(cu_seqlens[-1]) + reach * np.repeat(np.arange(len(lengths)), lengths)
    index = upload(places, channels.device)
    apart = channels.new_zeros(*channels.shape[:2], int(places[-1]) + 1).index_copy(2, index, channels)
    return convolve(apart).index_select(2, index)


def _by_document(rule: Callable[..., tuple[Tensor, None]], inputs: Sequence[Tensor], cu_seqlens: np.ndarray) -> Tensor:
    """The rule with a state that starts at 0 in every document: each input [1, S, ...] -> [1, S, V/P, E]."""

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **kwargs) -> Tensor:
        return rule(q, k, v, g=g, beta=beta, **kwargs)[0]

    if inputs[0].is_cuda and is_flash_linear_attention_available():  # then transformers takes its kernel
        return run(*inputs, cu_seqlens=upload(cu_seqlens, inputs[0].device))
    lengths = np.diff(cu_seqlens).tolist()
    documents = zip(*(x.split(lengths, dim=1) for x in inputs), strict=True)
    return torch.cat([run(*document) for document in documents], dim=1)

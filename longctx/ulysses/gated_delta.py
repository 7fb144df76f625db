"""Gated delta-rule layers (linear attention, arXiv 2412.06464) over a sequence group, as in Qwen3-Next and Qwen3.5.

Such a layer convolves q, k and v over neighbouring tokens and carries a state from token to token, separately for each
head. So every rank takes all tokens of some heads, as in `longctx.ulysses.exchange`, with the convolution's channels of
these heads. Convolution and state start anew with every document, padding included. Projections, gated norm and output
work on one token at a time, so they stay with the rank's own tokens.

transformers uses flash-linear-attention's kernel for the delta rule wherever that package can be imported. Here the
kernel computes half precision on GPUs, after a comparison with transformers' own operators, which compute the rest.
Releases before 0.5 assume as many value heads as key heads and silently return wrong numbers if there are more. In
fp32, Triton's products would be rounded to TF32.

Shape legend: P ranks, S tokens of a sequence, K key heads of size D, V value heads of size E, V a multiple of K.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
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

logger = logging.getLogger(__name__)

KERNEL_BOUND = 2e-2
"""Largest relative error of the kernel's outputs and gradients over a document, the same as for Liger's kernels.

A number is rounded to 2^-9 of itself, and the kernel rounds several times."""


def install_gated_delta(model: PreTrainedModel) -> None:
    """Make every gated delta-rule layer of `model` compute exactly on the batches of `SequenceParallel.shard`."""
    for layer in gated_delta_layers(model):
        layer.forward = partial(_forward, layer, layer.forward)


def gated_delta_layers(model: nn.Module) -> list[nn.Module]:
    """Return the gated delta-rule layers of a model, without the norms and MLPs beside them."""
    return [layer for layer in model.modules() if type(layer).__name__.endswith("GatedDeltaNet")]


@torch.compiler.disable  # its messages cannot be compiled; torch.compile takes the rest of the layer
def _forward(
    layer: Any,
    stock_forward: Callable[..., Tensor],
    hidden_states: Tensor,
    cache_params: object | None = None,
    attention_mask: Tensor | None = None,
    sequence: AttentionContext | None = None,
    **kwargs,
) -> Tensor:
    """Compute a layer in transformers' signature: hidden_states [1, S/P, h] -> [1, S/P, h].

    Without `sequence`, the stock layer runs.
    """
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
        sizes = layer.head_k_dim, layer.head_k_dim, layer.head_v_dim
        q, k, v = (x.unflatten(-1, (-1, size)) for x, size in zip((q, k, v), sizes, strict=True))
        gate, b, a = (project(hidden_states) for project in (layer.in_proj_z, layer.in_proj_b, layer.in_proj_a))
    return q, k, v, b[..., None], a[..., None], gate


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
    """Compute convolution and delta rule over all tokens, by the functions of the model's own module.

    Args:
        parts: q and k [S, K/P, D], v [S, V/P, E], b and a [S, V/P, 1].

    Returns:
        [1, S, V/P, E]
    """
    functions = _functions_of(layer)
    *qkv, b, a = parts
    sizes = layer.key_dim, layer.key_dim, layer.value_dim
    weight = torch.cat([_own(x, sequence.group) for x in layer.conv1d.weight.squeeze(1).split(sizes)])
    convolution = functions.causal_conv1d_fn if qkv[0].is_cuda else inspect.unwrap(functions.causal_conv1d_fn)
    convolve = partial(convolution, weight=weight, bias=None, activation=layer.activation)
    channels = torch.cat([x.flatten(1) for x in qkv], dim=1).T[None]  # [1, channels, S]
    channels = _convolve_documents(channels, sequence.cu_seqlens, convolve, reach=weight.shape[1] - 1)
    convolved = channels[0].T.split([x.shape[1:].numel() for x in qkv], dim=1)
    q, k, v = (x.unflatten(1, like.shape[1:])[None] for x, like in zip(convolved, qkv, strict=True))
    decay = -_own(layer.A_log, sequence.group).float().exp()  # in fp32, as in the model; it would be -inf in fp16
    g = decay * nn.functional.softplus(a[None, ..., 0].float() + _own(layer.dt_bias, sequence.group))
    mix = _in_one_call if takes_kernel(q) else _by_document
    return mix(functions.torch_chunk_gated_delta_rule, (q, k, v, g, b[None, ..., 0].sigmoid()), sequence.cu_seqlens)


def _functions_of(layer: nn.Module) -> ModuleType:
    return sys.modules[type(layer).__module__]


def _own(per_head: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the part of a parameter that belongs to this rank's heads."""
    return per_head if group is None else per_head.chunk(dist.get_world_size(group))[dist.get_rank(group)]


def _convolve_documents(
    channels: Tensor, cu_seqlens: np.ndarray, convolve: Callable[[Tensor], Tensor], reach: int
) -> Tensor:
    """Convolve [1, C, S] -> [1, C, S] so that no token sees another document.

    Between documents lie as many zeros as `convolve` looks back. This works with every implementation of the model's
    convolution, in one call.
    """
    lengths = np.diff(cu_seqlens)
    places = np.arange(cu_seqlens[-1]) + reach * np.repeat(np.arange(len(lengths)), lengths)
    index = upload(places, channels.device)
    apart = channels.new_zeros(*channels.shape[:2], int(places[-1]) + 1).index_copy(2, index, channels)
    return convolve(apart).index_select(2, index)


def takes_kernel(q: Tensor) -> bool:
    """Whether flash-linear-attention's kernel computes the delta rule of these queries."""
    return q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and is_flash_linear_attention_available()


def _in_one_call(rule: Callable[..., Any], inputs: Sequence[Tensor], cu_seqlens: np.ndarray) -> Tensor:
    """Compute the rule by a kernel that takes the documents' boundaries: each input [1, S, ...] -> [1, S, V/P, E]."""
    *qkv, g, beta = inputs
    return rule(*qkv, g=g, beta=beta, use_qk_l2norm_in_kernel=True, cu_seqlens=upload(cu_seqlens, g.device))[0]


def _by_document(rule: Callable[..., Any], inputs: Sequence[Tensor], cu_seqlens: np.ndarray) -> Tensor:
    """Compute the rule by transformers' own operators, with a state that starts at 0 in every document."""
    own_rule = partial(inspect.unwrap(rule), use_qk_l2norm_in_kernel=True)
    documents = zip(*(x.split(np.diff(cu_seqlens).tolist(), dim=1) for x in inputs), strict=True)
    return torch.cat([own_rule(*qkv, g=g, beta=beta)[0] for *qkv, g, beta in documents], dim=1)


# ------------------------------------------------------------------------------------------------
# The check of the kernel
# ------------------------------------------------------------------------------------------------

_LENGTHS = (70, 1, 130)
"""Tokens of the documents that are compared. The kernel works on 64 at a time."""


def check_gated_delta(model: nn.Module, device: torch.device) -> None:
    """Compare the kernel on this device with transformers' own operators, on packed documents, forward and backward.

    Raises:
        ValueError: if the kernel fails, or is off by more than KERNEL_BOUND.
    """
    layers = gated_delta_layers(model)
    if not layers or device.type != "cuda":
        return
    if not is_flash_linear_attention_available():
        logger.warning(
            "linear-attention layers compute one document after the other, which is slow with many of them. "
            "pip install flash-linear-attention for a kernel that takes all at once."
        )
        return
    kernel = _functions_of(layers[0]).torch_chunk_gated_delta_rule
    remedy = (
        "Run `pip install --upgrade flash-linear-attention`, or uninstall it: transformers' own operators are exact."
    )
    try:
        error = max(kernel_errors(kernel, layers[0], device))
    except torch.OutOfMemoryError:
        raise
    except Exception as failure:  # whatever a compiler or driver raises
        reason = str(failure).strip().partition("\n")[0]
        raise ValueError(
            f"flash-linear-attention's kernel of the gated delta rule fails on this machine: {type(failure).__name__}: "
            f"{reason}. {remedy}"
        ) from failure
    if not error <= KERNEL_BOUND:  # NaN is wrong too
        raise ValueError(
            f"flash-linear-attention's kernel of the gated delta rule is off by {error:.1e} on this machine in bf16, "
            f"and {KERNEL_BOUND:.0e} is allowed. {remedy}"
        )


def kernel_errors(kernel: Callable[..., Any], layer: Any, device: torch.device) -> list[float]:
    """Return the largest relative error of a document for each output and gradient, in bf16 and for this layer's heads.

    Two key heads are compared, since all heads are computed alike. Transformers' operators compute in fp32 on the CPU.
    """
    generator = torch.Generator().manual_seed(0)
    cu_seqlens = np.append(0, np.cumsum(_LENGTHS))
    value_heads = 2 * layer.num_v_heads // layer.num_k_heads
    shapes = [(2, layer.head_k_dim)] * 2 + [(value_heads, layer.head_v_dim), (value_heads,), (value_heads,)]
    inputs = [torch.randn(1, cu_seqlens[-1], *shape, generator=generator) for shape in shapes]
    inputs[3:] = [-inputs[3].exp(), inputs[4].sigmoid()]  # decays are fp32, as in the layers
    inputs = [x if i == 3 else x.bfloat16() for i, x in enumerate(inputs)]
    upstream = torch.randn(inputs[2].shape, generator=generator).bfloat16()

    def results(mix: Callable[..., Tensor], device: torch.device, dtype: torch.dtype | None) -> list[Tensor]:
        given = [x.to(device, dtype).requires_grad_() for x in inputs]
        out = mix(kernel, given, cu_seqlens)
        return [out.detach(), *torch.autograd.grad(out, given, upstream.to(out))]

    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        exact = results(_by_document, torch.device("cpu"), torch.float32)
        found = results(_in_one_call, device, None)
    return [_error_over_documents(x.cpu(), wanted) for x, wanted in zip(found, exact, strict=True)]


def _error_over_documents(actual: Tensor, exact: Tensor) -> float:
    """Return the largest relative error of a document.

    It is relative to the document's own norm, or to a typical one of its length if that is larger.
    """
    typical = exact.square().mean().sqrt()
    pairs = zip(actual.float().split(_LENGTHS, dim=1), exact.split(_LENGTHS, dim=1), strict=True)
    errors = [
        (x - wanted).square().mean().sqrt() / wanted.square().mean().sqrt().clamp(min=typical) for x, wanted in pairs
    ]
    return float(torch.stack(errors).max())

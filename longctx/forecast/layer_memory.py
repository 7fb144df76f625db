"""Bytes per token of one decoder layer: what its forward pass saves, and what its backward pass adds.

They are counted, tensor by tensor, in the code of transformers' decoder layers and of longctx's attention. Recurrent
layers are counted as attention, and sliding windows as full attention. A ring is counted as if one document
filled the sequence, which sends most.

b is the size of an activation's element (2 in bf16, 4 in fp32), h the hidden size, I the width of the MLP, q = H·D the
width of all query heads and kv = K·D that of all key/value heads.

The sequence-chunked step (`longctx.layers.chunked`) has other terms. The device has a chunk of tokens of one layer, or
a block of some heads' queries and of their keys. While that is computed, the next part arrives from host memory and the
results of the one before leave.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from longctx.attention.backend import KeyValues
from longctx.attention.backends import BACKENDS
from longctx.attention.cost import FLOPS_BACKWARD, FLOPS_FORWARD
from longctx.forecast.coefficients import (
    FLASH_3_KEY_VALUE_GRADIENT,
    FLASH_QUERY_GRADIENT,
    FP32,
    LOG_SUM_EXP_BYTES,
    NORM_BACKWARD_STEPS,
    PASSED_ON_GRADIENTS,
    RING_QUERY_GRADIENTS,
)
from longctx.forecast.memory_setup import MemorySetup
from longctx.layers.chunked.attention import num_head_groups
from longctx.ulysses.exchange import key_value_copies
from longctx.ulysses.stages import head_stages


class Layer(NamedTuple):
    """Bytes per token of one layer, besides its checkpoint."""

    norm_before_attention: float
    """Saved by this norm, by the matrices after it, and by the norms of queries and keys."""
    norm_before_mlp: float
    norm_backward: float
    """Made by the backward pass of the norm before the MLP."""
    attention: float
    """Saved for attention's backward pass."""
    attention_backward: float
    """Made by attention's backward pass."""
    exchange: float
    """Messages of attention's backward pass, sent and received."""
    mlp: float
    """Saved for the MLP's backward pass."""
    mlp_backward: float
    """Made by the MLP's backward pass."""

    @property
    def saved(self) -> float:
        """Saved by the forward pass."""
        return self.norm_before_attention + self.norm_before_mlp + self.attention + self.mlp


def saved_by_layer(setup: MemorySetup) -> float:
    """Return the bytes per token that one layer saves for the backward pass, without checkpointing."""
    return layer_bytes(setup).saved


def layer_bytes(setup: MemorySetup) -> Layer:
    model, b, stream = setup.model, setup.element_size, setup.stream_size
    h, q, kv, width = model.hidden_size, model.query_size, model.key_value_size, model.intermediate_size
    saved_heads, made, exchange = _attention(setup)
    norms_lean = setup.fused_layers or setup.tiled_mlp_num_shards is not None  # norms are tiled, too
    if norms_lean:
        casts = (1, 1) if stream == b else (3, 2)  # autocast makes one each for q, k and v, and for gate and up
        norms, qk_norms = (casts[0] * b * h, (stream + casts[1] * b) * h), b * (q + kv)
    else:
        norms, qk_norms = _norms(h, b, stream), (4 + b) * (q + kv)
    tensors, tensors_backward = (3, 1) if setup.fused_layers else (4, 2)  # gate, up, (activation,) product
    return Layer(
        norm_before_attention=norms[0] + qk_norms * model.has_qk_norm,
        norm_before_mlp=norms[1],
        norm_backward=2 * stream * h if norms_lean else (stream + NORM_BACKWARD_STEPS * FP32) * h,
        attention=saved_heads + LOG_SUM_EXP_BYTES * model.num_heads,
        attention_backward=made,
        exchange=exchange,
        mlp=tensors * b * width + 2 * b * h * model.num_experts_per_token,
        mlp_backward=tensors_backward * b * width + stream * h,
    )


def _norms(h: int, b: int, stream: int) -> tuple[int, int]:
    """Return the bytes per token that the norms before attention and before the MLP save.

    They save inputs, normalised outputs and what matrices read. The first norm's input is the layer's, counted
    elsewhere.
    """
    if stream == b == 2:
        return (4 + 2 + 2) * h, (4 + 2 + 2) * h  # an fp32 copy of the input
    if stream == b:
        return (4 + 4) * h, (4 + 4 + 4) * h
    return (4 + 3 * b) * h, (4 + 4 + 2 * b) * h  # autocast casts for q, k and v, for gate and up


def _attention(setup: MemorySetup) -> tuple[float, float, float]:
    """Return the bytes per token that are saved, made in the backward pass, and exchanged."""
    model, b = setup.model, setup.element_size
    q, kv = model.query_size, model.key_value_size
    copies = key_value_copies(model.num_heads, model.num_key_value_heads, setup.ulysses)
    if setup.kernel == "sdpa":
        copies = model.num_heads // model.num_key_value_heads  # transformers repeats what query heads share
    heads = q + 2 * kv * copies
    # The gradients of the kernel's inputs, and FlashAttention's fp32 sum of dq. If query heads of this rank share keys
    # and values, version 3 also has fp32 sums of dk and dv, and version 2 has dk and dv of every query head in its own
    # precision.
    shares = model.num_heads > model.num_key_value_heads * copies
    shared = FLASH_3_KEY_VALUE_GRADIENT * kv * copies if setup.kernel == "flash-attn 3" else 2 * b * q
    dq = FLASH_QUERY_GRADIENT * q if setup.bf16 else 0
    kernel = b * heads + dq + (shared if shares else 0)
    if setup.ring > 1:
        made = b * q + RING_QUERY_GRADIENTS * q + kernel - dq
        held, grads = BACKENDS[setup.backend].held(
            KeyValues(
                elements=kv * copies,
                element_size=b,
                num_heads=model.num_key_value_heads,
                ring=setup.ring,
                heads_k_stride=setup.heads_k_stride,
            )
        )
        passed_on = PASSED_ON_GRADIENTS * kv * copies
        exchange = 2 * b * kv * copies + held + (passed_on if setup.passes_gradients_on else grads)
    else:
        made, exchange = b * q + kernel, 0.0
    in_stages = setup.heads_k_stride is not None and BACKENDS[setup.backend].has_stages
    in_stages |= setup.overlap_exchange and setup.ulysses > 1
    if setup.ulysses == 1:
        if in_stages:  # the gradients of all heads, and what a stage makes
            part = _stage(setup, copies)
            return b * heads + b * q, b * heads + part * made, part * exchange
        return b * heads + b * q, made, exchange
    if in_stages:
        part = _stage(setup, copies)
        own = b * q if setup.projects_by_stage else b * (2 * q + 2 * kv)
        return own, own + part * (3 * b * heads + made), part * (3 * b * heads + exchange)
    # The output in both layouts. The gradient in one layout takes the place of the output in the other, which its
    # projection has read.
    return b * heads + 2 * b * q, made - b * q, exchange


def _stage(setup: MemorySetup, copies: int) -> float:
    """Return the fraction of a rank's heads whose messages and results are there at a time.

    They are those of a stage, and of the next one if that is exchanged meanwhile.
    """
    per_rank = setup.model.num_key_value_heads * copies // setup.ulysses
    sharing = setup.model.num_heads // (setup.model.num_key_value_heads * copies)
    stages = head_stages(per_rank, sharing, setup.heads_k_stride, split_queries=setup.ring == 1)
    largest = max((stage.keys.stop - stage.keys.start) * stage.sharing for stage in stages)
    return min(1.0, (1 + setup.overlap_exchange) * largest / (per_rank * sharing))


class _Sizes(NamedTuple):
    """Bytes of a rank's token, and the parts that it is copied in."""

    hidden: float
    """A hidden state."""
    query: float
    """All queries, or all outputs of attention."""
    key_value: float
    """All keys and values, those included that are repeated for ranks that share a head."""
    log_sum_exp: float
    chunk: float
    """Tokens of a chunk."""
    chunks: int
    groups: int
    """Groups of heads."""

    @classmethod
    def of(cls, setup: MemorySetup, tokens: float) -> _Sizes:
        assert setup.sequence_chunk_size is not None
        model, b = setup.model, setup.element_size
        copies = key_value_copies(model.num_heads, model.num_key_value_heads, setup.ulysses)
        chunk = min(tokens, setup.sequence_chunk_size)
        chunks = max(1, math.ceil(tokens / chunk)) if chunk else 1
        return cls(
            hidden=setup.stream_size * model.hidden_size,
            query=b * model.query_size,
            key_value=2 * b * model.key_value_size * copies,
            log_sum_exp=LOG_SUM_EXP_BYTES * model.num_heads,
            chunk=chunk,
            chunks=chunks,
            groups=num_head_groups(chunks, model.num_key_value_heads * copies // setup.ulysses),
        )


def chunked_layer_bytes(setup: MemorySetup) -> float:
    """Return the bytes per token in host memory of the layer that a sequence-chunked backward pass computes.

    The gradients of queries, keys and values take their place.
    """
    of = _Sizes.of(setup, 0.0)
    attention = of.query + of.key_value + 2 * of.query + of.log_sum_exp  # with its output, and that one's gradient
    return attention + 2 * of.hidden  # the gradients of its output and of its input


def chunked_moments(setup: MemorySetup, layer: Layer, tokens: float) -> dict[str, dict[str, Any]]:
    """Return the device's bytes of activations at each moment of a layer's backward pass, by category.

    Args:
        tokens: of a rank.
    """
    of = _Sizes.of(setup, tokens)
    both, left = min(2, of.chunks), min(1, of.chunks - 1)  # parts that are computed or arrive, and that leave
    of_layer = both * (2 * of.hidden + of.query) + left * (of.hidden + of.query)
    of_layer += 2 * of.query  # attention's output after the exchange, and in another layout
    of_projections = both * (2 * of.hidden + of.query + of.key_value) + left * of.hidden
    of_projections += 2 * (of.query + of.key_value)  # the gradients that are exchanged
    sums = 2 * FP32 / setup.element_size * of.key_value / 2 / of.groups  # of the gradients of a group's keys and values
    in_attention = 3 * of.query + of.log_sum_exp + of.key_value
    if setup.ring > 1:  # a group of heads at a time, with all tokens
        both, left = min(2, of.groups), min(1, of.groups - 1)
        made = layer.attention_backward + layer.exchange + left * (of.query + of.key_value)
        attention = (both * in_attention + made) / of.groups * tokens
    else:
        made = layer.attention_backward + FP32 / setup.element_size * of.query + left * (of.query + of.key_value)
        attention = (both * in_attention + made) * of.chunk + sums * tokens
    return {
        "attention": {"attention": attention},
        "projections": {
            "sequence chunks": of_projections * of.chunk,
            "hidden states": (layer.norm_before_attention + layer.norm_backward) * of.chunk,
        },
        "norm": {
            "sequence chunks": of_layer * of.chunk,
            "hidden states": (layer.norm_before_mlp + layer.norm_backward) * of.chunk,
        },
        "MLP": {
            "sequence chunks": of_layer * of.chunk,
            "hidden states": layer.norm_before_mlp * of.chunk,
            "MLP": (layer.mlp + layer.mlp_backward) * of.chunk,
        },
    }


class Pass(NamedTuple):
    """A pass over all tokens of a layer, part by part: what a rank copies, and what it computes meanwhile."""

    arriving: float
    """Bytes copied to the device."""
    leaving: float
    parts: int
    matmul_flops: float = 0.0
    forward_flops: float = 0.0
    """Of attention, forward."""
    backward_flops: float = 0.0
    """Of attention, backward."""


def passes(setup: MemorySetup, tokens: float, pairs: float) -> tuple[list[Pass], Pass]:
    """Return the passes of a layer's training step, and the one that computes its attention again.

    Args:
        tokens: of a rank.
        pairs: legal pairs of query and key that the rank attends to with all heads.
    """
    model, of = setup.model, _Sizes.of(setup, tokens)
    h, q, kv = of.hidden, of.query, of.key_value
    projection = 2 * model.hidden_size * (model.query_size + 2 * model.key_value_size) * tokens
    rest = 2 * model.hidden_size * (model.query_size + 3 * model.intermediate_size) * tokens
    of_weights = model.num_trained_parameters / model.num_parameters
    attended, parts, reads = model.query_size * pairs, of.groups, 1.0
    if setup.ring == 1:
        block = of.chunk * setup.ulysses * of.groups
        parts = of.groups * math.ceil(tokens * setup.ulysses / block)
        keys = pairs / tokens  # that a token attends to, on average
        reads = (keys + block / 2) / block  # of each key: by its own block of queries, and by those after it
    project = Pass(h * tokens, (q + kv) * tokens, of.chunks, projection)
    attend = Pass(
        (q + reads * kv) * tokens, (q + of.log_sum_exp) * tokens, parts, forward_flops=FLOPS_FORWARD * attended
    )
    backward = 1 + of_weights
    return [
        project,
        attend,
        Pass((h + q) * tokens, h * tokens, of.chunks, projection + rest),
        project,
        Pass((2 * h + q) * tokens, (h + q) * tokens, of.chunks, projection + (1 + backward) * rest),
        Pass(
            (3 * q + of.log_sum_exp + reads * kv) * tokens,
            (q + kv) * tokens,
            parts,
            backward_flops=FLOPS_BACKWARD * attended,
        ),
        Pass((2 * h + q + kv) * tokens, h * tokens, of.chunks, (1 + backward) * projection),
    ], attend

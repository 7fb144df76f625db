"""Bytes per token of one decoder layer: what its forward pass saves, and what its backward pass adds.

They are counted, tensor by tensor, in the code of transformers' decoder layers and of longctx's attention. Recurrent
layers are counted as attention, and sliding windows as full attention. A ring is counted as if one document filled the
sequence, which sends most.

b is the size of an activation's element (2 in bf16, 4 in fp32), h the hidden size, I the width of the MLP, q = H·D the
width of all query heads and kv = K·D that of all key/value heads.

The sequence-chunked step (`longctx.layers.chunked`) has other terms. The device has a chunk of tokens of one layer, or
a block of some heads' queries and of their keys. While that is computed, the next part arrives from host memory and the
results of the one before leave.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from longctx.forecast.shape import FP32, RunShape
from longctx.layers.chunked.attention import num_head_groups
from longctx.layers.chunked.tiles import tile_tokens
from longctx.recurrent.cost import given_bytes, written_bytes
from longctx.ring.order import heads_at_a_time
from longctx.ulysses.exchange import key_value_copies
from longctx.ulysses.stages import head_stages

LOG_SUM_EXP_BYTES = FP32
"""For each query and head: attention's log-sum-exp, which the backward pass needs."""
FLASH_QUERY_GRADIENT = FP32
"""For each element of the queries: the fp32 sum of dq that FlashAttention makes in half precision (`dq_accum`)."""
FLASH_3_KEY_VALUE_GRADIENT = 2 * FP32
"""For each element of the keys: version 3's fp32 sums of dk and dv, if query heads share a key/value head."""
RING_QUERY_GRADIENTS = 2 * FP32
"""For each element of the queries: a ring's fp32 sum of dq over blocks, and dq of the current block."""
PASSED_ON_GRADIENTS = 8 * FP32
"""For each element of the keys: dk and dv in fp32 if a gather passes them on from rank to rank, as torch's context
parallelism does: the sum, the current block's, those being sent and those arriving."""
NORM_BACKWARD = 5 * FP32
"""For each element of the hidden states: what the backward pass of transformers' RMSNorm makes in fp32 besides the
gradient of its input."""

Sizes = dict[str, Any]
"""Bytes by category; arrays if the shape has arrays."""


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


def layer_bytes(shape: RunShape) -> Layer:
    """Return what one layer saves for each token without checkpointing, and what its backward pass adds."""
    model, b, stream = shape.model, shape.element_size, shape.stream_size
    h, width = model.hidden_size, model.intermediate_size
    saved_heads, made, exchange = _attention(shape)
    if shape.fused_layers or shape.options.tiled_mlp_num_shards is not None:  # norms are tiled, too
        casts = (1, 1) if stream == b else (3, 2)  # autocast makes one each for q, k and v, and for gate and up
        norms, of_norm, in_backward = (casts[0] * b * h, (stream + casts[1] * b) * h), b, stream
    else:
        norms, of_norm, in_backward = _norms(h, b, stream), 4 + b, NORM_BACKWARD
    tensors, tensors_backward = (3, 1) if shape.fused_layers else (4, 2)  # gate, up, (activation,) product
    return Layer(
        norm_before_attention=norms[0] + of_norm * model.head_norm_width,
        norm_before_mlp=norms[1] + of_norm * (model.norm_width - 2 * h),
        norm_backward=(stream + in_backward) * h,
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


def _attention(shape: RunShape) -> tuple[float, float, float]:
    """Return the bytes per token that are saved, made in the backward pass, and exchanged."""
    model, b, options, stack = shape.model, shape.element_size, shape.options, shape.stack
    q, kv = model.query_size, model.key_value_size
    copies = key_value_copies(model.num_heads, model.num_key_value_heads, shape.ulysses)
    if stack.repeats_keys:
        copies = model.num_heads // model.num_key_value_heads
    heads = q + 2 * kv * copies
    # The gradients of the kernel's inputs, and FlashAttention's fp32 sum of dq. If query heads of this rank share keys
    # and values, version 3 also has fp32 sums of dk and dv, and version 2 has dk and dv of every query head in its own
    # precision.
    shares = model.num_heads > model.num_key_value_heads * copies
    shared = FLASH_3_KEY_VALUE_GRADIENT * kv * copies if shape.flash3 else 2 * b * q
    dq = FLASH_QUERY_GRADIENT * q if b == 2 else 0
    kernel = b * heads + dq + (shared if shares else 0)
    if shape.ring > 1:
        made = b * q + RING_QUERY_GRADIENTS * q + kernel - dq
        part = min(1.0, heads_at_a_time(model.num_key_value_heads, options.heads_k_stride) / model.num_key_value_heads)
        held, grads = shape.backend.held(kv * copies, b, shape.ring, part)
        passed_on = PASSED_ON_GRADIENTS * kv * copies
        exchange = 2 * b * kv * copies + held + (passed_on if stack.passes_gradients_on else grads)
    else:
        made, exchange = b * q + kernel, 0.0
    in_stages = options.heads_k_stride is not None and shape.backend.has_stages
    in_stages |= bool(options.overlap_exchange) and shape.ulysses > 1
    part = _stage(shape, copies) if in_stages else 1.0
    if shape.ulysses == 1:
        own = b * heads * in_stages  # the gradients of all heads, beside what a stage makes
        return b * heads + b * q, own + part * made, part * exchange
    if in_stages:
        own = b * q if stack.projects_by_stage else b * (2 * q + 2 * kv)
        return own, own + part * (3 * b * heads + made), part * (3 * b * heads + exchange)
    # The output in both layouts. The gradient in one layout takes the place of the output in the other, which its
    # projection has read.
    return b * heads + 2 * b * q, made - b * q, exchange


def _stage(shape: RunShape, copies: int) -> float:
    """Return the fraction of a rank's heads whose messages and results are there at a time.

    They are those of a stage, and of the next one if that is exchanged meanwhile.
    """
    per_rank = shape.model.num_key_value_heads * copies // shape.ulysses
    sharing = shape.model.num_heads // (shape.model.num_key_value_heads * copies)
    stages = head_stages(per_rank, sharing, shape.options.heads_k_stride, split_queries=shape.ring == 1)
    largest = max((stage.keys.stop - stage.keys.start) * stage.sharing for stage in stages)
    return min(1.0, (1 + bool(shape.options.overlap_exchange)) * largest / (per_rank * sharing))


class ChunkSizes(NamedTuple):
    """Bytes of a rank's token in a sequence-chunked step, and the parts that it is copied in."""

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
    def of(cls, shape: RunShape, tokens: float) -> ChunkSizes:
        """Return the sizes for so many tokens of a rank."""
        most = shape.options.sequence_chunk_size
        assert most is not None, "the step is cut into chunks"
        model, b = shape.model, shape.element_size
        copies = key_value_copies(model.num_heads, model.num_key_value_heads, shape.ulysses)
        chunk = min(tokens, most)
        chunks = max(1, math.ceil(tokens / chunk)) if chunk else 1
        return cls(
            hidden=shape.stream_size * model.hidden_size,
            query=b * model.query_size,
            key_value=2 * b * model.key_value_size * copies,
            log_sum_exp=LOG_SUM_EXP_BYTES * model.num_heads,
            chunk=chunk,
            chunks=chunks,
            groups=num_head_groups(chunks, model.num_key_value_heads * copies // shape.ulysses),
        )


def whole_moments(shape: RunShape, layer: Layer, tokens: float) -> dict[str, Sizes]:
    """Return what a whole layer has on the device at each moment of its backward pass, by category."""
    model, tiles, in_tiles = shape.model, shape.options.tiled_mlp_num_shards, tokens
    if tiles is not None:
        in_tiles = tokens / (tiles or max(1, math.ceil(tokens / tile_tokens(model.hidden_size))))
    tiled = 3 * shape.element_size * model.hidden_size if in_tiles < tokens else 0  # inputs, outputs, gradients, whole
    scan = maps = 0.0
    if model.recurrent is not None:
        scan = written_bytes(model.recurrent, tokens)
        maps = 2 * given_bytes(model.recurrent, shape.sp, 2 if shape.ring > 1 else 1) if shape.sp > 1 else 0.0
    return {
        "attention": {
            "hidden states": (layer.norm_before_attention + shape.stream_size * model.hidden_size) * tokens,
            "attention": (layer.attention + layer.attention_backward) * tokens,
            "exchange": layer.exchange * tokens + maps,
            "scan": scan,
        },
        "norm": {
            "hidden states": (layer.norm_before_attention + FP32 * model.hidden_size + layer.norm_backward) * tokens,
            "attention": layer.attention * tokens,
        },
        "MLP": {
            "hidden states": (layer.norm_before_attention + layer.norm_before_mlp) * tokens,
            "attention": layer.attention * tokens,
            "MLP": (layer.mlp + layer.mlp_backward) * in_tiles + tiled * tokens,
        },
    }


def chunked_moments(shape: RunShape, layer: Layer, tokens: float) -> dict[str, Sizes]:
    """Return what a sequence-chunked step has on the device at each moment of a layer's backward pass, by category."""
    of = ChunkSizes.of(shape, tokens)
    both, left = min(2, of.chunks), min(1, of.chunks - 1)  # parts that are computed or arrive, and that leave
    of_layer = both * (2 * of.hidden + of.query) + left * (of.hidden + of.query)
    of_layer += 2 * of.query  # attention's output after the exchange, and in another layout
    sums = 2 * FP32 / shape.element_size * of.key_value / 2 / of.groups  # of the gradients of a group's keys and values
    in_attention = 3 * of.query + of.log_sum_exp + of.key_value
    if shape.ring > 1:  # a group of heads at a time, with all tokens
        both, left = min(2, of.groups), min(1, of.groups - 1)
        made = layer.attention_backward + layer.exchange + left * (of.query + of.key_value)
        attention = (both * in_attention + made) / of.groups * tokens
    else:
        made = layer.attention_backward + FP32 / shape.element_size * of.query + left * (of.query + of.key_value)
        attention = (both * in_attention + made) * of.chunk + sums * tokens
    return {
        "attention": {"attention": attention},
        "MLP": {
            "sequence chunks": of_layer * of.chunk,
            "hidden states": layer.norm_before_mlp * of.chunk,
            "MLP": (layer.mlp + layer.mlp_backward) * of.chunk,
        },
    }

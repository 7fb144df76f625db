"""Memory and copies of the sequence-chunked step (`longctx.layers.chunked`).

The device has a chunk of tokens of one layer, or a block of some heads' queries and of their keys. While that is
computed, the next part arrives from host memory and the results of the one before leave. Sizes are bytes.

Shape legend: as in `longctx.forecast.layer_memory`; G groups of heads.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from longctx.attention.cost import FLOPS_BACKWARD, FLOPS_FORWARD
from longctx.forecast.coefficients import FP32, LOG_SUM_EXP_BYTES
from longctx.forecast.layer_memory import Layer
from longctx.forecast.memory_setup import MemorySetup
from longctx.layers.chunked.attention import num_head_groups
from longctx.ulysses.exchange import key_value_copies


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
    """G."""

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

"""The sizes of a model's recurrent layers, read from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

RECURRENT_KINDS = ("linear_attention", "mamba", "hybrid", "conv")
"""Values of `layer_types` for layers that mix tokens by a scan or a convolution, `hybrid` beside attention."""

CHANNEL_KINDS = ("mlp", "moe")
"""Those for layers that mix no tokens at all."""

MIXES = {"hybrid": 2} | dict.fromkeys(CHANNEL_KINDS, 0)
"""How often layers mix tokens, by their kind; others once."""

CHUNK = 64
"""Tokens that implementations of a scan compute at a time."""

SEGMENT = 16 * CHUNK
"""Tokens of which Kimi Delta Attention keeps what its backward pass needs."""


@dataclass(frozen=True, kw_only=True)
class RecurrentSizes:
    """The sizes of one recurrent layer; all of a model are alike. Layers with a convolution alone have no scan."""

    heads: int | None = None
    """Heads that ranks can exchange for tokens, key heads of a delta rule; None where only states pass."""
    exchanged: int = 0
    """Elements of a token that leave and come back if ranks exchange tokens for heads."""
    given: int = 0
    """fp32 elements that a piece of a document gives to the piece that continues it."""
    flops: int = 0
    """FLOPs of the scan for each token, forward."""
    given_flops: int = 0
    """FLOPs for each token of a piece that another one continues, forward: its map, besides the scan."""
    written: int = 0
    """fp32 elements that operators write for each token and key channel with those before it in a chunk; 0 if they
    compute such pairs in products alone. These operators compute a segment again in the backward pass."""


def recurrent_sizes(config: PretrainedConfig) -> RecurrentSizes | None:
    """Return the sizes of the model's recurrent layers, or None if it has no such layers."""
    text = config.get_text_config()
    if not set(RECURRENT_KINDS) & set(getattr(text, "layer_types", None) or ()):
        return None
    if hasattr(text, "linear_num_key_heads"):
        return _gated_delta(text)
    if hasattr(text, "linear_num_heads"):
        return _kimi_delta(text.linear_num_heads, text.linear_head_dim)
    if hasattr(text, "mamba_d_state"):
        return _mamba2(text.mamba_n_heads, text.mamba_d_head, text.mamba_d_state)
    if hasattr(text, "ssm_state_size"):
        return _mamba2(text.mamba_num_heads, text.mamba_head_dim, text.ssm_state_size)
    return RecurrentSizes()


def num_mixing_layers(config: PretrainedConfig) -> int:
    """Return how often a forward pass mixes tokens, by attention, a scan or a convolution."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    return sum(MIXES.get(kind, 1) for kind in kinds)


def num_recurrent_layers(config: PretrainedConfig) -> int:
    """Return how many layers have a scan or a convolution."""
    return sum(kind in RECURRENT_KINDS for kind in getattr(config.get_text_config(), "layer_types", None) or ())


def _gated_delta(text: Any) -> RecurrentSizes:
    keys, values = text.linear_num_key_heads, text.linear_num_value_heads
    size, width = text.linear_key_head_dim, text.linear_value_head_dim
    return RecurrentSizes(
        heads=keys,
        exchanged=2 * keys * size + 2 * values * width + 2 * values,
        given=values * size * (width + size),
        flops=values * _delta_flops(size, width),
        given_flops=values * _delta_flops(size, width + size),
    )


def _kimi_delta(heads: int, size: int) -> RecurrentSizes:
    """A token's decays are as many as its keys, and fp32, so they take the bytes of two elements in half precision."""
    return RecurrentSizes(
        heads=heads,
        exchanged=heads * (6 * size + 1),
        given=heads * size * 2 * size,
        flops=heads * _delta_flops(size, size),
        given_flops=heads * _delta_flops(size, 2 * size),
        written=heads * size * CHUNK,
    )


def _delta_flops(size: int, width: int) -> int:
    """FLOPs of a head and token, with states of [size, width], as transformers computes a chunk.

    The products of keys with keys and queries with keys, their inverse applied to keys and values, and the products of
    states with keys and queries, and of keys with values.
    """
    return 2 * CHUNK * 2 * size + CHUNK * (size + width) + 2 * CHUNK * width + 3 * 2 * size * width


def _mamba2(heads: int, size: int, state: int) -> RecurrentSizes:
    """The products of C with B and of these with x in a chunk, and those of states with C and of B with x."""
    flops = heads * (2 * CHUNK * (state + size) + 2 * 2 * state * size)
    return RecurrentSizes(given=heads * (size * state + 1), flops=flops, given_flops=flops)

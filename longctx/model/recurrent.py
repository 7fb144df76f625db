"""The sizes of a model's recurrent layers, read from its configuration."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

RECURRENT_KINDS = ("linear_attention",)
"""Values of `layer_types` for layers that carry a state from token to token."""


@dataclass(frozen=True, kw_only=True)
class RecurrentSizes:
    """The sizes of one recurrent layer; all of a model are alike."""

    heads: int
    """Heads that a layer has to give whole: key heads of a gated delta rule."""
    exchanged: int
    """Elements of a token that leave and come back if ranks exchange tokens for heads."""
    given: int
    """fp32 elements that a piece of a document gives to the piece that continues it."""
    flops: int
    """FLOPs of the scan for each token, forward."""
    given_flops: int
    """FLOPs for each token of a piece that another one continues, forward: its map, besides the scan."""


CHUNK = 64
"""Tokens that implementations of the gated delta rule compute at a time."""


def recurrent_sizes(config: PretrainedConfig) -> RecurrentSizes | None:
    """Return the sizes of the model's recurrent layers, or None if it has no such layers."""
    text = config.get_text_config()
    if not set(RECURRENT_KINDS) & set(getattr(text, "layer_types", None) or ()):
        return None
    keys, values = text.linear_num_key_heads, text.linear_num_value_heads
    size, width = text.linear_key_head_dim, text.linear_value_head_dim
    return RecurrentSizes(
        heads=keys,
        exchanged=2 * keys * size + 2 * values * width + 2 * values,
        given=values * size * (width + size),
        flops=values * _delta_flops(size, width),
        given_flops=values * _delta_flops(size, width + size),
    )


def _delta_flops(size: int, width: int) -> int:
    """FLOPs of a head and token, with states of [size, width], as transformers computes a chunk.

    The products of keys with keys and queries with keys, their inverse applied to keys and values, and the products of
    states with keys and queries, and of keys with values.
    """
    return 2 * CHUNK * 2 * size + CHUNK * (size + width) + 2 * CHUNK * width + 3 * 2 * size * width

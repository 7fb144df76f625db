"""Ulysses attention: exchange sequence shards for head shards."""

from longctx.ulysses.attention import ulysses_attention

__all__ = ["ulysses_attention"]

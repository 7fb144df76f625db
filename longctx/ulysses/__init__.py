"""Ulysses attention: exchange sequence shards for head shards."""

from longctx.ulysses.exchange import heads_message, legal_sizes, ulysses_attention

__all__ = ["heads_message", "legal_sizes", "ulysses_attention"]

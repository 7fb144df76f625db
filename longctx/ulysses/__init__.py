"""Ulysses attention: exchange sequence shards for head shards."""

from longctx.ulysses.exchange import exchange_attention, heads_message, legal_sizes, ulysses_attention

__all__ = ["exchange_attention", "heads_message", "legal_sizes", "ulysses_attention"]

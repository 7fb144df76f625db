"""Ulysses attention: exchange sequence shards for head shards."""

from longctx.ulysses.attention import exchanged_attention, scheduled_attention, ulysses_attention
from longctx.ulysses.exchange import exchange_attention, heads_message, legal_sizes, ulysses_remedy, usable_sizes

__all__ = [
    "exchange_attention",
    "exchanged_attention",
    "heads_message",
    "legal_sizes",
    "scheduled_attention",
    "ulysses_attention",
    "ulysses_remedy",
    "usable_sizes",
]

"""Ulysses attention: exchange sequence shards for head shards."""

"""Sequence-parallel fine-tuning: exact, or refused."""

"""Batches made of packs or documents. Padding happens here alone."""

from .sequence import IGNORE_INDEX, SequenceCollator

__all__ = ["IGNORE_INDEX", "SequenceCollator"]

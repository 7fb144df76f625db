"""Make batches of packs or documents; the only place that pads."""

from .sequence import IGNORE_INDEX, SequenceCollator

__all__ = ["IGNORE_INDEX", "SequenceCollator"]

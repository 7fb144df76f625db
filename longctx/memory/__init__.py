"""What a training step takes of device and host memory: traced, and in closed form."""

from longctx.memory.closed_form import Breakdown, MemorySetup, ModelSizes, max_length, predict, reach
from longctx.memory.trace import Allocation, MemoryTrace, MemoryTracer

__all__ = [
    "Allocation",
    "Breakdown",
    "MemorySetup",
    "MemoryTrace",
    "MemoryTracer",
    "ModelSizes",
    "max_length",
    "predict",
    "reach",
]

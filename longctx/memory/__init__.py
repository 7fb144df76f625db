"""What a training step takes of device and host memory: traced, and in closed form."""

from longctx.memory.trace import Allocation, MemoryTrace, MemoryTracer

__all__ = ["Allocation", "MemoryTrace", "MemoryTracer"]

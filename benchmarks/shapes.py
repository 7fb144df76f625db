"""Shapes of runs by flat keywords, for tables of published runs and for tests."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from longctx.attention.choice import arrangements
from longctx.forecast.memory_options import MemoryOptions
from longctx.forecast.model_sizes import ModelSizes
from longctx.forecast.shape import ONE_DEVICE, RunShape, Stack

OPTIONS = {field.name for field in fields(MemoryOptions)}


def shape_of(model: ModelSizes, *, sp: int = 1, ring: int = 1, backend: str | None = None, **values: Any) -> RunShape:
    """Return a shape whose checkpoints do not keep attention's output and whose gradients are reduced in fp32.

    Args:
        sp, ring: ranks that share a sequence, and those that pass keys and values around.
        backend: a value of --sp_backend; None means the first that has these degrees.
        values: fields of `RunShape`, of its memory options and of its stack, which tell them otherwise.
    """
    ways = [one for one in arrangements(sp) if one.ring == ring and backend in (None, one.name)] if sp > 1 else []
    options: dict[str, Any] = {"selective": False, "communication_data_type": "fp32"}
    options |= {name: values.pop(name) for name in [*values] if name in OPTIONS}
    stack = {name: values.pop(name) for name in [*values] if name in Stack._fields}
    arrangement = ways[0] if sp > 1 else ONE_DEVICE
    return RunShape(
        model=model, arrangement=arrangement, options=MemoryOptions(**options), stack=Stack(**stack), **values
    )

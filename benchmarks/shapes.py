"""Shapes of runs by flat keywords, for tables of published runs and for tests."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from longctx.attention.choice import arrangements
from longctx.forecast.memory_options import MemoryOptions
from longctx.forecast.model_sizes import ModelSizes
from longctx.forecast.shape import ONE_DEVICE, RunShape, Stack

OPTIONS = {field.name for field in fields(MemoryOptions)}


def shape_of(model: ModelSizes, **values: Any) -> RunShape:
    """Return a shape whose checkpoints do not keep attention's output and whose gradients are reduced in fp32.

    Args:
        values: of `changed`, which tell these otherwise.
    """
    return changed(RunShape(model=model), **{"selective": False, "communication_data_type": "fp32", **values})


def changed(shape: RunShape, **values: Any) -> RunShape:
    """Return a shape with other values of its fields, of its memory options, of its stack, and of its arrangement.

    The latter are sp, the ranks that share a sequence; ring, those that pass keys and values around; and backend, a
    value of --sp_backend, by default the first that has these degrees.
    """
    if {"sp", "ring", "backend"} & values.keys():
        sp, ring, name = values.pop("sp", shape.sp), values.pop("ring", 1), values.pop("backend", None)
        ways = [one for one in arrangements(sp) if one.ring == ring and name in (None, one.name)] if sp > 1 else []
        values["arrangement"] = ways[0] if sp > 1 else ONE_DEVICE
    options = {name: values.pop(name) for name in [*values] if name in OPTIONS}
    stack = {name: values.pop(name) for name in [*values] if name in Stack._fields}
    if options:
        values["options"] = replace(shape.options, **options)
    if stack:
        values["stack"] = shape.stack._replace(**stack)
    return replace(shape, **values)

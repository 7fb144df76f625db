"""Queries that are scaled by their position: the temperature of Llama 4's layers without RoPE (arXiv 2501.19399).

transformers counts positions from the first token that a layer is given. In a batch that was cut, this is neither the
first token of a document nor of the sequence. So these layers run without their own factors, and our attention applies
those of the positions in documents.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from longctx.upstream.transformers_internals import replace_forward

TUNED = "attn_temperature_tuning"
"""transformers' name of the setting, in the configuration and in the layer."""


def has_temperature(layer: Any) -> bool:
    """Whether an attention layer scales its queries by position, as its configuration says."""
    return bool(getattr(getattr(layer, "config", None), TUNED, False)) and not layer.use_rope


def install_temperature(model: nn.Module) -> None:
    """Make attention layers leave their factors to `with_temperature` on the batches of `SequenceParallel.shard`."""
    for layer in model.modules():
        if hasattr(layer, TUNED) and has_temperature(layer):
            replace_forward(layer, partial(_forward_without, layer, layer.forward))


@torch.compiler.disable  # a compiled layer would keep either setting
def _forward_without(layer: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    setattr(layer, TUNED, kwargs.get("sequence") is None)
    try:
        return forward(*args, **kwargs)
    finally:
        setattr(layer, TUNED, True)


def with_temperature(layer: Any, query: Tensor, position_ids: Tensor) -> Tensor:
    """Return query [1, H, S/P, D] times the layer's factors for position_ids [1, S/P], in transformers' arithmetic."""
    steps = torch.floor((position_ids[0].float() + 1.0) / layer.floor_scale)
    factors = torch.log1p(steps) * layer.attn_scale + 1.0
    return (query * factors[:, None]).to(query.dtype)

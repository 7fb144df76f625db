"""ZeRO's fp32 weights, set to the model's own fp32 values.

DeepSpeed rounds a model to bf16 and makes its fp32 weights from the result. An update smaller than half a step between
bf16 values then leaves the bf16 weights, which layers compute with, unchanged: at a learning rate of 2e-5 a first step
has less than half of its effect in fp32. From the model's own fp32 values, which lie between bf16 values, some updates
reach the next one, and the mean of all updates is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.integrations import deepspeed_config


@contextmanager
def loaded_in_fp32() -> Iterator[None]:
    """Make ZeRO-3, which partitions a model while loading it, keep fp32 weights in fp32 until `round_weights`."""
    config = deepspeed_config()
    if config is None or "bf16" not in config:
        yield
        return
    given = config["bf16"]
    config["bf16"] = {"enabled": False}
    try:
        yield
    finally:
        config["bf16"] = given


def round_weights(model: nn.Module) -> dict[str, Tensor]:
    """Round the parameters that ZeRO-3 partitioned in fp32 to bf16; DeepSpeed rounds all others itself.

    Returns:
        Name -> fp32 values of each trained parameter that bf16 cannot represent: this rank's part [n] in
        host memory if it is partitioned, else the whole parameter, not copied.
    """
    exact = {}
    for name, parameter in model.named_parameters():
        part = getattr(parameter, "ds_tensor", None)
        held = parameter.data if part is None else part.data
        if held.dtype is not torch.float32:
            continue
        rounded = torch.empty_like(held, dtype=torch.bfloat16, pin_memory=held.is_pinned()).copy_(held)
        if parameter.requires_grad and not torch.equal(rounded.float(), held):
            exact[name] = held if part is None else held.cpu()
        if part is not None:
            part.data = rounded
            parameter.data = parameter.data.bfloat16()  # empty
    return exact


def set_fp32_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Set this rank's part of ZeRO's fp32 weights to what `round_weights` returned; no messages are sent.

    Args:
        model: the same model, wrapped by DeepSpeed.
        weights: parameters without an entry keep their values.
    """
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    parameter: Any
    for name, parameter in model.named_parameters():
        name = name.removeprefix("module.")
        if name not in weights:
            continue
        values = weights[name].reshape(-1)
        if not hasattr(parameter, "ds_tensor"):  # ZeRO-1 and 2: each rank takes its part
            safe_set_full_fp32_param(parameter, values)
            continue
        size = parameter.ds_tensor.numel()
        if values.numel() == parameter.ds_numel:  # it was whole; parts are equal, and the last one is padded
            values = values[size * dist.get_rank(parameter.ds_process_group) :][:size]
        part = values.new_zeros(size)
        part[: values.numel()] = values
        safe_set_local_fp32_param(parameter, part)

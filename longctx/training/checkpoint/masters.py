"""The fp32 weights that ZeRO trains beside its bf16 ones, as the model had them.

DeepSpeed rounds a model to bf16 and makes its fp32 weights from the result. Weights that were stored in fp32 then lie
on bf16's grid, and an update that is smaller than half a step of that grid leaves the bf16 weights, which layers
compute with, as they were: at a learning rate of 2e-5 a first step does less than half of what it does in fp32. From
weights between the grid's points some are rounded to the next one, and the mean of all updates is right.
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
    """Have ZeRO-3, which partitions a model while it is loaded, keep fp32 weights in fp32 until `round_weights`."""
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
    """Round to bf16 what ZeRO-3 partitioned in fp32; DeepSpeed does so itself with all other parameters.

    Returns:
        Name -> fp32 values of each trained parameter that bf16 does not hold exactly: this rank's part [n] of one that
        is partitioned, in host memory, else the whole one, which is not copied.
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
        model: the same, wrapped by DeepSpeed.
        weights: parameters without an entry keep what they have.
    """
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    parameter: Any
    for name, parameter in model.named_parameters():
        name = name.removeprefix("module.")
        if name not in weights:
            continue
        values = weights[name].reshape(-1)
        if not hasattr(parameter, "ds_tensor"):  # ZeRO-1 and 2, of which each rank takes its part
            safe_set_full_fp32_param(parameter, values)
            continue
        size = parameter.ds_tensor.numel()
        if values.numel() == parameter.ds_numel:  # it was whole; parts are equal, and the last one is padded
            values = values[size * dist.get_rank(parameter.ds_process_group) :][:size]
        part = values.new_zeros(size)
        part[: values.numel()] = values
        safe_set_local_fp32_param(parameter, part)

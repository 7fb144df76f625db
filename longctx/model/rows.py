"""Weights of which each rank of FSDP2 reads its own rows from the safetensors files, so that no rank holds all of them.

The model is made on the meta device, and every parameter knows where its values are stored. Once FSDP2 has cut it, each
rank allocates its shards and reads the rows of them, a block at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from longctx.model.files import weight_files
from longctx.upstream.accelerate_internals import shards_filled
from longctx.upstream.transformers_internals import changes_weights, needs_whole_weights

_BLOCK_BYTES = 1 << 25
"""Most bytes of a file that are mapped into memory at a time, unless one row has more."""


@dataclass(frozen=True, kw_only=True)
class StoredWeight:
    """Where the values of a parameter are."""

    file: Path
    """A safetensors file."""
    key: str
    """The tensor in it, of the parameter's shape."""
    dtype: torch.dtype
    """What values are rounded to, before accelerate makes trained parameters fp32."""

    def read(self, start: int, into: Tensor) -> None:
        """Read the rows from `start` on into a tensor [rows, ...] of any dtype and device."""
        bytes_of_row = into[:1].numel() * torch.float32.itemsize
        for begin in range(0, len(into), step := max(1, _BLOCK_BYTES // max(1, bytes_of_row))):
            block = into[begin : begin + step]
            with safe_open(self.file, framework="pt") as file:  # closing it frees the pages that were mapped
                rows = file.get_slice(self.key)[start + begin : start + begin + len(block)]
                block.copy_(rows if block.dtype == self.dtype else rows.to(self.dtype))
                del rows


def obstacle_to_rows(model: PreTrainedModel, name: str, revision: str | None) -> str | None:
    """Return why a rank cannot read only its rows of a model's weights; None if it can.

    Args:
        model: on the meta device. Its saved buffers are read here, and its parameters remember where they are stored.
        name: the model's folder or its name on the hub.
    """
    files = weight_files(name, revision, download=True)
    if any(file.suffix != ".safetensors" for file in files):
        return "its weights are not in safetensors files"
    stored: dict[str, Path] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            stored |= dict.fromkeys(file.keys(), path)
    values: dict[str, Any] = model.state_dict(keep_vars=True)
    tied = {id(value) for key, value in values.items() if key in stored}
    if (
        changes_weights(model)
        or needs_whole_weights(model.config)
        or any(key not in stored and id(value) not in tied for key, value in values.items())
    ):
        return f"the weights of a {model.config.model_type} model are converted when they are loaded"
    for key, value in values.items():
        if isinstance(value, nn.Parameter):
            if key in stored and not hasattr(value, "stored"):
                value.stored = StoredWeight(file=stored[key], key=key, dtype=value.dtype)  # type: ignore[attr-defined]
            continue
        module, _, buffer = key.rpartition(".")
        with safe_open(stored[key], framework="pt") as file:
            model.get_submodule(module)._buffers[buffer] = file.get_tensor(key).to(value.dtype)
    return None


@contextmanager
def on_cpu_without_memory(model: nn.Module) -> Iterator[None]:
    """Let tensors on the CPU of the same shape, which take no memory, stand in for parameters that are yet to be read.

    peft puts an adapter on the device of its layer, where it would have no values otherwise.
    """
    held = ((module._parameters, name) for module in model.modules() for name in module._parameters)
    places: list[tuple[dict[str, Any], str, Any]] = [
        (parameters, name, parameters[name]) for parameters, name in held if hasattr(parameters[name], "stored")
    ]
    tensors = {value: nn.Parameter(torch.zeros((), dtype=value.dtype).expand(value.shape)) for *_, value in places}
    for parameters, name, value in places:
        parameters[name] = tensors[value].requires_grad_(value.requires_grad)
    yield
    for parameters, name, value in places:
        parameters[name] = value.requires_grad_(tensors[value].requires_grad)


@contextmanager
def rows_read(model: nn.Module) -> Iterator[None]:
    """Read this rank's rows of the parameters that know where they are stored, when FSDP2 wraps the model inside."""
    held = model.state_dict(keep_vars=True)
    stored = {name: value.stored for name, value in held.items() if hasattr(value, "stored")}
    if not stored:
        yield
        return
    with shards_filled(partial(_fill, stored)):
        yield


@torch.no_grad()
def _fill(stored: Mapping[str, StoredWeight], name: str, shard: Any, whole: Tensor) -> None:
    """Fill a shard, a DTensor, with what is stored, or with its rows of a parameter that every rank has made alike."""
    _, offsets = compute_local_shape_and_global_offset(shard.shape, shard.device_mesh, shard.placements)
    local, start = shard.to_local(), offsets[0]
    if name in stored:
        stored[name].read(start, local)
    else:
        assert not whole.is_meta, f"{name} has no values, and is not stored"
        local.copy_(whole[start : start + len(local)])

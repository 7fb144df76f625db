"""Weights of which each rank of FSDP2 reads its own rows from the safetensors files, so that no rank holds all of them.

The model is made on the meta device, and every parameter knows where its values are stored. Once FSDP2 has cut it, each
rank allocates its shards and reads their rows, a block at a time.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from longctx.model.files import FLOATS, weight_files
from longctx.ranks.agreement import on_all_ranks
from longctx.upstream.accelerate_internals import shards_filled
from longctx.upstream.transformers_internals import changes_weights, needs_whole_weights

BLOCK_BYTES = 1 << 22
"""Bytes that are read at a time."""


@dataclass(frozen=True, kw_only=True)
class StoredWeight:
    """Where the values of a parameter are, one after the other."""

    file: Path
    start: int
    """Offset of the first value in the file, in bytes."""
    nbytes: int
    shape: tuple[int, ...]
    kind: str
    """The dtype in the file, as safetensors names it."""
    stored: torch.dtype
    """The same; uint8, and one value a byte, for what is no floating-point number."""
    dtype: torch.dtype
    """The dtype that values are rounded to, before accelerate makes trained parameters fp32."""

    def read(self, first: int, into: Tensor, buffer: NDArray[np.uint8], opened: BufferedReader | None = None) -> None:
        """Read values from the `first` on into a contiguous tensor of any dtype and device.

        safetensors' own `get_slice` maps the file, and the system then reads far ahead: nearly the whole file, where
        each of 16 ranks reads its rows.

        Args:
            buffer: bytes to read through.
            opened: the file, where it is read more than once.

        Raises:
            OSError: if the file cannot be read, or has become shorter.
        """
        size = self.stored.itemsize
        with nullcontext(opened) if opened else open(self.file, "rb") as file:
            if hasattr(os, "posix_fadvise"):  # not on macOS
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            file.seek(self.start + first * size)
            for block in into.view(-1).split(len(buffer) // size):
                raw = buffer[: len(block) * size]
                if file.readinto(raw.data) != len(raw):
                    raise OSError(f"{self.file} has become shorter. Download it again.")
                values = torch.from_numpy(raw).view(self.stored)
                block.copy_(values if block.dtype == self.dtype else values.to(self.dtype))


def stored_in(path: Path) -> Iterator[tuple[str, StoredWeight]]:
    """Yield the tensors of a safetensors file, which has been checked before, by name."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    for name, held in header.items():
        (start, end), kind = held["data_offsets"], held["dtype"]
        dtype = FLOATS.get(kind, torch.uint8)
        place = {"file": path, "start": 8 + length + start, "nbytes": end - start}
        yield name, StoredWeight(**place, shape=tuple(held["shape"]), kind=kind, stored=dtype, dtype=dtype)


@contextmanager
def _unreadable_named() -> Iterator[None]:
    """Raise ValueError, which ends all ranks with one line, in place of OSError: the files have been checked before."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"The model's weights can no longer be read: {error}") from error


def stored_weights(model: PreTrainedModel, name: str, revision: str | None) -> dict[str, StoredWeight] | None:
    """Return where each stored tensor of a model is, by name, or None if its weights are not in safetensors files.

    Raises:
        ValueError: if they hold a weight both with and without the prefix of the model's type.
    """
    files = weight_files(name, revision, download=True)
    if any(file.suffix != ".safetensors" for file in files):
        return None
    stored = dict(chain.from_iterable(map(stored_in, files)))
    prefix = f"{model.base_model_prefix}."
    if (twice := next((key for key in stored if prefix + key in stored), None)) is not None:
        raise ValueError(
            f"The weights of {name} hold both {twice} and {prefix}{twice}, and the model has room for one of them. "
            "Remove the other from the files."
        )
    return stored


@_unreadable_named()
def obstacle_to_rows(model: PreTrainedModel, name: str, revision: str | None) -> str | None:
    """Return why a rank cannot read only its rows of a model's weights; None if it can.

    Args:
        model: on the meta device. Its saved buffers are read here, and its parameters remember where they are stored.
        name: the model's folder or its name on the hub.

    Raises:
        ValueError: if a file cannot be read, or holds a weight both with and without the prefix of the model's type.
    """
    weights = stored_weights(model, name, revision)
    if weights is None:
        return "its weights are not in safetensors files"
    stored = {key: weight for key, weight in weights.items() if weight.kind in FLOATS}
    values: dict[str, Any] = model.state_dict(keep_vars=True)
    tied = {id(value) for key, value in values.items() if key in stored}
    if (
        changes_weights(model)
        or needs_whole_weights(model.config)
        or any(key not in stored and id(value) not in tied for key, value in values.items())
    ):
        return f"the weights of a {model.config.model_type} model are converted when they are loaded"
    buffer = np.empty(BLOCK_BYTES, dtype=np.uint8)
    for key, value in values.items():
        if key not in stored or hasattr(value, "stored"):
            continue
        found = replace(stored[key], dtype=value.dtype)
        module_name, _, own_name = key.rpartition(".")
        buffers = model.get_submodule(module_name)._buffers
        if own_name in buffers:
            buffers[own_name] = torch.empty_like(value, device="cpu")
            found.read(0, buffers[own_name], buffer)
        else:
            value.stored = found
    return None


def locate(model: PreTrainedModel, stored: Mapping[str, StoredWeight]) -> dict[str, str]:
    """Let parameters and saved buffers remember where they are stored, and return their names in the files.

    Those whose values transformers converts when it loads them, such as experts in one matrix, are left out.

    Args:
        model: on the meta device.
        stored: the tensors of its files.
    """
    held: dict[str, Any] = model.state_dict(keep_vars=True)
    marks = {name: torch.empty_like(value, device="meta") for name, value in held.items()}
    names = {id(mark): name for name, mark in marks.items()}
    found = {}
    for key, mark in revert_weight_conversion(model, marks).items():
        name = names.get(id(mark))
        if name is not None and key in stored and stored[key].shape == held[name].shape and stored[key].kind in FLOATS:
            found[name] = key
            held[name].stored = replace(stored[key], dtype=held[name].dtype)
    return found


def read_whole(value: Any) -> Tensor:
    """Return the values of a parameter that remembers where they are stored, in its dtype."""
    values = torch.empty(value.shape, dtype=value.stored.dtype)
    value.stored.read(0, values, np.empty(BLOCK_BYTES, dtype=np.uint8))
    return values


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
    """Read this rank's rows of the parameters that know where they are stored, when FSDP2 wraps the model inside.

    All ranks enter it together.

    Raises:
        RefusedOnAllRanks: on every rank if one cannot read a file.
    """
    held = model.state_dict(keep_vars=True)
    stored = {name: value.stored for name, value in held.items() if hasattr(value, "stored")}
    with shards_filled(lambda shards: on_all_ranks(lambda: _fill(shards, stored))) if stored else nullcontext():
        yield


@_unreadable_named()
@torch.no_grad()
def _fill(shards: Mapping[str, tuple[Any, Tensor]], stored: Mapping[str, StoredWeight]) -> None:
    """Fill shards, which are DTensors, with their rows.

    Rows of stored parameters are read. All others are copied from the whole parameter, which every rank has made alike.
    """
    buffer = np.empty(BLOCK_BYTES, dtype=np.uint8)
    for name, (shard, whole) in shards.items():
        _, offsets = compute_local_shape_and_global_offset(shard.shape, shard.device_mesh, shard.placements)
        local, start = shard.to_local(), offsets[0]
        if name in stored:
            stored[name].read(start * math.prod(shard.shape[1:]), local, buffer)
        else:
            assert not whole.is_meta, f"{name} has no values, and is not stored"
            local.copy_(whole[start : start + len(local)])

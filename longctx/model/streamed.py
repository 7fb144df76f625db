"""A model's weights written to a new folder, of which only the tensor at hand is in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from longctx.model.files import FLOATS
from longctx.model.rows import BLOCK_BYTES, StoredWeight

_NAMES = {dtype: name for name, dtype in FLOATS.items()}


@dataclass(frozen=True, kw_only=True)
class NewTensor:
    """A tensor of the new folder, whose values are made when it is written."""

    kind: str
    """Its dtype, as safetensors names it."""
    shape: tuple[int, ...]
    nbytes: int
    blocks: Callable[[], Iterator[Tensor]]
    """Its values in order, in tensors of one dimension."""

    @property
    def itemsize(self) -> int:
        return self.nbytes // max(math.prod(self.shape), 1)


def copied(weight: StoredWeight, dtype: torch.dtype | None) -> NewTensor:
    """Return a tensor as it is stored, rounded to `dtype` unless that is None or it is no floating-point number."""
    target = dtype if dtype is not None and weight.kind in FLOATS else weight.stored
    count = weight.nbytes // weight.stored.itemsize
    step = BLOCK_BYTES // max(weight.stored.itemsize, target.itemsize)

    def blocks() -> Iterator[Tensor]:
        buffer = np.empty(BLOCK_BYTES, dtype=np.uint8)
        for first in range(0, count, step):
            block = torch.empty(min(step, count - first), dtype=target)
            replace(weight, dtype=target).read(first, block, buffer)
            yield block

    kind = _NAMES[target] if weight.kind in FLOATS else weight.kind
    return NewTensor(kind=kind, shape=weight.shape, nbytes=count * target.itemsize, blocks=blocks)


def computed(name: str, like: Tensor, values: Callable[[], Tensor]) -> NewTensor:
    """Return a tensor of the shape and dtype of another, whose values are computed when it is written.

    Raises:
        ValueError: then, if some are not finite.
    """

    def blocks() -> Iterator[Tensor]:
        for block in values().contiguous().view(-1).split(BLOCK_BYTES // like.dtype.itemsize):
            check_finite(name, block)
            yield block

    return NewTensor(kind=_NAMES[like.dtype], shape=tuple(like.shape), nbytes=like.nbytes, blocks=blocks)


def check_finite(name: str, values: Tensor) -> None:
    """Refuse merged weights that are not finite.

    Raises:
        ValueError: with the name of the weight.
    """
    if not values.isfinite().all():
        raise ValueError(
            f"{name} holds NaN or infinity once the adapter is merged: its weights or its lora_alpha are not finite, "
            f"or too large for {_NAMES[values.dtype]}. Export another checkpoint of the adapter."
        )


def write_tensors(tensors: Mapping[str, NewTensor], folder: Path, most_bytes: int) -> None:
    """Write safetensors files of at most so many bytes of tensors, and their index if there are several.

    The library's own writer has all tensors of a file in memory.
    """
    split = split_state_dict_into_shards_factory(
        dict(sorted(tensors.items())),
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=most_bytes,
    )
    for name, keys in split.filename_to_tensors.items():
        keys = sorted(keys, key=lambda key: (-tensors[key].itemsize, key))  # every offset is a multiple of its size
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for key in keys:
            start, end = end, end + tensors[key].nbytes
            header[key] = {"dtype": tensors[key].kind, "shape": tensors[key].shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / name, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for key in keys:
                file.writelines(block.view(torch.uint8).numpy().data for block in tensors[key].blocks())
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

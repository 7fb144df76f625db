"""Whether a model's head is tied to its embeddings, decided by its files before the weights are loaded.

A config.json may say `tie_word_embeddings: true` although the files hold a head of their own. transformers compares the
two matrices while it loads them and leaves them apart where they differ. ZeRO-3 has partitioned both by then, so that
they look alike there, and accelerate ties them again for FSDP2 because the configuration says so. The configuration is
therefore corrected first, and every engine follows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig

from longctx.model.files import weight_files
from longctx.model.tiny import TINY

_HEAD_NAMES = (".lm_head.weight", ".embed_out.weight")
_EMBEDDING_NAMES = (".embed_tokens.weight", ".embed_in.weight")
"""How the names of the two matrices end in the files of every allowed model type."""

_BLOCK_ELEMENTS = 1 << 24
"""The number of elements of each matrix that are compared at a time."""


def untie_as_stored(config: PretrainedConfig, name: str, *, revision: str | None = None, load: bool = False) -> bool:
    """Set `tie_word_embeddings` to False where the files hold a head that differs from the embeddings.

    Args:
        config: of the causal language model; it is changed in place.
        name: the model's folder or its name on the hub.
        load: whether weights may be downloaded and unpickled to find out. Otherwise only the safetensors files of a
            folder are looked at.

    Returns:
        Whether the configuration was changed.

    Raises:
        ValueError: if a safetensors file is missing or cannot be read.
    """
    if name == TINY or not getattr(config, "tie_word_embeddings", False) or not (load or Path(name).is_dir()):
        return False
    files = weight_files(name, revision, download=load)
    if not load:
        files = [file for file in files if file.suffix == ".safetensors"]
    if not _head_differs(files):
        return False
    config.tie_word_embeddings = False
    return True


def _head_differs(files: Sequence[Path]) -> bool:
    """Return whether the files hold both matrices, with different values, whatever their dtypes."""
    with ExitStack() as opened:
        tensors: dict[str, _Stored] = {}
        for file in files:
            tensors |= _lazy_tensors(file, opened)
        head, embeddings = _find(tensors, _HEAD_NAMES), _find(tensors, _EMBEDDING_NAMES)
        if head is None or embeddings is None:
            return False
        (shape, a), (other_shape, b) = head, embeddings
        if shape != other_shape or len(shape) != 2:
            return True
        step = max(1, _BLOCK_ELEMENTS // max(shape[1], 1))
        blocks = (slice(start, start + step) for start in range(0, shape[0], step))
        return not all(torch.equal(a[rows].float(), b[rows].float()) for rows in blocks)


_Stored = tuple[list[int], Any]
"""The shape of a matrix, and an object that reads the rows by which it is sliced."""


def _lazy_tensors(file: Path, opened: ExitStack) -> dict[str, _Stored]:
    """Return the two matrices of a file by name, as far as it has them."""
    if file.suffix == ".safetensors":
        try:
            content = opened.enter_context(safe_open(file, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} cannot be read: {error}. Download it again.") from error
        found = {key: content.get_slice(key) for key in content.keys() if _is_either(key)}  # noqa: SIM118  (no mapping)
        return {key: (part.get_shape(), part) for key, part in found.items()}
    content = torch.load(file, map_location="cpu", weights_only=True)
    return {key: (list(tensor.shape), tensor) for key, tensor in content.items() if _is_either(key)}


def _is_either(key: str) -> bool:
    return f".{key}".endswith((*_HEAD_NAMES, *_EMBEDDING_NAMES))


def _find(tensors: Mapping[str, _Stored], names: tuple[str, ...]) -> _Stored | None:
    """Return the matrix whose name is the shortest of those that end like this; parts of a model nest deeper."""
    found = [key for key in tensors if f".{key}".endswith(names)]
    return tensors[min(found, key=len)] if found else None

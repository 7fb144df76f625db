"""What a model's folder says of itself, looked at before transformers acts on it, since it may be anybody's."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.utils import cached_file
from transformers.utils.peft_utils import find_adapter_config_file

LARGEST_NUMBER = 1 << 31
MOST_LAYERS = 1 << 12
"""Of whole numbers in config.json. Each layer is an object, which costs memory before any weight is read."""

_AT_LEAST_ONE = {
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
}
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_INDEXES = tuple(f"{name}.index.json" for name in _WEIGHTS)


def check_config_values(name: str, values: Mapping[str, Any]) -> None:
    """Refuse numbers that no model has, and quantised weights.

    Args:
        values: of config.json, as they are.

    Raises:
        ValueError: with the key, its value and the limit.
    """
    if values.get("quantization_config") is not None:
        raise ValueError(
            f"--model_name_or_path {name}: its config.json has a quantization_config, and training on quantised "
            "weights is not compared with one device. Name the model that they were made from."
        )
    for key, number in _whole_numbers(values):
        largest = MOST_LAYERS if "layer" in key else LARGEST_NUMBER
        least = 1 if key in _AT_LEAST_ONE else -LARGEST_NUMBER
        if not least <= number <= largest:
            shown = f"{number:,}" if abs(number) < 10**20 else "a number of more than 20 digits"
            raise ValueError(
                f"--model_name_or_path {name}: its config.json sets {key} to {shown}; expected {least:,} to "
                f"{largest:,}. Correct the file, or get it again."
            )


def _whole_numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """(key, number), from parts such as text_config too."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _whole_numbers(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield key, value


def check_no_adapter(name: str, revision: str | None) -> None:
    """Refuse a folder with an adapter, which transformers would put into the model unasked.

    Raises:
        ValueError: if there is one.
    """
    if find_adapter_config_file(name, revision=revision) is not None:
        raise ValueError(
            f"--model_name_or_path {name} holds an adapter (adapter_config.json). Merge it into its model first "
            "(peft's merge_and_unload, then save_pretrained), and name that folder."
        )


def check_weight_files(name: str, config: PretrainedConfig, *, revision: str | None) -> None:
    """Look at the files of weights without reading them: they lie in the model's folder, and are as large as the model.

    Raises:
        ValueError: with the file, or the two sizes.
    """
    files = weight_files(name, revision)
    if not files or files[0].suffix != ".safetensors":
        return
    held, expected = sum(map(_elements, files)), _parameters(name, config)
    if expected > 2 * held:  # tied weights are in the files once
        raise ValueError(
            f"--model_name_or_path {name}: its config.json describes a model of {expected:,} parameters, and its "
            f"files hold {held:,}. Correct the file, or get the folder again."
        )


def weight_files(name: str, revision: str | None, *, download: bool = False) -> list[Path]:
    """Return the files that hold the weights, of which safetensors files are preferred.

    Args:
        download: whether to download the files of a hub model. Otherwise only its index is, and it has no files here.
    """
    folder = Path(name) if Path(name).is_dir() else None
    for weights, index in zip(_WEIGHTS, _INDEXES, strict=True):
        if folder is not None and (folder / weights).exists():
            return [_regular(folder / weights)]
        if folder is None and download and (path := _of_hub(name, weights, revision)) is not None:
            return [path]
        if (path := _of_hub(name, index, revision)) is not None:
            names = _indexed(path)
            if folder is not None:
                return [_regular(folder / part) for part in names]
            return [file for part in names if download and (file := _of_hub(name, part, revision)) is not None]
    return []


def _of_hub(name: str, file: str, revision: str | None) -> Path | None:
    """Return the path of a file of a model, downloaded where it is not in a folder; None if there is none."""
    path = cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=False)
    return None if path is None else Path(path)


def _indexed(index: Path) -> list[str]:
    """The files that an index names, all below its folder."""
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is no index of weights: {error}. Get it again.") from error
    for name in names:
        path = PurePosixPath(name.replace("\\", "/")) if isinstance(name, str) else None
        if path is None or path.is_absolute() or ".." in path.parts or not path.parts or len(name) > 255:
            raise ValueError(
                f"{index} names the file {str(name)[:80]!r}, which is none in its folder. Get the folder again."
            )
    return names


def _regular(path: Path) -> Path:
    if not path.is_file():  # a pipe would be waited for, without end
        raise ValueError(f"{path} is missing, or no file. Complete the folder, or get it again.")
    return path


def _elements(path: Path) -> int:
    """Of all tensors in a file, by its header, which safetensors holds against the file's size."""
    try:
        with safe_open(path, framework="pt") as file:
            return sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118  (no mapping)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}. Get it again.") from error


def without_weights(config: PretrainedConfig) -> PreTrainedModel:
    """The causal language model that the configuration describes, on the meta device: all parameters, no memory."""
    with torch.device("meta"):
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](copy.deepcopy(config))


def _parameters(name: str, config: PretrainedConfig) -> int:
    """Of the model that the configuration describes."""
    try:
        return sum(parameter.numel() for parameter in without_weights(config).parameters())
    except Exception as error:  # whatever transformers' own code makes of such values
        raise ValueError(
            f"--model_name_or_path {name}: no model can be made of its config.json: {error} ({type(error).__name__})."
        ) from error

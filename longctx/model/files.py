"""The files of weights in a model's folder, looked at before transformers acts on it, since it may be anybody's."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from longctx.model.config_file import BOUNDS
from longctx.untrusted.confined import OutOfBounds, confined
from longctx.untrusted.files import check_file
from longctx.upstream.transformers_internals import unpartitioned

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_INDEXES = tuple(f"{name}.index.json" for name in _WEIGHTS)


def check_savable(name: str, parts: Iterable[Any]) -> None:
    """Save a model's configuration, generation configuration and tokenizer for trial, before time goes into training.

    Args:
        parts: objects with `save_pretrained`; None is passed over.

    Raises:
        ValueError: if one of them cannot be saved.
    """
    for part in parts:
        with TemporaryDirectory(prefix="longctx-") as folder:
            try:
                if part is not None:
                    part.save_pretrained(folder)
            except Exception as error:  # whatever transformers' own code makes of such values
                raise ValueError(
                    f"--model_name_or_path {name}: its {type(part).__name__} cannot be saved, and neither could the "
                    f"trained model: {' '.join(str(error).split())} ({type(error).__name__}). Correct the file that it "
                    "comes from (config.json, generation_config.json, tokenizer_config.json)."
                ) from error


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
    tensors = {key: tensor for file in files for key, tensor in _tensors(file).items()}
    parameters = _parameters(name, config)
    held, expected = sum(math.prod(shape) for shape, _ in tensors.values()), sum(map(math.prod, parameters.values()))
    if expected > 2 * held:  # tied weights are in the files once
        raise ValueError(
            f"--model_name_or_path {name}: its config.json describes a model of {expected:,} parameters, and its "
            f"files hold {held:,}. Correct the file, or download the folder again."
        )
    _check_shapes(name, tensors, parameters)


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
        names = sorted(set(json.loads(check_file(index).read_text())["weight_map"].values()))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is not an index of weights: {error}. Download it again.") from error
    for name in names:
        path = PurePosixPath(name.replace("\\", "/")) if isinstance(name, str) else None
        if path is None or path.is_absolute() or ".." in path.parts or not path.parts or len(name) > 255:
            raise ValueError(
                f"{index} names the file {str(name)[:80]!r}, which is not a file in its folder. Download the folder "
                f"again."
            )
    return names


_READ_SUFFIXES = {".json", ".jinja", ".model", ".tiktoken", ".txt"}
"""Suffixes of the configurations, tokenizers and chat templates beside the weights."""


def files_read(folder: Path) -> list[Path]:
    """Return the files of a model's folder that transformers may read, sorted by path.

    These are the weights in one format, the configurations and the tokenizer's files. Other formats of the weights,
    and folders such as the checkpoints of a run, are left out.

    Raises:
        ValueError: if a file that an index of weights names is missing.
    """
    others = (path for path in folder.iterdir() if path.suffix in _READ_SUFFIXES and path.is_file())
    templates = (path for path in folder.glob("additional_chat_templates/*.jinja") if path.is_file())
    return sorted({*weight_files(str(folder), None), *others, *templates})


def has_saved_buffers(config: PretrainedConfig) -> bool:
    """Return whether the model keeps tensors that are not trained beside its parameters, such as a router's biases."""
    model = without_weights(config)
    return not {*model.state_dict()} <= {name for name, _ in model.named_parameters(remove_duplicate=False)}


def _regular(path: Path) -> Path:
    if not path.exists():
        raise ValueError(f"{path} is missing. Complete the folder, or download it again.")
    return check_file(path)


def _check_shapes(name: str, held: Mapping[str, tuple[list[int], str]], described: Mapping[str, torch.Size]) -> None:
    """Compare what has the same name in the files and in the model. A layout may differ, but the size may not.

    Other numbers than floating point ones are of a quantised model, whose shapes are its own.
    """
    shapes = {key: shape for key, (shape, dtype) in held.items() if dtype in _FLOATS and key in described}
    differ = [key for key, shape in sorted(shapes.items()) if math.prod(shape) != math.prod(described[key])]
    if differ:
        others = f", and {len(differ) - 1} other tensors differ too" if len(differ) > 1 else ""
        raise ValueError(
            f"--model_name_or_path {name}: {differ[0]} has the shape {shapes[differ[0]]} in its files, and the "
            f"configuration describes {list(described[differ[0]])}{others}. Correct config.json, or leave out of "
            "--model_init_kwargs what changes it."
        )


_FLOATS = ("F64", "F32", "F16", "BF16")
"""Floating-point types, as safetensors names them."""


def _tensors(path: Path) -> dict[str, tuple[list[int], str]]:
    """The shape and dtype of every tensor in a file, by its header, which safetensors holds against the file's size."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118  (no mapping)
            return {key: (its.get_shape(), its.get_dtype()) for key, its in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}. Download it again.") from error


def without_weights(config: PretrainedConfig) -> PreTrainedModel:
    """The model that the configuration describes, on the meta device: all parameters, no memory.

    It is a causal language model, or a multimodal one if the configuration has parts.

    It is made in a process of its own first, once: a configuration may describe billions of modules.

    Raises:
        ValueError: That takes more time or memory than any model, or buffers are larger than any model's.
    """
    is_whole = config.get_text_config() is not config
    model_class = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if is_whole else MODEL_FOR_CAUSAL_LM_MAPPING)[type(config)]
    key = (model_class, config.to_json_string(use_diff=False))
    try:
        if key not in _LARGEST_BUFFERS:
            _LARGEST_BUFFERS[key] = confined(lambda: _largest_buffer(model_class, config), BOUNDS)
    except OutOfBounds as error:
        raise ValueError(
            f"no model can be made of this config.json: {error}. Correct it, or download it again."
        ) from error
    if (largest := _LARGEST_BUFFERS[key]) > _MOST_IN_A_BUFFER:
        raise ValueError(
            f"this config.json describes a buffer of {largest:,} numbers, and the limit is {_MOST_IN_A_BUFFER:,}. "
            "Correct it, or download it again."
        )
    return on_meta(model_class, config)


_LARGEST_BUFFERS: dict[tuple[type[PreTrainedModel], str], int] = {}
"""Numbers in the largest buffer by the class of the model and the text of the configuration."""

_MOST_IN_A_BUFFER = 1 << 28
"""Numbers. Buffers are made when the model is, from sizes such as max_position_embeddings, and are in no file."""


def on_meta(model_class: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """Return a model of this class without memory; what the configuration asks for is taken to have been checked."""
    with unpartitioned(), torch.device("meta"):
        return model_class(copy.deepcopy(config))


def _largest_buffer(model_class: type[PreTrainedModel], config: PretrainedConfig) -> int:
    torch.set_num_threads(1)  # those of the process that was forked are not there
    return max((buffer.numel() for buffer in on_meta(model_class, config).buffers()), default=0)


def _parameters(name: str, config: PretrainedConfig) -> dict[str, torch.Size]:
    """The shapes of those of the model that the configuration describes."""
    try:
        return {key: parameter.shape for key, parameter in without_weights(config).named_parameters()}
    except Exception as error:  # whatever transformers' own code makes of such values
        raise ValueError(
            f"--model_name_or_path {name}: no model can be made of its config.json: {error} ({type(error).__name__})."
        ) from error

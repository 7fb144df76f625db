"""The files of weights in a model's folder, looked at before transformers acts on it, since it may be anybody's."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import cached_file
from transformers.utils.hub import cached_files
from transformers.utils.peft_utils import find_adapter_config_file

from longctx.model.config_file import BOUNDS, side_file
from longctx.untrusted.confined import OutOfBounds, confined
from longctx.untrusted.files import check_file
from longctx.upstream.transformers_internals import unpartitioned

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_INDEXES = tuple(f"{name}.index.json" for name in _WEIGHTS)


def check_no_adapter(name: str, revision: str | None) -> None:
    """Refuse a folder with an adapter, which transformers would put into the model unasked.

    Raises:
        ValueError: if there is one.
    """
    if find_adapter_config_file(name, revision=revision) is not None:
        raise ValueError(
            f"--model_name_or_path {name} holds an adapter (adapter_config.json). Merge it into its model first "
            f"(longctx export {name} --output_dir MERGED), and name that folder."
        )


def check_weight_files(name: str, config: PretrainedConfig, *, revision: str | None) -> None:
    """Look at the files of weights without reading them: they lie in the model's folder, and hold what it describes.

    A model on the hub is downloaded.

    Raises:
        ValueError: with the file, or the two sizes.
    """
    tensors = check_tensors(weight_files(name, revision, download=True))
    if not tensors:
        return
    parameters = {key: value.shape for key, value in without_weights(config).named_parameters()}
    held, expected = sum(math.prod(shape) for shape, _ in tensors.values()), sum(map(math.prod, parameters.values()))
    if expected > 2 * held:  # tied weights are in the files once
        raise ValueError(
            f"--model_name_or_path {name}: its config.json describes a model of {expected:,} parameters, and its "
            f"files hold {held:,}. Correct the file, or download the folder again."
        )
    _check_dtypes(name, tensors, parameters)
    _check_shapes(name, tensors, parameters)


def weight_files(name: str, revision: str | None, *, download: bool = False) -> list[Path]:
    """Return the files that hold the weights, of which safetensors files are preferred.

    Args:
        download: whether to download the files of a hub model. Otherwise only its index is, and it has no files here.
    """
    folder = Path(name) if Path(name).is_dir() else None
    for weights, index in zip(_WEIGHTS, _INDEXES, strict=True):
        if folder is None and download:
            file = cached_file(name, weights, revision=revision, _raise_exceptions_for_missing_entries=False)
            if file is not None:
                return [Path(file)]
        elif folder is not None and (folder / weights).exists():
            return [_regular(folder / weights)]
        if (path := side_file(name, index, revision)) is not None:
            names = _indexed(path)
            if folder is not None:
                return [_regular(folder / part) for part in names]
            found = cached_files(name, names, revision=revision) if download else None
            return [Path(file) for file in found or ()]
    return []


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


def _check_dtypes(name: str, held: Mapping[str, Held], described: Mapping[str, torch.Size]) -> None:
    """Refuse weights that are no plain floating-point numbers, which transformers would convert without their scales.

    Buffers, such as masks, may have other types. Their names do not end like those of weights.
    """
    for key, (_, dtype) in sorted(held.items()):
        if dtype not in FLOATS and (key in described or key.endswith(".weight")):
            raise ValueError(
                f"--model_name_or_path {name}: {key} is of type {dtype} in its files; expected {', '.join(FLOATS)}. "
                "Name the model in floating-point numbers that it was made from."
            )


def _check_shapes(name: str, held: Mapping[str, Held], described: Mapping[str, torch.Size]) -> None:
    """Compare the sizes of tensors that both the files and the model have. Their layouts may differ."""
    shapes = {key: shape for key, (shape, _) in held.items() if key in described}
    differ = [key for key, shape in sorted(shapes.items()) if math.prod(shape) != math.prod(described[key])]
    if differ:
        others = f", and {len(differ) - 1} other tensors differ too" if len(differ) > 1 else ""
        raise ValueError(
            f"--model_name_or_path {name}: {differ[0]} has the shape {shapes[differ[0]]} in its files, and the "
            f"configuration describes {list(described[differ[0]])}{others}. Correct config.json, or leave out of "
            "--model_init_kwargs what changes it."
        )


Held = tuple[Sequence[int], str]
"""The shape and the type of a tensor in a file, as safetensors names it."""

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in FLOATS.items()}


def check_tensors(files: Sequence[Path]) -> dict[str, Held]:
    """Return what the files hold, by name.

    Raises:
        ValueError: for a name that is in two files, of which transformers would take either, or that is not printable.
    """
    tensors: dict[str, Held] = {}
    for file in files:
        for key, held in _tensors_of(file):
            if key in tensors or not key.isprintable():
                reason = "which another file has too" if key in tensors else "which is not a name of a weight"
                raise ValueError(f"{file} holds the tensor {key!r}, {reason}. Download the folder again.")
            tensors[key] = held
    return tensors


def _tensors_of(path: Path) -> Iterator[tuple[str, Held]]:
    """Yield the tensors of a file by its header, which safetensors holds against the file's size."""
    if path.suffix != ".safetensors":
        yield from _pickled_tensors(path)
        return
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  (no mapping)
                part = file.get_slice(key)
                yield key, (part.get_shape(), part.get_dtype())
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}. Download it again.") from error


def _pickled_tensors(path: Path) -> Iterator[tuple[str, Held]]:
    """Yield the tensors of a pytorch_model.bin, mapped into memory; none of a file that transformers will refuse."""
    try:
        content = torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except Exception:  # of an older format, damaged, or with more than tensors in it
        return
    for key, value in content.items() if isinstance(content, Mapping) else ():
        if isinstance(value, torch.Tensor):
            yield str(key), (list(value.shape), _NAMES.get(value.dtype, str(value.dtype).removeprefix("torch.")))


def without_weights(config: PretrainedConfig) -> PreTrainedModel:
    """The model that the configuration describes, on the meta device: all parameters, no memory.

    It is a causal language model, or a multimodal one if the configuration has parts.

    It is made in a process of its own first, once: a configuration may describe billions of modules.

    Raises:
        ValueError: That takes more time or memory than any model, or buffers are larger than any model's, or
            transformers has no such model. The message names config.json.
    """
    is_whole = config.get_text_config() is not config
    model_class = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if is_whole else MODEL_FOR_CAUSAL_LM_MAPPING)[type(config)]
    key = (model_class, config.to_json_string(use_diff=False))
    try:
        if key not in _LARGEST_BUFFERS:
            _LARGEST_BUFFERS[key] = confined(lambda: _largest_buffer(model_class, config), BOUNDS)
        if (largest := _LARGEST_BUFFERS[key]) > _MOST_IN_A_BUFFER:
            raise OutOfBounds(f"it has a buffer of {largest:,} numbers, and the limit is {_MOST_IN_A_BUFFER:,}")
        return on_meta(model_class, config)
    except Exception as error:  # whatever transformers' own code makes of such values
        kind = "" if isinstance(error, OutOfBounds | ValueError) else f" ({type(error).__name__})"
        raise ValueError(
            f"--model_name_or_path {config.name_or_path or config.model_type}: no model can be made of its "
            f"config.json: {' '.join(str(error).split())}{kind}. Correct it, or download it again."
        ) from error


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

"""The config.json of a model, which may be anybody's: read and checked before transformers acts on it."""

from __future__ import annotations

import copy
import fnmatch
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.utils import cached_file

from longctx.untrusted.confined import Bounds, OutOfBounds, confined
from longctx.untrusted.files import check_folder, leads_outside

LARGEST_NUMBER = 1 << 31
"""The largest whole number in config.json."""
MOST_OBJECTS = 1 << 12
"""Layers and experts are objects, which cost memory before any weight is read."""
MOST_LABELS = 1 << 16
"""The most labels of a classifier; transformers makes two dictionaries of them."""
_FILE_BYTES = 16 << 20
_LARGE_FILE_BYTES = 256 << 20
_READ_NAMES = (
    *("*config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.json", "tekken.json"),
    *("vocab.*", "merges.txt", "chat_template*", "*.jinja", "*.model", "*.tiktoken", "*.spm", "*.index.json"),
)
"""The files beside the weights that transformers reads, by the patterns of their names."""
BOUNDS = Bounds(seconds=120, memory_bytes=4 << 30)
"""What a configuration, an empty model of it, or a tokenizer may take to be made."""

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
_QUANTISED = "training on quantised weights is not compared with one device. Name the model that they were made from."
_REFUSED = {
    "quantization_config": _QUANTISED,
    "compression_config": _QUANTISED,
    "fusion_config": "replaced layers are not compared with one device. Remove the key.",
    "distributed_config": "longctx distributes models by itself. Remove the key.",
    "transformers_weights": "weights are read from model.safetensors or the files of its index. Rename the file.",
    "configuration_files": "only config.json is read. Remove the key.",
}
"""Keys, wherever they stand, by which transformers replaces layers or reads other files, and what is said of each."""
_WEIGHTS = (".safetensors", ".bin")


def read_config_file(name: str, revision: str | None) -> dict[str, Any]:
    """Return the contents of config.json.

    Args:
        name: A folder or hub name.

    Raises:
        OSError: There is none.
        ValueError: It is not a JSON object, or is larger than any model's.
    """
    found = name if Path(name).is_file() else cached_file(name, "config.json", revision=revision)
    if found is None:
        raise FileNotFoundError(f"the folder {name} has no config.json")
    return read_object(check_size(Path(found)))


def read_object(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds.

    Raises:
        ValueError: It holds anything else.
    """
    values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ValueError(f"{path.name} holds a {type(values).__name__}, expected an object")
    return values


def side_file(name: str, file: str, revision: str | None) -> Path | None:
    """Return the path of a file beside the weights, downloaded where it is on the hub, or None if there is none.

    Raises:
        ValueError: It is larger than any such file.
    """
    path = cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=False)
    return None if path is None else check_size(Path(path))


def check_size(path: Path) -> Path:
    """Return the path of a file beside the weights, which is small enough to be parsed.

    Raises:
        ValueError: With its size and the limit.
    """
    limit = _LARGE_FILE_BYTES if path.name.endswith(("tokenizer.json", ".index.json")) else _FILE_BYTES
    if path.is_file() and (size := path.stat().st_size) > limit:
        raise ValueError(
            f"{path} has {size:,} bytes, and the limit for {path.name} is {limit >> 20} MiB. Remove it, or download "
            "the folder again."
        )
    return path


def check_config_values(name: str, values: Mapping[str, Any]) -> None:
    """Refuse keys that change more than the model's sizes or are functions, and numbers that no model has.

    Args:
        values: The contents of config.json.

    Raises:
        ValueError: With the key, its value and the limit.
    """
    for key, value in _items(values):
        if key in _REFUSED and value is not None:
            raise ValueError(f"--model_name_or_path {name}: its config.json has a {key}, and {_REFUSED[key]}")
        if callable(getattr(PretrainedConfig, key, None)):
            raise ValueError(
                f"--model_name_or_path {name}: its config.json sets {key}, which is a function of transformers' "
                "configurations: the model could not be saved. Remove the key, or download the file again."
            )
    check_config_numbers(f"--model_name_or_path {name}: its config.json", values)
    for part in (values, values.get("text_config")):
        size, number = (part.get(key) if isinstance(part, Mapping) else None for key in ("vocab_size", "pad_token_id"))
        if isinstance(size, int) and isinstance(number, int) and not -size <= number < size:
            raise ValueError(
                f"--model_name_or_path {name}: its config.json sets pad_token_id to {number}, and the model has "
                f"embeddings for 0 to {size - 1}. Correct it, set it to null, or download the file again."
            )


def check_config_numbers(source: str, values: Mapping[str, Any]) -> None:
    """Refuse numbers, at any depth, that no model has, or with which all of its values would be NaN.

    Args:
        source: The flag or file that sets the values.

    Raises:
        ValueError: With the key, its value and the limits.
    """
    for key, value in _items(values):
        if isinstance(value, int | float) and (expected := _expected_instead(key, value)):
            is_long = isinstance(value, int) and abs(value) >= 10**20
            shown = "a number of more than 20 digits" if is_long else f"{value:,}"
            raise ValueError(
                f"{source} sets {key} to {shown}; expected {expected}. Correct it, or download the model again."
            )


def _expected_instead(key: str, number: float) -> str | None:
    """Return what a key's number has to be, or None if it is that."""
    if isinstance(number, int) and not isinstance(number, bool):
        largest = LARGEST_NUMBER
        if ("layer" in key or "expert" in key) and "size" not in key:
            largest = MOST_OBJECTS
        elif key == "num_labels":
            largest = MOST_LABELS
        least = 1 if key in _AT_LEAST_ONE else -LARGEST_NUMBER
        if not least <= number <= largest:
            return f"{least:,} to {largest:,}"
    if key == "rope_theta":
        return None if number > 0 else "more than 0"
    if key.endswith(("_eps", "_epsilon")):
        return None if number >= 0 else "at least 0"
    return "a number" if math.isnan(number) else None


def _items(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every (key, value), at any depth; the items of a list have the list's key."""
    waiting: list[tuple[str, Any]] = [("", values)]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, Mapping):
            parts = list(value.items())
        else:
            parts = [(key, part) for part in value] if isinstance(value, list) else []
        yield from parts
        waiting += parts


def check_own_code(name: str, values: Mapping[str, Any]) -> None:
    """Refuse, with --trust_remote_code, a model or configuration of its own code before any of it runs.

    Raises:
        ValueError: With the remedy.
    """
    code = values.get("auto_map")
    if isinstance(code, Mapping) and any(key == "AutoConfig" or key.startswith("AutoModel") for key in code):
        raise ValueError(
            f"--trust_remote_code True would run the model's code in {name}, and that code is not known to be exact. "
            f"Leave the flag out if transformers has the model type {values.get('model_type')!r}, or choose another "
            f"model."
        )


def try_config(name: str, values: Mapping[str, Any]) -> None:
    """Make the configuration in a process of its own, which can fail without harm.

    Any other error than a bound that is exceeded is left to who makes it in this process.

    Raises:
        ValueError: It takes more time or memory than any configuration.
    """
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return
    config_class = CONFIG_MAPPING[model_type]
    try:
        confined(lambda: _quietly(lambda: config_class.from_dict(copy.deepcopy(dict(values)))), BOUNDS)
    except OutOfBounds as error:
        raise ValueError(
            f"--model_name_or_path {name}: its config.json cannot be used: {error}. Correct the file, or download it "
            f"again."
        ) from error


def try_tokenizer(load: Callable[[], object]) -> None:
    """Load a tokenizer in a process of its own, as `try_config`.

    Raises:
        OutOfBounds: It takes more time or memory than any tokenizer, or its code panics.
    """
    confined(lambda: _quietly(load), BOUNDS)


def _quietly(make: Callable[[], object]) -> None:
    """Leave out the result, and every error that will come again."""
    try:
        make()
    except MemoryError:
        raise
    except Exception:
        return


def check_model_folder(name: str, flag: str = "--model_name_or_path") -> None:
    """Check what a local folder of a model or tokenizer holds before a library opens any of it.

    Links that lead out of it are refused, since what is read through them would be saved with the model. Weights may
    lie elsewhere.

    Args:
        name: A folder or hub name; the latter is left alone.

    Raises:
        ValueError: With the first entry that is refused, such as one that is too large to be parsed.
    """
    folder = Path(name)
    if not folder.is_dir():
        return
    check_folder(folder)
    for path in (*folder.iterdir(), *(folder / "additional_chat_templates").glob("*")):
        if any(fnmatch.fnmatchcase(path.name, pattern) for pattern in _READ_NAMES):
            check_size(path)
        if path.suffix not in _WEIGHTS and leads_outside(path, folder):
            raise ValueError(
                f"{flag} {name}: {path.name} is a link to {path.resolve()}, outside the folder. Copy the "
                "file there if it belongs to the model."
            )


def check_tokenizer_files(name: str, revision: str | None) -> None:
    """Refuse tokenizer files that name files elsewhere, to be read, or as the names of chat templates written.

    transformers takes any key of these files as an argument of the tokenizer's class, such as `vocab`, and opens the
    file that it names. What is read there would be saved with the model. Names of files that do not exist, which
    many tokenizers keep of the machine they were made on, are left alone.

    Raises:
        ValueError: With the name.
    """
    side_file(name, "tokenizer.json", revision)
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        path = side_file(name, file, revision)
        if path is not None:
            values = read_object(path)
            _check_own_files(file, values)
            _check_named_files(path, values)


def _check_named_files(path: Path, values: Mapping[str, Any]) -> None:
    """Refuse a value that is the path of a file outside the folder, by itself or in a list such as `init_inputs`."""
    for key, value in values.items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and key != "chat_template" and _is_file_outside(text, path.parent):
                raise ValueError(
                    f"{path.name} sets {key} to {text[:200]!r}, a file outside the model's folder, whose contents "
                    "would be saved with the model. Remove the key, or copy the file into the folder."
                )


def _is_file_outside(text: str, folder: Path) -> bool:
    """Whether a text names a file outside the folder, by a path from here or from the folder."""
    try:
        return any(path.is_file() and leads_outside(path, folder) for path in (Path(text), folder / text))
    except (OSError, ValueError):  # longer than any path, or with a NUL
        return False


def _check_own_files(file: str, values: Mapping[str, Any]) -> None:
    templates = values.get("chat_template")
    named = [*templates] if isinstance(templates, dict) else []
    if isinstance(templates, list):
        named = [template.get("name") for template in templates if isinstance(template, dict)]
    for name in [*named, *(values.get("fast_tokenizer_files") or ())]:
        if not isinstance(name, str) or "/" in name or "\\" in name:
            raise ValueError(f"{file} names the file {str(name)[:80]!r}, which is not a file in its folder")

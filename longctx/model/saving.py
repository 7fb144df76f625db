"""What a model is saved with beside its weights, and a trial of that before time goes into training.

generation_config.json has no part in training. transformers validates it anew when a model is saved, once the
tokenizer's ids are in it, and refuses values that many models on the hub have, such as a temperature beside
`do_sample: false`. Such a file is therefore copied unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from longctx.model.config_file import read_object, side_file
from longctx.model.tiny import TINY
from longctx.upstream.transformers_internals import change_class

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def damage_of_generation_config(name: str, revision: str | None) -> str | None:
    """Return why transformers cannot use a model's generation_config.json; None if it can, or if there is none."""
    path = None if name == TINY else side_file(name, GENERATION_CONFIG_NAME, revision)
    if path is None:
        return None
    try:
        for key, value in (values := read_object(path)).items():
            if callable(getattr(GenerationConfig, key, None)):
                return f"it sets {key}, which is a function of transformers' generation configuration"
            ids = value if isinstance(value, list) else [value]
            if key in _TOKEN_IDS and not all(token is None or isinstance(token, int) for token in ids):
                return f"{key} is {value!r}, expected a number"
        GenerationConfig.from_dict(values)
    except Exception as error:  # whatever transformers' own code makes of such values
        return _reason(error)
    return None


def generation_config_to_load(name: str, config: PretrainedConfig, revision: str | None) -> dict[str, Any]:
    """Return the keyword by which `from_pretrained` does not read a generation_config.json that it cannot use."""
    is_damaged = damage_of_generation_config(name, revision) is not None
    return {"generation_config": GenerationConfig.from_model_config(config)} if is_damaged else {}


def keep_generation_config(model: PreTrainedModel, name: str, revision: str | None) -> None:
    """Make the model save the generation_config.json that it came with where transformers cannot save its own."""
    path = side_file(name, GENERATION_CONFIG_NAME, revision)
    if path is not None and (now := getattr(model, "generation_config", None)) is not None:
        names = {"source": path.read_bytes(), "damage": damage_of_generation_config(name, revision)}
        change_class(now, type("KeptGenerationConfig", (_Kept, type(now)), names))


class _Kept(GenerationConfig):
    """A generation configuration that is saved as the file it came from where it cannot be saved otherwise."""

    source: bytes
    damage: str | None

    def why_copied(self) -> str | None:
        """Return why the file is copied, or None if transformers saves the configuration."""
        if self.damage is not None:
            return f"transformers cannot use it: {self.damage}"
        with TemporaryDirectory(prefix="longctx-") as folder:
            try:
                super().save_pretrained(folder)
                GenerationConfig.from_pretrained(folder)
            except Exception as error:
                return f"transformers cannot save it with the token ids of the tokenizer: {_reason(error)}"
        return None

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        if self.why_copied() is None:
            super().save_pretrained(save_directory, *args, **kwargs)
        else:
            (Path(save_directory) / GENERATION_CONFIG_NAME).write_bytes(self.source)


def try_saving(model: Any, beside: Iterable[Any]) -> Iterator[str]:
    """Save for trial, and read back, what a model or adapter is saved with beside its weights.

    Args:
        beside: other objects that are saved with it, such as the tokenizer; None is passed over.

    Yields:
        What users should know of it.

    Raises:
        ValueError: if anything cannot be saved, or not be read back.
    """
    parts = [*model.peft_config.values()] if hasattr(model, "get_base_model") else [model.config]
    for part in (*parts, *beside):
        if part is not None:
            _try_part(model.config.name_or_path, part)
    generation_config = getattr(model, "generation_config", None)
    if isinstance(generation_config, _Kept) and (reason := generation_config.why_copied()):
        yield f"generation_config.json is copied unchanged into the folders of the trained model; {reason}"


def _try_part(name: str, part: Any) -> None:
    with TemporaryDirectory(prefix="longctx-") as folder:
        try:
            part.save_pretrained(folder)
            if (backend := getattr(part, "backend_tokenizer", None)) is not None:
                _without_vocabulary(backend).save(f"{folder}/tokenizer.json")
            type(part).from_pretrained(folder)
        except Exception as error:  # whatever transformers' own code makes of such values
            raise ValueError(
                f"--model_name_or_path {name}: its {type(part).__name__} cannot be saved and read back, and neither "
                f"could the trained model: {_reason(error)} ({type(error).__name__}). Correct the file that it comes "
                "from (config.json, tokenizer_config.json, tokenizer.json)."
            ) from error


def _without_vocabulary(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer without its words: these plain numbers would take a second to be read back."""
    empty = Tokenizer(type(tokenizer.model)())
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (part := getattr(tokenizer, name)) is not None:
            setattr(empty, name, part)
    return empty


def _reason(error: Exception) -> str:
    """Return the first sentence of what transformers says, without its advice on several lines."""
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip()]
    first = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return first.rstrip(".") or type(error).__name__

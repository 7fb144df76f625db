"""What `longctx export` writes: weights copied, merged or put back, and the files that belong to them."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from longctx.launch.terminal import number
from longctx.model.card import CARD_FILE, TrainedModel, exported_card, own_card
from longctx.model.config_file import check_model_folder, read_config_file, side_file
from longctx.model.files import check_weight_files, files_read, weight_files
from longctx.model.load import load_config, load_model, load_tokenizer, load_whole_config
from longctx.model.merge import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapted, merged, read_adapter_config
from longctx.model.multimodal import load_whole, names_in_whole, put_back, with_settings_of
from longctx.model.rows import locate, stored_in, stored_weights
from longctx.model.saving import generation_config_to_load
from longctx.model.streamed import NewTensor, check_finite, copied, write_tensors
from longctx.model.tiny import TINY
from longctx.training.checkpoint import weights
from longctx.training.checkpoint.files import (
    MANIFEST,
    describe_files,
    flush,
    make_partial,
    read_manifest,
    take_place,
    writing,
)
from longctx.training.checkpoint.folder import checkpoints
from longctx.upstream.transformers_internals import ON_META, drop_values, tied_weights, without_values

_TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "tekken.json", "vocab.*", "merges.txt"),
    *("chat_template*", "*.jinja", "*.model", "*.tiktoken", "*.spm", "additional_chat_templates/*.jinja"),
)
_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def export(folder: Path, output: Path, base: str | None, revision: str | None) -> str:
    """Write the new folder, and return what was done.

    Args:
        base: folder or hub name of an adapter's base model or a text part's multimodal model.
        revision: of `base` on the hub.

    Raises:
        ValueError, OSError: if there is nothing to export, or it cannot be exported exactly. Nothing is left.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"--output_dir {output} is not empty. Name a new folder.")
    _check_folder(folder, output)
    with TemporaryDirectory(prefix="longctx-") as made:
        source = _source(folder, base, revision, Path(made))
        with writing(output.resolve(), is_owner=True) as partial:
            make_partial(partial)
            said = _write(source, partial, output.resolve().name)
            for path in partial.rglob("*"):
                flush(path)
            take_place(partial, output.resolve())
    return f"{said.replace(made, TINY)} The folder is {output}."


def _check_folder(folder: Path, output: Path) -> None:
    """Refuse a folder without a model, and a checkpoint of which a file that is read has changed."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder. Name a run's --output_dir, one of its checkpoints, or an adapter.")
    check_model_folder(str(folder), "FOLDER")
    is_adapter, files = (folder / ADAPTER_CONFIG).exists(), weight_files(str(folder), None)
    if not is_adapter and not files:
        newest = next(iter(checkpoints(folder)), None)
        remedy = f"Export its newest checkpoint: longctx export {newest} --output_dir {output}"
        raise ValueError(
            f"{folder} has neither weights nor an adapter of a run that has ended. "
            f"{remedy if newest else 'Name a run that has ended, a checkpoint or an adapter'}."
        )
    if is_adapter and files:
        raise ValueError(
            f"{folder} holds both an adapter ({ADAPTER_CONFIG}) and a whole model ({files[0].name}). Remove the one "
            "that is not meant."
        )
    if (folder / MANIFEST).exists():
        known = read_manifest(folder).files
        for path in {*files_read(folder), *folder.glob(ADAPTER_WEIGHTS)}:
            name = str(path.relative_to(folder))
            if (name in known or path in files) and describe_files(folder, [path]).get(name) != known.get(name):
                raise ValueError(
                    f"{path} is damaged: its contents have changed since the checkpoint was written. Export another "
                    "checkpoint."
                )


@dataclass(frozen=True)
class _Source:
    """What is exported."""

    folder: Path
    is_adapter: bool
    base: str
    """Folder or hub name of the model whose files are copied, which may be `folder`."""
    revision: str | None
    described: tuple[str, str | None]
    """Name and revision of the causal language model's configuration."""
    config: PretrainedConfig
    whole_config: PretrainedConfig | None
    """Of the multimodal model, if `base` is one."""

    @property
    def is_part(self) -> bool:
        """Whether a text part is put into its multimodal model."""
        return self.whole_config is not None and self.base != str(self.folder)

    def load(self, *, has_values: bool) -> Any:
        """Return the causal language model, without an adapter."""
        name, revision = (self.base, self.revision) if self.is_adapter else (str(self.folder), None)
        return load_model(name, self.config, dtype="auto", revision=revision, has_values=has_values)


def _source(folder: Path, base: str | None, revision: str | None, made: Path) -> _Source:
    """Return what is exported.

    Args:
        made: an empty folder, which becomes the base of an adapter of the built-in model.
    """
    name: str = base or str(folder)
    is_adapter = (folder / ADAPTER_CONFIG).exists()
    if is_adapter:
        values = read_adapter_config(folder)
        if base is None:
            name, revision = values.get("base_model_name_or_path", ""), revision or values.get("revision")
        if not name:
            raise ValueError(f"{folder / ADAPTER_CONFIG} names no base model. Name it with --model_name_or_path.")
    described = (str(folder), None) if (folder / CONFIG_NAME).exists() else (name, revision)
    config = load_config(described[0], revision=described[1])
    if name == TINY:
        load_model(TINY, config, dtype="auto").save_pretrained(made)
        load_tokenizer(TINY).save_pretrained(made)
        name, described = str(made), (str(made), None)
    whole_config = load_whole_config(name, revision=revision)
    if base is not None and not is_adapter and whole_config is None:
        raise ValueError(
            f"--model_name_or_path {base} is not a multimodal model whose text part is trained here, and {folder} is a "
            "whole model by itself. Leave the flag out, or name the multimodal model that the run started from."
        )
    return _Source(folder, is_adapter, name, revision, described, config, whole_config)


def _write(source: _Source, folder: Path, name: str) -> str:
    """Write everything, and return what was done.

    Args:
        name: that the folder gets.
    """
    model, tensors, said = _planned(source)
    if tensors is None:
        model = _load_at_once(source)
        model.save_pretrained(folder, max_shard_size=weights.FILE_BYTES)
        said += " All weights were loaded at once: they are converted on loading, or not in safetensors files."
    else:
        write_tensors(tensors, folder, weights.FILE_BYTES)
    if source.is_part:
        model.config.save_pretrained(folder)
    else:
        values = read_config_file(*source.described)
        values["architectures"] = values.get("architectures") or [type(model).__name__]
        if source.config.tie_word_embeddings and not model.config.tie_word_embeddings:  # as the files have it
            values["tie_word_embeddings"] = False
        (folder / CONFIG_NAME).write_text(json.dumps(values, indent=2) + "\n")
    has_tokenizer = _copy_beside(source, folder)
    if (card := own_card(source.folder / CARD_FILE)) is not None:
        config = source.whole_config or source.config
        exported = TrainedModel(folder=name, base=None, config=config, is_exported=True)
        (folder / CARD_FILE).write_text(exported_card(card, exported), encoding="utf-8")
    written = [weight for path in weight_files(str(folder), None) for _, weight in stored_in(path)]
    kinds = " and ".join(sorted({weight.kind for weight in written}))
    size, files = number(sum(weight.nbytes for weight in written)), len({weight.file for weight in written})
    said += f" {files} {'file' if files == 1 else 'files'} of weights ({kinds}, {size}B)."
    return said if has_tokenizer else f"{said} There is no tokenizer: none was beside the weights."


def _planned(source: _Source) -> tuple[PreTrainedModel, dict[str, NewTensor] | None, str]:
    """Return the new model on the meta device, its weights by their names in the files, and what is done to them.

    The weights are None where they cannot be read one by one.
    """
    text: Any = source.load(has_values=False) if source.is_part or source.whole_config is None else None
    whole: Any = _whole_on_meta(source, text) if source.whole_config is not None else None
    model, said = whole or text, f"{source.folder} was copied."
    stored = stored_weights(model, source.base, source.revision) or {}
    names, held = locate(model, stored), model.state_dict(keep_vars=True)
    dtype = text.dtype if source.is_part else (source.whole_config or source.config).dtype
    as_stored = {key for name, key in names.items() if held[name].dtype != dtype}  # in fp32 whatever the dtype is
    tensors = {key: copied(weight, None if key in as_stored else dtype) for key, weight in stored.items()}
    changed: dict[str, NewTensor] | None = {}
    if source.is_part:
        in_whole = names_in_whole(text, whole)
        for name, value in text.state_dict(keep_vars=True).items():
            if in_whole[name] in names:
                value.stored = replace(held[in_whole[name]].stored, dtype=value.dtype)
        names = {name: names[key] for name, key in in_whole.items() if key in names}
    if source.is_adapter:
        with_adapter, is_plain = adapted(text, source.folder)
        changed = merged(with_adapter, names)
        changed = changed if is_plain else None
        said = f"The adapter {source.folder} was merged into {source.base}."
    elif source.is_part:
        said = f"The text part {source.folder} was put into {source.base}."
        changed = _text_tensors(source, text, names)
    if rounded := {stored[key].kind for key, tensor in tensors.items() if tensor.kind != stored[key].kind}:
        said += f" {' and '.join(sorted(rounded))} weights were converted to the dtype of config.json."
    return model, tensors | changed if stored and changed is not None else None, said


def _whole_on_meta(source: _Source, text: Any) -> PreTrainedModel:
    """Return the multimodal model without values, with what training has changed in its text part's configuration."""
    config, dtype = source.whole_config, "auto"
    assert config is not None
    check_weight_files(source.base, config, revision=source.revision)
    if source.is_part:
        config, dtype = with_settings_of(text.config, config), str(text.dtype).removeprefix("torch.")
    generation = generation_config_to_load(source.base, config, source.revision)
    with without_values():
        whole = load_whole(source.base, config, dtype=dtype, revision=source.revision, **generation, **ON_META)
    drop_values(whole)
    return whole


def _text_tensors(source: _Source, text: Any, names: dict[str, str]) -> dict[str, NewTensor] | None:
    """Return a trained text part's weights by their names in the multimodal model's files; None if not one by one.

    Args:
        names: those names by the text part's own.
    """
    found = locate(text, stored_weights(text, str(source.folder), None) or {})
    held, tied = text.state_dict(keep_vars=True), tied_weights(text) if text.config.tie_word_embeddings else set()
    if any(name not in tied and not (name in names and name in found) for name in held):
        return None
    return {key: copied(held[name].stored, held[name].dtype) for name, key in names.items()}


def _load_at_once(source: _Source) -> Any:
    """Return the new model with all of its weights."""
    model = source.load(has_values=True)
    if source.is_adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, source.folder).merge_and_unload()
        for name, value in model.named_parameters():
            check_finite(name, value)
    if source.is_part:
        assert source.whole_config is not None
        model = put_back(model, source.base, source.whole_config, revision=source.revision)
    return model


def _copy_beside(source: _Source, folder: Path) -> bool:
    """Copy what belongs to the weights, from the exported folder or else from its base.

    Returns:
        Whether there is a tokenizer.
    """
    for name in (GENERATION_CONFIG_NAME, *_PROCESSORS):
        path = side_file(str(source.folder), name, None) or side_file(source.base, name, source.revision)
        if path is not None:
            shutil.copyfile(path, folder / name)
    root = source.folder
    if not any(root.glob("tokenizer*")):
        if not Path(source.base).is_dir():
            load_tokenizer(source.base, revision=source.revision)  # which downloads its files
        root = Path(str(side_file(source.base, CONFIG_NAME, source.revision))).parent
    for path in chain.from_iterable(map(root.glob, _TOKENIZER)):
        if path.is_file():
            (folder / path.relative_to(root)).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / path.relative_to(root))
    return any(folder.glob("tokenizer*"))

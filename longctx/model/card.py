"""The model card, README.md in a model's folder: how to load, export and serve the model, and how it was trained."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers import PretrainedConfig

from longctx.model.rope import context_length
from longctx.model.tiny import TINY

CARD_FILE = "README.md"
"""The name of the file, in a model's folder."""

PLACEHOLDER = "BASE"
"""What a card says in the place of a base model that is a folder of this machine."""

_OURS = ", trained with longctx"
"""What marks a card of ours."""
_PACKAGES = ("trl", "transformers", "torch", "datasets", "tokenizers")
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's --max-lora-rank, of which the default is 16 (vllm/config/lora.py)."""


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A trained model in its folder, with the commands that use it."""

    folder: str
    """The folder, or the name on the hub."""
    base: str | None
    """Name or folder of the model that training began with, if it is known."""
    config: PretrainedConfig
    """The configuration that was trained."""
    adapter: Any = None
    """peft's configuration of the adapter, if that alone was trained."""
    has_own_config: bool = False
    """Whether the adapter's base model has another configuration than was trained, which lies beside the adapter."""
    has_own_keys: bool = False
    """Whether that differs in more than its RoPE."""
    is_part: bool = False
    """Whether this is the text part of the multimodal model `base`."""
    is_exported: bool = False
    """Whether `longctx export` has written it."""

    @property
    def _needs_merging(self) -> bool:
        """Whether peft cannot load the adapter with its base model."""
        return self.adapter is not None and (self.is_part or self.base in (None, TINY))

    @property
    def needs_export(self) -> bool:
        """Whether vLLM serves the exported model alone: it takes LoRA of linear layers (vllm/lora/peft_helper.py)."""
        adapter = self.adapter
        if adapter is None or self.is_part or self._needs_merging:
            return self.is_part or self._needs_merging
        is_plain = adapter.peft_type == "LORA" and not (adapter.use_dora or adapter.bias != "none")
        return not is_plain or bool(adapter.modules_to_save or adapter.target_parameters or self.has_own_keys)

    @property
    def exported(self) -> str:
        """The folder that `export` names."""
        return f"{Path(self.folder).resolve().name}-{'exported' if self.adapter is None else 'merged'}"

    @property
    def weights(self) -> str:
        """The folder that transformers loads by itself."""
        return self.folder if self.adapter is None else self.exported

    def load(self) -> str:
        """Return one line of Python, which loads the model."""
        folder, base = json.dumps(self.folder), json.dumps(self.base)
        if self.adapter is None or self._needs_merging:
            is_whole = self.config.get_text_config() is not self.config or (self._needs_merging and self.is_part)
            name = "AutoModelForImageTextToText" if is_whole else "AutoModelForCausalLM"
            return f"from transformers import {name}; model = {name}.from_pretrained({json.dumps(self.weights)})"
        if not self.has_own_config:
            name = "AutoPeftModelForCausalLM"
            return f"from peft import {name}; model = {name}.from_pretrained({folder})"
        base += f", revision={json.dumps(self.adapter.revision)}" if self.adapter.revision else ""
        return (
            "from peft import PeftModel; from transformers import AutoConfig, AutoModelForCausalLM; model = "
            f"PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({base}, "
            f"config=AutoConfig.from_pretrained({folder})), {folder})"
        )

    def export(self) -> str:
        """Return the command that makes one folder of the whole model, and what it does."""
        base = f" --model_name_or_path {shlex.quote(str(self.base))}" if self.is_part or self._needs_merging else ""
        does = "weights in the dtype of config.json" if self.adapter is None else "merges the adapter"
        does = f"puts the text part back into {self.base}" if self.is_part else does
        return f"longctx export {shlex.quote(self.folder)}{base} --output_dir {shlex.quote(self.exported)}  # {does}"

    def serve(self) -> str:
        """Return vLLM's command."""
        text: Any = self.config.get_text_config()
        rope = getattr(text, "rope_parameters", None) or {}
        is_scaled = rope.get("rope_type", "default") != "default"
        length = f" --max-model-len {context_length(self.config)}" if is_scaled else ""
        if self.adapter is None or self.needs_export:
            return f"vllm serve {shlex.quote(self.exported if self.needs_export else self.folder)}{length}"
        command = f"vllm serve {shlex.quote(str(self.base))} --enable-lora"
        command += f" --lora-modules {shlex.quote(f'{Path(self.folder).resolve().name}={self.folder}')}"
        command += f" --revision {shlex.quote(self.adapter.revision)}" if self.adapter.revision else ""
        rank = max([self.adapter.r, *self.adapter.rank_pattern.values()])
        if rank > 16:
            command += f" --max-lora-rank {next((allowed for allowed in _LORA_RANKS if allowed >= rank), rank)}"
        if self.has_own_config:
            values = {"rope_parameters": rope, "max_position_embeddings": text.max_position_embeddings}
            command += f" --hf-overrides {shlex.quote(json.dumps(values))}"
        return command + length


def model_card(
    model: TrainedModel, training: str, *, tags: Sequence[str], data_set: str | None = None, license: str | None = None
) -> str:
    """Return Markdown with the hub's metadata on top, without folders of this machine.

    Args:
        model: whose folder is a name on the hub, or stands for it.
        training: the section on it.
        data_set: its name on the hub, if it has one.
        license: what the user has set in an earlier card.
    """
    base = model.base if is_on_hub(model.base) else None
    shown = replace(model, base=TINY if model.base == TINY else base or PLACEHOLDER)
    data = ModelCardData(
        base_model=base,
        datasets=data_set,
        library_name="transformers" if model.adapter is None else "peft",
        license=license,
        model_name=Path(model.folder).name,
        pipeline_tag="text-generation",
        tags=[*tags],
    )
    commands = [shown.serve()] if model.is_exported else [shown.export(), shown.serve()]
    of_base = f" of [{base}](https://huggingface.co/{base})" if base else ""
    what = "A fine-tuned version" if model.adapter is None else "An adapter"
    return f"""---
{data}
---

# {Path(model.folder).name}

{what}{of_base}{_OURS}.

```python
{shown.load().replace("; ", chr(10))}
```

```bash
{chr(10).join(commands)}
```

No license is set by longctx: add the one that the base model and the data allow to the metadata above.

## Training
{training}"""


def training_section(rows: Mapping[str, Any], release: str) -> str:
    """Return the table of what a model was trained with, and the versions.

    Args:
        release: the version of longctx.
    """
    cells = {name: " ".join(without_folders(str(of)).replace("|", r"\|").split()) for name, of in rows.items()}
    table = "\n".join(f"| {name} | {cell} |" for name, cell in cells.items())
    versions = ", ".join([f"longctx {release}", *(f"{package} {version(package)}" for package in _PACKAGES)])
    return f"\n| | |\n| --- | --- |\n{table}\n\nVersions: {versions}.\n"


def without_folders(text: str) -> str:
    """Return the text with only the last component of each absolute path."""
    return re.sub(r"(?<![\w.:/])/(?:[^\s/,'\"]+/)+", "", text)


def is_on_hub(name: str | None) -> bool:
    """Return whether this may be a model or a data set on the hub: a name that is built in nowhere and no path here."""
    is_name = name not in (None, TINY, "stdlib") and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)
    return bool(is_name) and not Path(str(name)).exists()


def own_card(path: Path) -> ModelCard | None:
    """Return the card that longctx has written; None if there is none, or if it is someone else's."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return ModelCard(text, ignore_metadata_errors=True) if _OURS in text else None


def is_of_others(path: Path) -> bool:
    """Return whether there is a card that neither longctx nor, as a template, peft has written."""
    return path.exists() and not re.search(rf"{_OURS}|\[More Information Needed\]", path.read_text(errors="replace"))


def describe_adapter(adapter: Any) -> str:
    is_lora = adapter.peft_type == "LORA"
    return f"LoRA, rank {adapter.r}, alpha {adapter.lora_alpha:g}" if is_lora else str(adapter.peft_type.value)


def exported_card(card: ModelCard, model: TrainedModel) -> str:
    """Return the card of an exported model, after that of the folder it was exported from."""
    training, data = card.text.partition("\n## Training\n")[2], card.data.to_dict()
    names = {"tags": data.get("tags", ()), "data_set": data.get("datasets"), "license": data.get("license")}
    return model_card(replace(model, base=data.get("base_model")), training, **names)

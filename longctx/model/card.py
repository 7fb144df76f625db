"""README.md of a model on the hub: what it was trained with, as far as the run knows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from huggingface_hub import ModelCardData

from longctx.model.tiny import TINY

_PACKAGES = ("trl", "transformers", "torch", "datasets", "tokenizers")

_LOAD = """from transformers import pipeline

generator = pipeline("text-generation", model="{repository}", device_map="auto")"""
_LOAD_WITH_CONFIG = """from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

config = AutoConfig.from_pretrained("{repository}")  # the base model's own says other than it was trained with
base = AutoModelForCausalLM.from_pretrained("{base}", config=config)
model = PeftModel.from_pretrained(base, "{repository}")"""


def model_card(
    *,
    repository: str,
    base_model: str | None,
    tags: Sequence[str],
    is_adapter: bool,
    has_config: bool,
    training: Mapping[str, Any],
    release: str,
) -> str:
    """Return Markdown with the hub's metadata on top.

    Args:
        repository: on the hub, with its owner.
        base_model: name or folder; only a name on the hub is told.
        has_config: whether an adapter has its base model's configuration beside it, which has to be used.
        training: rows of the table of what it was trained with.
        release: the version of longctx.
    """
    is_public = base_model is not None and base_model != TINY and not os.path.exists(base_model)
    base = base_model if is_public else None
    data = ModelCardData(
        base_model=base,
        library_name="peft" if is_adapter else "transformers",
        model_name=repository.split("/")[-1],
        tags=["generated_from_trainer", *sorted(tags)],
    )
    load = _LOAD_WITH_CONFIG if has_config else _LOAD
    of_base = f" of [{base}](https://huggingface.co/{base})" if base else ""
    what = "An adapter" if is_adapter else "A fine-tuned version"
    rows = "\n".join(f"| {name} | {value} |" for name, value in training.items())
    versions = ", ".join([f"longctx {release}", *(f"{package} {version(package)}" for package in _PACKAGES)])
    return f"""---
{data}
---

# {repository.split("/")[-1]}

{what}{of_base}, trained with longctx, which takes the flags of [TRL](https://github.com/huggingface/trl).

```python
{load.format(repository=repository, base=base or "BASE")}
```

## Training

| | |
| --- | --- |
{rows}

Versions: {versions}.
"""

"""docs/models.md: every causal and image-text model type of the installed transformers, and what longctx does with it.

`python -m tests.model.types_page` writes the page.
"""

from __future__ import annotations

import textwrap
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from longctx.model import load
from longctx.model.allow_list import ADDED_IN, CAUSAL_MODELS, WINDOW_MODELS, _dropouts, _reasons, _text_of

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
EXACT, REFUSED, UNKNOWN = "exact", "refused", "not yet compared"


class Status(NamedTuple):
    kind: str
    """EXACT, REFUSED or UNKNOWN. The latter is refused as well."""
    detail: str = ""
    """How it is exact, or why it is refused."""


def model_types() -> list[str]:
    """Return every model type that transformers' classes for causal and image-text models are registered under."""
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})


def status(model_type: str) -> Status:
    """Return what is known of a model type, with transformers' default configuration of it and without dropout."""
    try:
        config = CONFIG_MAPPING[model_type]()
    except Exception:  # a type without defaults, for which a config.json has to say more
        return Status(UNKNOWN)
    if config.model_type in CAUSAL_MODELS:
        return Status(EXACT, _how_exact(config) + _added_in(model_type))
    if (part := _exact_part(config)) is not None:
        return Status(EXACT, f"text part ({part})" + _added_in(model_type))
    found = _specific_reasons(config)
    return Status(REFUSED, " ".join(found)) if found else Status(UNKNOWN)


def _how_exact(config: PretrainedConfig) -> str:
    return "every backend" + (", with sliding windows" if config.model_type in WINDOW_MODELS else "")


def _added_in(model_type: str) -> str:
    return f"; transformers {ADDED_IN[model_type]} or newer" if model_type in ADDED_IN else ""


def _exact_part(config: PretrainedConfig) -> str | None:
    """Return the causal language model as which a run reads a multimodal configuration; None if it reads all of it."""
    text_part = getattr(load, "text_part", None) or load._text_alone  # the former where more types are read so
    try:
        part = text_part(config)
    except ValueError:
        return None
    return part.model_type if part is not None and part.model_type in CAUSAL_MODELS else None


_GENERAL = ("Its layers are not known to be exact", "To train on text alone", "sliding_window is ")
"""The starts of reasons that only say that nothing was compared."""


def _specific_reasons(config: PretrainedConfig) -> list[str]:
    text = _text_of(config)
    general = {*_dropouts(text)}  # a flag sets it to 0
    found = [reason for reason in _reasons(config, text) if reason not in general]
    return [r for r in found if not r.startswith(_GENERAL) and not r.startswith("its text part, ")]


def page() -> str:
    """Return the page in Markdown."""
    of_type = {model_type: status(model_type) for model_type in model_types()}
    counts = {kind: sum(found.kind == kind for found in of_type.values()) for kind in (EXACT, REFUSED, UNKNOWN)}
    rows = [f"| `{name}` | {f.kind} | {f.detail} |" for name, f in of_type.items() if f.kind != UNKNOWN]
    unknown = ", ".join(f"`{name}`" for name, found in of_type.items() if found.kind == UNKNOWN)
    return "\n".join(
        [
            "# Model types",
            "",
            "<!-- tables of tests.model.types_page -->",
            "",
            f"`python -m tests.model.types_page` wrote this page from transformers {version('transformers')}. It lists",
            f"the {len(of_type)} model types for which transformers has a causal or an image-text model:",
            "",
            f"- **{counts[EXACT]} {EXACT}**: `tests/model/test_models.py` compares logits, loss and every gradient of",
            "  small models with those of stock transformers, which sees one document at a time, at sp 1, 2 and 4.",
            f"- **{counts[REFUSED]} {REFUSED}**. The reasons are those for the default configuration of the type.",
            f"- **{counts[UNKNOWN]} [{UNKNOWN}](#not-yet-compared)**. They are refused as well, like types that",
            "  later releases of transformers add.",
            "",
            "| type | status | details |",
            "| --- | --- | --- |",
            *rows,
            "",
            "## Not yet compared",
            "",
            *textwrap.wrap(f"{unknown}.", 120, break_on_hyphens=False),
            "",
            "<!-- end of the tables -->",
            "",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

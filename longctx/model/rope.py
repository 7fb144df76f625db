"""Context extension: RoPE scaled so that a model takes longer rows than those that it was trained on."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from longctx.model.allow_list import POSITION_INDEPENDENT_ROPE

KEYS: Mapping[str, tuple[str, ...]] = {
    "linear": (),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
"""What transformers knows of each type, besides `factor` and `original_max_position_embeddings`."""

DEFAULTS = {"llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0}}
"""The parameters of Llama 3.1, since transformers has no defaults."""

TRAINED_CONTEXTS = {(model_type, 40960): 32768 for model_type in ("qwen3", "qwen3_moe")}
"""Contexts that models were trained on, by model type and max_position_embeddings: Qwen3's has room for 8,192 tokens of
an answer beyond it (model cards of Qwen3, "Processing Long Texts")."""

EXAMPLE = 'yarn:4, or \'{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}\''


def context_length(config: PretrainedConfig) -> int:
    """Return the model's context in tokens: the positions that its weights and its RoPE are meant for.

    It is max_position_embeddings, which is the extended context in configurations with `llama3`, `longrope` or `linear`
    scaling. Configurations with YaRN often keep the original context there (model cards of Qwen3, "Processing Long
    Texts"), while transformers and vLLM scale positions by the factor alone; theirs is factor ×
    original_max_position_embeddings, unless max_position_embeddings is larger. Without a factor (null), transformers
    takes it from max_position_embeddings. Where kinds of layers have parameters of their own, those of layers with full
    attention count.

    Raises:
        ValueError: for YaRN with a factor below 1 or an original context below 1, or with what is no finite number.
    """
    text: Any = config.get_text_config()
    own = _own_parameters(text)
    context = int(text.max_position_embeddings)
    own = own.get("full_attention") or own
    if own.get("rope_type") != "yarn" or own.get("factor") is None:
        return context
    for name in ("factor", "original_max_position_embeddings"):
        if not _is_number(own.get(name)) or not own[name] >= 1:
            raise ValueError(
                f"the model's configuration has YaRN with {name} {own.get(name)}; expected a finite number of at least "
                "1. Correct rope_parameters in its config.json, or set rope_parameters with --model_init_kwargs."
            )
    return max(context, int(own["original_max_position_embeddings"] * own["factor"]))


def parse_rope_scaling(given: str | Mapping[str, Any] | None) -> dict[str, Any] | None:
    """--rope_scaling as transformers' `rope_parameters`, without the model's own keys.

    Args:
        given: TYPE:FACTOR, or the keys, as JSON or a mapping.

    Raises:
        ValueError: for what is neither, and for types that are not exact once a sequence is cut.
    """
    if given is None:
        return None
    scaling = _read(given)
    kind = str(scaling.get("rope_type"))
    factor: Any = scaling.get("factor")
    if kind not in KEYS:
        depends = " depends on the longest position a rank sees" if kind in ("dynamic", "longrope") else " is unknown"
        types = ", ".join(name for name in POSITION_INDEPENDENT_ROPE if name in KEYS)
        raise ValueError(f"--rope_scaling {given}: the type {kind}{depends}. Use one of {types}: {EXAMPLE}.")
    if not _is_number(factor) or not factor >= 1:
        raise ValueError(
            f"--rope_scaling {given}: the factor {factor} is not a number of at least 1. Example: {EXAMPLE}."
        )
    known = {"rope_type", "factor", "original_max_position_embeddings", *KEYS[kind]}
    if unknown := sorted(scaling.keys() - known):
        raise ValueError(
            f"--rope_scaling {given}: {kind} has no {', '.join(unknown)}. Its keys are {', '.join(sorted(known))}."
        )
    for name in scaling.keys() - {"rope_type", "truncate"}:
        if not _is_number(scaling[name]) or not scaling[name] > 0:
            raise ValueError(f"--rope_scaling {given}: {name} {scaling[name]} is not a number above 0.")
    original = scaling.get("original_max_position_embeddings", 1)
    if original != int(original):
        raise ValueError(f"--rope_scaling {given}: original_max_position_embeddings {original} is not a whole number.")
    floats = {name: float(scaling[name]) for name in scaling.keys() & {"factor", "attention_factor"}}
    return DEFAULTS.get(kind, {}) | scaling | floats


def extended(config: PretrainedConfig, scaling: Mapping[str, Any]) -> PretrainedConfig:
    """Return the model's configuration with a longer context: the scaling's factor times the original context.

    The original context is the scaling's original_max_position_embeddings, or `trained_context` without one. A scaling
    that the model has already is replaced, with all of its keys.

    Raises:
        ValueError: for a model without RoPE, with several of them, or with a scaling of its own that is not YaRN and
            no original_max_position_embeddings given.
    """
    config = copy.deepcopy(config)
    text: Any = config.get_text_config()
    own = _own_parameters(text)
    named = f"--rope_scaling {scaling['rope_type']}"
    if not own:
        raise ValueError(f"{named}: a {text.model_type} model has no RoPE to scale. Leave it out.")
    if any(isinstance(value, dict) for value in own.values()):
        raise ValueError(
            f"{named}: the layers of {text.model_type} have RoPE of several kinds ({', '.join(own)}). Set all of "
            "rope_parameters and max_position_embeddings with --model_init_kwargs instead."
        )
    original = scaling.get("original_max_position_embeddings")
    if original is None:
        if own.get("rope_type", "default") not in ("default", "yarn"):
            raise ValueError(
                f"{named}: the model scales its positions by {own['rope_type']} already, and it is not known what it "
                "was trained on before. To replace that, give original_max_position_embeddings, too: as in "
                f"{EXAMPLE}."
            )
        original = trained_context(text)
    kept = {name: value for name, value in own.items() if name not in _SCALING}
    of_type = {name: value for name, value in scaling.items() if name != "original_max_position_embeddings"}
    if scaling["rope_type"] != "linear":
        of_type["original_max_position_embeddings"] = int(original)
    text.rope_parameters = kept | of_type
    text.max_position_embeddings = int(original * scaling["factor"])
    if hasattr(text, "original_max_position_embeddings"):  # Phi 3 has it there, which goes first
        text.original_max_position_embeddings = int(original)
    return config


def trained_context(text: Any) -> int:
    """Return the context that a model was trained on before its YaRN, or the one of an unscaled model.

    A few unscaled configurations do not have it as it is: see `TRAINED_CONTEXTS`.
    """
    own = _own_parameters(text)
    if own.get("rope_type") == "yarn":
        return int(own["original_max_position_embeddings"])
    context = int(text.max_position_embeddings)
    return TRAINED_CONTEXTS.get((text.model_type, context), context)


def replacement(config: PretrainedConfig, scaling: Mapping[str, Any]) -> str:
    """Return words for a note on which scaling of the model's own --rope_scaling replaces; an empty text if none.

    Args:
        config: The configuration before `extended`.
        scaling: What --rope_scaling sets.
    """
    own = _own_parameters(config.get_text_config())
    if (kind := own.get("rope_type", "default")) == "default":
        return ""
    text = f"this replaces the model's own scaling ({kind}), which has a context of {context_length(config):,}"
    names = [name for name in KEYS[scaling["rope_type"]] if own.get(name) is not None and name not in scaling]
    return text + (f", and leaves out its {', '.join(f'{name} {own[name]}' for name in names)}" if names else "")


def factor_for(length: int, context: int) -> int:
    """The whole factor that takes a model of this context to rows of this length."""
    return math.ceil(length / context)


def scaling_for(config: PretrainedConfig, length: int) -> str | None:
    """Return the value of --rope_scaling that extends the model's context to sequences of this length.

    It is None if the context suffices. A scaling that the configuration has already is replaced by one of the same type
    and from the same original context.

    Raises:
        ValueError: for a model whose context is not extended, as `extended` raises it.
    """
    text: Any = config.get_text_config()
    if length <= context_length(config):
        return None
    own = _own_parameters(text)
    original, kind = own.get("original_max_position_embeddings"), str(own.get("rope_type"))
    if original is None or kind not in KEYS:
        scaling = f"yarn:{factor_for(length, trained_context(text))}"
    else:
        kept = {name: own[name] for name in KEYS[kind] if own.get(name) is not None}
        of_type = {"rope_type": kind, "factor": factor_for(length, original)}
        scaling = json.dumps(of_type | {"original_max_position_embeddings": original} | kept)
    extended(config, parse_rope_scaling(scaling) or {})
    return scaling


_SCALING = {
    "type",
    "rope_type",
    "factor",
    "original_max_position_embeddings",
    *(n for names in KEYS.values() for n in names),
}
_SCALING |= {"short_factor", "long_factor"}


def _own_parameters(text: Any) -> dict[str, Any]:
    """Return the rope_parameters of a text configuration; empty for a model without RoPE."""
    return getattr(text, "rope_parameters", None) or {}


def _read(given: str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(given, str) and not given.lstrip().startswith("{"):
        kind, _, factor = given.partition(":")
        try:
            return {"rope_type": kind.strip(), "factor": float(factor)}
        except ValueError:
            raise ValueError(f"--rope_scaling {given} is not TYPE:FACTOR. Example: {EXAMPLE}.") from None
    try:
        scaling = json.loads(given) if isinstance(given, str) else dict(given)
    except ValueError as error:
        raise ValueError(f"--rope_scaling {given} is not a JSON object: {error}. Example: {EXAMPLE}.") from None
    if "type" in scaling:  # its older name
        scaling.setdefault("rope_type", scaling.pop("type"))
    return scaling


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

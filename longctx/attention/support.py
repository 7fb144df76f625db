"""Which models are exact under sequence parallelism: an allow-list, checked on the config before weights load."""

from __future__ import annotations

from transformers import PretrainedConfig

FULL_CAUSAL_MODELS = (
    "gemma",
    "granite",
    "llama",
    "mistral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
)
"""model_type of the decoders whose attention layers are compared with the dense reference in the test suite."""

POSITION_INDEPENDENT_ROPE = ("default", "linear", "llama3", "yarn")
"""RoPE types whose frequencies do not depend on the length a rank happens to see."""


class UnsupportedModelError(ValueError):
    """The model cannot be trained exactly here; the message names the layer type and the way out."""


def check_model(config: PretrainedConfig) -> None:
    """Refuse every model that is not known to be exact.

    Raises:
        UnsupportedModelError: naming the attention type, its value in the config, and the remedy.
    """
    text = config.get_text_config()
    reasons = [reason for reason in (_architecture(text), _layer_types(text), _dropout(text), _rope(text)) if reason]
    if reasons:
        raise UnsupportedModelError(f"Model type {text.model_type!r} is refused: " + " ".join(reasons))


def num_heads(config: PretrainedConfig) -> tuple[int, int]:
    """(query heads, key/value heads) of every attention layer."""
    text = config.get_text_config()
    return text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads


def _architecture(config: PretrainedConfig) -> str | None:
    if config.model_type in FULL_CAUSAL_MODELS:
        return None
    return (
        "its layers are not on the list of attention types known to be exact when a sequence is cut "
        f"({', '.join(FULL_CAUSAL_MODELS)}: full causal attention with any number of key/value heads). "
        "State-space, linear, chunked, windowed and non-causal layers would silently compute something else. "
        "Use one of these model types."
    )


def _layer_types(config: PretrainedConfig) -> str | None:
    types = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if types - {"full_attention"}:
        others = sorted(types - {"full_attention"})
        return f"layer_types holds {others}; only full_attention is supported. {_WINDOW_REMEDY}"
    if window is not None and getattr(config, "layer_types", None) is None:
        return f"sliding_window is {window}; only full attention is supported. {_WINDOW_REMEDY}"
    return None


_WINDOW_REMEDY = "Choose a model without a sliding window (for Mistral: v0.2 or later)."


def _dropout(config: PretrainedConfig) -> str | None:
    dropout = getattr(config, "attention_dropout", 0.0)
    if dropout:
        return (
            f"attention_dropout is {dropout}; random masks would differ between one device and several. "
            "Pass --model_init_kwargs '{\"attention_dropout\": 0.0}' or set it to 0 in config.json."
        )
    return None


def _rope(config: PretrainedConfig) -> str | None:
    parameters = getattr(config, "rope_parameters", None) or {}
    kind = parameters.get("rope_type", "default") if isinstance(parameters, dict) else "default"
    if kind not in POSITION_INDEPENDENT_ROPE:
        return (
            f"rope_type is {kind!r}, whose frequencies depend on the longest position a rank sees. "
            f"Use one of {', '.join(POSITION_INDEPENDENT_ROPE)}."
        )
    return None

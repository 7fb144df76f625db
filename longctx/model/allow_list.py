"""Which models are exact under sequence parallelism: an allow-list, checked on the config before weights load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PretrainedConfig

from longctx.attention.kernels import Kernel, choose_kernel
from longctx.model.recurrent import CHANNEL_KINDS, RECURRENT_KINDS

EXPERT_MODELS = (
    "afmoe",
    "cohere2_moe",
    "dots1",
    "exaone_moe",
    "flex_olmo",
    "granitemoe_swa",
    "granitemoeshared",
    "hy_v3",
    "mellum",
    "minimax_m2",
    "sarvam_moe",
    "solar_open",
)
"""Mixtures of experts among CAUSAL_MODELS, besides the older ones that stand there by name."""

DECODER_MODELS = (
    "apertus1p5_text",
    "aria_text",
    "bitnet",
    "exaone",
    "flint",
    "gemma2",
    "gemma4_text",
    "gemma4_unified_text",
    "granite_swa",
    "hyperclovax",
    "internlm3",
    "iquestcoder",
    "jais2",
    "kimi_linear",
    "kolibri1",
    "lfm3",
    "llama4_text",
    "mimo_v2_flash",
    "ministral",
    "ministral3",
    "nanochat",
    "persimmon",
    "vaultgemma",
    "youtu",
)
"""Those of CAUSAL_MODELS whose families stand in tests/model/more_families.py."""

CAUSAL_MODELS = (
    *EXPERT_MODELS,
    *DECODER_MODELS,
    "apertus",
    "arcee",
    "axk1",
    "bamba",
    "cohere",
    "cohere2",
    "cwm",
    "ernie4_5",
    "ernie4_5_moe",
    "deepseek_v2",
    "deepseek_v3",
    "exaone4",
    "falcon_h1",
    "gemma",
    "gemma3_text",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "helium",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "lfm2",
    "lfm2_moe",
    "llama",
    "minicpm3",
    "mistral",
    "mixtral",
    "nemotron_h",
    "olmo",
    "olmo2",
    "olmo3",
    "olmo_hybrid",
    "olmoe",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "sarvam_mla",
    "seed_oss",
    "smollm3",
    "starcoder2",
)
"""model_type of every decoder that tests/model/test_models.py compares with stock transformers, each document alone."""

WINDOW_MODELS = (
    "afmoe",
    "cohere2_moe",
    "dots1",
    "exaone_moe",
    "granitemoe_swa",
    "mellum",
    "flint",
    "kolibri1",
    "ministral",
    "cohere2",
    "cwm",
    "exaone4",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "gemma4_unified_text",
    "gpt_oss",
    "granite_swa",
    "lfm3",
    "mimo_v2_flash",
    "mistral",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
    "starcoder2",
    "vaultgemma",
)
"""Those of them that are compared with sliding windows too, in all layers or in some."""

SOFTCAP_MODELS = ("gemma2", "vaultgemma")
"""Those of them that are compared with soft-capped attention scores; others ignore the setting, or need a mask."""

CHUNK_MODELS = ("llama4_text",)
"""Those of them that are compared with chunked attention."""

GATED_DELTA_MODELS = ("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Those of them whose layers of type linear_attention are gated delta rules (longctx.recurrent.gated_delta)."""

AUXILIARY_LOSS_MODELS = (
    "ernie4_5_moe",
    "flex_olmo",
    "flint",
    "gpt_oss",
    *("granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"),
    "mellum",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
)
"""Those of them whose routers have an auxiliary loss in transformers; tests/layers/test_routers.py compares it."""

EXPERTS_IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
"""transformers' own ways to compute experts that tests/layers/test_routers.py compares."""

RECURRENT_MODELS = (
    *GATED_DELTA_MODELS,
    "kimi_linear",  # Kimi Delta Attention, in longctx.recurrent.gated_delta as well
    *("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h"),  # longctx.recurrent.mamba2
    *("lfm2", "lfm2_moe", "lfm3"),  # convolutions alone
)
"""Those of them that have recurrent layers, which longctx.recurrent spreads over ranks."""

RECURRENT_SETTINGS = ("mamba_d_state", "ssm_state_size", "conv_L_cache")
"""Settings of REFUSED_SETTINGS that RECURRENT_MODELS have."""

POSITION_INDEPENDENT_ROPE = ("default", "linear", "llama3", "proportional", "yarn")
"""RoPE types whose frequencies do not depend on the length a rank happens to see."""

_PLAIN_TEXT = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Decoders below a head and nothing more, which many multimodal types take as their text part."""

MULTIMODAL_MODELS = {
    "aria": ("aria_text",),
    "deepseek_vl": _PLAIN_TEXT,
    "deepseek_vl_hybrid": _PLAIN_TEXT,
    "exaone4_5": ("exaone4",),
    "gemma3": ("gemma3_text",),
    "gemma4": ("gemma4_text",),
    "gemma4_unified": ("gemma4_unified_text",),
    "glm46v": ("glm4v_moe_text", "glm4v_text"),
    "glm4v": ("glm4v_text",),
    "glm4v_moe": ("glm4v_moe_text",),
    "got_ocr2": _PLAIN_TEXT,
    "hyperclovax_vision_v2": ("hyperclovax",),
    "idefics2": _PLAIN_TEXT,
    "idefics3": _PLAIN_TEXT,
    "internvl": _PLAIN_TEXT,
    "janus": _PLAIN_TEXT,
    "kimi_k25": ("deepseek_v3",),
    "lfm2_vl": ("lfm2",),
    "lfm3_vl": ("lfm3",),
    "lighton_ocr": _PLAIN_TEXT,
    "llama4": ("llama4_text",),
    "llava": _PLAIN_TEXT,
    "llava_next": _PLAIN_TEXT,
    "llava_next_video": _PLAIN_TEXT,
    "llava_onevision": _PLAIN_TEXT,
    "minicpmv4_6": ("qwen3_5_text",),
    "minicpmv4_7": ("qwen3_5_text",),
    "mistral3": _PLAIN_TEXT,
    "ovis2": _PLAIN_TEXT,
    "qianfan_ocr": _PLAIN_TEXT,
    "qwen2_5_vl": ("qwen2_5_vl_text",),
    "qwen2_vl": ("qwen2_vl_text",),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
    "qwen3_vl": ("qwen3_vl_text",),
    "qwen3_vl_moe": ("qwen3_vl_moe_text",),
    "smolvlm": _PLAIN_TEXT,
    "video_llama_3": _PLAIN_TEXT,
    "video_llava": _PLAIN_TEXT,
    "vipllava": _PLAIN_TEXT,
}
"""Multimodal model_type -> the text parts that tests/model/test_multimodal.py compares with the whole, on text."""

REFUSED_SETTINGS = {
    "attn_logit_softcapping": "soft-capped attention scores",
    "attention_chunk_size": "chunked attention",
    "state_size": "state-space layers",
    "ssm_state_size": "state-space layers",
    "mamba_d_state": "state-space layers",
    "conv_L_cache": "short convolutions over tokens",
    "lru_width": "recurrent layers",
    "attention_hidden_size": "recurrent layers (RWKV)",
    "chunkwise_kernel": "recurrent layers (xLSTM)",
    "use_bidirectional_attention": "non-causal attention",
}
"""Config keys that switch on layers which would silently compute something else once a sequence is cut."""

LAYER_KINDS = {
    "conv": "short convolutions over tokens",
    "hybrid": "recurrent or convolutional layers beside attention",
    "hybrid_sliding": "recurrent or convolutional layers beside attention",
    "linear_attention": "linear attention or another recurrence",
    "chunked_attention": "chunked attention",
    "indexed_attention": "attention to tokens that an indexer picks",
}
"""What the values of `layer_types` mean that are refused; others are named as they are."""


class UnsupportedModelError(ValueError):
    """The model cannot be trained exactly here; the message names the layer type and the way out."""


def check_model(config: PretrainedConfig) -> None:
    """Refuse every model that is not known to be trained exactly.

    Raises:
        UnsupportedModelError: naming each reason with its value in the config, and the remedy.
    """
    if reasons := list(_reasons(config, _text_of(config))):
        name = f" of {config.name_or_path}" if config.name_or_path else ""
        raise UnsupportedModelError(f"Model type {config.model_type!r}{name} is refused: " + " ".join(reasons))


def _text_of(config: PretrainedConfig) -> PretrainedConfig:
    """Return the part of a configuration that reads text; all of it where there is no one such part."""
    try:
        return config.get_text_config()
    except ValueError:  # several parts, such as an encoder and a decoder
        return config


def num_heads(config: PretrainedConfig) -> tuple[int, int]:
    """(query heads, key/value heads) of every attention layer; the most key/value heads where layers differ."""
    text = config.get_text_config()
    if is_latent(config):
        return text.num_attention_heads, text.num_attention_heads
    return text.num_attention_heads, _largest(text, "num_key_value_heads") or text.num_attention_heads


def _largest(text: PretrainedConfig, name: str) -> int | None:
    """Return a number of the layers, the largest where layers differ in it, or None if the configuration has none."""
    if name not in (text.per_layer_attributes or ()):
        return getattr(text, name, None)
    return max(getattr(layer, name) for layer in text.per_layer_config)


def is_latent(config: PretrainedConfig) -> bool:
    """Whether attention is multi-head latent attention (MLA), which makes keys and values of all heads from latents."""
    return getattr(config.get_text_config(), "kv_lora_rank", None) is not None


def has_windows(config: PretrainedConfig) -> bool:
    """Return whether any layer has a sliding window."""
    text = _text_of(config)
    if types := getattr(text, "layer_types", None):
        return "sliding_attention" in types
    return getattr(text, "sliding_window", None) is not None


def has_softcap(config: PretrainedConfig) -> bool:
    """Return whether the scores of attention are soft-capped."""
    return bool(getattr(_text_of(config), "attn_logit_softcapping", None))


def has_experts(config: PretrainedConfig) -> bool:
    """Whether it is a mixture of experts, of which a token uses some."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any(getattr(config.get_text_config(), name, None) for name in names)


def auxiliary_loss_coefficient(config: PretrainedConfig) -> float:
    """Return the coefficient of the routers' auxiliary loss, 0 for a model without it or where it is switched off."""
    text = config.get_text_config()
    has_loss = text.model_type in AUXILIARY_LOSS_MODELS and text.output_router_logits
    return float(text.router_aux_loss_coef or 0) if has_loss else 0.0


def _reasons(config: PretrainedConfig, text: PretrainedConfig) -> Iterator[str]:
    if text is not config:
        yield (
            f"its text part, {text.model_type!r}, has not been compared with the whole model. longctx trains "
            f"the text parts of {', '.join(MULTIMODAL_MODELS)}."
        )
    yield from _heads(text)
    yield from _layers(text)
    yield from _windows(text)
    yield from _dropouts(text)
    yield from _rope(text)
    if text.model_type not in CAUSAL_MODELS or not _is_stock(config):
        yield (
            f"Its layers are not known to be exact when a sequence is cut. "
            f"{_kind_of_code(config)}Use one of the types compared with one device: {', '.join(CAUSAL_MODELS)}."
        )


def _is_stock(config: PretrainedConfig) -> bool:
    return type(config).__module__.startswith("transformers.models.")


def _kind_of_code(config: PretrainedConfig) -> str:
    return "" if _is_stock(config) else f"Its config {type(config).__name__} is code of the model's own. "


def _heads(config: PretrainedConfig) -> Iterator[str]:
    for layer in config.per_layer_config if "num_key_value_heads" in (config.per_layer_attributes or ()) else [config]:
        heads, shared = getattr(layer, "num_attention_heads", None), getattr(layer, "num_key_value_heads", None)
        if isinstance(heads, int) and isinstance(shared, int) and shared and heads % shared:
            yield (
                f"num_attention_heads is {heads}, which is not a multiple of num_key_value_heads, {shared}. "
                "Correct its config.json, or download it again."
            )
            return


def _layers(config: PretrainedConfig) -> Iterator[str]:
    exact = (
        *(RECURRENT_SETTINGS if config.model_type in RECURRENT_MODELS else ()),
        *(("attn_logit_softcapping",) if config.model_type in SOFTCAP_MODELS else ()),
        *(("attention_chunk_size",) if config.model_type in CHUNK_MODELS else ()),
    )
    for name, kind in REFUSED_SETTINGS.items():
        value = getattr(config, name, None)
        only_images = value == "vision" and config.model_type in ("gemma4_text", "gemma4_unified_text")
        if value and name not in exact and not only_images:
            yield f"{name} is {value}: {kind}."
    if getattr(config, "is_causal", True) is False:
        yield "is_causal is False: non-causal attention."


def _windows(config: PretrainedConfig) -> Iterator[str]:
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    supported = {"full_attention", "sliding_attention"}
    if config.model_type in RECURRENT_MODELS:
        supported |= {*RECURRENT_KINDS, *CHANNEL_KINDS}
    if config.model_type in CHUNK_MODELS and getattr(config, "attention_chunk_size", None):
        supported |= {"chunked_attention"}
    if others := sorted(set(types or ()) - supported):
        kinds = dict.fromkeys(LAYER_KINDS.get(name, "unknown layers") for name in others)
        yield (
            f"layer_types holds {', '.join(others)} ({'; '.join(kinds)}); only {' and '.join(sorted(supported))} are "
            f"supported with {config.model_type}."
        )
    if has_windows(config) and not (isinstance(window, int) and window >= 1):
        yield f"sliding_window is {window!r}; expected at least 1. Correct its config.json, or download it again."
    if has_windows(config) and config.model_type not in WINDOW_MODELS:
        yield (
            f"sliding_window is {window}; windows are known to be exact for {', '.join(WINDOW_MODELS)}. Choose a model "
            "without a sliding window."
        )


def _dropouts(config: PretrainedConfig) -> Iterator[str]:
    """Dropout or noise anywhere in the decoder; a classification head's is never used here."""
    for name, value in sorted(vars(config).items()):
        is_rate = "dropout" in name or name.endswith(("_pdrop", "_jitter_noise"))
        if is_rate and not name.startswith("classifier") and isinstance(value, int | float) and value != 0:
            yield (
                f"{name} is {value}; random masks would differ between one device and several. "
                f"Pass --model_init_kwargs '{{\"{name}\": 0.0}}' or set it to 0 in config.json."
            )


def _rope(config: PretrainedConfig) -> Iterator[str]:
    parameters: Any = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return
    of_each_layer_type = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    for kind in sorted({str(layer.get("rope_type", "default")) for layer in of_each_layer_type}):
        if kind not in POSITION_INDEPENDENT_ROPE:
            yield (
                f"rope_type is {kind!r}, whose frequencies depend on the longest position a rank sees. "
                f"Use one of {', '.join(POSITION_INDEPENDENT_ROPE)}."
            )


def head_size(config: PretrainedConfig) -> int:
    """Return the size D of every attention head in the kernel, to which the narrower of `head_sizes` is padded."""
    return max(head_sizes(config))


def head_sizes(config: PretrainedConfig) -> tuple[int, int]:
    """(size of a head of queries and keys, size of a head of values), the largest where layers differ."""
    text = config.get_text_config()
    if is_latent(config):
        return text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim
    size = _largest(text, "head_dim") or text.hidden_size // text.num_attention_heads
    return size, size


def kernel_of(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel that computes every attention layer, where its queries have this dtype."""
    heads, key_value_heads = num_heads(config)
    return choose_kernel(
        device, dtype, head_size(config), heads // key_value_heads, has_windows(config), has_softcap(config)
    )

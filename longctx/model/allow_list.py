"""Which models are exact under sequence parallelism: an allow-list, checked on the config before weights load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PretrainedConfig

from longctx.attention.kernels import Inputs, Kernel, choose_kernel
from longctx.model.recurrent import CHANNEL_KINDS, RECURRENT_KINDS

NORMS, ROPE, SWIGLU, GEGLU = "rms_norm", "rope", "swiglu", "geglu"
"""Parts of a model, by Liger's names."""


@dataclass(frozen=True, kw_only=True)
class ModelType:
    """A supported decoder: what it has besides full attention, each compared with stock transformers."""

    windows: bool = False
    """Sliding windows, in all layers or in some."""
    softcap: bool = False
    """Soft-capped attention scores; other types ignore the setting, or need a mask."""
    chunks: bool = False
    """Chunked attention."""
    recurrence: Literal["gated delta", "kimi delta", "mamba2", "convolution"] | None = None
    """What its recurrent layers compute, which longctx.recurrent spreads over ranks."""
    router_loss: bool = False
    """The routers' auxiliary loss, in tests/layers/test_routers.py."""
    liger: tuple[str, ...] = ()
    """The parts that Liger has a kernel for, compared with transformers' own layers in tests/layers/test_liger.py."""
    since: str | None = None
    """The release of transformers that added it; None if the oldest supported release has it."""


MODEL_TYPES = {
    "afmoe": ModelType(windows=True),
    "apertus": ModelType(),
    "apertus1p5_text": ModelType(since="5.24"),
    "arcee": ModelType(),
    "aria_text": ModelType(),
    "axk1": ModelType(),
    "bamba": ModelType(recurrence="mamba2"),
    "bitnet": ModelType(),
    "cohere": ModelType(),
    "cohere2": ModelType(windows=True),
    "cohere2_moe": ModelType(windows=True),
    "cwm": ModelType(windows=True),
    "deepseek_v2": ModelType(),
    "deepseek_v3": ModelType(),
    "dots1": ModelType(windows=True),
    "ernie4_5": ModelType(),
    "ernie4_5_moe": ModelType(router_loss=True),
    "exaone": ModelType(since="5.24"),
    "exaone4": ModelType(windows=True, liger=(NORMS, SWIGLU, ROPE)),
    "exaone_moe": ModelType(windows=True),
    "falcon_h1": ModelType(recurrence="mamba2"),
    "flex_olmo": ModelType(router_loss=True),
    "flint": ModelType(windows=True, router_loss=True, since="5.21"),
    "gemma": ModelType(liger=(NORMS, GEGLU, ROPE)),
    "gemma2": ModelType(windows=True, softcap=True),
    "gemma3_text": ModelType(windows=True, liger=(NORMS, GEGLU, ROPE)),
    "gemma4_text": ModelType(windows=True),
    "gemma4_unified_text": ModelType(windows=True),
    "glm": ModelType(),
    "glm4": ModelType(liger=(NORMS, SWIGLU)),
    "glm4_moe": ModelType(),
    "glm4_moe_lite": ModelType(),
    "gpt_neox": ModelType(),
    "gpt_oss": ModelType(windows=True, router_loss=True, liger=(NORMS, ROPE)),
    "granite": ModelType(liger=(NORMS, SWIGLU, ROPE)),
    "granite_swa": ModelType(windows=True),
    "granitemoe": ModelType(router_loss=True),
    "granitemoe_swa": ModelType(windows=True, router_loss=True),
    "granitemoehybrid": ModelType(recurrence="mamba2", router_loss=True),
    "granitemoeshared": ModelType(router_loss=True),
    "helium": ModelType(),
    "hunyuan_v1_dense": ModelType(liger=(NORMS, SWIGLU, ROPE)),
    "hunyuan_v1_moe": ModelType(liger=(NORMS, ROPE)),
    "hy_v3": ModelType(),
    "hyperclovax": ModelType(),
    "internlm3": ModelType(since="5.23"),
    "iquestcoder": ModelType(since="5.23"),
    "jais2": ModelType(),
    "kimi_linear": ModelType(recurrence="kimi delta"),
    "kolibri1": ModelType(windows=True, since="5.20"),
    "lfm2": ModelType(recurrence="convolution"),
    "lfm2_moe": ModelType(recurrence="convolution"),
    "lfm3": ModelType(windows=True, recurrence="convolution", since="5.23"),
    "llama": ModelType(liger=(NORMS, SWIGLU, ROPE)),
    "llama4_text": ModelType(chunks=True),
    "mellum": ModelType(windows=True, router_loss=True),
    "mimo_v2_flash": ModelType(windows=True),
    "minicpm3": ModelType(),
    "minimax_m2": ModelType(router_loss=True),
    "ministral": ModelType(windows=True),
    "ministral3": ModelType(),
    "mistral": ModelType(windows=True, liger=(NORMS, SWIGLU, ROPE)),
    "mixtral": ModelType(router_loss=True, liger=(NORMS, ROPE)),
    "nanochat": ModelType(),
    "nemotron_h": ModelType(recurrence="mamba2"),
    "olmo": ModelType(),
    "olmo2": ModelType(liger=(NORMS, SWIGLU, ROPE)),
    "olmo3": ModelType(windows=True, liger=(NORMS, SWIGLU, ROPE)),
    "olmo_hybrid": ModelType(recurrence="gated delta"),
    "olmoe": ModelType(router_loss=True),
    "persimmon": ModelType(),
    "phi": ModelType(),
    "phi3": ModelType(windows=True, liger=(NORMS, SWIGLU, ROPE)),
    "qwen2": ModelType(windows=True, liger=(NORMS, SWIGLU, ROPE)),
    "qwen2_moe": ModelType(router_loss=True),
    "qwen3": ModelType(windows=True, liger=(NORMS, SWIGLU, ROPE)),
    "qwen3_5_moe_text": ModelType(recurrence="gated delta", router_loss=True),
    "qwen3_5_text": ModelType(recurrence="gated delta", liger=(NORMS, SWIGLU)),
    "qwen3_moe": ModelType(router_loss=True, liger=(NORMS, ROPE)),
    "qwen3_next": ModelType(recurrence="gated delta", router_loss=True, liger=(NORMS,)),
    "sarvam_mla": ModelType(since="5.24"),
    "sarvam_moe": ModelType(since="5.24"),
    "seed_oss": ModelType(),
    "smollm3": ModelType(windows=True, liger=(NORMS, SWIGLU, ROPE)),
    "solar_open": ModelType(),
    "starcoder2": ModelType(windows=True),
    "vaultgemma": ModelType(windows=True, softcap=True),
    "youtu": ModelType(),
}
"""model_type of every decoder that tests/model/test_models.py compares with stock transformers."""

CAUSAL_MODELS = tuple(MODEL_TYPES)
WINDOW_MODELS = tuple(name for name, known in MODEL_TYPES.items() if known.windows)
RECURRENT_MODELS = tuple(name for name, known in MODEL_TYPES.items() if known.recurrence)
AUXILIARY_LOSS_MODELS = tuple(name for name, known in MODEL_TYPES.items() if known.router_loss)

EXPERTS_IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
"""transformers' own ways to compute experts that tests/layers/test_routers.py compares."""

RECURRENT_SETTINGS = ("mamba_d_state", "ssm_state_size", "conv_L_cache")
"""Settings of REFUSED_SETTINGS that RECURRENT_MODELS have."""

POSITION_INDEPENDENT_ROPE = ("default", "linear", "llama3", "proportional", "yarn")
"""RoPE types whose frequencies do not depend on the length a rank happens to see."""

_PLAIN_TEXT = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Decoders below a head and nothing more, which many multimodal types take as their text part."""

MULTIMODAL_MODELS = {
    **dict.fromkeys(
        (
            *("deepseek_vl", "deepseek_vl_hybrid", "got_ocr2", "idefics2", "idefics3", "internvl", "janus"),
            *("lighton_ocr", "llava", "llava_next", "llava_next_video", "llava_onevision", "mistral3"),
            *("ovis2", "qianfan_ocr", "smolvlm", "video_llama_3", "video_llava", "vipllava"),
        ),
        _PLAIN_TEXT,
    ),
    "aria": ("aria_text",),
    "exaone4_5": ("exaone4",),
    "gemma3": ("gemma3_text",),
    "gemma4": ("gemma4_text",),
    "gemma4_unified": ("gemma4_unified_text",),
    "glm46v": ("glm4v_moe_text", "glm4v_text"),
    "glm4v": ("glm4v_text",),
    "glm4v_moe": ("glm4v_moe_text",),
    "hyperclovax_vision_v2": ("hyperclovax",),
    "kimi_k25": ("deepseek_v3",),
    "lfm2_vl": ("lfm2",),
    "lfm3_vl": ("lfm3",),
    "llama4": ("llama4_text",),
    "minicpmv4_6": ("qwen3_5_text",),
    "minicpmv4_7": ("qwen3_5_text",),
    "qwen2_5_vl": ("qwen2_5_vl_text",),
    "qwen2_vl": ("qwen2_vl_text",),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
    "qwen3_vl": ("qwen3_vl_text",),
    "qwen3_vl_moe": ("qwen3_vl_moe_text",),
}
"""Multimodal model_type -> the text parts that tests/model/test_multimodal.py compares with the whole, on text."""

ADDED_IN = {name: known.since for name, known in MODEL_TYPES.items() if known.since}
ADDED_IN |= {"hyperclovax_vision_v2": "5.18", "lfm3_vl": "5.23", "minicpmv4_7": "5.18"}
"""The release of transformers that added a type, for those that the oldest supported release does not have."""

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


def _known(config: PretrainedConfig) -> ModelType:
    """Return what of this model type is compared, nothing of one that is not listed."""
    return MODEL_TYPES.get(config.model_type, ModelType())


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
            f"the text parts of {', '.join(sorted(MULTIMODAL_MODELS))}."
        )
    yield from _heads(text)
    yield from _layers(text)
    yield from _windows(text)
    yield from _dropouts(text)
    yield from _rope(text)
    if text.model_type not in CAUSAL_MODELS or not _is_stock(config):
        code = "" if _is_stock(config) else f"Its config {type(config).__name__} is code of the model's own. "
        yield (
            f"Its layers are not known to be exact when a sequence is cut. "
            f"{code}Use one of the types compared with one device: {', '.join(CAUSAL_MODELS)}."
        )


def _is_stock(config: PretrainedConfig) -> bool:
    return type(config).__module__.startswith("transformers.models.")


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
    known = _known(config)
    exact = (
        *(RECURRENT_SETTINGS if known.recurrence else ()),
        *(("attn_logit_softcapping",) if known.softcap else ()),
        *(("attention_chunk_size",) if known.chunks else ()),
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
    if _known(config).recurrence:
        supported |= {*RECURRENT_KINDS, *CHANNEL_KINDS}
    if _known(config).chunks and getattr(config, "attention_chunk_size", None):
        supported |= {"chunked_attention"}
    if others := sorted(set(types or ()) - supported):
        kinds = dict.fromkeys(LAYER_KINDS.get(name, "unknown layers") for name in others)
        yield (
            f"layer_types holds {', '.join(others)} ({'; '.join(kinds)}); only {' and '.join(sorted(supported))} are "
            f"supported with {config.model_type}."
        )
    if has_windows(config) and not (isinstance(window, int) and window >= 1):
        yield f"sliding_window is {window!r}; expected at least 1. Correct its config.json, or download it again."
    if has_windows(config) and not _known(config).windows:
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
    has_softcap = bool(getattr(_text_of(config), "attn_logit_softcapping", None))
    queries_per_key, windowed = heads // key_value_heads, has_windows(config)
    return choose_kernel(Inputs(device, dtype, head_size(config), queries_per_key, windowed, has_softcap))

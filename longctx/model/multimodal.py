"""Multimodal checkpoints, of which the text part is trained: its configuration, its weights, and the way back.

transformers reads the whole checkpoint, with its own names and conversions of weights. The text part is that model's
decoder and head. Both have a counterpart in a causal language model, which they fill parameter by parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from longctx.model.allow_list import MULTIMODAL_MODELS
from longctx.model.files import on_meta
from longctx.upstream.transformers_internals import decoder_of, save_without_conversions, tied_weights, unpartitioned

CAUSAL_TYPES = {
    "glm4v_moe_text": "glm4_moe",
    "glm4v_text": "glm4",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3",
}
"""Text part -> the causal language model with the same layers, where transformers has none of the part's own type.

Their rotary positions have an axis each for time, height and width. On text the three are equal, which is plain RoPE.
"""

_BUILT_IN = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}
"""What layers of a text part do always, as a setting of the causal language model."""

_CAPS_LOGITS = ("gemma4", "gemma4_unified")
"""Multimodal types whose head applies final_logit_softcapping of the text part, as the causal language model does."""

_OF_IMAGES = ("mrope_interleaved", "mrope_section")
"""Keys of rope_parameters that divide channels among the three axes."""


def takes_text_alone(config: PretrainedConfig) -> bool:
    """Return whether transformers' causal language model of this type is the text part, read from the whole's files."""
    text_class = config.sub_configs.get("text_config")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return text_class is not None and getattr(model_class, "config_class", None) is text_class


def text_part(config: PretrainedConfig) -> PretrainedConfig | None:
    """Return the configuration of the causal language model that is the text part of this one.

    It is None for a model without parts, and for a multimodal type whose text part was not compared with the whole.

    Raises:
        ValueError: if the text part has a setting that the causal language model does not have.
    """
    text = config.get_text_config()
    if text is config or text.model_type not in MULTIMODAL_MODELS.get(config.model_type, ()):
        return None
    values = text.to_dict()
    model_type = CAUSAL_TYPES.get(text.model_type, text.model_type)
    if model_type != text.model_type:
        values = _translated(text, model_type)
    part = CONFIG_MAPPING[model_type].from_dict(values)
    if not takes_text_alone(config):
        cap = getattr(text, "final_logit_softcapping", None)
        if cap is not None and config.model_type not in _CAPS_LOGITS:
            raise ValueError(
                f"final_logit_softcapping of the text part is {cap}, and the whole {config.model_type} model leaves "
                "its logits as they are. Set it to null in config.json."
            )
        part.tie_word_embeddings = bool(getattr(config, "tie_word_embeddings", False))
    part.dtype = part.dtype or config.dtype
    part.name_or_path = config.name_or_path
    return part


def _translated(text: PretrainedConfig, model_type: str) -> dict[str, Any]:
    """Return the values for another type of the same layers; what that type does not have must be at its default."""
    known = {*CONFIG_MAPPING[model_type]().to_dict(), "head_dim"}  # all attention layers look for head_dim
    default = type(text)().to_dict()
    values = {key: value for key, value in text.to_dict().items() if key != "model_type"}
    for key, value in values.items():
        if key not in known and value != default.get(key) and not key.endswith("_token_id"):
            raise ValueError(
                f"the text part of this {text.model_type} model sets {key} to {value!r}, which a {model_type} model "
                "does not have. Choose a checkpoint without it."
            )
    rope = {key: value for key, value in values["rope_parameters"].items() if key not in _OF_IMAGES}
    kept = {key: value for key, value in values.items() if key in known}
    return kept | {"rope_parameters": rope} | _BUILT_IN.get(text.model_type, {})


def load_text_part(
    name: str,
    whole_config: PretrainedConfig,
    config: PretrainedConfig,
    *,
    dtype: str,
    revision: str | None,
    generation: Mapping[str, Any],
    **options: Any,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return the causal language model with the weights of the whole's text part, and what transformers found.

    Args:
        config: of the causal language model, as `text_part` returns it.
        generation: keywords for the whole: `generation_config`, if not that of the folder.
        options: keywords for the language model, such as how its weights are quantised.

    Raises:
        ValueError: if weights of the text part are missing, or the files have some that the model does not have.
    """
    whole_config = copy.deepcopy(whole_config)
    whole_config.tie_word_embeddings = config.tie_word_embeddings  # as the files have it, or a flag
    whole = load_whole(name, whole_config, dtype=dtype, revision=revision, needs_all=False, **generation)
    states, generation_config = text_states(whole, config), whole.generation_config
    dtype = dtype if dtype != "auto" else str(whole.dtype).removeprefix("torch.")
    del whole
    model, found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None, config=config, state_dict=states, dtype=dtype, output_loading_info=True, **options
    )
    save_without_conversions(model)
    model.generation_config, model.config.name_or_path = generation_config, name
    return model, found


def text_states(whole: PreTrainedModel, config: PretrainedConfig) -> dict[str, Tensor]:
    """Return the parameters and saved buffers of the whole's text part, by their names in the language model.

    A tied head is left out: it is the embeddings.
    """
    held = whole.state_dict()
    states = {}
    text = on_meta(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
    expected = text.state_dict()
    for name, whole_name in names_in_whole(text, whole).items():
        if config.tie_word_embeddings and name in tied_weights(text):
            continue
        assert held[whole_name].shape == expected[name].shape, f"{whole_name} is not {name}"
        states[name] = held[whole_name]
    return states


def names_in_whole(text: PreTrainedModel, whole: PreTrainedModel) -> dict[str, str]:
    """Return, for each parameter and saved buffer of a causal language model, its name in the multimodal model.

    The decoder and the head are found as modules, wherever a class keeps them.
    """
    names: dict[str, str] = {}
    for part, counterpart in (
        (decoder_of(text), decoder_of(whole)),
        (text.get_output_embeddings(), whole.get_output_embeddings()),
    ):
        prefix, other = _name_of(text, part), _name_of(whole, counterpart)
        names |= {f"{prefix}.{key}": f"{other}.{key}" for key in part.state_dict()}
    assert names.keys() == text.state_dict().keys(), "a causal language model is its decoder and its head"
    return names


def _name_of(model: PreTrainedModel, module: torch.nn.Module) -> str:
    return next(name for name, found in model.named_modules() if found is module)


def load_whole(name: str, config: PretrainedConfig, *, needs_all: bool = True, **options: Any) -> PreTrainedModel:
    """Return the multimodal model, read by transformers.

    Args:
        needs_all: whether the parts of images have to be there as well.
        options: keywords of `from_pretrained`: `dtype`, `revision`, and `generation_config` if not that of the folder.

    Raises:
        ValueError: if weights are missing, or the files have weights of the text part that the model does not have.
    """
    with unpartitioned():
        whole, found = AutoModelForImageTextToText.from_pretrained(
            name, config=config, output_loading_info=True, **options
        )
    text_prefixes = tuple(_name_of(whole, part) + "." for part in (decoder_of(whole), whole.get_output_embeddings()))
    if missing := sorted(key for key in found["missing_keys"] if needs_all or key.startswith(text_prefixes)):
        raise ValueError(
            f"{name} has no weights for {len(missing)} parameters of a {whole.config.model_type} model, such as "
            f"{missing[0]}; they would be initialised at random. Complete the folder, or download it again."
        )
    if unexpected := sorted(key for key in found["unexpected_keys"] if key.startswith(text_prefixes)):
        raise ValueError(
            f"{name} has {len(unexpected)} weights that the text part of a {whole.config.model_type} model does not "
            f"have, such as {unexpected[0]}. Correct config.json, or download the folder again."
        )
    return whole


def put_back(text: PreTrainedModel, name: str, whole_config: PretrainedConfig, *, revision: str | None) -> Any:
    """Return the multimodal model with the text part that was trained, and all other weights as they were.

    Args:
        text: a causal language model that was trained from the text part.
        name: the folder or hub name of the multimodal model.

    Raises:
        ValueError: if the two do not fit together, with the setting or the parameter.
    """
    whole_config = with_settings_of(text.config, whole_config)
    whole = load_whole(name, whole_config, dtype=str(text.dtype).removeprefix("torch."), revision=revision)
    head, embeddings = whole.get_output_embeddings(), whole.get_input_embeddings()
    if not whole_config.tie_word_embeddings and head.weight is embeddings.weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    held, states = whole.state_dict(), text.state_dict()
    for text_name, whole_name in names_in_whole(text, whole).items():
        assert held[whole_name].shape == states[text_name].shape, f"{whole_name} is not {text_name}"
        held[whole_name].copy_(states[text_name])
    return whole


_OF_FILES = {"_name_or_path", "architectures", "dtype", "transformers_version"}
"""Keys of a configuration that say nothing about the layers."""


def with_settings_of(config: PretrainedConfig, whole_config: PretrainedConfig) -> PretrainedConfig:
    """Return the whole's configuration with what training has changed in the text part's, such as scaled positions."""
    whole_config = copy.deepcopy(whole_config)
    before, text = text_part(whole_config), whole_config.get_text_config()
    if before is None or before.model_type != config.model_type:
        part = "none that is trained here" if before is None else f"a {before.model_type} model"
        raise ValueError(
            f"the trained model is a {config.model_type} model, and the text part of this {whole_config.model_type} "
            f"model is {part}. Name the model that the training started from."
        )
    values, former = _settings(config), _settings(before)
    for key, value in values.items():
        if key == "rope_parameters":
            value = {axis: text.rope_parameters[axis] for axis in _OF_IMAGES if axis in text.rope_parameters} | value
        if value != former.get(key):
            setattr(text, key, value)
    whole_config.tie_word_embeddings = config.tie_word_embeddings
    after = _settings(text_part(whole_config) or before)
    if others := sorted(key for key, value in after.items() if values.get(key) != value):
        raise ValueError(
            f"{others[0]} is {values.get(others[0])!r} in the trained model, which a {whole_config.model_type} model "
            "cannot have. Name the model that the training started from."
        )
    return whole_config


def _settings(config: PretrainedConfig) -> dict[str, Any]:
    return {key: value for key, value in config.to_dict().items() if key not in _OF_FILES}

"""Read the model's configuration, apply flags to it, and check that such a model is trained exactly."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from torch.nn import ModuleList
from transformers import PretrainedConfig

from longctx.forecast.model_sizes import ModelSizes
from longctx.model.adapter import changes_base
from longctx.model.allow_list import (
    AUXILIARY_LOSS_MODELS,
    EXPERTS_IMPLEMENTATIONS,
    auxiliary_loss_coefficient,
    check_model,
    has_experts,
)
from longctx.model.files import without_weights
from longctx.model.load import load_config, load_whole_config
from longctx.model.rope import context_length, extended, factor_for, parse_rope_scaling, replacement, scaling_for
from longctx.model.tied_head import untie_as_stored
from longctx.settings.launcher import profile_name
from longctx.settings.values import Settings
from longctx.upstream.transformers_internals import set_experts_implementation

_OWN_FLAGS = {
    "attn_implementation": "attn_implementation",
    "dtype": "dtype",
    "revision": "model_revision",
    "torch_dtype": "dtype",
    "trust_remote_code": "trust_remote_code",
}
"""Keys of model_init_kwargs that do not belong to the model's configuration, and their flags."""


_PARALLELISM = {
    *("distributed_config", "device_mesh", "enable_expert_parallel", "ep_plan", "ep_size", "tp_plan", "tp_size"),
}
"""Keys of model_init_kwargs with which transformers would shard the model itself."""


def configure_model(values: Settings) -> tuple[Settings, PretrainedConfig]:
    """Check that the model, as changed by the flags, can be trained exactly.

    Raises:
        ValueError: if it cannot, or if two flags set the same value.
    """
    values = values.decided(rope_scaling=parse_rope_scaling(values["rope_scaling"]))
    overrides = _model_init_kwargs(values["model_init_kwargs"])
    experts = overrides.pop("experts_implementation", None)
    config = load_config(
        values["model_name_or_path"],
        revision=values["model_revision"],
        trust_remote_code=values["trust_remote_code"],
        **overrides,
    )
    if untie_as_stored(config, values["model_name_or_path"], revision=values["model_revision"]):
        values = values.note(
            "the head is not tied to the embeddings: the configuration says tie_word_embeddings true, but the model's "
            "files hold a head with other values, which is trained and saved as it is"
        )
    replaced = ""
    if values["rope_scaling"] is not None:
        if twice := sorted(overrides.keys() & {"rope_parameters", "rope_scaling", "max_position_embeddings"}):
            raise ValueError(f"--rope_scaling and {twice[0]} in --model_init_kwargs set the same. Keep one of them.")
        replaced = replacement(config, values["rope_scaling"])
        config = extended(config, values["rope_scaling"])
    check_model(config)
    _set_experts_implementation(config, experts)
    _set_auxiliary_loss(config, values["router_aux_loss_coef"])
    ModelSizes.of_config(config)  # a model is made of it before anything else is read
    if values.method.reads_pairs:
        _check_model_of_pairs(config)
    if values["dtype"] == "auto" and str(config.dtype).endswith("float16") and "bfloat16" not in str(config.dtype):
        raise ValueError(
            f"--dtype auto means {config.dtype} for {values['model_name_or_path']}, whose gradients underflow "
            "without a scaled loss, which is not supported. Use --dtype float32 or bfloat16."
        )
    whole = load_whole_config(values["model_name_or_path"], revision=values["model_revision"])
    return values.note(*_notes(values, config, whole, replaced)), config


def check_layer_classes(names: Sequence[str], config: PretrainedConfig) -> None:
    """Check that the layers that a profile names for wrapping are the model's.

    Raises:
        ValueError: for a name that no module of the model has. Accelerate would end with it after the weights are read.
    """
    if not names:
        return
    model = without_weights(config)
    own = {type(module).__name__ for module in model.modules()}
    if missing := next((name for name in names if name not in own), None):
        depth = config.get_text_config().num_hidden_layers
        stacks = (module for module in model.modules() if isinstance(module, ModuleList) and len(module) == depth)
        layers = " and ".join(sorted({type(layer).__name__ for stack in stacks for layer in stack}))
        raise ValueError(
            f"fsdp_transformer_layer_cls_to_wrap {missing} in {profile_name()} is no layer of {config.model_type}, "
            f"whose layers are {layers}. Name them, or take the key out: they are then found by themselves."
        )


def _check_model_of_pairs(config: PretrainedConfig) -> None:
    """Check that the model has no loss besides that of pairs."""
    if coefficient := auxiliary_loss_coefficient(config):
        raise ValueError(
            f"The routers of {config.model_type} have an auxiliary loss with the coefficient {coefficient:g}, which is "
            "not supported for pairs of answers. Add --router_aux_loss_coef 0."
        )


def _set_experts_implementation(config: PretrainedConfig, name: object) -> None:
    """Check and set how transformers computes experts; None means its default, grouped_mm where the device has it.

    Raises:
        ValueError: for a model without experts, and for kernels that are not compared with one process.
    """
    if name is None:
        return
    if not has_experts(config):
        raise ValueError(
            f"--model_init_kwargs sets experts_implementation {name}, and {config.model_type} is no mixture of "
            "experts. Leave it out."
        )
    if name not in EXPERTS_IMPLEMENTATIONS:
        raise ValueError(
            f"--model_init_kwargs sets experts_implementation {name}, whose kernels are not compared with one process. "
            f"Use {', '.join(EXPERTS_IMPLEMENTATIONS)}, or leave it out."
        )
    set_experts_implementation(config, name)


def _set_auxiliary_loss(config: PretrainedConfig, coefficient: float | None) -> None:
    """Check and set the routers' auxiliary loss, which is on unless its coefficient is 0, as in TRL.

    Raises:
        ValueError: for a coefficient with a model that has no such loss.
    """
    text = config.get_text_config()
    if text.model_type not in AUXILIARY_LOSS_MODELS:
        if coefficient:
            kind = "has no such loss in transformers" if has_experts(config) else "is no mixture of experts"
            raise ValueError(
                f"--router_aux_loss_coef {coefficient} weights the routers' auxiliary loss, and {text.model_type} "
                f"{kind}. Leave it out."
            )
        return
    if coefficient is not None:
        text.router_aux_loss_coef = coefficient
    text.output_router_logits = bool(text.router_aux_loss_coef)


def _notes(values: Settings, config: PretrainedConfig, whole: PretrainedConfig | None, replaced: str) -> list[str]:
    notes = []
    context, positions = context_length(config), config.get_text_config().max_position_embeddings
    if whole is not None:
        name = shlex.quote(values["model_name_or_path"])
        notes.append(
            f"this is a {whole.model_type} model: its text part ({config.model_type}) is trained, on text alone, and "
            f"saved. To put it back into the whole: longctx export DIR --model_name_or_path {name} --output_dir WHOLE"
        )
    if (scaling := values["rope_scaling"]) is not None:
        notes.append(
            f"positions are scaled ({scaling['rope_type']}): {context:,} = {scaling['factor']:g} × the original context"
            f"{replaced and f'; {replaced}'}"
        )
    elif context > positions:
        notes.append(
            f"the model's context is {context:,}, to which the YaRN in its configuration scales positions; its "
            f"max_position_embeddings, {positions:,}, does not count that"
        )
    if changes_base(values) and whole is None:
        notes.append(
            "the adapter's folder gets a config.json, of the base model as it is trained, to load that model with: "
            "AutoModelForCausalLM.from_pretrained(BASE, config=AutoConfig.from_pretrained(DIR)), then the adapter"
        )
    return notes


def _model_init_kwargs(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Check that the keys of --model_init_kwargs are the configuration's."""
    kwargs = dict(given or {})
    for name in sorted(kwargs.keys() & _PARALLELISM):
        raise ValueError(
            f"--model_init_kwargs sets {name}, and the expert and tensor parallelism of transformers are not "
            "supported here: they lay parameters out over device meshes of their own. torch's clip_grad_norm_ adds up "
            "no norms over several meshes, and engines and checkpoints here shard every parameter over all devices. "
            "Leave it out; FSDP2 and ZeRO-3 shard experts, too. In a loop of your own, longctx.parallelize takes a "
            "model with expert parallelism: see docs/howto/loop.md."
        )
    for name in kwargs.keys() & _OWN_FLAGS.keys():
        raise ValueError(f"--model_init_kwargs sets {name} {kwargs[name]}. Give it as --{_OWN_FLAGS[name]}.")
    return kwargs


def _remedy(config: PretrainedConfig, length: int) -> str:
    """Return the flag that extends the context to this length; an empty text for a model that cannot be extended."""
    try:
        scaling = scaling_for(config, length)
    except ValueError:
        return ""
    return f", which --rope_scaling {shlex.quote(str(scaling))} would do"


def limit_length(values: Settings, config: PretrainedConfig) -> Settings:
    """Check that --max_length is within the context that --rope_scaling sets; by default it is the context.

    Raises:
        ValueError: if it is longer.
    """
    context = context_length(config)
    length = int(values["max_length"] or context)
    if length > context and (scaling := values["rope_scaling"]) is not None:
        factor = factor_for(length, round(context / scaling["factor"]))
        raise ValueError(
            f"--max_length {length} is beyond {context}, to which --rope_scaling with factor {scaling['factor']:g} "
            f"extends the model's context. Use factor {factor}, or --max_length {context}."
        )
    if length > context:
        values = values.note(
            f"max_length {length:,} is beyond the model's context of {context:,}; positions are not rescaled"
            f"{_remedy(config, length)}"
        )
    return values.decided(max_length=length)

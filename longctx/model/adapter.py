"""LoRA adapters by TRL's --use_peft and --lora_… flags: tried on shapes before weights load, equal on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel
from trl import ModelConfig, get_peft_config, get_quantization_config

from longctx.model.files import without_weights
from longctx.model.rows import on_cpu_without_memory
from longctx.model.tiny import TINY

_ADAPTER_SHAPE = ("lora_r", "use_dora", "lora_target_modules")
"""The flags that decide which layers an adapter changes, and how."""
REMEDY = "Name layers such as q_proj v_proj, or all-linear; peft reads a single name as a regular expression: .*q_proj"


def check_adapter(settings: Mapping[str, Any], model_config: PretrainedConfig, engine: str) -> None:
    """Try the adapter on the model's shapes, without weights.

    Args:
        settings: every flag of TRL's ModelConfig.
        engine: deepspeed, fsdp2, fsdp1 or none.

    Raises:
        ValueError: for flags that the model has no place for, and for adapters that are not known to be exact.
    """
    _check_values(settings)
    if engine == "fsdp1":
        raise ValueError(
            "--use_peft on FSDP1 is not verified against one process. Set fsdp_version: 2 (--config_file "
            "configs/fsdp2.yaml)."
        )
    model = without_weights(model_config)
    _check_tied(model, settings["lora_modules_to_save"] or [])
    with torch.device("meta"):
        try:
            adapted = _adapted(model, settings)
        except ValueError as error:
            given = {name: settings[name] for name in _ADAPTER_SHAPE if settings[name] is not None}
            flags = " ".join(f"--{name} {_shown(value)}" for name, value in given.items())
            reason = " ".join(str(error).split()).rstrip(".")
            raise ValueError(
                f"--use_peft does not fit a {model_config.model_type} model with {flags}: {reason}. "
                f"Change these flags, or set --lora_target_modules. {REMEDY}."
            ) from error
    targets = settings["lora_target_modules"]
    if isinstance(targets, list) and len(targets) > 1:
        _check_names("lora_target_modules", targets, adapted.targeted_module_names)
    _check_layers(adapted)
    _check_parameters(adapted, settings["lora_target_parameters"] or [])
    _check_modules_to_save(adapted, settings["lora_modules_to_save"] or [], engine)


def check_quantization(settings: Mapping[str, Any], model_config: PretrainedConfig, engine: str, use_cpu: bool) -> None:
    """Check that 4-bit weights under an adapter (QLoRA) can be the same as on one device.

    FSDP2 shards them as bytes, see `longctx.model.quantized`.

    Args:
        settings: every flag of TRL's ModelConfig.

    Raises:
        ValueError: for what is not verified against one process, with the remedy.
    """
    if not settings["use_peft"]:
        raise ValueError("--load_in_4bit True keeps weights that cannot be trained. Add --use_peft, or leave it out.")
    if settings["model_name_or_path"] == TINY:
        raise ValueError(
            "--load_in_4bit True needs a model with files, and the built-in tiny has none. Name another model."
        )
    if engine not in ("fsdp2", "none"):
        raise ValueError(
            f"--load_in_4bit True on {engine} is not verified against one process. Use --engine fsdp2, or leave it out."
        )
    for name in ("use_dora", "lora_modules_to_save", "lora_target_parameters", "bnb_4bit_quant_storage"):
        if settings.get(name) not in (None, False, [], "uint8"):
            raise ValueError(
                f"--{name} {settings[name]} with --load_in_4bit True is not verified against one process. Leave out "
                "one of the two."
            )
    if use_cpu:
        _check_blocks(model_config)


def quantization_of(settings: Mapping[str, Any]) -> BitsAndBytesConfig | None:
    """How --load_in_4bit keeps the weights of linear layers; products are in the precision of the run."""
    if not settings["load_in_4bit"]:
        return None
    given = {field.name: settings[field.name] for field in fields(ModelConfig)}
    return get_quantization_config(ModelConfig(**given | {"dtype": "bfloat16" if settings["bf16"] else given["dtype"]}))


def _check_blocks(model_config: PretrainedConfig) -> None:
    """bitsandbytes 0.50's kernel for CPUs reads blocks of 64 weights wrongly that go over the end of a row."""
    model = without_weights(model_config)
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and layer is not model.get_output_embeddings() and layer.in_features % 64:
            raise ValueError(
                f"--load_in_4bit True on a CPU: {name} has {layer.in_features} inputs, which is not a multiple of 64, "
                "and which bitsandbytes dequantises wrongly there. Leave it out, or use a GPU."
            )


def changes_base(settings: Mapping[str, Any]) -> bool:
    """Whether an adapter is trained on another model than its base model's folder holds."""
    return bool(settings["use_peft"] and (settings["rope_scaling"] or settings["model_init_kwargs"]))


def add_adapter(model: PreTrainedModel, settings: Mapping[str, Any]) -> PreTrainedModel:
    """Return the model with a new adapter, which alone is trained.

    Its random part is drawn from --seed on the CPU, so that it is the same on every rank, engine and device.
    """
    with torch.random.fork_rng(devices=[]), on_cpu_without_memory(model):
        torch.manual_seed(settings["seed"])
        adapted = _adapted(model, settings)
    adapted.create_or_update_model_card = _no_card
    return adapted


def _no_card(folder: str) -> None:
    """Write no README.md, where peft would save a template that is to be filled in; a run writes its own."""


def obstacle_to_adapting_rows(settings: Mapping[str, Any]) -> str | None:
    """Return why an adapter cannot be made before the weights are read; None if it can."""
    for name in ("use_dora", "lora_modules_to_save"):
        if settings["use_peft"] and settings[name]:
            return f"--{name} makes an adapter from the weights"
    return None


def _shown(value: Any) -> str:
    """Return a flag's value as a command line gives it."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _adapted(model: PreTrainedModel, settings: Mapping[str, Any]) -> Any:
    from peft import get_peft_model

    given = {field.name: settings[field.name] for field in fields(ModelConfig)}
    revision = None if settings["model_revision"] == "main" else settings["model_revision"]
    return get_peft_model(model, get_peft_config(ModelConfig(**given)), revision=revision)


def _check_values(settings: Mapping[str, Any]) -> None:
    if settings["lora_task_type"] != "CAUSAL_LM":
        raise ValueError(f"--lora_task_type {settings['lora_task_type']} is refused: this trains CAUSAL_LM models.")
    if settings["lora_dropout"]:
        raise ValueError(
            f"--lora_dropout {settings['lora_dropout']} is refused: ranks would drop other values than one device. "
            "Leave it out, or use 0."
        )


def _check_names(flag: str, names: Sequence[str], found: Sequence[str]) -> None:
    for name in names:
        if not any(f".{layer}".endswith(f".{name}") for layer in found):
            raise ValueError(f"--{flag} names {name}, which no layer of the model is called. {REMEDY}.")


def _check_layers(adapted: Any) -> None:
    from peft.tuners.lora import Linear, LoraLayer
    from peft.tuners.lora.layer import ParamWrapper

    for name, layer in adapted.base_model.model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        if layer is adapted.get_output_embeddings():
            raise ValueError(
                f"--lora_target_modules adapts {name}, whose weight the fused loss uses directly: the adapter would "
                "never be trained. Leave it out, or train the layer itself with --lora_modules_to_save."
            )
        base = layer.get_base_layer()
        overrides = isinstance(base, torch.nn.Linear) and type(base).forward is not torch.nn.Linear.forward
        if overrides or type(layer) not in (Linear, ParamWrapper):
            raise ValueError(
                f"--lora_target_modules adapts {name} ({type(base).__name__}), which is not a plain linear layer; "
                f"peft's {type(layer).__name__} is not verified for it against one process. Name linear layers, "
                "such as q_proj v_proj."
            )


def _check_parameters(adapted: Any, names: Sequence[str]) -> None:
    """Check that adapted parameters are there, and are the matrices of experts."""
    from peft.tuners.lora.layer import ParamWrapper

    found = []
    for layer in adapted.modules():
        if not isinstance(layer, ParamWrapper):
            continue
        parameter = getattr(layer.get_base_layer(), layer.parameter_name)
        found.append(layer.parameter_name)
        if parameter.ndim != 3:
            raise ValueError(
                f"--lora_target_parameters adapts {layer.parameter_name}, which is not the matrices of experts. "
                "Adapters of other parameters are not verified against one process. Use --lora_target_modules."
            )
    for name in names:
        if name.rpartition(".")[2] not in found:
            raise ValueError(
                f"--lora_target_parameters names {name}, which no parameter of the model is called. Name those of "
                "experts, such as mlp.experts.gate_up_proj mlp.experts.down_proj, or leave it out."
            )


def _check_tied(model: PreTrainedModel, modules_to_save: Sequence[str]) -> None:
    """Refuse to train a copy of one of two tied matrices, which peft itself refuses by other words, or ties again."""
    if not model.config.get_text_config().tie_word_embeddings:
        return
    tied = model.get_input_embeddings(), model.get_output_embeddings()
    for path, layer in model.named_modules():
        if layer in tied and any(f".{path}".endswith(f".{name}") for name in modules_to_save):
            raise ValueError(
                f"--lora_modules_to_save trains {path}, and this model's embeddings are tied to its head: the trained "
                "copy would be tied to the other again. Leave it out, or train all weights (without --use_peft)."
            )


def _check_modules_to_save(adapted: Any, names: Sequence[str], engine: str) -> None:
    from peft.utils import ModulesToSaveWrapper

    model = adapted.base_model.model
    saved = {name: layer for name, layer in model.named_modules() if isinstance(layer, ModulesToSaveWrapper)}
    _check_names("lora_modules_to_save", names, list(saved))
    head = model.get_output_embeddings()
    for name, layer in saved.items():
        if layer is head and engine == "fsdp2":
            raise ValueError(
                f"--lora_modules_to_save trains {name}, whose gradients the fused loss would take from one rank alone "
                "on FSDP2. Use --engine deepspeed, or leave it out."
            )

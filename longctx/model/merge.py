"""LoRA adapters merged by PEFT's own arithmetic, one module at a time.

The model and the adapter are put together on the meta device, where parameters remember where they are stored. Each
module with a part of the adapter is then given its values, and merged as `merge_and_unload` merges it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.dataclasses import type_validator
from torch import Tensor, nn
from transformers import PreTrainedModel

from longctx.model.config_file import BOUNDS, check_size, read_object
from longctx.model.files import FLOATS, check_tensors
from longctx.model.rows import read_whole, stored_in
from longctx.model.streamed import NewTensor, computed
from longctx.untrusted.confined import OutOfBounds, confined
from longctx.untrusted.files import check_file

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_KEYS: dict[str, Any] = {
    **{"r": int, "lora_alpha": int | float, "bias": str, "layers_to_transform": list[int] | int | None},
    **{"rank_pattern": dict[str, int] | None, "alpha_pattern": dict[str, int | float] | None},
    **dict.fromkeys(("fan_in_fan_out", "lora_bias", "use_dora", "use_rslora"), bool),
    **dict.fromkeys(("exclude_modules", "layers_pattern", "target_modules"), list[str] | str | None),
    **dict.fromkeys(("modules_to_save", "target_parameters"), list[str] | None),
    **dict.fromkeys(("base_model_name_or_path", "revision"), str | None),
}
"""Keys of adapter_config.json that affect a merge, with the types that they must have."""

_OF_TRAINING = {"auto_mapping", "eva_config", "inference_mode", "lora_dropout", "megatron_core", "peft_version"}
_OF_TRAINING |= {"qalora_group_size", "runtime_config"}
"""Keys that say nothing about the weights. Every other key must be at its default."""

_KEEP_BASE = (True, False, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that leave the base model's weights as they are."""


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return what an adapter's adapter_config.json says of its weights, for `peft.LoraConfig`.

    Raises:
        ValueError: for an adapter that is not known to be merged exactly, and for values of wrong types.
    """
    from peft import LoraConfig

    path = check_size(check_file(folder / ADAPTER_CONFIG))
    try:
        values = read_object(path)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}. Copy the adapter again.") from error
    default = LoraConfig().to_dict()
    for key, value in values.items():
        if key in _KEYS:
            try:
                type_validator(key, value, _KEYS[key])
            except TypeError:
                name = getattr(_KEYS[key], "__name__", _KEYS[key])
                raise ValueError(f"{path} sets {key} to {_shown(value)}; expected {name}. Correct it.") from None
            continue
        allowed = {"init_lora_weights": _KEEP_BASE, "task_type": (None, "CAUSAL_LM")}.get(key, (default.get(key),))
        if key not in _OF_TRAINING and value not in allowed:
            raise ValueError(
                f"{path} sets {key} to {_shown(value)}, with which a merge is not known to be exact: LoRA, rsLoRA and "
                "DoRA adapters of causal language models are merged. Merge this one by PEFT's merge_and_unload."
            )
    return {key: value for key, value in values.items() if key in _KEYS and value is not None}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def adapted(model: PreTrainedModel, folder: Path) -> tuple[Any, bool]:
    """Put an adapter into a model on the meta device; its parameters then remember where they are stored.

    Returns:
        The PeftModel, and whether all tensors are in it as they are stored. PEFT converts some for models whose
        weights transformers converts.

    Raises:
        ValueError: if the two do not fit together, or if finding out takes more time or memory than any adapter.
    """
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    values, file = read_adapter_config(folder), check_file(folder / ADAPTER_WEIGHTS)
    if not file.exists():
        raise ValueError(f"{file} is missing. Copy the adapter's folder again, or save the adapter as safetensors.")
    check_tensors([file])
    weights: dict[str, Any] = {}
    for name, weight in stored_in(file):
        if weight.kind not in FLOATS:
            raise ValueError(f"{file}: {name} is of type {weight.kind}; expected {', '.join(FLOATS)}. Copy it again.")
        weights[name] = nn.Parameter(torch.empty(weight.shape, dtype=weight.stored, device="meta"), False)
        weights[name].stored = weight

    def put_in() -> Any:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            return get_peft_model(model, LoraConfig(**values, inference_mode=True))

    try:
        confined(lambda: put_in() and None, BOUNDS)  # names may be matched by regular expressions without end
        with_adapter = put_in()
        expected = with_adapter.state_dict()
        result: Any = set_peft_model_state_dict(with_adapter, dict(weights), low_cpu_mem_usage=True)
        held: dict[str, Any] = with_adapter.state_dict(keep_vars=True)
        missing = [name for name in result.missing_keys if ".default" in name]
        for name in missing + result.unexpected_keys:
            reason = "is missing" if missing else "has no place in it"
            raise ValueError(f"the tensor {name.replace('.default', '')} {reason}")
    except Exception as error:  # whatever PEFT makes of such values
        kind = "" if isinstance(error, OutOfBounds | ValueError) else f" ({type(error).__name__})"
        raise ValueError(
            f"The adapter {folder} does not fit a {model.config.model_type} model: "
            f"{' '.join(str(error).split()).rstrip('.')}{kind}. Name its own base with --model_name_or_path, or copy "
            "the adapter again."
        ) from error
    for name, value in held.items():
        if hasattr(value, "stored") and value.stored.file == file:
            value.stored = replace(value.stored, dtype=expected[name].dtype)
    used = {id(value) for value in held.values()}
    return with_adapter, all(id(weight) in used for weight in weights.values())


def merged(with_adapter: Any, names: Mapping[str, str]) -> dict[str, NewTensor] | None:
    """Return the weights that an adapter changes, by their names in the base's files.

    Args:
        with_adapter: as `adapted` returns it; the base's parameters remember where they are stored, too.
        names: those of the base's weights in its files, by their names in the model.

    Returns:
        None if a weight is not stored as it is in the model.

    Raises:
        ValueError: if the adapter changes one of two tied matrices.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    model = with_adapter.get_base_model()
    changed: dict[str, NewTensor] = {}
    pending: dict[str, Tensor] = {}
    prefixes: tuple[str, ...] = ()

    def take(prefix: str, module: Any, name: str) -> Tensor:
        if name not in pending:
            pending.update({f"{prefix}{key}": value for key, value in _merge(prefix, module).items()})
        return pending.pop(name)

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper) and not name.startswith(prefixes):
            prefix, base = f"{name}.", getattr(module, "original_module", None) or module.get_base_layer()
            prefixes += (prefix,)
            for key, value in base.state_dict().items():
                values = partial(take, prefix, module, prefix + key)
                changed[prefix + key] = computed(prefix + key, value, values)
    for name, value in model.named_parameters():  # biases and embeddings that an adapter replaces
        weight = getattr(value, "stored", None)
        if weight is not None and weight.file.name == ADAPTER_WEIGHTS and not name.startswith(prefixes):
            changed[name] = computed(name, value, partial(read_whole, value))
    tied = {model.get_input_embeddings(), model.get_output_embeddings()}
    for name, module in model.named_modules() if model.config.get_text_config().tie_word_embeddings else ():
        if module in tied and any(key.startswith(f"{name}.") for key in changed):
            raise ValueError(
                f"The adapter changes {name}, and this model's embeddings are tied to its head: merged, the other of "
                "the two would change as well. Untie them in the base (a lm_head.weight of its own, and "
                "tie_word_embeddings false in config.json), and name that with --model_name_or_path."
            )
    return {names[name]: tensor for name, tensor in changed.items()} if changed.keys() <= names.keys() else None


@torch.no_grad()
def _merge(prefix: str, module: Any) -> dict[str, Tensor]:
    """Return the merged weights of a module, as PEFT's merge_and_unload makes them."""
    twin = copy.deepcopy(module)
    held = {name: value for name, value in module.state_dict(keep_vars=True).items() if hasattr(value, "stored")}
    replaced = "original_module."  # of modules_to_save
    values = {name: read_whole(value) for name, value in held.items() if not name.startswith(replaced)}
    twin.load_state_dict(values, strict=False, assign=True)
    del values
    try:
        if hasattr(twin, "unload_and_optionally_merge_module"):  # wrappers of whole modules and of single parameters
            return twin.unload_and_optionally_merge_module(True, False, None).state_dict()
        twin.merge()
        return twin.get_base_layer().state_dict()
    except RuntimeError as error:
        raise ValueError(f"PEFT cannot merge {prefix.rstrip('.')}: {' '.join(str(error).split())}") from error

"""What longctx replaces in transformers' models, configurations and Trainer, and the private names that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime, tzinfo
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

# Forward functions of modules


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Make a module compute `forward`, which takes the call's arguments without the module.

    `torch.nn.Module.__call__` looks `forward` up on the instance, so hooks stay around it. transformers offers no
    other way in: its registries hold attention, and not heads, MLPs, layers or mixers.
    """
    module.forward = forward


def change_class(instance: Any, cls: type) -> None:
    """Make `instance` an object of a subclass of its class.

    `GradientCheckpointingLayer.__call__` wraps checkpointing around the forward of the layer's class.
    """
    instance.__class__ = cls


def with_names(function: FunctionType, names: Mapping[str, Any]) -> FunctionType:
    """Return a copy of `function` that finds other values under some of its global names.

    A modeling file of transformers calls the functions that mix tokens by their global names, and models share them.
    """
    space = {**function.__globals__, **names}
    copy = FunctionType(function.__code__, space, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = function.__annotations__
    return copy


# `copy.deepcopy` copies what a `partial` holds, so that a copy of the model gets functions of its own.


def keep_mode(model: Any) -> None:
    """Let `model.train()` and `eval()` return at once if the model is in that mode, as all of its modules then are.

    transformers' Trainer sets the mode in each micro-batch, and torch visits every module.
    """
    model.train(model.training)
    model.train = partial(_in_mode, model, model.train)


def _in_mode(model: Any, train: Callable[[bool], Any], mode: bool = True) -> Any:
    return model if model.training == mode else train(mode)


def list_parameters(model: Any) -> None:
    """Make `model.parameters()` read a list, until the attribute is deleted. No parameter may be replaced meanwhile.

    The Trainer and accelerate call it three times a step, to clip gradients and to reset them. Each time, torch would
    search all modules.
    """
    model.parameters = partial(_listed, [*model.parameters()], model.parameters)


def _listed(parameters: list[Any], search: Callable[[bool], Iterator[Any]], recurse: bool = True) -> Iterator[Any]:
    return iter(parameters) if recurse else search(recurse)


# Activation checkpointing


def enable_checkpointing(model: Any, **kwargs: Any) -> None:
    """Switch activation checkpointing on, by the name of transformers 5.23 and newer or the one before it."""
    name = "activation_checkpointing_enable"
    enable = getattr(model, name) if hasattr(model, name) else model.gradient_checkpointing_enable
    enable(**kwargs)


def wrap_checkpointing_setter(model: PreTrainedModel, setter: Callable[..., None]) -> None:
    """Call `setter` with transformers' own setter first, wherever activation checkpointing is switched on.

    `gradient_checkpointing_enable`, the Trainer and peft all call `PreTrainedModel._set_gradient_checkpointing`.
    """
    model._set_gradient_checkpointing = partial(setter, model._set_gradient_checkpointing)


def checkpointing_of(layer: Any) -> Callable[..., Any] | None:
    """Return the function that runs a `GradientCheckpointingLayer` in training; None if it is not checkpointed."""
    return layer._gradient_checkpointing_func if layer.gradient_checkpointing else None


def set_checkpointing_of(layer: Any, run: Callable[..., Any] | None) -> None:
    """Set what `checkpointing_of` returns. transformers sets one function for all layers."""
    layer.gradient_checkpointing = run is not None
    if run is not None:
        layer._gradient_checkpointing_func = run


# Models and configurations


def attention_implementation(model: PreTrainedModel) -> str | None:
    """Return the name that `set_attn_implementation` was given; its getter is private."""
    return model.config._attn_implementation


def forget_implementations(config: PretrainedConfig) -> None:
    """Forget the implementations of attention and experts of a config.json, which may name code on the hub."""
    config._attn_implementation = config._experts_implementation = None


def set_experts_implementation(config: PretrainedConfig, name: str) -> None:
    """Set the kernels of experts, which a model reads when it is built; the public setter is a model's."""
    config._experts_implementation = name


def supports_sdpa(model: PreTrainedModel) -> bool:
    """Return whether the model's attention can be torch's, or only transformers' own with a matrix of scores."""
    return bool(model._supports_sdpa)


def tied_weights(model: PreTrainedModel) -> set[str]:
    """Return the names of weights that no file has to hold, because they are those of another layer."""
    return set(model._tied_weights_keys or {})


def leave_only_present_layers(model: PreTrainedModel) -> None:
    """Leave only classes that are present in `_no_split_modules`, by which FSDP shards.

    accelerate has to find all of them, and Qwen3.5's text model names vision layers, too.
    """
    present = {type(module).__name__ for module in model.modules()}
    model._no_split_modules = [name for name in model._no_split_modules or () if name in present]


def save_without_conversions(model: PreTrainedModel) -> None:
    """Save the model as any model of its type. It was made from states, whose names are not those of files."""
    model._weight_conversions = None


def decoder_of(model: PreTrainedModel) -> Any:
    """Return what is below the head of a model. `get_decoder` returns a Llama 4 model itself, with its head."""
    decoder = model.get_decoder()
    return decoder.model if hasattr(decoder, "lm_head") else decoder


ROUTERS = ("TopKRouter", "TopkRouter", "MoEV1Gate")
"""How the names of routers end in modeling files of transformers."""


def router_class(model: PreTrainedModel) -> type | None:
    """Return the class of the model's routers, which transformers names to record their logits.

    Before 5.19 it names none for some models, and for EXAONE MoE the block around the router.
    """
    recorder = (getattr(decoder_of(model), "_can_record_outputs", None) or {}).get("router_logits")
    named = getattr(recorder, "target_class", recorder)
    if named is not None and not named.__name__.endswith("Block"):
        return named
    return next((type(module) for module in model.modules() if type(module).__name__.endswith(ROUTERS)), None)


def commit_of(config: PretrainedConfig) -> str:
    """Return the commit on the hub that a configuration was read from; empty for a folder."""
    return getattr(config, "_commit_hash", None) or ""


def needs_whole_weights(config: PretrainedConfig) -> bool:
    """Return whether transformers reads the model's parameters while it loads weights. Under ZeRO-3, these are empty.

    It does so to split one matrix into queries, keys and values, and, for Youtu, to set the embedding of the padding
    token to zero.
    """
    if config.model_type == "youtu":
        return True
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    conversions = get_checkpoint_conversion_mapping(config.model_type) or []
    steps = (step for conversion in conversions for step in getattr(conversion, "operations", ()))
    return any(type(step).__name__ == "Split" for step in steps)  # which releases before 5.24 do not have


def changes_weights(model: PreTrainedModel) -> bool:
    """Return whether weights of the files were renamed or converted when the model was loaded, or are others' weights.

    The latter are those of `save_without_conversions`.
    """
    return model._weight_conversions != []


ON_META: Mapping[str, Any] = {"device_map": {"": "meta"}}
"""A keyword of `from_pretrained`."""


def without_values() -> AbstractContextManager[None]:
    """Return a context in which `from_pretrained` with ON_META does all but read values.

    Weights and saved buffers are then on the meta device. All other buffers are computed, as they are on the ranks of
    FSDP that are not the first of their node.
    """
    from accelerate.utils import patch_environment

    rank = {"LOCAL_RANK": "-1", "ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    return patch_environment(**rank)


def drop_values(model: PreTrainedModel) -> None:
    """Put all parameters on the meta device, where releases before 5.24 have made zeros. It unties them there."""
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None and not value.is_meta:
                module._parameters[name] = type(value)(value.to("meta"), value.requires_grad)


@contextmanager
def unpartitioned() -> Iterator[None]:
    """Keep models whole under ZeRO-3, which otherwise cuts each model that is made or loaded.

    A reference to DeepSpeed's configuration is what `is_deepspeed_zero3_enabled` reads.
    """
    from transformers.integrations import deepspeed

    reference = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed._hf_deepspeed_config_weak_ref = None
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = reference


@contextmanager
def quantized_weights_changed(change: Callable[[Any], None]) -> Iterator[None]:
    """Call `change` with every 4-bit weight as soon as it is quantised, before the next weight is read."""
    from transformers.integrations.bitsandbytes import Bnb4bitQuantize

    convert = Bnb4bitQuantize.convert

    def convert_and_change(*args: Any, **kwargs: Any) -> dict[str, Any]:
        converted = convert(*args, **kwargs)
        for weight in converted.values():
            change(weight)
        return converted

    Bnb4bitQuantize.convert = convert_and_change
    try:
        yield
    finally:
        Bnb4bitQuantize.convert = convert


# Chat templates


def tell_templates_time(moment: datetime) -> None:
    """Make `strftime_now` of chat templates format this moment, in this process, instead of the present.

    transformers offers no other way in: it turns functions among a template's variables into text.
    """
    from transformers.utils import chat_template_utils

    class Stopped(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return moment

    chat_template_utils.datetime = Stopped  # type: ignore[misc]


# The Trainer


def use_one_device(args: TrainingArguments) -> None:
    """Keep the Trainer from copying the model to all GPUs that one process sees (DataParallel)."""
    if args.n_gpu > 1:
        args._n_gpu = 1


def log_sums(trainer: Any) -> dict[str, float]:
    """Return the Trainer's sums of losses: since the last log entry, which step had one, and over the run."""
    return {
        "loss": float(trainer._tr_loss),
        "last_logged": trainer._globalstep_last_logged,
        "total_loss": trainer._total_loss_scalar,
    }


def restore_log_sums(trainer: Any, *, loss: float, last_logged: int, total_loss: float) -> None:
    """Restore what `log_sums` returned, after the Trainer has reset it at the start of training."""
    trainer._tr_loss += loss
    trainer._globalstep_last_logged = last_logged
    trainer._total_loss_scalar = total_loss


def mean_running_loss(trainer: Any) -> Any:
    """Return this rank's mean loss of the steps since the last log entry, a tensor on the device."""
    return trainer._tr_loss / (1 + trainer.state.global_step - trainer._globalstep_last_logged)


def average_running_loss(trainer: Any) -> None:
    """Replace this rank's loss since the last log entry, from which the mean of a run is made, by that of all ranks."""
    trainer._tr_loss = trainer.accelerator.reduce(trainer._tr_loss, "mean")


def memory_tracker(trainer: Trainer) -> Any:
    """Return the Trainer's tracker of memory (--skip_memory_metrics False).

    It tells evaluation from prediction by the name of the function that calls its methods, so no other may call them.
    """
    return trainer._memory_tracker

"""What each decoder layer keeps for its backward pass, which can differ from layer to layer.

Under activation checkpointing a layer keeps its input alone, and computes everything again; or attention's output as
well, which saves the most expensive part; or everything, as without checkpointing. What it keeps waits on the device or
in host memory. The backward pass frees the last layer first, so the last layers keep most, and the first ones go to
host memory: a kind of layer is described by a number of layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from longctx.attention.operator import selective_checkpoint_contexts
from longctx.sequence.host_tensors import saved_in_place
from longctx.upstream.transformers_internals import checkpointing_of, set_checkpointing_of, wrap_checkpointing_setter


@dataclass(frozen=True, kw_only=True)
class LayerCheckpoints:
    """What the layers of a model keep, by numbers of layers."""

    whole: int = 0
    """The last layers, which are not checkpointed and keep everything."""
    selective: int | None = 0
    """The last of the checkpointed layers, which keep attention's output besides their input; None means all."""
    offloaded: int | None = None
    """The first of the checkpointed layers, which alone are offloaded if activations are; None means all layers, those
    that keep everything too."""


def check_layers(checkpoints: LayerCheckpoints, num_layers: int) -> None:
    """Raise ValueError if a model of this many layers does not have those that `checkpoints` names."""
    checkpointed = num_layers - checkpoints.whole
    for name, layers, most in (
        ("whole_layers", checkpoints.whole, num_layers),
        ("selective", checkpoints.selective, checkpointed),
        ("offload", checkpoints.offloaded, checkpointed),
    ):
        if layers is not None and not 0 <= layers <= most:
            rest = f", of which {checkpointed} are checkpointed" if checkpoints.whole and name != "whole_layers" else ""
            raise ValueError(
                f"{name} {layers} is not a number of this model's layers: it has {num_layers}{rest}. Use 0 to {most}."
            )


def install_checkpoints(model: PreTrainedModel, checkpoints: LayerCheckpoints) -> None:
    """Make the layers of `model` keep what `checkpoints` says, whenever activation checkpointing is switched on.

    Reentrant checkpointing always computes attention again, and is refused for layers that share keys and values.

    Raises:
        ValueError: if the model has fewer layers.
    """
    num_layers = sum(isinstance(module, GradientCheckpointingLayer) for module in model.modules())
    check_layers(checkpoints, num_layers)
    shares = bool(getattr(model.config.get_text_config(), "num_kv_shared_layers", 0))
    if shares or checkpoints != LayerCheckpoints():
        wrap_checkpointing_setter(model, partial(_set_by_layer, model, checkpoints, shares))
        layers = (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
        if run := next((run for layer in layers if (run := checkpointing_of(layer))), None):  # it is on already
            _set_by_layer(model, checkpoints, shares, _leave, gradient_checkpointing_func=run)


def _set_by_layer(
    model: nn.Module,
    checkpoints: LayerCheckpoints,
    shares_keys: bool,
    set_checkpointing: Callable[..., None],
    enable: bool = True,
    gradient_checkpointing_func: Callable[..., Any] = checkpoint,
    **kwargs: Any,
) -> None:
    """Call transformers' own setter, which all ways to switch checkpointing on use, then set what layers keep."""
    given = getattr(gradient_checkpointing_func, "keywords", {})
    if enable and shares_keys and given.get("use_reentrant") is True:
        raise ValueError(
            "use_reentrant is True, and layers of this model share keys and values, whose gradients reentrant "
            "checkpointing loses. Set use_reentrant to False in activation_checkpointing_kwargs."
        )
    set_checkpointing(enable=enable, gradient_checkpointing_func=gradient_checkpointing_func, **kwargs)
    if not enable:
        return
    keeps_attention = gradient_checkpointing_func
    if given.get("use_reentrant") is not True and "context_fn" not in given:
        keeps_attention = partial(
            gradient_checkpointing_func, use_reentrant=False, context_fn=selective_checkpoint_contexts
        )
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers[len(layers) - checkpoints.whole :]:
        set_checkpointing_of(layer, None)
    checkpointed = [layer for layer in layers if checkpointing_of(layer)]
    num_selective = len(checkpointed) if checkpoints.selective is None else checkpoints.selective
    for layer in checkpointed[len(checkpointed) - num_selective :]:
        set_checkpointing_of(layer, keeps_attention)
    if checkpoints.offloaded is not None:
        for layer in {*layers} - {*checkpointed[: checkpoints.offloaded]}:
            set_checkpointing_of(layer, partial(_on_device, checkpointing_of(layer) or _call))


def _leave(**kwargs: Any) -> None:
    """Leave the layers as they are, in place of transformers' setter, because they are checkpointed already."""


def _call(forward: Callable[..., Any], *args: Any) -> Any:
    return forward(*args)


def _on_device(run: Callable[..., Any], forward: Callable[..., Any], *args: Any) -> Any:
    """Run a layer so that what it saves stays on the device, whatever hooks around the model do."""
    with saved_in_place():
        return run(forward, *args)

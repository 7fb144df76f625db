"""What the layers of a model keep for the backward pass, by numbers of layers, for `longctx.layers.checkpoints`.

This module loads no library, so that flags can be checked without one.
"""

from __future__ import annotations

from dataclasses import dataclass


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

"""Check a model before step 1, once its engine has wrapped it and the Trainer has made its last changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from longctx.launch.console import say
from longctx.model.saving import try_saving
from longctx.ranks.agreement import gather_objects


class UntrainableError(ValueError):
    """Raised on every rank for a model that has weights which are not numbers, or that could not be saved."""


def check_before_training(trainer: Any, nonfinite: Sequence[str]) -> None:
    """Check that the weights are finite and that the model can be saved. Called by all ranks together.

    Embeddings may be NaN where a word is never used.

    Args:
        nonfinite: names of trained parameters with NaN or infinite values in this rank's part.

    Raises:
        UntrainableError: on every rank.
    """
    if reasons := [reason for reason in gather_objects(_objection(trainer, nonfinite)) if reason]:
        raise UntrainableError(reasons[0])


def _objection(trainer: Any, nonfinite: Sequence[str]) -> str | None:
    embeddings = tuple(name for name, module in trainer.model.named_modules() if isinstance(module, nn.Embedding))
    if spoilt := [name for name in nonfinite if not name.startswith(embeddings)]:
        others = f", and so have {len(spoilt) - 1} other parameters" if len(spoilt) > 1 else ""
        return (
            f"--model_name_or_path {trainer.model.config.name_or_path}: {spoilt[0]} has NaN or infinite "
            f"values{others}. Download the model again, or name another."
        )
    if trainer.is_world_process_zero():
        try:
            for note in try_saving(trainer.model, [trainer.processing_class, trainer.base_config]):
                say(note)
        except ValueError as error:
            return str(error)
    return None

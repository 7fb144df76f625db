"""Check a trainer before it is made, and its model before step 1, once the Trainer has made its last changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from transformers import TrainingArguments

from longctx.launch.console import say
from longctx.model.saving import try_saving
from longctx.packing import PackedStream
from longctx.ranks.agreement import gather_objects

_REPLACED = (
    *("compute_loss", "prediction_step", "evaluate", "predict", "get_train_dataloader", "get_eval_dataloader"),
    *("_get_train_sampler", "_get_eval_sampler", "get_batch_samples", "_prepare_inputs"),
)
"""Methods of a trainer that the mixin overrides without calling them."""

_STOCK = ("transformers.trainer", "trl.trainer.sft_trainer", "trl.trainer.base_trainer")
"""Modules of trainers whose methods the mixin takes the place of."""

_IGNORED = ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics", "model_init")


def check_own_trainer(trainer: type, mixin: type, args: TrainingArguments, keywords: Mapping[str, Any]) -> None:
    """Check that a class below the mixin does nothing, and is asked for nothing, that the mixin would leave out.

    Args:
        keywords: those that the class below gets.

    Raises:
        ValueError: for a method that would never be called, and for an argument that would have no effect.
    """
    for base in trainer.__mro__[trainer.__mro__.index(mixin) + 1 :]:
        lost = [method for method in _REPLACED if method in vars(base)]
        if lost and base.__module__ not in _STOCK and not issubclass(mixin, base):
            raise ValueError(
                f"{base.__name__}.{lost[0]} would never be called: {mixin.__name__} computes the loss of supervised "
                f"fine-tuning and deals rows over sequence groups. Put {mixin.__name__} on SFTTrainer or Trainer, and "
                f"define {lost[0]} in {trainer.__name__}."
            )
    for keyword in _IGNORED:
        if keywords.get(keyword) is not None:
            raise ValueError(
                f"{keyword} would have no effect: no rank has the logits and the labels of a whole batch. Leave it out."
            )
    if keywords.get("objective") is None and getattr(args, "loss_type", "nll") == "dft":
        raise ValueError("loss_type 'dft' is not computed over sequence groups. Use 'nll', or pass an objective.")
    rows = keywords["train_dataset"]
    if not hasattr(rows, "__len__") and not isinstance(rows, PackedStream):
        raise ValueError(
            f"train_dataset is of the type {type(rows).__name__}, and rows are dealt over sequence groups by their "
            "numbers. Pass a map-style data set, or a PackedStream."
        )


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

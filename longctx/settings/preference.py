"""The flags of `longctx dpo`, with the names and defaults of TRL's DPOConfig, and the checks between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from transformers import PretrainedConfig
from trl import SFTConfig

from longctx.data.kinds import PAIRS
from longctx.model.allow_list import auxiliary_loss_coefficient
from longctx.settings.checks import check
from longctx.training.preference import LOSSES, SFT, WITH_F_DIVERGENCES, uses_reference


@dataclass
class PreferenceConfig(SFTConfig):
    """The flags of SFTConfig, such as those of packing, and of DPOConfig. Only its fields are read."""

    learning_rate: float = field(default=1e-6, metadata={"help": "Peak learning rate."})
    loss_type: list[str] = field(
        default_factory=lambda: ["sigmoid"],
        metadata={"help": "Losses, of which several are added up with --loss_weights. Default: sigmoid."},
    )
    loss_weights: list[float] | None = field(
        default=None, metadata={"help": "Weight of each of --loss_type. Default: 1 each."}
    )
    beta: float = field(
        default=0.1, metadata={"help": "How far the model may move from the reference: less for a larger one."}
    )
    label_smoothing: float = field(
        default=0.0, metadata={"help": "Share of pairs whose preference is wrong, for robust, exo_pair and simpo."}
    )
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = field(
        default="reverse_kl", metadata={"help": "Divergence between the model and the reference."}
    )
    f_alpha_divergence_coef: float = field(default=0.5, metadata={"help": "The α of alpha_divergence."})
    discopop_tau: float = field(default=0.05, metadata={"help": "Temperature of discopop."})
    simpo_gamma: float = field(default=0.5, metadata={"help": "Margin of simpo, as in TRL's CPOConfig."})
    ld_alpha: float | None = field(
        default=None, metadata={"help": "Weight of the tokens that only the longer answer of a pair has (LD-DPO)."}
    )
    reference_free: bool = field(
        default=False,
        metadata={"help": "Use a reference that gives all answers the same probability, and compute none."},
    )
    precompute_ref_log_probs: bool = field(
        default=True, metadata={"help": "Compute the reference's log-probabilities before training; always so here."}
    )
    precompute_ref_batch_size: int | None = field(
        default=None,
        metadata={"help": "Number of sequences of that computation at a time. Default: per_device_train_batch_size."},
    )
    share_prompts: bool = field(
        default=True,
        metadata={
            "help": "Compute the prompt of a pair once for both answers, where the model and the run do so exactly; "
            "else it counts with each answer, and the run says why."
        },
    )
    disable_dropout: bool = field(default=True, metadata={"help": "Dropout is 0 in any case."})
    use_weighting: bool = field(default=False, metadata={"help": "Weigh pairs as WPO does; not supported."})
    sync_ref_model: bool = field(default=False, metadata={"help": "Move the reference during training; not supported."})
    ref_model_mixup_alpha: float = field(default=0.6, metadata={"help": "For --sync_ref_model."})
    ref_model_sync_steps: int = field(default=512, metadata={"help": "For --sync_ref_model."})


OWN = frozenset(f.name for f in fields(PreferenceConfig)) - frozenset(f.name for f in fields(SFTConfig))
"""Flags that SFTConfig does not have."""

METRICS = ("rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected")
"""Metrics of an evaluation that can choose the best model, besides those of every method."""

NOT_BUILT: Mapping[str, tuple[Any, ...]] = {
    "assistant_only_loss": (False,),
    "completion_only_loss": (None,),
    "dataset_streaming": (False,),
    "dataset_text_field": ("text",),
    "label_smoothing_factor": (0.0,),
    "overlong": ("raise", "truncate", "drop"),
    "packing_strategy": ("bfd",),
    "streaming": (False,),
    "sync_ref_model": (False,),
    "use_weighting": (False,),
}
"""Flags of which only these values are implemented for pairs; see `longctx.settings.trl_flags`."""

_OF_ANSWERS = "the log-probabilities of a pair are those of its answers, all of their tokens. Leave it out"
REASONS: Mapping[str, str] = {
    "assistant_only_loss": _OF_ANSWERS,
    "completion_only_loss": _OF_ANSWERS,
    "dataset_streaming": "the reference's log-probabilities are computed for the whole data set before training",
    "dataset_text_field": "pairs are read from the columns 'prompt', 'chosen' and 'rejected'. Leave it out",
    "label_smoothing_factor": "it smooths the labels of tokens. That of preferences is --label_smoothing",
    "overlong": "a piece of an answer cannot be compared with the other answer",
    "packing_strategy": "a pair must not be cut",
    "streaming": "the reference's log-probabilities are computed for the whole data set before training",
    "sync_ref_model": "the reference's log-probabilities are computed once, before training. Leave it out",
    "use_weighting": "its weights need the probabilities of all words at every token. Leave it out",
}


@check("loss_type", "loss_weights", "f_divergence_type")
def check_losses(settings: Mapping[str, Any]) -> list[str]:
    """Check that the losses of pairs are built, and that they go together; return notes.

    Raises:
        ValueError: for the first that is not.
    """
    losses, weights = settings["loss_type"], settings["loss_weights"]
    for name in losses:
        if name not in LOSSES and name != SFT:
            sorts = name in ("aot", "aot_unpaired")
            reason = "it sorts the pairs of a batch, so that it depends on how pairs are spread over batches. " * sorts
            raise ValueError(f"--loss_type {name} is refused: {reason}Use any of {', '.join([*LOSSES, SFT])}.")
    if weights is not None and len(weights) != len(losses):
        raise ValueError(f"--loss_weights has {len(weights)} values, and --loss_type {len(losses)}. Give one for each.")
    if "simpo" in losses and len(set(losses)) > 1:
        raise ValueError(
            "--loss_type simpo has means over tokens as rewards, and the others have sums. Use simpo alone."
        )
    if settings["f_divergence_type"] != "reverse_kl" and (wrong := set(losses) - WITH_F_DIVERGENCES):
        raise ValueError(
            f"--f_divergence_type {settings['f_divergence_type']} with --loss_type {min(wrong)}: it has a meaning only "
            f"for differences of rewards. Use {', '.join(sorted(WITH_F_DIVERGENCES))}, or leave it out."
        )
    _check_parameters(settings)
    notes = [] if settings["precompute_ref_log_probs"] else ["the reference is computed before training in any case"]
    if uses_reference(settings):
        return [*notes, "reference: the model before training, whose log-probabilities are computed once"]
    return [*notes, "reference: none"]


@check("beta", "label_smoothing", "ld_alpha", "precompute_ref_batch_size")
def _check_parameters(settings: Mapping[str, Any]) -> None:
    """Check that the parameters of losses are in their ranges."""
    losses, smoothing, beta = settings["loss_type"], settings["label_smoothing"], settings["beta"]
    if not beta > 0:
        raise ValueError(f"--beta {beta} is not above 0: the loss would not depend on the answers. Use 0.1, say.")
    limit = 0.5 if "robust" in losses else 1.0
    if not 0 <= smoothing < limit:
        raise ValueError(f"--label_smoothing {smoothing} is out of range: use a number from 0 to below {limit}.")
    if "exo_pair" in losses and smoothing == 0:
        raise ValueError("--loss_type exo_pair needs --label_smoothing above 0. Its paper recommends 1e-3.")
    alpha = settings["ld_alpha"]
    if alpha is not None and not 0 <= alpha <= 1:
        raise ValueError(f"--ld_alpha {alpha} is out of range: use a number from 0 to 1.")
    size = settings["precompute_ref_batch_size"]
    if size is not None and size < 1:
        raise ValueError(f"--precompute_ref_batch_size {size} is below 1. Use at least 1.")


@check("router_aux_loss_coef")
def check_model_of_pairs(config: PretrainedConfig) -> None:
    """Check that the model has no loss besides that of pairs."""
    if coefficient := auxiliary_loss_coefficient(config):
        raise ValueError(
            f"The routers of {config.model_type} have an auxiliary loss with the coefficient {coefficient:g}, which is "
            "not supported for pairs of answers. Add --router_aux_loss_coef 0."
        )


def for_pairs(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that follow from training on pairs."""
    return {"dataset_text_field": PAIRS, "padding_free": True}

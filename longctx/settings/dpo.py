"""The flags that `longctx dpo` adds or changes, with the names and defaults of TRL's DPOConfig, and its rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from longctx.settings.flags import SFT
from longctx.settings.schema import BOOL, FLOAT, FLOATS, INT, TEXT, TEXTS, Flag, Method, Rule

LOSSES = (
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down"),
    *("discopop", "sigmoid_norm", "simpo", "sft"),
)
"""Losses of --loss_type. aot sorts the pairs of a batch, so that it depends on how pairs are spread over batches."""
WITH_F_DIVERGENCES = frozenset(("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"))
"""Losses of a difference of scores, in which a partition function cancels."""

_OF_ANSWERS = "the log-probabilities of a pair are those of its answers, all of their tokens"
_AT_ONCE = "the reference's log-probabilities are computed for the whole data set before training"


def _changed(name: str, **facts: Any) -> Flag:
    return replace(SFT.flags[name], **facts)


# fmt: off
_ROWS = (
    _changed("learning_rate", default=1e-6),
    Flag("loss_type", TEXTS, ("sigmoid",),
         "sigmoid, ipo, simpo, sft, …. Several losses are added up with --loss_weights.", common=True,
         group="Preferences", values=LOSSES, resume="same",
         reason="aot would depend on how pairs are spread over batches, and others are not implemented"),
    Flag("loss_weights", FLOATS, None, "Weight of each of several losses. Give one number for each of --loss_type.",
         common=True, group="Preferences", default_is="1 each", resume="same"),
    Flag("beta", FLOAT, 0.1, "How far the model may move from the reference. A larger value keeps it closer.",
         common=True, group="Preferences", above=0, reason="the loss would not depend on the answers", resume="same"),
    Flag("label_smoothing", FLOAT, 0.0, "Share of pairs whose preference is wrong, for robust, exo_pair and simpo.",
         group="Preferences", least=0, below=1, needs=("loss_type", "robust", "exo_pair", "simpo"), resume="same"),
    Flag("f_divergence_type", TEXT, "reverse_kl",
         "Divergence from the reference: reverse_kl, forward_kl, js_divergence or alpha_divergence.",
         group="Preferences", values=("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"), resume="same"),
    Flag("f_alpha_divergence_coef", FLOAT, 0.5, "The α of --f_divergence_type alpha_divergence.", group="Preferences",
         needs=("f_divergence_type", "alpha_divergence"), resume="same"),
    Flag("discopop_tau", FLOAT, 0.05, "Temperature of --loss_type discopop.", group="Preferences",
         needs=("loss_type", "discopop"), resume="same"),
    Flag("simpo_gamma", FLOAT, 0.5, "Margin of --loss_type simpo, as in TRL's CPOConfig.", group="Preferences",
         own=True, needs=("loss_type", "simpo"), resume="same"),
    Flag("ld_alpha", FLOAT, None, "Weight of the tokens that only the longer answer of a pair has (LD-DPO).",
         group="Preferences", least=0, most=1, resume="same"),
    Flag("reference_free", BOOL, False,
         "Compare with no reference model. It is as if one found all answers equally likely.", common=True,
         group="Preferences", own=True, resume="same"),
    Flag("precompute_ref_log_probs", BOOL, False, "Compute the reference's log-probabilities before training.",
         group="Preferences", ours=True),
    Flag("precompute_ref_batch_size", INT, None, "Sequences at a time while the reference's values are computed.",
         group="Preferences", default_is="per_device_train_batch_size", least=1),
    Flag("share_prompts", BOOL, True,
         "Compute a pair's prompt once. Where that is not exact, it is computed twice and the run says why.",
         common=True, group="Preferences", own=True),
    Flag("disable_dropout", BOOL, True, "Turn dropout off.", group="Preferences",
         idle="since dropout is 0 in any case"),
    Flag("use_weighting", BOOL, False, "Weight pairs by how likely the model finds their answers (WPO).",
         group="Preferences", values=(False,), reason="its weights need the probabilities of all words at every token"),
    Flag("sync_ref_model", BOOL, False, "Move the reference towards the model during training.", group="Preferences",
         values=(False,), reason="the reference's log-probabilities are computed once, before training"),
    Flag("ref_model_mixup_alpha", FLOAT, 0.6, "Share of the model that --sync_ref_model mixes into the reference.",
         group="Preferences", idle="without --sync_ref_model, which is refused"),
    Flag("ref_model_sync_steps", INT, 512, "Steps between updates of the reference by --sync_ref_model.",
         group="Preferences", idle="without --sync_ref_model, which is refused"),
    _changed("assistant_only_loss", common=False, values=(False,), reason=_OF_ANSWERS),
    _changed("completion_only_loss", values=(None,), reason=_OF_ANSWERS),
    _changed("dataset_streaming", values=(False,), reason=_AT_ONCE),
    _changed("streaming", values=(False,), reason=_AT_ONCE),
    _changed("dataset_text_field", values=("text",),
             reason="pairs are read from the columns 'prompt', 'chosen' and 'rejected'"),
    _changed("label_smoothing_factor", values=(0.0,),
             reason="it smooths the labels of tokens. That of preferences is --label_smoothing"),
    _changed("overlong", values=("raise", "truncate", "drop"),
             reason="a piece of an answer cannot be compared with the other answer"),
    _changed("packing_strategy", values=("bfd",), reason="a pair must not be cut"),
)
# fmt: on

LOSS_FLAGS = tuple(sorted(flag.name for flag in _ROWS if flag.group == "Preferences" and flag.resume == "same"))
"""Flags on which the loss depends, which a resumed run must not change."""

METRICS = ("rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected")
"""What evaluations of pairs measure besides."""

DPO = Method(
    module="longctx.dpo",
    usage="longctx dpo --model_name_or_path MODEL --dataset_name DATA [--sp N] [--FLAG VALUE ...]",
    description="Train a language model on pairs of chosen and rejected answers that are spread over --sp devices.",
    flags={**SFT.flags, **{flag.name: flag for flag in _ROWS}},
    metrics=(*SFT.metrics, *METRICS),
    reads_pairs=True,
)


def uses_reference(flags: Mapping[str, Any]) -> bool:
    """Return whether losses or logged rewards compare with a reference model. As in TRL, only SimPO's do not."""
    return not flags["reference_free"] and "simpo" not in flags["loss_type"]


def _meaningless(settings: Any) -> Iterator[str]:
    return (loss for loss in sorted(settings["loss_type"]) if loss not in WITH_F_DIVERGENCES)


DPO_RULES = (
    Rule(
        "loss_weights loss_type",
        lambda s: s["loss_weights"] is not None and len(s["loss_weights"]) != len(s["loss_type"]),
        lambda s: f"has not as many values as --loss_type, which has {len(s['loss_type'])}. Give one for each",
    ),
    Rule(
        "loss_type",
        lambda s: "simpo" in s["loss_type"] and len(set(s["loss_type"])) > 1,
        "adds means over tokens, which are the rewards of simpo, to sums. Use simpo alone",
    ),
    Rule(
        "f_divergence_type loss_type",
        lambda s: s["f_divergence_type"] != "reverse_kl" and any(_meaningless(s)),
        lambda s: (
            f"has a meaning only for differences of rewards, and --loss_type {next(_meaningless(s))} has others. Use "
            f"{', '.join(sorted(WITH_F_DIVERGENCES))}, or leave it out"
        ),
    ),
    Rule(
        "label_smoothing loss_type",
        lambda s: "robust" in s["loss_type"] and s["label_smoothing"] >= 0.5,
        "is out of range for --loss_type robust. Use a number from 0 to below 0.5",
    ),
    Rule(
        "loss_type label_smoothing",
        lambda s: "exo_pair" in s["loss_type"] and s["label_smoothing"] == 0,
        "needs --label_smoothing above 0. Its paper recommends 1e-3",
    ),
)

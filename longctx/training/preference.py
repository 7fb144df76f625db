"""Direct preference optimization: losses of pairs of answers, from sums of log-probabilities over documents.

The formulas are those of TRL's DPOTrainer (and, for simpo, CPOTrainer). A loss needs nothing from other sequence groups
and, from the ranks of its own, only the sums over documents. Shape legend: n pairs of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from longctx.data import IGNORE_INDEX
from longctx.layers.loss import TokenOutputs
from longctx.parallel import SequenceParallel
from longctx.sequence.batch import ShardedBatch
from longctx.sequence.host_tensors import send
from longctx.sequence.layout import PADDING, TRUNK, Layout
from longctx.sequence.shard import Shard, shard_tokens
from longctx.settings.dpo import LOSS_FLAGS, uses_reference
from longctx.training.objective import Metrics, Objective


class Pairs(NamedTuple):
    """What the losses of n pairs are made of; each field has a chosen and a rejected part, float64 [n]."""

    logps: tuple[Tensor, Tensor]
    """Sums of log-probabilities over the answers."""
    ratios: tuple[Tensor, Tensor]
    """The same less those of the reference model."""
    scores: tuple[Tensor, Tensor]
    """The ratios under the f-divergence."""
    lengths: tuple[Tensor, Tensor]
    """Tokens of the answers."""

    def delta(self) -> Tensor:
        return self.scores[0] - self.scores[1]

    def rewards(self, flags: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        return flags["beta"] * self.ratios[0], flags["beta"] * self.ratios[1]


Loss = Callable[[Pairs, Mapping[str, Any]], Tensor]


def _sigmoid(pairs: Pairs, flags: Mapping[str, Any]) -> Tensor:
    return -F.logsigmoid(flags["beta"] * pairs.delta())


def _hinge(pairs: Pairs, flags: Mapping[str, Any]) -> Tensor:
    return torch.relu(1 - flags["beta"] * pairs.delta())


def _means(values: tuple[Tensor, Tensor], lengths: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the means over the tokens of each side."""
    return values[0] / lengths[0], values[1] / lengths[1]


def _mean_delta(values: tuple[Tensor, Tensor], lengths: tuple[Tensor, Tensor]) -> Tensor:
    chosen, rejected = _means(values, lengths)
    return chosen - rejected


def _ipo(pairs: Pairs, flags: Mapping[str, Any]) -> Tensor:
    return (_mean_delta(pairs.scores, pairs.lengths) - 1 / (2 * flags["beta"])) ** 2


def _sigmoid_norm(pairs: Pairs, flags: Mapping[str, Any]) -> Tensor:
    return -F.logsigmoid(flags["beta"] * _mean_delta(pairs.scores, pairs.lengths))


def _exo_pair(pairs: Pairs, flags: Mapping[str, Any]) -> Tensor:
    logits, epsilon = flags["beta"] * pairs.delta(), flags["label_smoothing"]
    chosen = torch.sigmoid(logits) * (F.logsigmoid(logits) - math.log1p(-epsilon))
    return chosen + torch.sigmoid(-logits) * (F.logsigmoid(-logits) - math.log(epsilon))


def _nca_pair(pairs: Pairs, flags: Mapping[str, Any]) -> Tensor:
    chosen, rejected = pairs.rewards(flags)
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def _robust(pairs: Pairs, flags: Mapping[str, Any]) -> Tensor:
    logits, flipped = flags["beta"] * pairs.delta(), flags["label_smoothing"]
    return (-(1 - flipped) * F.logsigmoid(logits) + flipped * F.logsigmoid(-logits)) / (1 - 2 * flipped)


def _bco_pair(pairs: Pairs, flags: Mapping[str, Any]) -> Tensor:
    chosen, rejected = pairs.rewards(flags)
    return -F.logsigmoid(chosen) - F.logsigmoid(-rejected)


def _sppo_hard(pairs: Pairs, flags: Mapping[str, Any]) -> Tensor:
    chosen, rejected = pairs.ratios
    return (chosen - 0.5 / flags["beta"]) ** 2 + (rejected + 0.5 / flags["beta"]) ** 2


def _apo_zero(pairs: Pairs, flags: Mapping[str, Any]) -> Tensor:
    chosen, rejected = pairs.rewards(flags)
    return 1 - torch.sigmoid(chosen) + torch.sigmoid(rejected)


def _apo_down(pairs: Pairs, flags: Mapping[str, Any]) -> Tensor:
    chosen, rejected = pairs.rewards(flags)
    return torch.sigmoid(chosen) + 1 - torch.sigmoid(chosen - rejected)


def _discopop(pairs: Pairs, flags: Mapping[str, Any]) -> Tensor:
    logits = flags["beta"] * pairs.delta()
    modulation = torch.sigmoid(logits / flags["discopop_tau"])
    return -F.logsigmoid(logits) * (1 - modulation) + torch.exp(-logits) * modulation


def _simpo(pairs: Pairs, flags: Mapping[str, Any]) -> Tensor:
    logits = flags["beta"] * _mean_delta(pairs.logps, pairs.lengths) - flags["simpo_gamma"]
    smoothing = flags["label_smoothing"]
    return -F.logsigmoid(logits) * (1 - smoothing) - F.logsigmoid(-logits) * smoothing


_LOSSES = (
    *(_sigmoid, _hinge, _ipo, _exo_pair, _nca_pair, _robust, _bco_pair, _sppo_hard, _apo_zero, _apo_down),
    *(_discopop, _sigmoid_norm, _simpo),
)
LOSSES: Mapping[str, Loss] = {loss.__name__.removeprefix("_"): loss for loss in _LOSSES}
"""Losses of a pair, by TRL's names for --loss_type."""

SFT = "sft"
"""The --loss_type that is no loss of a pair: the mean token loss of the chosen answers, as in fine-tuning."""

_LARGEST_EXPONENT = 80.0


def f_divergence_scores(ratios: Tensor, flags: Mapping[str, Any]) -> Tensor:
    """Return f'(exp(ratio)) of the f-divergence between policy and reference, [n] (https://arxiv.org/abs/2309.16240)."""
    kind, power = flags["f_divergence_type"], flags["f_alpha_divergence_coef"] - 1
    if kind == "forward_kl":
        return 1 - torch.exp(-ratios)
    if kind == "js_divergence":
        return math.log(2) + F.logsigmoid(ratios)
    if kind == "alpha_divergence" and abs(power) >= 1e-6:
        return (torch.exp(torch.clamp(power * ratios, max=_LARGEST_EXPONENT)) - 1) / power
    return ratios


class PairsOfBatch(NamedTuple):
    """What a micro-batch has besides its tokens."""

    reference: Tensor | None
    """float64 [n, 2]: log-probabilities of the answers under the reference model; None where they are not known."""
    lengths: Tensor
    """float64 [n, 2]: tokens of the answers."""
    equal: Tensor
    """bool [n]: pairs of equal answers, of which rounding alone would prefer one."""
    weights: Tensor | None
    """fp32 [1, T/P]: the weight of each label's log-probability, at the token that predicts it; None if all are 1."""


class PreferenceLoss(Objective):
    """The mean over all pairs of an optimizer step; with `sft`, also the mean over their chosen answers' tokens.

    Args:
        flags: those of LOSS_FLAGS.
    """

    tag = "dpo"
    sums = (
        "loss",
        "nll",
        "pairs",
        "chosen_tokens",
        "rejected_tokens",
        "logps/chosen",
        "logps/rejected",
        "rewards/chosen",
        "rewards/rejected",
        "rewards/accuracies",
        "logits/chosen",
        "logits/rejected",
        "correct",
    )

    def __init__(self, sequence: SequenceParallel, flags: Mapping[str, Any]):
        super().__init__(sequence)
        self.model_options = {"summed": False, "mean_logits": True}
        self.flags = {name: flags[name] for name in LOSS_FLAGS}
        weights = flags["loss_weights"] or [1.0] * len(flags["loss_type"])
        self.weights = dict[str, float]()
        for name, weight in zip(flags["loss_type"], weights, strict=True):
            self.weights[name] = self.weights.get(name, 0.0) + weight

    def collate(
        self, rows: Sequence[Mapping[str, Any]], batch: Mapping[str, Any], layout: Layout, sp_rank: int
    ) -> dict[str, Any]:
        """Return `pairs`, a `PairsOfBatch`. The batch is one row, and its only padding follows the documents."""
        sides = sides_of_batch(layout)
        learnt, ids = ([tokens[0, side].numpy() for side in sides] for tokens in (batch["labels"], batch["input_ids"]))
        learnt = [labels != IGNORE_INDEX for labels in learnt]
        targets = np.array([np.count_nonzero(side) for side in learnt], dtype=np.float64).reshape(-1, 2)
        equal = [np.array_equal(*pair) for pair in zip(ids[::2], ids[1::2], strict=True)]
        references = [row["reference"] for row in rows if "reference" in row]
        reference = torch.from_numpy(np.concatenate([np.zeros((0, 2)), *references]))
        known = reference if len(references) == len(rows) else None
        weights = None
        if (alpha := self.flags["ld_alpha"]) is not None:
            weights = shard_tokens(_tail_weights(learnt, sides, layout, alpha), layout, sp_rank).contiguous()
        return {"pairs": PairsOfBatch(known, torch.from_numpy(targets), torch.tensor(equal, dtype=torch.bool), weights)}

    def counts(self, shards: Sequence[Shard]) -> tuple[int, ...]:
        """Return the pairs and the tokens of their chosen answers."""
        lengths = [shard.extras["pairs"].lengths for shard in shards]
        return sum(map(len, lengths)), sum(int(of_batch[:, 0].sum()) for of_batch in lengths)

    def denominators(self, sums: Sequence[int]) -> tuple[int, int] | None:
        pairs, tokens = sums
        return (pairs, tokens) if pairs else None

    def document_sums(self, shard: ShardedBatch, outputs: TokenOutputs, pairs: PairsOfBatch) -> Tensor:
        """Return float64 [n, 2, 4] of the chosen and the rejected side of each pair, on every rank of the group.

        They are sums over the answer of its weighted log-probabilities, of the plain ones, of the mean logits, and of
        tokens that are the most likely ones; [n, 2, 2] where the outputs have neither of the last two. Only
        log-probabilities are differentiable.
        """
        log_probs = -outputs.losses
        weighted = log_probs
        if pairs.weights is not None:
            weighted = log_probs * send(pairs.weights, log_probs.device)
        weighted = _summable(weighted)
        of_logs = (values for values in (outputs.mean_logits, outputs.is_top1) if values is not None)
        values = torch.stack((weighted, log_probs.double(), *of_logs), dim=-1)
        sums = self.sequence.sum_over_documents(values, shard.layout)[: 2 * len(pairs.lengths)]
        return sums.view(-1, 2, values.shape[-1])

    def measure(self, shard: ShardedBatch, outputs: TokenOutputs, extras: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the sums of the pairs' losses and of the chosen tokens' losses, [2], and float64 [sums]."""
        host = extras["pairs"]
        sums = self.document_sums(shard, outputs, host)
        reference, lengths = torch.zeros_like(sums[..., 0]), send(host.lengths, sums.device)
        if uses_reference(self.flags):
            assert host.reference is not None, "`prepare` gives every row the reference's log-probabilities"
            reference = send(host.reference, sums.device)
        equal = send(host.equal, sums.device)
        pairs = self._pairs(_as_one(sums[..., 0], equal), _as_one(reference, equal), lengths)
        losses = torch.zeros_like(pairs.logps[0])
        for name, weight in self.weights.items():
            if name != SFT:
                losses = losses + weight * LOSSES[name](pairs, self.flags)
        nll = -sums[:, 0, 1] * self.weights.get(SFT, 0.0)
        terms = torch.stack((losses.sum(), nll.sum()))
        with torch.no_grad():
            of_pairs = pairs.ratios if "simpo" not in self.weights else _means(pairs.logps, pairs.lengths)
            chosen, rejected = (self.flags["beta"] * value for value in of_pairs)
            numbers = [
                *(losses, nll, torch.ones_like(losses), *lengths.T, *sums[..., 0].T, chosen, rejected),
                *((chosen > rejected).double(), *sums[..., 2].T, sums[:, 0, 3]),
            ]
            # Every rank of a sequence group has the same numbers, and the log adds up those of all ranks.
            return terms, torch.stack([number.sum() for number in numbers]) / self.sequence.dims.sp

    def _pairs(self, logps: Tensor, reference: Tensor, lengths: Tensor) -> Pairs:
        ratios = (logps - reference).unbind(1)
        scores = tuple(f_divergence_scores(ratio, self.flags) for ratio in ratios)
        return Pairs(logps.unbind(1), ratios, scores, lengths.unbind(1))  # type: ignore[arg-type]

    def loss(self, terms: Tensor, counts: tuple[int, int] | None) -> Tensor:
        dims = self.sequence.dims
        pairs, tokens = counts or (1, 1)
        share = terms[0] / pairs + terms[1] / max(tokens, 1)
        return share * (dims.world_size / dims.sp)  # every rank of a group has the loss of the whole micro-batch

    def means(self, totals: Mapping[str, float]) -> Metrics:
        pairs = totals["pairs"] or math.nan
        chosen, rejected = (totals[f"{side}_tokens"] or math.nan for side in ("chosen", "rejected"))
        of_pairs = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "logps/chosen", "logps/rejected")
        return {
            "loss": totals["loss"] / pairs + totals["nll"] / chosen,
            "mean_token_accuracy": totals["correct"] / chosen,
            **{name: totals[name] / pairs for name in of_pairs},
            "rewards/margins": (totals["rewards/chosen"] - totals["rewards/rejected"]) / pairs,
            "logits/chosen": totals["logits/chosen"] / chosen,
            "logits/rejected": totals["logits/rejected"] / rejected,
        }


def _as_one(logps: Tensor, equal: Tensor) -> Tensor:
    """Return log-probabilities [n, 2] in which those of equal answers, which lie in different places, are equal."""
    return torch.where(equal[:, None], logps.mean(1, keepdim=True), logps)


def _summable(values: Tensor) -> Tensor:
    """Return float64 multiples of 2^-30, whose sums below 2^23 are exact and so the same in any order.

    A GPU adds up in an order of its own each time. Log-probabilities in fp32 are such multiples but those above -2^-7,
    which are off by 2^-31 at most. The gradient is that of the values.
    """
    values = values.double()
    return values + ((values * 2**30).round() / 2**30 - values).detach()


def sides_of_batch(layout: Layout) -> list[slice]:
    """Return where the sides of pairs lie in a batch, in order: those with the prompt, and those after a shared one."""
    are_sides = (layout.kind != TRUNK) & (layout.kind != PADDING)
    return [slice(*bounds) for bounds, is_side in zip(pairwise(layout.bounds), are_sides, strict=True) if is_side]


def _tail_weights(learnt: Sequence[np.ndarray], sides: Sequence[slice], layout: Layout, alpha: float) -> Tensor:
    """Return fp32 [1, S]: alpha where an answer is longer than its pair's other one, else 1 (LD-DPO).

    A label's weight stands at the token before it.

    Args:
        learnt: bool [tokens] of each side, which tokens are labels.
        sides: where each lies.
    """
    weights = np.ones(layout.num_tokens, dtype=np.float32)
    labels = [side.start + np.flatnonzero(are_labels) for side, are_labels in zip(sides, learnt, strict=True)]
    for chosen, rejected in zip(labels[::2], labels[1::2], strict=True):
        both = min(len(chosen), len(rejected))
        for places in (chosen, rejected):
            weights[places[both:] - 1] = alpha
    return torch.from_numpy(weights)[None]

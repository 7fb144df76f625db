"""The policy step of reinforcement learning: the loss of sampled answers, packed and cut like any other batch.

The formulas are those of TRL's GRPOTrainer. What they divide by is counted over the whole optimizer step, so that the
loss is the same however its answers are dealt to ranks and micro-batches. Shape legend: B rows of S tokens in a batch,
T/P tokens of this rank, n documents. A document is a prompt with one answer, and labels of −100 mark what was not
sampled: the prompt, and what tools returned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longctx.data import IGNORE_INDEX
from longctx.ranks.agreement import gather_objects
from longctx.sequence.checks import digests_of_ranks
from longctx.sequence.layout import Layout, padding_documents
from longctx.sequence.shard import cut

SequenceParallel = Any
"""`longctx.parallel.SequenceParallel`, whose methods the two functions are: its module imports this one."""

NORMALIZATIONS = {
    "grpo": "sequence",
    "sapo": "sequence",
    "dapo": "token",
    "cispo": "token",
    "luspo": "sequence_sum",
    "dr_grpo": "constant",
}
"""Loss types, and what each of them divides by unless `normalization` says otherwise."""
_REFUSED = {
    "bnpo": "it divides by the tokens of each micro-batch, so the result would depend on the layout. Use dapo, which "
    "divides by those of the whole step",
    "vespo": "use one of " + ", ".join(NORMALIZATIONS),
}


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """Which loss `policy_loss` computes. Names and defaults are those of TRL's `GRPOConfig`, except `normalization`.

    Raises:
        ValueError: for a loss that is not supported, or options that contradict each other.
    """

    loss_type: str = "dapo"
    """grpo, dapo, dr_grpo and luspo clip the ratio as PPO does, cispo clips its weight alone, and sapo has a soft gate
    in place of the clip."""
    importance_sampling_level: str = "token"
    """token, or sequence: one ratio for a document, from the mean of its log-ratios, as in GSPO."""
    epsilon: float = 0.2
    """The ratio is clipped below 1 − epsilon."""
    epsilon_high: float | None = None
    """The ratio is clipped above 1 + epsilon_high; if None, epsilon. For cispo it is the largest weight itself."""
    delta: float | None = None
    """The largest ratio in two-sided clipping, for the losses that clip as PPO does."""
    temperature: float = 1.0
    """What logits are divided by: the temperature at which the answers were sampled."""
    beta: float = 0.0
    """The factor of the KL divergence from the reference model."""
    use_bias_correction_kl: bool = True
    """Whether the KL divergence is weighted with the ratio."""
    max_completion_length: int | None = None
    """The number of tokens by which `constant` normalization, as in dr_grpo, divides the sum of each answer."""
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    normalization: str | None = None
    """token: the mean over all tokens of the step. sequence: the mean over answers of each answer's mean. group: the
    mean over groups of each group's mean over its tokens. sequence_sum: the mean over answers of each answer's sum.
    constant: the same, divided by `max_completion_length`. If None, that of the loss type."""

    def __post_init__(self) -> None:
        if self.loss_type not in NORMALIZATIONS:
            remedy = _REFUSED.get(self.loss_type, "use one of " + ", ".join(NORMALIZATIONS))
            raise ValueError(f"loss_type {self.loss_type!r} is not supported: {remedy}.")
        if self.importance_sampling_level not in ("token", "sequence"):
            raise ValueError(
                f"importance_sampling_level {self.importance_sampling_level!r} is not known; use token or sequence."
            )
        known = (*dict.fromkeys(NORMALIZATIONS.values()), "group")
        if self.normalizes_by not in known:
            raise ValueError(f"normalization {self.normalization!r} is not known; use one of {', '.join(known)}.")
        if self.loss_type == "cispo" and (self.epsilon_high is None or self.epsilon_high < 1):
            raise ValueError(
                f"loss_type cispo with epsilon_high {self.epsilon_high}: it is the largest weight of a token, so "
                "below 1 it would scale down every token. Set epsilon_high to at least 1; 5.0 is common."
            )
        if self.normalizes_by == "constant" and not (self.max_completion_length or 0) > 0:
            raise ValueError(
                f"loss_type {self.loss_type} divides by max_completion_length, which is "
                f"{self.max_completion_length}. Set it to the largest number of tokens that an answer may have."
            )

    @property
    def normalizes_by(self) -> str:
        return self.normalization or NORMALIZATIONS[self.loss_type]


@dataclass(frozen=True)
class PolicyCounts:
    """What the loss of an optimizer step is divided by, counted over all ranks and micro-batches."""

    tokens: int
    """The number of sampled tokens, which are the tokens with a label."""
    sequences: int
    """The number of documents with at least one sampled token."""
    group_tokens: Mapping[int, int] | None
    """The number of sampled tokens of each group, or None if no groups were given."""

    def document_weights(self, label_tokens: Tensor, policy: PolicyLoss, groups: Tensor | None) -> Tensor:
        """Return float64 [n], the factor of each document's tokens in the step's loss."""
        own = label_tokens.clamp(min=1).double()
        match policy.normalizes_by:
            case "token":
                return torch.full_like(own, 1 / max(self.tokens, 1))
            case "sequence":
                return 1 / (own * max(self.sequences, 1))
            case "sequence_sum":
                return torch.full_like(own, 1 / max(self.sequences, 1))
            case "constant":
                assert policy.max_completion_length, "checked where the loss was made"
                return torch.full_like(own, 1 / (max(self.sequences, 1) * policy.max_completion_length))
        if groups is None or self.group_tokens is None:
            raise ValueError(
                "normalization group needs to know which answers belong together. Pass groups, a number for each "
                "document, to count_policy_step and to policy_loss."
            )
        names = [int(group) for group, tokens in zip(groups, label_tokens, strict=True) if tokens]
        if unknown := sorted(set(names) - self.group_tokens.keys()):
            raise ValueError(f"groups {unknown} were not counted: pass count_policy_step the same groups.")
        of_group = [self.group_tokens.get(int(group), 1) for group in groups]
        return 1 / (len(self.group_tokens) * torch.tensor(of_group, dtype=torch.float64))


class PolicyOutputs(NamedTuple):
    """The results of a micro-batch. All but the loss are without gradients, [B, S], and 0 where labels are −100."""

    loss: Tensor
    """[]: this rank's share of the step's loss, to call backward on. Its mean over all ranks, summed over
    micro-batches, is the loss."""
    log_probs: Tensor
    entropy: Tensor
    """Of the model's distribution over the next token."""
    kl: Tensor | None
    """An estimate of the divergence from the reference model, where its log-probabilities are given."""
    clipped: Tensor
    """−1 where the ratio was clipped from below, 1 from above."""


class _Documents(NamedTuple):
    """The documents of a batch, in its order. Both tensors are on the CPU."""

    label_tokens: Tensor
    """int64 [n], padding included as documents."""
    are_padding: Tensor
    """bool [n], those that an attention_mask marks; callers do not count them."""

    @classmethod
    def of_batch(cls, batch: Mapping[str, Any], layout: Layout) -> _Documents:
        learnt = batch["labels"].flatten().cpu() != IGNORE_INDEX
        learnt[layout.cu_seqlens[:-1]] = False
        document = torch.from_numpy(layout.answer_of_token)
        label_tokens = torch.zeros(len(layout.is_padding), dtype=torch.int64).index_add_(0, document, learnt.long())
        return cls(label_tokens, torch.from_numpy(padding_documents(batch, layout)))

    def expand(self, values: Tensor, name: str) -> Tensor:
        """values of the caller's documents -> [n]. Documents without a label may be missing at the end."""
        kept = (~self.are_padding).nonzero()[:, 0]
        missing = self.label_tokens[kept[len(values) :]]
        if values.ndim != 1 or len(values) > len(kept) or missing.any():
            raise ValueError(
                f"{name} has shape {tuple(values.shape)}, and the batch has {len(kept)} documents, "
                f"{int((self.label_tokens > 0).sum())} of them with labels. Give one value for each document, in the "
                "order of the batch."
            )
        expanded = values.new_zeros(len(self.label_tokens))
        expanded[kept[: len(values)].to(values.device)] = values
        return expanded


def count_policy_step(
    sequence: SequenceParallel, batches: Sequence[Mapping[str, Any]], groups: Sequence[Tensor] | None = None
) -> PolicyCounts:
    """Return what `policy_loss` divides by: the sampled tokens and answers of an optimizer step, over all ranks.

    A method of `SequenceParallel`, which all ranks call together before the first micro-batch of the step. For the
    auxiliary loss of a mixture of experts, call `count_experts` after it where the step has several micro-batches.

    Args:
        batches: this rank's micro-batches of the step.
        groups: for each of them int64 [documents], a number for the answers to one prompt, unique in the step.
    """
    if sequence.routers is not None:
        sequence.routers.expect(len(batches))
    layouts = list(map(Layout.of_batch, batches))
    documents = list(map(_Documents.of_batch, batches, layouts))
    step = sequence.begin_step(
        layouts,
        sum(layout.num_targets for layout in layouts),
        sum(int((of_batch.label_tokens > 0).sum()) for of_batch in documents),
    )
    tokens, sequences = step.read()
    if groups is None:
        return PolicyCounts(tokens, sequences, None)
    if len(groups) != len(batches):
        raise ValueError(f"there are {len(groups)} tensors of groups for {len(batches)} batches. Pass one for each.")
    mine: Counter[int] = Counter()
    for of_batch, its_groups in zip(documents, groups, strict=True):
        for group, count in zip(of_batch.expand(its_groups.cpu(), "groups"), of_batch.label_tokens, strict=True):
            mine[int(group)] += int(count)
    total: Counter[int] = Counter()
    for of_group in gather_objects(mine)[:: sequence.dims.sp]:  # the ranks of a sequence group count the same
        total.update(of_group)
    return PolicyCounts(tokens, sequences, {group: count for group, count in sorted(total.items()) if count})


def policy_loss(
    sequence: SequenceParallel,
    model: nn.Module,
    batch: Mapping[str, Any],
    advantages: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    counts: PolicyCounts,
    policy: PolicyLoss = PolicyLoss(),
    ref_log_probs: Tensor | None = None,
    importance_sampling_ratio: Tensor | None = None,
    groups: Tensor | None = None,
) -> PolicyOutputs:
    """Return this rank's share of a step of GRPO, DAPO, CISPO and their like, and measures of every token.

    A method of `SequenceParallel`. Every rank of a sequence group passes the same arguments; tensors and labels are
    compared.

    Args:
        model: the first result of `parallelize`, wrapped or not.
        batch: a micro-batch as for `shard`: prompts with answers, labels of −100 where nothing was sampled.
        advantages: [documents] in the order of the batch, or [B, S] at the tokens' positions. Documents without a label
            may be missing at the end.
        old_log_probs: [B, S], of the policy that sampled, as `log_probs` returns them; if None, of this model.
        counts: of the step, from `count_policy_step`.
        policy: the loss and its options.
        ref_log_probs: [B, S], of the reference model.
        importance_sampling_ratio: [B, S], weights of the loss terms other than the KL divergence, for example for an
            inference engine that rounds differently.
        groups: int64 [documents] of this micro-batch, for `normalization="group"`.

    Raises:
        ValueError: for shapes that do not fit the batch, log-probabilities that stand where no label does, and ranks of
            a sequence group that were given different values.
    """
    if policy.beta and ref_log_probs is None:
        raise ValueError(f"beta {policy.beta} needs ref_log_probs, the log-probabilities under the reference model.")
    of_tokens = {"old_log_probs": old_log_probs, "ref_log_probs": ref_log_probs}
    of_tokens["importance_sampling_ratio"] = importance_sampling_ratio
    of_documents = {"groups": groups}
    (of_documents if advantages.ndim == 1 else of_tokens)["advantages"] = advantages
    given = {name: values.detach() for name, values in of_tokens.items() if values is not None}
    layout = sequence.layout_of(batch)
    _check_tokens(batch, layout, given)
    documents = _Documents.of_batch(batch, layout)
    expanded = {name: documents.expand(v.detach(), name) for name, v in of_documents.items() if v is not None}
    _check_same(sequence, {"input_ids": batch["input_ids"], "labels": batch["labels"], **given, **expanded})

    shard = sequence.place(cut(batch, layout, sequence.dims.sp_rank(sequence.rank)))
    held = {name: sequence.shard_at_labels(values, shard) for name, values in given.items()}
    outputs = sequence.token_outputs(model, shard, policy.temperature)
    document = sequence.documents_of_tokens(shard.layout)
    label_tokens = documents.label_tokens.to(document.device)
    weights = counts.document_weights(documents.label_tokens, policy, expanded.get("groups"))
    if "advantages" in expanded:
        held["advantages"] = expanded["advantages"].to(document.device)[document][None]

    log_probs, learnt = -outputs.losses, shard.shift_labels != IGNORE_INDEX
    log_ratio = log_probs - held.get("old_log_probs", log_probs.detach())
    if policy.importance_sampling_level == "sequence":
        means = sequence.sum_over_documents(log_ratio, shard.layout) / label_tokens.clamp(min=1)
        log_ratio = means[document][None]
    ratio = log_ratio.exp()
    losses, clipped = _policy_losses(policy, log_probs, ratio, held["advantages"])
    if "importance_sampling_ratio" in held:
        losses = losses * held["importance_sampling_ratio"]
    kl = None
    if "ref_log_probs" in held:
        difference = held["ref_log_probs"] - log_probs
        kl = difference.exp() - difference - 1
    if policy.beta and kl is not None:
        losses = losses + policy.beta * (kl * ratio if policy.use_bias_correction_kl else kl)
    factors = weights.to(document.device)[document][None]
    share = torch.where(learnt, losses.double() * factors, 0.0).sum() * sequence.dims.world_size
    loss = sequence.with_auxiliary_loss(share)
    measured = [log_probs, outputs.entropy, clipped * learnt, log_probs if kl is None else kl]
    whole = sequence.gather_at_labels(torch.stack([m.detach().to(log_probs.dtype) for m in measured], -1), shard.layout)
    log_probs, entropy, clipped, kl_of_tokens = whole.unbind(-1)
    return PolicyOutputs(loss, log_probs, entropy, None if kl is None else kl_of_tokens, clipped)


def _policy_losses(policy: PolicyLoss, log_probs: Tensor, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses [1, T/P] without the KL divergence, and −1 or 1 where the ratio is clipped."""
    high = policy.epsilon if policy.epsilon_high is None else policy.epsilon_high
    if policy.loss_type == "cispo":
        clipped = (ratio > high) & (advantages > 0)
        return -ratio.clamp(max=high).detach() * advantages * log_probs, clipped.long()
    if policy.loss_type == "sapo":
        temperature = torch.where(advantages > 0, policy.sapo_temperature_pos, policy.sapo_temperature_neg)
        gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
        return -gate * advantages, torch.zeros_like(ratio)
    below = (ratio < 1 - policy.epsilon) & (advantages < 0)
    above = (ratio > 1 + high) & (advantages > 0)
    within = ratio.clamp(1 - policy.epsilon, 1 + high)
    free = ratio if policy.delta is None else ratio.clamp(max=policy.delta)
    return -torch.min(free * advantages, within * advantages), above.long() - below.long()


def _check_tokens(batch: Mapping[str, Any], layout: Layout, given: Mapping[str, Tensor]) -> None:
    """Check that values of tokens stand where the labels are: a shift by one would train on the wrong ratios."""
    unlearnt = (batch["labels"] == IGNORE_INDEX).cpu()
    unlearnt.view(-1)[layout.cu_seqlens[:-1]] = True
    for name, values in given.items():
        if values.shape != unlearnt.shape:
            raise ValueError(
                f"{name} has shape {tuple(values.shape)}, and the batch has {tuple(unlearnt.shape)}. Give a value for "
                "each token of the batch, as sequence.log_probs returns them."
            )
        if name.endswith("log_probs") and (off := values[unlearnt.to(values.device)].count_nonzero()):
            raise ValueError(
                f"{name} is not 0 for {int(off)} tokens whose label is −100. A token's log-probability stands where "
                "the token does, not one place earlier, as in sequence.log_probs. If the values are in their places, "
                f"use {name}.masked_fill(labels == -100, 0)."
            )


def _check_same(sequence: SequenceParallel, tensors: Mapping[str, Tensor]) -> None:
    """Check that the ranks of this rank's sequence group were given the same tensors."""
    if sequence.dims.sp == 1:
        return
    everyone = digests_of_ranks(tensors, sequence.groups.sequence)
    if differing := [name for name in tensors if len({digests.get(name) for digests in everyone}) > 1]:
        raise ValueError(
            f"the ranks of a sequence group were given different {', '.join(differing)}. They share every document: "
            "sample and score on one of them, and send it to the others with torch.distributed.broadcast_object_list."
        )

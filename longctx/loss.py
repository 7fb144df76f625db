"""The loss: a sum over this rank's tokens divided by the label tokens of the whole optimizer step."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longctx.data import IGNORE_INDEX

CHUNK_TOKENS = 1024
"""Tokens whose log-probabilities of the whole vocabulary are held at once."""


class TokenOutputs(NamedTuple):
    """What becomes of each of this rank's tokens: [1, S] each, fp32, 0 where nothing is learnt."""

    losses: Tensor
    log_probs: Tensor
    """Of the targets."""
    entropy: Tensor
    is_top1: Tensor
    """bool: no other token is as likely as the target."""


def token_losses(logits: Tensor, shift_labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of each token in fp32: logits [1, S, V], targets [1, S] -> [1, S], 0 where the target is −100.

    Args:
        label_smoothing: ε of transformers' LabelSmoother: (1 − ε) of the target's, ε of the vocabulary's mean.
    """
    losses = F.cross_entropy(
        logits.flatten(0, 1).float(),
        shift_labels.flatten(),
        reduction="none",
        ignore_index=IGNORE_INDEX,
        label_smoothing=label_smoothing,
    )
    return losses.view(shift_labels.shape)


def token_outputs(logits: Tensor, shift_labels: Tensor, label_smoothing: float) -> TokenOutputs:
    """All of them from logits [1, S, V]; only the losses are differentiable."""
    chunks = zip(logits.detach().split(CHUNK_TOKENS, dim=1), shift_labels.split(CHUNK_TOKENS, dim=1), strict=True)
    measured = [torch.cat(values, dim=1) for values in zip(*(_measure(*chunk) for chunk in chunks), strict=True)]
    return TokenOutputs(token_losses(logits, shift_labels, label_smoothing), *measured)


def _measure(logits: Tensor, shift_labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log_probs, entropy and is_top1."""
    log_probs, is_label = logits.float().log_softmax(-1), shift_labels != IGNORE_INDEX
    picked = log_probs.gather(-1, shift_labels.clamp(min=0)[..., None])[..., 0]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return picked * is_label, entropy * is_label, (logits.argmax(-1) == shift_labels) & is_label


def step_loss(losses: Tensor, num_label_tokens: int, world_size: int) -> Tensor:
    """This rank's and micro-batch's share of the optimizer step's mean loss.

    Engines average gradients over all ranks, so the share is scaled by `world_size`: averaged over ranks and summed
    over micro-batches it is the sum of all token losses over the number of label tokens in the step.
    """
    return losses.sum() * (world_size / max(num_label_tokens, 1))

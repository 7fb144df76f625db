"""The loss: a sum over this rank's tokens divided by the label tokens of the whole optimizer step."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from longctx.data import IGNORE_INDEX


def token_losses(logits: Tensor, shift_labels: Tensor) -> Tensor:
    """Cross-entropy of each token in fp32: logits [1, S, V], targets [1, S] -> [1, S], 0 where the target is −100."""
    losses = F.cross_entropy(
        logits.flatten(0, 1).float(), shift_labels.flatten(), reduction="none", ignore_index=IGNORE_INDEX
    )
    return losses.view(shift_labels.shape)


def step_loss(losses: Tensor, num_label_tokens: int, world_size: int) -> Tensor:
    """This rank's and micro-batch's share of the optimizer step's mean loss.

    Engines average gradients over all ranks, so the share is scaled by `world_size`: averaged over ranks and summed
    over micro-batches it is the sum of all token losses over the number of label tokens in the step.
    """
    return losses.sum() * (world_size / max(num_label_tokens, 1))

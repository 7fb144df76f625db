"""What a run is compared with: one device, stock transformers, one document after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from longctx.data import IGNORE_INDEX
from longctx.shard import complete_position_ids


def single_device_step(
    model: PreTrainedModel, batches: Sequence[Mapping[str, Tensor]], label_smoothing: float = 0.0
) -> tuple[float, float]:
    """Loss and gradient norm of one optimizer step on one device.

    Args:
        model: before `parallelize`, with one of transformers' own attention implementations.
        batches: all micro-batches of the step, of all data-parallel ranks, uncut.

    Returns:
        The mean loss over the step's label tokens, and the norm of its gradient, which is left in the parameters.
    """
    model.train()
    documents = [document for batch in batches for document in documents_of(batch)]
    num_label_tokens = sum(int((labels[1:] != IGNORE_INDEX).sum()) for _, labels in documents)
    total = 0.0
    for input_ids, labels in documents:
        if not (labels[1:] != IGNORE_INDEX).any():
            continue
        logits = model(input_ids=input_ids[None], use_cache=False).logits[0, :-1].float()
        loss = F.cross_entropy(
            logits, labels[1:], ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=label_smoothing
        )
        loss = loss / num_label_tokens
        loss.backward()
        total += loss.item()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return total, float(torch.nn.utils.get_total_norm(gradients))


def documents_of(batch: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """(input_ids, labels) of every document in the batch, padding among them."""
    starts = (complete_position_ids(batch).reshape(-1) == 0).nonzero().flatten().tolist()
    bounds = [*starts, batch["input_ids"].numel()]
    ids, labels = batch["input_ids"].reshape(-1), batch["labels"].reshape(-1)
    return [(ids[a:b], labels[a:b]) for a, b in pairwise(bounds)]

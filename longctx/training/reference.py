"""The reference for a run: one device, stock transformers, one document at a time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from longctx.data import IGNORE_INDEX
from longctx.forecast.model_sizes import ModelSizes
from longctx.model.allow_list import auxiliary_loss_coefficient
from longctx.sequence.layout import PADDING, Layout

GIB = 2**30


def check_reference_fits(sizes: ModelSizes, tokens: int, available: int, *, has_scores: bool) -> None:
    """Check that a device can hold the step of `single_device_step` in fp32.

    Args:
        tokens: length of the longest document.
        available: free bytes of the device.
        has_scores: whether attention keeps a matrix of all scores, as transformers' eager attention does.

    Raises:
        ValueError: if the step is predicted to need more.
    """
    predicted = partial(reference_bytes, sizes, has_scores=has_scores)
    if predicted(tokens) <= available:
        return
    fits = bisect_right(range(tokens), available, key=predicted) - 1
    shorter = f"Use --max_length {fits} or less, a lower --num_layers" if fits > 1 else "Use a lower --num_layers"
    raise ValueError(
        f"the step on one device that checks this run holds a whole document of {tokens:,} tokens, which "
        f"takes about {predicted(tokens) / GIB:,.1f} GiB, and this GPU has {available / GIB:,.1f} GiB free. {shorter}, "
        "or --use_cpu True, where host memory is the limit."
    )


def reference_bytes(sizes: ModelSizes, tokens: int, *, has_scores: bool) -> int:
    """Return the predicted bytes of the step for a document: weights, gradients, saved activations and logits.

    Layers save what `longctx.forecast.memory` counts without recomputation, twice as much in fp32 as in bf16. Four
    copies of a logit exist: as it is, shifted, as a log-probability, and as a gradient.
    """
    h, width = sizes.hidden_size, sizes.intermediate_size
    layer = 4 * (10.5 * h + 9 * sizes.query_size + 4 * sizes.key_value_size + 6.5 * width)
    of_token = 16 * sizes.vocab_size + sizes.num_layers * layer
    of_pair = 16 * sizes.num_heads * sizes.num_layers if has_scores else 0
    return round(8 * sizes.num_parameters + tokens * of_token + tokens**2 * of_pair)


def single_device_step(
    model: PreTrainedModel, batches: Sequence[Mapping[str, Tensor]], label_smoothing: float = 0.0
) -> tuple[float, float]:
    """Compute the loss and gradient norm of one optimizer step on one device.

    The loss includes the routers' auxiliary loss over all tokens of the step, where the model's configuration has it.

    Args:
        model: the model before `parallelize`, with one of transformers' own attention implementations.
        batches: the uncut micro-batches of the step, from all data-parallel ranks. With an auxiliary loss, they say
            which tokens are padding: see `longctx.sequence.layout.Layout.of_batch`.

    Returns:
        The mean loss over the step's label tokens, and the norm of its gradient, which is left in the parameters.
    """
    model.train()
    documents = [document for batch in batches for document in documents_of(batch, padding=False)]
    num_label_tokens = sum(int((labels[1:] != IGNORE_INDEX).sum()) for _, labels in documents)
    coefficient = auxiliary_loss_coefficient(model.config)
    balance = _expert_weights(model, [input_ids for input_ids, _ in documents]) if coefficient else None
    total = 0.0
    for input_ids, labels in documents:
        has_labels = bool((labels[1:] != IGNORE_INDEX).any())
        if not has_labels and balance is None:
            continue
        output = model(input_ids=input_ids[None], use_cache=False, output_router_logits=balance is not None)
        loss = F.cross_entropy(
            output.logits[0, :-1].float(),
            labels[1:],
            ignore_index=IGNORE_INDEX,
            reduction="sum",
            label_smoothing=label_smoothing,
        )
        loss = loss / max(num_label_tokens, 1)
        if balance is not None:
            probabilities = sum(logits.float().softmax(-1).sum(0) for logits in output.router_logits)
            loss = loss + coefficient * (balance * probabilities).sum()
        loss.backward()
        total += loss.item()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return total, float(torch.nn.utils.get_total_norm(gradients))


@torch.no_grad()
def _expert_weights(model: PreTrainedModel, documents: Sequence[Tensor]) -> Tensor:
    """Return [E], what the routers' auxiliary loss multiplies each expert's probabilities with, summed over tokens.

    That is E · C / N², see `longctx.layers.routers`: transformers' load_balancing_loss_func of all documents at once.
    """
    top_k = model.num_experts_per_tok
    counts: Tensor | int = 0
    for input_ids in documents:
        output = model(input_ids=input_ids[None], use_cache=False, output_router_logits=True)
        for logits in output.router_logits:
            chosen = logits.float().softmax(-1).topk(top_k, dim=-1).indices
            counts = counts + chosen.flatten().bincount(minlength=logits.shape[-1]).double()
    assert isinstance(counts, Tensor), "a step has documents"
    return (len(counts) * counts * (top_k / counts.sum()) ** 2).float()


def documents_of(batch: Mapping[str, Tensor], *, padding: bool = True) -> list[tuple[Tensor, Tensor]]:
    """Return (input_ids, labels) of every document in the batch.

    Args:
        padding: whether to include what the batch says is padding, as a document of its own.
    """
    layout = Layout.of_batch(batch)
    begins_padding = (layout.kind == PADDING)[~layout.is_branch]
    ids, labels = batch["input_ids"].reshape(-1), batch["labels"].reshape(-1)
    bounds = zip(pairwise(layout.cu_seqlens.tolist()), begins_padding, strict=True)
    return [(ids[a:b], labels[a:b]) for (a, b), is_padding in bounds if padding or not is_padding]

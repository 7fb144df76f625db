"""Triton kernels for a tile of the head: the losses of its tokens, and their gradient in place of the products.

torch's operators read and write the logits of a tile about ten times, in fp32. The kernels read the head's products
twice and write their gradient once, in half precision. All that they compute in between is fp32, as theirs is.

Shape legend: t tokens of a tile, V entries of the vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

BLOCK = 4096
"""Products of a token that a program has in registers at a time."""
NUM_WARPS = 8


@triton.jit
def _logits(products, inner, outer, CAPPED: tl.constexpr):
    """Return inner · products, of which a soft cap leaves outer · tanh."""
    logits = products.to(tl.float32) * inner
    if CAPPED:
        logits = libdevice.tanh(logits) * outer
    return logits


@triton.jit
def _losses_of_a_token(
    products,
    targets,
    of_targets,
    losses,
    log_probs,
    entropies,
    means,
    lses,
    are_top1,
    vocabulary,
    inner,
    outer,
    smoothing,
    CAPPED: tl.constexpr,
    WITH_MEANS: tl.constexpr,
    WITH_TOP1: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    products += token * vocabulary
    target = tl.load(targets + token).to(tl.int32)
    of_target = _logits(tl.load(of_targets + token), inner, outer, CAPPED)
    lanes = tl.arange(0, BLOCK)

    # The softmax's denominator, Σ eˣ, and Σ x·eˣ, both over e to the largest logit so far
    top = float("-inf")
    top_before_target = float("-inf")
    total = 0.0
    weighted = 0.0
    summed = 0.0
    for start in range(0, vocabulary, BLOCK):
        at = start + lanes
        inside = at < vocabulary
        logits = _logits(tl.load(products + at, mask=inside, other=0.0), inner, outer, CAPPED)
        if WITH_MEANS:
            summed += tl.sum(logits, 0)
        logits = tl.where(inside, logits, float("-inf"))
        if WITH_TOP1:
            top_before_target = tl.maximum(top_before_target, tl.max(tl.where(at < target, logits, float("-inf")), 0))
        new_top = tl.maximum(top, tl.max(logits, 0))
        finite_top = tl.where(new_top > float("-inf"), new_top, 0.0)  # so far, all logits may be -inf
        powers = tl.exp(logits - finite_top)
        rescale = tl.exp(top - finite_top)
        total = total * rescale + tl.sum(powers, 0)
        weighted = weighted * rescale + tl.sum(tl.where(powers > 0, logits, 0.0) * powers, 0)
        top = new_top
    lse = top + tl.log(total)
    loss = (1 - smoothing) * (lse - of_target)
    if WITH_MEANS:
        mean = summed / vocabulary
        tl.store(means + token, mean)
        loss += tl.where(smoothing > 0, smoothing * (lse - mean), 0.0)  # which is no number where a logit is -inf
    tl.store(losses + token, loss)
    tl.store(log_probs + token, of_target - lse)
    tl.store(entropies + token, lse - weighted / total)
    tl.store(lses + token, lse)
    if WITH_TOP1:  # an argmax would carry an index through every reduction
        tl.store(are_top1 + token, (of_target == top) & (top_before_target < top))


@triton.jit
def _gradient_of_a_block(
    products, targets, lses, vocabulary, inner, outer, smoothing, CAPPED: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    products += token * vocabulary
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocabulary
    logits = _logits(tl.load(products + at, mask=inside, other=0.0), inner, outer, CAPPED)
    grad = tl.exp(logits - tl.load(lses + token)) - smoothing / vocabulary
    grad -= tl.where(at == tl.load(targets + token).to(tl.int32), 1 - smoothing, 0.0)
    slope = inner
    if CAPPED:  # tanh' = 1 − tanh²
        slope *= outer - logits * (logits / outer)
    tl.store(products + at, (grad * slope).to(products.dtype.element_ty), mask=inside)


def fused_losses(
    products: Tensor,
    targets: Tensor,
    *,
    scaling: tuple[float, float | None, float],
    label_smoothing: float,
    is_top1: bool,
    mean_logits: bool,
    with_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return losses, log-probabilities of the targets, entropies, whether targets are top-1, and means of the logits.

    Args:
        products: fp16 or bf16 [t, V], contiguous. With `with_grad`, they become the losses' gradient with respect to
            them.
        targets: int64 [t].
        scaling: a `longctx.layers.loss_tile.LogitScaling`.
        is_top1, mean_logits: whether the last two are wanted.

    Returns:
        [t] each, fp32 or, of the top-1 targets, bool; None for what is not wanted.
    """
    assert products.is_contiguous(), "the kernels step through rows"
    num_tokens, vocabulary = products.shape
    factor, softcap, temperature = scaling
    inner, outer = (factor / softcap, softcap / temperature) if softcap else (factor / temperature, 1.0)
    of_targets = products.gather(-1, targets[:, None])  # which stops at a target that is not in the vocabulary
    losses, log_probs, entropies, means, lses = products.new_empty(5, num_tokens, dtype=torch.float32).unbind()
    are_top1 = torch.empty_like(targets, dtype=torch.bool)
    scalars = vocabulary, float(inner), float(outer), float(label_smoothing)
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    options = {"CAPPED": bool(softcap), "BLOCK": block, "num_warps": NUM_WARPS}
    with torch.cuda.device_of(products):  # Triton launches on the current device
        _losses_of_a_token[(num_tokens,)](
            *(products, targets, of_targets, losses, log_probs, entropies, means, lses, are_top1, *scalars),
            WITH_MEANS=mean_logits or label_smoothing > 0,
            WITH_TOP1=is_top1,
            **options,
        )
        if with_grad:
            grid = num_tokens, triton.cdiv(vocabulary, block)
            _gradient_of_a_block[grid](products, targets, lses, *scalars, **options)
    return losses, log_probs, entropies, are_top1 if is_top1 else None, means if mean_logits else None

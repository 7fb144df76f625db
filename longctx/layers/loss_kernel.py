"""A Triton kernel for a tile of the head: the losses of its tokens, and their gradient in place of the products.

torch's operators read and write the logits of a tile about ten times, in fp32. The kernel reads the head's products
twice and writes their gradient once, in half precision. All that it computes in between is fp32, as theirs is.

Shape legend: t tokens of a tile, V entries of the vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
"""Products of a token that a program has in registers at a time."""
NUM_WARPS = 16


@triton.jit
def _losses_of_a_token(
    products,
    targets,
    of_targets,
    losses,
    log_probs,
    entropies,
    guesses,
    means,
    vocabulary,
    factor,
    smoothing,
    WITH_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    products += token * vocabulary
    target = tl.load(targets + token)
    of_target = tl.load(of_targets + token).to(tl.float32) * factor
    lanes = tl.arange(0, BLOCK)

    # The softmax's denominator, Σ eˣ, and Σ x·eˣ, both over e to the largest logit so far
    top = float("-inf")
    total = 0.0
    weighted = 0.0
    summed = 0.0
    guess = 0
    for start in range(0, vocabulary, BLOCK):
        at = start + lanes
        inside = at < vocabulary
        logits = tl.load(products + at, mask=inside, other=0.0).to(tl.float32) * factor
        summed += tl.sum(logits, 0)
        logits = tl.where(inside, logits, float("-inf"))
        largest = tl.max(logits, 0)
        guess = tl.where(largest > top, start + tl.argmax(logits, 0), guess)
        new_top = tl.maximum(top, largest)
        finite_top = tl.where(new_top > float("-inf"), new_top, 0.0)  # so far, all logits may be -inf
        powers = tl.exp(logits - finite_top)
        rescale = tl.exp(top - finite_top)
        total = total * rescale + tl.sum(powers, 0)
        weighted = weighted * rescale + tl.sum(tl.where(powers > 0, logits, 0.0) * powers, 0)
        top = new_top
    lse = top + tl.log(total)
    mean = summed / vocabulary
    smoothed = tl.where(smoothing > 0, smoothing * (lse - mean), 0.0)  # which is no number where a logit is -inf
    tl.store(losses + token, (1 - smoothing) * (lse - of_target) + smoothed)
    tl.store(log_probs + token, of_target - lse)
    tl.store(entropies + token, lse - weighted / total)
    tl.store(guesses + token, guess)
    tl.store(means + token, mean)

    if WITH_GRAD:
        for start in range(0, vocabulary, BLOCK):
            at = start + lanes
            inside = at < vocabulary
            logits = tl.load(products + at, mask=inside, other=0.0).to(tl.float32) * factor
            grad = tl.exp(logits - lse) - smoothing / vocabulary
            grad -= tl.where(at == target, 1 - smoothing, 0.0)
            tl.store(products + at, (grad * factor).to(products.dtype.element_ty), mask=inside)


def fused_losses(
    products: Tensor, targets: Tensor, *, factor: float, label_smoothing: float, with_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return losses, log-probabilities of the targets, entropies, guesses and means of the logits, [t] each.

    Args:
        products: fp16 or bf16 [t, V], contiguous. With `with_grad`, they become the losses' gradient with respect to
            them.
        targets: int64 [t].
        factor: of the logits, which are factor · products.

    Returns:
        All in fp32, but for the guesses, the positions of the largest logits, int64.
    """
    assert products.is_contiguous(), "the kernel steps through rows"
    num_tokens, vocabulary = products.shape
    of_targets = products.gather(-1, targets[:, None])  # which stops at a target that is not in the vocabulary
    losses, log_probs, entropies, means = products.new_empty(4, num_tokens, dtype=torch.float32).unbind()
    guesses = targets.new_empty(num_tokens)
    with torch.cuda.device_of(products):  # Triton launches on the current device
        _losses_of_a_token[(num_tokens,)](
            products,
            targets,
            of_targets,
            losses,
            log_probs,
            entropies,
            guesses,
            means,
            vocabulary,
            float(factor),
            float(label_smoothing),
            WITH_GRAD=with_grad,
            BLOCK=min(BLOCK, triton.next_power_of_2(vocabulary)),
            num_warps=NUM_WARPS,
        )
    return losses, log_probs, entropies, guesses, means

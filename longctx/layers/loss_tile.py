"""The losses of one tile of tokens, and their gradient with respect to the products of the head.

On GPUs, `longctx.layers.loss_kernel` computes them where it agrees with torch's operators. These compute them
elsewhere.

Shape legend: S tokens of this rank, t tokens of a tile, V entries of the vocabulary.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig

from longctx.attention.kernels.check import why_not_exact

logger = logging.getLogger(__name__)


class TokenOutputs(NamedTuple):
    """The results of this rank's tokens: [1, S] each, fp32 or wider, 0 where a token has no target.

    Only the losses are differentiable.
    """

    losses: Tensor
    log_probs: Tensor
    """Of the targets."""
    entropy: Tensor
    is_top1: Tensor | None
    """bool: the target is the most likely token, the first of them if several are. None where it was not asked for."""
    mean_logits: Tensor | None = None
    """Mean of the token's logits over the vocabulary. None where it was not asked for."""


class LogitScaling(NamedTuple):
    """What a model does to the products of its head before they are logits, in this order."""

    factor: float = 1.0
    softcap: float | None = None
    """c · tanh(logit / c)."""
    temperature: float = 1.0
    """What logits are divided by, as in sampling."""

    @classmethod
    def of_model(cls, config: PretrainedConfig) -> LogitScaling:
        """By the names that models of transformers give it."""
        text = config.get_text_config()
        for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):  # Cohere, Muse Glimmer, Falcon-H1
            if (factor := getattr(text, name, None)) is not None:
                break
        else:
            factor = getattr(text, "logits_scaling", None) or 1.0
            if text.model_type != "hyperclovax":  # Granite and MiniCPM3 divide by what HyperCLOVA X multiplies by
                factor = 1 / factor
        return cls(factor, getattr(text, "final_logit_softcapping", None))


UNSCALED = LogitScaling()


class TileLoss(NamedTuple):
    """What is computed of a tile."""

    label_smoothing: float
    scaling: LogitScaling
    dtype: torch.dtype
    """Of the products, and of their gradient."""
    is_top1: bool = True
    mean_logits: bool = False


LossesOfTile = Callable[[TileLoss, Tensor, Tensor, bool], tuple[TokenOutputs, Tensor]]
"""A function of what is computed, a tile's products [t, V], its targets int64 [t], and whether the gradient is wanted.

It returns the outputs of the tokens, [t] each, and their losses' gradient with respect to the products, [t, V] of the
products' dtype, or empty if it is not wanted. It frees the products, so the caller must not hold them."""


def losses_of_tiles(of: TileLoss, weight: Tensor) -> LossesOfTile:
    """Return the function that computes tiles of a head with this weight [V, h]."""
    return _by_kernel if takes_kernel(of, weight) else _by_operators


# ------------------------------------------------------------------------------------------------
# By the kernel
# ------------------------------------------------------------------------------------------------


def _by_kernel(of: TileLoss, products: Tensor, targets: Tensor, with_grad: bool) -> tuple[TokenOutputs, Tensor]:
    from longctx.layers.loss_kernel import fused_losses

    wanted = {"is_top1": of.is_top1, "mean_logits": of.mean_logits, "with_grad": with_grad}
    found = fused_losses(products, targets, scaling=of.scaling, label_smoothing=of.label_smoothing, **wanted)
    return TokenOutputs(*found), products if with_grad else products.new_empty(0)


def takes_kernel(of: TileLoss, weight: Tensor) -> bool:
    """Whether the kernel computes the tiles of a head with this weight."""
    if of.dtype not in HALF or not weight.is_cuda:
        return False
    return kernel_agrees(weight.device, of.dtype, of.scaling.softcap)


HALF = (torch.float16, torch.bfloat16)
BOUND_OF_OUTPUTS = 1e-5
BOUND_OF_GRADIENT = 1e-3
"""Largest relative errors, against fp64 from the same products. The kernel computes in fp32. Both gradients are
rounded to half precision at the end, and a value near the middle between two numbers may be rounded to either."""
_TOKENS = 5
_VOCABULARIES = (20_000, 20_001)
"""More than two blocks of the kernel. Triton compiles another one where the vocabulary is no multiple of 16."""


@functools.cache
def kernel_agrees(device: torch.device, dtype: torch.dtype, softcap: float | None = None) -> bool:
    """Return whether the kernel agrees with torch's operators in fp64 on this device, which is tried once a process."""
    wrong = why_not_exact(dtype, lambda: _errors(device, dtype, softcap))
    if wrong is not None:
        logger.warning(
            "longctx: the Triton kernel of the loss is passed over on %s, and torch's operators take its place, which "
            "are slower: it %s",
            *(device, wrong),
        )
    return wrong is None


def _errors(device: torch.device, dtype: torch.dtype, softcap: float | None) -> Iterator[tuple[float, float]]:
    """Yield the errors of the kernel's results against torch's operators, each with its bound."""
    scalings = LogitScaling(1.0, softcap), LogitScaling(0.5, softcap, temperature=2.0)
    kinds = TileLoss(0.0, scalings[0], dtype), TileLoss(0.1, scalings[1], dtype, mean_logits=True)
    for of, vocabulary in zip(kinds, _VOCABULARIES, strict=True):
        products, targets = _problem(device, dtype, vocabulary)
        exact = of._replace(dtype=torch.float64)
        expected, wanted = _by_operators(exact, products.double(), targets, with_grad=True)
        outputs, gradient = _by_kernel(of, products, targets, with_grad=True)
        for found, right in zip(outputs, expected, strict=True):
            if found is not None and right is not None:
                yield _relative(found, right), BOUND_OF_OUTPUTS
        yield _relative(gradient, wanted.to(dtype)), BOUND_OF_GRADIENT


def _problem(device: torch.device, dtype: torch.dtype, vocabulary: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    products = 3 * torch.randn(_TOKENS, vocabulary, generator=generator)
    targets = torch.tensor([0, vocabulary - 1, 4095, 4096, 777])
    products[2, 4095] = 20.0  # a guess that is nearly certain, and right
    return products.to(device, dtype), targets.to(device)


def _relative(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))


# ------------------------------------------------------------------------------------------------
# By torch's operators
# ------------------------------------------------------------------------------------------------


def _by_operators(of: TileLoss, products: Tensor, targets: Tensor, with_grad: bool) -> tuple[TokenOutputs, Tensor]:
    logits = _scale(products.to(torch.promote_types(of.dtype, torch.float32)), of.scaling)
    del products
    probabilities = logits.softmax(-1)
    mean_logits = logits.mean(-1) if of.mean_logits else None
    outputs = _measure(logits, probabilities, targets, of)._replace(mean_logits=mean_logits)
    if not with_grad:
        return outputs, logits.new_empty(0)
    return outputs, _differentiate(logits, probabilities, targets, of).to(of.dtype)


def _scale(products: Tensor, scaling: LogitScaling) -> Tensor:
    """Turn the head's products [t, V] into logits, in place."""
    if scaling.factor != 1:
        products.mul_(scaling.factor)
    if scaling.softcap:
        products.div_(scaling.softcap).tanh_().mul_(scaling.softcap)
    return products if scaling.temperature == 1 else products.div_(scaling.temperature)


def _measure(logits: Tensor, probabilities: Tensor, targets: Tensor, of: TileLoss) -> TokenOutputs:
    """logits and their probabilities [t, V], targets [t] -> [t] each. The logits are kept where a soft cap needs them.

    A product in place and its sum read and write less than the strided matrix-vector product that an einsum becomes: on
    an H200 that took longer than the softmax.
    """
    top, guess = logits.max(-1)  # the guess has the probability that the log-sum-exp is made from
    lse = top - probabilities.gather(-1, guess[:, None])[:, 0].log()
    log_probs = logits.gather(-1, targets[:, None])[:, 0] - lse
    losses = -log_probs
    if smoothing := of.label_smoothing:
        losses = (1 - smoothing) * losses + smoothing * (lse - logits.mean(-1))
    if of.scaling.softcap:
        weighted = torch.einsum("tv,tv->t", probabilities, logits)
    else:
        weighted = logits.mul_(probabilities).sum(-1)
    entropy = lse - weighted
    return TokenOutputs(losses, log_probs, entropy, guess == targets if of.is_top1 else None)


def _differentiate(logits: Tensor, probabilities: Tensor, targets: Tensor, of: TileLoss) -> Tensor:
    """Turn the probabilities into the losses' gradient with respect to the head's products [t, V], in place."""
    grad, (factor, softcap, temperature) = probabilities, of.scaling
    grad.scatter_add_(-1, targets[:, None], grad.new_full((len(targets), 1), of.label_smoothing - 1))
    if of.label_smoothing:
        grad.sub_(of.label_smoothing / grad.shape[-1])
    if softcap:  # tanh' = 1 − tanh²
        grad.addcmul_(grad, logits.square_(), value=-((temperature / softcap) ** 2))
    factor /= temperature
    return grad.mul_(factor) if factor != 1 else grad

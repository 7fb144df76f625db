"""The routers of a mixture of experts: the load of each expert, and the auxiliary loss over all tokens of a step.

The loss is that of transformers' `load_balancing_loss_func` (Switch Transformers, arXiv 2101.03961, equations 4 to 6)
of one batch with all real tokens of an optimizer step: E · Σ_i (C_i / N) · (S_i / N). C_i counts the choices of expert
i, S_i sums its probabilities, and N counts tokens, each over all layers, micro-batches and ranks. C has no gradient, so
the gradient of a token's probabilities is E · C / N². Each router adds it to its own backward pass, whether a layer is
checkpointed, tiled or run in chunks, and no layer keeps router logits for a loss at the end of the model. Only C must
be known before the first backward pass of the step.

Shape legend: T tokens that a router sees at a time, E experts, k experts of a token, L routers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from longctx.regions import region
from longctx.sequence.batch import AttentionContext
from longctx.upstream.transformers_internals import decoder_of, replace_forward, router_class

RETURN_PROBABILITIES = ("Gemma4TextRouter",)
"""Routers whose first result is their probabilities, which are the softmax of their logarithms; they have no loss."""


class RouterSums(NamedTuple):
    """Sums over this rank's real tokens of one micro-batch."""

    load: Tensor
    """float64 [L, E]: the tokens that each router has sent to each expert."""
    choices: Tensor
    """float64 [E]: the loss's C, of the k largest probabilities; without correction biases these are the load."""
    probabilities: Tensor
    """float64 [E]: the loss's S."""


class _MicroBatch:
    """What routers share in the passes of one micro-batch."""

    def __init__(self, real: Tensor, num_routers: int, num_experts: int):
        self.real = real
        """bool [T/P]: the tokens of this rank that are not padding."""
        zeros = partial(torch.zeros, dtype=torch.float64, device=real.device)
        self.sums = RouterSums(zeros(num_routers, num_experts), zeros(num_experts), zeros(num_experts))
        self.next_token = [0] * num_routers
        """The token that each router sees next: tiles and chunks of tokens come one after the other."""
        self.gradient: Tensor | None = None
        """float32 [E], of each real token's probabilities; known once the backward pass has begun."""

    def take(self, router: int, num_tokens: int) -> Tensor:
        """Return bool [T, 1], which of the next tokens of a router are real."""
        start = self.next_token[router]
        end = start + num_tokens
        assert end <= len(self.real), f"a router saw {end} tokens of a micro-batch that has {len(self.real)}"
        self.next_token[router] = end % len(self.real)
        return self.real[start:end, None]


class Routers:
    """The routers of a model. Made by `install_routers`.

    Args:
        modules: routers that return logits [T, E], weights and indices [T, k], in the order of layers.
        coefficient: of the auxiliary loss; 0 to leave it out.
        world_size: ranks over which engines average gradients.
    """

    def __init__(self, modules: list[Any], coefficient: float, world_size: int):
        self.coefficient, self.world_size = coefficient, world_size
        self.num_experts = [_setting(module, "num_experts") for module in modules]
        self.top_k = _setting(modules[0], "top_k")
        self.shares: Tensor | None = None
        """float64 [2], of the last micro-batch on this rank: of the auxiliary loss, without its coefficient, and of the
        step's tokens. Over ranks and micro-batches of a step they sum to the loss and to 1."""
        self._latest: _MicroBatch | None = None
        self._is_counting = False
        self._step: Tensor | None = None
        self._left: int | None = None
        """Micro-batches of the step that are still to come."""
        for number, module in enumerate(modules):
            module.register_forward_hook(partial(self._observe, number))

    @property
    def latest(self) -> RouterSums:
        """Return the sums of the last forward pass."""
        assert self._latest is not None, "the model has not run yet"
        return self._latest.sums

    @property
    def shape(self) -> tuple[int, int]:
        """Return (L, E)."""
        return len(self.num_experts), max(self.num_experts)

    def forget(self) -> None:
        """Let the next forward pass go unobserved."""
        self._latest = None

    def expect(self, num_micro_batches: int) -> None:
        """Begin an optimizer step of so many micro-batches on this rank."""
        self._left, self._step = num_micro_batches, None

    def count_step(self, passes: Iterable[None]) -> None:
        """Count the choices of a whole step. Called by all ranks together.

        Args:
            passes: runs the model on one of the step's micro-batches at each iteration.
        """
        counts = [self.latest.choices for _ in passes]
        self._step = self._over_ranks(torch.stack(counts).sum(0))

    def add_loss(self, loss: Tensor) -> Tensor:
        """Add this rank's share of the auxiliary loss to that of a micro-batch, whose forward pass was the last one.

        Returns:
            The sum, to call backward on.

        Raises:
            ValueError: if the choices of other micro-batches of the step are not counted.
        """
        batch = self._latest
        assert batch is not None, "the model has not run yet"
        if not self._left or (self._left > 1 and self._step is None):
            raise ValueError(
                "the routers' auxiliary loss covers all tokens of an optimizer step, and the tokens of this step are "
                "not counted. Call count_label_tokens with all micro-batches of the step, then count_experts if there "
                "are several, before the loss of the first one."
            )
        self._left -= 1
        if self._step is None:
            self._step = self._over_ranks(batch.sums.choices)
        own, choices = batch.sums, self._step
        factors = self._factors(choices)
        share = (factors * own.probabilities).sum()
        self.shares = torch.stack((share, own.choices.sum() / choices.sum().clamp(min=1)))
        return _WithLoss.apply(loss, self.coefficient * self.world_size * share, self, batch, factors)

    def loss_of(self, choices: Tensor, probabilities: Tensor) -> float:
        """Return the auxiliary loss of sums [E] over all of some tokens, without its coefficient; 0 of no tokens."""
        return float((self._factors(choices) * probabilities).sum())

    def _factors(self, choices: Tensor) -> Tensor:
        """E · C / N², [E], where k · N is the number of choices."""
        return len(choices) * choices * (self.top_k / choices.sum().clamp(min=1)) ** 2

    def _over_ranks(self, counts: Tensor) -> Tensor:
        if not dist.is_initialized():
            return counts
        counts = counts.clone()
        with region("wait", "communication"):
            dist.all_reduce(counts)
        return counts

    def check_latest(self, batch: _MicroBatch) -> None:
        """Check that a backward pass belongs to the last forward pass, in which routers of checkpointed layers run.

        Raises:
            ValueError: if the model has run on something else since.
        """
        if batch is not self._latest:
            raise ValueError(
                "the model has run on another batch between the forward and the backward pass of this one, so that "
                "its routers do not know which tokens are padding. Call backward before the next forward pass."
            )

    @contextmanager
    def passing(self, context: AttentionContext) -> Iterator[None]:
        """Return a context for a forward pass of the model on a batch, in which choices are counted."""
        assert context.real_tokens is not None, "known of a batch for a mixture of experts"
        self._latest = _MicroBatch(context.real_tokens, *self.shape)
        self._is_counting = True
        try:
            yield
        finally:
            self._is_counting = False

    def _observe(self, number: int, router: nn.Module, args: Any, output: tuple[Tensor, ...]) -> Any:
        batch = self._latest
        if batch is None:
            return None
        if len(output) == 2:  # Llama 4's scores of all experts, and logits
            weights, logits = output
            indices = logits.topk(self.top_k, dim=-1).indices
        else:
            logits, weights, indices = output
        if type(router).__name__ in RETURN_PROBABILITIES:
            logits = logits.log()
        real = batch.take(number, len(logits))
        if self._is_counting:
            _count(batch.sums, number, logits.detach(), indices, real)
        if not self.coefficient or not torch.is_grad_enabled() or not weights.requires_grad:
            return None
        return logits, _AddGradient.apply(weights, logits, real, batch), indices


def _setting(router: Any, name: str) -> int:
    """Return a number of a router; Gemma 4's has its configuration alone, where top_k is top_k_experts."""
    value = getattr(router, name, None)
    return int(getattr(router.config, {"top_k": "top_k_experts"}.get(name, name)) if value is None else value)


@torch.no_grad()
def _count(sums: RouterSums, router: int, logits: Tensor, indices: Tensor, real: Tensor) -> None:
    """Add logits [T, E] and chosen experts [T, k] of the tokens that are real, bool [T, 1]."""
    probabilities = logits.float().softmax(-1)
    chosen = probabilities.topk(indices.shape[-1], dim=-1).indices
    one = real.double()
    for total, experts in ((sums.load[router], indices), (sums.choices, chosen)):
        total.index_add_(0, experts.flatten(), one.expand_as(experts).flatten())
    num_experts = probabilities.shape[-1]
    sums.probabilities[:num_experts] += (probabilities * real).sum(0, dtype=torch.float64)


class _WithLoss(torch.autograd.Function):
    """loss + value; tells the micro-batch's routers the gradient of their probabilities."""

    @staticmethod
    def forward(ctx, loss: Tensor, value: Tensor, routers: Routers, batch: _MicroBatch, factors: Tensor) -> Tensor:
        ctx.routers, ctx.batch, ctx.factors = routers, batch, factors
        return loss + value.to(loss.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        routers = ctx.routers
        routers.check_latest(ctx.batch)
        scale = routers.coefficient * routers.world_size
        ctx.batch.gradient = (grad.double() * scale * ctx.factors).to(torch.promote_types(grad.dtype, torch.float32))
        return grad, None, None, None, None


class _AddGradient(torch.autograd.Function):
    """Weights [T, k] as they are; adds the auxiliary loss's gradient to that of logits [T, E]."""

    @staticmethod
    def forward(ctx, weights: Tensor, logits: Tensor, real: Tensor, batch: _MicroBatch) -> Tensor:
        ctx.batch = batch
        ctx.save_for_backward(logits, real)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx, grad: Tensor):
        logits, real = ctx.saved_tensors
        gradient = ctx.batch.gradient
        if gradient is None:  # of something else than the step's loss, such as log-probabilities
            return grad, None, None, None
        p = logits.to(gradient.dtype).softmax(-1)
        pulled = p * gradient[: p.shape[-1]]
        return grad, ((pulled - p * pulled.sum(-1, keepdim=True)) * real).to(logits.dtype), None, None


def install_routers(model: PreTrainedModel, coefficient: float) -> Routers | None:
    """Watch the routers of `model`, before it is wrapped; None without routers.

    Args:
        coefficient: of the auxiliary loss; 0 to leave it out.
    """
    kind = router_class(model)
    modules = [module for module in model.modules() if kind is not None and isinstance(module, kind)]
    if not modules:
        return None
    routers = Routers(modules, coefficient, dist.get_world_size() if dist.is_initialized() else 1)
    decoder = decoder_of(model)
    plain = decoder.forward

    @wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        context = kwargs.get("sequence")
        if context is None:  # stock transformers' own use of the model
            routers.forget()
            return plain(*args, **kwargs)
        with routers.passing(context):
            return plain(*args, **kwargs | {"output_router_logits": False})

    replace_forward(decoder, forward)
    return routers

"""The routers of a mixture of experts: the load of each expert, and the auxiliary loss over all tokens of a step.

The loss is that of transformers' `load_balancing_loss_func` (Switch Transformers, arXiv 2101.03961, equations 4 to 6)
of one batch with all real tokens of an optimizer step: E · Σ_i (C_i / N) · (S_i / N). C_i counts the choices of expert
i, S_i sums its probabilities, and N counts tokens, each over all layers, micro-batches and ranks. C has no gradient, so
the gradient of a token's probabilities is E · C / N². Each router adds it to its own backward pass, whether a layer is
checkpointed, tiled or run in chunks, and no layer keeps router logits for a loss at the end of the model. Only C must
be known before the first backward pass of the step.

Each forward pass of the model makes a `_MicroBatch`. Hooks of the routers find it in a context variable while their
layer runs, also where a backward pass runs it again. They hold no state of their own, so that a copy of a router, or of
the whole model, counts in its own passes.

Shape legend: T tokens that a router sees at a time, E experts, k experts of a token, L routers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, update_wrapper
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from longctx.model.allow_list import auxiliary_loss_coefficient
from longctx.regions import region
from longctx.sequence.batch import AttentionContext
from longctx.upstream.transformers_internals import (
    checkpointing_of,
    decoder_of,
    replace_forward,
    router_class,
    set_checkpointing_of,
    wrap_checkpointing_setter,
)

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
    """What routers share in one forward pass on a micro-batch, and in the recomputation of its layers."""

    def __init__(self, real: Tensor, num_routers: int, num_experts: int, *, adds_gradient: bool):
        self.real = real
        """bool [T/P]: whether each of this rank's tokens is not padding."""
        self.adds_gradient = adds_gradient
        """Whether routers add the gradient of the auxiliary loss."""
        self.is_counting = False
        """Whether choices are counted, as in the forward pass, but not where a layer is computed again."""
        zeros = partial(torch.zeros, dtype=torch.float64, device=real.device)
        self.sums = RouterSums(zeros(num_routers, num_experts), zeros(num_experts), zeros(num_experts))
        self.next_token = [0] * num_routers
        """The token that each router sees next: tiles and chunks of tokens come one after the other."""
        self.observed: set[int] = set()
        """The numbers of the routers that have run."""
        self.gradient: Tensor | None = None
        """float32 [E], of each real token's probabilities; known once the backward pass has begun."""

    def take(self, router: int, num_tokens: int) -> Tensor:
        """Return bool [T, 1], which of the next tokens of a router are real."""
        start = self.next_token[router]
        end = start + num_tokens
        assert end <= len(self.real), f"a router saw {end} tokens of a micro-batch that has {len(self.real)}"
        self.next_token[router] = end % len(self.real)
        self.observed.add(router)
        return self.real[start:end, None]


_under_way: ContextVar[_MicroBatch | None] = ContextVar("micro_batch_of_routers", default=None)
"""The micro-batch of the pass whose layer is running, or None if the model was called without a cut batch."""


def keep_pass(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run` bound to the current pass, so that a backward pass can call it later as a part of that pass."""
    return run if _under_way.get() is None else partial(_run_in, _under_way.get(), run)


def _run_in(batch: _MicroBatch | None, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    token = _under_way.set(batch)
    try:
        return run(*args, **kwargs)
    finally:
        _under_way.reset(token)


class Routers:
    """The routers of a model. Made by `install_routers`.

    Args:
        modules: one router of each layer. It returns logits [T, E], weights and indices [T, k], in this or the reverse
            order.
        config: of the model, which says at any time whether there is an auxiliary loss.
        world_size: ranks over which engines average gradients.
    """

    def __init__(self, modules: list[Any], config: PretrainedConfig, world_size: int):
        self.config, self.world_size = config, world_size
        self.num_experts = [_setting(module, "num_experts") for module in modules]
        self.top_k = _setting(modules[0], "top_k")
        self.shares: Tensor | None = None
        """float64 [2], of the last micro-batch on this rank: of the auxiliary loss, without its coefficient, and of the
        step's tokens. Over ranks and micro-batches of a step they sum to the loss and to 1."""
        self._latest: _MicroBatch | None = None
        self._has_loss = False
        """Whether a loss has been made from the last forward pass."""
        self._step: Tensor | None = None
        self._left: int | None = None
        """Micro-batches of the step that are still to come."""

    @property
    def coefficient(self) -> float:
        """Return the coefficient of the auxiliary loss, or 0 if the model trains without it."""
        return auxiliary_loss_coefficient(self.config)

    @property
    def latest(self) -> RouterSums:
        """Return the sums of the last forward pass."""
        assert self._latest is not None, "the model has not run yet"
        return self._latest.sums

    @property
    def shape(self) -> tuple[int, int]:
        """Return (L, E)."""
        return len(self.num_experts), max(self.num_experts)

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
            ValueError: if the choices of other micro-batches of the step are not counted, or the last forward pass was
                not that of this loss.
        """
        if not self._left or (self._left > 1 and self._step is None):
            raise ValueError(
                "the routers' auxiliary loss covers all tokens of an optimizer step, and the tokens of this step are "
                "not counted. Call count_label_tokens with all micro-batches of the step, then count_experts if there "
                "are several, before the loss of the first one."
            )
        batch = self._pass_of(loss)
        self._has_loss = True
        self._left -= 1
        if self._step is None:
            self._step = self._over_ranks(batch.sums.choices)
        own, choices = batch.sums, self._step
        factors = self._factors(choices)
        share = (factors * own.probabilities).sum()
        self.shares = torch.stack((share, own.choices.sum() / choices.sum().clamp(min=1)))
        scale = self.coefficient * self.world_size
        return _WithLoss.apply(loss, scale * share, batch, scale * factors)

    def _pass_of(self, loss: Tensor) -> _MicroBatch:
        """Return the micro-batch of the last forward pass, after checking that the loss can belong to it."""
        batch = self._latest
        if batch is None or self._has_loss:
            raise ValueError(
                "the routers' auxiliary loss is that of a forward pass, and the model that parallelize returned has "
                "not run on a batch of sequence.shard since the last loss. Run it once for each loss; for a copy of "
                "the model, use parallelize on the copy and the object that it returns."
            )
        if loss.requires_grad and not batch.adds_gradient:
            raise ValueError(
                "the routers' auxiliary loss is that of the model's last forward pass, which ran without gradients or "
                "before model.config.output_router_logits was set. Make the loss directly after its forward pass, and "
                "compute others, such as a reference model's log-probabilities, before that pass or after the loss."
            )
        if (found := _pass_before(loss)) is not None and found() is not batch:
            raise ValueError(
                "the routers' auxiliary loss is that of the model's last forward pass, and this loss is that of "
                "another one. Make each loss directly after its forward pass."
            )
        if len(batch.observed) < len(self.num_experts):
            raise ValueError(
                f"the routers' auxiliary loss covers {len(self.num_experts)} routers, and only {len(batch.observed)} "
                "of them ran in the last forward pass. Replace routers before parallelize, not after it."
            )
        return batch

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

    @contextmanager
    def passing(self, context: AttentionContext) -> Iterator[_MicroBatch]:
        """Return a context for a forward pass of the model on a batch, in which choices are counted."""
        assert context.real_tokens is not None, "known of a batch for a mixture of experts"
        adds_gradient = torch.is_grad_enabled() and self.coefficient > 0
        batch = _MicroBatch(context.real_tokens, *self.shape, adds_gradient=adds_gradient)
        self._latest, self._has_loss = batch, False
        batch.is_counting = True
        try:
            yield batch
        finally:
            batch.is_counting = False

    def check_output(self, asks_for_logits: bool | None) -> None:
        """Check a call's `output_router_logits`, which transformers fills in from the configuration.

        Raises:
            ValueError: if it asks for an auxiliary loss that the configuration does not have.
        """
        if asks_for_logits and not getattr(self.config.get_text_config(), "output_router_logits", False):
            raise ValueError(
                "output_router_logits=True in a call of the model, whose configuration says False. Set "
                "model.config.output_router_logits = True, and sequence.loss adds the routers' auxiliary loss over all "
                "tokens of the step; the model returns no router logits."
            )


@torch.compiler.disable  # a graph would be made before the gradient is known
def _observe(number: int, top_k: int, router: nn.Module, args: Any, output: tuple[Tensor, ...]) -> Any:
    batch = _under_way.get()
    if batch is None:
        return None
    is_reversed = len(output) == 3 and not output[0].is_floating_point()  # Granite's, before transformers 5.21
    if len(output) == 2:  # Llama 4's scores of all experts, and logits
        weights, logits = output
        indices = logits.topk(top_k, dim=-1).indices
    else:
        logits, weights, indices = output[::-1] if is_reversed else output
    if type(router).__name__ in RETURN_PROBABILITIES:
        logits = logits.log()
    real = batch.take(number, len(logits))
    if batch.is_counting:
        _count(batch.sums, number, logits.detach(), indices, real)
    if not batch.adds_gradient or not torch.is_grad_enabled() or not weights.requires_grad:
        return None
    changed = logits, _AddGradient.apply(weights, logits, real, batch), indices
    return changed[::-1] if is_reversed else changed


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
    def forward(ctx, loss: Tensor, value: Tensor, batch: _MicroBatch, factors: Tensor) -> Tensor:
        ctx.batch, ctx.factors = batch, factors
        return loss + value.to(loss.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.batch.gradient = (grad.double() * ctx.factors).to(torch.promote_types(grad.dtype, torch.float32))
        return grad, None, None, None


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


def install_routers(model: PreTrainedModel) -> Routers | None:
    """Watch the routers of `model`, or return None if it has none.

    Call this after layers have been given another `forward`, and before the model is wrapped. A copy of the model
    watches its own routers. Calling this again replaces the first call.
    """
    if (kind := router_class(model)) is None:
        return None
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    found: list[list[Any]] = [[module for module in layer.modules() if isinstance(module, kind)] for layer in layers]
    if not (by_layer := [of_layer for of_layer in found if of_layer]):
        return None
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    routers = Routers([of_layer[0] for of_layer in by_layer], model.config, world_size)
    for number, of_layer in enumerate(by_layer):
        for module in of_layer:  # more than one where an adapter trains a copy
            if not any(_runs(hook, _observe) for hook in module._forward_hooks.values()):
                module.register_forward_hook(partial(_observe, number, routers.top_k))
    for layer in layers:
        if not _runs(layer.forward, _layer_forward):
            replace_forward(layer, update_wrapper(partial(_layer_forward, layer.forward), layer.forward))
    _keep_passes(layers)
    wrap_checkpointing_setter(model, partial(_set_checkpointing, layers))
    decoder = decoder_of(model)
    plain = decoder.forward.args[1] if _runs(decoder.forward, _decoder_forward) else decoder.forward
    replace_forward(decoder, update_wrapper(partial(_decoder_forward, routers, plain), plain))
    return routers


def _runs(call: Any, function: Callable[..., Any]) -> bool:
    return isinstance(call, partial) and call.func is function


def _decoder_forward(routers: Routers, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    context = kwargs.get("sequence")
    if context is None:  # stock transformers' own use of the model
        return plain(*args, **kwargs)
    routers.check_output(kwargs.get("output_router_logits"))
    with routers.passing(context) as batch:
        output = plain(*args, **kwargs | {"output_router_logits": False, "micro_batch": batch})
    if output[0].grad_fn is not None:
        output[0].grad_fn.metadata[_PASS] = weakref.ref(batch)
    return output


_PASS = "longctx_pass"
"""Key in an autograd node's metadata for the forward pass whose output the node computed."""
_NODES = 100
"""Most nodes of a loss's graph that are searched for it, enough to get past the head."""


def _pass_before(loss: Tensor) -> Callable[[], _MicroBatch | None] | None:
    """Return a reference to the pass of the decoder that a loss was made of; None if its graph does not soon tell."""
    nodes: list[Any] = [loss.grad_fn]
    for node in nodes:
        if node is not None and _PASS in node.metadata:
            return node.metadata[_PASS]
        if node is not None and len(nodes) < _NODES:
            nodes += [before for before, _ in node.next_functions]
    return None


def _layer_forward(plain: Callable[..., Any], *args: Any, micro_batch: _MicroBatch | None = None, **kwargs: Any) -> Any:
    """Run a layer as a part of its pass, also where checkpointing calls the layer again with the same keywords."""
    return _run_in(micro_batch, plain, *args, **kwargs)


def _set_checkpointing(layers: list[Any], set_checkpointing: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    set_checkpointing(*args, **kwargs)
    _keep_passes(layers)


def _keep_passes(layers: list[Any]) -> None:
    """Make transformers' checkpointing, which wraps a layer's `forward`, compute the layer again in the same pass."""
    for layer in layers:
        run = checkpointing_of(layer)
        if run is not None and not _runs(run, _checkpoint):
            set_checkpointing_of(layer, partial(_checkpoint, run))


def _checkpoint(run: Callable[..., Any], forward: Callable[..., Any], *args: Any) -> Any:
    return run(keep_pass(forward), *args)

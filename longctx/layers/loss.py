"""The loss: each rank returns the sum over its tokens × world size / label tokens of the whole optimizer step.

An engine averages over all ranks, which gives the mean over all label tokens of the step.

The head's logits exist for a tile of tokens at a time. Shape legend: S tokens of this rank, h their hidden size, V the
vocabulary, t tokens of a tile.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel

from longctx.data import IGNORE_INDEX
from longctx.layers.chunked.copies import synchronize, to_device, to_host
from longctx.layers.loss_tile import UNSCALED, LogitScaling, TileLoss, TokenOutputs, losses_of_tiles, takes_kernel
from longctx.regions import region
from longctx.sequence.host_tensors import host_empty
from longctx.upstream.transformers_internals import decoder_of, replace_forward

TILE_BYTES = 2**28
"""Bytes of one tile's logits in fp32, for at least one token. A tile needs two to three times as much in all."""

HEAD_OPTIONS = ("label_smoothing", "summed", "is_top1", "mean_logits", "temperature", "next_tokens")
"""Keywords of the model that its head takes, beside `token_outputs`."""


def fuse_head(model: PreTrainedModel, *, hidden_on_host: bool = False) -> None:
    """Let `model(..., shift_labels=..., token_outputs=True)` return `TokenOutputs`.

    HEAD_OPTIONS are those of `fused_token_outputs`; `temperature`, which divides logits; and `next_tokens`, with which
    it returns int64 [n], the most likely tokens at the n labels that are not −100, in their order.
    Without `token_outputs` the model is what it was. The head is called as the module that it is, once, so that
    FSDP2, ZeRO-3 and adapters treat its weight like any other layer's: gathered once for all tiles, one gradient.

    Args:
        model: a causal language model, before it is wrapped.
        hidden_on_host: the last hidden states will lie in host memory; see `fused_token_outputs`.
    """
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear), "see longctx.model.modules"
    scaling = LogitScaling.of_model(model.config)
    run = functools.partial(_head_forward, scaling, hidden_on_host)
    functools.update_wrapper(run, _head_forward)  # torch.compile reads its name
    replace_forward(head, MethodType(run, head))
    plain = getattr(model.forward, "__func__", type(model).forward)

    @functools.wraps(plain)  # generation reads the signature
    def forward(self, *args, token_outputs=False, shift_labels=None, **kwargs):
        options = {name: kwargs.pop(name) for name in HEAD_OPTIONS if name in kwargs}
        if not token_outputs:
            if kwargs.get("sequence") is not None and kwargs.get("labels") is not None:
                raise ValueError(
                    "the model was given labels beside a batch that was cut: it would shift them again, and average "
                    "over this rank's tokens. Use sequence.loss(outputs.logits, shard.shift_labels, num_label_tokens)."
                )
            given = {} if shift_labels is None else {"shift_labels": shift_labels}
            return plain(self, *args, **kwargs, **given)
        hidden = decoder_of(self)(*args, **kwargs | {"return_dict": True}).last_hidden_state
        head, sequence = self.get_output_embeddings(), kwargs.get("sequence")
        positions = None if sequence is None else sequence.learnt_positions(shift_labels)
        return head(hidden, shift_labels=shift_labels, positions=positions, **options)

    replace_forward(model, MethodType(forward, model))


def _head_forward(
    scaling: LogitScaling,
    hidden_on_host: bool,
    head: nn.Linear,
    hidden: Tensor,
    shift_labels: Tensor | None = None,
    temperature: float = 1.0,
    next_tokens: bool = False,
    **options: Any,
) -> Tensor | TokenOutputs:
    if next_tokens:
        assert shift_labels is not None, "they say at which tokens"
        at = learnt_positions(shift_labels) if options["positions"] is None else options["positions"]
        if hidden_on_host:
            synchronize(head.weight.device)
        last = hidden[0, at.to(hidden.device)].to(head.weight)
        return F.linear(last, head.weight, head.bias).argmax(-1)  # no model's scaling changes which is the largest
    if shift_labels is None:
        return F.linear(hidden.to(head.weight.device), head.weight, head.bias)
    scaling = scaling._replace(temperature=temperature)
    given: dict[str, Any] = {"scaling": scaling, "hidden_on_host": hidden_on_host, **options}
    return fused_token_outputs(hidden, head.weight, head.bias, shift_labels, **given)


def fused_token_outputs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shift_labels: Tensor,
    *,
    positions: Tensor | None = None,
    label_smoothing: float = 0.0,
    scaling: LogitScaling = UNSCALED,
    hidden_on_host: bool = False,
    summed: bool = True,
    is_top1: bool = True,
    mean_logits: bool = False,
    tile_bytes: int = TILE_BYTES,
) -> TokenOutputs:
    """Head and cross-entropy in one, without logits [S, V].

    The forward pass also computes the gradients, from the same logits, for an upstream gradient of 1, and the backward
    pass multiplies them by the one factor that a sum over tokens has. This takes three products of h · V a token where
    computing the logits again takes four, and reads hidden states once. Where tokens are weighted one by
    one, backward does compute them again. No rank waits for another in here, so that ranks may differ in how many of
    their tokens are learnt; only those are projected.

    Args:
        hidden: [1, S, h], on the device of the weight or in host memory.
        weight: [V, h].
        bias: [V].
        shift_labels: [1, S], the token to come after each; −100 where nothing is learnt.
        positions: int64 [n], the places of labels that are not −100. Where None they are asked for on the device, and
            the host waits for it.
        label_smoothing: ε of transformers' LabelSmoother: (1 − ε) of the target's, ε of the vocabulary's mean.
        scaling: of the logits.
        hidden_on_host: `hidden` lies in host memory, is moved tile by tile, and its gradient goes there too. Said,
            because on a machine without a GPU its device does not say it. All tokens are projected.
        summed: the losses' gradient will be that of a sum. Where it is not known to be, nothing is made ahead.
        is_top1: return whether each target is the most likely token, which costs time and is for logs.
        mean_logits: also return the mean of every token's logits.
        tile_bytes: bound of a tile's logits in fp32; see `_tile_of`.

    Returns:
        Its sums, and those of the weight's gradient, run in fp32 or wider; products in autocast's dtype, else in the
        weight's.
    """
    device = weight.device
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else weight.dtype
    of = TileLoss(label_smoothing, scaling, dtype, is_top1, mean_logits)
    head = _Head(
        of,
        tile=_tile_of(of, weight, bias, tile_bytes),
        hidden_on_host=hidden_on_host or hidden.device != device,
        grads_ahead=summed and torch.is_grad_enabled(),
        positions=positions,
    )
    return TokenOutputs(*_FusedHead.apply(head, shift_labels, hidden, weight, bias))


def _tile_of(of: TileLoss, weight: Tensor, bias: Tensor | None, tile_bytes: int) -> int:
    """Return the tokens of a tile, at least one.

    The kernel has a tile's logits in half precision alone, so its tiles have four times as many: the fp32 gradient of
    the head's weight, of several GB, is read and written for a quarter of the tiles. They are multiples of 256, which
    matrix products compute in whole blocks, and so 64 tokens longer at most. A bias's gradient is summed from an fp32
    copy of the tile's.
    """
    tokens = max(1, tile_bytes // (4 * len(weight)))
    if bias is not None or not takes_kernel(of, weight):
        return tokens
    longer = 4 * tokens
    return (longer + 64) // 256 * 256 or longer


class _Head(NamedTuple):
    of: TileLoss
    tile: int
    """Tokens."""
    hidden_on_host: bool
    grads_ahead: bool
    positions: Tensor | None
    """int64 [n]: those of the tokens that are learnt, if the host knows them."""


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of hidden, weight and bias, where wanted."""


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, head: _Head, labels: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None):
        wanted = ctx.needs_input_grad[2:] if head.grads_ahead else (False, False, False)
        with region("loss"):
            outputs, grads = _tile_by_tile(head, labels, hidden, weight, bias, wanted)
        ctx.grads = grads if head.grads_ahead else None
        ctx.head = head
        ctx.save_for_backward(labels, hidden, weight, bias)
        ctx.mark_non_differentiable(*(output for output in outputs[1:] if output is not None))
        return outputs

    @staticmethod
    def backward(ctx, grad_losses: Tensor, *_):
        labels, hidden, weight, bias = ctx.saved_tensors
        grads, ctx.grads = ctx.grads, None
        factor = grad_losses.flatten()[:1] if _is_one_number(grad_losses) else None
        if grads is None or factor is None:
            grads = factor = None  # frees them
            grads = _tile_by_tile(ctx.head, labels, hidden, weight, bias, ctx.needs_input_grad[2:], grad_losses)[1]
        grads = [
            None if grad is None else _of_dtype(grad, x.dtype, factor, ctx.head.tile)
            for grad, x in zip(grads, (hidden, weight, bias), strict=True)
        ]
        if ctx.head.hidden_on_host:
            synchronize(weight.device)
        return None, None, *grads


def _is_one_number(x: Tensor) -> bool:
    """Return whether all elements share one place in memory, as in the gradient of a sum."""
    return all(stride == 0 or size == 1 for size, stride in zip(x.shape, x.stride(), strict=True))


def _tile_by_tile(
    head: _Head,
    labels: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    wanted: Sequence[bool],
    grad_losses: Tensor | None = None,
) -> tuple[TokenOutputs, Gradients]:
    """Return the outputs, and the gradients for these upstream gradients [1, S], which are 1 if None."""
    wide = torch.promote_types(head.of.dtype, torch.float32)
    zeros = functools.partial(labels.new_zeros, labels.shape)
    top1 = zeros(dtype=torch.bool) if head.of.is_top1 else None
    means = zeros(dtype=wide) if head.of.mean_logits else None
    outputs = TokenOutputs(zeros(dtype=wide), zeros(dtype=wide), zeros(dtype=wide), top1, means)
    grad_hidden = _zeros_beside(hidden, head, weight.device) if wanted[0] else None
    labels, hidden = labels.flatten(), hidden.flatten(0, 1)
    learnt = labels != IGNORE_INDEX
    upstream = learnt.to(wide) if grad_losses is None else learnt * grad_losses.flatten()
    grad_weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
    grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and wanted[2] else None
    losses_of_tile = losses_of_tiles(head.of, weight)
    with torch.autocast(weight.device.type, enabled=False):
        w, b = weight.to(head.of.dtype), None if bias is None else bias.to(head.of.dtype)
        for tile in _tiles(learnt, head):
            x = hidden[tile].to(weight.device, non_blocking=True).to(head.of.dtype)
            values, grad = losses_of_tile(head.of, F.linear(x, w, b), labels[tile].clamp(min=0), any(wanted))
            is_picked = isinstance(tile, Tensor)  # by its labels
            for output, value in zip(outputs, values, strict=True):
                if output is not None and value is not None:
                    output.view(-1)[tile] = value if is_picked else value * learnt[tile]
            factors = None if is_picked and grad_losses is None else upstream[tile, None]
            if grad_hidden is not None:
                of_tile = _times(grad @ w, factors).to(grad_hidden.dtype)
                if head.hidden_on_host:
                    to_host(grad_hidden.view(hidden.shape)[tile], of_tile)
                else:
                    grad_hidden.view(hidden.shape)[tile] = of_tile
            if grad_weight is not None:
                _add_product(grad_weight, grad.T, _times(x, factors).to(head.of.dtype))
            if grad_bias is not None:
                grad_bias += grad.T.to(wide) @ upstream[tile]
            del grad  # before the next tile
    return outputs, (grad_hidden, grad_weight, grad_bias)


def _zeros_beside(hidden: Tensor, head: _Head, device: torch.device) -> Tensor:
    """Return zeros for the gradient of `hidden`; in host memory, where every row is written, it is uninitialised."""
    if head.hidden_on_host:
        return host_empty(*hidden.shape, dtype=hidden.dtype, device=device)
    return torch.zeros_like(hidden, memory_format=torch.contiguous_format)


def _tiles(learnt: Tensor, head: _Head) -> Sequence[slice | Tensor]:
    """The tokens to project, some at a time: those learnt, or, where that is not known while tracing, all.

    All of host memory's too: a run of tokens is one copy, and picked ones are one copy each.
    """
    if head.hidden_on_host or isinstance(learnt, FakeTensor):
        return [slice(start, start + head.tile) for start in range(0, len(learnt), head.tile)]
    positions = learnt.nonzero()[:, 0] if head.positions is None else head.positions
    return positions.split(head.tile) if len(positions) else ()


def learnt_positions(shift_labels: Tensor) -> Tensor:
    """Return int64 [n], the positions of the labels [1, S] that are not −100. For labels on a GPU the host waits."""
    return (shift_labels.flatten() != IGNORE_INDEX).nonzero()[:, 0]


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b without rounding the product to the dtype of a and b first."""
    if total.is_cuda and total.dtype != a.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _times(x: Tensor, factors: Tensor | None) -> Tensor:
    return x if factors is None else x * factors


def _of_dtype(grad: Tensor, dtype: torch.dtype, factor: Tensor | None, tile: int) -> Tensor:
    """Return the gradient times a factor [1] in one pass, in place unless its dtype changes.

    The product is rounded once, from fp32: a GPU would first round a factor [] to the gradient's bf16. A gradient in
    host memory is multiplied on the factor's device, in tiles.
    """
    if factor is None:
        return grad.to(dtype)
    if grad.device == factor.device:
        return torch.mul(grad, factor, out=grad if grad.dtype == dtype else torch.empty_like(grad, dtype=dtype))
    for rows in grad.flatten(0, -2).split(tile):
        moved = to_device(rows, factor.device)
        to_host(rows, torch.mul(moved, factor, out=moved))
    return grad


def token_losses(logits: Tensor, shift_labels: Tensor) -> Tensor:
    """Cross-entropy of each token in fp32: logits [1, S, V], targets [1, S] -> [1, S], 0 where the target is −100."""
    losses = F.cross_entropy(
        logits.flatten(0, 1).float(), shift_labels.flatten(), reduction="none", ignore_index=IGNORE_INDEX
    )
    return losses.view(shift_labels.shape)


def step_loss(losses: Tensor, num_label_tokens: int, world_size: int) -> Tensor:
    """Return the share of this rank and micro-batch in the optimizer step's mean loss.

    Engines average gradients over all ranks, so the share is scaled by `world_size`: averaged over ranks and summed
    over micro-batches it is the sum of all token losses over the number of label tokens in the step.
    """
    return losses.sum() * (world_size / max(num_label_tokens, 1))

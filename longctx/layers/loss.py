"""The loss: a rank's sum over its tokens, times the world size, over the label tokens of the whole optimizer step.

The head's logits exist for a tile of tokens at a time. Shape legend: S tokens of this rank, h their hidden size, V the
vocabulary, t tokens of a tile.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import MethodType
from typing import NamedTuple

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

LONGER_WITH_KERNEL = 4
"""Times the tokens of such a tile, in one of the kernel, which has its logits in half precision alone: twice as many
bytes. The fp32 gradient of the head's weight, of several GB, is then read and written for a quarter of the tiles."""


def fuse_head(model: PreTrainedModel, *, hidden_on_host: bool = False) -> None:
    """Let `model(..., shift_labels=..., token_outputs=True)` return `TokenOutputs`.

    `label_smoothing`, `summed` and `mean_logits` are those of `fused_token_outputs`, and `temperature` divides logits.
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
    def forward(
        self,
        *args,
        token_outputs=False,
        shift_labels=None,
        label_smoothing=0.0,
        summed=True,
        mean_logits=False,
        temperature=1.0,
        **kwargs,
    ):
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
        return head(
            hidden,
            shift_labels=shift_labels,
            positions=positions,
            label_smoothing=label_smoothing,
            summed=summed,
            mean_logits=mean_logits,
            temperature=temperature,
        )

    replace_forward(model, MethodType(forward, model))


def _head_forward(
    scaling: LogitScaling,
    hidden_on_host: bool,
    head: nn.Linear,
    hidden: Tensor,
    shift_labels: Tensor | None = None,
    positions: Tensor | None = None,
    label_smoothing: float = 0.0,
    summed: bool = True,
    mean_logits: bool = False,
    temperature: float = 1.0,
) -> Tensor | TokenOutputs:
    if shift_labels is None:
        return F.linear(hidden.to(head.weight.device), head.weight, head.bias)
    return fused_token_outputs(
        hidden,
        head.weight,
        head.bias,
        shift_labels,
        positions=positions,
        label_smoothing=label_smoothing,
        scaling=scaling._replace(temperature=temperature),
        hidden_on_host=hidden_on_host,
        summed=summed,
        mean_logits=mean_logits,
    )


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
    mean_logits: bool = False,
    tile_bytes: int = TILE_BYTES,
) -> TokenOutputs:
    """Head and cross-entropy in one, without logits [S, V].

    The losses' gradients are made together with them, from the same logits, as if each token's upstream gradient
    were 1, and backward multiplies by the one factor that a sum over tokens has: three products of h · V a token
    where computing the logits again takes four, and hidden states are read once. Where tokens are weighted one by
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
        mean_logits: also return the mean of every token's logits.
        tile_bytes: bound of a tile's logits in fp32; see LONGER_WITH_KERNEL.

    Returns:
        Its sums, and those of the weight's gradient, run in fp32 or wider; products in autocast's dtype, else in the
        weight's.
    """
    device = weight.device
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else weight.dtype
    of = TileLoss(label_smoothing, scaling, dtype, mean_logits)
    is_longer = bias is None and takes_kernel(of, weight)  # a bias's gradient is summed from an fp32 copy of the tile's
    head = _Head(
        of,
        tile=max(1, tile_bytes // (4 * len(weight))) * (LONGER_WITH_KERNEL if is_longer else 1),
        hidden_on_host=hidden_on_host or hidden.device != device,
        grads_ahead=summed and torch.is_grad_enabled(),
        positions=positions,
    )
    return TokenOutputs(*_FusedHead.apply(head, shift_labels, hidden, weight, bias))


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
        if grads is None or not _is_one_number(grad_losses):
            grads = None  # frees them
            grads = _tile_by_tile(ctx.head, labels, hidden, weight, bias, ctx.needs_input_grad[2:], grad_losses)[1]
        else:
            _multiply(grads, grad_losses[0, 0], ctx.head.tile)
        if ctx.head.hidden_on_host:
            synchronize(weight.device)
        inputs = (hidden, weight, bias)
        return None, None, *(None if g is None else g.to(x.dtype) for g, x in zip(grads, inputs, strict=True))


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
    dtypes = (wide, wide, wide, torch.bool) + (wide,) * head.of.mean_logits
    outputs = TokenOutputs(*(labels.new_zeros(labels.shape, dtype=dtype) for dtype in dtypes))
    grad_hidden = _zeros_beside(hidden, head, weight.device) if wanted[0] else None
    rows = [output.view(-1) for output in outputs if output is not None]
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
            for row, value in zip(rows, values[: len(rows)], strict=True):
                assert value is not None, "as many as the rows"
                row[tile] = value * learnt[tile]
            factors = upstream[tile, None]
            if grad_hidden is not None:
                of_tile = (grad @ w * factors).to(grad_hidden.dtype)
                if head.hidden_on_host:
                    to_host(grad_hidden.view(hidden.shape)[tile], of_tile)
                else:
                    grad_hidden.view(hidden.shape)[tile] = of_tile
            if grad_weight is not None:
                _add_product(grad_weight, grad.T, (x * factors).to(head.of.dtype))
            if grad_bias is not None:
                grad_bias += grad.T.to(wide) @ upstream[tile]
            del grad  # before the next tile
    return outputs, (grad_hidden, grad_weight, grad_bias)


def _zeros_beside(hidden: Tensor, head: _Head, device: torch.device) -> Tensor:
    """For its gradient. In host memory every row is written, so that none needs a zero."""
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


def _multiply(grads: Gradients, factor: Tensor, tile: int) -> None:
    """In place; those in host memory tile by tile on the device of the factor []."""
    for grad in grads:
        if grad is None:
            continue
        if grad.device == factor.device:
            grad.mul_(factor)
        else:
            for rows in grad.flatten(0, -2).split(tile):
                to_host(rows, to_device(rows, factor.device).mul_(factor))


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

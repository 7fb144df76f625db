"""One decoder layer over a sequence in host memory, chunk by chunk, forward and backward.

Shape legend: P ranks of the Ulysses group, S tokens of the group and S/P of this rank, c tokens of a chunk,
H query heads, K key/value heads, D head size, n = H/P + 2·K'/P heads that a rank attends with (K' after repetition).
Attention takes a rank's heads in G groups of h query heads and m key/value heads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from longctx.attention.operator import LocalSchedule
from longctx.layers.checkpoints import LayerCheckpoints
from longctx.layers.chunked.attention import HostAttention, ScheduledAttention, num_head_groups
from longctx.layers.chunked.copies import Copies
from longctx.layers.chunked.tiles import (
    ParameterGradients,
    ask_for_gradient,
    check_one_thread,
    chunks_of,
    current_autocast,
    keep_backward_in_one_thread,
    run_in_tiles,
    trained,
)
from longctx.layers.routers import keep_pass
from longctx.model.branches import chunk_obstacle
from longctx.regions import region
from longctx.sequence.batch import PLAIN, AttentionContext, AttentionKind
from longctx.sequence.host_tensors import host_empty
from longctx.ulysses.exchange import all_to_all, key_value_copies
from longctx.upstream.deepspeed_internals import gather_once
from longctx.upstream.transformers_internals import replace_forward, wrap_checkpointing_setter

KeptOutput = Literal["host", "device"] | None
"""Where a layer keeps what attention returned until the backward pass; None to compute it again."""


class LazyTokens:
    """A layer's inputs for each token, made for a chunk on demand: RoPE's cosines and sines."""

    def __init__(self, make: Callable[[slice], Any]):
        self.make = make


class Projection(NamedTuple):
    """The inputs of a layer's attention, for one chunk."""

    qkv: Tensor
    """[P, c, n, D]: heads by the rank that attends with them."""
    sinks: Tensor | None
    """[H/P], of this rank's heads."""


class Projected(NamedTuple):
    """The inputs of a layer's attention for all tokens of the row, in host memory."""

    q: Tensor
    """[G, S, h, D], of this rank's heads."""
    kv: Tensor
    """[G, S, 2·m, D]: keys, then values."""
    sinks: Tensor | None


class _Leave(Exception):
    """Leaves the layer, and carries the arguments with which it called its attention."""


class _AtAttention:
    """Stands in for the batch's `AttentionContext` while one chunk goes through the layer."""

    def __init__(self, sequence: AttentionContext, at: slice, answer: Callable[..., Tensor]):
        self.local_length, self.calls = at.stop - at.start, 0
        self._sequence, self._at, self._answer = sequence, at, answer

    @property
    def position_ids(self) -> Tensor | None:
        """int64 [1, c], those of the chunk."""
        positions = self._sequence.position_ids
        return None if positions is None else positions[:, self._at]

    def attend(self, kind: AttentionKind) -> Callable[..., Tensor]:
        return lambda q, k, v, scale, sinks: self._answer(q, k, v, kind, scale, sinks)


class ChunkedLayer:
    """A decoder layer's function of the whole sequence of this rank.

    Args:
        run: the layer's forward.
        keywords: that it was called with; of tensors those a token by itself has.
        sequence: the batch's.
        size: c.
        kept: where to keep what attention returned until the backward pass, instead of computing it again.
        copies: to and from the device of the layer.
    """

    def __init__(
        self,
        run: Callable[..., Tensor],
        keywords: dict[str, Any],
        *,
        sequence: AttentionContext,
        size: int,
        kept: KeptOutput,
        copies: Copies,
    ):
        self.run, self.keywords, self.sequence = run, keywords, sequence
        self.size, self.kept, self.copies = size, kept, copies
        self.world_size = 1 if sequence.group is None else dist.get_world_size(sequence.group)
        self.chunks = chunks_of(sequence.local_length, size)
        self.autocast = current_autocast(copies.device)
        self._heads, self._kind, self._scale = (0, 0), PLAIN, 0.0  # known from the first chunk on
        self._kept: tuple[Tensor, Tensor] | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [1, S/P, h] -> [1, S/P, h], both in host memory; no graph is made."""
        self.sequence.calls += 1
        out, lse = self._attend(self._project_all(hidden), on_device=self.kept == "device")
        self._kept = None if self.kept is None else (out, lse)
        result: Any = None
        for at, (x, attention) in self.copies.arriving(
            self.chunks, lambda at: [hidden[:, at], self._of_ranks(out, at)]
        ):
            y = self._finish(x, self._own_tokens(attention), at)
            if result is None:
                result = self._host(1, hidden.shape[1], *y.shape[2:], dtype=y.dtype)
            self.copies.leave((result[:, at], y))
        self.copies.synchronize()
        return result

    def backward(
        self, hidden: Tensor, grad_result: Tensor, parameters: tuple[Tensor, ...]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the gradients of `hidden`, in host memory, and of the parameters."""
        with self.autocast():
            projected = self._project_all(hidden)
        out, lse = self._kept or self._attend(projected)
        self._kept = None
        grad_hidden = self._host(*hidden.shape, dtype=hidden.dtype)
        grad_out = self._host(*out.shape, dtype=out.dtype)
        sums = ParameterGradients(parameters)

        def from_result(at: slice, x: Tensor, rows: Tensor, grad: Tensor) -> None:
            attention = self._own_tokens(rows)
            with torch.enable_grad(), self.autocast():
                y = self._finish(x.requires_grad_(), attention.requires_grad_(), at)
            grads = torch.autograd.grad(y, [x, attention, *parameters], grad, allow_unused=True)
            received = self._exchange(self._by_rank(grads[1]))
            self.copies.leave((grad_hidden[:, at], grads[0]), (self._of_ranks(grad_out, at), self._by_group(received)))
            sums.add(grads[2:])

        def to_hidden(at: slice, x: Tensor, grad: Tensor, grad_q: Tensor, grad_kv: Tensor) -> None:
            with torch.enable_grad(), self.autocast():
                projection = self._project(x.requires_grad_(), at)
            grad_qkv = torch.cat([_by_source(part) for part in (grad_q, *grad_kv.chunk(2, dim=3))], dim=2)
            outputs, grad_outputs = [projection.qkv], [self._exchange(grad_qkv)]
            if projection.sinks is not None and grad_sinks is not None and at is self.chunks[0]:  # of all tokens
                outputs.append(projection.sinks)
                grad_outputs.append(grad_sinks.to(projection.sinks.dtype))
            grads = torch.autograd.grad(outputs, [x, *parameters], grad_outputs, allow_unused=True)
            self.copies.leave((grad_hidden[:, at], grad + grads[0]))
            sums.add(grads[1:])

        self.copies.each(
            self.chunks, lambda at: [hidden[:, at], self._of_ranks(out, at), grad_result[:, at]], from_result
        )
        with region("attention backward", "attention"):  # writes gradients to the places of q and kv
            grad_sinks = self._attention.backward(grad_out, projected.q, projected.kv, out, lse, projected.sinks)
        heads = projected.q, projected.kv
        self.copies.each(
            self.chunks,
            lambda at: [hidden[:, at], grad_hidden[:, at], *(self._of_ranks(x, at) for x in heads)],
            to_hidden,
        )
        self.copies.synchronize()
        return grad_hidden, sums.result()

    def _project_all(self, hidden: Tensor) -> Projected:
        hosts: Any = None
        for at, (x,) in self.copies.arriving(self.chunks, lambda at: [hidden[:, at]]):
            projection = self._project(x, at)
            received = self._exchange(projection.qkv)
            q, k, v = map(self._by_group, received.split([self._heads[0], self._heads[1], self._heads[1]], dim=2))
            parts = q, torch.cat((k, v), dim=3)
            if hosts is None:
                total = self.world_size * hidden.shape[1]
                hosts = [self._host(len(part), total, *part.shape[3:], dtype=part.dtype) for part in parts]
            self.copies.leave(*((self._of_ranks(host, at), part) for host, part in zip(hosts, parts, strict=True)))
        q, kv = hosts
        return Projected(q, kv, projection.sinks)

    def _attend(self, projected: Projected, *, on_device: bool = False) -> tuple[Tensor, Tensor]:
        with region("attention", "attention"):
            return self._attention.forward(*projected, on_device=on_device)

    @property
    def _attention(self) -> HostAttention | ScheduledAttention:
        key = HostAttention, self._heads, self._kind, self._scale, self.size
        return self.sequence.shared(key, self._make_attention)

    def _make_attention(self) -> HostAttention | ScheduledAttention:
        assert self.sequence.schedule is not None, "the backend supports the sequence-chunked step"
        schedule = self.sequence.schedule(self._kind)
        if not isinstance(schedule, LocalSchedule):  # whose keys are on other ranks
            return ScheduledAttention(schedule, scale=self._scale, copies=self.copies)
        return HostAttention(
            self.sequence.cu_seqlens,
            block=self.size * self.world_size * self._num_groups,  # as many bytes as a chunk of all heads
            kind=self._kind,
            scale=self._scale,
            copies=self.copies,
        )

    @property
    def _num_groups(self) -> int:
        return num_head_groups(len(self.chunks), self._heads[1])

    def _project(self, x: Tensor, at: slice) -> Projection:
        """Run the layer up to its attention, for one chunk."""

        def leave(q, k, v, kind, scale, sinks):
            raise _Leave(self._split_heads(q, k, v, kind, scale, sinks))

        try:
            self._call(x, at, leave)
        except _Leave as found:
            return found.args[0]
        raise ValueError(
            "a layer ran without attention, and the sequence-chunked step splits layers at their attention. "
            "Leave out sequence_chunk_size for this model."
        )

    def _finish(self, x: Tensor, attention: Tensor, at: slice) -> Tensor:
        """Run the whole layer for one chunk, with the output of its attention given: [1, H, c, D]."""
        out = self._call(x, at, lambda *_: attention)
        if not isinstance(out, Tensor) or out.shape[:2] != x.shape[:2]:
            raise ValueError(
                f"a layer returned {type(out).__name__} instead of one tensor of its tokens, which the "
                "sequence-chunked step does not know. Leave out sequence_chunk_size for this model."
            )
        return out

    def _call(self, x: Tensor, at: slice, answer: Callable[..., Tensor]) -> Any:
        keywords = {name: _chunk_of(value, at, name) for name, value in self.keywords.items()}
        return self.run(x, **keywords, sequence=_AtAttention(self.sequence, at, answer))

    def _split_heads(self, q, k, v, kind, scale, sinks) -> Projection:
        """Split q [1, H, c, D], k and v [1, K, c, D] by the rank that attends with each head."""
        copies = key_value_copies(q.shape[1], k.shape[1], self.world_size)
        if copies > 1:
            k, v = k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1)
        self._heads = q.shape[1] // self.world_size, k.shape[1] // self.world_size
        self._kind, self._scale = kind, q.shape[-1] ** -0.5 if scale is None else scale
        qkv = torch.cat([self._by_rank(x) for x in (q, k, v)], dim=2)
        if sinks is not None and self.sequence.group is not None:
            sinks = sinks.chunk(self.world_size)[dist.get_rank(self.sequence.group)]
        return Projection(qkv, sinks)

    def _by_rank(self, x: Tensor) -> Tensor:
        """[1, P·m, c, D] -> [P, c, m, D]"""
        return x[0].unflatten(0, (self.world_size, -1)).transpose(1, 2)

    def _exchange(self, x: Tensor) -> Tensor:
        """[P, ...]: slice p to rank p, without a graph."""
        x = x.detach()
        return x if self.sequence.group is None else all_to_all(x, self.sequence.group)

    def _by_group(self, x: Tensor) -> Tensor:
        """[P, c, m, D] -> [G, P, c, m/G, D], the inverse of `_by_source`."""
        return x.unflatten(2, (self._num_groups, -1)).permute(2, 0, 1, 3, 4)

    def _of_ranks(self, host: Tensor, at: slice) -> Tensor:
        """[G, S, m, D] in host memory -> [G, P, c, m, D], a view: this chunk of every rank's tokens."""
        return host.unflatten(1, (self.world_size, -1))[:, :, at]

    def _own_tokens(self, rows: Tensor) -> Tensor:
        """[G, P, c, h, D], this rank's heads of every rank's tokens -> [1, H, c, D], this rank's tokens."""
        return self._exchange(_by_source(rows)).transpose(1, 2).flatten(0, 1)[None]

    def _host(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return host_empty(*shape, dtype=dtype, device=self.copies.device)


def _by_source(x: Tensor) -> Tensor:
    """[G, P, c, m, D] -> [P, c, G·m, D]"""
    return x.permute(1, 2, 0, 3, 4).flatten(2, 3)


class RunChunked(torch.autograd.Function):
    """(layer, hidden [1, S/P, h], its parameters) -> [1, S/P, h]; keeps `hidden` alone, in host memory."""

    @staticmethod
    def forward(ctx, layer: ChunkedLayer, hidden: Tensor, *parameters: Tensor) -> Tensor:
        ctx.layer, ctx.parameters = layer, parameters
        ctx.save_for_backward(hidden)
        return layer.forward(hidden)

    @staticmethod
    def backward(ctx, grad_result: Tensor):
        check_one_thread(ctx.layer.copies.device)
        grad_hidden, grads = ctx.layer.backward(*ctx.saved_tensors, grad_result, ctx.parameters)
        return None, grad_hidden, *grads


PER_TOKEN = ("position_ids", "cache_position")
"""Tensors among a layer's keywords with a number for each token, in their last dimension."""


def _chunk_of(value: Any, at: slice, name: str) -> Any:
    """Return the part of the layer's keyword that belongs to a chunk."""
    if isinstance(value, LazyTokens):
        return value.make(at)
    if isinstance(value, Tensor) and name in PER_TOKEN:
        return value[..., at]
    if uncut := [x for x in (value if isinstance(value, tuple | list) else [value]) if isinstance(x, Tensor)]:
        raise ValueError(
            f"layers are given a tensor {name} of shape {tuple(uncut[0].shape)}, which the sequence-chunked step does "
            "not know how to cut. Leave out sequence_chunk_size for this model."
        )
    return value


def install_chunked(model: PreTrainedModel, size: int, device: torch.device, kept: LayerCheckpoints) -> None:
    """Make every decoder layer of `model` run over `size` tokens at a time, in training and evaluation.

    Embeddings, layers and the final norm then hand on host tensors [1, S/P, h]. A layer keeps its input there; all
    else is computed again in the backward pass, so that activation checkpointing has nothing left to do and stays off.
    Call this in the thread that will call backward: see `keep_backward_in_one_thread`.

    Args:
        device: what computes.
        kept: the layers that keep what attention returned, as large as one more input of each, so that attention is not
            computed again: the `selective` last ones, in host memory, or on the device for those after the first
            `offloaded` ones.

    Raises:
        ValueError: if `size` is below 1, or the model has layers that mix tokens in another way than by attention,
            or layers that share keys and values.
    """
    if size < 1:
        raise ValueError(f"sequence_chunk_size {size} is below 1. Use a few thousand tokens.")
    if obstacle := chunk_obstacle(model.config):
        raise ValueError(f"sequence_chunk_size {size}: {model.config.model_type}'s {obstacle}. Leave it out.")
    keep_backward_in_one_thread()
    copies = Copies(device)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    blocks = next(m for m in model.modules() if any(child is layers[0] for child in m.children()))
    backbone = next(m for m in model.modules() if any(child is blocks for child in m.children()))
    for number, layer in enumerate(layers):
        gather_once(layer)
        forward = inspect.unwrap(type(layer).forward)
        where = _kept_by(number, kept, len(layers))
        replace_forward(layer, partial(_layer_forward, layer, partial(forward, layer), size, copies, where))
        layer.register_forward_pre_hook(ask_for_gradient)
    for child in backbone.children():
        if child is blocks:
            continue
        tables = [module for module in child.modules() if _has_frequencies(module)]
        for table in tables:
            replace_forward(table, partial(_lazy_forward, table.forward, device))
        if not tables:
            replace_forward(child, partial(run_in_tiles, child, child.forward, size, copies))
    wrap_checkpointing_setter(model, lambda *args, **kwargs: None)


def _has_frequencies(module: nn.Module) -> bool:
    """Whether a module makes RoPE's tables."""
    return any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))


def _kept_by(number: int, kept: LayerCheckpoints, num_layers: int) -> KeptOutput:
    """Return where a layer, counted from 0, keeps what its attention returned."""
    if kept.selective is not None and number < num_layers - kept.selective:
        return None
    return "host" if kept.offloaded is None or number < kept.offloaded else "device"


def _layer_forward(
    layer: nn.Module,
    forward: Callable[..., Tensor],
    size: int,
    copies: Copies,
    kept: KeptOutput,
    hidden_states: Tensor,
    *,
    sequence: AttentionContext,
    **keywords: Any,
) -> Tensor:
    step = ChunkedLayer(keep_pass(forward), keywords, sequence=sequence, size=size, kept=kept, copies=copies)
    return RunChunked.apply(step, hidden_states, *trained(layer))


def _lazy_forward(
    forward: Callable[..., Any], device: torch.device, x: Tensor, position_ids: Tensor, *args: Any, **keywords: Any
) -> LazyTokens:
    """RoPE's table for a chunk when a layer asks, instead of one of all tokens; `x` says dtype and device alone."""
    empty = torch.empty(0, dtype=x.dtype, device=device)
    return LazyTokens(lambda at: forward(empty, position_ids[:, at], *args, **keywords))

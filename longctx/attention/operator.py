"""The one differentiable attention operator, whose backends differ in the schedule.

A schedule computes attention forward and backward from blocks and messages, without autograd. Selective activation
checkpointing saves the output of the function around it, instead of running the schedule, communication included, a
second time. Where attention is one call of one kernel, that kernel's own differentiable operator takes the place of
both, which asks less of the host.

Shape legend: S tokens this rank holds, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from longctx.attention.branches import add_gradients, own_entries, parts_forward, refuse_branches, segments_of_tokens
from longctx.attention.kernels import Entries, Operator, block_backward, block_operator
from longctx.regions import region
from longctx.sequence.batch import PLAIN, AttentionKind
from longctx.sequence.layout import Layout


class Schedule(Protocol):
    """The blocks that a rank computes and the messages that it sends. Any number of layers can share a schedule."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """q [1, H, S, D], k and v [1, K, S, D] -> out [1, H, S, D] of any dtype, lse [1, H, S] in fp32 or wider."""

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v in any dtype, given the final `out` and `lse`."""


class LocalSchedule:
    """Attention over documents that all lie on this device, in one block.

    Args:
        cu_seqlens: int [n + 1], boundaries of the documents, from 0 to S.
        kind: the window, the chunks and the soft cap of the layers.
        segments: of documents that branch; None if none does.

    Raises:
        ValueError: for windows or chunks in documents that branch.
    """

    def __init__(self, cu_seqlens: np.ndarray, kind: AttentionKind = PLAIN, segments: Layout | None = None):
        self._operators: dict[Hashable, Operator | None] = {}
        boundaries = kind.boundaries(cu_seqlens)
        window = binding_window(kind.window, boundaries)
        if segments is None:
            self.parts = [Entries.of_documents(boundaries, window, kind.softcap)]
            return
        if window is not None or len(boundaries) > len(cu_seqlens):
            refuse_branches(kind)
        of_token = segments_of_tokens(segments, np.arange(cu_seqlens[-1]))
        self.parts = own_entries(segments, of_token, kind.softcap)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return parts_forward(q, k, v, self.parts, scale)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradients = block_backward(grad_out, q, k, v, out, lse, self.parts[0], scale)
        for entries in self.parts[1:]:
            add_gradients(gradients, entries, block_backward(grad_out, q, k, v, out, lse, entries, scale))
        return gradients

    def operator(self, q: Tensor, k: Tensor, v: Tensor) -> Operator | None:
        """Return the one differentiable call that computes such tensors, if there is one; all layers share it."""
        key = q.dtype, q.device, q.shape, k.shape, v.shape
        if key not in self._operators:
            self._operators[key] = block_operator(q, k, v, self.parts[0]) if len(self.parts) == 1 else None
        return self._operators[key]


def attend(
    schedule: Schedule, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Compute differentiable attention by a schedule.

    q [1, H, S, D], k and v [1, K, S, D] -> [1, H, S, D] of q's dtype.

    Args:
        scale: factor of the scores before the softmax; 1/sqrt(D) if None.
        sinks: [H], for each head a logit that takes part in every softmax and adds nothing to the output
            (https://arxiv.org/abs/2309.17453, as in gpt-oss).

    Raises:
        ValueError: for dtypes that are not supported or mixed, tensors on several devices, or sinks that do not fit.
    """
    if not (q.dtype is k.dtype is v.dtype and q.dtype in DTYPES):
        supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ValueError(
            f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; attention takes one dtype of {supported}. "
            "Cast them to it, or run the model under torch.autocast."
        )
    if not q.device == k.device == v.device:
        raise ValueError(f"q is on {q.device}, k on {k.device} and v on {v.device}. Move them to one device.")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"sinks has shape {tuple(sinks.shape)}, expected [{q.shape[1]}], one for each query head.")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if sinks is None and _checkpointed.run is None and isinstance(schedule, LocalSchedule):
        operator = schedule.operator(q, k, v)
        if operator is not None:
            with region("attention", "attention"):
                return operator(q, k, v, scale)
    return _Attention.apply(q, k, v, sinks, schedule, scale)


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def binding_window(window: int | None, cu_seqlens: np.ndarray) -> int | None:
    """Return the window, or None if no document is longer: full attention then gives the same result, faster."""
    return None if window is None or window >= np.diff(cu_seqlens).max() else window


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: np.ndarray,
    scale: float | None = None,
    *,
    kind: AttentionKind = PLAIN,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute causal attention within each document on one device.

    q [1, H, S, D], k and v [1, K, S, D] -> [1, H, S, D]. See `LocalSchedule` and `attend` for the other arguments.
    """
    return attend(LocalSchedule(cu_seqlens, kind), q, k, v, scale, sinks)


class _Attention(torch.autograd.Function):
    """Attention by a schedule. Its backward pass starts from the final `out` and `lse`, which make blocks independent.

    (q, k, v, sinks, schedule, scale) -> out
    """

    @staticmethod
    def forward(ctx, *attention):
        q, k, v, sinks, ctx.schedule, ctx.scale = attention
        run = _checkpointed.run
        out, lse = _run_schedule(*attention) if run is None else run(*attention)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out):
        q, k, v, sinks, out, lse = ctx.saved_tensors
        with region("attention backward", "attention"):
            dq, dk, dv = ctx.schedule.backward(grad_out, q, k, v, out, lse, ctx.scale)
        d_sinks = None if sinks is None else sinks_gradient(grad_out, out, lse, sinks).to(sinks.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_sinks, None, None


def _run_schedule(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, schedule: Schedule, scale: float
) -> tuple[Tensor, Tensor]:
    """Return out [1, H, S, D] of q's dtype and lse [1, H, S], sinks included."""
    with region("attention", "attention"):
        out, lse = schedule.forward(q, k, v, scale)
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks)
    return out.to(q.dtype), lse


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return out [1, H, S, D] and lse [1, H, S] after sinks [H] have joined the softmax."""
    sinks = sinks.to(lse.dtype)[:, None]
    out = out * torch.sigmoid(lse - sinks)[..., None]
    lse = torch.logaddexp(lse, sinks)
    return out, lse


def sinks_gradient(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of sinks [H], in lse's dtype, from the final `out` and `lse`.

    A sink is a key whose value is 0.
    """
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -(torch.exp(sinks.to(lse.dtype)[:, None] - lse) * delta).sum((0, 2))


class _Checkpointed(threading.local):
    """The run of a checkpointed layer that this thread is in. Backward passes have threads of their own on a GPU."""

    run: _FirstRun | None = None


_checkpointed = _Checkpointed()


class _FirstRun:
    """The first run of a checkpointed layer, which keeps what attention returns."""

    def __init__(self, saved: deque[tuple[Any, ...]], convert: Callable[[Any], Any]):
        self.saved, self.convert = saved, convert

    def __enter__(self) -> None:
        self.around, _checkpointed.run = _checkpointed.run, self

    def __exit__(self, *error: object) -> None:
        _checkpointed.run = self.around

    def __call__(self, *attention: Any) -> tuple[Tensor, Tensor]:
        out, lse = _run_schedule(*attention)
        self.saved.append((self.convert(out.detach()), self.convert(lse)))
        return out, lse


class _SecondRun(_FirstRun):
    """The second run of a checkpointed layer, where attention returns what was kept, in the order of the first run.

    All else runs, whether the first run had it or not. Torch's own selective checkpoints raise an error if it had not.
    But ZeRO-3 gathers and frees weights inside a layer, and not always in both runs: an evaluation in between leaves
    some in place.
    """

    def __call__(self, *attention: Any) -> tuple[Tensor, Tensor]:
        if not self.saved:
            raise RuntimeError(
                "A checkpointed layer ran attention again after its saved output was used: a second backward pass "
                "over the same graph. Call longctx.parallelize with selective_checkpointing=False for that."
            )
        out, lse = map(self.convert, self.saved.popleft())
        if out.is_cuda:
            # The node that fetches them here is done before attention's backward pass reads them. TRL's hooks, which
            # copy them from the host in a stream of their own, would then let that stream write to their memory.
            for x in (out, lse):
                x.record_stream(torch.cuda.current_stream(x.device))
        return out, lse


def selective_checkpoint_contexts() -> tuple[_FirstRun, _SecondRun]:
    """Return the contexts of torch.utils.checkpoint's `context_fn`: save attention's output, recompute all else.

    For checkpoints that are not reentrant. The output is saved as autograd saves the layer's input: in host memory if
    hooks around the layer offload it.
    """
    saved: deque[tuple[Any, ...]] = deque()
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True) or (_as_it_is, _as_it_is)
    return _FirstRun(saved, pack), _SecondRun(saved, unpack)


def _as_it_is(x: Tensor) -> Tensor:
    return x

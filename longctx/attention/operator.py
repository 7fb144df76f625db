"""The one differentiable attention operator, whose backends differ in the schedule.

A schedule computes attention forward and backward from blocks and messages, without autograd. The operator around it is
a `torch.library` op, so that selective activation checkpointing can save its output instead of running the schedule,
communication included, a second time.

Shape legend: S tokens this rank holds, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longctx.attention.branches import own_entries, parts_backward, parts_forward, refuse_branches, segments_of_tokens
from longctx.attention.kernels import Entries
from longctx.packing.branches import Segments
from longctx.regions import region
from longctx.sequence.batch import PLAIN, AttentionKind


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

    def __init__(self, cu_seqlens: np.ndarray, kind: AttentionKind = PLAIN, segments: Segments | None = None):
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
        return parts_backward(grad_out, q, k, v, out, lse, self.parts, scale)


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
    _check(q, k, v, sinks)
    _schedules[id(schedule)] = schedule
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return torch.ops.longctx.attention(q, k, v, sinks, id(schedule), scale)[0]


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _check(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    if q.dtype not in DTYPES or {k.dtype, v.dtype} != {q.dtype}:
        supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ValueError(
            f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; attention takes one dtype of {supported}. "
            "Cast them to it, or run the model under torch.autocast."
        )
    if {k.device, v.device} != {q.device}:
        raise ValueError(f"q is on {q.device}, k on {k.device} and v on {v.device}. Move them to one device.")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"sinks has shape {tuple(sinks.shape)}, expected [{q.shape[1]}], one for each query head.")


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


_schedules: WeakValueDictionary[int, Schedule] = WeakValueDictionary()
"""Schedules by id, since an op takes only tensors and numbers. The caller of `attend` keeps its schedule alive."""


def run_schedule(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, schedule: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Run the op's body: return out [1, H, S, D] of q's dtype and lse [1, H, S], sinks included."""
    with region("attention", "attention"):
        out, lse = _schedules[schedule].forward(q, k, v, scale)
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


_attention = torch.library.custom_op("longctx::attention", run_schedule, mutates_args=())


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, schedule: int, scale: float) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse


def _keep(ctx, inputs, output) -> None:
    q, k, v, sinks, schedule, ctx.scale = inputs
    ctx.schedule = _schedules[schedule]
    ctx.save_for_backward(q, k, v, sinks, *output)


def _backward(ctx, grad_out: Tensor, _: Tensor):
    """Compute the gradients from the final `out` and `lse`, with which every block's gradient is independent."""
    q, k, v, sinks, out, lse = ctx.saved_tensors
    with region("attention backward", "attention"):
        grads = ctx.schedule.backward(grad_out, q, k, v, out, lse, ctx.scale)
    dq, dk, dv = (grad.to(x.dtype) for grad, x in zip(grads, (q, k, v), strict=True))
    if sinks is None:
        return dq, dk, dv, None, None, None
    return dq, dk, dv, sinks_gradient(grad_out, out, lse, sinks).to(sinks.dtype), None, None


_attention.register_autograd(_backward, setup_context=_keep)


class _SaveAttention(TorchDispatchMode):
    """The first run of a checkpointed layer, which keeps what attention returns."""

    def __init__(self, saved: deque[tuple[Any, ...]], convert: Callable[[Any], Any]):
        super().__init__()
        self.saved, self.convert = saved, convert

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.longctx.attention.default:
            self.saved.append(tuple(self.convert(x.detach()) for x in result))
        return result


class _ReuseAttention(_SaveAttention):
    """The second run of a checkpointed layer, where attention returns what was kept, in the order of the first run.

    Every other op runs, whether the first run had it or not. Torch's own mode raises an error if it had not. But ZeRO-3
    gathers and frees weights inside a layer, and not always in both runs: an evaluation in between leaves some in
    place.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.longctx.attention.default:
            return func(*args, **(kwargs or {}))
        if not self.saved:
            raise RuntimeError(
                "A checkpointed layer ran attention again after its saved output was used: a second backward pass "
                "over the same graph. Call longctx.parallelize with selective_checkpointing=False for that."
            )
        return tuple(map(self.convert, self.saved.popleft()))


def selective_checkpoint_contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the contexts of torch.utils.checkpoint's `context_fn`: save attention's output, recompute all else.

    For checkpoints that are not reentrant. The output is saved as autograd saves the layer's input: in host memory if
    hooks around the layer offload it.
    """
    saved: deque[tuple[Any, ...]] = deque()
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True) or (_as_it_is, _as_it_is)
    return _SaveAttention(saved, pack), _ReuseAttention(saved, unpack)


def _as_it_is(x: Tensor) -> Tensor:
    return x

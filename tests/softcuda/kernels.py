"""Kernels that only CUDA has, in Python on the same bytes: flash attention, cuDNN's attention, fp32 results of bf16,
histograms of integers.

Shape legend: T tokens of all documents, H query heads, K key/value heads, D head size, n queries and m keys of one
document. Attention is computed in fp32, as the kernels accumulate, and rounded once at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.softcuda.library import library

_library = torch.library.Library("aten", "IMPL", "CUDA")


def install() -> None:
    """Register them at the CUDA key."""
    for name, kernel in {
        "_flash_attention_forward": _flash_forward,
        "_flash_attention_backward": _flash_backward,
        "_scaled_dot_product_cudnn_attention": _cudnn_forward,
        "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
        "addmm.dtype": _addmm,
        "addmm.dtype_out": _addmm_out,
        "histc": _histc,
        "mm.dtype": _mm,
    }.items():
        _library.impl(name, _as_one_kernel(name, kernel))


def _as_one_kernel(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Have a watcher of the device see one kernel, and not the copies to the host that it is made of here."""

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        library.soft_enter_kernel()
        try:
            results = kernel(*args, **kwargs)
        finally:
            library.soft_leave_kernel()
        read, written = (
            [x for x in tensors if isinstance(x, Tensor) and x.is_cuda]
            for tensors in ((*args, *kwargs.values()), results if isinstance(results, tuple) else (results,))
        )
        torch.ops.softcuda.tell_kernel(f"aten::{name}", read, written)
        return results

    return run


def _host(tensor: Tensor) -> Tensor:
    return torch.ops.softcuda.cpu_alias(tensor)


def _documents(q: Tensor, k: Tensor, cu_q: Tensor | None, cu_k: Tensor | None) -> Iterator[tuple[slice, slice]]:
    if cu_q is None or cu_k is None:
        yield slice(0, len(q)), slice(0, len(k))
        return
    bounds = [_host(x).tolist() for x in (cu_q, cu_k)]
    yield from zip(*([slice(*pair) for pair in pairwise(b)] for b in bounds), strict=True)


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool, left: int | None, right: int | None) -> Tensor:
    """q [n, H, D], k [m, K, D] -> fp32 [H, n, m], masked as FlashAttention does: the last query sees the last key."""
    scores = torch.einsum("nhd,mhd->hnm", q.float(), _repeat(k, q)) * scale
    n, m = scores.shape[1:]
    distance = torch.arange(n)[:, None] + m - n - torch.arange(m)
    hidden = torch.zeros(n, m, dtype=torch.bool)
    left, right = (-1 if x is None else x for x in (left, right))
    if causal or right >= 0:
        hidden |= distance < -(0 if causal else right)
    if left >= 0:
        hidden |= distance > left
    return scores.masked_fill(hidden, -torch.inf)


def _repeat(kv: Tensor, q: Tensor) -> Tensor:
    """[m, K, D] -> fp32 [m, H, D]"""
    return kv.float().repeat_interleave(q.shape[1] // kv.shape[1], 1)


def _flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    debug: bool = False,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **_: Any,
) -> tuple[Tensor, ...]:
    """q [T, H, D], k and v [T, K, D] -> out [T, H, D], lse fp32 [H, T], and what only dropout uses."""
    assert q.dtype in (torch.float16, torch.bfloat16), f"FlashAttention only supports fp16 and bf16, not {q.dtype}"
    device, (q, k, v) = q.device, (_host(x) for x in (q, k, v))
    out, lse = torch.empty_like(q, memory_format=torch.contiguous_format), torch.empty(q.shape[1], len(q))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    for of_q, of_k in _documents(q, k, cu_q, cu_k):
        scores = _scores(q[of_q], k[of_k], scale, causal, window_size_left, window_size_right)
        lse[:, of_q] = scores.logsumexp(-1)
        weights = torch.exp(scores - lse[:, of_q, None])
        out[of_q] = torch.einsum("hnm,mhd->nhd", weights, _repeat(v[of_k], q)).to(q.dtype)
    seed = torch.empty(2, dtype=torch.uint64, device=device)
    nothing = torch.empty(0, device=device)
    return out.to(device), lse.to(device), seed, nothing, nothing.to(q.dtype)


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    *_: Any,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **__: Any,
) -> tuple[Tensor, ...]:
    """The gradients of q, k and v, from any `out` and `lse`: a ring's are those of all keys."""
    device, (grad, q, k, v, out, lse) = q.device, (_host(x) for x in (grad, q, k, v, out, lse))
    grad_q, grad_k, grad_v = (torch.zeros(x.shape) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    for of_q, of_k in _documents(q, k, cu_q, cu_k):
        scores = _scores(q[of_q], k[of_k], scale, causal, window_size_left, window_size_right)
        weights = torch.exp(scores - lse[:, of_q, None])
        of_out = grad[of_q].float()
        delta = (of_out * out[of_q].float()).sum(-1).T[..., None]
        of_scores = weights * (torch.einsum("nhd,mhd->hnm", of_out, _repeat(v[of_k], q)) - delta) * scale
        grad_q[of_q] = torch.einsum("hnm,mhd->nhd", of_scores, _repeat(k[of_k], q))
        grad_k[of_k] = _fold(torch.einsum("hnm,nhd->mhd", of_scores, q[of_q].float()), k)
        grad_v[of_k] = _fold(torch.einsum("hnm,nhd->mhd", weights, of_out), k)
    return tuple(x.to(q.dtype).to(device) for x in (grad_q, grad_k, grad_v))


def _fold(grad: Tensor, kv: Tensor) -> Tensor:
    """[m, H, D] -> [m, K, D], summed over the query heads of each key/value head."""
    return grad.unflatten(1, (kv.shape[1], -1)).sum(2)


def _cudnn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    compute_lse: bool,
    dropout: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """[1, H, T, D], one document."""
    rows = [x[0].transpose(0, 1) for x in (q, k, v)]
    out, lse, *_ = _flash_forward(*rows, None, None, 0, 0, 0.0, causal, scale=scale)
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    return out.transpose(0, 1)[None], lse[None, ..., None], None, None, q.shape[2], k.shape[2], seed, seed, None


def _cudnn_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    seed: Tensor,
    offset: Tensor,
    bias: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    rows = [x[0].transpose(0, 1) for x in (grad, q, k, v, out)]
    grads = _flash_backward(*rows, lse[0, ..., 0], None, None, 0, 0, 0.0, causal, scale=scale)
    return tuple(x.transpose(0, 1)[None] for x in grads)


def _histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Of integers, too, which the CPU refuses."""
    return torch.histc(_host(x).double(), bins, min, max).to(x.dtype).to(x.device)


def _mm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    return (_host(a).to(out_dtype) @ _host(b).to(out_dtype)).to(a.device)


def _addmm(x: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1) -> Tensor:
    out = torch.empty(a.shape[0], b.shape[1], dtype=out_dtype, device=a.device)
    return _addmm_out(x, a, b, out_dtype, beta=beta, alpha=alpha, out=out)


def _addmm_out(
    x: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1, out: Tensor
) -> Tensor:
    assert out.dtype == out_dtype, f"out is {out.dtype}, not {out_dtype}"
    assert a.dtype == b.dtype, f"factors are {a.dtype} and {b.dtype}"
    _host(out).copy_(beta * _host(x) + alpha * (_host(a).to(out_dtype) @ _host(b).to(out_dtype)))
    return out

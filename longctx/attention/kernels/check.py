"""The check that a kernel is exact on this machine: packed problems of each kind, against plain attention in fp64.

Libraries change their signatures, layouts and conventions from one release to the next, and not all releases were
available when this was written. So every kernel is checked before it is used.

Another library's kernel is checked in a separate process. Such a library was built for certain releases of torch and
certain GPUs. With others it may access invalid memory. CUDA then no longer works in that process, so no other kernel
could be tried.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from longctx.attention.kernels import flash_attn
from longctx.attention.kernels.blockwise import DenseKernel
from longctx.attention.kernels.entries import Entries, Inputs, Kernel
from longctx.sequence.host_tensors import saved_in_place
from longctx.untrusted.working_directory import without_working_directory

BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest relative error of an entry's out and gradients, and largest absolute error of its lse.

In fp64 and fp32 it is what users are promised. In fp16 and bf16 it is twice the rounding of one number, of which
FlashAttention's own rounding makes a fifth. One key too many or too few in a window of 30 makes ten times the bound."""

Sizes: TypeAlias = list[tuple[int, int]]

DOCUMENTS: Sizes = [(n, n) for n in (130, 1, 1, 70, 257)]
LED: Sizes = [(40, 40), (1, 90), (30, 161)]
FULL: Sizes = [(64, 131), (1, 90), (200, 1), (33, 33)]
ROWS_OF_LONGER = ", rows of longer tensors"
LONG: Sizes = [(16, 10_000), (5, 70)]
"""More keys than a kernel has in one tile, or in one part of a split row. Few queries keep fp64 fast."""
KINDS: dict[str, tuple[Sizes, bool, int | None]] = {
    "documents": (DOCUMENTS, True, None),
    "one document": ([(384, 384)], True, None),
    "one-token documents": ([(1, 1)] * 5, True, None),
    "more keys than queries": (LED, True, None),
    "full entries": (FULL, False, None),
    "one full entry": ([(200, 330)], False, None),
    "one-token queries": ([(1, 300), (1, 70)], False, None),
    "window of 30": (DOCUMENTS, True, 30),
    "window of 1": (DOCUMENTS, True, 1),
    "window of 30, more keys than queries": (LED, True, 30),
    f"documents{ROWS_OF_LONGER}": (DOCUMENTS, True, None),
    f"more keys than queries{ROWS_OF_LONGER}": (LED, True, None),
    f"one full entry{ROWS_OF_LONGER}": ([(200, 330)], False, None),
    "few queries of a long document": (LONG, True, None),
    "few keys for many queries": ([(keys, queries) for queries, keys in LONG], False, None),
}
"""Name of a problem -> (queries, keys) of each entry, whether it is causal, and its window."""

SOFTCAP = 2.0
"""A soft cap that changes most scores of these problems, whose standard deviation is 1."""


def disagreement(kernel: Kernel, inputs: Inputs) -> str | None:
    """Return what is wrong with the kernel's results for such inputs, with value and bound; None if they are exact."""
    device, dtype, head_dim, queries_per_key, windowed, capped = inputs
    for kind, (sizes, causal, window) in KINDS.items():
        entries = make_entries(sizes, causal, window, SOFTCAP if capped else None)
        if (window is not None and not windowed) or not kernel.takes(entries):
            continue
        tensors = make_inputs(sizes, (2 * queries_per_key, 2), head_dim, dtype)
        place = _as_rows if kind.endswith(ROWS_OF_LONGER) else Tensor.to
        try:
            for name, error in _errors(kernel, partial(place, device=device), entries, *tensors):
                if not error <= BOUNDS[dtype]:  # NaN is wrong too
                    return f"{name} is off by {error:.1e} on {kind}, allowed is {BOUNDS[dtype]:.1e}"
        except Exception as error:  # whatever a foreign library raises, the next kernel is tried
            return f"it fails on {kind}: {_first_line(error)}"
    return None


def why_not_exact(dtype: torch.dtype, errors: Callable[[], Iterable[tuple[float, float]]]) -> str | None:
    """Return how a kernel outside attention is wrong or fails on this machine; None if it is exact.

    Args:
        dtype: of its inputs.
        errors: computes relative errors of its results, each with its bound.
    """
    word = "bf16" if dtype == torch.bfloat16 else str(dtype).removeprefix("torch.")
    try:
        for error, bound in errors():
            if not error <= bound:  # NaN is wrong too
                return f"is off by {error:.1e} on this machine in {word}, and {bound:.0e} is allowed"
    except torch.OutOfMemoryError:
        raise
    except Exception as failure:  # whatever a compiler or driver raises
        return f"fails on this machine in {word}: {_first_line(failure)}"
    return None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def make_entries(sizes: Sizes, causal: bool, window: int | None = None, softcap: float | None = None) -> Entries:
    """Return entries of these (queries, keys) sizes, one after the other."""
    ends = np.cumsum(sizes, axis=0)
    q_ranges, kv_ranges = np.stack((ends - sizes, ends), axis=-1).transpose(1, 0, 2)
    return Entries(q_ranges, kv_ranges, causal, window, softcap)


def make_inputs(sizes: Sizes, heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    """Return q, k, v and an output gradient, [1, heads, tokens, D], the same at every call."""
    generator = torch.Generator().manual_seed(0)
    num_queries, num_keys = np.sum(sizes, axis=0)
    shapes = [(heads[0], num_queries), (heads[1], num_keys), (heads[1], num_keys), (heads[0], num_queries)]
    return [torch.randn(1, *shape, head_dim, generator=generator).to(dtype) for shape in shapes]


def _as_rows(x: Tensor, device: torch.device) -> Tensor:
    """Copy x [1, H, N(, D)] to the device as models and rings pass it.

    The result is a slice of a longer tensor, in which the heads of a row lie together.
    """
    longer = torch.zeros(1, x.shape[2] + 7, x.shape[1], *x.shape[3:], dtype=x.dtype, device=device).transpose(1, 2)
    return longer[:, :, 3:-4].copy_(x)


def _errors(
    kernel: Kernel,
    place: Callable[[Tensor], Tensor],
    entries: Entries,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
) -> Iterator[tuple[str, float]]:
    """Yield the name and error of each result.

    Args:
        place: copies a tensor to the device in some layout.
    """
    dense, scale = DenseKernel(), q.shape[-1] ** -0.5
    exact_q, exact_k, exact_v = q.double(), k.double(), v.double()
    q, k, v = place(q), place(k), place(v)
    exact_out, exact_lse = dense.forward(exact_q, exact_k, exact_v, entries, scale)
    out, lse = kernel.forward(q, k, v, entries, scale)
    queries, keys = zip(*entries.compact, strict=True)
    yield "out", _relative_error(out, exact_out, queries)
    yield "lse", float((lse.cpu().double() - exact_lse).abs().max())

    # The out and lse of a softmax in which other keys take part, too.
    wider_out, wider_lse = (0.5 * exact_out).to(q.dtype), (exact_lse + 1.0).to(lse.dtype)
    grads = kernel.backward(place(grad_out), q, k, v, place(wider_out), place(wider_lse), entries, scale)
    wider_out, wider_lse = wider_out.double(), wider_lse.double()
    exact = dense.backward(grad_out.double(), exact_q, exact_k, exact_v, wider_out, wider_lse, entries, scale)
    for name, actual, wanted, at in zip(("dq", "dk", "dv"), grads, exact, (queries, keys, keys), strict=True):
        yield name, _relative_error(actual, wanted, at)

    operator = kernel.operator(entries)
    if operator is None or 1 in (entries.window, entries.num_keys.max()):  # one key's scores have no gradient
        return
    for x in (q, k, v):
        x.requires_grad_()
    # A checkpointed layer, in whose forward pass a kernel may be chosen, would be recomputed for what is saved here.
    with torch.enable_grad(), saved_in_place():
        out = operator(q, k, v, scale)
    results = out.detach(), *torch.autograd.grad(out, (q, k, v), place(grad_out))
    exact = dense.backward(grad_out.double(), exact_q, exact_k, exact_v, exact_out, exact_lse, entries, scale)
    wanted_results, places = (exact_out, *exact), (queries, queries, keys, keys)
    for name, actual, wanted, at in zip(("out", "dq", "dk", "dv"), results, wanted_results, places, strict=True):
        yield f"{name} of its operator", _relative_error(actual, wanted, at)


def _relative_error(actual: Tensor, exact: Tensor, entries: tuple[slice, ...]) -> float:
    """Return the largest relative error of an entry.

    It is relative to the entry's own norm, or to a typical one of its size if that is larger.
    """
    difference, typical = actual.cpu().double() - exact, exact.square().mean().sqrt()
    errors = [difference[:, :, at].square().mean().sqrt() for at in entries]
    norms = [exact[:, :, at].square().mean().sqrt().clamp(min=typical) for at in entries]
    return float((torch.stack(errors) / torch.stack(norms)).max())


LONGEST_SECONDS = 600.0
"""Most seconds for the check, which may compile kernels. A library that takes longer is passed over."""

_CODE = "from longctx.attention.kernels.check import main; main()"


def disagreement_elsewhere(kernel: flash_attn.FlashAttentionKernel, inputs: Inputs) -> str | None:
    """Return `disagreement` from a separate process, or how that process ended if it gave no result."""
    device, dtype, *problem = inputs
    what = [type(kernel).__name__, kernel.release, str(device), str(dtype), *problem]
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CODE, json.dumps(what)],
            env=os.environ | without_working_directory(),
            capture_output=True,
            text=True,
            timeout=LONGEST_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"a process that checked it had no result after {LONGEST_SECONDS:.0f} s"
    with suppress(ValueError, IndexError):
        return json.loads(done.stdout.splitlines()[-1])[0]
    if done.returncode < 0:
        ending = f"was ended by {signal.Signals(-done.returncode).name}"
    else:
        ending = f"ended with exit code {done.returncode}: {done.stderr.strip().rpartition(chr(10))[2]}"
    return f"a process that checked it {ending}"


def main() -> None:
    """Check the kernel that the last argument describes, and print the result as JSON."""
    kind, release, device, dtype, *problem = json.loads(sys.argv[-1])
    where = torch.device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    kernel = getattr(flash_attn, kind)(release)
    wrong = disagreement(kernel, Inputs(where, getattr(torch, dtype.removeprefix("torch.")), *problem))
    print(json.dumps([wrong]), flush=True)

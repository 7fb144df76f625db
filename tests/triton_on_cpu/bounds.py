"""Bounds of every load, store and atomic of an interpreted kernel: the tensors that its launch was given.

A tensor's bounds are those of its own elements, not of the storage that it is a view of: its neighbours there are out
of bounds, too. Masked lanes may point anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle
from triton.tools.tensor_descriptor import TensorDescriptor


class OutOfBounds(AssertionError):
    """A kernel reached outside its tensors. Triton wraps it in an InterpreterError with the same text."""


class _Launch:
    """What the running kernel may reach."""

    name = ""
    names: ClassVar[list[str]] = []
    """Every kernel that ran, in order."""
    starts = np.empty(0, np.uint64)
    ends = np.empty(0, np.uint64)
    """Addresses in bytes, ordered by start; no interval lies in an earlier one."""


def install() -> None:
    """Check every kernel that this process interprets."""
    init_arguments = GridExecutor._init_args_hst

    def init(self, arguments, keywords):
        on_host = init_arguments(self, arguments, keywords)
        _Launch.name = self.fn.__name__
        _Launch.names.append(_Launch.name)
        _Launch.starts, _Launch.ends = _intervals([*on_host[0], *on_host[1].values()])
        return on_host

    GridExecutor._init_args_hst = init
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    atomic = InterpreterBuilder.create_atomic_rmw

    def checked_load(self, pointers, mask, *rest):
        _check("load", self.grid_idx, pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self, pointers, value, mask, *rest):
        _check("store", self.grid_idx, pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def checked_atomic(self, operation, pointers, value, mask, *rest):
        _check("atomic", self.grid_idx, pointers, mask)
        return atomic(self, operation, pointers, value, mask, *rest)

    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = checked_load, checked_store
    InterpreterBuilder.create_atomic_rmw = checked_atomic


def launched() -> list[str]:
    """The names of the kernels that this process has run; clear it to begin anew."""
    return _Launch.names


def _tensors(arguments: Any) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, tuple):
            yield from _tensors(argument)
        elif isinstance(argument, TensorDescriptor):
            yield from _tensors([argument.base])


def _intervals(arguments: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """[start, end) of each tensor that holds anything; of one within another, the larger alone."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(_interval(x) for x in _tensors(arguments) if x.numel()):
        if merged and end <= merged[-1][1]:
            continue
        merged.append((start, end))
    starts, ends = zip(*merged, strict=True) if merged else ((), ())
    return np.array(starts, np.uint64), np.array(ends, np.uint64)


def _interval(x: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def _check(kind: str, program: tuple[int, ...], pointers: TensorHandle, mask: TensorHandle) -> None:
    """Check that every lane that is not masked lies in one of the launch's tensors.

    Raises:
        OutOfBounds: with the kernel, the program, and how far off the first lane is.
    """
    addresses, taken = np.broadcast_arrays(pointers.data, mask.data)
    addresses = addresses[taken.astype(bool)].astype(np.uint64)
    if not addresses.size:
        return
    width = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
    if not len(_Launch.starts):
        raise OutOfBounds(f"{kind} out of bounds in {_Launch.name}: the launch was given no tensors")
    at = np.searchsorted(_Launch.starts, addresses, side="right").astype(np.int64) - 1
    inside = (at >= 0) & (addresses + width <= _Launch.ends[np.maximum(at, 0)])
    if inside.all():
        return
    intervals = zip(_Launch.starts.tolist(), _Launch.ends.tolist(), strict=True)
    first = int(addresses[~inside][0])
    distances = [(min(abs(first - int(s)), abs(first - int(e))), int(s), int(e)) for s, e in intervals]
    _, start, end = min(distances)
    raise OutOfBounds(
        f"{kind} out of bounds in {_Launch.name}, program {program}: {int((~inside).sum())} of {addresses.size} lanes; "
        f"the first is {first - start:+d} bytes from the start of the nearest tensor, which has {end - start}"
    )

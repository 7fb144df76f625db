"""Copies between host memory and a device, a part at a time, while the device computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

Part = TypeVar("Part")


class _Copied(NamedTuple):
    """Tensors on the device, to or from which copies are under way."""

    tensors: list[Tensor]
    done: torch.cuda.Event | None
    """The event after the copies; None without a GPU, where nothing is under way."""


class _Streams(NamedTuple):
    """A GPU copies in both directions at once, and computes meanwhile."""

    arriving: torch.cuda.Stream
    leaving: torch.cuda.Stream


class Copies:
    """Copies parts of host tensors to a device and back, which are views of pinned memory on a machine with a GPU.

    While a part is computed, the next one arrives and the results of the one before leave. All tensors belong to the
    stream that computes: a copy waits for the work in it before it fills memory that this work may still use, and it
    waits for a copy before it uses or frees what was copied.

    Args:
        device: that the layers are on.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._leaving: deque[_Copied] = deque()

    def __reduce__(self) -> tuple:
        return Copies, (self.device,)  # streams stay with their process and their model

    @cached_property
    def _streams(self) -> _Streams | None:
        if self.device.type != "cuda":
            return None
        return _Streams(torch.cuda.Stream(self.device), torch.cuda.Stream(self.device))

    def arriving(
        self, parts: Iterable[Part], hosts: Callable[[Part], Sequence[Tensor]]
    ) -> Iterator[tuple[Part, list[Tensor]]]:
        """Yield each part, with contiguous copies on the device of its host tensors.

        These may have been written by `leave` before this iteration begins, and by nothing that it leads to.
        """
        if self._streams is not None:
            self._streams.arriving.wait_stream(self._streams.leaving)
        waiting: tuple[Part, _Copied] | None = None
        for part in parts:
            following = part, self._load(hosts(part))
            if waiting is not None:
                yield waiting[0], self._arrived(waiting[1])
            waiting = following
        if waiting is not None:
            yield waiting[0], self._arrived(waiting[1])

    def each(self, parts: Iterable[Part], hosts: Callable[[Part], Sequence[Tensor]], work: Callable[..., None]) -> None:
        """Call `work` with each part and its copies, as `arriving` yields them.

        A call's own tensors are gone before the next one, as those of a loop are not.
        """
        for part, tensors in self.arriving(parts, hosts):
            work(part, *tensors)

    def _load(self, hosts: Sequence[Tensor]) -> _Copied:
        buffers = [torch.empty(host.shape, dtype=host.dtype, device=self.device) for host in hosts]
        pieces = [piece for host, buffer in zip(hosts, buffers, strict=True) for piece in _pieces(host, buffer)]
        return _Copied(buffers, self._copy([(buffer, host) for host, buffer in pieces], is_arriving=True))

    def _arrived(self, copied: _Copied) -> list[Tensor]:
        self._wait_for(copied)
        return copied.tensors

    def leave(self, *pairs: tuple[Tensor, Tensor]) -> None:
        """Write results on the device to host tensors.

        Args:
            pairs: a host tensor, or one that stays on the device, and values of the same shape and of any dtype.
        """
        values = [result.detach().to(host.dtype).contiguous() for host, result in pairs]
        pieces = [piece for (host, _), value in zip(pairs, values, strict=True) for piece in _pieces(host, value)]
        self._leaving.append(_Copied(values, self._copy(pieces, is_arriving=False)))
        if len(self._leaving) > 1:
            self._wait_for(self._leaving[0])
            self._leaving.popleft()  # frees them

    def synchronize(self) -> None:
        """Wait for the copies to the host, so that the CPU may read them."""
        for copied in self._leaving:
            self._wait_for(copied)
        self._leaving.clear()
        synchronize(self.device)

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]], *, is_arriving: bool) -> torch.cuda.Event | None:
        """Copy the second of each pair to the first."""
        if self._streams is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        stream = self._streams.arriving if is_arriving else self._streams.leaving
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return stream.record_event()

    def _wait_for(self, copied: _Copied) -> None:
        if copied.done is not None:
            torch.cuda.current_stream(self.device).wait_event(copied.done)


def _pieces(host: Tensor, on_device: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a host tensor and its copy in pieces that are contiguous on the host. The CPU would copy all others itself,
    and it does not wait for what the device has yet to write there.
    """
    if host.is_contiguous():
        yield host, on_device
        return
    assert host.dim() > 1, f"a host tensor with strides {host.stride()}"
    for part, copy in zip(host, on_device, strict=True):
        yield from _pieces(part, copy)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A copy of a part of a host tensor; on a machine without a GPU too, where memory is told apart by intent."""
    _check_copy(host)
    return host.to(device, non_blocking=True, copy=True)


def to_host(host: Tensor, values: Tensor) -> None:
    """Write a part of a host tensor. Later work on the device's stream sees it, and the CPU after `synchronize`."""
    _check_copy(host)
    host.copy_(values, non_blocking=True)


def _check_copy(host: Tensor) -> None:
    assert host.is_contiguous(), "such a copy is made by the CPU, which does not wait for what the device still writes"


def synchronize(device: torch.device) -> None:
    """Wait for copies to the host, so that the CPU may read them."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()

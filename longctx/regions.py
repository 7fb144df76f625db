"""Named regions of a training step, for a profiler's trace, and the time that each part of the step takes.

A step's time is cut into consecutive parts: on the CPU the time of the process, on a GPU that of its current stream,
where events separate the parts without waiting. So what runs at the same time as something else is not counted twice:
`communication` is the time that a rank waits for messages, and a message that attention hides takes none.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.autograd import profiler
from torch.profiler import record_function

Part = Literal["data", "attention", "communication", "saving", "rest"]
PARTS: tuple[Part, ...] = ("data", "attention", "communication", "saving", "rest")
"""`data`: waiting for a step's micro-batches. `communication`: waiting for other ranks, in attention's messages and in
the count of label tokens. `saving`: checkpoints. `rest`: all other layers, the optimizer, and what FSDP and ZeRO gather
and reduce."""

_MANY_EVENTS = 4096


class Clock:
    """Measures the seconds of each part, except before `start`, after `stop` and while paused."""

    def __init__(self) -> None:
        self.is_running = False
        self._is_cuda = False
        self._part: Part | None = "rest"
        """The part under way; None for none."""
        self._seconds = self._zeros()
        self._since = 0.0
        """The time at which the current part began, on the CPU."""
        self._events: deque[tuple[Any, Part | None]] = deque()
        """Events on a GPU that may be pending, each with the part that begins there."""

    def start(self, device: torch.device) -> None:
        """Start at 0 seconds, in `rest`."""
        self._is_cuda, self.is_running = device.type == "cuda", True
        self._events.clear()
        self._since = time.perf_counter()
        self.switch("rest")
        self._seconds = self._zeros()

    def stop(self) -> None:
        """Stop measuring."""
        self.is_running = False
        self._events.clear()

    def switch(self, part: Part | None) -> Part | None:
        """Begin a part, and return the one before."""
        before = self._part
        if self.is_running:
            if self._is_cuda:
                self._record(part)
            else:  # without a call, since every layer comes here four times
                now = time.perf_counter()
                self._seconds[before] += now - self._since
                self._since = now
            self._part = part
        return before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count the body in no part."""
        was_running, before = self.is_running, self.switch(None)
        self.is_running = False
        try:
            yield
        finally:
            self.is_running = was_running
            self.switch(before)

    def read(self) -> dict[Part, float]:
        """Return the seconds of each part since `start` or the last `reset`, without waiting for the device."""
        self.switch(self._part)
        self._settle()
        return {part: self._seconds[part] for part in PARTS}

    def reset(self, seconds: Mapping[Part | None, float] | None = None) -> None:
        """Count from these seconds on, or from 0."""
        self.read()
        self._seconds = self._zeros() | dict(seconds or {})

    def _zeros(self) -> dict[Part | None, float]:
        return dict.fromkeys((*PARTS, None), 0.0)

    def _record(self, part: Part | None) -> None:
        event = self._event()
        event.record()
        self._events.append((event, part))
        if len(self._events) > _MANY_EVENTS:
            self._settle()

    def _event(self) -> Any:
        return torch.cuda.Event(enable_timing=True)

    def _settle(self) -> None:
        """Count the parts that the device has finished."""
        while len(self._events) > 1 and self._events[1][0].query():
            begin, part = self._events.popleft()
            self._seconds[part] += begin.elapsed_time(self._events[0][0]) / 1000


clock = Clock()
"""The clock of this process. On a GPU backward runs in another thread, which does not see the caller's context."""


class region:
    """Show the body as `longctx.NAME` in a trace, and count its time as `part`; an inner region counts as its own part.

    Attention enters one in every layer, so it costs next to nothing while nobody traces.

    Args:
        part: None for no part.
    """

    __slots__ = ("_before", "_named", "name", "part")

    def __init__(self, name: str, part: Part | None = None):
        self.name, self.part = name, part

    def __enter__(self) -> None:
        self._named = record_function(f"longctx.{self.name}") if profiler._is_profiler_enabled else None
        if self._named is not None:
            self._named.__enter__()
        if self.part is not None:
            self._before = clock.switch(self.part)

    def __exit__(self, *error: object) -> None:
        if self.part is not None:
            clock.switch(self._before)
        if self._named is not None:
            self._named.__exit__(None, None, None)  # which does not ask what went wrong

"""Named regions of a training step: what a profiler's trace shows of it, and where its time goes.

The time of a step is that of one line of work, cut into parts that follow each other: on the CPU that of the process,
on a GPU that of its current stream, where an event stands between two parts and nobody waits for it. So what runs at
the same time as something else is not counted a second time: `communication` is what a rank waits for messages, and a
message that attention hides costs none.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.profiler import record_function

Part = Literal["data", "attention", "communication", "saving", "rest"]
PARTS: tuple[Part, ...] = ("data", "attention", "communication", "saving", "rest")
"""`data`: until a step's micro-batches are there. `communication`: waiting for other ranks, in attention's messages and
in the count of label tokens. `saving`: checkpoints. `rest`: all other layers, the optimizer, and what FSDP and ZeRO
gather and reduce."""

_MANY_EVENTS = 4096


class Clock:
    """Counts the seconds of each part. The clock is idle until it is started, and while it is paused."""

    def __init__(self) -> None:
        self.is_running = False
        self._is_cuda = False
        self._part: Part = "rest"
        self._seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self._since: Any = None
        """On the CPU, the time at which the current part began."""
        self._events: deque[tuple[Any, Part | None]] = deque()
        """On a GPU, the events that begin a part and may not have run yet, with that part; None while paused."""

    def start(self, device: torch.device) -> None:
        """Set all seconds to 0 and begin the part `rest`."""
        self._is_cuda = device.type == "cuda"
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._events.clear()
        self._part, self.is_running = "rest", True
        self._begin("rest")

    def stop(self) -> None:
        """Stop the clock until the next `start`."""
        self.is_running = False
        self._events.clear()

    def switch(self, part: Part) -> Part:
        """Begin a part and return the previous one."""
        before = self._part
        if self.is_running and part != before:
            self._end()
            self._part = part
            self._begin(part)
        return before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count the time inside this context in no part."""
        if not self.is_running:
            yield
            return
        self._end()
        self._begin(None)
        self.is_running = False
        try:
            yield
        finally:
            self.is_running = True
            self._begin(self._part)

    def read(self) -> dict[Part, float]:
        """Return the seconds of each part since `start` or `reset`, as far as the device has come, without waiting."""
        if self.is_running:
            self._end()
            self._begin(self._part)
            self._settle()
        return dict(self._seconds)

    def reset(self, seconds: Mapping[Part, float] | None = None) -> None:
        """Count from these seconds on, or from 0."""
        self.read()
        self._seconds = dict.fromkeys(PARTS, 0.0) | dict(seconds or {})

    def _begin(self, part: Part | None) -> None:
        if not self._is_cuda:
            self._since = time.perf_counter()
            return
        event = self._event()
        event.record()
        self._events.append((event, part))
        if len(self._events) > _MANY_EVENTS:
            self._settle()

    def _end(self) -> None:
        """End the current part; on a GPU the next part's event does so."""
        if not self._is_cuda:
            self._seconds[self._part] += time.perf_counter() - self._since

    def _event(self) -> Any:
        return torch.cuda.Event(enable_timing=True)

    def _settle(self) -> None:
        """Count the parts that the device has completed."""
        while len(self._events) > 1 and self._events[1][0].query():
            begin, part = self._events.popleft()
            if part is not None:
                self._seconds[part] += begin.elapsed_time(self._events[0][0]) / 1000


clock = Clock()
"""The clock of this process. A context variable would not do: on a GPU, backward runs in a thread of its own."""


@contextmanager
def region(name: str, part: Part | None = None) -> Iterator[None]:
    """`longctx.NAME` in a trace; and, as far as it is not inside another part, this part of the step's time."""
    with record_function(f"longctx.{name}"):
        if part is None:
            yield
            return
        before = clock.switch(part)
        try:
            yield
        finally:
            clock.switch(before)

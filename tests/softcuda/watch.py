"""What happens on the soft device, watched: where the host waits for it, and where streams race.

The device tells of each event in the order in which the host issues them:

    kernel                   on a stream, with the memory that it reads and writes; collectives are kernels of streams
                             of their communicators
    host waits for ...       a stream, an event or the device, with the reason: an operator that returns a number or a
                             size, a copy that is not asynchronous, a call that synchronises
    record event, stream waits for event
    allocate, free           memory, on the stream for which CUDA's caching allocator keeps it
    use on stream            Tensor.record_stream

From the same events torch's own sanitizer (`torch.cuda._sanitizer`) works out which kernels are ordered; it has no
memory that is given to another tensor while a stream still uses it, which is looked for here, too.

A race is found whatever the order in which the kernels ran: in every order that the events allow, a program without
races has each kernel read the same bytes. Memory is compared by storages, so that two parts of one count as the same.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import NamedTuple

from torch.cuda._sanitizer import StreamSynchronizations

from tests.softcuda.library import library

_Callback = ctypes.CFUNCTYPE(
    None,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.c_int,
    ctypes.c_int,
)
library.soft_watch.argtypes = (ctypes.c_void_p,)


_DEVICE = ("torch.", "tests.softcuda.")
BACKWARD = "a backward pass"


class Wait(NamedTuple):
    """The host waited for the device."""

    reason: str
    calls: tuple[str, ...]
    """`module.function` of the Python functions under way, the innermost first. A backward pass on a GPU runs in a
    thread of its own, which has none of those that started it."""
    span: str | None
    """In which it happened: see `Watch.span`."""
    before_last_kernel: bool
    """Of the span."""

    @property
    def place(self) -> str:
        """The innermost function outside of torch and of the soft device."""
        return next((call for call in self.calls if not call.startswith(_DEVICE)), BACKWARD)

    def __str__(self) -> str:
        return f"{self.reason} in {self.place}"


class _Access(NamedTuple):
    stream: int
    number: int
    """Of the kernel."""
    kernel: str
    place: str

    def __str__(self) -> str:
        return f"{self.kernel} ({self.place}) on stream {self.stream}"


@dataclass
class _Memory:
    stream: int | None
    """For which the allocator keeps it; None if it was allocated before."""
    write: _Access | None = None
    reads: dict[int, _Access] = field(default_factory=dict)
    """Since then, the last one of each stream."""
    used_on: set[int] = field(default_factory=set)

    def accesses(self) -> list[_Access]:
        return [*([self.write] if self.write else []), *self.reads.values()]


class Watchdog:
    """Watches the device from `start` to `stop`, or while its context is entered."""

    def __init__(self, *, keeps_waits: bool = True) -> None:
        self.races: list[str] = []
        self.num_kernels = 0
        self.keeps_waits = keeps_waits
        self._waits: list[tuple[str, tuple[str, ...], str | None, int]] = []
        self.span: str | None = None
        """What happens now is a part of this: a micro-batch."""
        self._last_kernel: dict[str | None, int] = {}
        self._order = StreamSynchronizations()
        self._memory: dict[int, _Memory] = {}
        self._freed: dict[int, list[_Access]] = defaultdict(list)
        self._lock = threading.RLock()
        self._errors: list[BaseException] = []
        self._callback = _Callback(self._told)

    def start(self) -> None:
        """Watch all threads of this process, in the place of any other watch."""
        library.soft_watch(ctypes.cast(self._callback, ctypes.c_void_p))

    def stop(self) -> None:
        """Let nobody watch."""
        library.soft_watch(None)
        if self._errors:
            raise self._errors[0]

    def __enter__(self) -> Watchdog:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def waits(self) -> list[Wait]:
        """In their order."""
        return [
            Wait(reason, calls, span, kernel < self._last_kernel.get(span, 0))
            for reason, calls, span, kernel in self._waits
        ]

    def check(self) -> None:
        """
        Raises:
            AssertionError: if the host waited, or streams raced.
        """
        found = [f"the host waits: {wait}" for wait in self.waits] + self.races
        assert not found, "\n".join(found)

    def _told(self, what: bytes, name: bytes, stream: int, subject: int, memory, num_read: int, num_written: int):
        with self._lock:
            try:
                hazards_seen_at.extend([_place()] * (library.soft_num_hazards() - len(hazards_seen_at)))
                self._understand(
                    what.decode(), name.decode(), stream, subject, memory[: num_read + num_written], num_read
                )
            except BaseException as error:  # which ctypes would print and forget
                self._errors.append(error)

    def _understand(self, what: str, name: str, stream: int, subject: int, memory: list[int], num_read: int) -> None:
        order = self._order
        match what:
            case "kernel":
                self._launch(name, stream, set(memory[:num_read]), set(memory[num_read:]))
            case "record event":
                order.record_state(subject, stream)
            case "stream waits for event":
                order.stream_wait_for_event(stream, subject)
            case "allocate":
                self._allocate(subject, stream)
            case "free":
                self._free(subject)
            case "use on stream":
                self._memory_at(subject).used_on.add(stream)
            case _:
                if self.keeps_waits:
                    self._waits.append((name, tuple(map(_call, _frames())), self.span, self.num_kernels))
                if what == "host waits for stream":
                    order.all_streams_wait_for_stream(stream)
                elif what == "host waits for event":
                    order.all_streams_wait_for_event(subject)
                else:
                    order.sync_all_streams()

    def _launch(self, kernel: str, stream: int, read: set[int], written: set[int]) -> None:
        self.num_kernels += 1
        self._last_kernel[self.span] = self.num_kernels
        self._order.update_seq_num(stream, self.num_kernels)
        access = _Access(stream, self.num_kernels, kernel, _place())
        for pointer in read - written - {0}:
            memory = self._memory_at(pointer)
            self._compare(access, [memory.write] if memory.write else [])
            memory.reads[stream] = access
        for pointer in written - {0}:
            memory = self._memory_at(pointer)
            self._compare(access, memory.accesses())
            memory.write, memory.reads = access, {}

    def _memory_at(self, pointer: int) -> _Memory:
        return self._memory.setdefault(pointer, _Memory(stream=None))

    def _compare(self, access: _Access, before: list[_Access]) -> None:
        for other in before:
            if not self._is_ordered(access.stream, other):
                self.races.append(f"{access} does not wait for {other}, and both use the same memory")

    def _is_ordered(self, stream: int, other: _Access) -> bool:
        return self._order.is_ordered_after(stream, other.number, other.stream)

    def _allocate(self, pointer: int, stream: int) -> None:
        for access in self._freed.pop(stream, ()):
            if not self._is_ordered(stream, access):
                self.races.append(
                    f"memory of stream {stream} was freed while {access} may use it, and can be given to another "
                    "tensor now: wait for that stream, or call record_stream"
                )
        self._memory[pointer] = _Memory(stream)

    def _free(self, pointer: int) -> None:
        memory = self._memory.pop(pointer, None)
        if memory is not None and memory.stream is not None:
            # Before the allocator gives the memory away, it waits for what these streams have been given until now.
            others = [a for a in memory.accesses() if not any(self._is_ordered(u, a) for u in memory.used_on)]
            self._freed[memory.stream] += others


hazards_seen_at: list[str] = []
"""The place of the first event after each hazard of this process, while it was watched."""
for_races = Watchdog(keeps_waits=False)
"""Of every rank on soft GPUs, from its start until another watch begins: see `tests.workers.run_ranks`."""


def _frames() -> Iterator[FrameType]:
    """Of the Python functions under way, the innermost first; none of this module's."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals is not globals():
            yield frame
        frame = frame.f_back


def _call(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}"


def _place() -> str:
    """Return `module.function:line` of the innermost function of longctx, or else of none of torch's."""
    found = None
    for frame in _frames():
        module = f"{frame.f_globals.get('__name__')}."
        if module.startswith("longctx."):
            found = frame
            break
        if found is None and not module.startswith(_DEVICE):
            found = frame
    return BACKWARD if found is None else f"{_call(found)}:{found.f_lineno}"

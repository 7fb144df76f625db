"""torch.cuda's streams and events, on torch's streams of any device."""

from __future__ import annotations

from typing import Any

import torch


class Stream(torch.Stream):
    """As torch.cuda.Stream, whose base class a CPU build does not have."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: int) -> Stream:
        if known:  # stream_id, device_index, device_type
            return super().__new__(cls, **known)
        torch.cuda._lazy_init()
        index = torch.cuda._utils._get_device_index(device, optional=True)
        return super().__new__(cls, device=torch.device("cuda", index), priority=priority)

    @property
    def cuda_stream(self) -> int:
        """The stream's number, in place of a handle."""
        return self.stream_id

    def wait_event(self, event: torch.Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: torch.Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        event = event or Event()
        event.record(self)
        return event


class Event(torch.Event):
    """As torch.cuda.Event. Events have happened when they are asked about, and all are 1 ms apart."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> Event:
        return super().__new__(
            cls, device="cuda", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )

    def record(self, stream: torch.Stream | None = None) -> None:
        super().record(stream or torch.cuda.current_stream())

    def wait(self, stream: torch.Stream | None = None) -> None:
        super().wait(stream or torch.cuda.current_stream())

    def elapsed_time(self, end_event: torch.Event) -> float:
        return 1.0


def install() -> None:
    """Put them where torch.cuda has its own."""
    for module in (torch.cuda, torch.cuda.streams):
        module.Stream = module.ExternalStream = Stream  # type: ignore[attr-defined]
        module.Event = Event  # type: ignore[attr-defined]

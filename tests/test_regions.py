"""The clock that divides a rank's time among the parts of a step."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from longctx.attention.operator import varlen_attention
from longctx.regions import PARTS, Clock, clock


def test_a_part_inside_another_is_counted_once():
    clock = Clock()
    assert clock.switch("attention") == "rest"  # idle: nothing is counted
    clock.start(torch.device("cpu"))
    begin = time.perf_counter()
    clock.switch("attention")
    time.sleep(0.02)
    before = clock.switch("communication")
    time.sleep(0.04)
    clock.switch(before)
    time.sleep(0.02)
    clock.switch("rest")
    with clock.paused():
        paused = time.perf_counter()
        clock.switch("attention")
        time.sleep(0.03)
        paused = time.perf_counter() - paused
    seconds, elapsed = clock.read(), time.perf_counter() - begin
    assert seconds["attention"] >= 0.04
    assert seconds["communication"] >= 0.04
    assert sum(seconds.values()) == pytest.approx(elapsed - paused, abs=2e-3)
    clock.reset({"data": 1.5})
    assert clock.read()["data"] == 1.5
    assert clock.read()["attention"] == 0


class Stream:
    """A device that is asked to note the time, and comes to it later."""

    def __init__(self):
        self.noted, self.done = 0, 0

    def event(self):
        return Event(self)


class Event:
    def __init__(self, stream):
        self.stream = stream

    def record(self):
        self.stream.noted += 1
        self.place = self.stream.noted

    def query(self):
        return self.place <= self.stream.done

    def elapsed_time(self, end):
        assert end.query(), "asked for a time that has not come: a synchronisation"
        return 1000.0 * (end.place - self.place)


def test_on_a_gpu_events_are_read_when_they_have_come(monkeypatch):
    """A second passes from each event to the next. A stand-in for a GPU says when it has got to an event."""
    stream, clock = Stream(), Clock()
    monkeypatch.setattr(clock, "_event", stream.event)
    clock.start(torch.device("cuda"))  # 1: rest
    clock.switch("attention")  # 2
    clock.switch("communication")  # 3
    clock.switch("attention")  # 4
    clock.switch("rest")  # 5
    assert set(clock.read().values()) == {0.0}  # 6, and the device has come to none
    stream.done = 3
    assert clock.read() == dict.fromkeys(PARTS, 0.0) | {"rest": 1.0, "attention": 1.0}  # 7
    with clock.paused():  # 8
        clock.switch("attention")
    stream.done = stream.noted  # 9: the end of the pause
    seconds = clock.read()
    assert (seconds["attention"], seconds["communication"]) == (2.0, 1.0)
    assert seconds["rest"] == 1 + 3  # up to 2, and from 5 to 8; the pause is not in it


@pytest.mark.parametrize("bounds", [[0, 9], [0, 4, 9]], ids=["one operator", "a schedule"])
def test_both_passes_of_attention_are_counted_and_in_a_trace(monkeypatch, bounds):
    parts = []
    monkeypatch.setattr(clock, "is_running", True)
    monkeypatch.setattr(clock, "switch", lambda part: (parts.append(part), "rest")[1])
    q = torch.randn(1, 2, 9, 8, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        varlen_attention(q, q, q, np.array(bounds)).sum().backward()
    assert parts == ["attention", "rest"] * 2
    counts = {event.key: event.count for event in trace.key_averages() if event.key.startswith("longctx.")}
    assert counts == {"longctx.attention": 1, "longctx.attention backward": 1}

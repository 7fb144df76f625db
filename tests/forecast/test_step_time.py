"""The step-time model against published times, and in the directions that it must not get wrong."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from benchmarks.published import HELD_BACK, PUBLISHED
from benchmarks.step_time import comparison, modelled, timed
from longctx.attention.kernels.choose import LONG_DOCUMENT
from longctx.machine.here import Machine
from longctx.machine.speeds import Speeds

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("path", "count"), [(PUBLISHED, 11), (HELD_BACK, 7)])
def test_published_step_times_are_met_within_a_quarter(path, count) -> None:
    errors = [abs(sum(modelled(row).values()) / row.published.seconds - 1) for row in timed(path)]
    assert len(errors) >= count
    assert max(errors) < 0.25
    assert statistics.median(errors) < 0.05


def test_committed_table_is_what_the_command_prints() -> None:
    [committed] = (ROOT / "benchmarks" / "results").glob("step_time_*.md")
    text = committed.read_text()
    for path in (PUBLISHED, HELD_BACK):
        assert "\n".join(comparison(path)) in text


def test_a_long_document_that_is_alone_has_the_speed_of_cudnn() -> None:
    def speeds(device: str, documents: list[int]) -> Speeds:
        return Machine.of(device, 8).with_documents(documents).speeds

    h200 = "NVIDIA H200"
    assert speeds(h200, [LONG_DOCUMENT]) == Speeds.of("H200", "cuDNN")
    for documents in ([LONG_DOCUMENT - 1], [LONG_DOCUMENT, LONG_DOCUMENT]):
        assert speeds(h200, documents) == Speeds.of("H200", "flash-attn 2")
    assert speeds("NVIDIA A100-SXM4-80GB", [1 << 20]) == Speeds.of("A100", "flash-attn 2")  # which has none
    assert not Machine.of("NVIDIA GeForce RTX 2080", 8).is_known
    named = Machine.of("H100", 8, "flash-attn 2")  # a kernel that is asked for computes all documents
    assert named.with_documents([1 << 20]) == named


@pytest.mark.parametrize(
    ("device", "kernel", "message"), [("V100", "flash-attn 2", "A100, H100"), ("H100", "x", "flash-attn")]
)
def test_what_is_not_known_is_said(device, kernel, message) -> None:
    with pytest.raises(ValueError, match=message):
        Speeds.of(device, kernel)

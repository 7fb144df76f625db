"""The step-time model against published times, and in the directions that it must not get wrong."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from longctx.forecast.step_time import Speeds, step_time

from benchmarks.published import HELD_BACK, PUBLISHED
from benchmarks.step_time import SPEEDS, chunked, comparison, modelled, timed
from longctx.attention.kernels.choose import LONG_DOCUMENT

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("path", "count"), [(PUBLISHED, 11), (HELD_BACK, 7)])
def test_published_step_times_are_met_within_a_quarter(path, count) -> None:
    errors = [abs(modelled(row).seconds / row.published.seconds - 1) for row in timed(path)]
    assert len(errors) >= count
    assert max(errors) < 0.25
    assert statistics.median(errors) < 0.05


def test_committed_table_is_what_the_command_prints() -> None:
    [committed] = (ROOT / "benchmarks" / "results").glob("step_time_*.md")
    text = committed.read_text()
    for path in (PUBLISHED, HELD_BACK):
        assert "\n".join(comparison(path)) in text


def test_optimizer_on_the_host_waits_for_its_memory() -> None:
    """A node's ranks share it; what is not pinned goes through it more often."""
    setup = replace(chunked(False), sequence_chunk_size=None, engine="zero3", offload_optimizer="cpu")
    seconds = step_time(setup, 100_000, SPEEDS).parts["optimizer"]
    assert 8e9 * 42 / 95e9 < seconds < 8.1e9 * 42 / 95e9 + 0.5
    unpinned = step_time(replace(setup, pins_host_memory=False), 100_000, SPEEDS).parts["optimizer"]
    assert unpinned == pytest.approx(8.03e9 * 72 / 95e9, rel=0.01)


def test_what_costs_time_does() -> None:
    base = replace(chunked(False), sequence_chunk_size=None, activation_offloading=True)
    seconds = {
        "base": base,
        "no checkpoints": replace(base, gradient_checkpointing=False, activation_offloading=False),
        "attention kept": replace(base, selective_checkpointing=True),
        "chunks": chunked(False),
        "optimizer on the host": replace(base, offload_optimizer="cpu"),
        "ring": replace(base, ring=8),
    }
    found = {name: step_time(setup, 1_000_000, SPEEDS).seconds for name, setup in seconds.items()}
    assert found["no checkpoints"] < found["attention kept"] < found["base"] < found["chunks"]
    assert found["base"] < found["optimizer on the host"]
    assert found["ring"] > found["base"]
    documents = step_time(base, 1_000_000, SPEEDS, documents=[10_000] * 100)
    assert documents.seconds < found["base"] / 5


def test_a_long_document_that_is_alone_has_the_speed_of_cudnn() -> None:
    h200 = "NVIDIA H200"
    assert Speeds.of_device(h200, [LONG_DOCUMENT]) == Speeds.of("H200", "cuDNN")
    for documents in ([LONG_DOCUMENT - 1], [LONG_DOCUMENT, LONG_DOCUMENT]):
        assert Speeds.of_device(h200, documents) == Speeds.of("H200", "flash-attn 2")
    assert Speeds.of_device("NVIDIA A100-SXM4-80GB", [1 << 20]) == Speeds.of("A100", "flash-attn 2")  # which has none
    assert Speeds.of_device("NVIDIA GeForce RTX 2080", [1 << 20]) is None


@pytest.mark.parametrize(
    ("device", "kernel", "message"), [("V100", "flash-attn 2", "A100, H100"), ("H100", "x", "flash-attn")]
)
def test_what_is_not_known_is_said(device, kernel, message) -> None:
    with pytest.raises(ValueError, match=message):
        Speeds.of(device, kernel)

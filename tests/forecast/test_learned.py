"""What runs on a kind of GPU took corrects the forecast of later ones there, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.published import CONFIGS
from benchmarks.shapes import shape_of
from longctx.forecast.cost import Cost, cost
from longctx.forecast.learned import corrected, learn
from longctx.forecast.model_sizes import ModelSizes
from longctx.forecast.shape import RunShape
from longctx.machine.here import Machine
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve

H100 = Machine.of("NVIDIA H100 80GB HBM3", 8)
LENGTH = 131_072


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "longctx" / "learned"


@pytest.fixture(scope="module")
def shape() -> RunShape:
    return shape_of(ModelSizes.of_config(CONFIGS["Qwen/Qwen3-8B"]), world_size=8, sp=8, engine="fsdp2")


def run_took(predicted: Cost, *, seconds: float, memory: float) -> None:
    """A run took so many times what was predicted."""
    allocated = memory * predicted.allocated_bytes
    learn(predicted, predicted.machine.kernel, speed=predicted.speed / seconds, allocated_bytes=allocated)


def test_the_next_forecast_is_what_the_run_took(shape) -> None:
    before = cost(shape, H100, LENGTH)
    run_took(before, seconds=1.25, memory=0.9)
    after = cost(shape, corrected(H100), LENGTH)
    assert after.step_seconds == pytest.approx(1.25 * before.step_seconds)
    assert after.allocated_bytes == pytest.approx(0.9 * before.allocated_bytes)
    assert (after.device["fixed"], after.host) == (before.device["fixed"], before.host)
    assert after.describe().endswith("corrected by 1 run on this kind of GPU")
    run_took(after, seconds=1.0, memory=1.0)  # as predicted: nothing changes
    again = cost(shape, corrected(H100), LENGTH)
    assert again.step_seconds == pytest.approx(after.step_seconds)
    assert again.describe().endswith("corrected by 2 runs on this kind of GPU")


def test_runs_count_alike_at_first_and_the_last_ones_most_later(shape) -> None:
    """Two runs by their geometric mean; from the fifth on, a run counts for a fifth."""
    plain = cost(shape, H100, LENGTH)
    for runs, took, expected in ((1, 1.0, 1.0), (2, 1.44, 1.2), (3, 1.2, 1.2), (4, 1.2, 1.2), (5, 1.2, 1.2)):
        predicted = cost(shape, corrected(H100), LENGTH)
        run_took(predicted, seconds=took * plain.step_seconds / predicted.step_seconds, memory=1.0)
        correction = corrected(H100).with_documents([LENGTH]).correction
        assert correction.runs == runs
        assert correction.seconds == pytest.approx(expected)
    run_took(cost(shape, corrected(H100), LENGTH), seconds=1.1, memory=1.0)
    assert corrected(H100).with_documents([LENGTH]).correction.seconds == pytest.approx(1.2 * 1.1**0.2)


def test_other_devices_and_kernels_are_as_before(shape) -> None:
    run_took(cost(shape, H100, LENGTH), seconds=1.5, memory=1.2)  # one long document, which cuDNN computes
    packed = [1024] * 128
    for machine, documents in ((H100, packed), (Machine.of("NVIDIA A100-SXM4-80GB", 8), [LENGTH])):
        learned, plain = (cost(shape, of, LENGTH, documents) for of in (corrected(machine), machine))
        assert learned.step_seconds == plain.step_seconds
        assert (learned.device == plain.device) == (machine is not H100)  # memory does not depend on the kernel


@pytest.mark.parametrize("took", [{"seconds": 3.0, "memory": 1.0}, {"seconds": 1.0, "memory": 0.3}])
def test_what_cannot_be_an_error_of_the_forecast_is_not_learned(shape, cache, took) -> None:
    run_took(cost(shape, H100, LENGTH), **took)
    assert not cache.exists()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"seconds": 9, "bytes": 1, "runs": 1}', '{"seconds": "x", "bytes": 1, "runs": 1}']
)
def test_a_damaged_file_corrects_nothing(shape, cache, text) -> None:
    run_took(cost(shape, H100, LENGTH), seconds=1.1, memory=1.1)
    [path] = cache.iterdir()
    assert json.loads(path.read_text())["runs"] == 1
    path.write_text(text)
    assert corrected(H100).corrections == ()


def test_a_cache_that_cannot_be_written_is_no_error(shape, cache) -> None:
    cache.parent.mkdir()
    cache.write_text("a file where the folder would be")
    run_took(cost(shape, H100, LENGTH), seconds=1.1, memory=1.1)


def test_a_run_is_forecast_with_it_unless_a_flag_says_no(shape, tmp_path, monkeypatch) -> None:
    CONFIGS["Qwen/Qwen3-8B"].save_pretrained(tmp_path / "model")
    monkeypatch.setattr("longctx.settings.resolve.device_count", lambda: 8)
    monkeypatch.setattr(Machine, "here", lambda gpus: H100)
    given = ["--model_name_or_path", str(tmp_path / "model"), "--dataset_name", "stdlib", "--max_length", "32768"]
    given += ["--sp", "8", "--memory", "balanced", "--output_dir", str(tmp_path / "out"), "--packing", "False"]

    def forecast(*flags: str) -> Cost:
        found = resolve(parse_flags([*given, *flags]), read_profile({}), {}).forecast
        assert found is not None
        return found

    before = forecast()
    run_took(before, seconds=1.25, memory=1.0)
    assert forecast().step_seconds == pytest.approx(1.25 * before.step_seconds)
    assert forecast("--no_learned").step_seconds == pytest.approx(before.step_seconds)

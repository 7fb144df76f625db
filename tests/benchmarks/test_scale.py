"""benchmarks.scale: formulas hold in a real run, and what a rank does grows with the ranks only where they say so."""

from __future__ import annotations

import pytest

from benchmarks.scale import formulas
from benchmarks.scale.__main__ import NOISE, large_models, real_rows
from benchmarks.scale.formulas import Model

SIZES = {"hidden": 512, "layers": 4, "vocabulary": 8_000}
"""Of a model whose memory is several times NOISE."""


@pytest.mark.long
def test_formulas_hold_in_a_real_run(tmp_path) -> None:
    rows = list(real_rows([2], SIZES, tmp_path, speed=1e9))
    held = {row.what: row for row in rows if row.computed is not None and row.unit != "s"}
    assert {what.partition(":")[0] for what in held} == {"load", "save", "resume", "index.json", "longctx.json"}
    assert {row.what: (row.measured, row.computed) for row in held.values() if row.differs} == {}
    memory = [row for row in held.values() if row.unit == "MiB"]
    assert len(memory) == 3
    assert all(row.computed > 3 * NOISE for row in memory)


def figures(model: Model, num_ranks: int) -> dict[str, float]:
    """Of one rank, and of those files that each rank reads whole."""
    layout = [formulas.ranges_of(model, rank, num_ranks) for rank in range(num_ranks)]
    weights, states = formulas.weights_written(model, 0, num_ranks), formulas.states_written(model, layout[0])
    found = {
        "read to load": formulas.read_in_loading(model, 0, num_ranks),
        "host memory to load": formulas.host_in_loading(model, 0, num_ranks),
        "host memory to save": formulas.host_in_saving(weights, states),
        "report": formulas.report_of(model, 1, layout[1], num_ranks),
        "calls of rank 1": formulas.calls_in_saving(1, num_ranks),
        "calls of rank 0": formulas.calls_in_saving(0, num_ranks),
        "read to resume": formulas.read_in_resuming(model, 0, num_ranks),
        "host memory to resume": formulas.host_in_resuming(model, num_ranks),
        "files to resume": sum(formulas.files_in_resuming(model, 0, num_ranks, num_ranks)),
        "index.json": formulas.index_bytes(model, layout),
        "longctx.json": formulas.manifest_bytes(model, layout),
    }
    if not model.is_converted:
        found["opened to load"] = formulas.opened_in_loading(model, 0, num_ranks, num_files=4)
    return found


@pytest.mark.long
def test_only_what_the_formulas_name_grows_with_the_ranks() -> None:
    model = large_models()[0]
    few, many = figures(model, 256), figures(model, 1024)
    growing = {name for name in few if many[name] > 1.01 * few[name]}
    assert growing == {"calls of rank 0", "index.json", "longctx.json"}
    assert many["calls of rank 0"] - few["calls of rank 0"] == formulas.GATHERINGS * (1024 - 256)
    for name in ("index.json", "longctx.json"):
        assert many[name] < 4.2 * few[name], "in proportion"
    assert many["read to load"] == pytest.approx(2 * model.numel / 1024, rel=0.01)


def test_a_converted_model_is_whole_on_rank_0_and_its_experts_are_cut_no_finer_than_by_expert() -> None:
    model = large_models()[-1]
    assert model.is_converted
    assert model.numel == pytest.approx(671e9, rel=0.001)
    assert formulas.host_in_loading(model, 0, 1024, on_host=False) > 4 * model.numel
    assert formulas.host_in_loading(model, 1, 1024, on_host=False) < 1 << 30
    assert formulas.elements(model, 0, 1024) > 0.95 * formulas.elements(model, 0, 256)
    assert formulas.elements(model, 256, 1024) < 0.02 * formulas.elements(model, 255, 1024)

"""The registry of attention backends: what it refuses, and that a new record is all that a new backend takes."""

from __future__ import annotations

import ast
import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.shapes import shape_of
from longctx.attention.backends import BACKENDS
from longctx.attention.choice import assumed_documents, choose_backend
from longctx.attention.cost import Arrangement, Setup
from longctx.forecast import memory
from longctx.machine.here import Machine
from longctx.settings.launcher import BACKEND_OF
from longctx.settings.read import parse_flags
from longctx.settings.resolve import described, spreads
from tests.reference import train_reference
from tests.toy_backend import TOY
from tests.training.test_training import COMMON, LEARNING_RATE, SHAPES, STEPS, check, make_documents, write_jsonl
from tests.workers import run_ranks

PACKAGE = Path(__file__).parents[2] / "longctx"
SETUP = Setup(sp=4, num_heads=8, num_key_value_heads=4, head_size=16, element_size=2, machine=Machine.of("H100", 8))


@pytest.fixture
def toy():
    """Registered for one test."""
    BACKENDS.register(TOY)
    yield TOY
    del BACKENDS["toy"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": "ring"}, "'ring' is registered already"),
        ({"name": "auto"}, "'auto' is registered already"),
        ({"name": "spiral"}, "'spiral' arranges 2 ranks as Arrangement\\(name='toy', ring=2"),
        ({"arrangements": lambda sp: [Arrangement(name="toy", ring=2, ulysses=1)]}, "arranges 3 ranks as .* to 3"),
    ],
)
def test_a_record_that_does_not_hold_together_is_not_registered(changed, message) -> None:
    before = list(BACKENDS)
    with pytest.raises(ValueError, match=message):
        BACKENDS.register(replace(TOY, **changed))
    assert list(BACKENDS) == before


def test_an_unknown_backend_is_an_error_everywhere() -> None:
    with pytest.raises(ValueError, match=f"'spiral' is unknown. Use one of {', '.join(BACKENDS)}"):
        BACKENDS["spiral"]
    spread = ", ".join(BACKENDS.spread)
    with pytest.raises(ValueError, match=f"--sp_backend spiral is unknown. Use one of auto, {spread}"):
        choose_backend("spiral", SETUP)


@pytest.fixture(scope="module")
def llama_sizes():
    from longctx.forecast.model_sizes import ModelSizes
    from longctx.model.tiny import tiny_config

    return ModelSizes.of_config(tiny_config())


def places_of_records() -> list[Path]:
    """Return the packages, and the module beside the registry, that define backends."""
    registry = PACKAGE / "attention" / "backends.py"
    names = [n.module for n in ast.walk(ast.parse(registry.read_text())) if isinstance(n, ast.ImportFrom) and n.module]
    files = [PACKAGE.parent / f"{name.replace('.', '/')}.py" for name in names if name != "longctx.attention.backend"]
    return [file if file.parent == registry.parent else file.parent for file in files if file.is_relative_to(PACKAGE)]


def test_the_backends_of_a_profiles_degrees_are_registered() -> None:
    """The launcher's profile is read before torch, so that it cannot ask the registry."""
    assert set(BACKEND_OF.values()) <= BACKENDS.spread.keys()


def test_backends_are_told_apart_by_their_records_alone() -> None:
    """Outside of the packages that define them, no code of longctx compares a value with a backend's name."""
    own = places_of_records()
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        outside = not path.resolve().is_relative_to(PACKAGE)  # the links to benchmarks/ and configs/
        if outside or any(path.is_relative_to(place) for place in own):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                parts = [part for side in (node.left, *node.comparators) for part in getattr(side, "elts", [side])]
                compared = {part.value for part in parts if isinstance(part, ast.Constant)}
                if names := compared & set(BACKENDS.spread):
                    found.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {names}")
    assert not found


def test_a_new_record_is_offered_chosen_and_forecast(toy, llama_sizes) -> None:
    chosen = choose_backend("toy", SETUP)
    assert (chosen.arrangement, chosen.engine) == (Arrangement(name="toy", ring=4, ulysses=1), "deepspeed")
    auto = choose_backend("auto", SETUP, assumed_documents(8192, packed=True))
    assert "toy 4" in {str(how) for how, _ in auto.modelled}

    toys = shape_of(llama_sizes, world_size=4, sp=4, ring=4, backend="toy", engine="fsdp2")
    exchanged = memory.device_moments(toys, 2**20, is_cpu=False)["attention"]["exchange"]
    # Of each token and rank: its own k and v, and k, v and their gradients of all four ranks; 2 bytes an element.
    elements = llama_sizes.num_key_value_heads * llama_sizes.head_size
    assert exchanged == (2 * 2 + 2 * 2 * 4 + 2 * 2 * 4) * elements * 2**20 / 4


def test_a_new_record_is_planned_swept_and_drawn(toy, tmp_path, monkeypatch) -> None:
    from benchmarks.max_length.combinations import resolved_for
    from benchmarks.pictures import BACKEND_LOOKS, Bar, max_length_picture

    tiny = parse_flags(["--model_name_or_path", "tiny", "--dataset_name", "stdlib"])
    found = [run for run in spreads(*described(tiny, Machine.of("H100", 4), 4), 4) if run.backend.name == "toy"]
    assert {(run.dims.ring, run.dims.ulysses, run.engine) for run in found} == {
        (2, 1, "deepspeed"),
        (4, 1, "deepspeed"),
    }
    flags = "--sp 4 --sp_backend toy --model_name_or_path tiny --dataset_name stdlib --overlong split"
    combination = resolved_for("toy", 4, flags.split(), {})
    assert combination.run is not None, combination.refused
    assert (combination.run.backend.name, combination.run.engine) == ("toy", "deepspeed")
    monkeypatch.setitem(BACKEND_LOOKS, "toy", BACKEND_LOOKS["ring"]._replace(color=toy.color, marker=toy.marker))
    max_length_picture(tmp_path / "lengths.png", [Bar("toy", 4, 4096)], title="toy")
    assert (tmp_path / "lengths.png").stat().st_size > 0


def test_a_new_record_is_in_the_sweeps_flags_the_matrix_and_the_fuzzer(toy, tmp_path) -> None:
    from benchmarks.max_length.__main__ import _check, _parser

    options = _parser().parse_args(["--output", str(tmp_path)])
    _check(options)
    assert "toy" in options.backends
    matrix = runpy.run_path(str(PACKAGE.parent / "tests" / "matrix.py"))["SETUPS"]
    assert [matrix[name].processes for name in ("toy, FSDP2", "toy, ZeRO-3")] == [2, 2]
    assert "toy" in runpy.run_module("benchmarks.differential.space", alter_sys=True)["VALUES"]["backend"]
    covering = runpy.run_module("benchmarks.differential.covering")
    assert [case["engine"] for case in covering["AXES"]["layout"]["toy"][1:]] == ["fsdp2"]
    assert "toy" in runpy.run_path(str(PACKAGE.parent / "tests/training/test_training.py"))["GROUPS"][1][0].split()


@pytest.mark.long
def test_a_new_record_trains_as_one_process(models, tmp_path, parity_table) -> None:
    cases, references = {}, {}
    for shape in ("packed", "padded"):
        lengths, flags = SHAPES[shape]
        case, documents = f"toy sp 2, {shape}", make_documents(lengths)
        cases[case] = [*COMMON, *flags, "--sp", "2", "--sp_backend", "toy", "--engine", "fsdp2"]
        cases[case] += ["--dataset_name", write_jsonl(tmp_path / f"{shape}.jsonl", documents)]
        cases[case] += ["--model_name_or_path", models["GQA 4:2"], "--output_dir", str(tmp_path / shape)]
        references[case] = train_reference(models["GQA 4:2"], documents, steps=STEPS, learning_rate=LEARNING_RATE)
    for case, found in run_ranks(2, "tests.toy_backend:train", cases)[0].items():
        check(found, references[case], case, "torchrun", parity_table)


@pytest.mark.long
def test_a_new_record_is_verified_on_its_own_engine() -> None:
    arguments = ["--sp", "2", "--sp_backend", "toy", "--max_length", "128", "--num_layers", "2", "--json"]
    (code, printed), _ = run_ranks(2, "tests.toy_backend:verify", arguments, backend=None)
    assert code == 0, printed
    found = json.loads(printed)
    assert (found["ok"], found["run"]["engine"]) == (True, "deepspeed")
    assert found["run"]["backend"].startswith("toy 2")

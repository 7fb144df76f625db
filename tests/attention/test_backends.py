"""The registry of attention backends: what it refuses, and that a new record is all that a new backend takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from longctx.attention.backends import BACKENDS
from longctx.attention.choice import assumed_documents, choose_backend
from longctx.attention.cost import Arrangement, Setup
from longctx.machine.here import Machine
from tests.reference import train_reference
from tests.toy_backend import TOY
from tests.training.test_training import COMMON, LEARNING_RATE, SHAPES, STEPS, check, make_documents, write_jsonl
from tests.workers import run_ranks

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


def test_a_new_record_is_offered_and_chosen(toy) -> None:
    chosen = choose_backend("toy", SETUP)
    assert (chosen.arrangement, chosen.engine) == (Arrangement(name="toy", ring=4, ulysses=1), "deepspeed")
    auto = choose_backend("auto", SETUP, assumed_documents(8192, packed=True))
    assert "toy 4" in {str(how) for how, _ in auto.modelled}


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

"""Small updates of weights stored in fp32: in bf16 they have the effect on the loss that they have in fp32."""

from __future__ import annotations

import pytest

from tests.few import together
from tests.reference import train_reference
from tests.training.test_training import COMMON, SHAPES, make_documents, write_jsonl
from tests.workers import run_ranks

STEPS, LEARNING_RATE = 3, 2e-5
"""A step changes each weight by about this much, and bf16 values near the models' weights, 0.02, are 1.2e-4 apart."""

LAYOUTS = {
    "ZeRO-3": (["--engine", "deepspeed"], 3),
    "ZeRO-3, states on the CPU": (
        ["--engine", "deepspeed", "--offload_optimizer_device", "cpu", "--offload_param_device", "cpu"],
        3,
    ),
    "ZeRO-2": (["--engine", "deepspeed"], 2),
    "ZeRO-1": (["--engine", "deepspeed"], 1),
    "FSDP2": (["--engine", "fsdp2"], None),
}


@pytest.fixture
def documents_file(tmp_path):
    documents = make_documents(SHAPES["packed"][0])
    return documents, write_jsonl(tmp_path / "data.jsonl", documents)


SOME = ("ZeRO-3", "FSDP2")


@pytest.mark.parametrize("layouts", together(LAYOUTS, SOME))
def test_small_updates_count_in_bf16(layouts, models, tmp_path, documents_file):
    documents, data = documents_file
    flags = [
        *COMMON,
        "--max_steps",
        str(STEPS),
        "--learning_rate",
        str(LEARNING_RATE),
        "--packing",
        "True",
        "--bf16",
        "True",
    ]
    flags += ["--sp", "2", "--model_name_or_path", models["GQA 4:2"], "--dataset_name", data, "--output_dir"]
    runs = {name: ([*flags, str(tmp_path / name), *own], stage) for name, (own, stage) in LAYOUTS.items()}
    runs = {name: run for name, run in runs.items() if name in layouts}
    (before, *_, after), _ = train_reference(models["GQA 4:2"], documents, steps=STEPS, learning_rate=LEARNING_RATE)
    assert before - after > 0.002, "the updates would not be seen"
    for name, steps in run_ranks(2, "tests.training.test_engines_of_models:run_cases", runs)[0].items():
        effect = (steps[0][0] - steps[-1][0]) / (before - after)
        assert effect == pytest.approx(1, abs=0.1), name  # 0.99 in all; 0.75 with weights that were rounded first

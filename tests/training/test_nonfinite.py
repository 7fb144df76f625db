"""A document that makes gradients NaN: the run stops before the weights change, or goes on without the step."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from longctx.training.nonfinite import NonFiniteError
from tests.few import few
from tests.small_model import save_small_model
from tests.training.test_resume import LAYOUTS, run_once
from tests.training.test_training import flags_of_run, make_documents, write_jsonl
from tests.workers import run_ranks

POISON = 251
"""A token that is in one document alone, and whose embedding is NaN."""
LENGTHS, POISONED, STEPS = [90, 41, 130, 64, 33, 17, 88, 120], 3, 4


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("poisoned")
    save_small_model(folder, tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def outcome(arguments):
    """The log, or what stopped the run."""
    try:
        return run_once(arguments)
    except NonFiniteError as error:
        return str(error)


def outcomes(cases):
    return {case: outcome(arguments) for case, arguments in cases.items()}


LAYOUTS = {name: LAYOUTS[name] for name in ("1 process", "ring on FSDP2", "ulysses on ZeRO-3", "ulysses on ZeRO-1")}


@pytest.mark.parametrize("layout", few(LAYOUTS, [name for name in LAYOUTS if "FSDP2" in name]))
def test_the_step_is_refused_or_left_out(layout, poisoned, tmp_path, monkeypatch):
    if layout.endswith("1"):
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "1")
    documents = make_documents(LENGTHS)
    documents[POISONED][0][5] = POISON
    processes, given = LAYOUTS[layout]
    data = write_jsonl(tmp_path / "data.jsonl", documents)
    common = [*given, "--train_sampling_strategy", "sequential", "--packing", "False", "--max_steps", str(STEPS)]
    common += ["--gradient_accumulation_steps", "2", "--on_nonfinite"]
    cases = {case: [*flags_of_run(poisoned, data, tmp_path / case), *common, case] for case in ("stop", "skip")}
    results = run_ranks(processes, f"{__name__}:outcomes", cases)
    for rank in results:
        assert "the gradient of step 2, with documents 2, 3, has the norm" in rank["stop"]
        assert "--on_nonfinite skip" in rank["stop"]
    for case in ("stop", "skip"):
        (line,) = (tmp_path / case / "nonfinite.jsonl").read_text().splitlines()
        told = json.loads(line)
        assert (told["step"], told["rows"], told["documents"]) == (2, [2, 3], [2, 3])
    assert not list((tmp_path / "stop").glob("*.safetensors"))
    told = "Failed in step 2: NonFiniteError: the gradient of step 2, with documents 2, 3, has the norm"
    assert told in (tmp_path / "stop" / "run_report.html").read_text()
    assert "Finished after 4 steps" in (tmp_path / "skip" / "run_report.html").read_text()
    log = [entry for entry in results[0]["skip"] if "loss" in entry]
    assert [entry["step"] for entry in log] == [1, 2, 3, 4]
    rates = [entry["learning_rate"] for entry in log]
    assert rates == pytest.approx([rates[0] * (1 - step / STEPS) for step in range(STEPS)])
    assert all(torch.tensor([entry["loss"], entry["grad_norm"]]).isfinite().all() for entry in (log[0], log[2], log[3]))
    weights = load_file(tmp_path / "skip" / "model.safetensors")
    bad = {name for name, value in weights.items() if not value.isfinite().all()}
    assert bad == {"model.embed_tokens.weight"}
    assert weights["model.embed_tokens.weight"].isnan().any(1).nonzero().flatten().tolist() == [POISON]

"""The fuzzer itself: its covering set, its reference against a stock Trainer, and a planted bug that it has to find."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace

import pytest
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from benchmarks.differential import covering, reference
from benchmarks.differential.commands import prepare
from benchmarks.differential.judge import Judge, _compared, error_of, last_error
from benchmarks.differential.models import make_model, name_of
from benchmarks.differential.shrink import shrink
from benchmarks.differential.space import NOT_OF_PAIRS, VALUES, Case, draw
from benchmarks.ranks import start_server
from tests.few import few
from tests.planted_bug import divide_by_one_more, never_start

TIMEOUT = 200


# ------------------------------------------------------------------------------------------------
# The space
# ------------------------------------------------------------------------------------------------


def test_the_default_set_covers_all_pairs():
    choices = covering.choices()
    assert {pair for choice in choices for pair in covering.pairs(choice)} == set(covering.all_pairs())
    assert len(covering.covering_set()) <= 50


def test_every_value_of_the_covering_set_survives_beside_all_others():
    """Else `make_consistent` would take out of a case what it is counted as covering.

    Pairs of answers have no auxiliary loss of routers and no other kinds of token losses, and are not split.
    """
    for choice, case in zip(covering.choices(), covering.covering_set(), strict=False):
        for axis, name in zip(covering.AXES, choice, strict=True):
            members = covering.AXES[axis][name]
            without = {*NOT_OF_PAIRS, "overlong"} if case.reads_pairs else set()
            kept = [{key: value for key, value in member.items() if key not in without} for member in members]
            assert any(all(getattr(case, key) == value for key, value in m.items()) for m in kept), (axis, name)


@pytest.mark.parametrize("model", few(VALUES["model"], 12))
def test_every_model_has_sizes_that_fit(model, tmp_path):
    """Otherwise, the fuzzer would skip all of its cases and report that there is no model."""
    make_model(Case(model=model), tmp_path / "model")


def test_random_cases_reach_every_value_and_are_written_and_read():
    cases = [draw(seed) for seed in range(5_000)]
    for name in {field.name for field in fields(Case)} - {"seed", "spelling"}:
        values = {getattr(case, name) for case in cases}
        assert set(VALUES[name]) <= values, name
    assert all(Case.from_json(case.to_json()) == case for case in cases[:100])
    assert draw(7) == draw(7)


# ------------------------------------------------------------------------------------------------
# The reference
# ------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_reference_is_independent():
    code = "import sys, benchmarks.differential.reference; print([m for m in sys.modules if m.startswith('longctx')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    guards = ["longctx.untrusted", "longctx.untrusted.working_directory", "longctx"]  # of the import path
    assert done.stdout.strip() == str(guards)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw_torch"])
def test_the_reference_trains_as_a_stock_trainer(optimizer, tmp_path):
    """One document a step, where transformers' Trainer is right; fp32 sums in the same order, so nearly bit by bit."""
    case = Case(model="qwen2", order="sequential", packing="none", steps=4, optimizer=optimizer, weight_decay=0.1)
    case = replace(case, schedule="cosine", warmup=1, lengths="uneven", clipping=0.5)
    folder = tmp_path / name_of(case)
    make_model(case, folder)
    plan = prepare(case, tmp_path, tmp_path / "data").plan
    args = TrainingArguments(
        output_dir=str(tmp_path / "stock"),
        per_device_train_batch_size=1,
        max_steps=case.steps,
        optim=optimizer,
        learning_rate=case.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=1,
        weight_decay=0.1,
        max_grad_norm=0.5,
        logging_steps=1,
        train_sampling_strategy="sequential",
        report_to="none",
        use_cpu=True,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    rows = [{"input_ids": ids, "labels": labels} for ids, labels in plan["documents"]]
    trainer = Trainer(model, args, train_dataset=rows)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    found = reference.train(plan | {"saved": str(tmp_path / "saved")})
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    for entry, step in zip(logged, found["steps"], strict=True):
        for name in ("loss", "grad_norm", "learning_rate"):
            assert entry[name] == pytest.approx(step[name], rel=1e-5), name
    assert found["weights"]["all" if optimizer == "adamw_torch" else "update"] < 1e-3


# ------------------------------------------------------------------------------------------------
# Verdicts
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "by_rounding", "status"),
    [(2, 5e-4, "exact"), (2, 5e-5, "wrong"), (1, 5e-4, "wrong")],  # a first step has no steps before it
)
def test_what_rounding_alone_would_change_is_not_called_wrong(number, by_rounding, status):
    """A loss that is off by 1e-3, beside a reference whose weights were perturbed."""

    def steps(factor):
        log = [{"num_tokens": 8 * n, "learning_rate": 0.1, "loss": 2.0, "grad_norm": 1.0, "loose": 0.0} for n in (1, 2)]
        log[number - 1]["loss"] *= factor
        return log

    expected = {"steps": steps(1.0), "evaluations": []}
    moved = {"steps": steps(1 + by_rounding), "evaluations": []}
    assert _compared({"optimizer": "sgd"}, steps(1.001), [], expected)["status"] == "wrong"
    assert _compared({"optimizer": "sgd"}, steps(1.001), [], expected, moved)["status"] == status


def test_what_a_log_says():
    log = "--- rank 0\nlongctx: error: --sp 3 is wrong. Use 2:\n  --sp 2\n--- rank 1\n"
    assert error_of(log) == "--sp 3 is wrong. Use 2:\n  --sp 2"
    raised = '--- rank 0\nTraceback (most recent call last):\n  File "/x/longctx/run.py", line 7, in fit\n    f()\n'
    assert last_error(raised + "KeyError: 'a'\n--- rank 1\n") == "KeyError: 'a' (run.py:7 fit)"


@pytest.fixture
def judges(tmp_path, monkeypatch):
    """`judges(plant=None)` -> a Judge whose ranks are forked."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    start_server("peft", "datasets")
    return lambda plant=None, timeout=TIMEOUT: Judge(tmp_path, timeout, plant=plant)


def test_a_planted_bug_is_found(judges):
    """A denominator that is one too large, where labels are smoothed; without it the case is exact."""
    case = Case(smoothing=0.1, documents=2, steps=1)
    assert judges()(case).status == "exact"
    outcome = judges(divide_by_one_more)(case)
    assert outcome.status == "wrong"
    assert outcome.detail.startswith("loss of step 1")


@pytest.mark.long
def test_a_planted_bug_is_shrunk_to_one_command(judges):
    case = Case(sp=2, backend="ring", smoothing=0.1, vocab_size=301, heads="4:4", accumulation=2, documents=4)
    judge = judges(divide_by_one_more)
    found = shrink(judge(case), judge)
    assert found.case.changed() == {"smoothing": 0.1, "documents": 1, "steps": 1, "max_length": 17}
    assert "--label_smoothing_factor 0.1" in found.commands[0]
    assert json.loads(found.case.to_json()) == found.case.changed()


@pytest.mark.long
def test_a_run_that_hangs_says_where(judges):
    assert judges()(Case()).status == "exact"  # the model is made, in as much time as that takes
    outcome = judges(never_start, timeout=8)(Case())
    assert outcome.status == "hang"
    assert "never_start" in outcome.detail

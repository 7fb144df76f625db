"""--early_stopping_patience on real gloo ranks and engines: every rank stops after the same step, resumed or not.

A small model that learns is asked for the largest loss, so that the first evaluation is the best, or for an improvement
that it does not reach. Logs and weights of a resumed run are the same bits.
"""

from __future__ import annotations

import re

import pytest
import torch

from longctx.train import main
from tests.training.test_resume import LAYOUTS, run_all, values, weights
from tests.training.test_training import COMMON, flags_of_run, make_documents, write_jsonl
from tests.workers import run_ranks

EVALUATES = ["--eval_strategy", "steps", "--eval_steps", "1", "--dataset_test_split", "train"]
WORSE = [*EVALUATES, "--metric_for_best_model", "loss", "--greater_is_better", "True"]
STOPS = {  # the flags, and the last step
    "gets worse": ([*WORSE, "--early_stopping_patience", "2"], 3),
    "too little": ([*EVALUATES, "--early_stopping_patience", "3", "--early_stopping_threshold", "100"], 4),
    "gets better": ([*EVALUATES, "--early_stopping_patience", "1"], 5),
}


def losses(log):
    return [entry["loss"] for entry in log if "loss" in entry]


@pytest.mark.long
@pytest.mark.parametrize("layout", ["1 process", "ring on FSDP2", "ulysses on ZeRO-3"])
def test_all_ranks_stop_after_the_same_step(layout, models, tmp_path):
    """As one process does; and a run that went on from a checkpoint counts on."""
    processes, given = LAYOUTS[layout]
    data = write_jsonl(tmp_path / "data.jsonl", make_documents([90, 7, 41]))
    common = [*COMMON, "--dataset_name", data, "--model_name_or_path", models["GQA 4:2"]]
    saved = ["--save_strategy", "steps", "--save_steps", "1", "--load_best_model_at_end", "True"]
    cases = {
        name: [*common, *given, *flags, *(saved if name == "gets worse" else []), "--output_dir", str(tmp_path / name)]
        for name, (flags, _) in STOPS.items()
    }
    for step in (2, 3):
        checkpoint = ["--resume_from_checkpoint", str(tmp_path / "gets worse" / f"checkpoint-{step}")]
        cases[step] = [*cases["gets worse"][:-1], str(tmp_path / str(step)), *checkpoint]
    ranks = run_ranks(processes, f"{__name__}:run_all", cases, timeout=900)
    alone = run_all({name: [*common, *STOPS[name][0], "--output_dir", f"{tmp_path}/1 {name}"] for name in STOPS})
    for name, (_, last) in STOPS.items():
        assert all(len(losses(rank[name])) == last for rank in ranks), name
        assert losses(ranks[0][name]) == pytest.approx(losses(alone[name]), rel=1e-4)
    expected = weights(tmp_path / "gets worse")  # of the best evaluation, the first
    best = weights(tmp_path / "gets worse" / "checkpoint-1")
    assert all(torch.equal(expected[name], best[name]) for name in best)
    for step in (2, 3):
        assert all(values(rank[step]) == values(ranks[0]["gets worse"]) for rank in ranks)
        found = weights(tmp_path / str(step))
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_stopped_is_said(models, tmp_path, capsys):
    data = write_jsonl(tmp_path / "data.jsonl", make_documents([41]))
    flags = flags_of_run(models["GQA 4:2"], data, tmp_path / "out")
    assert main([*flags, *WORSE, "--early_stopping_patience", "1"]) == 0
    printed = capsys.readouterr().out
    assert re.search(
        r"stopped early after step 2: 1 evaluations in a row were no better than eval_loss [\d.]+", printed
    )
    assert "the model of the last step is saved" in printed

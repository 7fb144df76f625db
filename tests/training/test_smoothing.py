"""--label_smoothing_factor against transformers' LabelSmoother on one process: its formula, and whole runs."""

from __future__ import annotations

import pytest
import torch
from transformers.trainer_pt_utils import LabelSmoother

from longctx.layers.loss import fused_token_outputs
from tests.training.test_training import check, flags_of_run, make_documents, one_process, steps_of, write_jsonl
from tests.workers import run_ranks

SMOOTHING = 0.3


def test_smoothed_losses_are_those_of_transformers():
    """And their gradient, over tiles and a part of one; logits are given, as hidden states before a head of ones."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 107, 11, generator=generator, requires_grad=True)
    targets = torch.randint(0, 11, logits.shape[:2], generator=generator)
    targets[0, ::3] = -100
    num_label_tokens = (targets != -100).sum()
    options = {"label_smoothing": SMOOTHING, "tile_bytes": 10 * 11 * 4}
    outputs = fused_token_outputs(logits, torch.eye(11), None, targets, **options)
    expected = LabelSmoother(SMOOTHING)({"logits": logits}, targets)
    actual = outputs.losses.sum() / num_label_tokens
    torch.testing.assert_close(actual, expected)
    gradients = [torch.autograd.grad(loss, logits)[0] for loss in (actual, expected)]
    torch.testing.assert_close(*gradients)


CASES = {
    "1 process": (1, [], 4),
    "ring on FSDP2, accumulation": (2, ["--sp", "2", "--sp_backend", "ring"], 4),
    "ulysses × dp 2 on ZeRO-3, accumulation": (4, ["--sp", "2", "--sp_backend", "ulysses"], 2),
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_smoothed_training_equals_one_process(case, models, tmp_path, parity_table):
    """Four documents a step, of which one has nearly no labels; eval_loss is smoothed too, as in TRL."""
    processes, flags, accumulation = CASES[case]
    documents = make_documents([90, 7, 130, 41], masked=0.97)
    data = write_jsonl(tmp_path / "data.jsonl", documents)
    model = models["GQA 4:2"]
    reference = one_process(model, documents, label_smoothing=SMOOTHING)
    flags = [*flags_of_run(model, data, tmp_path / "out"), *flags, "--label_smoothing_factor", str(SMOOTHING)]
    flags += ["--gradient_accumulation_steps", str(accumulation), "--packing", "False"]
    flags += ["--eval_strategy", "steps", "--eval_on_start", "True", "--dataset_test_split", "train"]
    log = run_ranks(processes, "tests.training.test_evaluation:run_evaluations", {case: flags})[0][case][0]
    check(steps_of(log), reference, f"label smoothing, {case}", "torchrun", parity_table)
    start = next(entry["eval_loss"] for entry in log if "eval_loss" in entry)
    assert start == pytest.approx(reference[0][0], rel=1e-5)
    plain_losses, plain_norms = one_process(model, documents)
    assert plain_losses[0] != pytest.approx(start, rel=2e-5)  # it does act
    assert plain_norms[0] != pytest.approx(reference[1][0], rel=0.1)

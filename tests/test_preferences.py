"""examples/dpo.py at sp 2 against the same steps on one process: stock attention on each document, and TRL itself.

Losses lie within 1e-4 of each other: sums of a thousand fp32 log-probabilities are off by 1e-7 of themselves, and what
the loss is made of is the small difference of two of them.
"""

from __future__ import annotations

import pytest
import torch

from longctx.model.tiny import tiny_model, tiny_tokenizer
from tests.layers.test_log_probs import dense_log_probs, dense_model
from tests.modules import load
from tests.reference import adamw_steps, dpo_log_of_trl
from tests.test_examples import PREFERENCES, losses_in, losses_of
from tests.workers import run_ranks, run_script


def losses_of_one_process(batch_size):
    """AdamW on the pairs in order."""
    dpo = load(PREFERENCES)
    pairs = dpo.tokenize(dpo.load_preferences(), tiny_tokenizer())
    model, reference_model = dense_model(torch.float32), dense_model(torch.float32)

    def loss_of_step(step):
        batch = pairs[step * batch_size : (step + 1) * batch_size]
        documents = [pair[answer] for answer in ("chosen", "rejected") for pair in batch]
        with torch.no_grad():
            reference = dense_log_probs(reference_model, documents)[1]
        return dpo.preference_loss(dense_log_probs(model, documents)[1], reference)[0]

    return adamw_steps(model, [dpo.LEARNING_RATE] * dpo.STEPS, loss_of_step)[0]


def losses_of_trl(batch_size, folder):
    """DPOTrainer's, given the same records."""
    dpo = load(PREFERENCES)
    history = dpo_log_of_trl(
        tiny_model(),
        tiny_model(),
        tiny_tokenizer(),
        dpo.load_preferences(),
        folder,
        per_device_train_batch_size=batch_size,
        max_steps=dpo.STEPS,
        learning_rate=dpo.LEARNING_RATE,
        lr_scheduler_type="constant",
        beta=dpo.BETA,
        train_sampling_strategy="sequential",
    )
    return [entry["loss"] for entry in history if "loss" in entry]


@pytest.mark.long
def test_the_example_takes_the_steps_of_one_process(tmp_path):
    losses = losses_in(run_script(2, PREFERENCES, tmp_path))
    assert losses == pytest.approx(losses_of_one_process(2), rel=1e-4)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, 4])
def test_the_example_takes_the_steps_of_trl(processes, tmp_path):
    batch_size = processes  # 2 pairs for each data-parallel rank, of which there are processes / 2
    losses = losses_of(PREFERENCES, tmp_path, processes)
    assert losses == pytest.approx(losses_of_one_process(batch_size), rel=1e-4)
    [expected] = run_ranks(1, f"{__name__}:losses_of_trl", batch_size, str(tmp_path))
    assert losses == pytest.approx(expected, rel=1e-4)

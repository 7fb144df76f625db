"""`SequenceMixin` on a trainer of one's own: what it takes, and what it refuses instead of leaving it out."""

from __future__ import annotations

import copy

import pytest
from datasets import Dataset, IterableDataset
from transformers import Trainer
from trl import RewardTrainer, SFTConfig, SFTTrainer

import longctx
from longctx.model.tiny import tiny_model, tiny_tokenizer
from longctx.training.checkpoint.files import CheckpointError
from longctx.training.trainer import SequenceMixin
from longctx.upstream.transformers_internals import keep_mode, list_parameters
from tests.workers import run_ranks

TEXTS = Dataset.from_dict({"text": [letter * (200 + 90 * number) for number, letter in enumerate("abcdef")]})
STEPS, SAVED = 4, 2


class Mine(SequenceMixin, SFTTrainer):
    """Writes more into the log, and scales the loss."""

    def compute_loss(self, *args, **kwargs):
        return 2 * super().compute_loss(*args, **kwargs)

    def log(self, logs, start_time=None):
        super().log(logs | {"mine": self.state.global_step}, start_time)


def arguments(folder, **given):
    common = {"report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True}
    return SFTConfig(output_dir=str(folder), **common | given)


def train(folder, sp, resume_from=None, accumulation=2):
    """Train on texts, with TRL's own packing, evaluation and checkpoints, and return the log."""
    saved = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": SAVED, "save_steps": SAVED}
    batch = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": accumulation}
    args = arguments(folder, max_steps=STEPS, logging_steps=1, packing=True, max_length=256, **batch, **saved)
    model, sequence = longctx.parallelize(tiny_model(), sp=sp, device=args.device)
    trainer = Mine(
        model, args, train_dataset=TEXTS, eval_dataset=TEXTS, processing_class=tiny_tokenizer(), sequence=sequence
    )
    trainer.train(resume_from_checkpoint=resume_from)
    assert "parameters" not in vars(trainer.model_wrapped), "they may change after the training"
    return trainer.state.log_history


def refused(*given):
    with pytest.raises(CheckpointError) as error:
        train(*given)
    return str(error.value)


def numbers(log):
    """The losses and norms of a log, and the entry of `Mine`."""
    names = ("step", "loss", "grad_norm", "eval_loss", "mine")
    return [{name: entry[name] for name in names if name in entry} for entry in log]


def test_a_copy_of_a_model_has_a_mode_and_parameters_of_its_own():
    model = tiny_model()
    keep_mode(model)
    list_parameters(model)
    copied = copy.deepcopy(model)
    assert all(one is other for one, (_, other) in zip(copied.parameters(), copied.named_parameters(), strict=True))
    assert not {*copied.parameters()} & {*model.parameters()}
    assert [*copied.parameters(recurse=False)] == []
    was = model.training
    copied.train(not was)
    assert (model.training, copied.training, copied.get_decoder().training) == (was, not was, not was)


class Forgetful(SequenceMixin, SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs)


def test_a_loss_without_the_number_of_label_tokens_is_refused(tmp_path):
    args = arguments(tmp_path, max_steps=1)
    model, sequence = longctx.parallelize(tiny_model(), sp=1, device=args.device)
    given = {"train_dataset": TEXTS, "processing_class": tiny_tokenizer(), "sequence": sequence}
    with pytest.raises(ValueError, match=r"Forgetful called compute_loss without num_items_in_batch"):
        Forgetful(model, args, **given).train()


def test_a_trainer_of_ones_own_trains_evaluates_and_resumes(tmp_path):
    [one] = run_ranks(1, f"{__name__}:train", tmp_path / "one", 1)
    whole, _ = run_ranks(2, f"{__name__}:train", tmp_path / "two", 2)
    resumed, _ = run_ranks(2, f"{__name__}:train", tmp_path / "new", 2, str(tmp_path / "two" / f"checkpoint-{SAVED}"))
    assert numbers(resumed) == numbers(whole)
    assert [entry["step"] for entry in numbers(whole)] == [1, 2, 2, 3, 4, 4, 4] == [e["mine"] for e in numbers(whole)]
    for entry, reference in zip(numbers(whole), numbers(one), strict=True):  # fp32: sums over other tokens first
        assert entry == pytest.approx(reference, rel=2e-6)
    [error] = run_ranks(1, f"{__name__}:refused", tmp_path / "other", 1, str(tmp_path / "one" / "checkpoint-2"), 3)
    assert "was written with 2 sequences in a step, and this run has 3" in error


class Weighted(SFTTrainer):
    def compute_loss(self, *args, **kwargs):
        return 2 * super().compute_loss(*args, **kwargs)


class Dealt(Trainer):
    def _get_train_sampler(self, dataset=None):
        return None


STREAM = IterableDataset.from_generator(lambda: iter([{"input_ids": [1, 2]}]))
REFUSED = {
    "a loss below the mixin": (Weighted, {}, {}, "Weighted.compute_loss would never be called"),
    "TRL's RewardTrainer": (RewardTrainer, {}, {}, "RewardTrainer.compute_loss would never be called"),
    "a sampler": (Dealt, {}, {}, "Dealt._get_train_sampler would never be called"),
    "a function for the loss": (SFTTrainer, {}, {"compute_loss_func": max}, "compute_loss_func would have no effect"),
    "metrics": (SFTTrainer, {}, {"compute_metrics": max}, "compute_metrics would have no effect"),
    "DFT": (SFTTrainer, {"loss_type": "dft"}, {}, "loss_type 'dft' is not computed over sequence groups"),
    "a stream": (SFTTrainer, {}, {"train_dataset": STREAM}, "train_dataset is of the type IterableDataset"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_left_out_is_refused(case, tmp_path):
    below, given, keywords, message = REFUSED[case]
    trainer = type("Mine", (SequenceMixin, below), {})
    with pytest.raises(ValueError, match=message):
        trainer(None, arguments(tmp_path, **given), **{"train_dataset": TEXTS, "sequence": None} | keywords)

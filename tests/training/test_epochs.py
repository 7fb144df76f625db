"""The data order of a run of several epochs, and the place in it of a run that is resumed.

The model of what is right is a few lines: an epoch reads every sequence once (but for a last step that is not full,
with drop_last), in an order of its own, and step n of a run is step `n mod steps` of epoch `n div steps`, whoever asks.
"""

from __future__ import annotations

import os
from itertools import chain, combinations
from unittest.mock import patch

import numpy as np
import pytest
from accelerate.state import AcceleratorState
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TrainerCallback

from longctx.packing import balanced_order, shuffled_order
from longctx.training.data_order import StepLoader
from longctx.training.nonfinite import documents_of_step
from tests.training.test_data_order import LAYOUTS, MODES, costs_of, samplers, steps_read
from tests.training.test_training import flags_of_run, prepared_run, write_jsonl


def loaders(num_rows, layout, mode, **options):
    """One loader for each data-parallel rank, as the trainer makes them; a batch is a list of row numbers."""
    made = samplers(num_rows, layout, mode, **options)
    return [StepLoader(range(num_rows), batch_sampler=sampler, collate_fn=list) for sampler in made]


def epochs_read(ranks, num_epochs, accumulation_steps):
    """The rows of each step of each epoch over all ranks, sorted, as the trainer reads them."""
    epochs = []
    for epoch in range(num_epochs):
        for rank in ranks:
            rank.set_epoch(epoch)
        epochs.append(steps_read(ranks, accumulation_steps))
    return epochs


@pytest.mark.parametrize("order", ["shuffled", "balanced"])
def test_no_seed_and_epoch_have_the_order_of_others(order):
    """Seed 7's second epoch is not seed 8's first, as it would be if the two were added."""

    def rows(seed, epoch):
        if order == "shuffled":
            return tuple(shuffled_order(40, seed=seed, epoch=epoch))
        return tuple(balanced_order(costs_of(40), 4, seed=seed, epoch=epoch))

    assert len({rows(seed, epoch) for seed in range(5) for epoch in range(5)}) == 25
    assert rows(3, 2) == rows(3, 2)


def test_in_order_every_epoch_is_the_same():
    epochs = epochs_read(loaders(10, (2, 1, 2), "sequential"), 2, 2)
    assert epochs == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]] * 2


@given(num_rows=st.integers(1, 60), layout=LAYOUTS, mode=MODES, drop_last=st.booleans(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_layout_that_goes_on_in_any_epoch_reads_what_the_other_would_have(num_rows, layout, mode, drop_last, data):
    """As the trainer resumes: it works out the epoch and the micro-batches to pass over from the step alone."""
    size = layout[0] * layout[1] * layout[2]
    micro_batch_size = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    dp = data.draw(st.sampled_from([n for n in range(1, size + 1) if size // micro_batch_size % n == 0]))
    after = (micro_batch_size, dp, size // micro_batch_size // dp)
    whole = list(chain(*epochs_read(loaders(num_rows, layout, mode, drop_last=drop_last), 3, layout[2])))
    if not whole:
        return
    ranks = loaders(num_rows, after, mode, drop_last=drop_last)
    num_steps = ranks[0].batch_sampler.num_steps
    assert 3 * num_steps == len(whole)
    begun = data.draw(st.integers(0, len(whole) - 1))
    epoch, step = divmod(begun, num_steps)
    assert epochs_read(ranks, epoch + 1, after[2])[epoch][step:] == whole[begun : (epoch + 1) * num_steps]


# The trainer itself

NUM_DOCUMENTS = 11
"""Of one sequence each, in steps of four: epochs of three steps, the last of which is not full."""


def built_trainer(flags):
    """A prepared run of this process, and its trainer, as `longctx train` makes it."""
    from longctx.run import build_trainer, load

    AcceleratorState._reset_state(True)
    prepared = prepared_run(flags)
    return prepared, build_trainer(prepared, load(prepared))


def train(flags, resume_from=None, num_steps=None):
    """Train in this process: of each step its sequences, as numbers; what the trainer says they are; and its epoch.

    Args:
        num_steps: after which the run is stopped; None for all.
    """
    given = [*flags, *(["--resume_from_checkpoint", str(resume_from)] if resume_from else [])]
    with patch.dict(os.environ):
        prepared, trainer = built_trainer(given)
        steps, named, epochs, read = [], [], [], []
        training_step = trainer.training_step

        def spied(model, inputs, *arguments, **keywords):
            first_tokens = inputs.position_ids.flatten() == 0
            is_padding = inputs.labels.flatten() == -100
            tokens = inputs.input_ids.flatten()
            starts = first_tokens.nonzero().flatten().tolist()
            ends = [*starts[1:], len(tokens)]
            read.extend(
                int(tokens[start]) for start, end in zip(starts, ends, strict=True) if not is_padding[start:end].all()
            )
            return training_step(model, inputs, *arguments, **keywords)

        class Follow(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                if not prepared.run.settings["dataset_streaming"]:
                    rows = documents_of_step(trainer)[1]
                    named.append(sorted(int(prepared.data.documents[n]["input_ids"][0]) for n in rows))

            def on_step_end(self, args, state, control, **kwargs):
                steps.append(sorted(read))
                epochs.append(state.epoch)
                read.clear()
                if num_steps is not None and len(steps) == num_steps:
                    control.should_training_stop = True

        trainer.training_step = spied
        trainer.add_callback(Follow())
        trainer.train(resume_from_checkpoint=resume_from and str(resume_from))
    return steps, named, epochs


ORDERS = {
    "balanced": ["--packing", "True"],
    "drop last": ["--packing", "False", "--dataloader_drop_last", "True"],
    "stream": ["--dataset_streaming", "True", "--max_steps", "9"],
}


IN_BRIEF = (3, 4, 8)
"""Behind an epoch, in the middle of one, and before the last step of the last one."""


@pytest.mark.parametrize(
    ("order", "resumed"),
    [("balanced", IN_BRIEF), *(pytest.param(order, range(1, 9), marks=pytest.mark.long) for order in ORDERS)],
    ids=str,
)
def test_a_run_resumed_in_any_epoch_reads_the_rest(order, resumed, models, tmp_path):
    """Three epochs in this process, resumed behind these steps: the next sequences are those of the whole run."""
    documents = [([number + 1] * 40, [number + 1] * 40) for number in range(NUM_DOCUMENTS)]
    data = write_jsonl(tmp_path / "data.jsonl", documents)
    flags = [*flags_of_run(models["GQA 4:2"], data, tmp_path / "whole"), "--max_length", "40", "--use_cpu", "True"]
    flags += ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2", "--num_train_epochs", "3"]
    flags += ["--max_steps", "-1", "--seed", "5", "--save_strategy", "steps", "--save_steps", "1", *ORDERS[order]]
    steps, named, epochs = train(flags)

    of_epoch = 2 if order == "drop last" else 3
    assert len(steps) == 3 * of_epoch
    by_epoch = [steps[at : at + of_epoch] for at in range(0, len(steps), of_epoch)]
    read = [list(chain(*epoch)) for epoch in by_epoch]
    for numbers in read:
        assert len(numbers) == len(set(numbers)) == (8 if order == "drop last" else NUM_DOCUMENTS)
        assert set(numbers) <= set(range(1, NUM_DOCUMENTS + 1))
    if order == "stream":
        assert named == []
        assert steps == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11]] * 3
    else:
        assert named == steps  # what a report of a step without finite gradients would name
        assert all(one != other for one, other in combinations(by_epoch, 2))
        done = np.cumsum([len(step) for step in steps]) / len(read[0])
        assert epochs == pytest.approx(done.tolist())

    for step in [step for step in resumed if step < len(steps)]:
        again = [*flags, "--save_strategy", "no", "--output_dir", str(tmp_path / "again")]
        if step == 4:  # a worker that stays over the end of an epoch, whose iterator is one object in all of them
            again += ["--dataloader_num_workers", "1", "--dataloader_persistent_workers", "True"]
        rest, _, epochs_again = train(again, resume_from=tmp_path / "whole" / f"checkpoint-{step}", num_steps=3)
        assert rest == steps[step : step + 3], step
        assert epochs_again == pytest.approx(epochs[step : step + 3])

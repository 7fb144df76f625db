"""Learning rates are transformers' own on every engine, and a run that would train nothing is refused."""

from __future__ import annotations

import json
import logging
import os

import pytest
import torch
from transformers import get_scheduler
from transformers.trainer_utils import SchedulerType
from trl import SFTConfig

from longctx.training.schedule import check_learning_rates
from longctx.upstream.accelerate_internals import ENGINE_ENVIRONMENT
from tests.small_model import save_small_model
from tests.training.test_training import COMMON, make_documents, prepared_run, write_jsonl
from tests.workers import one_by_one, run_ranks

STEPS, WARMUP, LEARNING_RATE = 6, 2, 5e-3
SCHEDULES = {
    "linear": None,
    "cosine": {"num_cycles": 0.4},
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"lr_end": 1e-4, "power": 2.0},
    "constant": None,
    "constant_with_warmup": None,
    "inverse_sqrt": {"timescale": 4},
    "cosine_with_min_lr": {"min_lr": 1e-3},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-3, "warmup_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 3, "min_lr_ratio": 0.1},
}
REFUSED_SCHEDULES = ["reduce_lr_on_plateau", "greedy"]
"""Those that follow the loss or evaluations, and not the step alone."""
RING, ULYSSES = ["--sp", "2", "--sp_backend", "ring"], ["--sp", "2", "--sp_backend", "ulysses"]
ENGINES = {"FSDP2": ("", RING), "ZeRO-1": ("1", ULYSSES), "ZeRO-2": ("2", ULYSSES), "ZeRO-3": ("3", ULYSSES)}
TRAINED = "cosine_with_min_lr"
"""The schedule of the run that each engine really trains; it needs the optimizer's `defaults`."""


def rates_of_all(cases):
    """{engine: (rates in a log, {schedule: (rates of every step and group, the same when resumed after step 3)})}."""
    from longctx.run import fit, load

    rates = {}
    for engine, (stage, arguments) in one_by_one(cases):
        if stage:
            os.environ.update(ENGINE_ENVIRONMENT["deepspeed"], ACCELERATE_DEEPSPEED_ZERO_STAGE=stage)
        prepared = prepared_run(arguments)
        trainer = fit(prepared, load(prepared))
        log = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
        rates[engine] = log, {name: rates_on_engine(trainer, name) for name in SCHEDULES}
    return rates


def rates_on_engine(trainer, name):
    """A schedule of the engine's own optimizer, from its start, and as a checkpoint of step 3 sets it."""
    trainer.args.lr_scheduler_type, trainer.args.lr_scheduler_kwargs = SchedulerType(name), SCHEDULES[name]
    trainer.lr_scheduler = None
    scheduler = trainer.create_scheduler(STEPS)
    whole = followed(scheduler, trainer.optimizer, STEPS)
    trainer._set_learning_rates(3)
    return whole, followed(scheduler, trainer.optimizer, STEPS - 3)


def followed(scheduler, optimizer, steps):
    rates = []
    for _ in range(steps):
        rates.append([group["lr"] for group in optimizer.param_groups])
        assert scheduler.get_last_lr() == rates[-1]
        scheduler.step()
    return rates


def reference(name):
    """Plain transformers and torch."""
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=LEARNING_RATE)
    given = {"num_warmup_steps": WARMUP, "num_training_steps": STEPS, "scheduler_specific_kwargs": SCHEDULES[name]}
    return [rate for (rate,) in followed(get_scheduler(name, optimizer, **given), optimizer, STEPS)]


@pytest.mark.parametrize(
    ("processes", "engines"),
    [
        pytest.param(2, {name: ENGINES[name] for name in ("FSDP2", "ZeRO-3")}, id="engines"),
        pytest.param(2, {name: ENGINES[name] for name in ("ZeRO-1", "ZeRO-2")}, id="lower", marks=pytest.mark.long),
        pytest.param(1, {"1 process": ("", [])}, id="1 process", marks=pytest.mark.long),
    ],
)
def test_every_schedule_has_the_rates_of_transformers(processes, engines, tmp_path):
    """In every step and parameter group, from the start and resumed, as the same floats."""
    assert set(SCHEDULES) | set(REFUSED_SCHEDULES) == {schedule.value for schedule in SchedulerType}
    model = save_small_model(tmp_path / "model")
    data = write_jsonl(tmp_path / "data.jsonl", make_documents([40, 30]))
    flags = [*COMMON, "--model_name_or_path", model, "--dataset_name", data]
    flags += ["--max_steps", str(STEPS), "--warmup_steps", str(WARMUP), "--lr_scheduler_type", TRAINED]
    flags += ["--lr_scheduler_kwargs", json.dumps(SCHEDULES[TRAINED])]
    flags += ["--output_dir"]
    cases = {name: (stage, [*flags, f"{tmp_path}/{name}", *given]) for name, (stage, given) in engines.items()}
    expected = {name: reference(name) for name in SCHEDULES}
    for engine, (log, rates) in run_ranks(processes, f"{__name__}:rates_of_all", cases)[0].items():
        assert log == expected[TRAINED], engine
        for name, (whole, resumed) in rates.items():
            assert all(list(group) == expected[name] for group in zip(*whole, strict=True)), (engine, name)
            assert all(list(group) == expected[name][3:] for group in zip(*resumed, strict=True)), (engine, name)


# ------------------------------------------------------------------------------------------------
# Runs that would train nothing
# ------------------------------------------------------------------------------------------------

DROP_LAST = ["--dataloader_drop_last", "True", "--gradient_accumulation_steps", "4"]
STREAM = ["--dataset_streaming", "True"]
NO_STEP = ("--dataloader_drop_last True", "makes 2 sequences", "takes 4 = per_device_train_batch_size 1 × 1", "Leave")
LATE = ("train_split", "--overlong truncate leaves no token with a label to train on", "--max_length")
WARM_UP = ("1 steps and --warmup_steps 1", "rate is 0 in every step")


def of_schedule(name, settings):
    return ["--lr_scheduler_type", name, "--lr_scheduler_kwargs", settings]


KWARGS = "Correct --lr_scheduler_kwargs"
REFUSED = {
    "fewer sequences than a step": (["two", *DROP_LAST, "--max_steps", "2"], NO_STEP),
    "by epochs": (["two", *DROP_LAST], NO_STEP),
    "not packed": (["two", *DROP_LAST, "--max_steps", "2", "--packing", "False"], NO_STEP),
    "a stream": (["two", *DROP_LAST, "--max_steps", "2", *STREAM], NO_STEP),
    "a stream, not packed": (["two", *DROP_LAST, "--max_steps", "2", "--packing", "False", *STREAM], NO_STEP),
    "no step": (["two", "--max_steps", "0"], ("--max_steps 0 trains nothing", "--num_train_epochs")),
    "no epoch": (["two", "--num_train_epochs", "0"], ("--num_train_epochs 0", "above 0", "--max_steps")),
    "a negative epoch": (["two", "--num_train_epochs", "-1"], ("--num_train_epochs -1", "at least 0")),
    "epochs without an end": (["two", "--num_train_epochs", "inf"], ("--num_train_epochs inf", "finite")),
    "epochs that are no number": (["two", "--num_train_epochs", "nan"], ("--num_train_epochs nan", "finite")),
    "all documents dropped": (
        ["late", "--overlong", "drop"],
        ("train_split", "--overlong drop leaves no sequence to train on", "3 documents dropped", "--max_length"),
    ),
    "all labels cut off": (["late", "--overlong", "truncate"], LATE),
    "all labels of the evaluation cut off": (
        ["both", "--overlong", "truncate", "--eval_strategy", "steps", "--eval_steps", "1"],
        ("test_split", "--overlong truncate leaves no token with a label to evaluate on"),
    ),
    "one step of warm-up": (["two", "--max_steps", "1", "--warmup_steps", "1"], (*WARM_UP, "Lower --warmup_steps")),
    "one step of warm-up, by epochs": (["two", "--num_train_epochs", "0.5", "--warmup_steps", "1"], WARM_UP),
    "a setting that the schedule does not have": (
        ["two", "--max_steps", "2", *of_schedule("cosine", '{"min_lr": 0.1}')],
        ("--lr_scheduler_type cosine", "min_lr", KWARGS),
    ),
    "a setting that is missing": (
        ["two", "--lr_scheduler_type", "warmup_stable_decay"],
        ("--lr_scheduler_type warmup_stable_decay", "num_decay_steps", KWARGS),
    ),
    "a setting out of range": (
        ["two", "--max_steps", "2", *of_schedule("polynomial", '{"lr_end": 1}')],
        ("--lr_scheduler_type polynomial", "lr_end (1) must be smaller", KWARGS),
    ),
    "settings that would be ignored": (
        ["two", "--max_steps", "2", *of_schedule("constant", '{"min_lr": 1}')],
        ("'min_lr': 1", "no effect with --lr_scheduler_type constant"),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data by name: two sequences; three documents with labels only at their ends; a split of each."""
    folder = tmp_path_factory.mktemp("data")
    two, late = [([5] * 60, [5] * 60)] * 2, [([5] * 100, [-100] * 80 + [5] * 20)] * 3
    for name, documents in {"two": two, "late": late, "both/train": two, "both/test": late}.items():
        write_jsonl(folder / f"{name}.jsonl", documents)
    return folder


@pytest.mark.parametrize("case", REFUSED)
def test_a_run_that_would_train_nothing(case, folder, refusal, clean_state, tmp_path):
    (name, *flags), parts = REFUSED[case]
    data = folder / name if name == "both" else folder / f"{name}.jsonl"
    common = ["--model_name_or_path", "tiny", "--max_length", "64", "--per_device_train_batch_size", "1"]
    error = refusal(*common, *flags, "--dataset_name", str(data), "--output_dir", str(tmp_path), "--report_to", "none")
    assert all(part in error for part in parts), error


WARNED = {
    "no learning rate": ({"learning_rate": 0.0}, "--learning_rate 0: the weights stay as they are"),
    "a warm-up as long as the run": ({"warmup_steps": 4}, "while the learning rate rises. It reaches 0.00075"),
    "no warm-up": ({"warmup_steps": 4, "lr_scheduler_type": "constant"}, "no effect with --lr_scheduler_type constant"),
    "as usual": ({"warmup_steps": 3}, ""),
}


@pytest.mark.parametrize("case", WARNED)
def test_learning_rates_that_train_little_are_said(case, caplog, clean_state, tmp_path):
    settings, message = WARNED[case]
    args = SFTConfig(**{"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "learning_rate": 1e-3, **settings})
    with caplog.at_level(logging.WARNING, logger="longctx.training.schedule"):
        check_learning_rates(args, 4)
    assert message in caplog.text
    assert bool(caplog.text) == bool(message)

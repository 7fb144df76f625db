"""A race: who takes part in a case, and the turns that each contestant takes."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .turns import Contestant, Turn

ROOT = Path(__file__).parents[2]
LOG_STEPS = 10
"""Steps between entries of the log. So many are warmed up, counted, and timed as one block."""
LENGTH = 48
HERE, TRL = "longctx", "TRL"


@dataclass(frozen=True, kw_only=True)
class Layout:
    ranks: int = 1
    flags: str = ""
    degrees: Mapping[str, int] = field(default_factory=dict)
    """Of accelerate's ParallelismConfig for TRL."""
    has_trl: bool = True


LAYOUTS = {
    "sp 1": Layout(),
    "ring 2 on FSDP2": Layout(ranks=2, flags="--sp 2 --sp_backend ring", degrees={"cp_size": 2}),
    "Ulysses 2 on ZeRO-3": Layout(ranks=2, flags="--sp 2 --sp_backend ulysses", degrees={"sp_size": 2}),
    "Ulysses 2 on FSDP2": Layout(ranks=2, flags="--sp 2 --sp_backend ulysses --engine fsdp2", has_trl=False),
}
SELECTIVE = {"full": False, "selective": True}
MODES = ("none", *SELECTIVE)
"""Without activation checkpoints; with; and with those that keep attention's output, beside TRL's full ones."""


class Case(NamedTuple):
    layout: str
    mode: str
    workers: int
    """Processes of the data loader."""


class Turns(NamedTuple):
    """Those of one contestant."""

    first: list[Turn]
    """To warm up; their losses are compared."""
    timed: list[Turn]
    counted: list[Turn]


def race(case: Case, trees: Mapping[str, Path], steps: int, starts: int) -> dict[str, Turns]:
    """Return the turns of each contestant, over all starts of its processes.

    Args:
        trees: of each name; that of TRL has the functions that start the stock trainer on the CPU.
        steps: timed steps of each contestant after each start.
    """
    turns = {name: Turns([], [], []) for name in trees if name != TRL or LAYOUTS[case.layout].has_trl}
    for _ in range(starts):
        _run(case, trees, steps, turns)
    return turns


def _run(case: Case, trees: Mapping[str, Path], steps: int, turns: Mapping[str, Turns]) -> None:
    """Start all contestants, and add the turns that they take."""
    with tempfile.TemporaryDirectory() as work, ExitStack() as started:
        folder = Path(work)
        write_inputs(folder)
        contestants = []
        for number, (name, task) in enumerate(tasks(case, trees, folder)):
            own = folder / str(number)
            own.mkdir()
            contestants.append(Contestant(name, task, LAYOUTS[case.layout].ranks, own))
            started.callback(contestants[-1].stop)
        for contestant in contestants:
            contestant.wait_until_started()
        for place, number in enumerate((LOG_STEPS, steps, LOG_STEPS)):
            for step in range(number):
                for contestant in contestants[:: 1 if step % 2 else -1]:
                    turn = contestant.step(("step", "step", "count")[place])
                    turns[contestant.name][place].append(turn)


def tasks(case: Case, trees: Mapping[str, Path], folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each contestant's name, and the task that its processes get as JSON."""
    layout, data = LAYOUTS[case.layout], str(folder / "rows.jsonl")
    options: dict[str, Any] = {
        "max_length": LENGTH,
        "per_device_train_batch_size": 1,
        "max_steps": 100_000,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "train_sampling_strategy": "sequential",
        "logging_steps": LOG_STEPS,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": case.mode != "none",
        "dataloader_num_workers": case.workers,
        "output_dir": "out",
    }
    if case.workers:
        options["dataloader_multiprocessing_context"] = "fork"  # a worker counts by what its parent has changed
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    flags += ["--model_name_or_path", str(folder / "model"), "--dataset_name", data, *layout.flags.split()]
    if case.mode in SELECTIVE:
        flags += ["--gradient_checkpointing_kwargs", json.dumps({"selective": SELECTIVE[case.mode]})]
    for name, tree in trees.items():
        if name != TRL:
            yield name, {"tree": str(tree), "flags": flags}
        elif layout.has_trl:
            stock = {"model": str(folder / "model"), "data": data, "options": options, "degrees": layout.degrees}
            yield name, {"tree": str(tree), "stock": stock}


def write_inputs(folder: Path) -> None:
    """Write a model of 28 narrow layers, and documents."""
    from longctx.model.tiny import tiny_config, tiny_model, tiny_tokenizer

    config = tiny_config()
    config.update({"num_hidden_layers": 28, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16})
    config.layer_types = ["full_attention"] * 28
    tiny_model(config=config).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    documents = np.random.default_rng(0).integers(3, 250, (64, LENGTH)).tolist()
    (folder / "rows.jsonl").write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in documents))


@contextmanager
def cloned(commits: Sequence[str]) -> Iterator[dict[str, Path]]:
    """Clone this repository at each of these commits, for the time of the body."""
    with tempfile.TemporaryDirectory() as work:
        trees = {commit: Path(work, commit) for commit in commits}
        for commit, tree in trees.items():
            subprocess.run(["git", "clone", "--quiet", ROOT, tree], check=True)
            subprocess.run(["git", "checkout", "--quiet", commit], cwd=tree, check=True)
        yield trees

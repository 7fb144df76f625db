"""What the ranks of recorded runs do: write models and data, and train. Only they import torch and longctx."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

from longctx.model.tiny import tiny_tokenizer
from longctx.run.processes import _decided
from longctx.settings.dpo import DPO
from longctx.settings.flags import SFT
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from longctx.training.trainer import SequenceTrainer
from tests.small_model import save_small_model
from tests.training.test_dpo import make_pairs
from tests.training.test_training import EXPERTS, log_of, make_documents, write_jsonl
from tests.workers import one_by_one

METHODS = {"train": SFT, "dpo": DPO}
LENGTHS = [90, 7, 41, 130, 64, 2, 33, 17, 88, 120, 5, 76, 31, 200] * 3
"""Of documents that make 15 or so packs of 160 tokens: a step takes 4, so that epochs end with a step of fewer."""
ENDS_BEFORE = 4
"""The step that a run with a signal does not begin. Its checkpoint is that of step 2, in the middle of an epoch."""
SMALLEST = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 8}
"""Sizes of the model in the committed checkpoint."""


def write_inputs(folder: str) -> None:
    """Write to `folder` the models and the data sets that runs name."""
    root = Path(folder)
    small = save_small_model(root / "small")
    save_small_model(root / "untied", tie_word_embeddings=False)
    save_small_model(root / "wide", hidden_size=64, intermediate_size=128, tie_word_embeddings=False)
    save_small_model(root / "smallest", 2, 1, **SMALLEST)
    config = Qwen3MoeConfig(**AutoConfig.from_pretrained(small).to_dict() | EXPERTS)
    AutoModelForCausalLM.from_config(config).save_pretrained(root / "experts")
    tiny_tokenizer().save_pretrained(root / "experts")
    (root / "documents").mkdir()
    write_jsonl(root / "documents" / "train.jsonl", make_documents(LENGTHS))
    write_jsonl(root / "documents" / "test.jsonl", make_documents([60, 33, 101, 9, 2], seed=1))
    (root / "pairs").mkdir()
    pairs = make_pairs() * 2
    random.Random(0).shuffle(pairs)
    (root / "pairs" / "train.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def train(cases: Mapping[str, tuple[str, list[str], Mapping[str, str], str]]) -> dict[str, list[Any]]:
    """Train each case in this process group, and return the denominators of the steps that it took.

    Args:
        cases: name -> method, arguments, environment, and the signal that ends it: SIGKILL, which takes the
            whole process group, one that the rank sends to itself, or none ("").
    """
    found = {}
    for name, (method, arguments, environment, sent) in one_by_one(cases):
        os.environ.update(environment)
        with denominators(sent) as found[name]:
            log_of(arguments, METHODS[method])
    return found


@contextmanager
def denominators(sent: str) -> Iterator[list[Any]]:
    """Yield a list that gets what each step's loss is divided by, which the trainer returns with the step's batches."""
    taken: list[Any] = []
    original = SequenceTrainer.get_batch_samples

    def get_batch_samples(self, *arguments, **keywords):
        if sent and len(taken) + 1 == ENDS_BEFORE:
            os.killpg(0, signal.SIGKILL) if sent == "SIGKILL" else os.kill(os.getpid(), signal.Signals[sent])
        samples, counts = original(self, *arguments, **keywords)
        taken.append(counts)
        return samples, counts

    SequenceTrainer.get_batch_samples = get_batch_samples  # type: ignore[method-assign]
    try:
        yield taken
    finally:
        SequenceTrainer.get_batch_samples = original  # type: ignore[method-assign]


def decided(cases: Mapping[str, tuple[str, list[str]]]) -> dict[str, list[str]]:
    """Return the names of what all ranks must have decided alike, for each case of method and arguments."""
    found = {}
    for name, (method, arguments) in one_by_one(cases):
        run = resolve(parse_flags(arguments, METHODS[method]), read_profile({}), {})  # started by no launcher
        found[name] = sorted(_decided(run, None))  # type: ignore[arg-type]
    return found

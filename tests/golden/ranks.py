"""What the ranks of recorded runs do: write models and data, and train. Only they import torch and longctx."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

from longctx.model.tiny import tiny_tokenizer
from longctx.settings.dpo import DPO
from longctx.settings.flags import SFT
from longctx.training.trainer import SequenceTrainer
from tests.small_model import save_small_model
from tests.training.test_dpo import make_pairs
from tests.training.test_training import EXPERTS, log_of, make_documents, write_jsonl
from tests.workers import one_by_one

METHODS = {"train": SFT, "dpo": DPO}
LENGTHS = [90, 7, 41, 130, 64, 2, 33, 17, 88, 120, 5, 76, 31, 200] * 3
"""Of documents that make 15 or so packs of 160 tokens: a step takes 4, so that epochs end with a step of fewer."""
SMALLEST = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 8}
"""Sizes of the model in the committed checkpoint."""


def write_inputs(folder: str) -> None:
    """Write to `folder` the models and the data sets that runs name."""
    root = Path(folder)
    small = save_small_model(root / "small")
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


def train(cases: Mapping[str, tuple[str, list[str]]]) -> dict[str, list[Any]]:
    """Train each case in this process group, and return what the loss of each step that it took is divided by.

    Args:
        cases: name -> method and arguments.
    """
    found: dict[str, list[Any]] = {}
    original = SequenceTrainer.get_batch_samples

    def get_batch_samples(self, *arguments, **keywords):
        samples, counts = original(self, *arguments, **keywords)
        found[name].append(counts)
        return samples, counts

    with patch.object(SequenceTrainer, "get_batch_samples", get_batch_samples):
        for name, (method, arguments) in one_by_one(cases):
            found[name] = []
            log_of(arguments, METHODS[method])
    return found

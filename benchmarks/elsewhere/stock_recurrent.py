"""One packed step of a model with gated delta layers in stock transformers and TRL.

`main` runs in an environment without longctx, so nothing of it is imported here.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments
from transformers.data.data_collator import DataCollatorWithFlattening
from trl import SFTConfig, SFTTrainer

Ids = list[int]
COMMON = {"max_steps": 1, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
COMMON |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}


def load(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)


def gradient_of(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def exact(folder: str, documents: list[Ids]) -> tuple[float, torch.Tensor]:
    """Token-weighted loss and gradient, each document a forward pass of its own."""
    model, total = load(folder), 0.0
    count = sum(len(ids) - 1 for ids in documents)
    for ids in documents:
        if len(ids) > 1:
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
            loss = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum") / count
            loss.backward()
            total += loss.item()
    return total, gradient_of(model)


class Keep(TrainerCallback):
    """Keep the gradient of the step before it is clipped."""

    gradient: torch.Tensor

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.gradient = gradient_of(kwargs["model"])


def sft_trainer(folder: str, documents: list[Ids]) -> Trainer:
    """TRL's SFTTrainer with its own packing (best-fit decreasing), which is free of padding."""
    args = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        packing=True,
        max_length=sum(map(len, documents)),
        per_device_train_batch_size=1,
        max_grad_norm=0,
        **COMMON,
    )
    rows = Dataset.from_list([{"input_ids": ids} for ids in documents])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return SFTTrainer(load(folder), args, train_dataset=rows, processing_class=tokenizer)


def flattening_trainer(folder: str, documents: list[Ids]) -> Trainer:
    """transformers' Trainer with its DataCollatorWithFlattening, which marks documents by position_ids alone."""
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=len(documents), max_grad_norm=0, **COMMON
    )
    rows = Dataset.from_list([{"input_ids": ids, "labels": ids} for ids in documents])
    return Trainer(load(folder), args, train_dataset=rows, data_collator=DataCollatorWithFlattening())


TRAINERS = {"SFTTrainer": sft_trainer, "flattening": flattening_trainer}


def step(folder: str, documents: list[Ids], way: str) -> dict[str, float]:
    """Loss, gradient norm and the gradient's relative error of the first step."""
    loss, gradient = exact(folder, documents)
    keep = Keep()
    trainer = TRAINERS[way](folder, documents)
    trainer.add_callback(keep)
    trainer.train()
    return {
        "exact_loss": loss,
        "exact_norm": float(gradient.norm()),
        "loss": next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry),
        "norm": float(keep.gradient.norm()),
        "gradient_error": float((keep.gradient - gradient).norm() / gradient.norm()),
    }


@torch.no_grad()
def leak(folder: str, pair: list[Ids], way: str) -> dict[str, float]:
    """By how much the second document's logits change when the first is replaced, in the batch of the trainer."""
    found = []
    for first in (pair[0], pair[2]):
        trainer = TRAINERS[way](folder, [first, pair[1]])
        batch = dict(next(iter(trainer.get_train_dataloader())))
        batch.pop("labels")
        ids = batch["input_ids"][0].tolist()
        start = next(i for i in range(len(ids)) if ids[i : i + len(pair[1])] == pair[1])
        if start == 0:
            raise RuntimeError("the document that is looked at comes first in the packed row")
        trainer.model.eval()
        found.append(trainer.model(**batch, use_cache=False).logits[0, start : start + len(pair[1])])
    change = (found[0] - found[1]).abs().amax(-1)
    return {"logit_change": float(change.max()), "largest_logit": float(found[0].abs().max())}


def main(folder: str, documents: str, way: str) -> None:
    """Print a JSON object of the results, or of the error that ended the step, as the last line.

    Args:
        folder: of the model and its tokenizer.
        documents: JSON file of `packed` (the token ids of each document of one full row) and `pair` (three documents of
            one length: two and a replacement for the first).
        way: a key of TRAINERS.
    """
    torch.set_num_threads(1)
    given = json.loads(Path(documents).read_text())
    kernels = [name for name in ("fla", "causal_conv1d") if importlib.util.find_spec(name)]
    try:
        found: dict[str, Any] = step(folder, given["packed"], way) | leak(folder, given["pair"], way)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(found | {"kernels": kernels}))

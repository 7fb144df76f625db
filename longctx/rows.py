"""The way from a data set's name to rows that can be collated: records, documents, packs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from datasets import Dataset
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from longctx.data import document_lengths, load_records, tokenize_records
from longctx.packing import PackedDataset, PackingReport, plan_packing

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class TrainingRows:
    """What the trainer reads."""

    documents: Dataset
    """`input_ids` and, where not all tokens are learnt, `labels`."""
    rows: PackedDataset
    """Packs, or single documents without packing."""
    report: PackingReport
    """What became of every document and token."""


def prepare_rows(
    settings: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, model_config: PretrainedConfig
) -> TrainingRows:
    """Load, tokenise and pack; rank 0 first, the others then read its cache.

    Raises:
        ValueError: for data that cannot be read or trained on as asked, with file and record.
    """
    return _first_rank_first(lambda: _prepare(settings, tokenizer, model_config))


def _prepare(
    settings: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, model_config: PretrainedConfig
) -> TrainingRows:
    records = load_records(
        settings["dataset_name"],
        config=settings["dataset_config"],
        split=settings["dataset_train_split"],
        text_field=settings["dataset_text_field"],
    )
    template = settings["chat_template_path"]
    documents = tokenize_records(
        records,
        tokenizer,
        text_field=settings["dataset_text_field"],
        completion_only_loss=settings["completion_only_loss"],
        assistant_only_loss=settings["assistant_only_loss"],
        chat_template=Path(template).read_text() if template else None,
        num_proc=settings["dataset_num_proc"],
        vocab_size=model_config.get_text_config().vocab_size,
    )
    if settings["shuffle_dataset"]:
        documents = documents.shuffle(seed=settings["seed"])
    packing, report = plan_packing(
        document_lengths(documents),
        settings["max_length"],
        strategy=settings["packing_strategy"] if settings["packing"] else "none",
        overlong=settings["overlong"],
    )
    return TrainingRows(documents=documents, rows=PackedDataset(documents, packing), report=report)


def _first_rank_first(work: Callable[[], Result]) -> Result:
    if not dist.is_initialized() or dist.get_rank() == 0:
        result = work()
        if dist.is_initialized():
            dist.barrier()
        return result
    dist.barrier()
    return work()

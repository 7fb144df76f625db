"""The way from a data set's name to rows that can be collated: records, documents, packs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch.distributed as dist
from datasets import Dataset
from numpy.typing import NDArray
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from longctx.data import document_lengths, load_records, tokenize_records
from longctx.packing import PackedDataset, PackingReport, pack_costs, plan_packing

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
    costs: NDArray[np.floating] | None
    """Modelled cost of each pack, to balance ranks by; None without packing or --balance_packs."""


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
    lengths = document_lengths(documents)
    packing, report = plan_packing(
        lengths,
        settings["max_length"],
        strategy=settings["packing_strategy"] if settings["packing"] else "none",
        overlong=settings["overlong"],
    )
    balances = settings["packing"] and settings["balance_packs"]
    return TrainingRows(
        documents=documents,
        rows=PackedDataset(documents, packing),
        report=report,
        costs=pack_costs(packing, lengths) if balances else None,
    )


class RefusedTogether(ValueError):
    """What one rank's input was refused for, raised on every rank, so that none waits for another."""

    def __init__(self, message: str, *, is_mine: bool):
        super().__init__(message)
        self.is_mine = is_mine
        """Whether this rank is the one to say why."""


def together(work: Callable[[], Result]) -> Result:
    """Run `work` on all ranks; if it raises a ValueError on some, all of them raise the first of these.

    Raises:
        RefusedTogether: on every rank. A process alone raises the ValueError as it is.
    """
    if not dist.is_initialized():
        return work()
    result, message = None, None
    try:
        result = work()
    except ValueError as error:
        message = str(error)
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    for rank, refusal in enumerate(messages):
        if refusal is not None:
            raise RefusedTogether(refusal, is_mine=rank == dist.get_rank())
    return cast(Result, result)


def _first_rank_first(work: Callable[[], Result]) -> Result:
    if not dist.is_initialized():
        return work()
    is_first = dist.get_rank() == 0
    result = together(lambda: work() if is_first else None)
    return cast(Result, together(lambda: result if is_first else work()))

"""The cases: what each compares, as rows of the table."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..packing import histogram
from .recurrent import recurrent_case
from .steps import (
    FEW_TOKENS,
    LONG_MASK_LENGTH,
    MASK_LENGTH,
    PACK_DOCUMENTS,
    PACK_LENGTHS,
    PACKED_LENGTHS,
    ROW_LENGTH,
    WINDOW,
    Document,
    Outcome,
    Row,
    exact_step,
    load_model,
    longctx_step,
    make_documents,
    make_row,
    require,
    run_group,
    show,
    stock_step,
    trl_packed_step,
    write_model,
)


@dataclass(frozen=True, kw_only=True)
class Training:
    """One optimizer step in the three columns."""

    situation: str
    rows: Sequence[Sequence[Document]]
    """The rows in the order of the stock data loader. Rank r of the first group reads row r."""
    trained: Sequence[int] = (0,)
    """Rows that take part in the step."""
    degrees: dict[str, int]
    zero_stage: int | None = None
    """None: FSDP2."""
    processes: int = 2
    accumulation: int = 1
    trl: bool = False

    @property
    def documents(self) -> list[Document]:
        return [document for index in self.trained for document in self.rows[index]]

    def run_stock(self, model: str) -> Outcome:
        common: dict[str, Any] = {"model": model, "degrees": self.degrees, "zero_stage": self.zero_stage}
        if self.trl:
            documents = [document for row in self.rows for document in row]
            return run_group(self.processes, trl_packed_step, documents=documents, **common)
        rows = [make_row(row) for row in self.rows]
        return run_group(self.processes, stock_step, rows=rows, accumulation=self.accumulation, **common)

    def run_longctx(self, model: str) -> Outcome:
        backend = "ring" if "cp_size" in self.degrees else "ulysses"
        flags = ["--sp", "2", "--sp_backend", backend, "--gradient_accumulation_steps", str(self.accumulation)]
        arguments = {"model": model, "documents": self.documents, "flags": flags, "zero_stage": self.zero_stage}
        return run_group(self.processes, longctx_step, **arguments)


def training_rows(trainings: Sequence[Training], model: str) -> Iterator[Row]:
    """Each step's loss and gradient norm in the three columns."""
    exact: dict[str, Outcome] = {}
    for training in trainings:
        key = repr(training.documents)
        if key not in exact:
            exact[key] = require(run_group(1, exact_step, folder=model, documents=training.documents))
        outcomes = exact[key], training.run_stock(model), require(training.run_longctx(model))
        yield Row(training.situation, *(show(outcome, "loss {loss:.4f}, norm {grad_norm:.4f}") for outcome in outcomes))


def packed_trainings() -> list[Training]:
    """Return steps on one packed row, in which all tokens are trained on. Controls hold one document."""
    packed = make_documents(PACKED_LENGTHS)
    alone = make_documents([ROW_LENGTH])
    ulysses: dict[str, Any] = {"degrees": {"sp_size": 2}, "zero_stage": 3}
    ring: dict[str, Any] = {"degrees": {"cp_size": 2}}
    return [
        Training(situation="SFTTrainer with packing, cp_size 2 (FSDP2)", rows=[packed], trl=True, **ring),
        Training(situation="Trainer, packed row, cp_size 2 (FSDP2)", rows=[packed, packed], **ring),
        Training(situation="control: the same, one document in the row", rows=[alone, alone], **ring),
        Training(situation="SFTTrainer with packing, Ulysses sp_size 2 (ZeRO-3)", rows=[packed], trl=True, **ulysses),
        Training(situation="Trainer, packed row, Ulysses sp_size 2 (ZeRO-3), sdpa", rows=[packed, packed], **ulysses),
        Training(situation="control: the same, one document in the row", rows=[alone, alone], **ulysses),
    ]


def weighting_trainings() -> list[Training]:
    """One document a row; the rows of a step have equal or unequal numbers of label tokens."""
    full, other, third = (make_documents([ROW_LENGTH], seed=seed) for seed in range(3))
    few = make_documents([ROW_LENGTH], learnt=FEW_TOKENS, seed=3)
    counts = f"{ROW_LENGTH - 1} and {FEW_TOKENS} label tokens"
    two: dict[str, Any] = {"degrees": {"sp_size": 2}, "zero_stage": 3, "accumulation": 2, "trained": (0, 1)}
    four: dict[str, Any] = {"degrees": {"sp_size": 2, "dp_shard_size": 2}, "zero_stage": 3, "processes": 4}
    four["trained"] = (0, 2)  # each sequence group of the stock stack starts with its first rank's row
    stages = [
        Training(
            situation=f"Trainer, Ulysses sp_size 2, ZeRO-{stage}, one document",
            rows=[full, full],
            degrees={"sp_size": 2},
            zero_stage=stage,
        )
        for stage in (1, 2)
    ]
    return [
        Training(
            situation=f"Trainer, Ulysses sp_size 2, ZeRO-3, 2 accumulation steps with {counts}", rows=[full, few], **two
        ),
        Training(situation="control: the same, equal numbers", rows=[full, other], **two),
        Training(
            situation=f"Trainer, Ulysses sp_size 2 × dp 2, ZeRO-3, with {counts}",
            rows=[full, other, few, third],
            **four,
        ),
        Training(situation="control: the same, equal numbers", rows=[full, few, other, third], **four),
        *stages,
    ]


def window_trainings() -> list[Training]:
    """One document, longer than the window."""
    alone = make_documents([ROW_LENGTH])
    situation = f"Trainer, Ulysses sp_size 2, sdpa, sliding window of {WINDOW}, one document of {ROW_LENGTH}"
    return [Training(situation=situation, rows=[alone, alone], degrees={"sp_size": 2}, zero_stage=3)]


def window_case(model: str) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        layers = {"layer_types": ["sliding_attention"] * 2, "max_window_layers": 0}
        write_model(folder, use_sliding_window=True, sliding_window=WINDOW, **layers)
        yield from training_rows(window_trainings(), folder)


def logits_case(model: str) -> Iterator[Row]:
    outcome = require(run_group(1, logit_errors, folder=model))
    situations = {
        "mask": "packed row in a stock model, one device: position_ids and a 2-D mask of ones",
        "cache": "the same: position_ids, use_cache left at its default",
        "plain": "the same: input_ids alone, no cache",
        "positions": "control: the same: position_ids, use_cache=False, no mask",
    }
    for name, situation in situations.items():
        stock, ours = show(outcome, f"{{{name}:.1e}}"), show(outcome, "{longctx:.1e}")
        yield Row(f"{situation}; largest logit error", show(outcome, "0 (logits up to {largest:.1f})"), stock, ours)


def logit_errors(*, folder: str) -> dict[str, float]:
    """Largest difference to the logits of each document alone; longctx's collator feeds the same stock model."""
    from datasets import Dataset

    from longctx.collate import SequenceCollator
    from longctx.packing import pack_dataset

    model, documents = load_model(folder), make_documents(PACKED_LENGTHS)
    row = {name: torch.tensor([values]) for name, values in make_row(documents).items()}
    ids, positions = row["input_ids"], row["position_ids"]
    lists = {"input_ids": [ids for ids, _ in documents], "labels": [labels for _, labels in documents]}
    batch = SequenceCollator(0, padding_free=True)(list(pack_dataset(Dataset.from_dict(lists), ROW_LENGTH)))
    del batch["labels"]
    ways: dict[str, dict[str, Any]] = {
        "mask": {"input_ids": ids, "position_ids": positions, "attention_mask": torch.ones_like(ids)},
        "cache": {"input_ids": ids, "position_ids": positions},
        "plain": {"input_ids": ids, "use_cache": False},
        "positions": {"input_ids": ids, "position_ids": positions, "use_cache": False},
        "longctx": batch,
    }
    errors = {name: _largest_error(model, inputs) for name, inputs in ways.items()}
    with torch.no_grad():
        return errors | {"largest": float(model(**batch).logits.abs().max())}


@torch.no_grad()
def _largest_error(model: Any, inputs: dict[str, Any]) -> float:
    """Over the documents that restarting positions show; where none are given, those of PACKED_LENGTHS."""
    ids = inputs["input_ids"][0]
    default = torch.cat([torch.arange(length) for length in PACKED_LENGTHS])
    starts = (inputs.get("position_ids", default[None])[0] == 0).nonzero().flatten().tolist()
    logits = model(**inputs).logits[0]
    spans = zip(starts, [*starts[1:], len(ids)], strict=True)
    errors = (logits[a:b] - model(input_ids=ids[None, a:b], use_cache=False).logits[0] for a, b in spans)
    return max(float(error.abs().max()) for error in errors)


def mask_case(model: str) -> Iterator[Row]:
    outcome = require(run_group(1, mask_bytes, folder=model))
    stock, ours = show(outcome, "{stock:,}"), show(outcome, "{longctx:,}")
    yield Row(f"bytes of the mask of a packed row of {MASK_LENGTH:,} tokens", "—", stock, ours)
    predicted = f"{LONG_MASK_LENGTH**2:,} (predicted: S²)"
    yield Row(f"the same, {LONG_MASK_LENGTH:,} tokens", "—", predicted, f"{ours} (predicted)")


class _MaskSeenError(Exception):
    """Ends a forward pass at its first attention layer."""


def mask_bytes(*, folder: str) -> dict[str, int]:
    """Bytes of the mask that reaches the first attention layer, without and with longctx."""
    import longctx

    lengths = [MASK_LENGTH // 4] * 4
    batch = {name: torch.tensor([values]) for name, values in make_row(make_documents(lengths)).items()}
    model = load_model(folder)
    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}
    stock = _seen_mask_bytes(model, inputs)
    model, sequence = longctx.parallelize(model, 1)
    return {"stock": stock, "longctx": _seen_mask_bytes(model, sequence.shard(batch).inputs)}


def _seen_mask_bytes(model: Any, inputs: dict[str, Any]) -> int:
    seen = []

    def look(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["attention_mask"])
        raise _MaskSeenError

    hook = model.model.layers[0].self_attn.register_forward_pre_hook(look, with_kwargs=True)
    with contextlib.suppress(_MaskSeenError):
        model(**inputs)
    hook.remove()
    return 0 if seen[0] is None else seen[0].nbytes


def packs_case(model: str) -> Iterator[Row]:
    for capacity in PACK_LENGTHS:
        outcome = require(run_group(1, count_packs, capacity=capacity))
        situation = f"packs of {capacity:,} tokens, BFD, {PACK_DOCUMENTS:,} documents of data/document_lengths.csv"
        yield Row(situation, *(show(outcome, cell) for cell in ("at least {bound:,}", "{trl:,}", "{longctx:,}")))


def count_packs(*, capacity: int) -> dict[str, int]:
    """Packs by trl.pack_dataset and longctx.packing; both cut a longer document to the capacity."""
    import pyarrow as pa
    from datasets import Dataset
    from trl import pack_dataset as trl_pack_dataset

    from longctx.packing import lower_bound, pack_dataset

    lengths = histogram(np.random.default_rng(0), PACK_DOCUMENTS, capacity)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    tokens = pa.array(np.zeros(offsets[-1], dtype=np.int8))
    documents = Dataset(pa.table({"input_ids": pa.LargeListArray.from_arrays(pa.array(offsets), tokens)}))
    return {
        "bound": lower_bound(np.minimum(lengths, capacity), capacity),
        "trl": len(trl_pack_dataset(documents, capacity, "bfd")),
        "longctx": len(pack_dataset(documents, capacity, "bfd", overlong="truncate")),
    }


CASES: dict[str, Callable[[str], Iterator[Row]]] = {
    "logits": logits_case,
    "packed": lambda model: training_rows(packed_trainings(), model),
    "weighting": lambda model: training_rows(weighting_trainings(), model),
    "window": window_case,
    "recurrent": recurrent_case,
    "mask": mask_case,
    "packs": packs_case,
}

"""The documents of a case, the files that hold them, and an account of our own of what each step trains on."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .models import EOS, PAD, make_tokenizer
from .preferences import sides
from .space import TEXT_RECORDS, Case

Document = tuple[list[int], list[int]]
"""Token ids, and labels that are not shifted, -100 where nothing is learnt."""

SEED = 42
"""TrainingArguments' default."""
IGNORED = -100
SOURCES = 2
"""Data sets of a mixture."""
WEIGHTS = (3, 1)
FRAME = 20
"""Tokens of a conversation's frame, besides the one that ends other texts."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """What is on disk, and what is in it."""

    flags: dict[str, Any]
    """Flags that name it."""
    documents: list[Document]
    """The rows before packing, in the order of the data set; overlong ones are cut or left out."""
    evaluation: list[Document]


def make_data(case: Case, folder: Path) -> Data:
    """Write the files of a case."""
    random = np.random.default_rng([case.seed, 1])
    sources = SOURCES if case.reading in ("mixture", "weighted", "streamed mixture") else 1
    paths, parts, tests = [], [], []
    for number in range(sources):
        train, test = (_records(case, random, count) for count in (case.documents, 3))
        name = f"data-{number}" if sources > 1 else "data"
        paths.append(_write(case, folder / name, train, test if case.evaluation else None))
        parts.append([document for _, document in train])
        tests.append([document for _, document in test])
    flags = _flags(case, paths)
    if case.file == "folder" and case.evaluation:  # files of text have no splits
        tests, flags["dataset_test_split"] = parts, "train"
    evaluation = [document for test in tests for document in test]
    documents = _weighted(case, parts) if case.reading == "weighted" else list(itertools.chain(*parts))
    if case.unlucky == "shuffle_dataset True":
        documents = [documents[place] for place in np.random.default_rng(SEED).permutation(len(documents))]
    return Data(
        flags=flags,
        documents=_cut(case, documents),
        evaluation=_cut(case, evaluation),
    )


def _flags(case: Case, paths: Sequence[str]) -> dict[str, Any]:
    flags: dict[str, Any] = {"dataset_name": paths[0]} if len(paths) == 1 else {"datasets": list(paths)}
    if case.reading == "weighted":
        flags |= {"dataset_weights": list(WEIGHTS), "dataset_stopping_strategy": "all_exhausted"}
    if "stream" in case.reading:
        flags["dataset_streaming"] = True
    if case.records == "assistant":
        flags["assistant_only_loss"] = True
    if case.records == "prompt, all learnt":
        flags["completion_only_loss"] = False
    if case.records == "completion_mask":
        flags["completion_only_loss"] = True
    return flags


# ------------------------------------------------------------------------------------------------
# Documents
# ------------------------------------------------------------------------------------------------


def _lengths(case: Case, random: np.random.Generator, count: int) -> list[int]:
    limit, window = case.max_length, max(case.window, 2)
    mixed = random.integers(2, limit + 1, count).tolist()
    patterns: dict[str, list[int]] = {
        "ones": [1, 9, 1, 1, 30, 2, 1],
        "exact": [limit, limit, limit // 2, limit - limit // 2, limit - 1, 1],
        "longer by one": [limit + 1, limit, 2 * limit + 1, 3],
        "long": [3 * limit, 5 * limit - 1, 2 * limit, 7],
        "short": [2, 3, 2, 4, 2],
        "uneven": [limit, 2, 3, 2, 5, 2],
        "window": [window, window + 1, window - 1, 2 * window, 2 * window + 1],
    }
    pattern = patterns.get(case.lengths)
    if pattern is None:
        return mixed
    kept = [max(1, length) for length in (pattern * count)[:count]]
    return kept if case.lengths in ("longer by one", "long") else [min(length, limit) for length in kept]


def _records(case: Case, random: np.random.Generator, count: int) -> list[tuple[dict[str, Any], Document]]:
    """Records and the documents that they are."""
    lengths = _lengths(case, random, count)
    if case.reads_pairs:
        return [_pair_record(case, length, random) for length in lengths]
    if case.records in ("messages", "assistant"):
        lengths = [max(1, length - FRAME) for length in lengths]
    if case.records in TEXT_RECORDS:
        return [_text_record(case.records, _text(random, length), random) for length in lengths]
    return [_token_record(case, number, length, random) for number, length in enumerate(lengths)]


def _token_record(case: Case, number: int, length: int, random: np.random.Generator) -> tuple[dict[str, Any], Document]:
    ids = _ids(case, length, random)
    if case.records == "input_ids":
        return {"input_ids": ids}, (ids, ids)
    learnt = _learnt(case.masked, number, length, random)
    labels = [token if is_learnt else IGNORED for token, is_learnt in zip(ids, learnt, strict=True)]
    if case.records == "completion_mask":
        return {"input_ids": ids, "completion_mask": [int(is_learnt) for is_learnt in learnt]}, (ids, labels)
    return {"input_ids": ids, "labels": labels}, (ids, labels)


def _ids(case: Case, length: int, random: np.random.Generator) -> list[int]:
    ids = random.integers(0, case.vocab_size, length)
    if case.tokens == "pad and eos":
        ids[::3], ids[1::5] = PAD, EOS
    elif case.tokens == "one token":
        ids[:] = 7
    elif case.tokens == "largest":
        ids[:] = case.vocab_size - 1
    return ids.tolist()


def _learnt(masked: str, number: int, length: int, random: np.random.Generator) -> list[bool]:
    """Whether each token of document `number` is learnt."""
    share = {"front": 0.4, "nearly all": 0.97}.get(masked, 0.0)
    hidden = int(random.random() * share * length)
    if masked == "everything" or (masked == "some documents" and number % 2):
        hidden = length
    if masked == "all but one token":
        hidden = length - 1 if number == 0 else length
    return [place >= hidden for place in range(length)]


def _text(random: np.random.Generator, length: int) -> str:
    letters = random.integers(ord("a"), ord("z") + 1, max(length - 1, 1))
    return "".join(" " if letter == ord("q") else chr(letter) for letter in letters)


def _text_record(kind: str, text: str, random: np.random.Generator) -> tuple[dict[str, Any], Document]:
    """As transformers' tokenizer and template have it, by the rules of TRL."""
    tokenizer = make_tokenizer()
    if kind == "text":
        ids = [*tokenizer(text)["input_ids"], EOS]
        return {"text": text}, (ids, ids)
    middle = int(random.integers(0, len(text) + 1))
    if kind in ("messages", "assistant"):
        turns = [text[:middle], text[middle:]]
        messages = [{"role": role, "content": turn} for role, turn in zip(("user", "assistant"), turns, strict=True)]
        encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ids = encoded["input_ids"]
        marks = encoded["assistant_masks"] if kind == "assistant" else [1] * len(ids)
        labels = [token if mark else IGNORED for token, mark in zip(ids, marks, strict=True)]
        return {"messages": messages}, (ids, labels)
    prompt = tokenizer(text[:middle])["input_ids"]
    completion = [*tokenizer(text[middle:])["input_ids"], EOS]
    hidden = [IGNORED] * len(prompt) if kind == "prompt" else prompt
    return {"prompt": text[:middle], "completion": text[middle:]}, (prompt + completion, hidden + completion)


def _pair_record(case: Case, length: int, random: np.random.Generator) -> tuple[dict[str, Any], Document]:
    """A pair of answers of `length` tokens in all, by TRL's rules, as one document with masked prompts.

    The answers differ from their first token on, so that the gradient of a pair is not rounding alone.
    """
    is_chat = case.records == "messages"
    tokenizer, left = make_tokenizer(), max(length - 2 * (FRAME * is_chat + 1), 4)
    prompt = int(random.integers(1, (left - 2) // 2 + 1))
    chosen = int(random.integers(1, left - 2 * prompt))
    texts = [
        _text(random, prompt + 1),
        *(
            f"{first}{_text(random, size)[1:]}"
            for first, size in zip("ab", (chosen + 1, left - 2 * prompt - chosen + 1), strict=True)
        ),
    ]
    record: dict[str, Any] = dict(zip(("prompt", "chosen", "rejected"), texts, strict=True))
    if is_chat:
        roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
        record = {name: [{"role": roles[name], "content": text}] for name, text in record.items()}
        template = tokenizer.apply_chat_template
        shared = template(record["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"]
        sides = [template(record["prompt"] + record[n], return_dict=True)["input_ids"] for n in ("chosen", "rejected")]
    else:
        shared = tokenizer(texts[0])["input_ids"]
        sides = [[*tokenizer(texts[0] + answer)["input_ids"], EOS] for answer in texts[1:]]
    labels = [[IGNORED] * len(shared) + side[len(shared) :] for side in sides]
    return record, (sides[0] + sides[1], labels[0] + labels[1])


def _shared(case: Case, document: Document) -> int:
    """Tokens of a pair that a sequence has once: of the prompt, all but the last."""
    return (sides(document)[0][1].index(next(n for n in document[1] if n != IGNORED)) - 1) * case.share_prompts


def _cut_pair(room: int, document: Document) -> list[Document]:
    """The pair with so many tokens of each side; nothing where the prompt leaves no room for an answer."""
    cut = [(ids[:room], labels[:room]) for ids, labels in sides(document)]
    if any(label != IGNORED for label in cut[0][1]):
        return [(cut[0][0] + cut[1][0], cut[0][1] + cut[1][1])]
    return []


def _cut(case: Case, documents: Sequence[Document]) -> list[Document]:
    """What --overlong leaves of documents: pieces of a split one are documents of their own."""
    limit, kept = case.max_length, []
    for ids, labels in documents:
        shared = _shared(case, (ids, labels)) if case.reads_pairs else 0
        if len(ids) - shared <= limit:
            kept.append((ids, labels))
        elif case.reads_pairs:
            kept += _cut_pair((limit + shared) // 2, (ids, labels)) if case.overlong == "truncate" else []
        elif case.overlong == "truncate":
            kept.append((ids[:limit], labels[:limit]))
        elif case.overlong == "split" or (case.overlong == "raise" and case.packing == "bfd_split"):
            starts = range(0, len(ids), limit)
            kept += [(ids[start : start + limit], labels[start : start + limit]) for start in starts]
    return kept


def _weighted(case: Case, parts: Sequence[list[Document]]) -> list[Document]:
    """What `datasets` draws."""
    from datasets import Dataset, interleave_datasets

    sources = [
        Dataset.from_list([{"place": [number, place]} for place in range(len(part))])
        for number, part in enumerate(parts)
    ]
    shares = [weight / sum(WEIGHTS) for weight in WEIGHTS]
    drawn = interleave_datasets(sources, shares, seed=SEED, stopping_strategy="all_exhausted")["place"]
    return [parts[number][place] for number, place in drawn]


# ------------------------------------------------------------------------------------------------
# Files
# ------------------------------------------------------------------------------------------------


def _write(case: Case, path: Path, train: list, test: list | None) -> str:
    """One file, or a folder with a file for each split; returns what --dataset_name says."""
    records = [record for record, _ in train]
    tests = None if test is None else [record for record, _ in test]
    if case.file == "folder":
        path.mkdir(parents=True, exist_ok=True)
        for number, record in enumerate(records):
            (path / f"{number:03}.txt").write_text(record["text"])
        return str(path)
    if case.file == "saved":
        from datasets import Dataset, DatasetDict

        splits = {"train": records} | ({} if tests is None else {"test": tests})
        DatasetDict({name: Dataset.from_list(part) for name, part in splits.items()}).save_to_disk(path)
        return str(path)
    if tests is None:
        return _write_file(case.file, path, records)
    path.mkdir(parents=True, exist_ok=True)
    _write_file(case.file, path / "train", records)
    _write_file(case.file, path / "test", tests)
    return str(path)


def _write_file(kind: str, path: Path, records: list[dict[str, Any]]) -> str:
    path = path.with_name(f"{path.name}.{kind}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    elif kind == "json":
        path.write_text(json.dumps(records))
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.Table.from_pylist(records)
        if kind == "parquet":
            pq.write_table(table, path)
        else:
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(table)
    return str(path)


# ------------------------------------------------------------------------------------------------
# Steps
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The batch that a case asks for, and how many steps it comes to."""

    batch: int
    """Per device."""
    rows: int
    """Rows of an optimizer step."""
    per_epoch: int | None
    """Steps of an epoch; None where it depends on how rows are packed."""
    total: int | None


def steps_of(case: Case, documents: Sequence[Document], *, layouts: Sequence[Case]) -> Steps:
    """How a case's documents come in steps.

    Args:
        layouts: the case itself, and the one that it is resumed on. Both get as many rows a step.
    """
    batch = case.batch
    if case.order == "whole":
        batch = max(1, math.ceil(len(documents) / (case.dp * case.accumulation)))
    rows = batch * case.dp * case.accumulation
    while any(rows % (layout.dp * layout.accumulation) for layout in layouts):
        batch += 1
        rows = batch * case.dp * case.accumulation
    per_epoch = None
    if case.order == "whole" or case.packing in ("none", "padding_free"):
        full, rest = divmod(len(documents), rows)
        per_epoch = full if case.drop_last else full + bool(rest)
        if case.order == "whole" and not (case.drop_last and case.packing == "bfd"):
            per_epoch = 1 if documents else 0
    total: int | None = case.steps
    if case.epochs:
        total = None if per_epoch is None else math.ceil(case.epochs * per_epoch)
    return Steps(batch=batch, rows=rows, per_epoch=per_epoch, total=total)

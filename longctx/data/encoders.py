"""Encoders: a batch of records -> token ids and labels, for text and for records that are tokenised already.

Chats are in chat.py; `Dataset.map` calls an encoder with the records' numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from longctx.data.columns import IGNORE_INDEX, list_array
from longctx.data.errors import DataError, name_record
from longctx.data.kinds import CHECKED_COLUMNS, check_text, kind_columns

logger = logging.get_logger(__name__)

_INT32_MAX = np.iinfo(np.int32).max
_TOKENIZER_CHARACTERS = 1 << 20
_SPLIT_PROMPT_WARNING = (
    "The tokens of a prompt are not the first tokens of prompt+completion; its completion starts where they "
    "differ, so training sees another context than inference. End prompts at a token boundary to avoid it."
)


class Encoder:
    """Batch of records -> Arrow table of documents. Called by `Dataset.map` with the records' numbers."""

    masked: bool
    """Whether the documents have labels."""
    tokenizer: PreTrainedTokenizerBase | None = None
    """None where the tokens come ready made."""
    vocab_size: int | None = None

    def options(self) -> dict[str, Any]:
        """What the result depends on, besides the records and the tokenizer."""
        plain = (str, int, bool, type(None), list)
        return {name: value for name, value in vars(self).items() if isinstance(value, plain)}

    def encode(self, batch: dict[str, list[Any]], indices: Sequence[int]) -> tuple[list, list | None]:
        """Token ids and, if `masked`, labels of each record."""
        raise NotImplementedError

    def __call__(self, batch: dict[str, list[Any]], indices: Sequence[int], first_record: int = 0) -> pa.Table:
        """Documents of a batch; `indices` are the records' numbers in a part that begins with `first_record`."""
        indices = [first_record + index for index in indices]
        input_ids, labels = self.encode(batch, indices)
        for ids, index in zip(input_ids, indices, strict=True):
            if len(ids) == 0:
                raise DataError(f"{name_record(index)}: 'input_ids' is empty, 0 tokens. Remove the record.")
            _check_ids(ids, self.vocab_size, "input_ids", index)
        columns = {"input_ids": _rows_array(input_ids)}
        if labels is not None:
            for ids, index in zip(labels, indices, strict=True):
                _check_ids(ids[ids != IGNORE_INDEX], self.vocab_size, "labels", index)
            columns["labels"] = _rows_array(labels)
        return pa.table(columns)


class TextEncoder(Encoder):
    """Plain text, or prompt and completion as plain text."""

    tokenizer: PreTrainedTokenizerBase

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kind: str, masks_prompt: bool) -> None:
        if tokenizer.eos_token is None:
            raise DataError("the tokenizer has no EOS token, which ends every document. Set tokenizer.eos_token.")
        self.tokenizer = tokenizer
        self.kind = kind
        self.masked = masks_prompt

    def encode(self, batch: dict[str, list[Any]], indices: Sequence[int]) -> tuple[list, list | None]:
        for column in kind_columns(self.kind):
            for value, index in zip(batch[column], indices, strict=True):
                check_text(value, column, name_record(index))
        if self.kind != "prompt+completion":
            return self._tokenize([self._end(text) for text in batch[self.kind]]), None
        pairs = list(zip(batch["prompt"], batch["completion"], strict=True))
        input_ids = self._tokenize([prompt + self._end(completion) for prompt, completion in pairs])
        if not self.masked:
            return input_ids, None
        prompts = self._tokenize([prompt for prompt, _ in pairs])
        return input_ids, [mask_prompt(ids, prompt) for ids, prompt in zip(input_ids, prompts, strict=True)]

    def _end(self, text: str) -> str:
        eos_token = str(self.tokenizer.eos_token)
        return text if text.endswith(eos_token) else text + eos_token

    def _tokenize(self, texts: list[str]) -> list[np.ndarray]:
        """Tokenise a million characters at a time: the tokenizer needs over 100 bytes per token meanwhile."""
        input_ids: list[np.ndarray] = []
        for part in _by_characters(texts, _TOKENIZER_CHARACTERS):
            encoded = self.tokenizer(part, verbose=False, return_attention_mask=False, return_token_type_ids=False)
            input_ids.extend(np.asarray(ids, dtype=np.int64) for ids in encoded["input_ids"])
        return input_ids


class PretokenizedEncoder(Encoder):
    """Token ids that come ready made, with labels or masks of the same length."""

    def __init__(self, columns: list[str], completion_only: bool | None, assistant_only: bool) -> None:
        given = "labels" in columns
        self.labels_from = ["labels"] if given else self._masks(columns, completion_only, assistant_only)
        self.masked = bool(self.labels_from)

    @staticmethod
    def _masks(columns: list[str], completion_only: bool | None, assistant_only: bool) -> list[str]:
        if assistant_only and "assistant_masks" not in columns:
            raise DataError(
                "assistant_only_loss=True needs conversations, and the records are 'input_ids' without "
                "'assistant_masks'. Give labels with -100 at masked tokens instead."
            )
        if completion_only and "completion_mask" not in columns:
            raise DataError(
                "completion_only_loss=True needs 'prompt' and 'completion', and the records are 'input_ids' "
                "without 'completion_mask'. Give labels with -100 at masked tokens instead."
            )
        if completion_only is None and "completion_mask" in columns:
            raise DataError(
                "the records are 'input_ids' with a 'completion_mask' and no 'labels': set "
                "--completion_only_loss to true to train on the completions, or to false to train on every token."
            )
        masks = ["assistant_masks"] if "assistant_masks" in columns else []
        return masks + (["completion_mask"] if completion_only else [])

    def encode(self, batch: Any, indices: Sequence[int]) -> tuple[list, list | None]:
        columns = {name: _rows(batch[name], name, indices) for name in batch.column_names}
        input_ids, labels = [], []
        for row, index in enumerate(indices):
            values = {name: rows[row] for name, rows in columns.items()}
            ids = values["input_ids"]
            for column in values:
                if column in (*self.labels_from, *CHECKED_COLUMNS):
                    self._check_length(len(values[column]), len(ids), column, index)
            _check_whole(values, index)
            input_ids.append(ids)
            labels.append(self._labels(values))
        return input_ids, labels if self.masked else None

    @staticmethod
    def _check_length(length: int, expected: int, column: str, index: int) -> None:
        if length != expected:
            raise DataError(
                f"{name_record(index)}: '{column}' has {length} entries and 'input_ids' has {expected}. "
                "Give one entry per token (labels are not shifted; -100 masks a token)."
            )

    def _labels(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        if self.labels_from == ["labels"]:
            return values["labels"]
        keep = np.ones(len(values["input_ids"]), dtype=bool)
        for mask in self.labels_from:
            keep &= values[mask] != 0
        return np.where(keep, values["input_ids"], IGNORE_INDEX)


def _check_whole(values: Mapping[str, np.ndarray], index: int) -> None:
    """Refuse rows of padding or of several documents, which a mask or positions tell of."""
    if not values.get("attention_mask", np.ones(1)).all():
        raise DataError(
            f"{name_record(index)}: 'attention_mask' leaves tokens out, such as padding, and longctx would train on "
            "them. Remove these tokens from the record."
        )
    positions = values.get("position_ids", np.zeros(0))
    wrong = np.flatnonzero(positions != np.arange(len(positions)))
    if len(wrong):
        raise DataError(
            f"{name_record(index)}: 'position_ids' holds {positions[wrong[0]]} for token {wrong[0]}; a record is one "
            "document, whose positions count from 0. Give the documents one by one, or remove the column."
        )


def _rows(column: pa.ChunkedArray, name: str, indices: Sequence[int]) -> list[np.ndarray]:
    """Rows of a list column of integers or booleans as int64 views into one array."""
    lists = one_chunk(column)
    if lists.null_count or lists.flatten().null_count:
        row = next(row for row, value in enumerate(lists.to_pylist()) if value is None or None in value)
        raise DataError(f"{name_record(indices[row])}: '{name}' is null or holds a null. Correct or remove the record.")
    values = lists.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
    ends = np.cumsum(pc.list_value_length(lists).to_numpy())
    return np.split(values, ends[:-1])


def one_chunk(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array, whether or not combine_chunks already gives one."""
    combined = column.combine_chunks()
    return combined.chunk(0) if isinstance(combined, pa.ChunkedArray) else combined


def mask_prompt(ids: np.ndarray, prompt: np.ndarray) -> np.ndarray:
    """Labels of prompt+completion: -100 over the common prefix of its tokens and the prompt's."""
    shared = min(len(ids), len(prompt))
    differs = np.flatnonzero(ids[:shared] != prompt[:shared])
    prompt_length = int(differs[0]) if len(differs) else shared
    if prompt_length < len(prompt):
        logger.warning_once(_SPLIT_PROMPT_WARNING)
    labels = ids.copy()
    labels[:prompt_length] = IGNORE_INDEX
    return labels


def _by_characters(texts: list[str], limit: int) -> Iterator[list[str]]:
    """Cut a list into runs of at most `limit` characters (or one text)."""
    part: list[str] = []
    size = 0
    for text in texts:
        if part and size + len(text) > limit:
            yield part
            part, size = [], 0
        part.append(text)
        size += len(text)
    if part:
        yield part


def _rows_array(rows: Sequence[np.ndarray]) -> pa.ListArray:
    """Rows of integers as an Arrow list<int32> array [num_rows]."""
    offsets = np.cumsum([0, *(len(row) for row in rows)])
    return list_array(offsets, pa.array(np.concatenate(rows).astype(np.int32)))


def _check_ids(ids: np.ndarray, vocab_size: int | None, column: str, index: int) -> None:
    if len(ids) == 0:
        return
    limit = _INT32_MAX if vocab_size is None else vocab_size
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= limit:
        raise DataError(
            f"{name_record(index)}: '{column}' holds the token id {low if low < 0 else high}, and the "
            f"vocabulary has the ids 0 to {limit - 1}. Tokenise with this model's tokenizer"
            + (", and mask labels with -100." if column == "labels" else ".")
        )

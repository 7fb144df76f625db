"""Pairs of answers -> documents: the prompt with the chosen answer, and after it the prompt with the rejected one.

A pair is one document here, of two sides that attention keeps apart:

    prompt [1 2], chosen [3 4 0], rejected [5 0]
    ->  input_ids  1    2   3   4   0 |  1    2   5   0
        labels   -100 -100  3   4   0 | -100 -100  5   0

The labels say where the second side begins, since a prompt has at least one token and an answer, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from transformers import PreTrainedTokenizerBase

from longctx.data.chat import ChatEncoder
from longctx.data.columns import IGNORE_INDEX
from longctx.data.encoders import TextEncoder, common_prefix, warn_of_split_prompt
from longctx.data.errors import DataError, name_record
from longctx.data.kinds import kind_columns
from longctx.data.messages import check_text, is_learnt
from longctx.data.token_ids import token_ids

_ANSWERS = ("chosen", "rejected")


def _join(prompt: ArrayLike, sides: Sequence[ArrayLike], index: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and labels of a pair, as TRL's DPOTrainer cuts it: the prompt is what all three share.

    Args:
        prompt: tokens of the prompt alone.
        sides: tokens of the prompt with each answer.
    """
    whole = [np.asarray(side, dtype=np.int64) for side in sides]
    alone = np.asarray(prompt, dtype=np.int64)
    length = min(common_prefix(alone, side) for side in whole)
    if length < len(alone):
        warn_of_split_prompt()
    if length == 0:
        raise DataError(
            f"{name_record(index)}: no token comes before the answers, so their first one would have no "
            "probability. Give a 'prompt', or use a tokenizer with a token for the beginning of a text."
        )
    for name, side in zip(_ANSWERS, whole, strict=True):
        if len(side) == length:
            raise DataError(f"{name_record(index)}: {name!r} has no tokens. Give an answer, or remove the record.")
    ids, labels = np.concatenate(whole), np.concatenate(whole)
    labels[:length] = IGNORE_INDEX
    labels[len(whole[0]) : len(whole[0]) + length] = IGNORE_INDEX
    return ids, labels


class PairTextEncoder(TextEncoder):
    """Prompts and answers as text; an answer ends with the EOS token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kind: str) -> None:
        super().__init__(tokenizer, kind, masks_prompt=True)

    def encode(self, batch: dict[str, list[Any]], indices: Sequence[int]) -> tuple[list, list | None]:
        for column in kind_columns(self.kind):
            for value, index in zip(batch[column], indices, strict=True):
                check_text(value, column, name_record(index))
        records = [with_prompt(dict(zip(batch, values, strict=True))) for values in zip(*batch.values(), strict=True)]
        prompts = self._tokenize([record["prompt"] for record in records], ends=False)
        if self.gives_prompts:
            return prompts, None
        sides = [self._tokenize([record["prompt"] + record[answer] for record in records]) for answer in _ANSWERS]
        pairs = [_join(*parts) for parts in zip(prompts, zip(*sides, strict=True), indices, strict=True)]
        return [ids for ids, _ in pairs], [labels for _, labels in pairs]


class PairChatEncoder(ChatEncoder):
    """Prompts and answers as messages."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kind: str, chat_template: str | None) -> None:
        super().__init__(tokenizer, kind, chat_template, assistant_only=False, masks_prompt=True)

    def _encode_one(self, record: dict[str, Any], index: int) -> tuple[np.ndarray, np.ndarray]:
        for column in kind_columns(self.kind):
            record[column] = self._read(record[column], column, index)
        record = with_prompt(record)
        options = self._template_options(record, index)
        if not record["prompt"]:
            raise DataError(f"{name_record(index)}: 'chosen' and 'rejected' share no first message. Give a 'prompt'.")
        if not all(is_learnt(message, name_record(index)) for answer in _ANSWERS for message in record[answer]):
            raise DataError(
                f"{name_record(index)}: a message of an answer has a mask, and DPO compares whole answers. Remove the "
                "mask, or the record."
            )
        written = [self._write(record["prompt"] + record[answer], index, options) for answer in _ANSWERS]
        prompt_as_written = written[0][0][: len(record["prompt"])]
        prompt = self._prompt(prompt_as_written, index, options)
        if self.gives_prompts:
            return prompt, prompt
        return _join(prompt, token_ids(self.tokenizer, [text for _, text in written], add_special_tokens=False), index)


def with_prompt(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record with a prompt: its own, or what its answers share, as TRL's extract_prompt takes it."""
    if "prompt" in record:
        return record
    from trl.data_utils import extract_prompt

    return record | extract_prompt(record)

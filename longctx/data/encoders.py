"""Encoders: a table of records -> token ids and labels, for text and for records that are tokenised already.

Chats are in chat.py; `Dataset.map` calls an encoder with the records' numbers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from longctx.data.columns import IGNORE_INDEX, TURN_ENDS, is_list_type, list_array
from longctx.data.errors import DataError, name_record
from longctx.data.kinds import ALPACA, MASK_COLUMNS, kind_columns
from longctx.data.messages import alpaca_pair, check_text
from longctx.data.token_ids import token_ids
from longctx.untrusted.confined import Bounds, Confined

logger = logging.get_logger(__name__)

NOTES = "notes"
"""Column of what is to be said of the documents."""

_INT32_MAX = np.iinfo(np.int32).max
_BYTES_AT_A_TIME = 1 << 20
"""Of records that are encoded in one call, where one alone does not have more: the tokenizer needs over 100 bytes for
each token meanwhile."""
_SPLIT_PROMPT_WARNING = (
    "The tokens of a prompt are not the first tokens of prompt+completion; its completion starts where they "
    "differ, so training sees another context than inference. End prompts at a token boundary to avoid it."
)


class Encoded(NamedTuple):
    """Some records as tokens."""

    input_ids: list[np.ndarray]
    """Of each record, integers [tokens]."""
    labels: list[np.ndarray]
    """Of each record, integers [tokens]; empty if every token is learnt."""
    notes: Counter[str]
    """What is to be said of them, in sentences with `{n}` for a number, and these numbers."""
    turn_ends: list[np.ndarray]
    """Tokens before the end of each turn of each record, int [turns]; empty unless `--overlong turns` asks for them."""


class Encoder:
    """Arrow table of records -> Arrow table of documents. Called by `Dataset.map` with the records' numbers.

    A tokenizer, and a template that comes with it, run in a process of their own, with bounds on time and memory.
    """

    masked: bool
    """Whether the documents have labels."""
    tokenizer: PreTrainedTokenizerBase | None = None
    """None if the records hold tokens already."""
    vocab_size: int | None = None
    runs = "tokenizer"
    """The code of unknown origin that `encode` runs, for error messages."""
    gives_turns = False
    """Whether the documents have `turn_ends`. Only conversations can have them."""
    gives_prompts = False
    """Whether the documents are the prompts alone, as the model is asked to go on from them, without labels."""
    notes: Counter[str]
    turn_ends: list[np.ndarray]
    """Filled by `encode`; see `Encoded`."""

    @cached_property
    def process(self) -> Confined[..., Encoded]:
        """The process that encodes. It is best started before weights are read: a fork keeps a copy of every page that
        this process writes to later."""
        return Confined(self._encode_values)

    def options(self) -> dict[str, Any]:
        """The options that the result depends on, besides the records and the tokenizer."""
        plain = (str, int, bool, type(None), list)
        return {name: value for name, value in vars(self).items() if isinstance(value, plain)}

    def encode(self, batch: dict[str, list[Any]], indices: Sequence[int]) -> tuple[list, list | None]:
        """Token ids and, if `masked`, labels of each record."""
        raise NotImplementedError

    def __call__(self, batch: pa.Table, indices: Sequence[int]) -> pa.Table:
        """Return the documents of some records, which have these numbers, in the columns of `tokenize_records`.

        The first document has all notes of the batch, as JSON in the column `notes`; see `notes_of`.
        """
        input_ids, labels, notes, turn_ends = self._encode_table(batch, indices)
        for ids, index in zip(input_ids, indices, strict=True):
            if len(ids) == 0 and self.gives_prompts:
                raise DataError(f"{name_record(index)}: no token comes before its answer. Remove the record.")
            if len(ids) == 0:
                raise DataError(f"{name_record(index)}: 'input_ids' is empty, 0 tokens. Remove the record.")
        columns = {"input_ids": input_ids}
        if self.masked:
            columns["labels"] = labels
            notes["No token is learnt of {n} of the documents, which are kept, as in TRL."] += sum(
                len(row) > 1 and bool((row[1:] == IGNORE_INDEX).all()) for row in labels
            )
        arrays = {name: self._list_array(rows, name, indices) for name, rows in columns.items()}
        if self.gives_turns:
            ends = np.cumsum([0, *map(len, turn_ends)])
            arrays[TURN_ENDS] = list_array(ends, pa.array(np.concatenate(turn_ends).astype(np.int32)))
        said = json.dumps({note: number for note, number in sorted(notes.items()) if number})
        first = [] if said == "{}" else [said]
        return pa.table(arrays | {NOTES: pa.array(first + [None] * (len(indices) - len(first)), pa.string())})

    def _list_array(self, rows: Sequence[np.ndarray], column: str, indices: Sequence[int]) -> pa.ListArray:
        """Return rows of integers as an Arrow list<int32> array [num_rows], after a check of their values."""
        ends, values = np.cumsum([len(row) for row in rows]), np.concatenate(rows)
        self._check_values(values, ends, column, indices)
        return list_array(np.concatenate(([0], ends)), pa.array(values.astype(np.int32)))

    def _check_values(self, values: np.ndarray, ends: np.ndarray, column: str, indices: Sequence[int]) -> None:
        """Refuse token ids and labels outside the vocabulary, and masks other than 0 and 1. Positions are not checked.

        Args:
            values: of all records, in the type in which they were given, since a conversion could turn an invalid value
                into a valid one.
            ends: where each record's values end, int64 [num_records].
        """
        limit = 2 if column in MASK_COLUMNS else _INT32_MAX if self.vocab_size is None else self.vocab_size
        wrong = (values < 0) | (values >= limit)
        if column == "labels":
            wrong &= values != IGNORE_INDEX
        if column == "position_ids" or not wrong.any():
            return
        first = int(np.argmax(wrong))
        where = name_record(indices[int(np.searchsorted(ends, first, side="right"))])
        if column in MASK_COLUMNS:
            raise DataError(
                f"{where}: '{column}' holds {values[first]}; expected 0 or 1. Correct or remove the record."
            )
        raise DataError(
            f"{where}: '{column}' holds the token id {values[first]}, and the vocabulary has the ids 0 to {limit - 1}. "
            "Tokenise with this model's tokenizer" + (", and mask labels with -100." if column == "labels" else ".")
        )

    def _encode_table(self, batch: pa.Table, indices: Sequence[int]) -> Encoded:
        """Return the result of `_encode_values`, made in another process, about a million bytes of records at a time.

        Records that cannot be encoded together are tried one by one, and the one that fails alone is named.
        """
        size = -(-len(indices) // 2)
        if len(indices) == 1 or batch.nbytes <= _BYTES_AT_A_TIME:
            try:
                return self.process.call(Bounds.of_text(batch.nbytes), batch.to_pydict(), batch.schema, indices)
            except DataError:
                raise
            except Exception as error:
                self.process.close()
                if len(indices) == 1:
                    raise DataError(
                        f"{name_record(indices[0])}: the {self.runs} cannot encode it: {error}. Shorten or remove the "
                        f"record, or use another {self.runs}."
                    ) from error
                size = 1
        parts = [
            self._encode_table(batch.slice(start, size), indices[start : start + size])
            for start in range(0, len(indices), size)
        ]
        return Encoded(
            [ids for part in parts for ids in part.input_ids],
            [labels for part in parts for labels in part.labels],
            sum((part.notes for part in parts), Counter()),
            [ends for part in parts for ends in part.turn_ends],
        )

    def _encode_values(self, batch: dict[str, list[Any]], schema: pa.Schema, indices: Sequence[int]) -> Encoded:
        """Encode the values of a table, once JSON text among them is parsed."""
        columns = {name: [_parsed(value, schema.field(name).type) for value in batch[name]] for name in batch}
        return self.encode_noted(columns, indices)

    def encode_noted(self, columns: dict[str, list[Any]], indices: Sequence[int]) -> Encoded:
        """Return the result of `encode`, and what there is to say of it."""
        self.notes, self.turn_ends = Counter(), []
        input_ids, labels = self.encode(columns, indices)
        return Encoded(input_ids, labels or [], self.notes, self.turn_ends)


class TextEncoder(Encoder):
    """Plain text, or prompt and completion as plain text."""

    tokenizer: PreTrainedTokenizerBase

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kind: str, masks_prompt: bool) -> None:
        if not tokenizer.eos_token:
            raise DataError("the tokenizer has no EOS token, which must end every document. Name one with --eos_token.")
        self.tokenizer = tokenizer
        self.kind = kind
        self.masked = masks_prompt

    def encode(self, batch: dict[str, list[Any]], indices: Sequence[int]) -> tuple[list, list | None]:
        if self.kind == ALPACA:
            records = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
            made = [alpaca_pair(r, name_record(i), as_chat=False) for r, i in zip(records, indices, strict=True)]
            batch = {column: [pair[column] for pair in made] for column in ("prompt", "completion")}
        for column in batch if self.kind == ALPACA else kind_columns(self.kind):
            for value, index in zip(batch[column], indices, strict=True):
                check_text(value, column, name_record(index))
        if "prompt" not in batch:
            return self._tokenize(batch[self.kind]), None
        if self.gives_prompts:
            return self._tokenize(batch["prompt"], ends=False), None
        pairs = list(zip(batch["prompt"], batch["completion"], strict=True))
        input_ids = self._tokenize([prompt + completion for prompt, completion in pairs])
        if not self.masked:
            return input_ids, None
        prompts = self._tokenize([prompt for prompt, _ in pairs], ends=False)
        return input_ids, [mask_prompt(ids, prompt) for ids, prompt in zip(input_ids, prompts, strict=True)]

    def _tokenize(self, texts: list[str], *, ends: bool = True) -> list[np.ndarray]:
        """Return the tokens of texts, with the BOS token once if the tokenizer adds it.

        Args:
            ends: whether an EOS token, one, ends each; a prompt has none but its own.
        """
        eos, bos = str(self.tokenizer.eos_token), self.tokenizer.bos_token
        ended = [text if text.endswith(eos) or not ends else text + eos for text in texts]
        ids_of_nothing, *encoded = token_ids(self.tokenizer, ["", *ended])
        adds_bos = bos is not None and ids_of_nothing[:1].tolist() == [self.tokenizer.bos_token_id]
        made = []
        for text, given, ids in zip(ended, texts, encoded, strict=True):
            has_bos = adds_bos and given.startswith(str(bos))
            ids = ids[int(has_bos) :]
            num_eos = 0
            while text.endswith(eos, 0, len(text) - num_eos * len(eos)):
                num_eos += 1
            others = np.flatnonzero(ids[int(adds_bos) :] != self.tokenizer.eos_token_id) + int(adds_bos)
            too_many = max(len(ids) - 1 - int(others.max(initial=int(adds_bos) - 1)) - num_eos, 0)
            made.append(ids[: len(ids) - too_many])
            if ends:
                self.notes[f"The BOS token {bos!r} already begins {{n}} of the texts; it is not added again."] += (
                    has_bos
                )
                self.notes[f"The EOS token {eos!r} already ends {{n}} of the texts; it is not added again."] += (
                    given.endswith(eos)
                )
        return made


def notes_of(column: pa.ChunkedArray) -> Counter[str]:
    """Return what the notes of documents, from their column `notes`, sum up to."""
    notes: Counter[str] = Counter()
    for said in column.drop_null().to_pylist():
        notes.update(json.loads(said))
    return notes


def in_words(notes: Mapping[str, int]) -> list[str]:
    """Return notes with their numbers."""
    return [note.replace("{n}", f"{number:,}") for note, number in notes.items()]


class PretokenizedEncoder(Encoder):
    """Records of token ids, with labels or masks of the same length."""

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

    def _encode_table(self, batch: pa.Table, indices: Sequence[int]) -> Encoded:
        columns = {name: self._rows(batch[name], name, indices) for name in batch.column_names}
        input_ids, labels = [], []
        for row, index in enumerate(indices):
            values = {name: rows[row] for name, rows in columns.items()}
            ids = values["input_ids"]
            for column, given in values.items():
                if len(given) != len(ids):
                    raise DataError(
                        f"{name_record(index)}: '{column}' has {len(given)} entries and 'input_ids' has {len(ids)}. "
                        "Give one entry per token (labels are not shifted; -100 masks a token)."
                    )
            _check_whole(values, index)
            input_ids.append(ids)
            masks = [values[column] != 0 for column in self.labels_from if column != "labels"]
            labels.append(values.get("labels", np.where(np.all(masks, axis=0), ids, IGNORE_INDEX)))
        if self.gives_prompts:
            input_ids = [ids[: _start_of_last_labels(of)] for ids, of in zip(input_ids, labels, strict=True)]
        return Encoded(input_ids, labels, Counter(), [])

    def _rows(self, column: pa.ChunkedArray, name: str, indices: Sequence[int]) -> list[np.ndarray]:
        """Rows of a list column of integers or booleans as int64 views into one array."""
        lists = column.combine_chunks()
        if lists.null_count or lists.flatten().null_count:
            row = next(row for row, value in enumerate(lists.to_pylist()) if value is None or None in value)
            raise DataError(
                f"{name_record(indices[row])}: '{name}' is null or holds a null. Correct or remove the record."
            )
        values = lists.flatten().to_numpy(zero_copy_only=False)
        ends = np.cumsum(pc.list_value_length(lists).to_numpy())
        self._check_values(values, ends, name, indices)
        return np.split(values.astype(np.int64), ends[:-1])


def _start_of_last_labels(labels: np.ndarray) -> int:
    """Return where the last tokens with labels begin, one after another; the end if none has one."""
    begins = np.flatnonzero(np.diff(labels != IGNORE_INDEX, prepend=False))[::2]
    return int(begins[-1]) if len(begins) else len(labels)


def _check_whole(values: Mapping[str, np.ndarray], index: int) -> None:
    """Refuse rows of padding or of several documents, which a mask or positions show."""
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


def mask_prompt(ids: np.ndarray, prompt: np.ndarray) -> np.ndarray:
    """Labels of prompt+completion: -100 over the common prefix of its tokens and the prompt's."""
    prompt_length = common_prefix(ids, prompt)
    if prompt_length < len(prompt):
        warn_of_split_prompt()
    labels = ids.copy()
    labels[:prompt_length] = IGNORE_INDEX
    return labels


def common_prefix(ids: np.ndarray, others: np.ndarray) -> int:
    """The number of first tokens that two sequences share."""
    shared = min(len(ids), len(others))
    differs = np.flatnonzero(ids[:shared] != others[:shared])
    return int(differs[0]) if len(differs) else shared


def warn_of_split_prompt() -> None:
    """Warn once that an answer begins before the end of its prompt's tokens."""
    logger.warning_once(_SPLIT_PROMPT_WARNING)


def _parsed(value: Any, type_: pa.DataType) -> Any:
    """Return a value of Arrow as Python has it, with JSON text in it parsed as it is written."""
    if value is None or not (isinstance(type_, pa.JsonType) or pa.types.is_nested(type_)):
        return value
    if isinstance(type_, pa.JsonType):
        return json.loads(value)
    if pa.types.is_struct(type_):
        return {field.name: _parsed(value[field.name], field.type) for field in type_.fields}
    return [_parsed(part, type_.value_type) for part in value] if is_list_type(type_) else value

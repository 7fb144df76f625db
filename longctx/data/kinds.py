"""The kinds of record there are, by their columns, and what a value in each column must look like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from datasets import ClassLabel, Features, Json, LargeList, List, Value

from longctx.data.columns import is_list_type
from longctx.data.errors import DataError

PER_TOKEN_COLUMNS = ("input_ids", "labels", "assistant_masks", "completion_mask")
"""Columns of pre-tokenised records that are read."""

CHECKED_COLUMNS = ("attention_mask", "position_ids")
"""Columns of pre-tokenised records that have to say what longctx does anyway: every token counts, from position 0."""

CONVERSATION_EXTRAS = ("tools", "chat_template_kwargs")
"""Columns of chats that go to the chat template."""

TOKENS = List(Value("int32"))
"""Type of every per-token column that is written."""

PAIRS = "chosen and rejected"
"""In place of the column of plain text: records are pairs of answers, whatever other columns they have."""

_COMPOSITE_KINDS = {
    "prompt+completion": ("prompt", "completion"),
    "prompt+chosen+rejected": ("prompt", "chosen", "rejected"),
    "chosen+rejected": ("chosen", "rejected"),
}

_LIST_KINDS = {
    "input_ids": "lists of integers",
    "messages": "lists of messages",
    "conversations": "lists of messages",
}


def record_kind(columns: Sequence[str], text_field: str, where: str) -> str:
    """Kind of the records with these columns, by TRL's precedence.

    Args:
        text_field: column of plain text, or PAIRS.

    Returns:
        The kind's column, or its columns joined by plus signs.

    Raises:
        DataError: none of the known kinds.
    """
    if text_field == PAIRS:
        return _kind_of_pairs(columns, where)
    if "input_ids" in columns:
        if "seq_lengths" in columns:
            raise DataError(
                f"{where}: 'seq_lengths' says that the records are packed already, and longctx packs single documents "
                "itself. Give the documents unpacked."
            )
        return "input_ids"
    if "prompt" in columns and "completion" in columns:
        return "prompt+completion"
    for column in ("messages", "conversations", text_field):
        if column in columns:
            return column
    if "chosen" in columns and "rejected" in columns:
        raise DataError(
            f"{where}: 'chosen' and 'rejected' answers are preferences, and each record is one document here (SFT). "
            "longctx dpo trains on preferences. To train on the chosen answers alone, keep 'prompt' and call 'chosen' "
            "'completion' (of messages with the prompt in them, 'messages')."
        )
    if "prompt" in columns:
        raise DataError(
            f"{where}: a 'prompt' alone is for methods that generate, such as GRPO, which longctx train does not do. "
            "To train on answers, add 'completion'."
        )
    raise DataError(
        f"{where}: no known kind of record in the columns {sorted(columns)}; expected '{text_field}', 'messages' "
        "(or 'conversations'), 'prompt' and 'completion', or 'input_ids' (+ 'labels'). Rename the column or pass "
        "its name with --dataset_text_field."
    )


def _kind_of_pairs(columns: Sequence[str], where: str) -> str:
    if "chosen" in columns and "rejected" in columns:
        return "prompt+chosen+rejected" if "prompt" in columns else "chosen+rejected"
    unpaired = "label" in columns and "completion" in columns
    raise DataError(
        f"{where}: no 'chosen' and 'rejected' answers in the columns {sorted(columns)}, which longctx dpo needs, with "
        "a 'prompt' or an implicit one. "
        + (
            "Single answers with a 'label' are for KTO, which is TRL's KTOTrainer."
            if unpaired
            else "Rename the columns, or use longctx train for records of single documents."
        )
    )


def kind_columns(kind: str) -> tuple[str, ...]:
    """Columns every record of a kind has."""
    return _COMPOSITE_KINDS.get(kind, (kind,))


def check_column_types(features: Features, kind: str) -> None:
    """Refuse columns whose Arrow type no record of this kind has, such as numbers where text is expected; and KTO's."""
    if kind == "prompt+completion" and features.get("label") == Value("bool"):
        raise DataError(
            "the column 'label' says which completions are desirable (KTO), and all of them would be trained on alike. "
            "Keep the desirable ones and remove the column, or use TRL's KTOTrainer."
        )
    for column in (*kind_columns(kind), *CONVERSATION_EXTRAS):
        if column in features:
            _check_read_types(features[column], column)
    for column in kind_columns(kind):
        arrow_type = features.arrow_schema.field(column).type
        fits = is_list_type(arrow_type) or isinstance(features[column], Json)
        if kind == "input_ids":
            fits = is_list_type(arrow_type) and pa.types.is_integer(arrow_type.value_type)
        elif kind not in _LIST_KINDS:
            fits = fits or pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type)
        if not fits:
            raise DataError(
                f"column '{column}' has the type {arrow_type}; expected {_LIST_KINDS.get(kind, 'strings')}. "
                "Convert the column (Dataset.cast_column), or name another one with --dataset_text_field."
            )


def _check_read_types(feature: Any, column: str) -> None:
    """Refuse features that `datasets` decodes by opening what a record names: files, and addresses on the network."""
    if isinstance(feature, List | LargeList):
        _check_read_types(feature.feature, column)
    elif isinstance(feature, Mapping):
        for part in feature.values():
            _check_read_types(part, column)
    elif not isinstance(feature, Value | ClassLabel | Json):
        raise DataError(
            f"column '{column}' holds the type {type(feature).__name__}; expected text, numbers, and lists or objects "
            "of them. Convert the column, or remove that part of it."
        )


def check_text(value: object, column: str, where: str) -> None:
    if not isinstance(value, str):
        raise DataError(
            f"{where}: '{column}' is {type(value).__name__} ({str(value)[:60]!r}); expected a string. "
            "Convert or remove the record."
        )


def check_chat(value: object, column: str, where: str) -> None:
    """Refuse what is no list of messages with `role` (or, in the older form, `from`)."""
    if not (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(message, dict) and ("role" in message or "from" in message) for message in value)
    ):
        shown = repr(value)
        raise DataError(
            f"{where}: '{column}' is {shown[:80]}{'…' if len(shown) > 80 else ''}; expected a non-empty "
            'list of messages such as {"role": "user", "content": "…"}. Correct or remove the record.'
        )


def to_chatml(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rename `from`/`value` to `role`/`content`, as TRL's maybe_convert_to_chatml does."""
    names = {"from": "role", "value": "content"}
    return [{names.get(key, key): value for key, value in message.items()} for message in messages]

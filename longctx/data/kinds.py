"""The kinds of record there are, by their columns, and what a value in each column must look like."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

import pyarrow as pa
from datasets import ClassLabel, Features, Json, LargeList, List, Value

from longctx.data.columns import is_list_type
from longctx.data.errors import DataError, say

PER_TOKEN_COLUMNS = ("input_ids", "labels", "assistant_masks", "completion_mask", "attention_mask", "position_ids")
"""Columns of pre-tokenised records that are read. The last two have to say what longctx does anyway: every token
counts, from position 0."""

MASK_COLUMNS = frozenset({"attention_mask", "completion_mask", "assistant_masks"})
"""Columns of pre-tokenised records that hold 0 or 1, or false or true, for each token."""

CONVERSATION_EXTRAS = ("tools", "chat_template_kwargs")
"""Columns of chats that go to the chat template."""

_OPTIONAL_COLUMNS = {"conversations": ("system",), "instruction+output": ("input", "system", "history")}
"""More columns that are read of some kinds, if there are any."""

TOKENS = List(Value("int32"))
"""Type of every per-token column that is written."""

PAIRS = "chosen and rejected"
"""In place of the column of plain text: records are pairs of answers, whatever other columns they have."""

_MEDIA_COLUMNS = ("image", "images", "pixel_values")
"""Columns of image-text records: those that TRL reads, and one that processors write."""

_MEDIA_OF_CHATS = ("video", "videos", "audio", "audios")
"""More such columns, which are refused beside chats and prompts. Plain text may be the transcript of a recording."""

_REFERENCE_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")
"""Columns of preferences in which TRL expects log-probabilities of the reference model."""

_TOKEN_WEIGHTS = ("loss_mask", "loss_scale", "loss_weights", "token_weights")
"""Columns that weight the tokens of pre-tokenised records."""

ALPACA = "instruction+output"
"""Alpaca's records, which are prompts and completions."""

COMPOSITE_KINDS = {
    ALPACA: ("instruction", "output"),
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
    if "instruction" in columns and "output" in columns:
        return ALPACA
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
        "(or 'conversations'), 'prompt' and 'completion', 'instruction' and 'output', or 'input_ids' (+ 'labels'). "
        "Rename the column or pass its name with --dataset_text_field."
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
    return COMPOSITE_KINDS.get(kind, (kind,))


def optional_columns(kind: str) -> tuple[str, ...]:
    """Columns that are read of a record of this kind, if it has them and is no plain text."""
    return CONVERSATION_EXTRAS + _OPTIONAL_COLUMNS.get(kind, ())


def warn_of_unread_columns(columns: Collection[str], read: Collection[str]) -> None:
    """Name the columns that nothing reads, once."""
    if unread := sorted({*columns} - {*read}):
        _say_once(f"Columns of the records that are not read ({len(unread)}): {', '.join(unread)}.")


_say_once = cache(say)


def check_unread_columns(columns: Collection[str], kind: str, is_kto: bool, where: str) -> None:
    """Refuse records with a column that longctx does not read, and that training on the text alone would contradict.

    Args:
        columns: those that hold something.
        is_kto: whether a column 'label' holds true or false.
    """
    is_plain_text = kind not in (*COMPOSITE_KINDS, "messages", "conversations")
    if is_kto and not is_plain_text:
        raise DataError(
            f"{where}: the column 'label' says which completions are desirable (KTO), and all of them would be trained "
            "on alike. Keep the desirable ones and remove the column, or use TRL's KTOTrainer."
        )
    if "rejected_response" in columns and kind in ("messages", "conversations"):
        raise DataError(
            f"{where}: 'rejected_response' makes a record of '{kind}' a preference. For longctx dpo, write the columns "
            "'chosen' and 'rejected'. To train on the chosen answers alone, remove the column."
        )
    if found := [column for column in _REFERENCE_COLUMNS if column in columns and "chosen" in kind]:
        raise DataError(
            f"{where}: the column '{found[0]}' is not read: longctx dpo computes the log-probabilities of the "
            "reference model. Remove the column."
        )
    if "system" in columns and not is_plain_text and "system" not in optional_columns(kind):
        raise DataError(
            f"{where}: the column 'system' is not read, and the model would be trained without its system prompts. "
            "Make each of them the first message, with the role system, or put it before the prompt. Remove the column."
        )
    media = _MEDIA_COLUMNS if is_plain_text else _MEDIA_COLUMNS + _MEDIA_OF_CHATS
    if found := [column for column in media if column in columns]:
        raise DataError(
            f"{where}: the column '{found[0]}' holds images, video or audio, and longctx trains on text alone. Leave "
            "out these records, or remove the column and what stands for it in the text."
        )
    if kind == "input_ids" and (found := [column for column in _TOKEN_WEIGHTS if column in columns]):
        raise DataError(
            f"{where}: the column '{found[0]}' would say which tokens count, and is not read. Give labels with -100 at "
            "the tokens that do not count, and remove the column."
        )


def check_column_types(features: Features, kind: str) -> None:
    """Refuse columns whose Arrow type no record of this kind has, such as numbers where text is expected."""
    for column in (*kind_columns(kind), *optional_columns(kind)):
        if column in features:
            _check_read_types(features[column], column)
    for column in PER_TOKEN_COLUMNS if kind == "input_ids" else kind_columns(kind):
        if column not in features:
            continue
        arrow_type = features.arrow_schema.field(column).type
        fits = is_list_type(arrow_type) or isinstance(features[column], Json)
        if kind == "input_ids":
            value = arrow_type.value_type if is_list_type(arrow_type) else pa.null()
            fits = pa.types.is_integer(value) or (column in MASK_COLUMNS and pa.types.is_boolean(value))
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

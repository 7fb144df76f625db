"""Records -> tokenised documents: choose the encoder, run it through the cache of `datasets`, check the result."""

from __future__ import annotations

import json
from datetime import datetime
from importlib.metadata import version
from typing import Any, TypeVar

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, Json, Value
from transformers import PreTrainedTokenizerBase

from longctx.data.chat import ChatEncoder, turns_template
from longctx.data.columns import TURN_ENDS, document_lengths, is_list_type, target_counts
from longctx.data.contents import cache_folder, cache_key, digest_of
from longctx.data.encoders import NOTES, Encoder, PretokenizedEncoder, TextEncoder, in_words, notes_of
from longctx.data.errors import DataError, no_records, say
from longctx.data.kinds import (
    ALPACA,
    COMPOSITE_KINDS,
    PAIRS,
    PER_TOKEN_COLUMNS,
    TOKENS,
    check_column_types,
    check_unread_columns,
    kind_columns,
    optional_columns,
    record_kind,
    warn_of_unread_columns,
)
from longctx.data.messages import MASKS
from longctx.data.preferences import PairChatEncoder, PairTextEncoder
from longctx.data.reading import RecordStream
from longctx.data.token_ids import warn_of_eos

Records = TypeVar("Records", Dataset, RecordStream)

_BATCH_BYTES = 8 << 20


def tokenize_records(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    text_field: str = "text",
    completion_only_loss: bool | None = None,
    assistant_only_loss: bool = False,
    chat_template: str | None = None,
    gives_turns: bool = False,
    num_proc: int | None = None,
    vocab_size: int | None = None,
    now: datetime | None = None,
) -> Dataset:
    """Turn records into documents, with the tokens and masks TRL's SFTTrainer gives them.

    Text and completions end with the EOS token; chats go through the chat template; a completion starts where
    the tokens of prompt+completion diverge from the prompt's; pre-tokenised records are checked and passed on.
    Nothing is truncated. The result is cached under the data set's fingerprint, the tokenizer and these
    options.

    Args:
        dataset: records as from `load_records`.
        tokenizer: needs an EOS token for text and completions, a chat template for chats.
        text_field: column of plain text; or PAIRS for records with `chosen` and `rejected`, which become one
            document each (`longctx.data.preferences`).
        completion_only_loss: mask the prompt; None means True for prompt+completion records.
        assistant_only_loss: mask all but the assistant's turns; a known template without generation markers
            is replaced by TRL's training version of it.
        chat_template: used instead of the tokenizer's own.
        gives_turns: add `turn_ends` to the documents (conversations), for packing with overlong="turns".
        num_proc: worker processes; None for none.
        vocab_size: number of embeddings of the model, which token ids must be below; None checks only for
            negative ids.
        now: what chat templates are told if they ask for the time; None means the present.

    Returns:
        Dataset with `input_ids` (list of int32) and, where some tokens are masked or labels were given,
        `labels` (list of int32, -100 where masked, not shifted).

    Raises:
        DataError: a record is not of the data set's kind; lengths of labels and input_ids differ; ids lie
            outside the vocabulary; an option does not apply to this kind of record; or no token is a target
            of the loss.
    """
    _check_dataset(dataset)
    dataset, encoder = choose_encoder(
        dataset.with_format(None),
        tokenizer,
        text_field=text_field,
        completion_only_loss=completion_only_loss,
        assistant_only_loss=assistant_only_loss,
        chat_template=chat_template,
        gives_turns=gives_turns,
        vocab_size=vocab_size,
        now=now,
    )
    tokenized = _encode(dataset, encoder, num_proc)
    for note in in_words(notes_of(tokenized.data.column(NOTES))):
        say(note)
    fingerprint, tokenized = tokenized._fingerprint, tokenized.remove_columns([NOTES])
    tokenized._fingerprint = fingerprint
    _check_targets(tokenized)
    return tokenized


def choose_encoder(
    dataset: Records,
    tokenizer: PreTrainedTokenizerBase,
    *,
    text_field: str = "text",
    completion_only_loss: bool | None = None,
    assistant_only_loss: bool = False,
    chat_template: str | None = None,
    gives_turns: bool = False,
    gives_prompts: bool = False,
    vocab_size: int | None = None,
    now: datetime | None = None,
) -> tuple[Records, Encoder]:
    """The columns that are read of these records, and what makes documents of them; see `tokenize_records`.

    Args:
        gives_prompts: make documents of the prompts alone, as the model is asked for an answer: of a chat up to the
            assistant's last turn, with the generation prompt, and of pre-tokenised records up to the last labels.

    Raises:
        DataError: columns of no known kind or type; an option does not apply to this kind of record.
    """
    kind = record_kind(dataset.column_names, text_field, "data set")
    is_kto = dataset.features.get("label") == Value("bool")
    check_unread_columns(dataset.column_names, kind, is_kto, "data set")
    check_column_types(dataset.features, kind)
    used = PER_TOKEN_COLUMNS if kind == "input_ids" else kind_columns(kind) + optional_columns(kind)
    columns = [column for column in used if column in dataset.column_names]
    warn_of_unread_columns(dataset.column_names, columns)
    dataset = dataset.select_columns(columns)
    encoder: Encoder
    conversational = kind != "input_ids" and _holds_chats(dataset, kind, bool(chat_template or tokenizer.chat_template))
    if gives_turns and not (conversational and text_field != PAIRS):
        raise DataError(
            f"--overlong turns keeps whole turns of conversations, and the records are {kind!r}. Choose truncate, drop "
            "or split."
        )
    if kind == "input_ids":
        encoder = PretokenizedEncoder(columns, completion_only_loss, assistant_only_loss)
    elif text_field == PAIRS:
        template = turns_template(tokenizer, chat_template, needs_turns=False) if conversational else None
        encoder = PairChatEncoder(tokenizer, kind, template) if conversational else PairTextEncoder(tokenizer, kind)
    else:
        _check_options(kind, conversational, completion_only_loss, assistant_only_loss)
        masks_prompt = kind in ("prompt+completion", ALPACA) and completion_only_loss is not False
        if conversational:
            template = turns_template(tokenizer, chat_template, assistant_only_loss or gives_turns)
            encoder = ChatEncoder(tokenizer, kind, template, assistant_only_loss, masks_prompt)
            encoder.masked = encoder.masked or _may_mask_turns(dataset, kind)
        else:
            encoder = TextEncoder(tokenizer, kind, masks_prompt)
    encoder.vocab_size = vocab_size
    if gives_prompts:
        if not (conversational or encoder.masked or kind in COMPOSITE_KINDS):
            unlabelled = "'input_ids' without labels" if kind == "input_ids" else f"{kind!r} with plain text"
            raise DataError(
                f"the records are {unlabelled}, which have no prompts. Give records with 'prompt' and 'completion', "
                "with 'messages', or with 'input_ids' and 'labels'."
            )
        encoder.gives_prompts, encoder.masked = True, False
    elif gives_turns:
        encoder.gives_turns = True
    if encoder.tokenizer is not None:
        warn_of_eos(tokenizer)
    if isinstance(encoder, ChatEncoder):
        encoder.structs = [column for column in columns if not isinstance(dataset.features[column], Json | Value)]
        encoder.tell_time(now or datetime.now())
        if not gives_prompts:
            encoder.warn_if_nothing_ends_a_turn()
    return dataset, encoder


def _may_mask_turns(dataset: Dataset | RecordStream, kind: str) -> bool:
    """Return whether messages may have masks of their own. Those of a stream may: its records are not known yet."""
    if not isinstance(dataset, Dataset):
        return True
    for column in set(kind_columns(kind)) & set(dataset.column_names):
        values = dataset.data.column(column)
        while is_list_type(values.type):
            values = pc.list_flatten(values)
        if pa.types.is_struct(values.type):
            if MASKS.keys() & {field.name for field in values.type}:
                return True
        elif pc.any(pc.match_substring_regex(values.cast(pa.string()), f'"({"|".join(MASKS)})"\\s*:')).as_py():
            return True
    return False


def _check_dataset(dataset: object) -> None:
    if not isinstance(dataset, Dataset):
        raise DataError(f"{type(dataset).__name__} is not supported; expected a datasets.Dataset (map-style).")
    if dataset.format["type"] == "custom":
        raise DataError(
            "the data set has a transform (Dataset.with_transform), which caching would bake in. "
            "Apply it with Dataset.map first."
        )
    if len(dataset) == 0:
        raise no_records("data set")


def _holds_chats(dataset: Dataset | RecordStream, kind: str, has_template: bool) -> bool:
    if kind == ALPACA:
        return has_template
    column = kind_columns(kind)[0]
    if isinstance(dataset.features[column], Json):
        chats = dataset.select_columns([column])
        first = chats if isinstance(chats, Dataset) else Dataset(chats.parse([next(chats.raw())]), fingerprint="first")
        return isinstance(first[0][column], list)
    return not isinstance(dataset.features[column], Value)


def _check_options(kind: str, conversational: bool, completion_only: bool | None, assistant_only: bool) -> None:
    if assistant_only and not conversational:
        raise DataError(
            f"assistant_only_loss=True needs conversations, and the records are {kind!r} with plain text. "
            "Leave it out, or give records with 'messages'."
        )
    if completion_only and kind not in ("prompt+completion", ALPACA):
        raise DataError(
            f"completion_only_loss=True needs records with 'prompt' and 'completion', and these are "
            f"{kind!r}. Leave it out" + (", or use --assistant_only_loss." if conversational else ".")
        )


def _encode(dataset: Dataset, encoder: Encoder, num_proc: int | None) -> Dataset:
    columns = ["input_ids", *(["labels"] if encoder.masked else []), *([TURN_ENDS] if encoder.gives_turns else [])]
    fingerprint = _fingerprint(dataset, encoder)
    mean_bytes = max(1, dataset.data.nbytes // max(1, dataset.data.num_rows))  # documents may be megabytes long
    try:
        tokenized = dataset.with_format("arrow").map(
            encoder,
            batched=True,
            with_indices=True,
            batch_size=int(np.clip(_BATCH_BYTES // mean_bytes, 1, 1000)),
            remove_columns=dataset.column_names,
            features=Features(dict.fromkeys(columns, TOKENS) | {NOTES: Value("string")}),
            num_proc=num_proc,
            new_fingerprint=fingerprint,
            cache_file_name=_cache_file(dataset, fingerprint),
            desc="Tokenizing",
        )
    finally:
        encoder.process.close()
    return tokenized.with_format(None)


def _cache_file(dataset: Dataset, key: str) -> str | None:
    """The file that keeps the tokens. `datasets` would look for it beside the data, which may be anybody's folder.

    None for records in memory, whose tokens are kept in a temporary folder for as long as the process runs.
    """
    if not dataset.cache_files:
        return None
    cache_folder().mkdir(parents=True, exist_ok=True)
    return str(cache_folder() / f"tokens-{key}.arrow")


_PACKAGES = ("transformers", "tokenizers", "jinja2")
"""Packages that tokens depend on besides the tokenizer's files: a release may split or render text differently."""


def _fingerprint(dataset: Dataset, encoder: Encoder) -> str:
    """Cache key. `datasets` would pickle the tokenizer, whose state changes when it is first called."""
    return cache_key([version(package) for package in _PACKAGES], dataset._fingerprint, encoder_key(encoder))


def encoder_key(encoder: Encoder) -> str:
    """Return a digest of what makes documents of records: the kind of records, the options and the tokenizer."""
    tokenizer = [] if encoder.tokenizer is None else [_tokenizer_state(encoder.tokenizer)]
    return digest_of(type(encoder).__name__, encoder.options(), *tokenizer)


def _tokenizer_state(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return [datasets.fingerprint.Hasher.hash(tokenizer)]
    state = json.loads(backend.to_str())
    state["truncation"] = state["padding"] = None
    splits_special_tokens = getattr(tokenizer, "split_special_tokens", False)
    name = type(tokenizer).__qualname__
    return [name, state, str(tokenizer.special_tokens_map), tokenizer.chat_template, splits_special_tokens]


def _check_targets(dataset: Dataset) -> None:
    if not any(holds_target(batch) for batch in dataset.with_format("arrow").iter(batch_size=1000)):
        raise no_targets(len(dataset), int(document_lengths(dataset).sum()), "labels" in dataset.column_names)


def holds_target(documents: pa.Table) -> bool:
    """Return whether any token is a target, besides the documents' first ones, which nothing predicts."""
    if "labels" in documents.column_names:
        return bool(target_counts(documents).any())
    return bool(document_lengths(documents).max(initial=0) > 1)


def no_targets(num_documents: int, num_tokens: int, masked: bool) -> DataError:
    reason = (
        "every label is -100 (the first token of a document never counts)"
        if masked
        else ("every document has one token only")
    )
    return DataError(
        f"no token to train on in {num_documents} documents with {num_tokens} tokens: "
        f"{reason}. Check the labels, and --completion_only_loss or --assistant_only_loss where set."
    )

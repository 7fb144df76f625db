"""The cache keys of tokenised documents and packed data sets change with every field that decides the contents.

The fields are listed by the code itself, as in tests/training/test_key_fields.py.
"""

from __future__ import annotations

import inspect
from datetime import datetime

import pytest
from datasets import Dataset, disable_caching, enable_caching
from tokenizers import normalizers
from transformers import AutoTokenizer

from longctx.data import tokenize_records
from longctx.data.encoders import TextEncoder
from longctx.data.tokenize import encoder_key
from longctx.model.tiny import tiny_tokenizer
from longctx.packing import PackedStream, pack_dataset
from tests.training.test_key_fields import CHAT, TEMPLATE

RECORDS = Dataset.from_dict({"text": ["a b", "c"], "other": ["d", "e"]})
PAIRS = Dataset.from_dict({"prompt": ["a "], "completion": ["b"]})
CHATS = Dataset.from_dict({"messages": [CHAT]})
MARKED = "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
TOKENISED = {
    "dataset": (RECORDS, {}, {"dataset": RECORDS.select([0])}),
    "tokenizer": (RECORDS, {}, {"tokenizer": "another"}),
    "text_field": (RECORDS, {}, {"text_field": "other"}),
    "completion_only_loss": (PAIRS, {}, {"completion_only_loss": False}),
    "assistant_only_loss": (CHATS, {"chat_template": MARKED}, {"assistant_only_loss": True}),
    "chat_template": (CHATS, {"chat_template": MARKED}, {"chat_template": MARKED + " "}),
    "gives_turns": (CHATS, {"chat_template": MARKED}, {"gives_turns": True}),
    "vocab_size": (RECORDS, {}, {"vocab_size": 272}),
    "now": (
        CHATS,
        {"chat_template": MARKED + "{{ strftime_now('%Y') }}", "now": datetime(2026, 1, 1)},
        {"now": datetime(2027, 1, 1)},
    ),
}


def test_tokenised_documents_are_kept_under_everything_they_depend_on():
    """But for the number of processes, which changes none of them."""
    assert set(inspect.signature(tokenize_records).parameters) == {*TOKENISED, "num_proc"}
    another = tiny_tokenizer()
    another.add_tokens(["a b"])
    disable_caching()
    try:
        for name, (records, given, changed) in TOKENISED.items():
            keys = []
            for options in (given, given | changed, given | {"num_proc": None}):
                options = {"dataset": records, "tokenizer": tiny_tokenizer()} | options
                if options["tokenizer"] == "another":
                    options["tokenizer"] = another
                keys.append(tokenize_records(**options)._fingerprint)
            assert keys[0] != keys[1], name
            assert keys[0] == keys[2], name
    finally:
        enable_caching()


CHANGES = {
    "merge": lambda tokenizer: tokenizer.add_tokens(["zz zz"]),
    "eos": lambda tokenizer: setattr(tokenizer, "eos_token", "a"),
    "template": lambda tokenizer: setattr(tokenizer, "chat_template", TEMPLATE),
    "normalizer": lambda tokenizer: setattr(tokenizer.backend_tokenizer, "normalizer", normalizers.Lowercase()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_tokenizer_has_another_key(change, saved_model):
    one, other = (AutoTokenizer.from_pretrained(saved_model) for _ in range(2))
    CHANGES[change](other)
    assert encoder_key(TextEncoder(one, "text", False)) != encoder_key(TextEncoder(other, "text", False))


def test_a_tokenizer_that_was_used_has_the_same_key(saved_model):
    one, other = (AutoTokenizer.from_pretrained(saved_model) for _ in range(2))
    other(["some text", "more"], padding=True, truncation=True, max_length=3)
    assert encoder_key(TextEncoder(one, "text", False)) == encoder_key(TextEncoder(other, "text", False))


PACKED = {"dataset": None, "seq_length": 4, "strategy": "wrapped", "overlong": "split"}


def test_packed_data_sets_are_kept_under_everything_they_depend_on():
    """`map_kwargs` are for `Dataset.map`: processes and messages, no tokens."""
    assert set(inspect.signature(pack_dataset).parameters) == {*PACKED, "map_kwargs"}
    documents = Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5]]})
    given = {"dataset": documents, "seq_length": 8}
    key = pack_dataset(**given)._fingerprint
    assert pack_dataset(**given)._fingerprint == key
    for name, value in PACKED.items():
        other = documents.select([0]) if name == "dataset" else value
        assert pack_dataset(**given | {name: other})._fingerprint != key, name


STREAMED = {"capacity": 16, "overlong": "drop", "strategy": "none", "look_ahead": 2, "columns": ["input_ids"]}


def test_a_stream_s_state_has_every_setting_that_its_rows_depend_on():
    """Its columns as well; the source is the user's."""
    names = set(inspect.signature(PackedStream).parameters) - {"source"}
    assert names == {"capacity", "overlong", "strategy", "look_ahead", "columns"}
    position = PackedStream([], 8).position()
    for name, value in STREAMED.items():
        other = PackedStream([], **{"capacity": 8, name: value})
        with pytest.raises(ValueError, match="the position is of a stream with"):
            other.go_on_from(position)

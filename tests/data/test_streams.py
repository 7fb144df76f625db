"""Streams of documents, and what is known of a record besides its tokens: its length, its place, its template."""

from __future__ import annotations

import json
import re
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader

from longctx.data import (
    document_lengths,
    load_records,
    record_place,
    stream_records,
    tokenize_records,
    tokenize_stream,
)
from longctx.model.load import take_chat_template
from longctx.model.tiny import tiny_config, tiny_model, tiny_tokenizer
from longctx.run.preparation import read_tokenizer
from tests.data.tables import write_records
from tests.data.test_data import CHATS, TEXTS, VOCAB_SIZE, _error, _load_error
from tests.data.test_tokens import CASES
from tests.few import few
from tests.jsonl import write_lines

pytestmark = pytest.mark.usefixtures("own_cache")


# ----------------------------------------------------------------------------------------------------
# Streams
# ----------------------------------------------------------------------------------------------------


def _stream(path, tokenizer, *, split="train", **options):
    where = {"dataset_name": str(path), "split": split}
    return tokenize_stream(stream_records(**where), tokenizer, place=partial(record_place, **where), **options)


def _lists(documents) -> list[dict[str, list[int]]]:
    return [{name: [int(token) for token in tokens] for name, tokens in document.items()} for document in documents]


@pytest.mark.parametrize("suffix", few([".jsonl", ".parquet", ".arrow", ""], 2))
@pytest.mark.parametrize("name", few(CASES, 4))
def test_a_stream_gives_the_documents_of_the_data_set(name, suffix, tmp_path, tokenizer) -> None:
    records, options = CASES[name]
    path = write_records(tmp_path / f"records{suffix}", records)
    documents = _stream(path, tokenizer, vocab_size=VOCAB_SIZE, **options)
    expected = _lists(tokenize_records(load_records(path), tokenizer, **options))
    if documents.encoder.masked:  # always those of chats: a later message may have a mask
        expected = [{"labels": document["input_ids"]} | document for document in expected]
    assert _lists(documents) == expected
    assert _lists(documents) == expected  # from the start again


def test_text_files_and_splits_stream(tmp_path, tokenizer) -> None:
    texts, folder = tmp_path / "texts", tmp_path / "splits"
    texts.mkdir()
    for number, text in enumerate(TEXTS):
        (texts / f"{number}.txt").write_text(text)
    expected = _lists(tokenize_records(load_records(str(texts)), tokenizer))
    assert _lists(_stream(texts, tokenizer)) == expected
    write_lines(folder / "train.jsonl", [{"text": text} for text in TEXTS])
    write_lines(folder / "test.jsonl", [{"text": TEXTS[1]}])
    assert _lists(_stream(folder, tokenizer, split="test")) == expected[1:2]
    assert "no split 'dev'; available: test, train" in _error(_stream, folder, tokenizer, split="dev")
    for split in ("train[:2]", "train+test"):
        assert "a stream reads one whole split" in _error(_stream, folder, tokenizer, split=split)


def test_a_stream_reads_what_it_is_asked_for_and_writes_nothing(tmp_path, tokenizer) -> None:
    path = tmp_path / "records.jsonl"
    write_lines(path, [{"text": str(number)} for number in range(1000)])
    with path.open("a") as file:
        file.write("no JSON")
    documents = _stream(path, tokenizer)
    assert len(list(islice(documents, 700))) == 700
    assert f"{path}:1001: malformed JSON" in _error(list, documents)
    assert not any((tmp_path / "cache").rglob("*.arrow"))


def test_every_worker_of_a_loader_reads_the_whole_stream(tmp_path, tokenizer) -> None:
    """What datasets deals out to workers by itself would be missed by PackedStream, which deals out rows."""
    for number in range(4):
        write_records(tmp_path / f"{number}.parquet", [{"text": f"{number} {n}"} for n in range(9)])
    documents = _stream(f"{tmp_path}/*.parquet", tokenizer)
    expected = _lists(documents)
    assert len(expected) == 36
    loader = DataLoader(_OfTorch(documents), batch_size=None, num_workers=2, collate_fn=_lists)
    read = [document for documents in loader for document in documents]
    for worker in range(2):
        assert read[worker::2] == expected


class _OfTorch(torch.utils.data.IterableDataset):
    def __init__(self, documents):
        self.documents = documents

    def __iter__(self):
        return ([document] for document in self.documents)


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([{"input_ids": [1, 2]}, {"input_ids": [1, VOCAB_SIZE]}], ":2: 'input_ids' holds the token id 272"),
        ([{"input_ids": [1, 2]}, {"input_ids": []}], ":2: 'input_ids' is empty"),
        ([{"input_ids": [1], "labels": [1]}, {"input_ids": [1, 2], "labels": [1]}], ":2: 'labels' has 1 entries"),
        ([{"messages": CHATS[0]}, {"messages": []}], ":2: 'messages' is []"),
        ([{"text": "a"}, {"text": 3}], ":2: 'text' is int"),
        ([{"text": "a"}, {"prompt": "a", "completion": "b"}], ":2: mixed kinds"),
        ([{"input_ids": [1, 2], "labels": [1, -100]}], "no token to train on in 1 documents with 2 tokens"),
    ],
)
def test_a_bad_record_of_a_stream_is_named(records, words, tmp_path, tokenizer) -> None:
    path = write_lines(tmp_path / "records.jsonl", records)
    assert words in _error(lambda: list(_stream(path, tokenizer, vocab_size=VOCAB_SIZE)))


def test_files_that_do_not_fit_together_end_a_stream(tmp_path, tokenizer) -> None:
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"text": TEXTS, "more": [1, 2, 3]}), tmp_path / "1.parquet")
    files = f"{tmp_path}/*.parquet"
    error = _error(list, _stream(files, tokenizer))
    for message in (error, _load_error(files)):
        assert f"{tmp_path}/1.parquet: not readable as one data set" in message


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (OSError("connection lost"), "not readable as one data set (connection lost)"),
        (MemoryError(), "a row group or record batch with an unpacked size of more than 8,192 MiB, the limit"),
    ],
)
def test_a_stream_that_breaks_off_is_named(failure, words, tokenizer) -> None:
    """As one of the hub may, whose files `datasets` reads."""

    def read():
        yield {"text": "a"}
        raise failure

    records = datasets.IterableDataset.from_generator(
        read, features=datasets.Features({"text": datasets.Value("string")})
    )
    error = _error(list, tokenize_stream(records, tokenizer))
    assert f"record 0 (counted from 0) or a later one: {words}" in error


def test_a_stream_from_the_hub_is_asked_for(monkeypatch, tokenizer) -> None:
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return Dataset.from_dict({"text": TEXTS}).to_iterable_dataset(num_shards=2)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    documents = tokenize_stream(stream_records("owner/name", config="en", split="test"), tokenizer)
    assert asked == [(("owner/name", "en"), {"split": "test", "streaming": True})]
    assert _lists(documents) == _lists(tokenize_records(Dataset.from_dict({"text": TEXTS}), tokenizer))
    monkeypatch.undo()
    assert "without a connection, give a local one" in _error(stream_records, "owner/name")


# ----------------------------------------------------------------------------------------------------
# Lengths, imports
# ----------------------------------------------------------------------------------------------------


def test_document_lengths() -> None:
    rows = [[1], [1, 2, 3], [], [4, 5]]
    plain = Dataset.from_dict({"input_ids": rows})
    large = plain.cast_column("input_ids", datasets.LargeList(datasets.Value("int32")))
    for source in (plain, large):
        lengths = document_lengths(source)
        assert lengths.dtype == np.int64
        assert lengths.tolist() == [1, 3, 0, 2]
        assert document_lengths(source.select([3, 0, 3])).tolist() == [2, 1, 2]
        assert document_lengths(source.select(range(1, 3))).tolist() == [3, 0]
        assert document_lengths(datasets.concatenate_datasets([source, source])).tolist() == [1, 3, 0, 2] * 2
        assert document_lengths(source.shuffle(seed=0)).sum() == 6
    assert document_lengths(plain.select([])).tolist() == []
    assert "1 documents have null" in _error(document_lengths, Dataset.from_dict({"input_ids": [[1], None]}))


def test_a_record_is_found_in_the_file_it_came_from(tmp_path) -> None:
    for name, first in (("a", 0), ("b", 3)):
        records = [{"text": f"{i}"} for i in range(first, first + 3)]
        for folder in ("array", "lines", "parquet", "arrow", "texts"):
            (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / "array" / f"{name}.json").write_text(json.dumps(records))
        (tmp_path / "lines" / f"{name}.jsonl").write_text("\n\n".join(map(json.dumps, records)))
        for suffix in ("parquet", "arrow"):
            write_records(tmp_path / suffix / f"{name}.{suffix}", records)
        write_records(tmp_path / "texts" / f"{name}.txt", records)
    write_records(tmp_path / "saved", records)
    for folder, expected in {
        "lines": "lines/b.jsonl:3",
        "array": "array/b.json, record 1 (counted from 0)",
        "parquet": "parquet, train[4]",
        "arrow": "arrow, train[4]",
    }.items():
        path = str(tmp_path / folder)
        assert record_place(4, path) == f"{tmp_path}/{expected}"
        split = "train[5:]+train[2:5]"
        assert load_records(path, split=split)[3]["text"] == "4"
        assert record_place(3, path, split=split) == f"{tmp_path}/{expected}"
    assert record_place(1, str(tmp_path / "texts")) == f"{tmp_path}/texts/b.txt"
    assert record_place(1, str(tmp_path / "saved")) == f"{tmp_path}/saved, train[1]"
    assert record_place(7, "owner/name", split="test") == "owner/name, test[7]"


def _saved_tokenizer(folder: Path, **changes: Any) -> str:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": changes.pop("tokens", [])})
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_the_template_of_another_tokenizer(tmp_path) -> None:
    """With its end-of-text token, as TRL takes it over; tokens that have no embedding are refused."""
    from trl import clone_chat_template

    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    other = _saved_tokenizer(tmp_path / "other", chat_template=template, eos_token="<|im_end|>")
    tokenizer, expected = tiny_tokenizer(), tiny_tokenizer()
    take_chat_template(tokenizer, other)
    clone_chat_template(tiny_model(), expected, other, resize_to_multiple_of=None)
    assert (tokenizer.chat_template, tokenizer.eos_token_id) == (expected.chat_template, expected.eos_token_id)
    assert tokenizer.get_vocab() == expected.get_vocab()
    (ids,) = tokenize_records(Dataset.from_list([{"messages": CHATS[1]}]), tokenizer)["input_ids"]
    assert tokenizer.decode(ids) == "".join(message["content"] for message in CHATS[1])
    for name, changes, words in (
        ("more", {"tokens": ["<|extra|>"]}, "has 1 tokens that the model's tokenizer lacks, such as '<|extra|>'"),
        ("none", {"chat_template": None}, "that tokenizer has no chat template. Name another"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            take_chat_template(tiny_tokenizer(), _saved_tokenizer(tmp_path / name, **changes))
    with pytest.raises(ValueError, match="nowhere is not a tokenizer that can be loaded"):
        take_chat_template(tiny_tokenizer(), str(tmp_path / "nowhere"))


def test_a_named_eos_token_comes_before_the_template_s(tmp_path) -> None:
    """The tokenizer is saved with the token that was named, so documents have to end with that token."""
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    other = _saved_tokenizer(tmp_path, chat_template=template, eos_token="<|im_end|>")
    settings = {"model_name_or_path": "tiny", "model_revision": None, "trust_remote_code": False, "pad_token": None}
    for named, expected in ((None, "<|im_end|>"), ("<|pad|>", "<|pad|>")):
        given = settings | {"chat_template_path": other, "eos_token": named}
        tokenizer = read_tokenizer(given, tiny_config())
        assert (tokenizer.chat_template, tokenizer.eos_token) == (template, expected)

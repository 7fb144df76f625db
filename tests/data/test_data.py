"""Data stage: every format loads, every bad input has its error, and the tokens are the ones TRL gives."""

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
from datasets import Dataset, DatasetDict
from torch.utils.data import DataLoader

import longctx.data.files
import longctx.data.json_records
from longctx.data import (
    DataError,
    document_lengths,
    load_records,
    record_place,
    stdlib_files,
    stream_records,
    tokenize_records,
    tokenize_stream,
    with_place,
)
from longctx.model.load import take_chat_template
from longctx.model.tiny import tiny_model, tiny_tokenizer

VOCAB_SIZE = 272
EOS = 256
TEXTS = ["hello", "def f(x):\n    return 'ü€'\n", "x" * 300]
CHATS = [
    [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "yes"},
    ],
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"}],
]
PAIRS = [("2+2=", "4"), ("the sky is", " blue"), ("", "nothing before")]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """Each test has its own cache of `datasets`, and never waits for the hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def _write_lines(path: Path, records: list[Any], end: str = "\n") -> str:
    path.write_text(end.join(json.dumps(record, ensure_ascii=False) for record in records) + end, encoding="utf-8")
    return str(path)


def _error(function, *args, **kwargs) -> str:
    with pytest.raises(DataError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def _load_error(*args, **kwargs) -> str:
    return _error(load_records, *map(str, args), **kwargs)


def _tokenize_error(records: Dataset, tokenizer, **kwargs) -> str:
    return _error(tokenize_records, records, tokenizer, **kwargs)


# ----------------------------------------------------------------------------------------------------
# Formats
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".arrow"])
def test_one_file_of_each_format(tmp_path, suffix) -> None:
    path = tmp_path / f"data{suffix}"
    records = [{"text": text, "source": 1} for text in TEXTS]
    if suffix in (".jsonl", ".json"):
        _write_lines(path, records)
    elif suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        table = pa.Table.from_pylist(records)
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    assert load_records(str(path))["text"][:] == TEXTS
    assert load_records(str(path.rename(tmp_path / f"DATA{suffix.upper()}")))["text"][:] == TEXTS


def test_arrow_file_format_too(tmp_path) -> None:
    table = pa.table({"text": TEXTS})
    with pa.ipc.new_file(str(tmp_path / "data.arrow"), table.schema) as writer:
        writer.write_table(table)
    assert load_records(str(tmp_path / "data.arrow"))["text"][:] == TEXTS


@pytest.mark.parametrize("indent", [None, 2])
def test_json_array(tmp_path, indent) -> None:
    path = tmp_path / "data.json"
    path.write_text("\n " + json.dumps([{"text": text} for text in TEXTS], indent=indent))
    assert load_records(str(path))["text"][:] == TEXTS


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n", "\n  \n"])
def test_line_ends_blank_lines_and_byte_order_mark(tmp_path, end) -> None:
    path = tmp_path / "data.jsonl"
    _write_lines(path, [{"text": text} for text in TEXTS], end)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes() + b"\n\n")
    assert load_records(str(path))["text"][:] == TEXTS
    path.write_bytes(path.read_bytes().rstrip())
    assert load_records(str(path))["text"][:] == TEXTS


def test_folder_of_json_lines_in_path_order(tmp_path) -> None:
    folder = tmp_path / "data"
    (folder / "b").mkdir(parents=True)
    _write_lines(folder / "b" / "0.jsonl", [{"text": "third"}])
    _write_lines(folder / "a2.jsonl", [{"text": "second"}])
    _write_lines(folder / "a1.jsonl", [{"text": "first"}])
    (folder / "README.md").write_text("notes")
    (folder / ".hidden").write_text("x")
    assert load_records(str(folder))["text"][:] == ["first", "second", "third"]
    links = tmp_path / "links"
    links.mkdir()
    for number, name in enumerate(("b/0.jsonl", "a1.jsonl")):
        (links / f"part-{number}.jsonl").symlink_to(folder / name)
    assert load_records(str(links))["text"][:] == ["third", "first"]
    assert load_records(str(folder / "*.jsonl"))["text"][:] == ["first", "second"]


def test_folder_with_split_names(tmp_path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    _write_lines(folder / "train.jsonl", [{"text": "a"}, {"text": "b"}])
    _write_lines(folder / "test.jsonl", [{"text": "c"}])
    assert load_records(str(folder))["text"][:] == ["a", "b"]
    assert load_records(str(folder), split="test")["text"][:] == ["c"]
    assert load_records(str(folder), split="train[1:]+test")["text"][:] == ["b", "c"]
    assert load_records(str(folder), split="train[:50%]")["text"][:] == ["a"]
    message = _load_error(folder, split="validation")
    assert "no split 'validation'" in message
    assert "available: test, train" in message
    assert "not understood" in _load_error(folder, split="train[x]")


def test_folder_where_only_some_files_name_a_split(tmp_path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    _write_lines(folder / "train.jsonl", [{"text": "a"}])
    _write_lines(folder / "more.jsonl", [{"text": "b"}])
    message = _load_error(folder)
    assert "more.jsonl" in message
    assert "Name a split in every file" in message


def test_unreadable_file(tmp_path, monkeypatch) -> None:
    paths = [_write_lines(tmp_path / name, [{"text": "a"}]) for name in ("a.jsonl", "a.txt")]

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    for path in paths:
        assert f"{path}: unreadable (Permission denied)" in _load_error(path)


def test_invalid_utf8_in_parquet(tmp_path, tokenizer) -> None:
    bad = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff\xfe"], pa.binary()).buffers())
    pq.write_table(pa.table({"text": bad}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="not UTF-8"):
        tokenize_records(load_records(str(tmp_path / "a.parquet")), tokenizer)


def test_folder_of_parquet_files(tmp_path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(2):
        pq.write_table(pa.table({"text": [f"{number}{i}" for i in range(2)]}), folder / f"part-{number}.parquet")
    assert load_records(str(folder))["text"][:] == ["00", "01", "10", "11"]


def test_folder_and_glob_of_text_files(tmp_path) -> None:
    folder = tmp_path / "src"
    (folder / "pkg" / "__pycache__").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "b.py").write_bytes("print('ü')\r\n".encode())
    (folder / "pkg" / "a.py").write_text("import os\n")
    (folder / "pkg" / "notes.txt").write_text("")
    (folder / ".git" / "blob").write_bytes(b"\x00\x01")
    (folder / "pkg" / "__pycache__" / "a.pyc").write_bytes(b"\x00\x01")
    assert load_records(str(folder))["text"][:] == ["print('ü')\r\n", "import os\n", ""]
    assert load_records(f"{folder}/**/*.py", text_field="code")["code"][:] == [
        "print('ü')\r\n",
        "import os\n",
    ]
    assert load_records(str(folder / "b.py"))["text"][:] == ["print('ü')\r\n"]


def test_saved_to_disk(tmp_path) -> None:
    Dataset.from_dict({"text": TEXTS}).save_to_disk(str(tmp_path / "one"))
    assert load_records(str(tmp_path / "one"))["text"][:] == TEXTS
    parts = DatasetDict({"train": Dataset.from_dict({"text": TEXTS}), "test": Dataset.from_dict({"text": ["t"]})})
    parts.save_to_disk(str(tmp_path / "two"))
    assert load_records(str(tmp_path / "two"), split="test")["text"][:] == ["t"]
    assert "available: test, train" in _load_error(tmp_path / "two", split="dev")
    (tmp_path / "one" / "state.json").write_text("{}")
    assert "not a readable folder of Dataset.save_to_disk" in _load_error(tmp_path / "one")


def test_changed_file_is_read_again(tmp_path) -> None:
    path = tmp_path / "data.jsonl"
    _write_lines(path, [{"text": "one"}])
    assert load_records(str(path))["text"][:] == ["one"]
    _write_lines(path, [{"text": "two"}, {"text": "three"}])
    assert load_records(str(path))["text"][:] == ["two", "three"]


def test_stdlib(tokenizer, capfd) -> None:
    files = stdlib_files()
    parts = {part for path in files for part in path.parts}
    assert not parts & {"site-packages", "dist-packages", "idlelib"}
    assert len(files) > 300
    records = load_records("stdlib")
    documents = tokenize_records(records, tokenizer, vocab_size=VOCAB_SIZE)
    lengths = document_lengths(documents)
    marks = sum(path.read_bytes().startswith(b"\xef\xbb\xbf") for path in files)
    assert lengths.sum() == sum(path.stat().st_size for path in files) + len(files) - 3 * marks
    assert (lengths > 8192).sum() > 50
    first = tokenizer.decode(documents[0]["input_ids"])
    assert first == files[0].read_text(encoding="utf-8-sig") + "<|endoftext|>"
    assert "longer than" not in "".join(capfd.readouterr())


def test_extra_columns_and_later_columns_are_left_alone(tmp_path, tokenizer) -> None:
    path = _write_lines(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "b", "score": 1}, {"text": "c", "score": "x"}])
    assert tokenize_records(load_records(path), tokenizer)["input_ids"][:] == [
        [97 - 33, EOS],
        [65, EOS],
        [66, EOS],
    ]


def test_text_that_looks_like_a_date_stays_text(tmp_path) -> None:
    path = _write_lines(tmp_path / "a.jsonl", [{"text": "2020-01-01T00:00:00"}])
    assert load_records(path)["text"][:] == ["2020-01-01T00:00:00"]


# ----------------------------------------------------------------------------------------------------
# Errors while loading
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["no/such/file.jsonl", "./nowhere", "/nowhere/at/all", "data.parquet", "~/nope.txt"])
def test_missing_file(name) -> None:
    message = _load_error(name)
    assert message.startswith(name)
    assert "no such file or folder" in message
    assert ".jsonl/.json/.parquet/.arrow" in message


def test_glob_without_a_match(tmp_path) -> None:
    assert "no file matches" in _load_error(tmp_path / "*.py")


def test_hub_out_of_reach() -> None:
    message = _load_error("someone/something")
    assert "'someone/something'" in message
    assert "No such file or folder here either" in message


def test_config_of_a_local_file(tmp_path) -> None:
    path = _write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    assert "--dataset_config 'en'" in _load_error(path, config="en")


@pytest.mark.parametrize("suffix", [".csv", ".gz", ".zip", ".ndjson", ".CSV"])
def test_unknown_format(tmp_path, suffix) -> None:
    (tmp_path / f"data{suffix}").write_text("a,b\n")
    message = _load_error(tmp_path / f"data{suffix}")
    assert f"unknown format '{suffix}'" in message
    assert "Unpack or convert" in message


def test_mixed_formats_in_a_folder(tmp_path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("x")
    _write_lines(tmp_path / "src" / "b.jsonl", [{"text": "a"}])
    message = _load_error(tmp_path / "src")
    assert "mixed formats" in message
    assert "glob" in message


@pytest.mark.parametrize("content", ["", "\n\n", "[]"])
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_empty_json(tmp_path, content, suffix) -> None:
    (tmp_path / f"a{suffix}").write_text(content)
    message = _load_error(tmp_path / f"a{suffix}")
    assert "0 records" in message
    assert str(tmp_path / f"a{suffix}") in message


def test_empty_folder_and_empty_parquet(tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    assert "holds no files" in _load_error(tmp_path / "empty")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "a.parquet")
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), pa.schema([("text", pa.string())])):
        pass
    for suffix in (".parquet", ".arrow"):
        assert "0 records" in _load_error(tmp_path / f"a{suffix}")
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "b.parquet")
    assert load_records(str(tmp_path / "*.parquet"))["text"][:] == ["a"]


BAD_LINES = {
    "cut off": (b'{"text": "a', "malformed JSON"),
    "not JSON": (b"hello", "malformed JSON"),
    "two on a line": (b'{"text": "a"}{"text": "b"}', "malformed JSON"),
    "nul": (b"\x00\x00\x00\x00", "malformed JSON"),
    "list": (b'["a"]', "a JSON list, not an object"),
    "number": (b"3", "a JSON int, not an object"),
    "not UTF-8": (b'{"text": "\xff"}', "not UTF-8 (byte 0xff at column 11)"),
    "number as text": (b'{"text": 3}', "'text' is int ('3'); expected a string"),
    "null as text": (b'{"text": null}', "no known kind of record"),
    "no text": (b'{"body": "a"}', "no known kind of record in the columns ['body']"),
    "other kind": (b'{"messages": [{"role": "user", "content": "a"}]}', "mixed kinds of records"),
    "half a pair": (b'{"text": "\\ud83d"}', "half a surrogate pair"),
    "deep": (b'{"text": ' + b"[" * 100_000, "malformed JSON"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_bad_line_is_named(tmp_path, name) -> None:
    line, expected = BAD_LINES[name]
    path = tmp_path / "data.jsonl"
    good = b'{"text": "fine"}\n'
    path.write_bytes(good * 1500 + b"\n" + line + b"\n" + good)
    message = _load_error(path)
    assert message.startswith(f"{path}:1502: "), message
    assert expected in message


def test_bad_second_file_is_named(tmp_path) -> None:
    _write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n{"text": }\n')
    assert f"{tmp_path}/b.jsonl:2: malformed JSON" in _load_error(tmp_path / "*.jsonl")


def test_bad_json_array(tmp_path) -> None:
    (tmp_path / "a.json").write_text('[\n{"text": "a"},\n{"text": }\n]')
    assert f"{tmp_path}/a.json:3: malformed JSON" in _load_error(tmp_path / "a.json")
    (tmp_path / "a.json").write_text('[{"text": "a"}, 3]')
    assert f"{tmp_path}/a.json, record 1 (counted from 0): a JSON int" in _load_error(tmp_path / "a.json")
    (tmp_path / "a.json").write_text('[{"text": "a"}, {"text": "\\ud83d"}]')
    assert "record 1 (counted from 0): the escape \\ud83d is half" in _load_error(tmp_path / "a.json")


def test_unknown_kind_lists_columns_and_kinds(tmp_path) -> None:
    message = _load_error(_write_lines(tmp_path / "a.jsonl", [{"question": "a", "answer": "b"}]))
    assert "['answer', 'question']" in message
    for kind in ("'text'", "'messages'", "'prompt' and 'completion'", "'input_ids'", "--dataset_text_field"):
        assert kind in message
    pq.write_table(pa.table({"body": ["a"]}), tmp_path / "a.parquet")
    assert "['body']" in _load_error(tmp_path / "a.parquet")
    assert load_records(str(tmp_path / "a.parquet"), text_field="body")["body"][:] == ["a"]


def test_mixed_kinds_over_parquet_files(tmp_path) -> None:
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"input_ids": [[1]]}), tmp_path / "b.parquet")
    message = _load_error(tmp_path / "*.parquet")
    assert "mixed kinds of records: 'text' in" in message
    assert "b.parquet" in message


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_damaged_binary_data(tmp_path, suffix) -> None:
    (tmp_path / f"a{suffix}").write_bytes(b"garbage " * 40)
    message = _load_error(tmp_path / f"a{suffix}")
    assert f"a{suffix}: not a readable {suffix[1:]} file" in message


def test_binary_and_badly_encoded_text_files(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "b.txt").write_bytes(b"one\ntwo \xe9\n")
    assert f"{tmp_path}/b.txt:2: not UTF-8 (byte 0xe9 at offset 8)" in _load_error(tmp_path / "*.txt")
    (tmp_path / "b.txt").write_bytes(b"\x7fELF\x00\x00")
    assert f"{tmp_path}/b.txt: NUL byte at offset 4" in _load_error(tmp_path / "*.txt")


@pytest.mark.parametrize(
    "records",
    [
        [{"messages": CHATS[1]}, {"messages": []}],
        [{"messages": CHATS[1]}, {"messages": [{"content": "no role"}]}],
        [{"messages": CHATS[1]}, {"messages": "plain"}],
        [{"prompt": "a", "completion": "b"}, {"prompt": ["a"], "completion": "b"}],
        [{"prompt": "a", "completion": "b"}, {"prompt": "a"}],
        [{"input_ids": [1, 2]}, {"input_ids": [1.5]}],
        [{"input_ids": [1, 2]}, {"input_ids": [[1], [1, 2]]}],
        [{"input_ids": [1, 2]}, {"input_ids": [1, None]}],
        [{"input_ids": [1, 2]}, {"input_ids": "12"}],
        [{"input_ids": [1, 2]}, {"input_ids": [2**40]}],
        [{"input_ids": [1, 2]}, {"input_ids": [1, 2], "labels": [1, 2]}],
        [{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [1, 2]}],
    ],
)
def test_record_of_the_wrong_form_is_named(tmp_path, records) -> None:
    path = _write_lines(tmp_path / "a.jsonl", records)
    assert _load_error(path).startswith(f"{path}:2: ")


# ----------------------------------------------------------------------------------------------------
# Tokens and labels, compared with TRL
# ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trl_prepare(tokenizer, tmp_path_factory):
    """TRL's own preparation: records, options -> rows of input_ids and labels."""
    from trl import SFTConfig, SFTTrainer

    folder = str(tmp_path_factory.mktemp("trl"))

    def prepare(records: list[dict[str, Any]], **options: Any) -> list[dict[str, list[int]]]:
        args = SFTConfig(folder, use_cpu=True, report_to="none", max_length=None, bf16=False, **options)
        trainer = SFTTrainer(tiny_model(), args, train_dataset=Dataset.from_list(records), processing_class=tokenizer)
        return [{key: row[key] for key in ("input_ids", "labels")} for row in trainer.train_dataset]

    return prepare


CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "text": ([{"text": text} for text in [*TEXTS, "ends<|endoftext|>", ""]], {}),
    "messages": ([{"messages": chat} for chat in CHATS], {}),
    "messages, assistant only": ([{"messages": chat} for chat in CHATS], {"assistant_only_loss": True}),
    "from/value": (
        [{"conversations": [{"from": m["role"], "value": m["content"]} for m in chat]} for chat in CHATS],
        {},
    ),
    "prompt+completion": ([{"prompt": p, "completion": c} for p, c in PAIRS], {}),
    "prompt+completion, all tokens": (
        [{"prompt": p, "completion": c} for p, c in PAIRS],
        {"completion_only_loss": False},
    ),
    "chat prompt+completion": ([{"prompt": chat[:-1], "completion": chat[-1:]} for chat in CHATS], {}),
    "chat prompt+completion, assistant only": (
        [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in CHATS],
        {"assistant_only_loss": True, "completion_only_loss": False},
    ),
    "chat prompt+completion, assistant's part of the completion": (
        [{"prompt": CHATS[0][:2], "completion": CHATS[0][2:]}, {"prompt": CHATS[0][:4], "completion": CHATS[0][4:]}],
        {"assistant_only_loss": True},
    ),
    "input_ids": ([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}], {}),
    "input_ids and labels": ([{"input_ids": [1, 2, 3], "labels": [-100, 2, -100]}], {}),
}


@pytest.mark.parametrize("name", CASES)
def test_same_tokens_and_labels_as_trl(name, tmp_path, tokenizer, trl_prepare) -> None:
    records, options = CASES[name]
    expected = trl_prepare(records, **options)
    path = _write_lines(tmp_path / "records.jsonl", records)
    for source in (load_records(path), Dataset.from_list(records)):
        documents = tokenize_records(source, tokenizer, vocab_size=VOCAB_SIZE, **options)
        assert documents["input_ids"][:] == [row["input_ids"] for row in expected]
        labels = documents["labels"][:] if "labels" in documents.column_names else documents["input_ids"][:]
        assert labels == [row["labels"] for row in expected]
        masked = any(-100 in row["labels"] for row in expected)
        assert ("labels" in documents.column_names) == (masked or "labels" in records[0])
        for column in documents.column_names:
            assert documents.features[column] == datasets.List(datasets.Value("int32"))


def test_known_template_without_markers_gets_trls_training_version(tokenizer, trl_prepare, monkeypatch) -> None:
    from trl.chat_template_utils import qwen3_chat_template

    monkeypatch.setattr(tokenizer, "chat_template", qwen3_chat_template)
    records = [{"messages": chat} for chat in CHATS]
    expected = trl_prepare(records, assistant_only_loss=True)
    documents = tokenize_records(Dataset.from_list(records), tokenizer, assistant_only_loss=True)
    assert documents["labels"][:] == [row["labels"] for row in expected]
    assert tokenizer.chat_template == qwen3_chat_template
    given = tiny_tokenizer()
    again = tokenize_records(
        Dataset.from_list(records), given, assistant_only_loss=True, chat_template=qwen3_chat_template
    )
    assert again["labels"][:] == documents["labels"][:]


def _trl_template(name: str) -> str:
    import trl

    return Path(trl.__file__).parent.joinpath("chat_templates", f"{name}.jinja").read_text()


_WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}
_CALL = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Oslo"}}}
REAL_CHATS = {  # of several turns; with tools; with thoughts
    "turns": {
        "messages": [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "4"},
            {"role": "user", "content": "and 3?"},
            {"role": "assistant", "content": "7"},
        ]
    },
    "tools": {
        "messages": [
            {"role": "user", "content": "Weather in Oslo?"},
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "name": "weather", "content": "rain"},
            {"role": "assistant", "content": "It rains."},
        ],
        "tools": [_WEATHER],
    },
    "thoughts": {
        "messages": [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "reasoning_content": "two and two", "content": "4"},
        ]
    },
}


MARKED = (  # in the way of Mistral's, which TRL does not have
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% else %}"
    "{% generation %} {{ m.content }}</s>{% endgeneration %}{% endif %}{% endfor %}"
)
TEMPLATES = {  # TRL's file, and the chats that it refuses, or leaves the calls out of
    "qwen3": (),
    "qwen3_5_think": (),
    "qwen2_5": (),
    "glm4moe": (),
    "gptoss": (),
    "llama3": ("tools",),
    "phi3": ("tools",),
    "gemma3": ("tools",),
    "marked": ("tools",),
}


def _give_template(name: str, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", MARKED if name == "marked" else _trl_template(name))
    monkeypatch.setitem(tokenizer._special_tokens_map, "bos_token", tokenizer.eos_token)  # as their own have one


@pytest.mark.parametrize("assistant_only", [True, False])
@pytest.mark.parametrize(
    "template",
    [name if name in ("qwen3", "marked") else pytest.param(name, marks=pytest.mark.long) for name in TEMPLATES],
)
def test_real_templates_give_trls_tokens_and_labels(template, assistant_only, tokenizer, trl_prepare, monkeypatch):
    _give_template(template, tokenizer, monkeypatch)
    for name in REAL_CHATS.keys() - set(TEMPLATES[template]):
        expected = trl_prepare([REAL_CHATS[name]], assistant_only_loss=assistant_only)
        source = Dataset.from_list([REAL_CHATS[name]], on_mixed_types="use_json")
        documents = tokenize_records(source, tokenizer, assistant_only_loss=assistant_only)
        assert documents["input_ids"][:] == [row["input_ids"] for row in expected], name
        labels = documents["labels" if assistant_only else "input_ids"][:]
        assert labels == [row["labels"] for row in expected], name
        text = tokenizer.decode([token for token in labels[0] if token != -100])
        assert REAL_CHATS[name]["messages"][-1]["content"] in text
        assert (REAL_CHATS[name]["messages"][0]["content"] in text) != assistant_only


@pytest.mark.parametrize("template", [name for name, refused in TEMPLATES.items() if "tools" in refused])
def test_templates_without_a_place_for_tool_calls_are_refused(template, tokenizer, monkeypatch) -> None:
    """TRL trains on what such a template leaves: an empty answer."""
    _give_template(template, tokenizer, monkeypatch)
    source = Dataset.from_list([REAL_CHATS["tools"]], on_mixed_types="use_json")
    error = _tokenize_error(source, tokenizer)
    assert "leaves out the call of the tool 'weather'" in error or "roles must alternate user/assistant" in error


@pytest.mark.parametrize("template", ["llama3_1", "llama3_2", "gemma4"])
def test_templates_whose_assistant_nobody_marks_are_refused(template, tokenizer, monkeypatch) -> None:
    """As TRL does; all tokens can be learnt."""
    given = _trl_template(template)
    monkeypatch.setattr(tokenizer, "chat_template", given)
    source = Dataset.from_list([REAL_CHATS["turns"]])
    assert "this one has none and TRL knows no training version of it. Put the assistant's turn" in _tokenize_error(
        source, tokenizer, assistant_only_loss=True
    )
    (ids,) = tokenize_records(source, tokenizer)["input_ids"]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(REAL_CHATS["turns"]["messages"], tokenize=False)


def test_chat_template_option_and_tools(tokenizer) -> None:
    template = "{{ tools | length if tools else 0 }}{{ suffix }}{{ messages[0]['content'] }}"
    records = [
        {
            "messages": CHATS[1],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "chat_template_kwargs": None,
        },
        {"messages": CHATS[1], "tools": None, "chat_template_kwargs": {"suffix": "!"}},
    ]
    source = Dataset.from_list(records, on_mixed_types="use_json")
    documents = tokenize_records(source, tokenizer, chat_template=template)
    assert [tokenizer.decode(ids) for ids in documents["input_ids"]] == ["1hi", "0!hi"]


def test_tools_of_differing_arguments_keep_their_keys(tmp_path, tokenizer) -> None:
    call = {"role": "assistant", "content": ""}
    records = [{"messages": [{**call, "args": {key: 1}}]} for key in ("a", "b")]
    path = _write_lines(tmp_path / "a.jsonl", records)
    template = "{% for m in messages %}{{ m['args'] | tojson }}{% endfor %}"
    documents = tokenize_records(load_records(path), tokenizer, chat_template=template)
    assert [tokenizer.decode(ids) for ids in documents["input_ids"]] == ['{"a": 1}', '{"b": 1}']


def test_pretokenized_masks_become_labels(tokenizer) -> None:
    source = Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5]], "assistant_masks": [[0, 1, 0], [1, 1]]})
    assert tokenize_records(source, tokenizer)["labels"][:] == [[-100, 2, -100], [4, 5]]
    source = source.add_column("completion_mask", [[0, 1, 1], [0, 1]])
    assert "set --completion_only_loss" in _tokenize_error(source, tokenizer)
    documents = tokenize_records(source, tokenizer, completion_only_loss=True)
    assert documents["labels"][:] == [[-100, 2, -100], [-100, 5]]


def test_selected_and_sliced_records_keep_their_masks(tokenizer) -> None:
    rows = [{"input_ids": list(range(n)), "labels": [-100, *range(1, n)]} for n in range(2, 40)]
    source = Dataset.from_list(rows)
    for part, expected in (
        (source.select([30, 3, 3, 17]), [30, 3, 3, 17]),
        (source.select(range(5, 9)), range(5, 9)),
    ):
        documents = tokenize_records(part, tokenizer)
        assert documents["input_ids"][:] == [rows[i]["input_ids"] for i in expected]
        assert documents["labels"][:] == [rows[i]["labels"] for i in expected]


def test_long_document_prints_no_warning(tokenizer, capfd, monkeypatch) -> None:
    monkeypatch.setattr(tokenizer, "model_max_length", 16)
    tokenize_records(Dataset.from_dict({"text": ["x" * 100]}), tokenizer)
    tokenize_records(Dataset.from_list([{"messages": CHATS[0]}]), tokenizer)
    assert "longer than" not in "".join(capfd.readouterr())


def test_second_tokenization_comes_from_the_cache(tmp_path, monkeypatch) -> None:
    path = _write_lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    first = tokenize_records(load_records(path), tiny_tokenizer())
    calls = []
    original = datasets.arrow_writer.ArrowWriter.finalize
    monkeypatch.setattr(
        datasets.arrow_writer.ArrowWriter,
        "finalize",
        lambda self, *a, **k: calls.append(1) or original(self, *a, **k),
    )
    second = tokenize_records(load_records(path), tiny_tokenizer())
    assert second._fingerprint == first._fingerprint
    assert second.cache_files == first.cache_files
    assert not calls, "nothing may be written the second time"
    other = tiny_tokenizer()
    other.eos_token = "<|im_end|>"
    assert tokenize_records(load_records(path), other)["input_ids"][0][-1] == other.eos_token_id
    assert calls


def test_several_processes_give_the_same(tmp_path, tokenizer) -> None:
    path = _write_lines(tmp_path / "a.jsonl", [{"prompt": p, "completion": c} for p, c in PAIRS * 4])
    one = tokenize_records(load_records(path), tokenizer)
    datasets.config.HF_DATASETS_CACHE = str(tmp_path / "other")
    two = tokenize_records(load_records(path), tokenizer, num_proc=2)
    assert two[:] == one[:]
    bad = Dataset.from_dict({"input_ids": [[1, 2]] * 5 + [[9999]]})
    assert "record 5 " in _tokenize_error(bad, tokenizer, vocab_size=VOCAB_SIZE, num_proc=2)


# ----------------------------------------------------------------------------------------------------
# Errors while tokenising
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (
            {"input_ids": [[1, 2], [3, 4]], "labels": [[1, 2], [3]]},
            "record 1 (counted from 0): 'labels' has 1 entries and 'input_ids' has 2",
        ),
        ({"input_ids": [[1, 2], [3, 272]]}, "record 1 (counted from 0): 'input_ids' holds the token id 272"),
        ({"input_ids": [[1, -1]]}, "holds the token id -1, and the vocabulary has the ids 0 to 271"),
        ({"input_ids": [[1, 2]], "labels": [[1, 999]]}, "'labels' holds the token id 999"),
        ({"input_ids": [[1, 2]], "labels": [[1, -1]]}, "'labels' holds the token id -1"),
        ({"input_ids": [[1, 2], None]}, "record 1 (counted from 0): 'input_ids' is null"),
        (
            {"input_ids": [[1, 2], [3, None]]},
            "record 1 (counted from 0): 'input_ids' is null or holds a null",
        ),
        ({"input_ids": [[1, 2], []]}, "record 1 (counted from 0): 'input_ids' is empty"),
        ({"input_ids": [[1.5, 2.0]]}, "expected lists of integers"),
        ({"input_ids": [[1, 2]], "labels": [[-100, -100]]}, "every label is -100"),
        ({"input_ids": [[1, 2], [3, 4]], "labels": [[1, -100], [3, -100]]}, "the first token of a document"),
        ({"input_ids": [[1], [3]]}, "one token only"),
        ({"text": ["a", None]}, "record 1 (counted from 0): 'text' is NoneType"),
        ({"text": [1, 2]}, "column 'text' has the type int64; expected strings"),
        ({"messages": ["a"]}, "column 'messages' has the type string; expected lists of messages"),
        ({"prompt": ["a"], "completion": [None]}, "column 'completion' has the type null"),
        ({"prompt": ["a", "b"], "completion": ["c", None]}, "record 1 (counted from 0): 'completion'"),
        ({"body": ["a"]}, "no known kind of record in the columns ['body']"),
        ({"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]}, "'chosen' and 'rejected' answers are preferences"),
        ({"prompt": ["a"]}, "a 'prompt' alone is for methods that generate, such as GRPO"),
        ({"prompt": ["a"], "completion": ["b"], "label": [True]}, "'label' says which completions are desirable (KTO)"),
        ({"text": []}, "0 records"),
    ],
)
def test_bad_records(columns, expected, tokenizer) -> None:
    assert expected in _tokenize_error(Dataset.from_dict(columns), tokenizer, vocab_size=VOCAB_SIZE)


def test_ids_beyond_the_vocabulary_of_text(tokenizer) -> None:
    message = _tokenize_error(Dataset.from_dict({"text": ["a"]}), tokenizer, vocab_size=200)
    assert "holds the token id 256" in message
    assert "0 to 199" in message


def test_options_that_do_not_apply(tokenizer) -> None:
    text, chat = Dataset.from_dict({"text": TEXTS}), Dataset.from_list([{"messages": CHATS[0]}])
    assert "needs conversations" in _tokenize_error(text, tokenizer, assistant_only_loss=True)
    assert "'prompt' and 'completion'" in _tokenize_error(text, tokenizer, completion_only_loss=True)
    assert "--assistant_only_loss" in _tokenize_error(chat, tokenizer, completion_only_loss=True)
    ids = Dataset.from_dict({"input_ids": [[1, 2]]})
    assert "assistant_masks" in _tokenize_error(ids, tokenizer, assistant_only_loss=True)
    assert "completion_mask" in _tokenize_error(ids, tokenizer, completion_only_loss=True)


def test_tokenizer_without_what_is_needed(monkeypatch) -> None:
    tokenizer = tiny_tokenizer()
    chat = Dataset.from_list([{"messages": CHATS[0]}])
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.chat_template = template
    assert "{% generation %}" in _tokenize_error(chat, tokenizer, assistant_only_loss=True)
    tokenizer.chat_template = None
    assert "no chat template" in _tokenize_error(chat, tokenizer)
    tokenizer.eos_token = None
    assert "no EOS token" in _tokenize_error(Dataset.from_dict({"text": TEXTS}), tokenizer)


def test_chat_problems_name_the_record(tokenizer) -> None:
    no_answer = Dataset.from_list([{"messages": CHATS[0]}, {"messages": CHATS[0][:2]}])
    message = _tokenize_error(no_answer, tokenizer, assistant_only_loss=True)
    assert message.startswith("record 1 ")
    refusing = "{% for m in messages %}{{ raise_exception('roles must alternate') }}{% endfor %}"
    message = _tokenize_error(no_answer, tokenizer, chat_template=refusing)
    assert "roles must alternate" in message
    silent = _tokenize_error(no_answer, tokenizer, chat_template="{# nothing #}")
    assert silent.startswith("record 0 (counted from 0): 'input_ids' is empty")
    none = Dataset.from_list([{"messages": [{"role": "user", "content": None}]}])
    assert _tokenize_error(none, tokenizer).startswith("record 0 ")
    empty = Dataset.from_list([{"messages": CHATS[0]}, {"messages": []}])
    assert _tokenize_error(empty, tokenizer).startswith("record 1 ")


def test_transforms_and_streams_are_refused(tokenizer) -> None:
    source = Dataset.from_dict({"text": TEXTS})
    assert "with_transform" in _tokenize_error(source.with_transform(lambda batch: batch), tokenizer)
    assert "IterableDataset" in _tokenize_error(source.to_iterable_dataset(), tokenizer)


# ----------------------------------------------------------------------------------------------------
# Streams
# ----------------------------------------------------------------------------------------------------


def _stream(path, tokenizer, *, split="train", **options):
    where = {"dataset_name": str(path), "split": split}
    return tokenize_stream(stream_records(**where), tokenizer, place=partial(record_place, **where), **options)


def _lists(documents) -> list[dict[str, list[int]]]:
    return [{name: [int(token) for token in tokens] for name, tokens in document.items()} for document in documents]


@pytest.mark.parametrize(
    "suffix", [".jsonl", ".parquet", *(pytest.param(suffix, marks=pytest.mark.long) for suffix in (".arrow", ""))]
)
@pytest.mark.parametrize("name", CASES)
def test_a_stream_gives_the_documents_of_the_data_set(name, suffix, tmp_path, tokenizer) -> None:
    records, options = CASES[name]
    path = tmp_path / f"records{suffix}"
    if suffix == ".jsonl":
        _write_lines(path, records)
    elif suffix == ".parquet":
        Dataset.from_list(records).to_parquet(path)
    elif suffix == ".arrow":
        table = Dataset.from_list(records).data.table
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    else:
        Dataset.from_list(records).save_to_disk(path)
    documents = _stream(path, tokenizer, vocab_size=VOCAB_SIZE, **options)
    expected = tokenize_records(load_records(str(path)), tokenizer, **options)
    assert _lists(documents) == _lists(expected)
    assert _lists(documents) == _lists(expected)  # from the start again


def test_text_files_and_splits_stream(tmp_path, tokenizer) -> None:
    texts, folder = tmp_path / "texts", tmp_path / "splits"
    texts.mkdir()
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (texts / f"{number}.txt").write_text(text)
    expected = _lists(tokenize_records(load_records(str(texts)), tokenizer))
    assert _lists(_stream(texts, tokenizer)) == expected
    _write_lines(folder / "train.jsonl", [{"text": text} for text in TEXTS])
    _write_lines(folder / "test.jsonl", [{"text": TEXTS[1]}])
    assert _lists(_stream(folder, tokenizer, split="test")) == expected[1:2]
    assert "no split 'dev'; available: test, train" in _error(_stream, folder, tokenizer, split="dev")
    for split in ("train[:2]", "train+test"):
        assert "a stream reads one whole split" in _error(_stream, folder, tokenizer, split=split)


def test_a_stream_reads_what_it_is_asked_for_and_writes_nothing(tmp_path, tokenizer) -> None:
    path = tmp_path / "records.jsonl"
    _write_lines(path, [{"text": str(number)} for number in range(1000)])
    with path.open("a") as file:
        file.write("no JSON")
    documents = _stream(path, tokenizer)
    assert len(list(islice(documents, 700))) == 700
    assert f"{path}:1001: malformed JSON" in _error(list, documents)
    assert not any((tmp_path / "cache").rglob("*.arrow"))


def test_every_worker_of_a_loader_reads_the_whole_stream(tmp_path, tokenizer) -> None:
    """What datasets deals out to workers by itself would be missed by PackedStream, which deals out rows."""
    for number in range(4):
        pq.write_table(pa.table({"text": [f"{number} {n}" for n in range(9)]}), tmp_path / f"{number}.parquet")
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
    path = _write_lines(tmp_path / "records.jsonl", records)
    assert words in _error(list, _stream(path, tokenizer, vocab_size=VOCAB_SIZE))


def test_files_that_do_not_fit_together_end_a_stream(tmp_path, tokenizer) -> None:
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"text": TEXTS, "more": [1, 2, 3]}), tmp_path / "1.parquet")
    files = f"{tmp_path}/*.parquet"
    error = _error(list, _stream(files, tokenizer))
    assert "0.parquet, record 0 (counted from 0) or a later one: not readable as one data set" in error
    assert "not readable as one data set" in _load_error(files)


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
        lines = "\n\n".join(map(json.dumps, records))  # a blank line between any two
        for folder in ("lines", "array", "parquet", "arrow", "texts"):
            (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / "lines" / f"{name}.jsonl").write_text(lines)
        (tmp_path / "array" / f"{name}.json").write_text(json.dumps(records))
        (tmp_path / "texts" / f"{name}.txt").write_text(name)
        Dataset.from_list(records).to_parquet(tmp_path / "parquet" / f"{name}.parquet")
        table = pa.Table.from_pylist(records)
        with (
            pa.OSFile(str(tmp_path / "arrow" / f"{name}.arrow"), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as writer,
        ):
            writer.write_table(table)
    Dataset.from_list(records).save_to_disk(tmp_path / "saved")
    for folder, expected in {
        "lines": "lines/b.jsonl:3",
        "array": "array/b.json, record 1 (counted from 0)",
        "parquet": "parquet/b.parquet, record 1 (counted from 0)",
        "arrow": "arrow/b.arrow, record 1 (counted from 0)",
    }.items():
        path = str(tmp_path / folder)
        assert record_place(4, path) == f"{tmp_path}/{expected}"
        split = "train[5:]+train[2:5]"
        assert load_records(path, split=split)[3]["text"] == "4"
        assert record_place(3, path, split=split) == f"{tmp_path}/{expected}"
    assert record_place(1, str(tmp_path / "texts")) == f"{tmp_path}/texts/b.txt"
    assert record_place(1, str(tmp_path / "saved")) == f"{tmp_path}/saved, record 1 (counted from 0)"
    assert record_place(7, "owner/name", split="test") == "owner/name (split 'test'), record 7 (counted from 0)"


@pytest.mark.parametrize("suffix", ["jsonl", "txt"])
def test_files_that_were_read_are_not_read_again(suffix, tmp_path, monkeypatch) -> None:
    """An interruption, here by a bad file, keeps the parts before it."""
    folder = tmp_path / "data"
    folder.mkdir()
    texts = [f"text {i}" for i in range(5)]
    for number, text in enumerate(texts):
        content = json.dumps({"text": text}) if suffix == "jsonl" else text
        (folder / f"{number}.{suffix}").write_text(content)
    texts += [""] if suffix == "txt" else []  # no record in JSON
    (folder / f"5.{suffix}").write_text("")
    (folder / f"3.{suffix}").write_bytes(b"\xff")
    monkeypatch.setattr(longctx.data.files, "_PART_BYTES", 1)
    read = []
    for name in ("_read_text", "_iterate_lines"):
        module = longctx.data.files if name == "_read_text" else longctx.data.json_records
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda path, original=original: (read.append(path.name), original(path))[1])
    with pytest.raises(DataError, match=rf"3\.{suffix}"):
        load_records(str(folder))
    content = json.dumps({"text": texts[3]}) if suffix == "jsonl" else texts[3]
    (folder / f"3.{suffix}").write_text(content)
    read.clear()
    records = load_records(str(folder))
    assert records["text"][:] == texts
    # JSON files are opened for their first record besides, and the first of them as it says what kind the others are.
    times = [2, 1, 1, 2, 2, 1] if suffix == "jsonl" else [0, 0, 0, 1, 1, 1]
    assert [read.count(f"{number}.{suffix}") for number in range(6)] == times
    monkeypatch.setattr(longctx.data.files, "_PART_BYTES", 1 << 30)
    assert load_records(str(folder))._fingerprint == records._fingerprint


def test_text_that_is_not_utf8_is_named(tmp_path, tokenizer) -> None:
    column = pa.array([b"good", b"bad \xff", b"good"]).view(pa.string())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    message = _tokenize_error(load_records(str(tmp_path)), tokenizer)
    assert message.startswith("record 1 (counted from 0): a text column holds bytes that are not UTF-8")


def test_only_records_are_given_a_place() -> None:
    place = "file.jsonl:{}".format
    assert str(with_place(DataError("record 12 (counted from 0): 'text' is"), place)) == "file.jsonl:12: 'text' is"
    other = DataError("no chat template; record 12 (counted from 0) needs it")
    assert with_place(other, place) is other


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

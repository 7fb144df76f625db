"""Data stage: every format loads, every bad input has its error, and the tokens are the ones TRL gives."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from longctx.data import DataError, document_lengths, load_records, stdlib_files, stream_records, tokenize_records
from tests.data.tables import write_records, write_table
from tests.jsonl import write_lines
from tests.model.test_tiny import MESSAGES

pytestmark = pytest.mark.usefixtures("own_cache")

VOCAB_SIZE = 272
TEXTS = ["hello", "def f(x):\n    return 'ü€'\n", "x" * 300]
CHATS = [MESSAGES, [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"}]]
PAIRS = [("2+2=", "4"), ("the sky is", " blue"), ("", "nothing before")]


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


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".arrow", ".file.arrow"])
def test_one_file_of_each_format(tmp_path, suffix) -> None:
    path = tmp_path / f"data{suffix}"
    write_records(path, [{"text": text, "source": 1} for text in TEXTS])
    assert load_records(str(path))["text"][:] == TEXTS
    assert load_records(str(path.rename(tmp_path / f"DATA{suffix.upper()}")))["text"][:] == TEXTS


def test_folder_of_json_lines_in_path_order(tmp_path) -> None:
    folder = tmp_path / "data"
    write_lines(folder / "b" / "0.jsonl", [{"text": "third"}])
    write_lines(folder / "a2.jsonl", [{"text": "second"}])
    write_lines(folder / "a1.jsonl", [{"text": "first"}])
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
    write_lines(folder / "train.jsonl", [{"text": "a"}, {"text": "b"}])
    write_lines(folder / "test.jsonl", [{"text": "c"}])
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
    write_lines(folder / "train.jsonl", [{"text": "a"}])
    write_lines(folder / "more.jsonl", [{"text": "b"}])
    message = _load_error(folder)
    assert "more.jsonl" in message
    assert "Name a split in every file" in message
    (folder / "more.jsonl").rename(folder / "train_test.jsonl")
    assert "train_test.jsonl carries the names of two splits, train and test" in _load_error(folder)


def test_unreadable_file(tmp_path, monkeypatch) -> None:
    paths = [write_lines(tmp_path / name, [{"text": "a"}]) for name in ("a.jsonl", "a.txt")]

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    for path in paths:
        assert f"{path}: unreadable (Permission denied)" in _load_error(path)


def test_invalid_utf8_in_parquet_and_in_memory(tmp_path, tokenizer) -> None:
    bad = pa.table({"text": pa.array([b"good", b"bad \xff", b"good"]).view(pa.string())})
    pq.write_table(bad, tmp_path / "a.parquet")
    message = _tokenize_error(Dataset(bad), tokenizer)
    assert message.startswith("record 1 (counted from 0): the tokenizer cannot encode it: 'utf-8' codec can't decode")
    assert "a.parquet: not a readable parquet file (In column 0: Invalid: Invalid UTF8" in _load_error(
        tmp_path / "a.parquet"
    )


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
    assert load_records(f"{folder}/**/*.py", text_field="code")["code"][:] == ["print('ü')\r\n", "import os\n"]
    assert load_records(str(folder / "b.py"))["text"][:] == ["print('ü')\r\n"]


def test_saved_to_disk(tmp_path) -> None:
    Dataset.from_dict({"text": TEXTS}).save_to_disk(str(tmp_path / "one"))
    assert load_records(str(tmp_path / "one"))["text"][:] == TEXTS
    parts = DatasetDict({"train": Dataset.from_dict({"text": TEXTS}), "test": Dataset.from_dict({"text": ["t"]})})
    parts.save_to_disk(str(tmp_path / "two"))
    assert load_records(str(tmp_path / "two"), split="test")["text"][:] == ["t"]
    assert "available: test, train" in _load_error(tmp_path / "two", split="dev")
    state = json.loads((tmp_path / "one" / "state.json").read_text())
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (tmp_path / "one" / "state.json").write_text(json.dumps(state))
    assert "has kept its selection of rows apart" in _load_error(tmp_path / "one")
    (tmp_path / "one" / "state.json").write_text("{}")
    assert "not a readable folder of Dataset.save_to_disk" in _load_error(tmp_path / "one")


def test_a_saved_table_that_is_cut_off_is_refused(tmp_path) -> None:
    """`datasets` would read the batches before the cut, and nothing says how many there were."""
    Dataset.from_dict({"text": TEXTS}).save_to_disk(str(tmp_path / "saved"))
    (path,) = (tmp_path / "saved").glob("*.arrow")
    path.write_bytes(path.read_bytes()[:-8])
    assert "its stream has no end: it was cut off" in _load_error(tmp_path / "saved")


@pytest.mark.long
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


# ----------------------------------------------------------------------------------------------------
# Errors while loading
# ----------------------------------------------------------------------------------------------------


def test_glob_without_a_match(tmp_path) -> None:
    assert "no file matches" in _load_error(tmp_path / "*.py")


def test_hub_out_of_reach() -> None:
    message = _load_error("someone/something")
    assert "'someone/something'" in message
    assert "No such file or folder here either" in message


def test_config_of_a_local_file(tmp_path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    assert "--dataset_config 'en'" in _load_error(path, config="en")


@pytest.mark.parametrize("suffix", [".csv", ".CSV", ".ndjson", ".pkl", ".pt", ".bin", ".npz", ".gz", ".zip", ".tar"])
def test_unknown_format(tmp_path, suffix) -> None:
    (tmp_path / f"data{suffix}").write_text("a,b\n")
    message = _load_error(tmp_path / f"data{suffix}")
    assert f"unknown format '{suffix}'" in message
    assert "Unpack or convert" in message


def test_mixed_formats_in_a_folder(tmp_path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("x")
    write_lines(tmp_path / "src" / "b.jsonl", [{"text": "a"}])
    message = _load_error(tmp_path / "src")
    assert "mixed formats" in message
    assert "glob" in message


def test_empty_folder_and_empty_parquet(tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    assert "holds no files" in _load_error(tmp_path / "empty")
    for name in ("a.parquet", "a.arrow"):
        write_table(tmp_path / name, pa.table({"text": pa.array([], pa.string())}))
    for number, content in enumerate(("", "\n\n", "[]")):
        (tmp_path / f"{number}.json").write_text(content)
    for name in ("a.parquet", "a.arrow", "0.json", "1.json", "2.json"):
        message = _load_error(tmp_path / name)
        assert "0 records" in message
        assert str(tmp_path / name) in message
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
    "a key twice": (b'{"text": "a", "text": "b"}', "malformed JSON (the key 'text' stands twice in an object)"),
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


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"label": False}, "says which completions are desirable (KTO)"),
        ({"images": ["a.png"]}, "the column 'images' holds images"),
        ({"system": "be brief"}, "the column 'system' is not read"),
    ],
)
def test_a_record_that_is_more_than_its_text_is_refused(tmp_path, more, expected) -> None:
    """A label that is a number, an empty list of images and an empty system prompt are accepted."""
    good = {"prompt": "a", "completion": "b", "label": 0, "images": [], "system": ""}
    message = _load_error(write_lines(tmp_path / "a.jsonl", [good, good | more]))
    assert message.startswith(f"{tmp_path}/a.jsonl:2: the column")
    assert expected in message
    assert len(load_records(str(write_lines(tmp_path / "b.jsonl", [good])))) == 1


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_name_like_a_pattern_is_a_name(tmp_path, suffix) -> None:
    """`datasets` takes part[1] for a pattern, which matches part1."""
    for name in ("part1", "part[1]"):
        write_records(tmp_path / f"{name}{suffix}", [{"text": name}])
    path = str(tmp_path / f"part[1]{suffix}")
    assert load_records(path)["text"][:] == ["part[1]"]
    assert [record["text"] for record in stream_records(path)] == ["part[1]"]


def test_bad_second_file_is_named(tmp_path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n{"text": }\n')
    assert f"{tmp_path}/b.jsonl:2: malformed JSON" in _load_error(tmp_path / "*.jsonl")


def test_unknown_kind_lists_columns_and_kinds(tmp_path) -> None:
    message = _load_error(write_lines(tmp_path / "a.jsonl", [{"question": "a", "answer": "b"}]))
    assert "['answer', 'question']" in message
    for kind in ("'text'", "'messages'", "'prompt' and 'completion'", "'input_ids'", "--dataset_text_field"):
        assert kind in message
    pq.write_table(pa.table({"body": ["a"]}), tmp_path / "a.parquet")
    assert "['body']" in _load_error(tmp_path / "a.parquet")
    assert load_records(str(tmp_path / "a.parquet"), text_field="body")["body"][:] == ["a"]


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
    path = write_lines(tmp_path / "a.jsonl", records)
    assert _load_error(path).startswith(f"{path}:2: ")

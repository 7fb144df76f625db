"""Files are known by their contents: digests, what is remembered of them, and the keys and identities made of them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
import xxhash
from datasets import Dataset

import longctx.data.contents
from longctx.data import DataError, load_records, tokenize_records
from longctx.data.contents import cache_folder, content_digests
from longctx.data.encoders import TextEncoder
from longctx.data.json_records import JsonRecords
from longctx.data.tokenize import _fingerprint
from longctx.model.load import load_config
from longctx.model.tiny import tiny_tokenizer
from longctx.training.fingerprint import model_identity
from tests.data.tables import write_records
from tests.jsonl import write_lines

pytestmark = pytest.mark.usefixtures("own_cache")


def rewrite(path: Path, content: bytes) -> None:
    """Other contents of the same size, with the file's old times."""
    before = path.stat()
    assert len(content) == before.st_size
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def later(monkeypatch):
    """Let files that are being written look settled, so that their digests are remembered at once."""
    monkeypatch.setattr(longctx.data.contents, "_SETTLED_SECONDS", -1.0)


# Digests


def test_digests_are_those_of_one_reader(tmp_path, monkeypatch) -> None:
    """Of files of several blocks, read by many threads, and in the order of the files."""
    monkeypatch.setattr(longctx.data.contents, "_BLOCK_BYTES", 1000)
    monkeypatch.setattr(longctx.data.contents, "_READ_BYTES", 300)
    rng, files = np.random.default_rng(0), []
    for number, size in enumerate([5, 0, 2500, 1000, 7]):
        files.append(tmp_path / str(number))
        files[-1].write_bytes(rng.bytes(size))

    def digest(content: bytes) -> str:
        blocks = [content[at : at + 1000] for at in range(0, max(len(content), 1), 1000)]
        return xxhash.xxh3_128(b"".join(xxhash.xxh3_128(block).digest() for block in blocks)).hexdigest()

    assert content_digests(files) == [digest(file.read_bytes()) for file in files]


def test_what_is_not_changed_is_not_read_again(tmp_path, monkeypatch) -> None:
    """But for small files, whose digests are not remembered."""
    later(monkeypatch)
    monkeypatch.setattr(longctx.data.contents, "_LARGE_BYTES", 3)
    files = [tmp_path / name for name in ("small", "large", "larger")]
    for file in files:
        file.write_bytes(file.name.encode()[:2] if file.name == "small" else file.name.encode())
    first = content_digests(files)
    read, really_read = [], longctx.data.contents._read
    monkeypatch.setattr(
        longctx.data.contents, "_read", lambda file, size: read.append(file.name) or really_read(file, size)
    )
    assert content_digests(files) == first
    (tmp_path / "link").symlink_to(files[2])
    assert content_digests([tmp_path / "link"]) == first[2:]
    files[2].rename(tmp_path / "moved")  # ctime
    (tmp_path / "moved").rename(files[2])
    assert read == ["small"]
    rewrite(files[1], b"LARGE")
    changed = content_digests(files)
    assert (changed[0], changed[1] != first[1], changed[2]) == (first[0], True, first[2])
    assert {"small", "large"} <= set(read)


@pytest.mark.parametrize("damage", [b"", b"{}", b"[1]", b"\xff\xfe", None])
def test_a_damaged_entry_is_ignored(damage, tmp_path, monkeypatch) -> None:
    later(monkeypatch)
    monkeypatch.setattr(longctx.data.contents, "_LARGE_BYTES", 1)
    path = tmp_path / "file"
    path.write_bytes(b"contents")
    digests = content_digests([path])
    (entry,) = cache_folder().glob("contents-*")
    if damage is None:  # another digest, and no check that goes with it
        damage = entry.read_bytes().replace(digests[0].encode(), b"0" * 32)
    entry.write_bytes(damage)
    assert content_digests([path]) == digests
    assert entry.read_bytes() != damage


def test_a_file_that_was_just_written_is_not_remembered(tmp_path, monkeypatch) -> None:
    """It could be written to once more within the same tick of the file system's clock."""
    monkeypatch.setattr(longctx.data.contents, "_LARGE_BYTES", 1)
    path = tmp_path / "file"
    path.write_bytes(b"contents")
    content_digests([path])
    assert not list(cache_folder().glob("contents-*"))
    monkeypatch.setattr(time, "time_ns", lambda: path.stat().st_ctime_ns + 10**10)
    content_digests([path])
    assert list(cache_folder().glob("contents-*"))


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path, monkeypatch) -> None:
    later(monkeypatch)
    monkeypatch.setattr(longctx.data.contents, "_LARGE_BYTES", 1)
    (tmp_path / "cache").write_text("in the place of the folder")
    (tmp_path / "file").write_bytes(b"contents")
    assert content_digests([tmp_path / "file"]) == content_digests([tmp_path / "file"])


def test_what_changes_while_it_is_read_and_what_is_no_file_is_refused(tmp_path, monkeypatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"contents")
    read = longctx.data.contents._read

    def written_to(file, size):
        path.write_bytes(b"more contents")
        return read(file, size)

    monkeypatch.setattr(longctx.data.contents, "_read", written_to)
    with pytest.raises(DataError, match="file changed while it was read"):
        content_digests([path])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe: not a regular file"):
        content_digests([tmp_path / "pipe"])
    with pytest.raises(DataError, match="nowhere: unreadable"):
        content_digests([tmp_path / "nowhere"])


# Records


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".arrow", ".txt"])
def test_a_file_rewritten_with_its_size_and_time_is_read_again(suffix, tmp_path) -> None:
    path, other = tmp_path / f"data{suffix}", tmp_path / f"other{suffix}"
    write_records(path, [{"text": "one"}])
    write_records(other, [{"text": "two"}])
    tokens = tokenize_records(load_records(str(path)), tiny_tokenizer())["input_ids"][:]
    rewrite(path, other.read_bytes())
    records = load_records(str(path))
    assert records["text"][:] == ["two"]
    assert tokenize_records(records, tiny_tokenizer())["input_ids"][:] != tokens


def test_the_same_contents_elsewhere_are_found(tmp_path) -> None:
    paths = [write_lines(tmp_path / folder / "data.jsonl", [{"text": "one"}]) for folder in ("here", "there")]
    here, there = map(load_records, paths)
    assert here.cache_files == there.cache_files


def test_a_file_that_is_written_to_while_it_is_read_leaves_nothing_in_the_cache(tmp_path, monkeypatch) -> None:
    path = tmp_path / "data.jsonl"
    write_lines(path, [{"text": "one"}])
    parse = JsonRecords.parse

    def written_to(records, raw):
        with path.open("a") as opened:
            opened.write("\n")
        return parse(records, raw)

    monkeypatch.setattr(JsonRecords, "parse", written_to)
    with pytest.raises(DataError, match=r"data\.jsonl changed while it was read"):
        load_records(str(path))
    assert not list(cache_folder().rglob("*records-*"))


# Keys


def encoder(**changes):
    made = TextEncoder(tiny_tokenizer(), "prompt+completion", True)
    made.vocab_size = 272
    for name, value in changes.items():
        owner = made if hasattr(made, name) else made.tokenizer
        assert getattr(owner, name, None) != value
        setattr(owner, name, value)
    return made


def test_every_field_that_tokens_depend_on_changes_their_key(monkeypatch) -> None:
    dataset = Dataset.from_dict({"prompt": ["a"], "completion": ["b"]})
    plain = _fingerprint(dataset, encoder())
    assert _fingerprint(dataset, encoder()) == plain
    changes = [
        {"kind": "text"},
        {"masked": False},
        {"vocab_size": 1000},
        {"eos_token": "<|im_end|>"},
        {"chat_template": "{{ messages }}"},
        {"split_special_tokens": True},
    ]
    keys = {json.dumps(change): _fingerprint(dataset, encoder(**change)) for change in changes}
    other = encoder()
    other.tokenizer.add_tokens(["longer"])
    keys["vocabulary"] = _fingerprint(dataset, other)
    keys["records"] = _fingerprint(Dataset.from_dict({"prompt": ["a"], "completion": ["c"]}), encoder())
    for package in ("transformers", "tokenizers", "jinja2"):
        with monkeypatch.context() as patched:
            original = longctx.data.tokenize.version
            patched.setattr(longctx.data.tokenize, "version", lambda n, p=package, o=original: "0" if n == p else o(n))
            keys[package] = _fingerprint(dataset, encoder())
    assert len({plain, *keys.values()}) == 1 + len(keys)


# Models


def test_a_model_is_known_by_what_is_read_of_its_folder(models, tmp_path) -> None:
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(models["GQA 4:2"], folder)
    config = load_config(str(folder))
    first = model_identity(str(folder), config)
    (folder / "checkpoint-3").mkdir()
    for name in ("README.md", "checkpoint-3/model.safetensors", "pytorch_model.bin", "run_report.html"):
        (folder / name).write_text("not read")
    assert model_identity(str(folder), config) == first
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        rewrite(folder / name, bytes(content))
        assert model_identity(str(folder), config) != first, name
        content[len(content) // 2] ^= 1
        rewrite(folder / name, bytes(content))
    assert model_identity(str(folder), config) == first
    shutil.copytree(folder, tmp_path / "elsewhere")
    assert model_identity(str(tmp_path / "elsewhere"), config) == first


def test_a_model_of_the_hub_is_known_by_its_commit() -> None:
    config = load_config("tiny")
    config._commit_hash = "1" * 40
    assert model_identity("owner/name", config) == f"owner/name {'1' * 40}"
    config._commit_hash = "2" * 40
    assert model_identity("owner/name", config) == f"owner/name {'2' * 40}"

"""Files that have no end, or are far larger once they are read: see docs/security.md."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset

from longctx.data import DataError, encoders, errors, files, json_records, load_records, stream_records
from longctx.model import config_file
from longctx.model import files as model_files
from longctx.model.load import load_config, load_tokenizer
from longctx.training.checkpoint.files import CheckpointError, read_manifest
from longctx.training.checkpoint.shards import ParameterShard
from longctx.training.checkpoint.storage import StateReader, write_index
from longctx.training.fingerprint import _data_files_identity
from longctx.untrusted.confined import Bounds
from longctx.untrusted.files import matching_files
from tests.data.tables import write_table
from tests.jsonl import write_lines
from tests.untrusted.test_security import checkpoint, load

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _comes_to_an_end():
    """Fail a test that waits for a pipe or walks in circles, instead of the whole run."""

    def stop(*_):
        raise AssertionError("it waits without end")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def put_in_place(path: Path, kind: str) -> None:
    """Replace a file, if there is one, by something that is no regular file."""
    path.unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        path.symlink_to("..", target_is_directory=True)


KINDS = ["a pipe", "a socket", "a device", "a link to a folder"]
MODEL_FILES = ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors"]
MODEL_FILES += ["generation_config.json", "adapter_config.json", "special_tokens_map.json"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_models_folder_holds_regular_files(saved_model, tmp_path, kind):
    for name in MODEL_FILES:
        folder = shutil.copytree(saved_model, tmp_path / name)
        put_in_place(folder / name, kind)
        for read in (load, load_config, load_tokenizer):
            with pytest.raises(ValueError, match=rf"{name} is {kind}"):
                read(str(folder))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["longctx.json", "states-00000-000.safetensors", "random-00000.json", "more/x"])
def test_a_checkpoint_holds_regular_files(tmp_path, name, kind):
    folder = checkpoint(tmp_path / "checkpoint-1", {})
    (folder / "more").mkdir()
    put_in_place(folder / name, kind)
    with pytest.raises(CheckpointError, match=rf"{name} is {kind}"):
        read_manifest(folder)


def test_folders_that_lead_in_circles(tmp_path):
    """Two links to the folder above make 2^40 paths."""
    folder = tmp_path / "data"
    (folder / "part").mkdir(parents=True)
    (folder / "part" / "train.jsonl").write_text('{"text": "a b"}\n')
    for name in ("one", "two"):
        (folder / "part" / name).symlink_to("..", target_is_directory=True)
    with pytest.raises(ValueError, match=r"part/one is a link to a folder"):
        load_records(str(folder))
    assert matching_files(str(folder / "**")) == [folder / "part" / "train.jsonl"]
    assert len(load_records(str(folder / "**" / "*.jsonl"))) == 1
    assert _data_files_identity(str(folder / "**" / "*.jsonl")) is not None
    (folder / "part" / "train.jsonl").rename(folder / "part" / "train.txt")
    assert load_records(str(folder))["text"][:] == ['{"text": "a b"}\n']


@pytest.mark.parametrize("read", ["{}", "{}/*", "{}/**"])
@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
@pytest.mark.parametrize("kind", ["a pipe", "a socket", "a device", "a link to gone, where no file is"])
def test_nothing_of_a_data_set_is_passed_over(tmp_path, kind, suffix, read):
    for name in ("train-0", "train-1"):
        (tmp_path / f"{name}.{suffix}").write_text('{"text": "a b"}\n')
    (tmp_path / ".#train-0.txt").symlink_to("somebody@a-machine")  # hidden: what an editor leaves there
    assert len(load_records(read.format(tmp_path))) == 2
    broken = tmp_path / f"train-1.{suffix}"
    if kind.startswith("a link"):
        broken.unlink()
        broken.symlink_to("gone")
    else:
        put_in_place(broken, kind)
    with pytest.raises(ValueError, match=rf"train-1\.{suffix} is {kind}"):
        load_records(read.format(tmp_path))


def test_globs_match_what_they_did(tmp_path):
    for name in ("a.txt", "b/c.txt", "b/d/e.txt", ".hidden/f.txt", "b/.g.txt", "[x].txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")

    def found(pattern):
        return [str(path.relative_to(tmp_path)) for path in matching_files(str(tmp_path / pattern))]

    assert found("*.txt") == ["[x].txt", "a.txt"]
    assert found("**/*.txt") == found("**") == ["[x].txt", "a.txt", "b/c.txt", "b/d/e.txt"]
    assert found("b/**") == ["b/c.txt", "b/d/e.txt"]
    assert found(".hidden/*") == found(".h*/*.txt") == [".hidden/f.txt"]
    assert found("[[]x].txt") == ["[x].txt"]
    assert found("b/.*") == ["b/.g.txt"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_data_set_holds_regular_files(tmp_path, kind):
    parts = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["a b"]})})
    for name in ("state.json", "dataset_info.json"):
        parts.save_to_disk(str(tmp_path / name))
        put_in_place(tmp_path / name / "train" / name, kind)
        with pytest.raises(DataError, match=rf"train/{name} is {kind}"):
            load_records(str(tmp_path / name))


def test_files_of_flags_are_regular(refusal, tmp_path):
    for name in ("run.yaml", "template.jinja"):
        os.mkfifo(tmp_path / name)
    assert "run.yaml is a pipe" in refusal("--config", str(tmp_path / "run.yaml"))
    template = str(tmp_path / "template.jinja")
    assert "template.jinja is not a file" in refusal("--model_name_or_path", "tiny", "--chat_template_path", template)


# Headers and tags


def safetensors(header: object, data: int = 0, size: int | None = None) -> bytes:
    """A file with this header, and so many bytes behind it; its size may be said wrongly."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + bytes(data)


def tensor(shape: Sequence[object] = (2,), start: int = 0, end: int = 8) -> dict:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


NAME = "model.norm.weight"
FORGED_HEADERS = {
    "of 2^63 bytes": safetensors({}, size=1 << 63),
    "cut off": safetensors({NAME: tensor()}, data=8)[:40],
    "no object": safetensors([]),
    "data that is not there": safetensors({NAME: tensor()}, data=4),
    "tensors that overlap": safetensors({NAME: tensor(), "x": tensor(start=4, end=12)}, data=12),
    "a shape that wraps to 0 bytes": safetensors({NAME: tensor((1 << 62, 4), end=0)}),
    "a pickle in its place": pickle.dumps({NAME: 1}),
}


@pytest.mark.parametrize("forged", FORGED_HEADERS)
def test_a_forged_header_is_refused_by_the_name_of_its_file(saved_model, tmp_path, forged):
    """Of a model, and of a checkpoint whose manifest has the digest of the forged file."""
    folder = shutil.copytree(saved_model, tmp_path / "model")
    (folder / "model.safetensors").write_bytes(FORGED_HEADERS[forged])
    with pytest.raises(ValueError, match=r"^\S+/model\.safetensors cannot be read: .*\. Download it again\.$"):
        load(folder)
    (tmp_path / "states-00000-000.safetensors").write_bytes(FORGED_HEADERS[forged])
    states = {"weight": torch.zeros(2)}
    write_index(tmp_path, [{"states-00000-000.safetensors": {NAME: [0, 2]}}], {"weight": False}, {NAME: [2]})
    with pytest.raises(CheckpointError, match=r"states-00000-000\.safetensors is damaged: "):
        StateReader(tmp_path, {NAME: [2]}).fill(ParameterShard(name=NAME, shape=(2,), start=0, states=states))


def test_tags_of_yaml_make_no_objects(refusal, tmp_path):
    """In the file of flags; the card of a data set is not read."""
    text = f"run_name: !!python/object/apply:os.system ['touch {tmp_path}/marker']\n"
    (tmp_path / "run.yaml").write_text(text)
    error = refusal("--config", f"{tmp_path}/run.yaml")
    assert "run.yaml cannot be read as YAML: could not determine a constructor for the tag" in error
    path = write_lines(tmp_path / "data" / "train.jsonl", [{"text": "a b"}])
    (tmp_path / "data" / "README.md").write_text(f"---\n{text}---\n")
    assert len(load_records(str(Path(path).parent))) == 1
    assert not (tmp_path / "marker").exists()


# What files unpack to


def test_the_limits_are_those_of_the_page():
    """Other tests lower them, so that they need neither gigabytes nor minutes."""
    gib, million = 1 << 30, 10**6
    sizes = [errors.RECORD_BYTES, json_records._ARRAY_BYTES, errors.GROUP_MEMORY_BYTES]
    assert sizes == [256 * MIB, gib, 8 * gib]
    assert (json_records._NESTED, errors.UNPACKED_TIMES, files._ROWS_AT_A_TIME) == (100, 1000, 256)
    assert encoders._BYTES_AT_A_TIME // million == 1
    for characters in (0, million, 5 * million):
        assert Bounds.of_text(characters) == Bounds(30 + 50 * characters / million, 2 * gib + 512 * characters)
    assert config_file.BOUNDS == model_files.BOUNDS == errors.RECORD_BOUNDS == Bounds(seconds=120, memory_bytes=4 * gib)
    assert model_files._MOST_IN_A_BUFFER == 2**28


WRITE = """
import sys, pyarrow as pa, pyarrow.parquet as pq
text = pa.table({"text": pa.DictionaryArray.from_arrays(pa.array([0] * 256), ["a" * (8 << 20)])})
pq.write_table(text, sys.argv[1], compression="zstd", store_schema=False)
"""


def test_compressed_files_are_bounded_by_what_they_unpack_to(tmp_path, monkeypatch):
    """2 GiB in one row group, written by another process; Arrow may have set 1 GiB of this one's memory aside."""
    path = tmp_path / "data.parquet"
    subprocess.run([sys.executable, "-c", WRITE, path], check=True)
    assert path.stat().st_size < MIB
    monkeypatch.setattr(errors, "GROUP_MEMORY_BYTES", 100 * MIB)
    with pytest.raises(DataError, match=r"data\.parquet: a row group or .* size of more than 100 MiB, the limit"):
        load_records(str(path))


def test_a_row_group_that_states_too_large_a_size_is_refused(tmp_path, monkeypatch):
    """Before any of it is unpacked."""
    pq.write_table(pa.table({"text": ["a" * MIB] * 3}), tmp_path / "data.parquet", use_dictionary=False)
    monkeypatch.setattr(files, "GROUP_MEMORY_BYTES", 2 * MIB)
    for read in (load_records, stream_records):
        with pytest.raises(
            DataError, match=r"data\.parquet: a row group or record batch with an unpacked size of more"
        ):
            read(str(tmp_path / "data.parquet"))


def many_batches(path):
    """40 MiB of texts in batches of 1 MiB, each of which takes some hundred bytes."""
    batch = pa.record_batch({"text": ["a" * 4096] * 256})
    options = {"compression": "zstd", "write_statistics": False}
    if path.suffix == ".arrow":
        options = {"options": pa.ipc.IpcWriteOptions(compression="zstd")}
    write_table(path, pa.Table.from_batches([batch] * 40), 256, **options)


@pytest.mark.parametrize("name", ["data.parquet", "file.arrow", "data.arrow", "saved"])
def test_data_are_bounded_by_what_they_unpack_to_together(tmp_path, monkeypatch, name):
    """No file is left in the cache, and the first records are read without unpacking the rest, as --dry_run needs."""
    path = file = tmp_path / name
    if name == "saved":
        Dataset.from_dict({"text": ["a"]}).save_to_disk(path)
        (file,) = path.glob("*.arrow")
    many_batches(file)
    monkeypatch.setattr(errors, "GROUP_MEMORY_BYTES", 16 * MIB)
    large = "records with an unpacked size of more than .* MiB, the limit. That is over 1,000 times"
    with pytest.raises(DataError, match=rf"{file.name}: {large}"):
        load_records(str(path))
    assert not list((tmp_path / "cache").rglob("*records-*"))
    if name == "saved":
        return
    unpacked = []

    def counted(batches):
        for batch in errors.within_memory(batches):
            unpacked.append(batch)
            yield batch

    monkeypatch.setattr("longctx.data.files.within_memory", counted)
    records = stream_records(str(path))
    assert len(list(islice(records, 256))) == 256
    assert len(unpacked) <= 2  # of Arrow, the first one twice: it shows that there are records
    with pytest.raises(DataError, match=rf"{file.name}: {large}"):
        list(records)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"text": "a"}\n{"text": %s}\n', ":2"),
        pytest.param('[{"text": "a"},\n{"text": %s}]', r", record 1 \(counted from 0\)", marks=pytest.mark.long),
        ('{"text": %s}\n', ":1"),
    ],
    ids=["lines", "array", "first"],
)
def test_json_is_bounded_by_what_it_unpacks_to(tmp_path, monkeypatch, text, place):
    """36 MiB of empty lists are 800 MiB of objects: more than a process has free when it is forked from a test's."""
    path = tmp_path / "data.json"
    path.write_text(text % f"[{','.join(['[]'] * (12 * MIB))}]")
    monkeypatch.setattr("longctx.data.json_records.RECORD_BOUNDS", Bounds(seconds=30, memory_bytes=16 * MIB))
    with pytest.raises(DataError, match=rf"data\.json{place}: the record cannot be read: .* 16 MiB of memory"):
        load_records(str(path))


@pytest.mark.long
def test_records_that_are_too_large_together_are_parsed_one_by_one(tmp_path, monkeypatch):
    path = tmp_path / "data.json"
    record = {"text": "a", "extra": [[]] * 20_000}
    path.write_text(json.dumps([record] * 40))
    monkeypatch.setattr("longctx.data.json_records.RECORD_BOUNDS", Bounds(seconds=30, memory_bytes=16 * MIB))
    assert len(load_records(str(path))) == 40


# Messages


def test_control_characters_are_escaped(refusal, tmp_path):
    """In the name of a file, and in a key of JSON; the message stays one line."""
    name = "\x1b]0;owned\x07\nlongctx: done \u202e.jsonl"
    error = refusal("--model_name_or_path", "tiny", "--dataset_name", str(tmp_path / name))
    assert r"\x1b]0;owned\x07 longctx: done \u202e.jsonl" in error
    (tmp_path / "data.jsonl").write_text(json.dumps({"\x1b[2J": 1}))
    error = refusal("--model_name_or_path", "tiny", "--dataset_name", str(tmp_path / "data.jsonl"))
    assert not {character for character in error if not character.isprintable()} - {"\n"}
    assert error.count("\n") == 1

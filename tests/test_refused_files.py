"""Files that are damaged, or that cannot be used, are refused by name: see tests/refusals.tsv."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Features, IterableDataset, Value
from transformers import LlamaConfig, LlamaForCausalLM

from longctx.data import DocumentStream, load_records, stdlib_files, tokenize_records
from longctx.data.encoders import TextEncoder
from longctx.forecast.documents import drawn_from
from longctx.model.load import load_config, load_model
from longctx.model.tiny import tiny_tokenizer
from longctx.settings.launcher import read_profile
from longctx.training.checkpoint.files import Manifest, read_manifest, write_manifest
from longctx.training.checkpoint.storage import StateReader
from longctx.training.dataset import read_template
from tests.data.tables import table_bytes
from tests.training.test_key_fields import identity


def write(path, text):
    path.write_text(text)
    return str(path)


CHATS = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}


def test_manifests_and_states_that_are_damaged_are_named(tmp_path):
    whole = Manifest(step=1, layout={}, optimization={}, parameters={}, data={}, progress={})
    for name in ("step", "layout", "optimization", "parameters", "data", "progress", "files"):
        write_manifest(tmp_path, replace(whole, **{name: "x"}))
        with pytest.raises(ValueError, match=f"{name} is 'x', expected"):
            read_manifest(tmp_path)
    for known in ({"bytes": "1", "xxh3": "00"}, {"bytes": 1, "xxh3": 0}):
        write_manifest(tmp_path, replace(whole, files={"a": known}))
        with pytest.raises(ValueError, match="of a is"):
            read_manifest(tmp_path)
    (tmp_path / "index.json").write_text("no index")
    with pytest.raises(ValueError, match=r"index.json is damaged: Expecting value"):
        StateReader(tmp_path, {})


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (CHATS | {"tools": "no JSON"}, "'tools' is not JSON"),
        (CHATS | {"chat_template_kwargs": "x"}, "'chat_template_kwargs' is 'x'"),
        (CHATS | {"chat_template_kwargs": {"truncation": True}}, "sets truncation, which would replace"),
    ],
)
def test_conversations_that_a_template_cannot_render_are_named(record, words, tmp_path):
    path = write(tmp_path / "data.jsonl", json.dumps(record) + "\n")
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(ValueError, match=words):
        tokenize_records(load_records(path), tiny_tokenizer(), chat_template=template)


def test_records_beyond_a_bound_are_named(tmp_path, monkeypatch):
    """The test lowers the bounds, so that it needs no files of several gigabytes."""
    monkeypatch.setattr("longctx.data.json_records.RECORD_BYTES", 20)
    monkeypatch.setattr("longctx.data.json_records._ARRAY_BYTES", 20)
    monkeypatch.setattr("longctx.data.files.RECORD_BYTES", 20)
    for name, text in {"a.jsonl": '{"text": "%s"}\n', "a.json": '[{"text": "%s"}]', "a.txt": "%s"}.items():
        path = write(tmp_path / name, text % ("x" * 30))
        with pytest.raises(ValueError, match=r"of more than .* the limit"):
            load_records(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[\n{"text": "a"},\n{"text": }\n]', ", record 1 (counted from 0): malformed JSON (Expecting value"),
        ('[{"text": "a"} {"text": "b"}]', ", record 1 (counted from 0): malformed JSON: ' {"),
        ('[{"text": "a"}] 2', ", record 1 (counted from 0): malformed JSON: '] 2'"),
        ('[{"text": "a"},]', ", record 1 (counted from 0): malformed JSON: ',]'"),
        ('[{"text": "a"}, 3]', ", record 1 (counted from 0): malformed JSON: ', 3]'"),
        ('[{"text": "a"}, {"text": "]"}', ", record 2 (counted from 0): malformed JSON: ''"),
        ('[{"text": "a"}, {"text": "b}]', ", record 1 (counted from 0): malformed JSON"),
        ('[{"text": "a"}, {"te": [}]}]', ", record 2 (counted from 0): malformed JSON: '}]'"),
        ('[{"text": "a"}, {"text": "\\ud83d"}]', ", record 1 (counted from 0): the escape \\ud83d is half"),
        (
            '[{"text": "a"}, ' + "[" * 9_000 + "]" * 9_000 + "]",
            ", record 1 (counted from 0): lists and objects are nested more than 100",
        ),
    ],
)
def test_arrays_of_json_are_named_with_the_record(text, words, tmp_path):
    path = write(tmp_path / "a.json", text)
    with pytest.raises(ValueError, match=re.escape(path + words)):
        load_records(path)


def test_columns_of_one_name_are_named(tmp_path):
    table, path = pa.Table.from_arrays([pa.array(["a"])] * 2, names=["text", "text"]), tmp_path / "data.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(ValueError, match=r"data.arrow: not a readable arrow file \(it has two columns .* 'text'"):
        load_records(str(path))


@pytest.mark.parametrize(("change", "words"), [(lambda b: b + b, "bytes follow the end"), (lambda b: b[:-8], "no end")])
def test_arrow_streams_that_are_not_whole_are_named(change, words, tmp_path):
    table, path = pa.table({"text": ["a", "b"]}), tmp_path / "data.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=words):
        load_records(str(path))


def test_a_parquet_file_of_other_rows_than_it_states_is_named(tmp_path):
    """Each byte in turn is set to 0. Some of these files pyarrow reads without an error, with other rows than 7."""
    whole, believed = table_bytes(pa.table({"text": [f"document {number}" for number in range(7)]}), ".parquet"), 0
    for at in range(len(whole)):
        path = tmp_path / f"{at}.parquet"
        path.write_bytes(whole[:at] + b"\0" + whole[at + 1 :])
        try:
            rows = sum(batch.num_rows for batch in pq.ParquetFile(path).iter_batches())
        except Exception:  # damage that pyarrow notices itself, by errors of many types
            continue
        if rows != 7:
            believed += 1
            with pytest.raises(ValueError, match=f"{at}.parquet: not a readable parquet file"):
                load_records(str(path))
    assert believed


def test_a_slice_without_records_is_named(tmp_path):
    path = write(tmp_path / "data.jsonl", '{"text": "a"}\n')
    with pytest.raises(ValueError, match=r"'train\[:0\]'.*0 records"):
        load_records(path, split="train[:0]")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "config.json holds a list|cannot be used|neither a folder"),
        (
            '{"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4}',
            "contradicts itself|not divisible|multiple",
        ),
        ('{"model_type": "llama", "rope_parameters": 5}', "cannot be used|expected"),
        ('{"model_type": ["llama"]}', "cannot be used"),
    ],
)
def test_configurations_that_cannot_be_used_are_named(content, words, tmp_path):
    write(tmp_path / "config.json", content)
    with pytest.raises(ValueError, match=words):
        load_config(str(tmp_path))


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("[]", "is not an index of weights"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "not a file in its folder"),
        ('{"weight_map": {"a": "missing.safetensors"}}', "is missing. Complete the folder"),
        ('{"weight_map": {"a": "broken.safetensors"}}', r"broken.safetensors cannot be read"),
    ],
)
def test_weights_that_an_index_does_not_name_are_refused(index, words, tmp_path):
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
    config.architectures = [LlamaForCausalLM.__name__]
    config.save_pretrained(tmp_path)
    write(tmp_path / "model.safetensors.index.json", index)
    write(tmp_path / "broken.safetensors", "no tensors")
    with pytest.raises(ValueError, match=words):
        load_model(str(tmp_path), load_config(str(tmp_path)))


def test_histograms_and_templates_that_cannot_be_read_are_named(tmp_path):
    for text, words in (("low,high\n1,2\n", "not a CSV"), ("low,high,documents\n0,2,3\n", "no document of at least 1")):
        with pytest.raises(ValueError, match=words):
            drawn_from(Path(write(tmp_path / "lengths.csv", text)))
    (tmp_path / "template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"template.jinja cannot be read"):
        read_template(str(tmp_path / "template.jinja"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "zero.json cannot be read as JSON"),
        ("[]", "zero.json cannot be read as JSON .it is '\\[\\]', expected an object"),
        ('{"zero_optimization": 3}', "zero_optimization 3 in deepspeed_config_file .*zero.json is not supported"),
    ],
)
def test_deepspeed_configurations_that_are_none_are_named(text, words, tmp_path):
    path = write(tmp_path / "zero.json", text)
    environment = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": path, "WORLD_SIZE": "1"}
    with pytest.raises(ValueError, match=words):
        read_profile(environment | {"RANK": "0", "ACCELERATE_MIXED_PRECISION": "no"})


def test_data_that_leaves_nothing_is_named(tmp_path, monkeypatch):
    """No record in a stream, no standard library, no sequence to evaluate on, no column of the name that is given."""
    features = Features({"text": Value("string")})
    empty = IterableDataset.from_generator(lambda: iter(()), features=features)
    with pytest.raises(ValueError, match="the stream"):
        list(DocumentStream(empty, TextEncoder(tiny_tokenizer(), "text", False)).tables())
    write(tmp_path / "train.jsonl", '{"text": "a"}\n')
    write(tmp_path / "test.jsonl", '{"text": "longer than a row"}\n')
    flags = {"dataset_name": str(tmp_path), "max_length": "4", "overlong": "drop", "dataset_test_split": "test"}
    with pytest.raises(ValueError, match=r"--dataset_test_split test .* leaves no sequence to evaluate on"):
        identity({}, flags | {"eval_strategy": "steps", "eval_steps": "1"})
    name = str(tmp_path / "train.jsonl")
    stream = {"dataset_name": name, "dataset_streaming": "True", "max_steps": "3", "completion_only_loss": "True"}
    with pytest.raises(ValueError, match=r"train.jsonl: completion_only_loss=True needs records with 'prompt'"):
        identity({}, stream)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match=r"no \.py files under"):
        stdlib_files()

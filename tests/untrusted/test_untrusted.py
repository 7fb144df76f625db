"""Data, configurations, templates and tokenizers that are made to crash, hang or deceive: see docs/security.md."""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from longctx.data import DataError, load_records, stream_records, tokenize_records, tokenize_stream
from longctx.data.contents import cache_folder
from longctx.model.files import without_weights
from longctx.model.load import load_config, load_model, load_tokenizer, take_chat_template
from longctx.model.tiny import tiny_config, tiny_tokenizer
from longctx.untrusted import confined
from longctx.untrusted.confined import Bounds, Confined, OutOfBounds
from tests.data.tables import write_table
from tests.jsonl import write_lines


@pytest.fixture
def one_second(monkeypatch):
    """Bounds that tests can wait for, and a machine where memory ends early. The kernel counts whole seconds."""
    monkeypatch.setattr(confined, "SECONDS", 0.9)
    monkeypatch.setattr(confined, "_SECONDS_PER_CHARACTER", 0.0)
    monkeypatch.setattr(confined, "MEMORY_BYTES", 1 << 29)


def change(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# Arrow


def forge_offsets(path: Path, *offsets: int) -> None:
    """Replace where the texts of TABLE begin and end."""
    data = path.read_bytes()
    assert data.count(OFFSETS) == 1
    path.write_bytes(data.replace(OFFSETS, struct.pack("<iii", *offsets)))


OFFSETS = struct.pack("<iii", 0, 777, 1554)
TABLE = pa.table({"text": ["a" * 777, "b" * 777]})


@pytest.mark.parametrize("offsets", [(0, 777, 2**31 - 1), (0, -500_000_000, 1554), (0, 1554, 777)])
def test_forged_offsets_are_refused(tmp_path, offsets):
    """They crashed the process, or put its memory into the tokens."""
    datasets.Dataset(TABLE).save_to_disk(str(tmp_path / "saved"))
    write_table(tmp_path / "data.arrow", TABLE)
    forge_offsets(tmp_path / "saved" / "data-00000-of-00001.arrow", *offsets)
    forge_offsets(tmp_path / "data.arrow", *offsets)
    for place in ("saved", "data.arrow"):
        with pytest.raises(DataError, match=r"not (a )?readable .*[Oo]ffset"):
            load_records(str(tmp_path / place))
        with pytest.raises(DataError, match=r"not (a )?readable .*[Oo]ffset"):
            list(tokenize_stream(stream_records(str(tmp_path / place)), tiny_tokenizer()))


def test_a_cache_beside_the_data_is_not_read(tmp_path):
    """It would be taken for the tokens, past the check of the vocabulary."""
    folder = tmp_path / "saved"
    datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]]}).save_to_disk(str(folder))
    expected = tokenize_records(load_records(str(folder)), tiny_tokenizer(), vocab_size=10)
    (ours,) = cache_folder().glob("tokens-*.arrow")
    features = datasets.Features(input_ids=datasets.List(datasets.Value("int32")))
    forged = datasets.Dataset.from_dict({"input_ids": [[999_999]]}, features=features)
    write_table(folder / f"cache-{ours.stem.removeprefix('tokens-')}.arrow", forged.data.table)
    ours.unlink()
    found = tokenize_records(load_records(str(folder)), tiny_tokenizer(), vocab_size=10)
    assert found["input_ids"] == expected["input_ids"] == [[1, 2, 3]]
    assert {Path(file["filename"]).parent for file in found.cache_files} == {cache_folder()}
    assert len(list(folder.iterdir())) == 4  # nothing is written there either


def test_a_saved_folder_does_not_choose_its_fingerprint_or_format(tmp_path):
    """A fingerprint that is copied from another data set would bring that one's tokens, or leave ours to it."""
    for name, text in {"one": "a b", "two": "c d e"}.items():
        datasets.Dataset.from_dict({"text": [text]}).save_to_disk(str(tmp_path / name))
        change(tmp_path / name / "state.json", _fingerprint="0" * 16, _format_type="numpy", _format_columns=["text"])
    one, two = (load_records(str(tmp_path / name)) for name in ("one", "two"))
    assert one.format["type"] is None
    tokens = [tokenize_records(records, tiny_tokenizer())["input_ids"][0] for records in (one, two)]
    assert [len(ids) for ids in tokens] == [4, 6]


@pytest.mark.parametrize("name", ["../one", "..", "", "/tmp"])
def test_a_saved_dictionary_names_its_own_folders(tmp_path, name):
    datasets.Dataset.from_dict({"text": ["a b"]}).save_to_disk(str(tmp_path / "one"))
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "dataset_dict.json").write_text(json.dumps({"splits": [name]}))
    with pytest.raises(DataError, match=r"names .*, outside its folder"):
        load_records(str(tmp_path / "all"))


def test_features_that_open_files_are_refused(tmp_path):
    """An image is a path or an address, which `datasets` opens when a record is read."""
    chats = [[{"role": "user", "content": {"bytes": None, "path": "/etc/hostname"}}]]
    features = datasets.Features(
        messages=datasets.List({"role": datasets.Value("string"), "content": datasets.Image()})
    )
    table = datasets.Dataset.from_dict({"messages": chats}, features=features)
    table.save_to_disk(str(tmp_path / "saved"))
    table.to_parquet(str(tmp_path / "data.parquet"))
    for place in ("saved", "data.parquet"):
        for read in (load_records, stream_records):
            tokenize = tokenize_records if read is load_records else tokenize_stream
            with pytest.raises(DataError, match=r"column 'messages' holds the type Image"):
                tokenize(read(str(tmp_path / place)), tiny_tokenizer())


@pytest.mark.parametrize("name", ["{}/texts", "{}/texts/*.txt", "{}/*/*"])
def test_texts_that_are_links_out_of_their_folder_are_refused(tmp_path, name):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a b")
    (tmp_path / "texts" / "b.txt").symlink_to("a.txt")
    assert len(load_records(str(tmp_path / "texts"))) == 2
    (tmp_path / "texts" / "c.txt").symlink_to("/etc/passwd")
    with pytest.raises(DataError, match=r"c\.txt is a link to /etc/passwd, outside .*Copy the file"):
        load_records(name.format(tmp_path))


# Configurations


@pytest.mark.parametrize("place", [lambda part: {"text_config": part}, lambda part: {"parts": [{"deep": [part]}]}])
@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"quantization_config": {"quant_method": "torchao"}}, "has a quantization_config"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "has a compression_config"),
        ({"fusion_config": {"rms_norm": True}}, "has a fusion_config"),
        ({"transformers_weights": "../../x.safetensors.index.json"}, "has a transformers_weights"),
        ({"configuration_files": ["config.4.0.0/../../x.json"]}, "has a configuration_files"),
        ({"num_labels": 2_000_000_000}, "sets num_labels to 2,000,000,000; expected .* to 65,536"),
        ({"num_experts": 10**8}, "sets num_experts to 100,000,000"),
        ({"layer_sizes": [1, 10**12]}, "sets layer_sizes to 1,000,000,000,000"),
    ],
)
def test_parts_of_a_configuration_at_any_depth(folder, part, message, place):
    for values in (part, place(part)):
        change(folder / "config.json", **values)
        with pytest.raises(ValueError, match=message):
            load_config(str(folder))


def test_what_a_configuration_takes_is_bounded(folder, monkeypatch):
    """By the process that makes it first, whatever the key is called: here one that nobody has thought of."""
    monkeypatch.setattr("longctx.model.config_file.MOST_LABELS", 1 << 31)
    monkeypatch.setattr("longctx.model.config_file.BOUNDS", Bounds(seconds=60, memory_bytes=1 << 26))
    change(folder / "config.json", num_labels=5_000_000)
    with pytest.raises(ValueError, match=r"config.json cannot be used: it asked for more than 64 MiB of memory"):
        load_config(str(folder))


def test_what_a_model_takes_before_its_weights_is_bounded(monkeypatch):
    monkeypatch.setattr("longctx.model.files.BOUNDS", Bounds(seconds=1, memory_bytes=1 << 27))
    config = tiny_config()
    config.update({"num_hidden_layers": 50_000, "layer_types": ["full_attention"] * 50_000})
    with pytest.raises(ValueError, match=r"no model can be made of its config\.json: it (ran for|asked for) more than"):
        without_weights(config)


@pytest.mark.parametrize("depth", [100, 400, 900, 100_000])
def test_nests_end_in_a_message(folder, tmp_path, depth):
    nest = "[" * depth + '{"quantization_config": 1}' + "]" * depth
    path = folder / "config.json"
    path.write_text(path.read_text().replace("{", '{"deep": ' + nest + ",", 1))
    with pytest.raises(ValueError, match="has a quantization_config" if depth < 500 else "config.json"):
        load_config(str(folder))
    (tmp_path / "data.jsonl").write_text('{"messages": [{"role": "user", "content": ' + nest + "}]}")
    with pytest.raises(DataError, match=r"data\.jsonl|record 0 "):
        tokenize_records(
            load_records(str(tmp_path / "data.jsonl")), tiny_tokenizer(), chat_template="{{ messages + 1 }}"
        )


def test_a_large_configuration_file_is_not_read(folder):
    with (folder / "config.json").open("a") as file:
        file.write(" " * (17 << 20))
    with pytest.raises(ValueError, match=r"config\.json has [\d,]+ bytes, and the limit for config\.json is 16 MiB"):
        load_config(str(folder))


@pytest.mark.parametrize("key", ["AutoConfig", "AutoModel", "AutoModelForCausalLM"])
def test_a_models_own_code_is_refused_before_it_runs(folder, tmp_path, key):
    marker = tmp_path / "marker"
    code = f"open({str(marker)!r}, 'w')\nfrom transformers import Qwen3Config\nclass Evil(Qwen3Config): pass\n"
    (folder / "evil.py").write_text(code)
    change(folder / "config.json", auto_map={key: "evil.Evil"})
    with pytest.raises(ValueError, match=r"--trust_remote_code True would run the model's code"):
        load_config(str(folder), trust_remote_code=True)
    load_model(str(folder), load_config(str(folder)))  # without the flag, transformers' own code is used
    assert not marker.exists()


def test_links_out_of_a_models_folder_are_refused(folder, saved_model, tmp_path):
    (tmp_path / "secret").write_text("{{ 'the secret' }}")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(saved_model / "model.safetensors")  # weights may lie elsewhere
    assert load_model(str(folder), load_config(str(folder))) is not None
    for name in ("chat_template.jinja", "tokenizer_config.json", "additional_chat_templates/more.jinja"):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        kept = path.read_bytes() if path.exists() else None
        path.unlink(missing_ok=True)
        path.symlink_to(tmp_path / "secret")
        for load in (load_config, load_tokenizer, lambda name: take_chat_template(tiny_tokenizer(), name)):
            with pytest.raises(ValueError, match=rf"{path.name} is a link to {tmp_path}/secret, outside the folder"):
                load(str(folder))
        path.unlink()
        if kept is not None:
            path.write_bytes(kept)
    load_tokenizer(str(folder))


def test_a_folder_of_the_hubs_cache_is_made_of_links(saved_model, tmp_path):
    repository = tmp_path / "models--someone--model"
    snapshot = repository / "snapshots" / "1234"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, file in enumerate(sorted(saved_model.iterdir())):
        shutil.copy(file, repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    load_tokenizer(str(snapshot))
    assert load_model(str(snapshot), load_config(str(snapshot))) is not None


@pytest.mark.parametrize(
    "values",
    [
        {"fast_tokenizer_files": ["../tokenizer.4.0.0.json"]},
        {"chat_template": [{"name": "../tokenizer.4.0.0.json", "template": "x"}]},
    ],
)
def test_a_tokenizer_config_names_files_of_its_folder(folder, tmp_path, values):
    shutil.copy(folder / "tokenizer.json", tmp_path / "tokenizer.4.0.0.json")
    change(folder / "tokenizer_config.json", **values)
    with pytest.raises(
        ValueError, match=r"names the file '\.\./tokenizer\.4\.0\.0\.json', which is not a file in its folder"
    ):
        load_tokenizer(str(folder))


# Templates and tokenizers

MESSAGES = [{"role": "user", "content": "b" * 1000}, {"role": "assistant", "content": "c"}]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


RFIND = "{% set t = 'b' * 20000000 %}{% for i in range(999) %}{{ (t ~ 'a' ~ t).rfind('a' ~ t ~ 'a') }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (ENDLESS, "it ran for more than 1 s of CPU time"),
        (RFIND, "it ran for more than 1 s of CPU time"),
        ("{{ 'a' * 99999999999 }}", "it asked for more than 512 MiB of memory"),
        ("{{ messages[0]['content'] * 120000 }}", "it (ran|asked) for more than"),  # 120 MB of text
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[0]['content'].__init__.__globals__ }}", "unsafe"),
        ("{{ '{0.__class__.__mro__}'.format('') }}", "unsafe"),
        ("{{ messages[0].update({'content': 'x'}) }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader for this environment"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "maximum recursion depth"),
    ],
)
def test_templates_come_to_an_end_and_reach_nothing(tmp_path, one_second, template, message):
    path, place = write_lines(tmp_path / "data.jsonl", [{"messages": MESSAGES}]), r"(record 0 |cannot be rendered: ).*"
    with pytest.raises(DataError, match=place + message):
        tokenize_records(load_records(path), tiny_tokenizer(), chat_template=template)
    if template == ENDLESS:
        with pytest.raises(DataError, match=place + message):
            list(tokenize_stream(stream_records(path), tiny_tokenizer(), chat_template=template))


def test_a_loop_in_the_generation_block_comes_to_an_end(tmp_path, one_second):
    """It is rendered once more for the assistant's tokens, and first by TRL's check of the template."""
    path = write_lines(tmp_path / "data.jsonl", [{"messages": MESSAGES}])
    template = "{% generation %}" + ENDLESS + "{% endgeneration %}"
    with pytest.raises(DataError, match=r"the chat template cannot be rendered: it ran for more than"):
        tokenize_records(load_records(path), tiny_tokenizer(), chat_template=template, assistant_only_loss=True)
    template = "{% generation %}{% if 'b' in messages[0]['content'] %}" + ENDLESS + "{% endif %}x{% endgeneration %}"
    with pytest.raises(DataError, match=r"record 0 .*it ran for more than"):
        tokenize_records(load_records(path), tiny_tokenizer(), chat_template=template, assistant_only_loss=True)


def tokenizer(normalizer=None, pre_tokenizer=None) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE({"a": 0, "b": 1, "</s>": 2}, []))
    if normalizer is not None:
        made.normalizer = normalizer
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", pad_token="</s>")


EXPLODES = tokenizer(normalizers.Sequence([normalizers.Replace("b", "b" * 1000)] * 4))
BACKTRACKS = tokenizer(None, pre_tokenizers.Split(Regex("(b+)+$"), "isolated"))
SLOW = ("b" * 18 + "a") * 5000  # backtracks through half a million ways at each of 5,000 places


@pytest.mark.long
@pytest.mark.parametrize(
    ("made", "text", "message"),
    [
        (EXPLODES, "b", "it (asked|ran) for more than"),
        (BACKTRACKS, SLOW, "it ran for more than 1 s of CPU time"),
        (BACKTRACKS, "b" * 40 + "a", "it failed .PanicException: Onig: Regex search error"),
    ],
)
def test_tokenizers_come_to_an_end_and_the_record_is_named(tmp_path, one_second, made, text, message):
    """Among records that it can encode."""
    path = write_lines(tmp_path / "data.jsonl", [{"text": each} for each in ("a", "a", "a", text, "a")])
    with pytest.raises(DataError, match=rf"record 3 .*the tokenizer cannot encode it: {message}"):
        tokenize_records(load_records(path), made)
    if "failed" in message:
        with pytest.raises(DataError, match=rf"data.jsonl:4: the tokenizer cannot encode it: {message}"):
            list(tokenize_stream(stream_records(path), made, place=lambda record: f"data.jsonl:{record + 1}"))


def test_a_tokenizer_in_worker_processes_comes_to_an_end(tmp_path, one_second):
    path = write_lines(tmp_path / "data.jsonl", [{"text": text} for text in ("a", "a", "b" * 40 + "a", "a")])
    with pytest.raises(DataError, match=r"record 2 .*it failed"):
        tokenize_records(load_records(path), BACKTRACKS, num_proc=2)


def test_a_tokenizer_that_panics_is_refused(folder, monkeypatch):
    """Rust's panics are none of Python's exceptions, and went past every `except Exception`."""
    values = json.loads((folder / "tokenizer.json").read_text())
    values["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "/////w=="}
    (folder / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"has no tokenizer that can be loaded.*it .*failed .(PanicException|SIGABRT)"):
        load_tokenizer(str(folder))


def test_many_records_in_one_part_are_as_they_are_one_by_one(monkeypatch):
    """Whichever way they are divided between calls, and whether or not one call failed."""
    texts = [f"text {number} " * (number % 7 + 1) for number in range(40)]
    whole = tokenize_records(datasets.Dataset.from_dict({"text": texts}), tiny_tokenizer())["input_ids"]
    monkeypatch.setattr("longctx.data.encoders._BYTES_AT_A_TIME", 50)
    parts = tokenize_records(datasets.Dataset.from_dict({"text": texts}), tiny_tokenizer())["input_ids"]
    assert whole == parts
    assert whole == [tiny_tokenizer()(text + tiny_tokenizer().eos_token)["input_ids"] for text in texts]


def test_a_process_is_not_shared_after_a_fork_and_ends_with_its_owner():
    double = Confined(lambda number: 2 * number)
    assert double.call(Bounds.of_text(0), 4) == 8
    before, pid = double._pid, os.fork()
    if pid == 0:
        os._exit(0 if double.call(Bounds.of_text(0), 5) == 10 and double._pid != before else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert double.call(Bounds.of_text(0), 6) == 12
    assert double._pid == before
    double.close()
    with pytest.raises(ProcessLookupError):
        os.kill(double._pid or 2**22 + 1, 0)


@pytest.mark.parametrize("hanging", [2, 3])
def test_a_process_that_hangs_in_its_fork_is_replaced(monkeypatch, hanging):
    """As CPython's child does where another library's thread was being entered into the interpreter meanwhile."""
    forked, fork = [], os.fork

    def fork_that_hangs():
        pid = fork()
        if pid == 0 and len(forked) < hanging:
            time.sleep(600)
        forked.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", fork_that_hangs)
    monkeypatch.setattr(confined, "_START_SECONDS", (0.2, 0.2, 30.0)[: 5 - hanging])
    if hanging == 2:
        assert confined.confined(lambda: 7, Bounds.of_text(0)) == 7
        assert len(forked) == 3
    else:
        with pytest.raises(OutOfBounds, match="its process did not start in 2 attempts"):
            confined.confined(lambda: 7, Bounds.of_text(0))
    for pid in forked:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_why_a_process_ended_is_said():
    for function, message in {
        lambda: os.abort(): "asked for more than 2,048 MiB of memory, or failed",
        lambda: os.kill(os.getpid(), 11): "it crashed (SIGSEGV)",
        lambda: os._exit(3): "it crashed (exit code 3)",
    }.items():
        with pytest.raises(OutOfBounds) as caught:
            confined.confined(function, Bounds.of_text(0))
        assert message in str(caught.value)
    with pytest.raises(KeyError, match="7"):
        confined.confined(lambda: {}[7], Bounds.of_text(0))

"""What a downloaded model, data set or checkpoint tries, and what is kept to itself: see docs/security.md."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.fuzz.__main__ import main as fuzz
from longctx.data import DataError, load_records, tokenize_records
from longctx.model.config_file import check_config_values
from longctx.model.load import load_config, load_model, load_tokenizer
from longctx.model.tiny import tiny_tokenizer
from longctx.training.checkpoint.files import (
    CheckpointError,
    Manifest,
    check_files,
    describe_files,
    read_manifest,
    write_manifest,
)
from tests.data.tables import write_records
from tests.jsonl import write_lines


class MakesFile:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def change(folder: Path, **values) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def load(folder: Path):
    """As a run does."""
    config = load_config(str(folder))
    load_tokenizer(str(folder))
    return load_model(str(folder), config)


# Code


def as_pickle(folder: Path, extra: dict) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights | extra, folder / "pytorch_model.bin")


def test_a_pickle_of_tensors_is_read_and_nothing_else_in_it(folder, tmp_path):
    as_pickle(folder, {})
    before = {name: value.clone() for name, value in load(folder).state_dict().items()}
    assert before.keys() >= {"model.embed_tokens.weight"}
    torch.save({**before, "x": MakesFile(tmp_path / "marker")}, folder / "pytorch_model.bin")
    with pytest.raises(
        ValueError, match=r"pytorch_model.bin is damaged or holds more than tensors.*model\.safetensors"
    ):
        load(folder)
    assert not (tmp_path / "marker").exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)  # it would have
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("values", [{}, {"model_type": "evil"}])
def test_code_of_a_folder_does_not_run(folder, tmp_path, values):
    marker = tmp_path / "marker"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    change(folder, auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}, **values)
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer |= {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    if values:  # transformers has no code of its own for it
        with pytest.raises(ValueError, match=r"trust_remote_code"):
            load(folder)
    else:
        load(folder)
    assert not marker.exists()


@pytest.mark.parametrize("trusted", [False, True])
def test_a_tokenizers_own_code_runs_only_where_it_is_trusted(folder, tmp_path, monkeypatch, trusted):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    marker = tmp_path / "marker"
    code = "from transformers import PreTrainedTokenizerFast\nclass Own(PreTrainedTokenizerFast): pass\n"
    (folder / "own.py").write_text(f"open({str(marker)!r}, 'w')\n{code}")
    values = json.loads((folder / "tokenizer_config.json").read_text())
    values |= {"auto_map": {"AutoTokenizer": [None, "own.Own"]}, "tokenizer_class": "Own"}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    load_config(str(folder), trust_remote_code=trusted)
    assert type(load_tokenizer(str(folder), trust_remote_code=trusted)).__name__ == "Own" or not trusted
    assert marker.exists() == trusted


def test_a_script_beside_data_is_not_run(tmp_path):
    """In the place where `datasets` looked for the script of a data set."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "data.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    (tmp_path / "data" / "train.jsonl").write_text('{"text": "a b"}\n')
    with pytest.raises(DataError, match="mixed formats"):
        load_records(str(tmp_path / "data"))
    assert len(load_records(str(tmp_path / "data" / "*.jsonl"))) == 1
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_kernels_that_a_config_names_are_not_fetched(folder, key):
    change(folder, **{key: "someone/kernel"})
    assert load(folder).config._attn_implementation == "sdpa"


def test_an_adapter_in_a_models_folder_is_refused(folder, tmp_path):
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}))
    torch.save({"x": MakesFile(tmp_path / "marker")}, folder / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"holds an adapter .*longctx export"):
        load(folder)
    assert not (tmp_path / "marker").exists()


# Sizes and paths


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 10**12),
        ("hidden_size", 0),
        ("vocab_size", -5),
        ("num_hidden_layers", 10**9),
        ("num_key_value_heads", 0),
        ("max_position_embeddings", 10**400),
    ],
)
def test_numbers_that_no_model_has_are_refused_by_name(folder, key, value):
    change(folder, **{key: value}, layer_types=None)
    with pytest.raises(ValueError, match=rf"config.json sets {key} to .*; expected 1 to"):
        load_config(str(folder))


@pytest.mark.parametrize(
    ("key", "most"),
    [
        ("max_position_embeddings", 2**31),
        ("n_layers", 4096),
        ("num_local_experts", 4096),
        ("moe_intermediate_size_of_experts", 2**31),
        ("num_labels", 65_536),
    ],
)
def test_numbers_of_a_configuration_end_at_the_limits_of_the_page(key, most):
    for values in ({key: most}, {"parts": [{"deep": [{key: [1, most]}]}]}):
        check_config_values("a model", values)
    for values in ({key: most + 1}, {"parts": [{"deep": [{key: [1, most + 1]}]}]}):
        with pytest.raises(ValueError, match=rf"sets {key} to {most + 1:,}; expected .* to {most:,}\."):
            check_config_values("a model", values)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"save_pretrained": 1}, "save_pretrained"),
        ({"rope_parameters": {"to_dict": {}}}, "to_dict"),
        ({"to_diff_dict": "x"}, "to_diff_dict"),
    ],
)
def test_a_configuration_that_hides_a_function_is_refused(folder, values, key):
    """The model could be trained, and not be saved."""
    change(folder, **values)
    with pytest.raises(ValueError, match=rf"config\.json sets {key}, which is a function"):
        load_config(str(folder))


def test_a_model_larger_than_its_files_takes_no_memory(folder):
    change(folder, hidden_size=200_000, intermediate_size=10**6)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"describes a model of [\d,]{10,} parameters, and its files hold"):
        load(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


def test_a_model_of_up_to_twice_its_files_is_compared_by_its_shapes(folder):
    held = sum(weight.numel() for weight in load_file(folder / "model.safetensors").values())
    hidden = json.loads((folder / "config.json").read_text())["hidden_size"]
    for rows, message in ((held // hidden, "has the shape"), (held // hidden + 1, "describes a model of")):
        change(folder, vocab_size=272 + rows)  # the embeddings are tied to the head
        with pytest.raises(ValueError, match=message):
            load(folder)


def test_a_configuration_of_other_shapes_than_the_files_is_refused_by_name(folder):
    change(folder, intermediate_size=24)
    message = r"mlp\.down_proj\.weight has the shape \[\d+, \d+\] in its files, .* describes \[\d+, 24\], and 2 other"
    with pytest.raises(ValueError, match=message):
        load(folder)


@pytest.mark.parametrize("path", ["../model.safetensors", "{}/model.safetensors", "", 7])
def test_an_index_names_files_of_its_folder_only(saved_model, folder, path):
    path = path.format(saved_model) if isinstance(path, str) else path
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(saved_model / "model.safetensors"), path)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"index\.json names the file .* not a file in its folder"):
        load(folder)


def test_quantised_weights_are_refused(folder):
    change(folder, quantization_config={"quant_method": "torchao"})
    with pytest.raises(ValueError, match=r"quantization_config.*not compared"):
        load_config(str(folder))


def checkpoint(folder: Path, files: dict) -> Path:
    folder.mkdir()
    save_file({"weight|0|w": torch.ones(4)}, folder / "states-00000-000.safetensors")
    known = describe_files(folder, [folder / "states-00000-000.safetensors"]) | files
    parts = {name: {} for name in ("layout", "optimization", "parameters", "data", "progress")}
    write_manifest(folder, Manifest(step=1, files=known, **parts))
    return folder


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../outside", "names ../outside, outside"),
        ("/etc/hostname", "names /etc/hostname, outside"),
        ("a" * 5000, "longctx.json is damaged: .* File name too long"),
        ("a\0b", "longctx.json is damaged: embedded null byte"),
    ],
)
def test_a_manifest_names_files_of_its_folder_only(tmp_path, name, words):
    (tmp_path / "outside").write_text("x")
    folder = checkpoint(tmp_path / "checkpoint-1", {name: {"bytes": 1, "xxh3": "0"}})
    with pytest.raises(CheckpointError, match=words):
        check_files(folder, read_manifest(folder))


def test_a_changed_manifest_and_files_that_it_does_not_know_are_refused(tmp_path):
    folder = checkpoint(tmp_path / "checkpoint-1", {})
    check_files(folder, read_manifest(folder))
    shutil.copy(folder / "states-00000-000.safetensors", folder / "states-00009-000.safetensors")
    with pytest.raises(CheckpointError, match=r"states-00009-000\.safetensors is not of this checkpoint"):
        check_files(folder, read_manifest(folder))
    path = folder / "longctx.json"
    path.write_text(path.read_text().replace('"step": 1', '"step": 2'))
    with pytest.raises(CheckpointError, match=r"longctx.json is damaged: its contents have changed"):
        read_manifest(folder)


# Data


def tokens_of(path: str) -> int:
    return sum(map(len, tokenize_records(load_records(path), tiny_tokenizer(), vocab_size=272)["input_ids"]))


@pytest.mark.long
def test_a_line_of_2_gb_is_refused_in_bounded_memory(tmp_path):
    """The file has a hole, and the process stops reading at the limit; its contents are hashed in small parts."""
    path = tmp_path / "data.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "fine"}\n{"text": "')
        file.truncate(2 << 30)
    script = (
        "import resource, sys; from longctx.data import load_records\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10\n"
        "before = peak()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "try: load_records(sys.argv[1])\n"
        "except ValueError as error: print(error)\n"
        "print(peak() - before)"
    )
    env = os.environ | {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, env=env, check=True)
    message, mebibytes = done.stdout.strip().splitlines()
    assert message.startswith(f"{path}:2: a line of more than 256 MiB")
    assert int(mebibytes) < 1024  # some copies of the line's first 256 MiB


@pytest.mark.parametrize("name", ["pipe.jsonl", "pipe.txt", "pipe.parquet"])
def test_a_pipe_is_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name} is a pipe, expected a regular file"):
        load_records(str(tmp_path / name))
    os.symlink("/dev/zero", tmp_path / "zero.txt")
    with pytest.raises(ValueError, match=r"zero.txt is a device, expected a regular file"):
        load_records(str(tmp_path / "zero.txt"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"attention_mask": [1, 1, 1], "position_ids": [0, 1, 2]}, None),
        ({"attention_mask": [1, 1, 0]}, "'attention_mask' leaves tokens out"),
        ({"position_ids": [0, 1, 0]}, "'position_ids' holds 0 for token 2"),
        ({"position_ids": [0, -1, 2]}, "'position_ids' holds -1 for token 1"),
        ({"position_ids": [0, 2**40, 2]}, "'position_ids' holds 1099511627776"),
        ({"seq_lengths": [1, 2]}, "packed already"),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_masks_and_positions_say_what_is_done_anyway(tmp_path, more, message, suffix):
    path = write_records(tmp_path / f"data{suffix}", [{"input_ids": [1, 2, 3], **more}])
    if message is None:
        assert tokens_of(path) == 3
    else:
        with pytest.raises(DataError, match=message):
            tokens_of(path)


def test_a_saved_folder_names_its_own_files(tmp_path):
    datasets.Dataset.from_dict({"text": ["a b"]}).save_to_disk(str(tmp_path / "data"))
    path = tmp_path / "data" / "state.json"
    state = json.loads(path.read_text())
    (tmp_path / "data" / state["_data_files"][0]["filename"]).rename(tmp_path / "other.arrow")
    state["_data_files"][0]["filename"] = "../other.arrow"
    path.write_text(json.dumps(state))
    with pytest.raises(DataError, match=r"names \.\./other.arrow, outside its folder"):
        load_records(str(tmp_path / "data"))


@pytest.mark.parametrize("name", ["chat_template", "truncation", "max_length"])
def test_a_record_does_not_replace_the_template(tmp_path, name):
    record = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {name: 1}}
    path = write_lines(tmp_path / "data.jsonl", [record])
    with pytest.raises(DataError, match=f"record 0 .*sets {name}, which would replace"):
        tokens_of(path)


# Secrets


@pytest.mark.long
def test_no_secret_is_printed_or_written(tmp_path):
    """Of the environment, or a flag; training_args.bin is a pickle of flags, and lies beside every model."""
    secrets = {
        "HF_TOKEN": "hf_MARKED1",
        "WANDB_API_KEY": "MARKED2",
        "AWS_SECRET_ACCESS_KEY": "MARKED3",
        "https_proxy": "http://user:MARKED4@127.0.0.1:9",
    }
    env = os.environ | secrets | {"HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "one two three"}\n' * 4)
    flags = "--model_name_or_path tiny --use_cpu True --max_steps 1 --max_length 64 --save_steps 1 --output_dir out"
    command = [sys.executable, "-m", "longctx.train", *flags.split(), "--dataset_name", data, "--hub_token", "MARKED5"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, check=True)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"training_args.bin", "longctx.json", "trainer_state.json"} <= {path.name for path in files}
    assert b"MARKED" not in done.stdout + done.stderr
    assert [path for path in files if b"MARKED" in path.read_bytes()] == []


@pytest.mark.long
def test_a_few_damaged_files():
    """More with python -m benchmarks.fuzz."""
    assert fuzz(["--files", "60", "--seed", "5"]) == 0

"""--dry_run: what it finds of data, model, disk and time, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM

from longctx.machine.here import Machine
from longctx.model.load import load_config, load_tokenizer
from longctx.run.preflight import preflight
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from longctx.train import main
from tests.jsonl import write_lines

CHATS = [
    [("user", "What is two and two? " * 20), ("assistant", "four")],
    [("user", "hi"), ("assistant", "hello"), ("user", "bye"), ("assistant", "good bye")],
]


@pytest.fixture
def chats(tmp_path):
    records = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in CHATS]
    return write_lines(tmp_path / "chats.jsonl", records)


def found(data: str, *flags: str, model: str = "tiny") -> dict[str, str]:
    """Return what the preflight says, by its label."""
    arguments = ["--model_name_or_path", model, "--dataset_name", data, *flags]
    run = resolve(parse_flags(arguments), read_profile({}), {})
    lines = [(line.label, line.text(explain=True)) for line in preflight(run)]
    assert len(dict(lines)) == len(lines)
    return dict(lines)


def test_the_first_records_are_read_and_their_mask_is_shown(chats):
    lines = found(chats, "--assistant_only_loss", "True", "--max_length", "2048")
    numbers = r"all 2 documents were read: ([\d,]+) tokens, ([\d,]+) of them \((\d+)%\) trained on, ([\d,]+) in .*"
    count = re.fullmatch(numbers, lines["records"])
    tokens, learnt, percent, longest = (int(number.replace(",", "")) for number in count.groups())
    assert learnt == sum(len(answer) + 1 for answer in ("four", "hello", "good bye"))  # a byte is a token; a turn ends
    assert percent == round(100 * learnt / tokens)
    assert longest > 20 * len("What is two and two? ")
    assert lines["sample"].startswith("⟦<|im_start|>user\\nWhat is two and two?")
    assert "⟧four<|im_end|>⟦" in lines["sample"]
    assert len(lines["sample"]) < 400


@pytest.mark.long
def test_text_is_trained_on_as_a_whole():
    lines = found("stdlib", "--overlong", "split", "--max_length", "4096")
    assert "⟦" not in lines["sample"]
    assert "(100%) trained on" in lines["records"]
    assert re.fullmatch(r"\d+ of these documents have more than --max_length 4,096 tokens: .* split", lines["overlong"])


def test_documents_that_the_run_would_refuse_are_refused(chats, tmp_path, monkeypatch, capsys):
    for name in ("longctx.run.fit", "longctx.run.model.load_model", "longctx.launch.spawn.spawn"):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("it did not stop"))
    flags = ["--model_name_or_path", "tiny", "--dataset_name", chats, "--dry_run", "--use_cpu"]
    flags += ["--sp", "2", "--output_dir", str(tmp_path / "out")]
    assert main([*flags, "--max_length", "2048"]) == 0
    assert not (tmp_path / "out").exists()
    assert main([*flags, "--max_length", "256"]) == 2
    assert "1 of these documents have more than --max_length 256 tokens" in capsys.readouterr().err


def test_data_and_model_that_are_not_there_are_refused(chats, tmp_path, capsys):
    flags = ["--model_name_or_path", "tiny", "--dry_run", "--dataset_name"]
    assert main([*flags, str(tmp_path / "nothing.jsonl")]) == 2
    assert "nothing.jsonl" in capsys.readouterr().err
    (tmp_path / "bad.jsonl").write_text('{"text": "one"}\n{"text": 2}\n')
    assert main([*flags, str(tmp_path / "bad.jsonl")]) == 2
    folder = tmp_path / "model"
    load_config("tiny").save_pretrained(folder)
    load_tokenizer("tiny").save_pretrained(folder)
    with pytest.raises(ValueError, match="has a configuration and no weights"):
        found(chats, "--max_length", "2048", model=str(folder))


@pytest.mark.long
def test_files_and_disk(chats, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    model = AutoModelForCausalLM.from_config(load_config("tiny"))
    model.save_pretrained(folder)
    load_tokenizer("tiny").save_pretrained(folder)
    flags = ("--max_length", "2048", "--output_dir", str(tmp_path / "a" / "b"))
    lines = found(chats, *flags, model=str(folder))
    assert lines["files"] == f"the model's weights are 1 file of 0.0 GB in {folder}"
    size = 12 * model.num_parameters() / 1e6  # weights and AdamW's two moments, in fp32
    assert lines["disk"].startswith(f"a checkpoint takes about {size:.1f} MB, and without --save_total_limit")
    assert f"are free in {tmp_path}" in lines["disk"]
    assert "TOO LITTLE" not in lines["disk"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10_000_000))
    lines = found(chats, *flags, "--save_total_limit", "3", model=str(folder))
    assert f"THIS IS TOO LITTLE for {(4 * 12 + 4) * model.num_parameters() / 1e6:.1f} MB" in lines["disk"]
    alone = found(chats, *flags, "--save_strategy", "no", model=str(folder))["disk"]
    assert alone.startswith(f"the model takes about {size / 3:.1f} MB, and no checkpoints")
    assert "TOO LITTLE" not in alone


def test_a_checkpoint_takes_what_the_preflight_says(chats, tmp_path):
    flags = ["--max_length", "2048", "--output_dir", str(tmp_path / "out"), "--max_steps", "1", "--save_steps", "1"]
    said = float(re.search(r"about ([\d.]+) MB", found(chats, *flags)["disk"])[1])
    assert main(["--model_name_or_path", "tiny", "--dataset_name", chats, "--report_to", "none", *flags]) == 0
    files = [path for path in Path(tmp_path, "out", "checkpoint-1").iterdir() if path.suffix == ".safetensors"]
    written = sum(path.stat().st_size for path in files)
    assert written / 1e6 == pytest.approx(said, rel=0.02)


def test_time_is_predicted_where_speeds_are_known(chats, monkeypatch):
    gpu = Machine.of("NVIDIA H100 80GB HBM3", 1, host_bytes=10**12)
    monkeypatch.setattr(Machine, "here", lambda gpus: gpu)
    monkeypatch.setattr("longctx.settings.resolve.device_count", lambda: 1)
    line = found(chats, "--max_length", "2048", "--max_steps", "500000")["time"]
    parts = re.fullmatch(r"500,000 steps × (\S+) s = (\d+) h (\d+) min \(predicted\)", line)
    seconds, hours, minutes = (float(number) for number in parts.groups())
    assert abs(500_000 * seconds - 3600 * hours - 60 * minutes) < 0.01 * 500_000 * seconds + 60  # three digits
    lines = found(chats, "--max_length", "2048", "--num_train_epochs", "2")
    assert lines["steps"] == "2: 2 epochs of 1 sequence"
    assert re.fullmatch(r"2 steps × \S+ s = \d+ s \(predicted\)", lines["time"])


@pytest.mark.long
def test_the_steps_are_those_that_the_run_then_takes(tmp_path, monkeypatch):
    """Where not all documents are read, it says why, and what counts the steps."""
    data, flags = tmp_path / "data.jsonl", ["--max_length", "64", "--num_train_epochs", "1.5", "--save_strategy", "no"]
    write_lines(data, ({"text": "x" * (1 + 7 * number % 90)} for number in range(40)))
    flags += ["--overlong", "split", "--gradient_accumulation_steps", "3", "--use_cpu", "True"]
    lines = found(str(data), *flags)
    assert lines["records"].startswith("all 40 documents were read: ")
    run = ["--model_name_or_path", "tiny", "--dataset_name", str(data), "--output_dir", str(tmp_path / "out"), *flags]
    assert main([*run, "--report_to", "none"]) == 0
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert re.fullmatch(rf"{state['max_steps']}: 1.5 epochs of \d+ sequences", lines["steps"])
    assert found(str(data), *flags, "--max_steps", "7")["steps"] == "7"
    monkeypatch.setattr("longctx.run.preflight.SAMPLED", 10)
    monkeypatch.setattr("longctx.run.preflight.SAMPLED_TOKENS", 500)
    lines = found(str(data), *flags)
    said = r"the first (\d+) documents were read \(--dry_run reads 10, and more up to 500 tokens\)"
    first = re.match(said, lines["records"])
    assert 10 < int(first[1]) < 40
    assert lines["steps"] == "known once all documents are packed, which --prepare_only does"

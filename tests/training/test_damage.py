"""Files that are damaged or change between two looks at them, and values that longctx never writes: all are named."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from transformers import EarlyStoppingCallback, LlamaConfig

from longctx.data import DataError
from longctx.data.files import _read_text
from longctx.model.config_file import check_tokenizer_files
from longctx.model.files import without_weights
from longctx.model.tied_head import _lazy_tensors
from longctx.training.checkpoint.files import CheckpointError, check_files, read_manifest
from longctx.training.checkpoint.trainer import ResumableMixin
from longctx.untrusted.confined import Bounds, Confined, OutOfBounds
from longctx.untrusted.files import check_file
from tests.training.test_training import COMMON, make_documents, write_jsonl
from tests.workers import call_main


def test_callbacks_of_a_checkpoint():
    counter = {"attributes": {"early_stopping_patience_counter": "many"}}
    trainer = SimpleNamespace(
        callback_handler=SimpleNamespace(callbacks=[EarlyStoppingCallback()]),
        state=SimpleNamespace(stateful_callbacks={"EarlyStoppingCallback": counter}),
    )
    with pytest.raises(TypeError, match="early_stopping_patience_counter is 'many', expected a int"):
        ResumableMixin._restore_callbacks(trainer)


def test_files_of_models(tmp_path, monkeypatch):
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json holds a list"):
        check_tokenizer_files(str(tmp_path), None)
    (tmp_path / "model.safetensors").write_text("no tensors")
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"), ExitStack() as opened:
        _lazy_tensors(tmp_path / "model.safetensors", opened)
    with pytest.raises(ValueError, match=r"x cannot be opened: Not a directory"):
        check_file(tmp_path / "model.safetensors" / "x")
    monkeypatch.setattr("longctx.model.files._MOST_IN_A_BUFFER", 1)
    with pytest.raises(ValueError, match=r"its config\.json: it has a buffer of .* and the limit is 1"):
        without_weights(LlamaConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=8))


def test_text_of_a_missing_file(tmp_path):
    with pytest.raises(DataError, match=r"gone\.txt"):
        _read_text(tmp_path / "gone.txt")


def test_a_process_that_gives_no_answer():
    """It sleeps, which takes no CPU time."""
    with pytest.raises(OutOfBounds, match="it gave no answer within 1 s"):
        Confined(time.sleep).call(Bounds(seconds=0.01, memory_bytes=1 << 30), 60)


# What a run leaves behind

SECRETS = {"HF_TOKEN": "hf_MARKED1", "WANDB_API_KEY": "MARKED2", "AWS_SECRET_ACCESS_KEY": "MARKED3"}
SECRETS |= {"https_proxy": "http://user:MARKED4@127.0.0.1:9"}


@pytest.fixture(scope="module")
def run(models, tmp_path_factory):
    """The output folder of a run with checkpoints of two steps, and what it has printed; secrets were around it."""
    folder = tmp_path_factory.mktemp("run")
    data = write_jsonl(folder / "data.jsonl", make_documents([90, 7, 41, 130]))
    flags = [*COMMON, "--model_name_or_path", models["GQA 4:2"], "--dataset_name", data, "--max_steps", "2"]
    flags += ["--save_strategy", "steps", "--save_steps", "1", "--output_dir", str(folder / "out")]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "__stdout__", sys.__stdout__)  # which the call replaces
        for name, secret in SECRETS.items():
            patched.setenv(name, secret)
        code, printed, errors = call_main("longctx.train", [*flags, "--hub_token", "MARKED5"])
    assert code == 0, errors
    return folder / "out", printed + errors


def test_secrets_are_neither_printed_nor_saved(run):
    folder, printed = run
    assert "MARKED" not in printed
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {"training_args.bin", "longctx.json", "trainer_state.json", "run_report.html"} <= {f.name for f in files}
    assert [path for path in files if b"MARKED" in path.read_bytes()] == []


def flip(path, other):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def swap(path, other):
    """With a file of the same name, size and time from the checkpoint before."""
    before = path.stat()
    shutil.copyfile(other, path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def link(path, other):
    """To its contents, elsewhere."""
    shutil.move(path, other.parent.parent / f"moved-{path.name}")
    path.symlink_to(other.parent.parent / f"moved-{path.name}")


HARM = {
    "cut in half": (lambda path, other: os.truncate(path, path.stat().st_size // 2), "has .* bytes, and was written"),
    "cut by a byte": (lambda path, other: os.truncate(path, path.stat().st_size - 1), "has .* bytes, and was written"),
    "emptied": (lambda path, other: os.truncate(path, 0), "has 0 bytes, and was written with"),
    "longer": (lambda path, other: path.write_bytes(path.read_bytes() + b"\0"), "has .* bytes, and was written with"),
    "removed": (lambda path, other: path.unlink(), "is missing on "),
    "flipped": (flip, "is damaged: its contents have changed"),
    "of another step": (swap, "is damaged: its contents have changed|has .* bytes, and was written with"),
    "a link": (link, "longctx.json names .*, outside its folder"),
}
OF_THE_MANIFEST = {"removed": "has no longctx.json", "of another step": r"/[\w.-]+ (is damaged|has .* bytes)"}
"""What is said of a manifest. One of another step does not fit its files; one that is a link is read."""


@pytest.mark.parametrize("harm", HARM)
def test_a_damaged_file_of_a_checkpoint_is_named(harm, run, tmp_path):
    """Whichever it is: the model, the states, the random numbers, the manifest, or any other that was saved."""
    whole, before = run[0] / "checkpoint-2", run[0] / "checkpoint-1"
    check_files(whole, read_manifest(whole))
    names = sorted(path.name for path in whole.iterdir())
    assert {"longctx.json", "model.safetensors", "random-00000.json", "states-00000-000.safetensors"} <= {*names}
    for name in names:
        same = (whole / name).read_bytes() == (before / name).read_bytes()
        if (harm, name) == ("a link", "longctx.json") or (harm == "of another step" and same):
            continue
        folder = shutil.copytree(whole, tmp_path / name / "checkpoint-2")
        old = shutil.copytree(before, tmp_path / name / "checkpoint-1")
        damage, said = HARM[harm]
        damage(folder / name, old / name)
        expected = said if harm == "a link" else f"{re.escape(name)} {said}"
        if name == "longctx.json":
            expected = OF_THE_MANIFEST.get(harm, r"longctx\.json is damaged")
        with pytest.raises(CheckpointError, match=expected):
            check_files(folder, read_manifest(folder))

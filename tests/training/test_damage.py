"""Files that are damaged, and values that longctx never writes, are named; and no secret is left behind."""

from __future__ import annotations

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
from longctx.training.checkpoint.trainer import ResumableMixin
from longctx.untrusted.confined import Bounds, Confined, OutOfBounds
from longctx.untrusted.files import check_file
from tests.training.test_training import flags_of_run, make_documents, write_jsonl
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


def test_secrets_are_neither_printed_nor_saved(models, tmp_path, monkeypatch):
    data = write_jsonl(tmp_path / "data.jsonl", make_documents([90, 7, 41, 130]))
    flags = [*flags_of_run(models["GQA 4:2"], data, tmp_path / "out"), "--max_steps", "1", "--save_strategy", "steps"]
    monkeypatch.setattr(sys, "__stdout__", sys.__stdout__)  # which the call replaces
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    code, printed, errors = call_main("longctx.train", [*flags, "--save_steps", "1", "--hub_token", "MARKED5"])
    assert code == 0, errors
    assert "MARKED" not in printed + errors
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {"training_args.bin", "longctx.json", "trainer_state.json", "run_report.html"} <= {f.name for f in files}
    assert [path for path in files if b"MARKED" in path.read_bytes()] == []

"""Files that are damaged or change between two looks at them, and values that longctx never writes: all are named."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import EarlyStoppingCallback, LlamaConfig, TrainerState

from longctx.data import DataError
from longctx.data.files import _read_text
from longctx.data.json_records import _elements
from longctx.model.config_file import check_tokenizer_files
from longctx.model.files import without_weights
from longctx.model.tied_head import _lazy_tensors
from longctx.training.checkpoint.files import CheckpointError, Manifest, damage_named
from longctx.training.checkpoint.states import StateReader, check_side_files
from longctx.training.checkpoint.trainer import ResumableTrainer
from longctx.untrusted.confined import Bounds, Confined, OutOfBounds
from longctx.untrusted.files import check_file

STATE = {"global_step": 1, "log_history": [], "stateful_callbacks": {"EarlyStoppingCallback": {"attributes": [1]}}}


def test_side_files_of_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"random\.json is missing"), damage_named(tmp_path / "random.json"):
        (tmp_path / "random.json").read_text()
    TrainerState(global_step=1).save_to_json(str(tmp_path / "trainer_state.json"))
    state = json.loads((tmp_path / "trainer_state.json").read_text()) | STATE
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    manifest = Manifest(step=1, layout={}, optimization={}, parameters={}, data={}, progress={})
    with pytest.raises(CheckpointError, match="stateful_callbacks has no attributes"):
        check_side_files(tmp_path, manifest, rank=0)


def test_states_of_a_checkpoint(tmp_path):
    save_file({"step|0|weight": torch.zeros(0)}, tmp_path / "states-00000-000.safetensors")
    piece = SimpleNamespace(name="weight", start=0, states={"step": torch.zeros(())})
    with pytest.raises(CheckpointError, match=r"'step\|0\|weight' has 0 values"):
        StateReader(tmp_path).fill(piece)


def test_callbacks_of_a_checkpoint():
    counter = {"attributes": {"early_stopping_patience_counter": "many"}}
    trainer = SimpleNamespace(
        callback_handler=SimpleNamespace(callbacks=[EarlyStoppingCallback()]),
        state=SimpleNamespace(stateful_callbacks={"EarlyStoppingCallback": counter}),
    )
    with pytest.raises(TypeError, match="early_stopping_patience_counter is 'many', expected a int"):
        ResumableTrainer._restore_callbacks(trainer)


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
    with pytest.raises(ValueError, match=r"describes a buffer of .* and the limit is 1"):
        without_weights(LlamaConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=8))


def test_text_and_json(tmp_path):
    with pytest.raises(DataError, match=r"gone\.txt"):
        _read_text(tmp_path / "gone.txt")
    for text, words in (("[1 2]", "Expecting ',' delimiter"), ("[1] 2", "Extra data")):
        with pytest.raises(ValueError, match=words):
            list(_elements(text))


def test_a_process_that_gives_no_answer():
    """It sleeps, which takes no CPU time."""
    with pytest.raises(OutOfBounds, match="it gave no answer within 1 s"):
        Confined(time.sleep).call(Bounds(seconds=0.01, memory_bytes=1 << 30), 60)

"""What a resumed run knows of names of files, models, adapters and pairs, besides the flags of test_key_fields.py."""

from __future__ import annotations

import json
import shutil

import pytest
from datasets import Dataset

from longctx.data.kinds import PAIRS
from longctx.model.load import load_config
from longctx.model.tiny import tiny_config
from longctx.training.fingerprint import FilesIdentity, data_identity, files_identity
from longctx.training.preference import LOSS_FLAGS
from tests.training import test_key_fields
from tests.training.test_engines_of_models import save_model
from tests.training.test_key_fields import STREAM, a_packing, identity, refuses, resolved, rows_of

data = test_key_fields.data
"""Its fixture."""


def test_data_may_have_another_name_and_a_stream_may_not(data, tmp_path):
    copy = str(shutil.copy(data["text"], tmp_path))
    for flags, is_refused in (({}, False), (STREAM, True)):
        assert refuses(identity(data, flags), identity(data, flags | {"dataset_name": copy})) == is_refused


def known(settings, config, files=None):
    """The identity of two documents under these settings, as JSON gives it back."""
    rows = rows_of(a_packing(), Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5, 6]]}))
    return json.loads(json.dumps(data_identity(rows, settings, config, files or FilesIdentity())))


@pytest.mark.parametrize(("family", "is_compared"), [("llama", False), ("glm4_moe", True)])
def test_the_files_of_a_model_with_saved_buffers_are_compared(family, is_compared, data, tmp_path):
    save_model(family, tmp_path)
    config = load_config(str(tmp_path))
    settings = resolved(data, {}).settings | {"model_name_or_path": str(tmp_path)}
    before, weights = files_identity(settings, config, with_model=False), tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    after = files_identity(settings, config, with_model=False)
    assert refuses(known(settings, config, before), known(settings, config, after)) == is_compared


IN_4_BITS = {"use_peft": True, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": False}
OF_PAIRS = {"dataset_text_field": PAIRS} | dict.fromkeys([*LOSS_FLAGS, "share_prompts"], 0)


@pytest.mark.parametrize(("flags", "fixed"), [(IN_4_BITS, "use_peft"), (OF_PAIRS, "dataset_text_field")])
def test_4_bit_weights_and_losses_of_pairs_are_not_changed(flags, fixed, data):
    settings = resolved(data, {}).settings | flags
    before = known(settings, tiny_config())
    assert not refuses(before, known(settings, tiny_config()))
    for name in flags.keys() - {fixed}:
        assert refuses(before, known(settings | {name: "another"}, tiny_config())), name

"""Model families by what their layers do: recurrent layers run on every backend, or not at all."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from longctx.attention.choice import Documents, choose_backend
from longctx.attention.cost import Setup
from longctx.machine.here import Machine
from longctx.model.allow_list import CAUSAL_MODELS, MODEL_TYPES, RECURRENT_MODELS, UnsupportedModelError, check_model
from tests.model.more_families import KIMI_LINEAR
from tests.model.test_models import LINEAR, SMALL, documents_pass
from tests.reference import train_reference
from tests.small_model import save_with_tokenizer
from tests.training.test_training import COMMON, LEARNING_RATE, SHAPES, STEPS, check, make_documents, write_jsonl
from tests.workers import run_main, run_ranks

PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}


def setup_of(config, sp):
    return Setup.of_model(config, sp, element_size=4, machine=Machine.of("CPU", 8))


ONE_DOCUMENT = Documents(rows=[np.array([64])], source="one document")


def hybrid_config(model_type="qwen3_next", **settings):
    return CONFIG_MAPPING[model_type](**SMALL | LINEAR | settings)


# ------------------------------------------------------------------------------------------------
# Gated-delta hybrids
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["ring", "gather", "hybrid", "ulysses"])
@pytest.mark.parametrize(
    "model_type", [name for name, known in MODEL_TYPES.items() if "delta" in (known.recurrence or "")]
)
def test_every_backend_runs_delta_layers(model_type, backend):
    """Also with more ranks than linear key heads, between which states pass."""
    of_kimi = KIMI_LINEAR | {"linear_num_heads": 2}
    config = CONFIG_MAPPING[model_type](**of_kimi) if model_type == "kimi_linear" else hybrid_config(model_type)
    assert choose_backend(backend, setup_of(config, 4), ONE_DOCUMENT).arrangement.name == backend


def documents_loss(model, documents, label_smoothing=0.0):
    """Mean over all label tokens; stock transformers, which sees one document at a time."""
    assert label_smoothing == 0
    return documents_pass(model, documents)[1]


@pytest.mark.long
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
@pytest.mark.parametrize("kind", ["gated delta", "Kimi delta attention"])
def test_training_delta_layers_equals_one_process(kind, engine, tmp_path, monkeypatch, parity_table):
    """Packed and padded rows, with and without checkpointing, five AdamW steps on ZeRO-3 and FSDP2."""
    monkeypatch.setattr("tests.reference.dense_loss", documents_loss)
    sizes = {"vocab_size": 260, "hidden_size": 48}
    config = hybrid_config("qwen3_5_text", **sizes, rope_parameters=PARTIAL_ROPE, head_dim=16)
    if kind == "Kimi delta attention":
        config = CONFIG_MAPPING["kimi_linear"](**KIMI_LINEAR | sizes)
    torch.manual_seed(0)
    save_with_tokenizer(AutoModelForCausalLM.from_config(config), tmp_path / "model")
    cases, references = {}, {}
    for shape, checkpointing in (("packed", "False"), ("packed", "True"), ("padded", "False")):
        lengths, flags = SHAPES[shape]
        case = f"ulysses sp 2, {engine}, {kind}, {shape}, checkpointing {checkpointing}"
        documents = make_documents(lengths)
        data = write_jsonl(tmp_path / f"{shape}.jsonl", documents)
        cases[case] = [*COMMON, *flags, "--sp", "2", "--sp_backend", "ulysses", "--engine", engine]
        cases[case] += ["--gradient_checkpointing", checkpointing, "--dataset_name", data]
        cases[case] += ["--model_name_or_path", str(tmp_path / "model"), "--output_dir", str(tmp_path / case)]
        references[case] = train_reference(tmp_path / "model", documents, steps=STEPS, learning_rate=LEARNING_RATE)
    for case, results in run_ranks(2, "tests.training.test_training:run_cases", cases)[0].items():
        check(results, references[case], case, "torchrun", parity_table)


@pytest.mark.long
@pytest.mark.parametrize(
    "config",
    [hybrid_config("qwen3_next", num_experts=4, num_experts_per_tok=2), CONFIG_MAPPING["kimi_linear"](**KIMI_LINEAR)],
    ids=["gated delta", "Kimi delta attention"],
)
def test_verification_of_delta_layers(config, tmp_path):
    """A config is enough; both kinds of layers are seen to work on their shard."""
    config.save_pretrained(tmp_path)
    arguments = ["--sp", "2", "--model_name_or_path", str(tmp_path), "--json", "--dataset_name", "stdlib"]
    arguments += ["--max_length", "128", "--overlong", "truncate", "--use_cpu"]
    code, printed, errors = run_main(2, "longctx.verify.__main__", arguments)[0]
    assert code == 0, printed + errors
    checks = {check["name"]: check for check in json.loads(printed)["checks"]}
    assert checks["shard length"]["ok"]
    assert "each of 2 layers" in checks["shard length"]["detail"]


# ------------------------------------------------------------------------------------------------
# Everything else that carries a state from token to token, or convolves over tokens
# ------------------------------------------------------------------------------------------------

MIXES_TOKENS = re.compile(
    r"causal_conv1d|conv_state|recurrent_state|ssm_state|linear_attention|rwkv|mlstm", re.IGNORECASE
)
"""In the source of a model's layers."""

KINDS = ("state-space", "linear attention", "recurrent", "convolution")


def recurrent_models():
    """model_type of transformers' causal language models whose source has recurrences or convolutions over tokens."""
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        folder = Path(inspect.getfile(CONFIG_MAPPING[model_type])).parent
        if any(MIXES_TOKENS.search(path.read_text(encoding="utf-8")) for path in folder.glob("modeling_*.py")):
            yield model_type


def test_every_recurrence_of_transformers_is_exact_or_refused_by_its_kind():
    found = set(recurrent_models())
    assert found >= {"mamba", "mamba2", "jamba", "bamba", "zamba2", "falcon_h1", "lfm2", "recurrent_gemma", "rwkv"}
    assert found & set(CAUSAL_MODELS) == {name for name in RECURRENT_MODELS if name in CONFIG_MAPPING}
    for model_type in sorted(found - set(RECURRENT_MODELS)):
        with pytest.raises(UnsupportedModelError) as error:
            check_model(CONFIG_MAPPING[model_type]())
        message = str(error.value)
        parts = [f"its text part, {name!r}," in message for name in RECURRENT_MODELS]
        assert any(kind in message for kind in KINDS) or any(parts), message

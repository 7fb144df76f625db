"""Refusals of models and data, from files alone, and one of real processes."""

from __future__ import annotations

import json
from importlib.metadata import version

import pytest
from transformers import CONFIG_MAPPING, LlamaConfig

from longctx.model.allow_list import (
    ADDED_IN,
    AUXILIARY_LOSS_MODELS,
    CAUSAL_MODELS,
    auxiliary_loss_coefficient,
    check_model,
)
from longctx.model.tiny import tiny_config, tiny_model
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from longctx.train import main
from tests.small_model import save_with_tokenizer
from tests.workers import run_main

pytestmark = pytest.mark.usefixtures("single_process")


# ------------------------------------------------------------------------------------------------
# Models: from the config alone, in folders that hold nothing else
# ------------------------------------------------------------------------------------------------

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
ROPES = "default, linear, llama3, proportional, yarn"
MODELS = {
    "sliding window": ("llama", {"sliding_window": 8}, ("sliding_window is 8", "mistral")),
    "chunked layers": (
        "qwen3",
        {"layer_types": ["chunked_attention", "full_attention"]},
        ("layer_types holds chunked_attention", "sliding_attention are supported"),
    ),
    "uneven heads": ("qwen3", {"num_key_value_heads": 3}, ("is 4, which is not a multiple of num_key_value_heads, 3",)),
    "soft-capping": ("gemma3_text", {"attn_logit_softcapping": 50.0}, ("is 50.0", "soft-capped attention scores")),
    "mamba": ("mamba", {"state_size": 4}, ("'mamba'", "state_size is 4", "state-space", "llama")),
    "mamba and attention": ("jamba", {}, ("'jamba'", "mamba_d_state")),
    "linear attention": ("minimax", {}, ("layer_types holds linear_attention",)),
    "indexer": ("deepseek_v32", {}, ("layer_types holds indexed_attention", "an indexer picks")),
    "phi-3.5-moe": ("phimoe", {}, ("'phimoe'", "router_jitter_noise")),
    "noise": ("mixtral", {"router_jitter_noise": 0.1}, ("router_jitter_noise is 0.1", "--model_init_kwargs")),
    "chunks without a size": (
        "llama4_text",
        {"attention_chunk_size": None, "layer_types": ["chunked_attention"] * 2},
        ("layer_types holds chunked_attention",),
    ),
    "bidirectional": ("gemma", {"use_bidirectional_attention": True}, ("use_bidirectional_attention", "non-causal")),
    "encoder": ("bert", {}, ("'bert'", "not known to be exact", "llama")),
    "alibi": ("bloom", {}, ("'bloom'", "not known to be exact", "llama")),
    "part of a larger model": ("paligemma", {}, ("its text part, 'gemma',",)),
    "attention dropout": ("llama", {"attention_dropout": 0.1}, ("attention_dropout is 0.1", "--model_init_kwargs")),
    "other dropout": ("phi", {"resid_pdrop": 0.2}, ("resid_pdrop is 0.2", "--model_init_kwargs")),
    "dynamic rope": ("llama", {"rope_parameters": DYNAMIC}, ("rope_type is 'dynamic'", ROPES)),
    "long rope": (
        "phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": 64},
        ("rope_type is 'longrope'", ROPES),
    ),
}


def save_config(folder, model_type, **settings):
    small = {} if model_type in ("paligemma", "bert", "bloom", "mamba") else SMALL
    if model_type == "phi3":
        small = small | {"pad_token_id": 0}
    CONFIG_MAPPING[model_type](**small | settings).save_pretrained(folder)
    return str(folder)


def own(folder):
    return ["--model_name_or_path", folder, "--dataset_name", "stdlib"]


@pytest.mark.parametrize("case", MODELS)
def test_models_that_are_not_known_to_be_exact(case, tmp_path, refused):
    model_type, settings, parts = MODELS[case]
    folder = save_config(tmp_path, model_type, **settings)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    refused(*own(folder), parts=("refused", *parts))


def test_a_type_that_a_later_release_of_transformers_has(tmp_path, refused, monkeypatch):
    monkeypatch.setitem(ADDED_IN, "brand_new", "99.0")
    (tmp_path / "config.json").write_text('{"model_type": "brand_new"}', encoding="utf-8")
    parts = ("'brand_new', which transformers has from 99.0 on", f"{version('transformers')} is installed", "Upgrade")
    refused(*own(str(tmp_path)), parts=parts)


def test_compiled_mixtures_of_experts(tmp_path, refused):
    given = own(save_config(tmp_path, "mixtral", num_key_value_heads=2))
    refused(*given, "--torch_compile", "True", parts=("--torch_compile True with mixtral", "Leave out --torch_compile"))


def test_expert_parallelism_is_refused_with_what_is_missing(tmp_path, refused):
    given = own(save_config(tmp_path, "mixtral", num_key_value_heads=2))
    parts = ("sets ep_size", "device meshes of their own", "FSDP2 and ZeRO-3 shard experts, too")
    refused(*given, "--model_init_kwargs", '{"ep_size": 2}', parts=parts)


@pytest.mark.parametrize(
    ("model_type", "name", "part"),
    [
        ("llama", "eager", "llama is no mixture of experts"),
        ("mixtral", "deepgemm", "Use eager, batched_mm, grouped_mm"),
    ],
)
def test_ways_to_compute_experts_that_are_not_compared(model_type, name, part, tmp_path, refused):
    given = own(save_config(tmp_path, model_type, num_key_value_heads=2))
    kwargs = ["--model_init_kwargs", json.dumps({"experts_implementation": name})]
    refused(*given, *kwargs, parts=(f"sets experts_implementation {name}", part))


@pytest.mark.parametrize(
    ("model_type", "kind"), [("llama", "is no mixture of experts"), ("hunyuan_v1_moe", "has no such loss")]
)
def test_a_coefficient_for_routers_without_an_auxiliary_loss(model_type, kind, tmp_path, refused):
    given = own(save_config(tmp_path, model_type))
    parts = ("--router_aux_loss_coef 0.1", f"{model_type} {kind}", "Leave it out")
    refused(*given, "--router_aux_loss_coef", "0.1", parts=parts)


def test_types_with_a_coefficient_are_those_whose_auxiliary_loss_is_built():
    """transformers computes none for Llama 4."""
    installed = {name: CONFIG_MAPPING[name] for name in CAUSAL_MODELS if name in CONFIG_MAPPING}
    types = {name for name, config in installed.items() if hasattr(config(), "router_aux_loss_coef")}
    assert types - {"llama4_text"} == set(AUXILIARY_LOSS_MODELS) & installed.keys()


@pytest.mark.parametrize(("given", "coefficient"), [([], 0.02), (["0.1"], 0.1), (["0"], 0)])
def test_the_coefficient_of_the_flag_comes_before_that_of_the_model(given, coefficient, tmp_path):
    folder = save_config(tmp_path, "mixtral", num_key_value_heads=2, router_aux_loss_coef=0.02)
    flags = ["--router_aux_loss_coef", *given] if given else []
    run = resolve(parse_flags([*own(folder), *flags]), read_profile({}), {})
    assert auxiliary_loss_coefficient(run.model_config) == coefficient


def test_the_remedy_for_dropout_works(tmp_path, without_preflight):
    folder = save_config(tmp_path, "llama", attention_dropout=0.1)
    remedy = ["--model_init_kwargs", '{"attention_dropout": 0.0}']
    assert main([*own(folder), "--dry_run", *remedy]) == 0


def test_code_of_the_models_own(tmp_path, refused):
    folder = save_config(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModelForCausalLM": "own.Model"}}))
    refused(*own(folder), "--trust_remote_code", parts=("--trust_remote_code", "'llama'", "Leave the flag out"))


def test_a_configuration_of_the_models_own():
    class OwnConfig(LlamaConfig):
        pass

    with pytest.raises(ValueError, match=r"Its config OwnConfig is code of the model's own\. Use one of the types"):
        check_model(OwnConfig())
    check_model(LlamaConfig())


def test_float16_weights(tmp_path, refused):
    folder = save_config(tmp_path, "llama", dtype="float16")
    given = own(folder)
    refused(*given, "--dtype", "auto", parts=("--dtype auto means torch.float16", "--dtype float32 or bfloat16"))
    refused(*given, "--dtype", "float16", parts=("--dtype float16", "Use float32, bfloat16 or auto"))


def test_no_such_model(tmp_path, refused):
    refused(*own(str(tmp_path)), parts=(str(tmp_path), "'tiny'"))


def test_no_tokenizer(tmp_path, refused):
    folder = save_config(tmp_path, "llama")
    refused(*own(folder), parts=(folder, "tokenizer", "tokenizer.json"))


def test_no_tokenizer_where_transformers_makes_one_without_files(tmp_path, refused):
    folder = save_config(tmp_path, "qwen3", num_key_value_heads=4)
    parts = (folder, "finds 1 special tokens and no others", "tokenizer.json")
    refused(*own(folder), parts=parts)


# ------------------------------------------------------------------------------------------------
# Data: before weights, which the model's folder does not have
# ------------------------------------------------------------------------------------------------

TEXT = [{"text": "x" * length} for length in (10, 30, 50)]
IDS = {"input_ids": [5, 6, 7, 8]}


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


DATA = {
    "nothing": ("", [], ("data.jsonl", "empty, 0 records", "at least one")),
    "too long": (
        lines(*TEXT),
        ["--max_length", "20"],
        (
            "2 of 3 documents are longer than max_length = 20",
            "the longest is document 2 with 51",
            "--overlong truncate cuts 42 of the 93 tokens, drop leaves out 82 of them",
            "split makes 5 pieces and loses none",
        ),
    ),
    "too long, not packed": (lines(*TEXT), ["--max_length", "20", "--packing", "False"], ("2 of 3", "drop leaves out")),
    "all labels masked": (lines(IDS | {"labels": [5, -100, -100, -100]}), [], ("every label is -100", "1 documents")),
    "too few labels": (lines(IDS | {"labels": [5, 6]}), [], ("2 entries", "has 4", "per token")),
    "malformed line": (lines(*TEXT) + '{"text": \n', [], ("data.jsonl:4", "malformed JSON", "JSON object per line")),
    "another kind of value": (lines(*TEXT, {"text": 5}), [], ("data.jsonl:4", "int", "string")),
    "another column": (lines({"body": "x"}), [], ("data.jsonl:1", "body", "--dataset_text_field")),
    "ids beyond the vocabulary": (lines({"input_ids": [5, 99999]}), [], ("99999", "0 to 271", "tokenizer")),
    "no such split": (lines(*TEXT), ["--dataset_train_split", "dev"], ("dev", "train")),
    "no such pad token": (lines(*TEXT), ["--pad_token", "<none>"], ("--pad_token '<none>'", "vocabulary")),
}


@pytest.mark.parametrize("case", DATA)
def test_data_that_cannot_be_trained_on(case, tmp_path, folder_without_weights, refused):
    content, arguments, parts = DATA[case]
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    given = ("--model_name_or_path", folder_without_weights, "--dataset_name", str(path), "--use_cpu")
    refused(*given, *arguments, parts=parts)


def test_pad_token_that_the_model_lacks(tmp_path, refused):
    """The pad token is a part of every padded batch, whatever the documents hold."""
    config = tiny_config()
    config.vocab_size, config.pad_token_id = 250, None
    save_with_tokenizer(config, tmp_path)
    (tmp_path / "data.jsonl").write_text(lines(IDS))
    given = ("--model_name_or_path", str(tmp_path), "--dataset_name", str(tmp_path / "data.jsonl"), "--use_cpu")
    refused(*given, parts=("'<|pad|>' has number 257", "0 to 249", "--pad_token"))


def test_weights_that_are_not_there(tmp_path, folder_without_weights, refused, monkeypatch):
    from longctx.model.load import load_model

    monkeypatch.setattr("longctx.run.model.load_model", load_model)
    (tmp_path / "data.jsonl").write_text(lines(*TEXT))
    given = ("--model_name_or_path", folder_without_weights, "--dataset_name", str(tmp_path / "data.jsonl"))
    refused(*given, "--use_cpu", parts=(folder_without_weights, "weights", "cannot be read"))


def test_weights_of_which_some_are_missing(tmp_path):
    """transformers draws them at random, with a warning."""
    from safetensors.torch import load_file, save_file

    from longctx.model.load import load_config, load_model

    tiny_model().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"no weights for 1 parameters .* such as model\.layers\.1\.mlp\.up_proj"):
        load_model(str(tmp_path), load_config(str(tmp_path)))


def test_data_that_cannot_be_read(tmp_path, folder_without_weights, refused):
    (tmp_path / "data.jsonl").write_bytes(b'{"text": "\xff"}\n')
    given = ("--model_name_or_path", folder_without_weights, "--use_cpu", "--dataset_name")
    refused(*given, str(tmp_path / "data.jsonl"), parts=("data.jsonl:1", "not UTF-8", "0xff"))
    refused(*given, str(tmp_path / "none.jsonl"), parts=("none.jsonl", "no such file", "'stdlib'"))


# ------------------------------------------------------------------------------------------------
# Real processes
# ------------------------------------------------------------------------------------------------


def test_an_error_in_the_data_is_shown_once_and_ends_every_rank(tmp_path, folder_without_weights):
    path = tmp_path / "bad.jsonl"
    path.write_text(lines(*TEXT) + "{\n")
    arguments = ["--sp", "2", "--sp_backend", "ring", "--dataset_name", str(path), "--use_cpu", "True"]
    arguments += ["--model_name_or_path", folder_without_weights, "--output_dir", str(tmp_path / "out")]
    ranks = run_main(2, "longctx.train", arguments, timeout=120)
    assert [code for code, *_ in ranks] == [2, 2]
    shown = "".join(text for _, *printed in ranks for text in printed)
    assert shown.count("longctx: error: ") == 1, shown
    assert f"{path}:4: malformed JSON" in shown
    assert "Traceback" not in shown, shown

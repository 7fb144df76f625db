"""--rope_scaling: a run trains and saves the model whose config.json has the scaling, in transformers' words."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from longctx.model.rope import context_length, extended, parse_rope_scaling, scaling_for
from longctx.model.tiny import tiny_config
from longctx.train import main
from tests.few import few
from tests.reference import train_reference
from tests.small_model import save_small_model
from tests.training.test_training import COMMON, LEARNING_RATE, SHAPES, STEPS, check, make_documents, write_jsonl
from tests.workers import run_ranks

ORIGINAL = 32
"""Positions that the model knows: a quarter of the longest document, so that YaRN scales most frequencies."""
THETA = {"rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": ORIGINAL}
SCALINGS = {  # flag, and the whole of config.json's rope_parameters
    "yarn": ("yarn:16", YARN | THETA),
    "yarn, attention factor": (json.dumps(YARN | {"attention_factor": 1.5}), YARN | {"attention_factor": 1.5} | THETA),
    "linear": ("linear:16", {"rope_type": "linear", "factor": 16.0} | THETA),
    "llama3": ("llama3:16", YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0} | THETA),
}
BACKENDS = ("ring", "ulysses")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of a short context."""
    settings = {"max_position_embeddings": ORIGINAL, "rope_parameters": {"rope_type": "default", **THETA}}
    return save_small_model(tmp_path_factory.mktemp("model"), **settings)


def scaled_by_hand(folder, rope_parameters, copy):
    """The same weights beside a config.json with these parameters."""
    copy.mkdir()
    for file in Path(folder).iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    config = json.loads((copy / "config.json").read_text())
    assert config["rope_parameters"] == {"rope_type": "default", **THETA}
    config |= {"rope_parameters": rope_parameters, "max_position_embeddings": 16 * ORIGINAL}
    (copy / "config.json").write_text(json.dumps(config))
    return str(copy)


def run_cases(cases, resumed):
    """Logs of each case, and what the run that goes on with another scaling is refused with."""
    from longctx.run import prepare
    from longctx.settings.launcher import read_profile
    from longctx.settings.read import parse_flags
    from longctx.settings.resolve import resolve
    from tests.training import test_training

    results = test_training.run_cases(cases)
    environment = dict(os.environ)
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
    os.environ.clear()
    os.environ.update(environment)
    try:
        prepare(resolve(parse_flags(resumed), read_profile(), os.environ))
    except ValueError as error:
        return results, str(error)
    return results, ""


@pytest.mark.parametrize("name", few(SCALINGS, ["yarn"]))
def test_a_scaled_run_is_that_of_the_scaled_model(name, folder, tmp_path, parity_table):
    """On ring and Ulysses, from the first step to the folder that is saved; and resumed with the same scaling alone."""
    flag, rope_parameters = SCALINGS[name]
    documents = make_documents(SHAPES["packed"][0])
    data = write_jsonl(tmp_path / "data.jsonl", documents)
    by_hand = scaled_by_hand(folder, rope_parameters, tmp_path / "by_hand")
    reference = train_reference(by_hand, documents, steps=STEPS, learning_rate=LEARNING_RATE)
    unscaled = train_reference(folder, documents, steps=1, learning_rate=LEARNING_RATE)
    assert abs(reference[1][0] / unscaled[1][0] - 1) > 1e-3
    common = [*COMMON, "--sp", "2", "--model_name_or_path", folder, "--dataset_name", data]
    common[common.index("--save_strategy") + 1] = "steps"
    common += ["--save_steps", str(STEPS)]
    cases = {
        backend: [*common, "--rope_scaling", flag, "--sp_backend", backend, "--output_dir", str(tmp_path / backend)]
        for backend in BACKENDS
    }
    resumed = [*common, "--rope_scaling", "linear:20", "--sp_backend", "ring", "--output_dir", str(tmp_path / "ring")]
    resumed += ["--resume_from_checkpoint", "auto"]
    for rank, (results, refused) in enumerate(run_ranks(2, f"{__name__}:run_cases", cases, resumed)):
        assert rank or "rope_parameters" in refused
        assert rank or "'factor': 16.0" in refused
        for backend in BACKENDS if rank == 0 else ():
            check(results[backend], reference, f"RoPE {name}, {backend} sp 2", "torchrun", parity_table)
    for backend in BACKENDS:
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / backend)
        assert saved.config.rope_parameters == rope_parameters
        assert saved.config.max_position_embeddings == 16 * ORIGINAL
        wanted = AutoModelForCausalLM.from_pretrained(by_hand).model.rotary_emb
        assert torch.equal(saved.model.rotary_emb.inv_freq, wanted.inv_freq)
        assert saved.model.rotary_emb.attention_scaling == wanted.attention_scaling


@pytest.mark.parametrize("sp", [1, pytest.param(2, marks=pytest.mark.long)])
def test_an_adapter_has_its_base_models_positions_beside_it(sp, folder, tmp_path):
    """Loaded as the start-up text says, it has the log-probabilities of the model that was trained; and merged."""
    peft = pytest.importorskip("peft")
    from tests.model.test_peft import Adapt

    documents = make_documents(SHAPES["packed"][0])
    data, out = write_jsonl(tmp_path / "data.jsonl", documents), tmp_path / "out"
    by_hand = scaled_by_hand(folder, YARN | THETA, tmp_path / "by_hand")
    adapt = Adapt(r=16, lora_alpha=32)
    train_reference(by_hand, documents, steps=STEPS, learning_rate=LEARNING_RATE, adapt=adapt)
    flags = [*COMMON, "--rope_scaling", "yarn:16", "--use_peft", "True", "--model_name_or_path", folder]
    flags += ["--dataset_name", data, "--output_dir", str(out), "--sp", str(sp), "--sp_backend", "ring"]
    run_ranks(sp, "tests.training.test_resume:run_once", flags)
    config = AutoConfig.from_pretrained(out)
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder, config=config), out)
    as_usual = peft.AutoPeftModelForCausalLM.from_pretrained(out)
    tokens = torch.tensor(documents[0][0])[None]
    log_probs = {
        name: model.eval()(tokens).logits.log_softmax(-1)
        for name, model in {"trained": adapt.model, "loaded": loaded, "as usual": as_usual}.items()
    }
    torch.testing.assert_close(log_probs["loaded"], log_probs["trained"], rtol=1e-4, atol=1e-4)  # as losses after steps
    assert (log_probs["as usual"] - log_probs["trained"]).abs().max() > 1e-2
    loaded.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(tokens).logits.log_softmax(-1)
    torch.testing.assert_close(merged, log_probs["loaded"], rtol=1e-4, atol=1e-4)


def test_the_long_and_the_short_form_are_the_same():
    assert parse_rope_scaling("yarn:4") == parse_rope_scaling({"type": "yarn", "factor": 4})
    assert parse_rope_scaling("llama3:8") == {"rope_type": "llama3", "factor": 8.0, **_LLAMA}
    assert parse_rope_scaling(None) is None


_LLAMA = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_keys_that_are_no_scaling_stay():
    config = AutoConfig.for_model("phi3", partial_rotary_factor=0.5, original_max_position_embeddings=4096)
    scaled = extended(config, {"rope_type": "yarn", "factor": 2.0})
    assert scaled.rope_parameters["partial_rotary_factor"] == 0.5
    assert scaled.rope_parameters["original_max_position_embeddings"] == config.max_position_embeddings
    assert scaled.original_max_position_embeddings == config.max_position_embeddings
    assert config.rope_parameters["rope_type"] == "default"


def test_keys_of_an_older_scaling_go():
    """YaRN's beta_fast says nothing to linear scaling, and transformers would warn of it in what is saved."""
    older = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "original_max_position_embeddings": 64}
    config = AutoConfig.for_model("llama", max_position_embeddings=256, rope_parameters=older | {"rope_theta": 7e3})
    scaled = extended(config, {"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 64})
    assert scaled.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 7e3}
    assert scaled.max_position_embeddings == 128


REFUSED = {
    "no factor": ("yarn", ("yarn is not TYPE:FACTOR", "yarn:4")),
    "below 1": ("yarn:0.5", ("factor 0.5", "at least 1")),
    "dynamic": ("dynamic:2", ("dynamic depends on the longest position", "linear, llama3, yarn")),
    "longrope": ('{"rope_type": "longrope", "short_factor": [1]}', ("longrope depends",)),
    "unknown": ("ntk:4", ("ntk is unknown",)),
    "no JSON": ('{"rope_type": yarn}', ("not a JSON object",)),
    "a key": ('{"rope_type": "linear", "factor": 2, "beta_fast": 3}', ("linear has no beta_fast",)),
    "a value": ('{"rope_type": "yarn", "factor": 2, "beta_fast": "3"}', ("beta_fast 3 is not a number",)),
    "original": (
        '{"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 1.5}',
        ("original_max_position_embeddings 1.5", "whole"),
    ),
    "too long": ("yarn:4 --max_length 129", ("--max_length 129", "beyond 128", "Use factor 5, or --max_length 128")),
    "twice": (
        'yarn:4 --model_init_kwargs {"max_position_embeddings":9}',
        ("max_position_embeddings in --model_init_kwargs", "Keep one"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_scalings_that_are_refused(case, folder, capsys):
    given, parts = REFUSED[case]
    scaling, *others = given.split(" --")
    flags = [word for other in others for word in f"--{other}".split()]
    assert main(["--model_name_or_path", folder, "--dataset_name", "stdlib", "--rope_scaling", scaling, *flags]) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in parts), error


MODELS = {
    "gemma3_text": ({}, ("several kinds", "--model_init_kwargs")),
    "llama": (
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192, **_LLAMA}},
        ("by llama3 already", "give original_max_position_embeddings"),
    ),
    "gpt2": ({}, ("no RoPE",)),
}


@pytest.mark.parametrize("model_type", MODELS)
def test_models_whose_scaling_is_refused(model_type):
    settings, parts = MODELS[model_type]
    config = AutoConfig.for_model(model_type, **settings)
    with pytest.raises(ValueError, match="--rope_scaling yarn") as refused:
        extended(config, {"rope_type": "yarn", "factor": 4.0})
    assert all(part in str(refused.value) for part in parts), refused.value


def test_a_dry_run_says_what_becomes_of_the_context(folder, tmp_path, capsys, without_preflight):
    yaml = tmp_path / "run.yaml"
    yaml.write_text("rope_scaling: {rope_type: yarn, factor: 4.0, original_max_position_embeddings: 16}\n")
    flags = ["--model_name_or_path", folder, "--dataset_name", "stdlib", "--dry_run"]
    assert main([*flags, "--config", str(yaml)]) == 0
    printed = capsys.readouterr().out
    assert "max_length 64\n" in printed
    assert "positions are scaled (yarn): 64 = 4 × the original context" in printed
    assert main([*flags, "--max_length", "100"]) == 0
    assert "--rope_scaling yarn:4 would do" in capsys.readouterr().out
    assert main([*flags, "--rope_scaling", "yarn:4", "--use_peft"]) == 0
    assert "the adapter's folder gets a config.json" in capsys.readouterr().out


SCALED_ALREADY = {
    "none": {},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0},
    "llama3": {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 32, **_LLAMA},
    "linear": {"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 32},
}


@pytest.mark.parametrize("kind", SCALED_ALREADY)
def test_the_scaling_for_a_length_extends_the_context_to_it_and_keeps_the_type(kind):
    own = {"rope_theta": 1e4, **(SCALED_ALREADY[kind] or {"rope_type": "default"})}
    config = AutoConfig.for_model("llama", max_position_embeddings=128, rope_parameters=own)
    assert scaling_for(config, 128) is None
    given = parse_rope_scaling(scaling_for(config, 129))
    longer = extended(config, given)
    assert longer.max_position_embeddings == (256 if kind == "none" else 160)
    assert given["rope_type"] == ("yarn" if kind == "none" else kind)
    kept = own.keys() - {"rope_type", "factor", "original_max_position_embeddings"}
    assert {name: longer.rope_parameters[name] for name in kept} == {name: own[name] for name in kept}
    with pytest.raises(ValueError, match="no RoPE"):
        scaling_for(AutoConfig.for_model("gpt2"), 2048)


OWN_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
QWEN3_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
DEEPSEEK_YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
CONTEXTS = {  # model type, keys of its config.json, context
    "Qwen3, YaRN": (
        "qwen3",
        {"max_position_embeddings": 40960, "rope_scaling": QWEN3_YARN},
        131072,
    ),
    "DeepSeek-V3": ("deepseek_v3", {"max_position_embeddings": 163840, "rope_scaling": DEEPSEEK_YARN}, 163840),
    "gpt-oss": ("gpt_oss", {}, 131072),
    "YaRN in layers with full attention": (
        "olmo3",
        {"max_position_embeddings": 8192, "rope_scaling": QWEN3_YARN | {"original_max_position_embeddings": 8192}},
        32768,
    ),
    "linear": ("llama", {"max_position_embeddings": 16384, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
    "more than the factor gives": ("llama", {"max_position_embeddings": 512, "rope_parameters": OWN_YARN}, 512),
    "null": ("llama", {"max_position_embeddings": 128, "rope_parameters": OWN_YARN | {"factor": None}}, 128),
    "no original context": (
        "llama",
        {"max_position_embeddings": 128, "rope_parameters": {"rope_type": "yarn", "factor": 2.5}},
        320,
    ),
    "no RoPE": ("gpt2", {}, 1024),
}


@pytest.mark.parametrize("case", CONTEXTS)
def test_the_context_is_that_of_the_positions_as_they_are_scaled(case):
    model_type, keys, context = CONTEXTS[case]
    assert context_length(AutoConfig.for_model(model_type, **keys)) == context


@pytest.mark.parametrize("keys", [{"factor": 0.5}, {"factor": float("inf")}, {"original_max_position_embeddings": -64}])
def test_a_yarn_without_a_context_is_refused(keys):
    config = AutoConfig.for_model("llama", max_position_embeddings=64, rope_parameters=OWN_YARN | keys)
    ((name, value),) = keys.items()
    with pytest.raises(ValueError, match=f"YaRN with {name} {value}; expected a finite number of at least 1"):
        context_length(config)


@pytest.fixture(scope="module")
def yarn_folder(tmp_path_factory):
    """A model of 64 positions, which the YaRN in its config.json takes to 256."""
    settings = {"max_position_embeddings": 64, "rope_parameters": OWN_YARN | {"beta_fast": 16.0}}
    return save_small_model(tmp_path_factory.mktemp("yarn"), **settings)


def test_a_run_of_a_model_with_yarn_has_its_context_and_changes_nothing(yarn_folder, capsys, without_preflight):
    flags = ["--model_name_or_path", yarn_folder, "--dataset_name", "stdlib", "--dry_run"]
    assert main(flags) == 0
    printed = capsys.readouterr().out
    assert "max_length 256\n" in printed
    assert "the model's context is 256, to which the YaRN in its configuration scales positions" in printed
    assert not any(text in printed for text in ("not rescaled", "--rope_scaling"))
    assert main([*flags, "--max_length", "300"]) == 0
    printed = capsys.readouterr().out
    assert "max_length 300 is beyond the model's context of 256" in printed
    assert '"factor": 5, "original_max_position_embeddings": 64' in printed


def test_a_scaling_of_the_models_own_is_replaced_and_the_run_says_so(yarn_folder, capsys, without_preflight):
    flags = ["--model_name_or_path", yarn_folder, "--dataset_name", "stdlib", "--dry_run", "--rope_scaling", "yarn:8"]
    assert main(flags) == 0
    printed = capsys.readouterr().out
    assert "max_length 512\n" in printed
    assert "positions are scaled (yarn): 512 = 8 × the original context; this replaces the model's own" in printed
    assert "(yarn), which has a context of 256, and leaves out its beta_fast 16.0" in printed
    assert main([*flags, "--max_length", "513"]) == 2
    assert "Use factor 9, or --max_length 512" in capsys.readouterr().err
    scaled = extended(AutoConfig.from_pretrained(yarn_folder), parse_rope_scaling("yarn:8"))
    assert scaled.rope_parameters == OWN_YARN | {"factor": 8.0}
    assert context_length(scaled) == scaled.max_position_embeddings == 512


def test_a_plan_takes_it_and_hands_it_on(capsys):
    from longctx.plan import main as plan

    assert tiny_config().rope_parameters["rope_type"] == "default"
    flags = ["--model_name_or_path", "tiny", "--gpus", "2", "--max_length", "2097152"]
    assert plan([*flags, "--rope_scaling", "yarn:4"]) == 0
    assert "--rope_scaling yarn:4" in capsys.readouterr().out
    assert plan([*flags, "--rope_scaling", "dynamic:4"]) == 2

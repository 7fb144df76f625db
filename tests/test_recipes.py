"""Recipes are found by their names, fit the machines in them, and train small models of their kind."""

from __future__ import annotations

import importlib.util
import json
from functools import cache

import pytest
import torch

from benchmarks.published import MODELS
from docs import recipes
from longctx.launch.accelerate import find_config
from longctx.settings.dpo import DPO
from longctx.settings.read import parse_flags
from tests.test_docs import ROOT
from tests.workers import one_by_one, run_ranks

FILES = {path.stem: path for path in recipes.recipes()}


@pytest.mark.parametrize("name", FILES)
def test_a_recipe_is_short_and_says_how_to_start_it(name):
    lines = FILES[name].read_text(encoding="utf-8").splitlines()
    asked = parse_flags(["--config", name], recipes.method_of(name))
    cards, size = recipes.machine_of(name)
    where = f"one {size} GB GPU" if cards == 1 else f"{cards} × {size} GB GPUs"
    assert lines[0].endswith(f" on {where}, with sequences of {asked['max_length']:,} tokens:")
    assert lines[1] == f"#   longctx {recipes.method_of(name).command} --config {name}"
    assert 10 <= len(lines) <= 20
    thousands = asked["max_length"] // 1024
    assert name.endswith("-1m" if thousands == 1024 else f"-{thousands}k")
    assert (asked["num_processes"] or asked["sp"] or 1) == cards
    assert ("lora" in name, "qlora" in name) == (asked["use_peft"], asked["load_in_4bit"])


def test_recipes_are_of_many_models_and_machines():
    assert len(FILES) >= 30
    assert {recipes.machine_of(name) for name in FILES} == {(1, 24), (1, 80), (4, 80), (8, 80)}
    assert all(of["source"] for of in MODELS.values())


def test_a_file_goes_before_the_recipe_of_its_name(tmp_path, monkeypatch):
    """A folder does not: a run's output may have the name of its recipe."""
    monkeypatch.chdir(tmp_path)
    name = next(iter(FILES))
    (tmp_path / name).mkdir()
    assert find_config("config", name, "recipes") == FILES[name]
    (tmp_path / name).rmdir()
    (tmp_path / name).write_text("max_length: 7\n")
    assert parse_flags(["--config", name])["max_length"] == 7
    with pytest.raises(ValueError, match=r"--config qwen3-8b-lora is neither .* the recipes, such as .*qwen3-8b-lora-"):
        parse_flags(["--config", "qwen3-8b-lora"])


def test_recipes_fit_their_machines_as_their_page_predicts():
    """With a tenth of the memory free; the page is what its command prints."""
    runs = {name: recipes.run_of(name) for name in FILES}
    assert {name for name, run in runs.items() if run.forecast.level > 0} == set()
    assert {name for name, run in runs.items() if "beyond the model's context" in " ".join(run.notes)} == set()
    assert f"{recipes.page(runs)}\n" == (ROOT / "docs/recipes.md").read_text(encoding="utf-8")


@cache
def _small_model(model_type, folder):
    """Write two random layers of a kind, and tiny's tokenizer, to a folder, and return its path."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from longctx.model.tiny import tiny_tokenizer
    from tests.model.test_models import FAMILIES

    settings = next(settings for kind, settings in FAMILIES.values() if kind == model_type)
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**settings | {"vocab_size": 260, "hidden_size": 64, "intermediate_size": 64})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / model_type)
    tiny_tokenizer().save_pretrained(folder / model_type)
    return str(folder / model_type)


def _flags(name, folder):
    """Return flags that let a recipe take two steps here: another model, data, length, and at most two processes."""
    config = MODELS[parse_flags(["--config", name], recipes.method_of(name))["model_name_or_path"]]["config"]
    model_type = config.get("text_config", config)["model_type"]
    flags = ["--config", name, "--model_name_or_path", _small_model(model_type, folder), "--max_length", "256"]
    flags += ["--dataset_name", str(folder / ("pairs" if "-dpo-" in name else "chats")) + ".jsonl"]
    flags += ["--max_steps", "2", "--report_to", "none", "--output_dir", str(folder / name)]
    return flags if recipes.machine_of(name)[0] == 1 else [*flags, "--sp", "2", "--num_processes", "2"]


def two_steps(cases):
    """Return the losses of each run, on this rank of a group."""
    from tests.training.test_training import log_of

    runs = ((name, log_of(flags, DPO if "-dpo-" in name else recipes.SFT)) for name, flags in one_by_one(cases))
    return {name: [entry["loss"] for entry in log if "loss" in entry] for name, log in runs}


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_small_models_take_two_steps(processes, tmp_path):
    question = {"role": "user", "content": "What is long? " * 5}
    answers = [{"role": "assistant", "content": text} for text in ("A long answer.", "No.")]
    chats = [{"messages": [question, answers[0]]}] * 64
    pairs = [{"chosen": [question, answers[0]], "rejected": [question, answers[1]]}] * 64
    for kind, records in (("chats", chats), ("pairs", pairs)):
        (tmp_path / f"{kind}.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    names = [name for name in FILES if min(recipes.machine_of(name)[0], 2) == processes]
    if importlib.util.find_spec("bitsandbytes") is None:  # of the qlora extra
        names = [name for name in names if "qlora" not in name]
    assert len(names) > 10
    losses = run_ranks(processes, "tests.test_recipes:two_steps", {name: _flags(name, tmp_path) for name in names})[0]
    assert {name: len(of) for name, of in losses.items()} == dict.fromkeys(names, 2)
    assert all(0 < loss < 10 for of in losses.values() for loss in of)

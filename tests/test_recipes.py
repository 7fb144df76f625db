"""Recipes are found by their names, fit the machines in them, and train small models of their kind.

So do the notebook and the file for SkyPilot of examples/, which start recipes.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess

import pytest
import yaml

from benchmarks.published import MODELS
from docs import recipes
from longctx.launch.accelerate import find_config
from longctx.settings.read import parse_flags
from tests.jsonl import write_lines
from tests.model.test_models import FAMILIES
from tests.test_docs import ROOT
from tests.training.test_dpo import make_pairs
from tests.training.test_engines_of_models import save_model
from tests.training.test_training import log_of
from tests.workers import one_by_one, run_ranks

FILES = {path.stem: path for path in recipes.recipes()}


@pytest.mark.parametrize("name", FILES)
def test_a_recipe_is_short_and_says_how_to_start_it(name):
    lines = FILES[name].read_text(encoding="utf-8").splitlines()
    method, (cards, size) = recipes.method_of(name), recipes.machine_of(name)
    asked = parse_flags(["--config", name], method)
    where = f"one {size} GB GPU" if cards == 1 else f"{cards} × {size} GB GPUs"
    assert lines[0].endswith(f" on {where}, with sequences of {asked['max_length']:,} tokens:")
    assert lines[1] == f"#   longctx {method.command} --config {name}"
    assert 10 <= len(lines) <= 20
    assert name.endswith(f"-{asked['max_length'] // 1024}k".replace("-1024k", "-1m"))
    assert (asked["num_processes"] or asked["sp"] or 1) == cards
    assert ("lora" in name, "qlora" in name) == (asked["use_peft"], asked["load_in_4bit"])


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


@pytest.mark.long
def test_recipes_fit_their_machines_as_their_page_predicts():
    """With a tenth of the memory free; the page is what its command prints."""
    assert {recipes.machine_of(name) for name in FILES} == {(1, 24), (1, 80), (4, 80), (8, 80)}
    runs = {name: recipes.run_of(name) for name in FILES}
    assert {name for name, run in runs.items() if run.forecast.level > 0} == set()
    assert {name for name, run in runs.items() if "beyond the model's context" in " ".join(run.notes)} == set()
    assert f"{recipes.page(runs)}\n" == (ROOT / "docs/recipes.md").read_text(encoding="utf-8")


def two_steps(cases):
    """Return the losses of each run, on this rank of a group."""
    logs = {name: log_of(flags, recipes.method_of(name)) for name, flags in one_by_one(cases)}
    return {name: [entry["loss"] for entry in log if "loss" in entry] for name, log in logs.items()}


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_small_models_take_two_steps(processes, tmp_path):
    """Of each recipe, but on at most two processes; tests/model/test_qlora.py has weights of 4 bits."""
    pairs = make_pairs(conversational=True)
    chats = [{"messages": [*pair["prompt"], *pair["chosen"]]} for pair in pairs]
    for command, records in {"dpo": pairs, "train": chats}.items():
        write_lines(tmp_path / f"{command}.jsonl", 8 * records)
    families, cases = {kind: family for family, (kind, _) in reversed(FAMILIES.items())}, {}
    for name in (name for name in FILES if min(recipes.machine_of(name)[0], 2) == processes):
        method = recipes.method_of(name)
        config = MODELS[parse_flags(["--config", name], method)["model_name_or_path"]]["config"]
        model = tmp_path / (kind := config.get("text_config", config)["model_type"])
        if not model.exists():
            save_model(families[kind], model)
        cases[name] = ["--config", name, "--model_name_or_path", str(model), "--load_in_4bit", "False"]
        cases[name] += ["--dataset_name", str(tmp_path / f"{method.command}.jsonl"), "--max_length", "256"]
        cases[name] += ["--max_steps", "2", "--report_to", "none", "--output_dir", str(tmp_path / name)]
        cases[name] += ["--sp", "2", "--num_processes", "2"] if processes == 2 else []
    losses = run_ranks(processes, "tests.test_recipes:two_steps", cases)[0]
    assert {name: len(of) for name, of in losses.items()} == dict.fromkeys(cases, 2)
    assert all(0 < loss < 10 for of in losses.values() for loss in of)


@pytest.fixture
def small_flags(saved_model, tmp_path, monkeypatch):
    """Flags that let a recipe train the built-in model for two steps, in the folder of the test."""
    monkeypatch.chdir(tmp_path)
    chat = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
    (tmp_path / "chats.jsonl").write_text(64 * f"{json.dumps({'messages': chat})}\n")
    flags = ["--model_name_or_path", str(saved_model), "--dataset_name", "chats.jsonl", "--max_length", "256"]
    return [*flags, "--max_steps", "2", "--report_to", "none", "--use_cpu", "True"]


@pytest.mark.long
def test_the_notebook_trains_asks_and_merges(small_flags, capfd):
    """Its cells, with other values of the one that is marked for that; weights of 4 bits need a library."""
    cells = json.loads((ROOT / "examples/qlora.ipynb").read_text(encoding="utf-8"))["cells"]
    own: dict = {}
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        exec(compile("".join(cell["source"]), "qlora.ipynb", "exec"), own)
        if cell["metadata"].get("tags") == ["parameters"]:
            assert own["RECIPE"] in FILES
            own |= {"FLAGS": [*small_flags, "--load_in_4bit", "False"], "OUTPUT": "out"}
    said = capfd.readouterr().out
    assert said.count("tokens/s\n") == 2
    assert os.path.isfile("out-merged/model.safetensors")


@pytest.mark.long
def test_the_commands_of_skypilot_train(small_flags, tmp_path):
    task = yaml.safe_load((ROOT / "examples/skypilot.yaml").read_text(encoding="utf-8"))
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/activate").touch()
    machine = {"NUM_NODES": "1", "NODE_RANK": "0", "NUM_GPUS_PER_NODE": "2", "NODE_IPS": "127.0.0.1"}
    env = {f"SKYPILOT_{name}": value for name, value in machine.items()} | {"HOME": str(tmp_path), **task["envs"]}
    env["FLAGS"] = " ".join([*small_flags, "--sp", "2", "--output_dir", "out"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        commands = task["run"].replace("29500", str(free.getsockname()[1]))
    subprocess.run(["bash", "-eu", "-c", commands], env=os.environ | env, check=True, timeout=300)
    assert os.path.isfile("out/model.safetensors")

"""The end of a run: its lines load the model, and README.md of its folder says how to use it and how it was made."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from longctx import dpo, train
from longctx.__main__ import main as command
from longctx.model.adapter import add_adapter
from longctx.model.card import TrainedModel
from longctx.model.load import load_config
from longctx.model.tiny import tiny_config, tiny_model
from longctx.settings.read import parse_flags
from tests.few import few
from tests.jsonl import write_lines
from tests.model.test_multimodal import save_whole
from tests.small_model import save_with_tokenizer
from tests.training.test_dpo import make_pairs
from tests.training.test_training import make_documents, write_jsonl

RUN = ["--max_steps", "2", "--learning_rate", "1e-3", "--lr_scheduler_type", "constant", "--max_length", "128"]
RUN += ["--use_cpu", "True", "--report_to", "none", "--logging_steps", "1", "--disable_tqdm", "True"]
EVALUATES = ["--eval_strategy", "steps", "--eval_steps", "1", "--dataset_test_split", "train"]
LORA = ["--use_peft", "True", "--lora_r", "20"]
YARN = ["--rope_scaling", "yarn:2"]
KINDS = {  # the model, further flags, and beginnings of lines
    "whole": ("tiny", EVALUATES, {"best": "eval_loss ", "serve": "vllm serve out", "export": "longctx export out -"}),
    "whole, YaRN": ("tiny", YARN, {"best": "not evaluated", "serve": "vllm serve out --max-model-len 2097152"}),
    "LoRA of tiny": (
        "tiny",
        LORA,
        {"export": "longctx export out --model_name_or_path tiny --output_dir out-merged", "serve": "vllm serve out-m"},
    ),
    "LoRA": (
        "base",
        [*LORA, "--save_strategy", "steps", "--save_steps", "1"],
        {
            "load": "from peft import AutoPeftModelForCausalLM; ",
            "serve": "vllm serve base --enable-lora --lora-modules out=out --max-lora-rank 32",
            "go on": "--resume_from_checkpoint auto with a larger --max_steps goes on from checkpoint-2",
        },
    ),
    "LoRA, YaRN": ("base", [*LORA, *YARN], {"load": "from peft import PeftModel; "}),
    "DPO": ("tiny", [], {"model": "out has the model; ", "serve": "vllm serve out"}),
    "DPO, LoRA": ("base", LORA, {"model": "out has an adapter of base; "}),
}


def run(kind, model, *flags):
    """Train in `out`."""
    save_with_tokenizer(tiny_model(), "base")
    Path("data").mkdir(exist_ok=True)
    if is_dpo := kind.startswith("DPO"):
        write_lines(Path("data", "train.jsonl"), make_pairs())
    else:
        write_jsonl(Path("data", "train.jsonl"), make_documents([90, 7, 41, 64]))
    data = str(Path("data", "train.jsonl").absolute())
    method = dpo if is_dpo else train
    arguments = ["--model_name_or_path", model, "--dataset_name", data, "--output_dir", "out", *RUN, *flags]
    assert method.main([*arguments, "--max_length", "1024"] if is_dpo else arguments) == 0


def lines_of(printed):
    """The lines below the run's memory, by their labels."""
    after = printed.rpartition("\nmemory ")[2].splitlines()[2:]
    return {line[:10].strip(): line[10:] for line in after}


@pytest.mark.parametrize("kind", few(KINDS, ["whole", "LoRA"]))
def test_what_a_run_prints_at_its_end_loads_its_model(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model, flags, expected = KINDS[kind]
    if "LoRA" in kind:
        pytest.importorskip("peft")
    run(kind, model, *flags)
    lines = lines_of(capsys.readouterr().out)
    assert list(lines) in (
        ["model", "best", "load", "serve", "export", "go on"],
        ["model", "best", "export", "load", "serve", "go on"],
    )
    for label, begin in expected.items():
        assert lines[label].startswith(begin), lines[label]
    program, *arguments = shlex.split(lines["export"], comments=True)
    assert (program, command(arguments)) == ("longctx", 0)
    names: dict[str, torch.nn.Module] = {}
    exec(lines["load"], names)
    loaded = names["model"]
    whole = loaded.merge_and_unload() if hasattr(loaded, "peft_config") else loaded
    exported = AutoModelForCausalLM.from_pretrained(arguments[-1])
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), exported.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(whole.parameters(), tiny_model().parameters(), strict=True))
    assert (whole.config.rope_parameters["rope_type"] == "yarn") == ("YaRN" in kind)
    if overrides := re.search(r"--hf-overrides ('.*?') ", lines["serve"]):
        values = json.loads(*shlex.split(overrides[1]))
        assert values["rope_parameters"] == whole.config.rope_parameters
        assert values["max_position_embeddings"] == 2 * tiny_config().max_position_embeddings
    assert bool(overrides) == (kind == "LoRA, YaRN")
    check_card(Path("out"), kind, lines)
    check_card(Path(arguments[-1]), kind, {})
    assert not Path("out", "checkpoint-1", "README.md").exists()


def check_card(folder, kind, lines):
    card = ModelCard.load(folder / "README.md")
    assert {"longctx", "dpo" if "DPO" in kind else "sft"} <= set(card.data.tags)
    is_adapter = "LoRA" in kind and bool(lines)
    assert card.data.library_name == ("peft" if is_adapter else "transformers")
    assert card.data.license is None
    assert card.data.base_model is None
    assert "More Information Needed" not in card.text
    assert str(folder.absolute().parent) not in card.content
    assert "\nNo license is set" in card.text
    rows = dict(re.findall(r"^\| ([^|]+) \| (.+) \|$", card.text, re.MULTILINE))
    assert rows["base model"] == KINDS[kind][0]
    assert rows["data"] == "train.jsonl"
    assert rows["steps"] == "2 of 2"
    assert re.match(r"step 2: [\d,]+ tokens, loss \d", rows["last in the log"])
    assert rows["exactness"].startswith("step 1 was not compared with one device: only the demo")
    assert "`--learning_rate 0.001` `--" in rows["flags"]
    assert ("`--rope_scaling {" in rows["flags"]) == ("YaRN" in kind)
    assert rows.get("adapter") == ("LoRA, rank 20, alpha 32" if "LoRA" in kind else None)
    if lines.get("best", "").startswith("eval_loss"):
        assert lines["best"].startswith(rows["best evaluation"])
    block = card.text.partition("```python\n")[2].partition("\n```")[0]
    assert f"from_pretrained({json.dumps(folder.name)}" in block or lines
    assert ("longctx export" in card.text) == bool(lines)


@pytest.mark.long
def test_the_best_evaluation_is_told_apart_from_the_saved_one(tmp_path, monkeypatch, capsys):
    """The model learns, so that by the largest loss the first of two evaluations is the best."""
    monkeypatch.chdir(tmp_path)
    largest = [*EVALUATES, "--metric_for_best_model", "loss", "--greater_is_better", "True"]
    run("whole", "tiny", *largest)
    log = json.loads(Path("out", "trainer_state.json").read_text())["log_history"]
    first, last = (entry["eval_loss"] for entry in log if "eval_loss" in entry)
    assert first > last
    best = lines_of(capsys.readouterr().out)["best"]
    assert best.startswith(f"eval_loss {first:.4g} after step 1; the saved model is that of step 2 (--load_best_model_")
    saved = ["--save_strategy", "steps", "--save_steps", "1", "--load_best_model_at_end", "True"]
    run("whole", "tiny", *largest, *saved, "--overwrite_output_dir", "True")
    assert lines_of(capsys.readouterr().out)["best"] == f"eval_loss {first:.4g} after step 1, which is the saved model"
    kept = load_file("out/checkpoint-1/model.safetensors")
    assert all(value.equal(kept[name]) for name, value in load_file("out/model.safetensors").items())


@pytest.mark.long
def test_a_card_keeps_its_license_and_one_of_someone_else_stays(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    card = Path("out", "README.md")
    card.parent.mkdir()
    card.write_text("# Mine\n")
    run("whole", "tiny")
    assert card.read_text() == "# Mine\n"
    assert "out/README.md was not written by longctx, and stays as it is" in caplog.text
    run("whole", "tiny", "--overwrite_output_dir", "True")
    assert card.read_text() == "# Mine\n"
    card.write_text("[More Information Needed]")  # peft's
    run("whole", "tiny", "--overwrite_output_dir", "True", "--save_strategy", "steps", "--save_steps", "1")
    card.write_text(card.read_text().replace("\nmodel_name:", "\nlicense: apache-2.0\nmodel_name:", 1))
    run("whole", "tiny", "--resume_from_checkpoint", "auto", "--max_steps", "3")
    assert ModelCard.load(card).data.license == "apache-2.0"
    assert "| steps | 3 of 3 |" in card.read_text()


def adapter(**values):
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(target_modules=["q_proj"], **values)


def test_commands_of_adapters_that_vllm_does_not_take():
    """They are served as the exported model; so is what peft cannot load."""
    served = {}
    for name, values in {
        "plain": {},
        "rank": {"r": 24, "rank_pattern": {"v_proj": 300}},
        "DoRA": {"use_dora": True},
        "saved": {"modules_to_save": ["lm_head"]},
        "revision": {"revision": "v1"},
        "experts": {"target_parameters": ["mlp.experts.gate_up_proj"]},
    }.items():
        model = TrainedModel(folder="runs/a b", base="me/base", config=tiny_config(), adapter=adapter(**values))
        served[name] = model.serve().removeprefix("vllm serve ")
        assert model.load().startswith("from peft import AutoPeftModelForCausalLM; ")
        assert model.export().startswith("longctx export 'runs/a b' --output_dir 'a b-merged'  # merges")
    plain = "me/base --enable-lora --lora-modules 'a b=runs/a b'"
    merged = dict.fromkeys(("DoRA", "saved", "experts"), "'a b-merged'")
    scaled = {"rank": f"{plain} --max-lora-rank 320", "revision": f"{plain} --revision v1"}
    assert served == {"plain": plain, **scaled, **merged}
    config = {"config": tiny_config(), "adapter": adapter(revision="v1"), "has_own_config": True}
    model = TrainedModel(folder="out", base="me/base", **config)
    assert 'from_pretrained("me/base", revision="v1", config=' in model.load()
    assert "--hf-overrides" in model.serve()
    assert replace(model, has_own_keys=True).serve() == "vllm serve out-merged"  # whose config.json has all keys


def test_an_adapter_names_the_revision_of_its_base():
    pytest.importorskip("peft")
    for given, expected in (("main", None), ("v1", "v1")):
        settings = parse_flags(["--use_peft", "True", "--model_revision", given])
        assert add_adapter(tiny_model(), settings).peft_config["default"].revision == expected


def test_a_text_part_is_exported_to_be_served(tmp_path):
    save_whole("gemma3", tmp_path / "whole")
    config, whole = load_config(str(tmp_path / "whole")), str(tmp_path / "whole")
    for given, name in ((None, "text-exported"), (adapter(), "text-merged")):
        model = TrainedModel(folder="text", base=whole, config=config, adapter=given, is_part=True)
        exported = f"longctx export text --model_name_or_path {whole} --output_dir {name}"
        assert model.export().startswith(f"{exported}  # puts")
        assert model.serve() == f"vllm serve {name}"
        loaded = 'AutoModelForCausalLM.from_pretrained("text")'
        if given is not None:
            loaded = 'AutoModelForImageTextToText.from_pretrained("text-merged")'
        assert model.load().endswith(f"model = {loaded}")

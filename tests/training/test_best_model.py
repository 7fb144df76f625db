"""--load_best_model_at_end on real gloo ranks and engines: what is saved in the end has the best evaluation's loss."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from longctx.packing import PackedDataset, plan_packing
from longctx.train import main
from longctx.training.checkpoint.files import read_manifest, write_manifest
from longctx.training.dataset import TrainingData
from longctx.training.fingerprint import _evaluation_digest
from tests.reference import dense_loss
from tests.training.test_training import COMMON, make_documents, write_jsonl
from tests.workers import run_ranks

LAYOUTS = {
    "1 process": (1, []),
    "ring on FSDP2": (2, ["--sp", "2", "--sp_backend", "ring"]),
    "ulysses on ZeRO-3": (2, ["--sp", "2", "--sp_backend", "ulysses"]),
}
MODELS = {"whole": [], "adapter": ["--use_peft", "True"]}
BEST = {  # the flags, and which of the five evaluations is best while the model learns
    "largest loss": (["--metric_for_best_model", "eval_loss", "--greater_is_better", "True"], 0),
    "loss": ([], -1),
}


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_best_model_is_saved(layout, models, tmp_path):
    """A model that learns is best last; asked for the largest loss, the first one has to come back."""
    import peft

    documents = make_documents([90, 7, 41])
    data = write_jsonl(tmp_path / "data.jsonl", documents)
    processes, given = LAYOUTS[layout]
    common = [*COMMON, *given, "--dataset_name", data, "--dataset_test_split", "train", "--eval_strategy", "steps"]
    common += ["--model_name_or_path", models["GQA 4:2"], "--save_strategy", "steps", "--save_steps", "1"]
    common += ["--load_best_model_at_end", "True", "--save_total_limit", "1"]
    cases = {
        (kind, best): [*common, *MODELS[kind], *BEST[best][0], "--output_dir", str(tmp_path / f"{kind} {best}")]
        for kind in MODELS
        for best in BEST
    }
    results = run_ranks(processes, "tests.training.test_evaluation:run_evaluations", cases, timeout=900)[0]
    for (kind, best), (log, again, *_) in results.items():
        losses = [entry["eval_loss"] for entry in log if "eval_loss" in entry][:5]
        assert losses == sorted(losses, reverse=True)
        assert losses[0] > losses[-1] * 1.001
        expected, folder = losses[BEST[best][1]], tmp_path / f"{kind} {best}"
        assert again["eval_loss"] == pytest.approx(expected, rel=1e-6)
        saved = models["GQA 4:2"] if kind == "adapter" else folder
        model = AutoModelForCausalLM.from_pretrained(saved, attn_implementation="eager", dtype=torch.float32)
        if kind == "adapter":
            model = peft.PeftModel.from_pretrained(model, folder)
        assert dense_loss(model, documents).item() == pytest.approx(expected, rel=1e-5)
        name = "adapter_model.safetensors" if kind == "adapter" else "model.safetensors"
        kept = min(folder.glob("checkpoint-*"), key=lambda path: abs(int(path.name[11:]) - (BEST[best][1] % 5 + 1)))
        ended, chosen = load_file(folder / name), load_file(kept / name)
        assert all(torch.equal(ended[weight], chosen[weight]) for weight in chosen)


# ------------------------------------------------------------------------------------------------
# Bad input: before weights load
# ------------------------------------------------------------------------------------------------

EVALUATES = ["--eval_strategy", "steps", "--eval_steps", "2", "--save_steps", "4"]


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (
            ["--load_best_model_at_end", "True"],
            ("--load_best_model_at_end True needs evaluation data", "--eval_strategy"),
        ),
        ([*EVALUATES, "--metric_for_best_model", "bleu"], ("--metric_for_best_model bleu", "mean_token_accuracy")),
        (
            [*EVALUATES, "--load_best_model_at_end", "True", "--save_only_model", "True"],
            ("--save_only_model True", "--load_best_model_at_end True", "Leave out one"),
        ),
        (
            [*EVALUATES, "--load_best_model_at_end", "True", "--save_steps", "3"],
            ("multiple of the evaluation steps", "3"),
        ),
        (
            [*EVALUATES, "--load_best_model_at_end", "True", "--save_strategy", "no"],
            ("save and eval strategy to match",),
        ),
    ],
)
def test_bad_input(flags, parts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("longctx.settings.resolve.device_count", lambda: 0)
    monkeypatch.setattr("longctx.run.model.load_model", lambda *_, **__: pytest.fail("weights were read"))
    given = ["--model_name_or_path", "tiny", "--dataset_name", "stdlib", "--output_dir", str(tmp_path)]
    assert main([*given, *flags]) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in parts), error


def test_the_best_model_is_chosen_on_one_evaluation_data_set(tmp_path, capsys):
    """A run or a checkpoint without evaluation data can be resumed, and so can one that packs the data differently."""
    folder, out = tmp_path / "data", tmp_path / "out"
    folder.mkdir()
    for split in ("train", "test"):
        write_jsonl(folder / f"{split}.jsonl", make_documents([40, 7, 31], seed=len(split)))
    flags = ["--model_name_or_path", "tiny", "--dataset_name", str(folder), "--max_length", "64", "--use_cpu", "True"]
    flags += ["--eval_strategy", "steps", "--eval_steps", "1", "--save_strategy", "steps", "--save_steps", "1"]
    flags += ["--report_to", "none", "--disable_tqdm", "True", "--output_dir", str(out)]
    flags += ["--resume_from_checkpoint", "auto", "--dataset_streaming"]
    for streaming in ("True", "False"):
        if out.exists():
            shutil.rmtree(out)
        given = [*flags, streaming]
        assert main([*given, "--max_steps", "1"]) == 0
        assert main([*given, "--max_steps", "2", "--dataset_test_split", "train"]) == 2
        assert "the evaluation data has changed since" in capsys.readouterr().err
        assert main([*given, "--max_steps", "2", "--eval_packing", "False"]) == 0
    manifest = read_manifest(out / "checkpoint-2")
    assert main([*given, "--max_steps", "3", "--eval_strategy", "no"]) == 0
    write_manifest(out / "checkpoint-2", replace(manifest, data=without_evaluation(manifest.data)))
    shutil.rmtree(out / "checkpoint-3")
    assert main([*given, "--max_steps", "3", "--dataset_test_split", "train"]) == 0


@pytest.mark.long
def test_the_best_model_of_another_folder_leaves_that_folder_as_it_is(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    data = write_jsonl(tmp_path / "data.jsonl", make_documents([40, 7, 31]))
    flags = ["--model_name_or_path", "tiny", "--dataset_name", data, "--max_length", "64", "--use_cpu", "True"]
    flags += ["--dataset_test_split", "train", "--eval_strategy", "steps", "--eval_steps", "1", "--save_steps", "1"]
    flags += ["--report_to", "none", "--disable_tqdm", "True", "--load_best_model_at_end", "True"]
    flags += ["--metric_for_best_model", "eval_loss", "--greater_is_better", "True"]  # the first one
    assert main([*flags, "--output_dir", str(old), "--max_steps", "3"]) == 0
    there = sorted(path.relative_to(old) for path in old.rglob("*"))
    given = ["--resume_from_checkpoint", str(old / "checkpoint-3"), "--save_total_limit", "1", "--max_steps", "4"]
    assert main([*flags, "--output_dir", str(new), *given]) == 0
    assert sorted(path.relative_to(old) for path in old.rglob("*")) == there


def without_evaluation(data):
    assert "evaluation" in data
    return {name: value for name, value in data.items() if name != "evaluation"}


def test_evaluation_data_is_known_by_where_documents_are_cut():
    documents = Dataset.from_dict({"input_ids": [[1] * 9, [2] * 5]})

    def known(documents, strategy, overlong):
        packing, report = plan_packing([9, 5], 6, strategy=strategy, overlong=overlong)
        part = TrainingData(documents=documents, rows=PackedDataset(documents, packing), report=report, costs=None)
        return _evaluation_digest(part)

    split = known(documents, "bfd", "split")
    assert known(documents, "none", "split") == split
    assert known(documents, "bfd", "truncate") != split
    assert known(documents, "wrapped", "split") != split
    assert known(Dataset.from_dict({"input_ids": [[1] * 9, [3] * 5]}), "bfd", "split") != split

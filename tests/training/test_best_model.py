"""--load_best_model_at_end on real gloo ranks and engines: what is saved in the end has the best evaluation's loss."""

from __future__ import annotations

import shutil

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file

from longctx.packing import PackedDataset, plan_packing
from longctx.train import main
from longctx.training.checkpoint.files import read_manifest, write_manifest
from longctx.training.dataset import TrainingData
from longctx.training.fingerprint import _evaluation_digest
from tests.reference import dense_loss
from tests.training.test_completions import saved_model
from tests.training.test_resume import LAYOUTS
from tests.training.test_training import COMMON, make_documents, write_jsonl
from tests.workers import run_ranks

MODELS = {"whole": [], "adapter": ["--use_peft", "True"]}
BEST = {  # the flags, and which of the five evaluations is best while the model learns
    "largest loss": (["--metric_for_best_model", "eval_loss", "--greater_is_better", "True"], 0),
    "loss": ([], -1),
}


@pytest.mark.long
@pytest.mark.parametrize("layout", ["1 process", "ring on FSDP2", "ulysses on ZeRO-3"])
def test_the_best_model_is_saved(layout, models, tmp_path):
    """A model that learns is best last; asked for the largest loss, the first one has to come back."""
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
        model = saved_model(folder, models["GQA 4:2"])
        assert dense_loss(model, documents).item() == pytest.approx(expected, rel=1e-5)
        name = "adapter_model.safetensors" if kind == "adapter" else "model.safetensors"
        kept = min(folder.glob("checkpoint-*"), key=lambda path: abs(int(path.name[11:]) - (BEST[best][1] % 5 + 1)))
        ended, chosen = load_file(folder / name), load_file(kept / name)
        assert all(torch.equal(ended[weight], chosen[weight]) for weight in chosen)


EVALUATED = ["--model_name_or_path", "tiny", "--max_length", "64", "--use_cpu", "True", "--report_to", "none"]
EVALUATED += ["--disable_tqdm", "True", "--eval_strategy", "steps", "--eval_steps", "1", "--save_steps", "1"]


def test_the_best_model_is_chosen_on_one_evaluation_data_set(tmp_path, capsys):
    """A run or a checkpoint without evaluation data can be resumed, and so can one that packs the data differently."""
    folder, out = tmp_path / "data", tmp_path / "out"
    folder.mkdir()
    for split in ("train", "test"):
        write_jsonl(folder / f"{split}.jsonl", make_documents([40, 7, 31], seed=len(split)))
    flags = [*EVALUATED, "--dataset_name", str(folder), "--output_dir", str(out), "--resume_from_checkpoint", "auto"]
    flags += ["--dataset_streaming"]
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
    del manifest.data["evaluation"]
    write_manifest(out / "checkpoint-2", manifest)
    shutil.rmtree(out / "checkpoint-3")
    assert main([*given, "--max_steps", "3", "--dataset_test_split", "train"]) == 0


@pytest.mark.long
def test_the_best_model_of_another_folder_leaves_that_folder_as_it_is(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    data = write_jsonl(tmp_path / "data.jsonl", make_documents([40, 7, 31]))
    flags = [*EVALUATED, "--dataset_name", data, "--dataset_test_split", "train", "--load_best_model_at_end", "True"]
    flags += BEST["largest loss"][0]
    assert main([*flags, "--output_dir", str(old), "--max_steps", "3"]) == 0
    there = sorted(path.relative_to(old) for path in old.rglob("*"))
    given = ["--resume_from_checkpoint", str(old / "checkpoint-3"), "--save_total_limit", "1", "--max_steps", "4"]
    assert main([*flags, "--output_dir", str(new), *given]) == 0
    assert sorted(path.relative_to(old) for path in old.rglob("*")) == there


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

"""The tokens that are trained on, counted after --overlong, and runs whose steps have none of them."""

from __future__ import annotations

import re

import numpy as np
import pytest
from datasets import Dataset, concatenate_datasets

from longctx.data.sides import sides_of_pairs
from longctx.packing import PackedDataset, PairedDataset, kept_of_sides, plan_packing, plan_pairs
from longctx.train import main
from longctx.training.dataset import TrainingData
from tests.jsonl import write_lines

CAPACITY = 16


def unsplit(labels):
    """Documents with these labels."""
    return Dataset.from_dict({"input_ids": [[1] * len(of) for of in labels], "labels": labels})


def documents_of(lengths, masked):
    """Return documents from several chunks of a table, reordered and one of them twice, with some labels masked."""
    rng = np.random.default_rng(0)
    labels = [np.where(rng.random(length) < masked, -100, 7) for length in lengths]
    parts = [unsplit(part) for part in (labels[:5], labels[5:6], labels[6:])]
    return concatenate_datasets(parts).select([*reversed(range(len(lengths))), 2])


def counted_in_rows(rows):
    """Return the number of targets, counted in the rows that the trainer reads."""
    return sum(int((row["labels"][row["position_ids"] != 0] != -100).sum()) for row in rows)


@pytest.mark.parametrize("overlong", ["truncate", "drop", "split"])
@pytest.mark.parametrize("strategy", ["bfd", "none", "wrapped"])
def test_targets_are_counted_in_the_pieces_that_are_packed(overlong, strategy):
    documents = documents_of([9, 40, 3, 17, 1, 33, 16, 2, 0, 50, 5], masked=0.6)
    lengths = np.array([len(ids) for ids in documents["input_ids"][:]])
    packing, report = plan_packing(lengths, CAPACITY, strategy=strategy, overlong=overlong)
    rows = PackedDataset(documents, packing)
    targets = counted_in_rows([rows[i] for i in range(len(rows))])
    data = TrainingData(documents=documents, rows=rows, report=report, costs=None)
    assert data.describe_targets().startswith(f"{targets} of the {lengths.sum()} tokens in the documents (")
    assert rows.target_counts().sum() == targets
    assert 0 < targets < sum(np.count_nonzero(np.array(of[1:]) != -100) for of in documents["labels"][:])


@pytest.mark.parametrize("share", [False, True])
def test_targets_of_pairs_are_those_of_both_answers(share):
    """Targets of pairs are counted on both sides, each of which truncation cuts at the end."""
    pairs = [[-100] * prompt + [7] * a + [-100] * prompt + [7] * b for prompt, a, b in ((3, 4, 2), (5, 9, 6))]
    documents = unsplit(pairs)
    sides = sides_of_pairs(documents)
    packing, _ = plan_pairs(sides, CAPACITY, overlong="truncate", share=share)
    kept = kept_of_sides(sides, CAPACITY, "truncate", share=share)
    rows = PairedDataset(documents, packing, sides=sides, kept=kept, share=share)
    assert rows.target_counts().tolist() == (kept.sum(1) - 2 * sides.prompt).tolist()


def test_documents_that_lose_all_labels_are_named():
    """Only documents that are in a pack and had labels before the cut are counted."""
    labels = [[-100] * 4 + [7] * 3, [-100] * 20 + [7] * 3, [-100] * 30 + [7], [-100] * 20]
    documents = unsplit(labels)

    def described(overlong):
        packing, report = plan_packing([len(of) for of in labels], CAPACITY, overlong=overlong)
        rows = PackedDataset(documents, packing)
        return TrainingData(documents=documents, rows=rows, report=report, costs=None).describe_targets()

    trained = "of the 81 tokens in the documents"
    lost = "; --overlong truncate leaves no token with a label in 2 documents"
    assert described("truncate") == f"3 {trained} (3.7%) are trained on{lost}"
    assert described("drop") == f"3 {trained} (3.7%) are trained on"
    assert described("split") == f"7 {trained} (8.6%) are trained on"


def test_a_run_whose_steps_have_no_label_saves_no_model(tmp_path, capsys):
    """One document still has a label, but no step reads that document."""
    records = [*[{"prompt": "Why? " * 40, "completion": "So."}] * 4, {"prompt": "Why? ", "completion": "So."}]
    data, out = write_lines(tmp_path / "data.jsonl", records), tmp_path / "out"
    flags = ["--model_name_or_path", "tiny", "--dataset_name", data, "--output_dir", str(out), "--use_cpu", "True"]
    flags += ["--max_length", "64", "--overlong", "truncate", "--packing", "False", "--report_to", "none"]
    flags += ["--train_sampling_strategy", "sequential", "--per_device_train_batch_size", "1", "--disable_tqdm", "True"]
    assert main([*flags, "--max_steps", "2"]) == 2
    printed = capsys.readouterr()
    assert "--overlong truncate leaves no token with a label in 4 documents" in printed.out
    assert re.search(r"the data set of .*data\.jsonl had no token with a label in 2 steps: 5 documents", printed.err)
    assert not list(out.glob("*.safetensors"))
    assert main([*flags, "--max_steps", "5", "--overwrite_output_dir", "True"]) == 0

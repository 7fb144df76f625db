"""Training on a stream, on real gloo ranks and real engines, against one process on the rows that a stream gives.

Tolerances as in test_training: 1e-5 relative for the first step, 1e-4 over five.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import islice, zip_longest
from pathlib import Path

import numpy as np
import pytest

from longctx.packing import PackedStream
from longctx.packing.lanes import lane_of
from longctx.train import main
from tests.few import few
from tests.jsonl import write_lines
from tests.training.test_training import STEPS, check, flags_of_run, make_documents, one_process, read_log, write_jsonl
from tests.workers import run_ranks

LENGTHS = [*np.random.default_rng(5).integers(2, 90, 26).tolist(), 300]
"""The last is longer than a row."""
MAX_LENGTH = 128
ROWS_A_STEP = 4

STREAM = ["--dataset_streaming", "True", "--max_length", str(MAX_LENGTH)]

LAYOUTS = {  # (processes, flags): 4 rows a step in every one
    "sp 1": (1, ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2"]),
    "sp 4 ring on FSDP2": (4, ["--sp", "4", "--sp_backend", "ring", "--gradient_accumulation_steps", "4"]),
    "sp 2 × dp 2 Ulysses on ZeRO-3": (
        4,
        ["--sp", "2", "--sp_backend", "ulysses", "--engine", "deepspeed", "--gradient_accumulation_steps", "2"],
    ),
    "dp 4, workers": (4, ["--sp", "1", "--dataloader_num_workers", "2"]),
}
PACKINGS = {  # flags, and documents: each set gives a pass of four steps, the last of them not full
    "packed": (["--packing", "True", "--overlong", "split"], LENGTHS),
    "single": (["--packing", "False", "--overlong", "drop"], LENGTHS[-15:]),
}


@pytest.fixture
def model(models):
    return models["GQA 4:2"]


def documents_of(row):
    """The (input_ids, labels) in a row, or in a piece of a document that it holds."""
    borders = np.cumsum(row["seq_lengths"])[:-1]
    return [
        (ids.tolist(), labels.tolist())
        for ids, labels in zip(np.split(row["input_ids"], borders), np.split(row["labels"], borders), strict=True)
    ]


def documents_of_steps(documents, packing):
    """The documents of each step: a row of each lane, as far as there are some, then from the start."""
    source = [{"input_ids": ids, "labels": labels} for ids, labels in documents]
    lanes = []
    for lane in range(ROWS_A_STEP):
        own = [number for number in range(len(documents)) if lane_of(number, ROWS_A_STEP) == lane]
        if packing == "single":
            lanes.append([[documents[number]] for number in own if len(documents[number][0]) <= MAX_LENGTH])
        else:
            rows = PackedStream([source[number] for number in own], MAX_LENGTH, overlong="split")
            lanes.append([documents_of(row) for row in rows])
    assert len({*map(len, lanes)}) > 1
    steps = [[document for row in step for document in row] for step in zip_longest(*lanes, fillvalue=[])]
    assert len(steps) < STEPS
    return [*islice(steps * STEPS, STEPS)], sum(map(len, lanes))


TRAIN = "tests.training.test_training:run_cases"
GROUPS = {
    "sp 1": ["sp 1"],
    "FSDP2": ["sp 4 ring on FSDP2", "dp 4, workers"],
    "ZeRO-3": ["sp 2 × dp 2 Ulysses on ZeRO-3"],
}


@pytest.mark.parametrize("case", few([f"{group}, {packing}" for group in GROUPS for packing in PACKINGS], 1))
def test_training_on_a_stream_equals_one_process(case, model, tmp_path, parity_table):
    """Rows that two ranks share, that none reads, or that come in another order would change the losses."""
    group, packing = case.split(", ")
    layouts, (flags, lengths) = GROUPS[group], PACKINGS[packing]
    documents = make_documents(lengths, seed=3, masked=0.95)
    data = write_jsonl(tmp_path / "data.jsonl", documents)
    steps, num_rows = documents_of_steps(documents, packing)
    cases = {}
    for name in layouts:
        cases[name] = [*flags_of_run(model, data, tmp_path / name), *STREAM, *flags, *LAYOUTS[name][1]]
    results = run_ranks(LAYOUTS[layouts[0]][0], TRAIN, cases)[0]
    reference = one_process(model, None, batches=steps)
    tokens = np.cumsum([sum(len(ids) for ids, _ in step) for step in steps])
    for name in layouts:
        packing_entry, *log = read_log(tmp_path / name)
        check(results[name], reference, f"stream, {packing}, {name}", "torchrun", parity_table)
        assert [entry["num_tokens"] for entry in log if "loss" in entry] == tokens.tolist()
        report = packing_entry["packing"]
        assert (report["documents"], report["tokens"], report["packs"]) == (len(lengths), sum(lengths), num_rows)
        assert report["tokens_dropped"] == (0 if packing == "packed" else lengths[-1])
        assert (report["too_long_documents"], report["passes"]) == (1, 2)


RESUMED = {  # (processes, the run that it goes on from and its step, flags): 4 rows a step in every one
    "once": (1, "whole", 1, ["--max_steps", "2", "--dataloader_num_workers", "2"]),
    "again in the same pass": (1, "once", 2, []),
    "in the third pass": (1, "whole", 10, ["--dataloader_num_workers", "3"]),
    "dp 2, in the third pass": (2, "whole", 9, ["--gradient_accumulation_steps", "2", "--dataloader_num_workers", "1"]),
    "dp 2, again in that pass": (2, "dp 2, in the third pass", 10, ["--gradient_accumulation_steps", "2"]),
    "dp 4": (4, "once", 2, ["--gradient_accumulation_steps", "1", "--dataloader_num_workers", "2"]),
}


@pytest.mark.long
def test_a_stream_resumed_in_any_pass_is_the_run_that_went_on(model, tmp_path):
    """Twice in one pass, and in the third one: the same tokens and counts in any layout, the same bits in this one."""
    data = write_jsonl(tmp_path / "data.jsonl", make_documents(LENGTHS, seed=3, masked=0.95))
    common = [*flags_of_run(model, data, tmp_path / "whole"), *STREAM, *PACKINGS["packed"][0], "--sp", "1"]
    common += ["--max_steps", "11", "--lr_scheduler_type", "constant", "--gradient_accumulation_steps", "4"]
    common += ["--save_strategy", "steps", "--save_steps", "1"]
    run_ranks(1, TRAIN, {"whole": common})
    expected, entry = logged(tmp_path / "whole")
    assert entry["packing"]["passes"] == 3
    for name, (processes, before, step, flags) in RESUMED.items():
        given = [*common, *flags, "--output_dir", str(tmp_path / name)]
        given += ["--resume_from_checkpoint", str(tmp_path / before / f"checkpoint-{step}")]
        run_ranks(processes, TRAIN, {name: given})
        found, entry_here = logged(tmp_path / name)
        for one, two in zip(expected, found, strict=False):
            if processes == 1:
                assert one == two, name
            assert (one["step"], one["num_tokens"]) == (two["step"], two["num_tokens"]), name
            assert two == pytest.approx(one, rel=1e-4), name
        if name != "once":
            assert len(found) == len(expected)
            assert entry_here == entry, name


def logged(folder):
    """Return the entries of the steps in a run's log, and the entry with the counts."""
    entry, *log = read_log(folder)
    names = ("step", "loss", "grad_norm", "num_tokens")
    return [{name: step[name] for name in names} for step in log if "loss" in step], entry


def test_a_stream_without_labels_ends_with_its_first_pass(model, tmp_path, capsys):
    data = write_lines(tmp_path / "data.jsonl", [{"input_ids": [1, 2, 3], "labels": [1, -100, -100]}] * 5)
    flags = [*flags_of_run(model, data, tmp_path / "out"), *STREAM, "--use_cpu", "True"]
    assert main([*flags, "--per_device_train_batch_size", "2"]) == 2
    assert "no token with a label in 1 steps, the whole data set: 5 documents with 15 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max_steps", "-1"], "--max_steps -1: .* Add --max_steps N"),
        (["--balance_packs", "True"], "--balance_packs True .* Leave out --balance_packs"),
        (["--shuffle_dataset", "True"], "--shuffle_dataset True .* read in order"),
        (["--prepare_only", "True"], "--prepare_only True"),
        (["--eval_strategy", "epoch"], "--eval_strategy epoch .* Use --eval_strategy steps"),
        (["--save_strategy", "epoch"], "--save_strategy epoch"),
        (["--logging_strategy", "epoch"], "--logging_strategy epoch"),
        (["--packing_strategy", "wrapped"], "--packing_strategy wrapped .* --overlong split"),
        (["--resume_from_checkpoint", "folder"], "--resume_from_checkpoint folder"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(flags, words, tmp_path, capsys):
    assert main([*flags_of_run("tiny", "stdlib", tmp_path), *STREAM, *flags]) == 2
    assert re.search(words, capsys.readouterr().err)


@pytest.mark.long
def test_a_bad_record_ends_the_run_with_its_place(model, tmp_path):
    """On all ranks, with one clear line, and in the step that needs it: what is read before is trained on."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": "x" * 50}) + "\n" for _ in range(600)) + "{\n")
    command = [sys.executable, "-m", "longctx.train", *flags_of_run(model, data, tmp_path / "out"), *STREAM]
    command += ["--sp", "2", "--packing", "False", "--per_device_train_batch_size", "200"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.count("longctx: error: ") == 1
    assert f"longctx: error: {data}:601: malformed JSON" in done.stderr
    assert "Traceback" not in done.stderr
    assert re.findall(r"^ *(\d)/\d+ ", done.stdout, re.MULTILINE) == ["1", "2"]


def test_a_stream_whose_labels_are_all_cut_off_saves_no_model(model, tmp_path, capsys):
    data = write_lines(tmp_path / "data.jsonl", [{"prompt": "Why? " * 40, "completion": "So."}] * 8)
    flags = [*flags_of_run(model, data, tmp_path / "out"), *STREAM]
    assert main([*flags, "--overlong", "truncate", "--use_cpu", "True"]) == 2
    assert f"had no token with a label in {STEPS} steps" in capsys.readouterr().err
    assert not list(tmp_path.glob("out/*.safetensors"))


def test_a_resumed_stream_without_further_labels_is_saved(model, tmp_path):
    """The only label is in the first step, which the resumed run does not repeat."""
    records = [{"prompt": "Why? ", "completion": "So."}, *[{"prompt": "Why? " * 40, "completion": "So."}] * 4]
    data = write_lines(tmp_path / "data.jsonl", records)
    flags = [*flags_of_run(model, data, tmp_path / "out"), *STREAM, "--resume_from_checkpoint", "auto"]
    flags += ["--overlong", "truncate", "--packing", "False", "--use_cpu", "True", "--save_strategy", "steps"]
    flags += ["--save_steps", "2"]
    assert main([*flags, "--max_steps", "2"]) == 0
    assert main([*flags, "--max_steps", "4"]) == 0

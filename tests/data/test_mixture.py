"""Mixtures of data sets: the documents that datasets.interleave_datasets and TRL's get_dataset would give, counted.

A run on a mixture is held against one process on a file with the documents that `datasets` mixes by itself; tolerances
as in test_training. Resumed runs are the same bits.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
from datasets import Dataset

from longctx.data import (
    MixedStream,
    Mixture,
    load_records,
    mix,
    name_data,
    stream_records,
    target_counts,
    tokenize_records,
    tokenize_stream,
)
from longctx.packing import PackedStream, add_counts
from longctx.run.preparation import prepare_data
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from longctx.train import main
from tests.jsonl import write_lines
from tests.training.test_resume import run_all, values, weights
from tests.training.test_training import COMMON, make_documents, relative
from tests.workers import run_ranks

STRATEGIES = ("first_exhausted", "all_exhausted", "all_exhausted_without_replacement")
SIZES = (40, 7, 300)  # the last is of more than one table of a stream
SHARES = (0.5, 0.2, 0.3)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Text, text to be completed and tokens: without labels, with some of them masked, with a column of labels."""
    folder, rng = tmp_path_factory.mktemp("sources"), np.random.default_rng(0)
    texts = [f"{number} {'x' * int(rng.integers(1, 60))}" for number in range(max(SIZES))]
    records = [
        [{"text": f"a{text}"} for text in texts[: SIZES[0]]],
        [{"prompt": f"b{text}", "completion": text} for text in texts[: SIZES[1]]],
        [{"input_ids": [3, number % 250, number // 250], "labels": [3, -100, 5]} for number in range(SIZES[2])],
    ]
    return [write_lines(folder / f"{name}.jsonl", lines) for name, lines in zip("abc", records, strict=True)]


def mixture_of(files, **options):
    return Mixture(names=tuple(files), **options)


def mixed_by_datasets(sources, **options):
    """(input_ids, labels) in the order of the reference."""
    whole = []
    for source in sources:
        labels = source["labels" if "labels" in source.column_names else "input_ids"][:]
        whole.append(Dataset.from_dict({"input_ids": source["input_ids"][:], "labels": labels}))
    mixed = datasets.interleave_datasets(whole, **options) if options else datasets.concatenate_datasets(whole)
    return list(zip(mixed["input_ids"][:], mixed["labels"][:], strict=True))


def as_lists(documents):
    return [(np.asarray(d["input_ids"]).tolist(), np.asarray(d["labels"]).tolist()) for d in documents]


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("strategy", [*STRATEGIES, None])
def test_documents_come_as_datasets_interleaves_them(strategy, seed, files, tokenizer):
    """And a stream of them is the same, from any document on, with the same counts."""
    sources = [tokenize_records(load_records(path), tokenizer) for path in files]
    streams = [tokenize_stream(stream_records(path), tokenizer) for path in files]
    if strategy is None:
        expected, mixture = mixed_by_datasets(sources), mixture_of(files, seed=seed)
    else:
        options = {"seed": seed, "stopping_strategy": strategy}
        expected = mixed_by_datasets(sources, probabilities=list(SHARES), **options)
        mixture = mixture_of(files, weights=(5, 2, 3), **options)
    documents, report = mix(sources, mixture)
    assert as_lists(documents) == expected
    stream = MixedStream(streams, mixture)
    assert as_lists(stream) == expected
    lanes = PackedStream(stream, 128).lanes(3, [0, 1, 2])
    for lane in lanes.values():
        while lane.take() is not None:
            pass
    counts = add_counts(lane.counts for lane in lanes.values())
    for source, streamed in zip(report, stream.reports(counts), strict=True):
        assert (streamed.documents, streamed.tokens) == (source.documents, source.tokens)
        assert streamed.documents_repeated == source.documents_repeated
        if streamed.documents_there is not None:
            assert streamed == source
    lengths = [counts[f"{source} there"] for source in range(len(files))]
    for first in (1, len(expected) // 3, len(expected) - 1):
        again = stream.documents_from(first, lambda number: number % 3 == 1, lengths)
        numbers = [number for number in range(first, len(expected)) if number % 3 == 1]
        found = [*again]
        assert [document.number for document in found] == numbers
        assert as_lists(document.columns for document in found) == [expected[number] for number in numbers]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_repeated_and_left_out_is_counted(strategy, files, tokenizer):
    sources = [tokenize_records(load_records(path), tokenizer) for path in files]
    documents, report = mix(sources, mixture_of(files, weights=SHARES, stopping_strategy=strategy))
    drawn = [tuple(ids) for ids in documents["input_ids"][:]]
    for source, counted, share in zip(sources, report, SHARES, strict=True):
        own = [tuple(ids) for ids in source["input_ids"][:]]
        there = [ids for ids in drawn if ids in set(own)]
        assert counted.documents == len(there)
        assert counted.tokens == sum(map(len, there))
        assert counted.documents_left_out == len({*own} - {*there})
        assert counted.documents_repeated == len(there) - len({*there})
        assert counted.share_asked == pytest.approx(share)
        assert counted.share_of_documents == len(there) / len(drawn)
        assert counted.share_of_tokens == pytest.approx(sum(map(len, there)) / sum(map(len, drawn)))
        assert counted.epochs == len(there) / len(own)
        told = {"repeated": counted.documents_repeated, "left out": counted.documents_left_out}
        shares = f"({share:.1%} requested) of the documents and {counted.share_of_tokens:.1%} of the tokens; "
        more = "".join(f"; {number} documents {word}" for word, number in told.items() if number)
        assert str(counted).endswith(f"{shares}{counted.epochs:.2f} epochs{more}")
    repeated = sum(source.documents_repeated for source in report)
    assert (repeated > 0) == (strategy == "all_exhausted")
    assert (sum(source.documents_left_out for source in report) > 0) == (strategy == "first_exhausted")


@pytest.mark.parametrize("fractions", [None, (0.5, 0.1, 0.4), (1, 1, 2)])
def test_fractions_are_trls(fractions, files, tokenizer, tmp_path):
    from trl import DatasetMixtureConfig, get_dataset

    entries = []
    for number, path in enumerate(files):  # TRL reads folders
        folder = tmp_path / str(number)
        folder.mkdir()
        ids = tokenize_records(load_records(path), tokenizer)["input_ids"][:]
        write_lines(folder / "train.jsonl", ({"input_ids": line} for line in ids))
        entries.append({"path": str(folder)} | ({"fraction": fractions[number]} if fractions else {}))
    expected = get_dataset(DatasetMixtureConfig(datasets=[*entries]))["train"]
    sources = [tokenize_records(load_records(entry["path"]), tokenizer) for entry in entries]
    documents, _ = mix(sources, mixture_of(files, fractions=fractions))
    assert documents["input_ids"][:] == expected["input_ids"][:]


def test_no_document_is_trained_and_evaluated_on(files, tokenizer):
    sources = [tokenize_records(load_records(path), tokenizer) for path in files]
    mixture = mixture_of(files, weights=SHARES, stopping_strategy=STRATEGIES[2], test_size=0.25)
    parts = {part: mix(sources, mixture, part) for part in ("train", "test")}
    ids = {part: [tuple(line) for line in documents["input_ids"][:]] for part, (documents, _) in parts.items()}
    assert len(ids["test"]) == -(-sum(SIZES) // 4)
    assert sum(len(lines) for lines in ids.values()) == sum(SIZES)
    assert not {line for line in ids["train"] if len(line) > 3} & {line for line in ids["test"] if len(line) > 3}
    for part, (_, report) in parts.items():
        assert sum(source.documents for source in report) == len(ids[part])
        assert [(source.documents_left_out, source.documents_repeated) for source in report] == [(0, 0)] * 3, part
    mixture = mixture_of(files, weights=SHARES, stopping_strategy=STRATEGIES[0])
    _, whole = mix(sources, mixture)
    for part in ("train", "test"):
        _, report = mix(sources, replace(mixture, test_size=0.25), part)
        assert [source.documents_left_out for source in report] == [source.documents_left_out for source in whole]


def test_a_packed_mixture_goes_on_from_a_position(files, tokenizer):
    """In the second pass too, where it is known how long the data sets are."""
    mixture = mixture_of(files, weights=SHARES, stopping_strategy="all_exhausted")

    def stream():
        return PackedStream(MixedStream([tokenize_stream(stream_records(f), tokenizer) for f in files], mixture), 128)

    whole = stream()
    rows = [*whole, *whole]
    once = len(rows) // 2
    for stop in (3, once - 1, once + 4):
        before, after = stream(), stream()
        if stop > once:
            list(before)
        read = iter(before)
        list(islice(read, stop - once if stop > once else stop))
        after.go_on_from(json.loads(json.dumps(before.position())))
        rest = list(after)
        assert [row["input_ids"].tolist() for row in rest] == [row["input_ids"].tolist() for row in rows[stop:]][
            : len(rest)
        ]
        assert len(rest) == once - stop % once
        assert after.report == whole.report


# ------------------------------------------------------------------------------------------------
# Training
# ------------------------------------------------------------------------------------------------

LENGTHS = {"a": [90, 7, 41, 130, 64, 2, 33, 17], "b": [88, 120, 5, 76, 31]}
RUNS = {
    "cached": ["--dataset_stopping_strategy", "all_exhausted"],
    "streamed": ["--dataset_streaming", "True", "--dataset_stopping_strategy", "all_exhausted"],
}
LAYOUTS = {
    "1 process": (1, []),
    "ring on FSDP2": (2, ["--sp", "2", "--sp_backend", "ring"]),
    "ulysses on ZeRO-3": (2, ["--sp", "2", "--sp_backend", "ulysses"]),
    "gather, dp 2": (4, ["--sp", "2", "--sp_backend", "gather"]),
}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Two data sets, and what `datasets` makes of them, each a file."""
    folder = tmp_path_factory.mktemp("corpora")
    made = {name: make_documents(lengths, seed=ord(name)) for name, lengths in LENGTHS.items()}
    parts = [Dataset.from_list([{"input_ids": i, "labels": n} for i, n in documents]) for documents in made.values()]
    mixed = datasets.interleave_datasets(parts, [0.6, 0.4], seed=42, stopping_strategy="all_exhausted")
    for name, part in zip([*made, "mixed"], [*parts, mixed], strict=True):
        part.to_json(str(folder / f"{name}.jsonl"))
    return SimpleNamespace(a=str(folder / "a.jsonl"), b=str(folder / "b.jsonl"), mixed=str(folder / "mixed.jsonl"))


def flags_of(layout, run, corpora, models, output_dir):
    processes, given = LAYOUTS[layout]
    flags = [*COMMON, *given, *RUNS[run], "--max_length", "160", "--overlong", "split"]
    flags += ["--datasets", corpora.a, corpora.b, "--dataset_weights", "3", "2"]
    flags += ["--gradient_accumulation_steps", str(2 if processes < 4 else 1)]
    return [*flags, "--model_name_or_path", models["GQA 4:2"], "--output_dir", str(output_dir)]


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_on_a_mixture(layout, corpora, models, tmp_path):
    """Every rank has the losses of one process on the mixed file, and a resumed run goes on with the same documents."""
    cases = {}
    for run in RUNS:
        cases[run, 0] = flags_of(layout, run, corpora, models, tmp_path / run)
        cases[run, 0] += ["--save_strategy", "steps", "--save_steps", "1"]
        for step in (2, 4):
            cases[run, step] = flags_of(layout, run, corpora, models, tmp_path / f"{run} {step}")
            cases[run, step] += ["--resume_from_checkpoint", str(tmp_path / run / f"checkpoint-{step}")]
    ranks = run_ranks(LAYOUTS[layout][0], f"{__name__}:run_all", cases, timeout=900)
    for run in RUNS:
        alone = flags_of("1 process", run, corpora, models, tmp_path / f"{run} alone")
        first, last = alone.index("--datasets"), alone.index("--gradient_accumulation_steps")
        alone[first:last] = ["--dataset_name", corpora.mixed]
        alone[alone.index("--gradient_accumulation_steps") + 1] = "2"
        expected = [entry["loss"] for entry in run_all({run: alone})[run] if "loss" in entry]
        for rank in ranks:
            assert relative([e["loss"] for e in rank[run, 0] if "loss" in e], expected) <= 1e-4, run
        whole = weights(tmp_path / run)
        log = json.loads((tmp_path / run / "trainer_state.json").read_text())["log_history"][0]
        assert {source["name"] for source in log["mixture"]} == {corpora.a, corpora.b}
        for step in (2, 4):
            assert values(ranks[0][run, step]) == values(ranks[0][run, 0]), (run, step)
            found = weights(tmp_path / f"{run} {step}")
            assert all(found[name].equal(whole[name]) for name in whole), (run, step)
            again = json.loads((tmp_path / f"{run} {step}" / "trainer_state.json").read_text())["log_history"][0]
            assert again == log, (run, step)


def test_other_weights_or_data_sets_are_not_gone_on_with(corpora, models, tmp_path, capsys):
    for run in RUNS:
        flags = [*flags_of("1 process", run, corpora, models, tmp_path / run), "--save_steps", "2", "--max_steps", "2"]
        assert main([*flags, "--save_strategy", "steps"]) == 0
        flags += ["--resume_from_checkpoint", "auto", "--max_steps", "3"]
        assert main([*flags, "--dataset_weights", "2", "3"]) == 2
        assert "mixture: {'weights': [3.0, 2.0]" in capsys.readouterr().err
        assert main([*flags, "--datasets", corpora.b, corpora.a]) == 2
        assert "has changed since" in capsys.readouterr().err


def test_a_mixture_is_prepared_evaluated_and_printed(corpora, tmp_path, capsys):
    """From a file in TRL's form."""
    config = tmp_path / "run.yaml"
    entries = (
        f"  - path: {corpora.a}\n    columns: [input_ids, labels]\n  - path: {corpora.b}\n    split: train[:80%]\n"
    )
    config.write_text(f"model_name_or_path: tiny\nmax_length: 160\ndatasets:\n{entries}test_split_size: 0.2\n")
    given = ["--config", str(config), "--eval_strategy", "steps", "--eval_steps", "1"]
    given += ["--output_dir", str(tmp_path / "out")]
    assert main([*given, "--prepare_only", "True"]) == 0
    printed = capsys.readouterr().out
    assert "packing   9 documents" in printed  # of 8, and of 80% of 5, less a fifth
    assert re.search(rf"mixture   {corpora.a}: \d documents with [\d,]+ tokens, \d\d.\d% of the documents", printed)
    assert main([*given, "--max_steps", "1", "--report_to", "none", "--disable_tqdm", "True"]) == 0
    printed = capsys.readouterr().out
    assert f"data      a mixture of {corpora.a}, {corpora.b} [train[:80%]], packed" in printed
    assert "evaluate  3 documents with" in printed
    targets, tokens = re.search(r"targets   ([\d,]+) of the ([\d,]+) tokens in the documents \(", printed).groups()
    assert 0 < int(targets.replace(",", "")) < int(tokens.replace(",", ""))
    assert re.search(r"evaluated +after step 1: loss \d", printed)


@pytest.mark.long
def test_a_mixture_is_verified(corpora, capfd):
    from longctx.verify.__main__ import main as verify

    mixture = ["--datasets", corpora.a, corpora.b, "--dataset_weights", "0.5", "0.5", "--max_length", "160"]
    assert verify(["--sp", "1", *mixture, "--per_device_train_batch_size", "1"]) == 0
    assert f"a mixture of {corpora.a} 50.0%" in capfd.readouterr().out


def test_a_part_of_a_single_data_set_is_kept_for_evaluation(files, monkeypatch):
    """The parts are those of datasets' train_test_split; TRL would ignore the flag without --datasets."""
    monkeypatch.setattr("longctx.settings.resolve.device_count", lambda: 0)
    split = ["--test_split_size", "0.25", "--eval_strategy", "steps", "--dataset_test_split", "none"]

    def prepared(*flags):
        flags = ["--model_name_or_path", "tiny", "--dataset_name", files[2], "--max_length", "160", *flags]
        run = resolve(parse_flags(flags), read_profile({}), {})
        return run, prepare_data(run)

    run, data = prepared(*split)
    assert data.mixture == ()
    assert name_data(run.settings) == files[2]
    assert f"--test_split_size 0.25 of --dataset_name {files[2]} is kept for evaluation; TRL ignores it" in run.notes[0]
    assert "--dataset_test_split has no effect with --test_split_size" in run.notes
    expected = prepared()[1].documents.train_test_split(0.25, seed=run.settings["seed"])
    assert (len(expected["train"]), len(expected["test"])) == (225, 75)
    assert data.documents[:] == expected["train"][:]
    assert data.evaluation.documents[:] == expected["test"][:]
    for idle in (["--dataset_weights", "0.7", "0.3"], ["--dataset_weights", "1", *REPEATS]):
        run, weighted = prepared(*split, *idle)
        assert weighted.documents[:] == data.documents[:]
        assert "--dataset_weights has no effect without --datasets" in run.notes
    with pytest.raises(ValueError, match=r"--test_split_size 0\.25 of a stream"):
        prepared(*split, "--dataset_streaming", "True", "--max_steps", "2")


def test_the_tokens_that_are_trained_on_are_counted(files, tokenizer):
    """Every label counts but that of a document's first token, also in documents that are selected."""
    completion, tokens = (tokenize_records(load_records(path), tokenizer) for path in files[1:])
    assert target_counts(tokens).tolist() == [1] * SIZES[2]  # [3, -100, 5]
    chosen = completion.select([4, 1, 4])
    expected = [sum(label != -100 for label in labels[1:]) for labels in chosen["labels"][:]]
    assert target_counts(chosen).tolist() == expected
    assert len({*expected}) > 1 or sum(expected) > 3


TWO = ["--datasets", "a.jsonl", "b.jsonl"]
REPEATS = ["--dataset_stopping_strategy", "all_exhausted"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([*TWO, "--dataset_weights", "1", "0"], "--dataset_weights 0 is out of range: leave out a data set"),
        ([*TWO, "--test_split_size", "2"], "--test_split_size 2 is out of range: it is a share of the documents."),
        ([*TWO, "--test_split_size", "0.5", "--streaming", "True"], "--test_split_size 0.5 of a stream"),
        (
            [*TWO, *REPEATS, "--dataset_weights", "1", "1", "--test_split_size", "0.5"],
            "would evaluate on documents that are trained on",
        ),
        (["--datasets", "{path: a, weight: 1}"], "a sets weight, which is not a key"),
        (["--datasets", "{path: json, data_files: a.jsonl}"], "json sets data_files a.jsonl, which is not supported"),
        (["--datasets", "{name: a}"], "is not a data set. Expected '- path:"),
        (["--datasets", "5"], "5 is not a data set. Expected '- path:"),
        (["--datasets", "{path: a, columns: text}"], "a has columns 'text'; expected a list"),
        (["--streaming", "True", "--datasets", "{path: a, fraction: 1}"], "a stream cannot have a fraction"),
    ],
)
def test_bad_input(flags, words, tmp_path, capsys):
    """What begins with a brace, or stands for itself, is an entry of a --config file."""
    entries = [] if "--datasets" in flags and flags[flags.index("--datasets") + 1].endswith(".jsonl") else flags
    if entries:
        start = flags.index("--datasets")
        config = tmp_path / "run.yaml"
        config.write_text("datasets:\n" + "".join(f"  - {entry}\n" for entry in flags[start + 1 :]))
        flags = [*flags[:start], "--config", str(config)]
    common = ["--model_name_or_path", "tiny", "--max_steps", "1", "--dry_run", "True"]
    assert main([*common, *flags]) == 2
    assert words in capsys.readouterr().err


def test_a_column_that_is_not_there_and_flags_that_do_nothing(corpora, tmp_path, capsys, without_preflight):
    config = tmp_path / "run.yaml"
    config.write_text(f"model_name_or_path: tiny\ndatasets: [{{path: {corpora.a}, columns: [text]}}]\n")
    assert main(["--config", str(config), "--prepare_only", "True"]) == 2
    assert f"{corpora.a}: no column 'text' to select; there are input_ids, labels" in capsys.readouterr().err
    common = ["--model_name_or_path", "tiny", "--dry_run", "True"]
    assert main([*common, "--dataset_name", "stdlib", *REPEATS, "--test_split_size", "0.1"]) == 0
    printed = capsys.readouterr().out
    assert "--dataset_stopping_strategy has no effect without --datasets" in printed
    assert main([*common, *TWO, *REPEATS, "--dataset_train_split", "x"]) == 0
    printed = capsys.readouterr().out
    assert "--dataset_stopping_strategy has no effect without --dataset_weights" in printed
    assert "--dataset_train_split has no effect with --datasets: each names its own" in printed

"""Evaluation, prediction and the training log's token means on real gloo ranks, against plain transformers.

Tolerance 1e-5 relative, all fp32: sums run in another order on several ranks. Accuracies are counts, so they are equal.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from transformers import AutoModelForCausalLM

from longctx.run.preparation import prepare_data
from longctx.settings.flags import SFT
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from longctx.train import main
from tests.few import few
from tests.reference import dense_logits
from tests.small_model import save_small_model
from tests.training.test_training import make_documents, prepared_run, write_jsonl
from tests.workers import one_by_one, run_ranks

TRAIN_LENGTHS = [60, 7, 41, 1, 90, 64, 2, 33]
EVAL_LENGTHS = [50, 3, 121, 2, 1, 64, 9, 33, 80, 17, 5]
"""11 rows: dealt out in twos over 2 or 4 data-parallel ranks, the last batch leaves some ranks without one."""

COMMON = ["--max_length", "128", "--per_device_train_batch_size", "2", "--learning_rate", "5e-3", "--max_steps", "2"]
COMMON += ["--logging_steps", "1", "--save_strategy", "no", "--report_to", "none", "--disable_tqdm", "True"]
EVALUATES = ["--eval_strategy", "steps", "--eval_steps", "2", "--eval_on_start", "True"]

ROWS = {
    "padded": ["--packing", "False"],
    "padding-free": ["--packing", "False", "--padding_free", "True"],
    "packed": ["--packing", "True"],
    "training packed, evaluation not": ["--packing", "True", "--eval_packing", "False"],
    "evaluation packed, training not": ["--packing", "False", "--eval_packing", "True"],
}
RING, ULYSSES = (["--sp", "2", "--sp_backend", name] for name in ("ring", "ulysses"))
LAYOUTS = {  # (processes, flags, kinds of rows and batches): sizes that divide the rows and that do not
    "sp 1": (1, [], {"padded": 4, "packed": 1}),
    "dp 4": (4, ["--sp", "1"], {"padded": 2, "padding-free": 1}),
    "ring sp 2": (2, RING, {"padded": 3, "evaluation packed, training not": 2}),
    "ulysses sp 2": (2, ULYSSES, {"training packed, evaluation not": 4}),
    "ring sp 4": (4, ["--sp", "4", "--sp_backend", "ring"], {"packed": 1, "padded": 11}),
    "ulysses sp 4": (4, ["--sp", "4", "--sp_backend", "ulysses"], {"padding-free": 3}),
    "ring sp 2 × dp 2": (4, RING, {"training packed, evaluation not": 2, "padded": 8}),
    "ring sp 2 × dp 2 on ZeRO-3": (4, [*RING, "--engine", "deepspeed"], {"packed": 1}),
    "ulysses sp 2 × dp 2": (4, ULYSSES, {"padded": 2}),
    "ulysses sp 2 × dp 2 on FSDP2": (4, [*ULYSSES, "--engine", "fsdp2"], {"packed": 2}),
    "HSDP, ring sp 2": (4, [*RING, "--dp_replicate", "2"], {"padded": 2}),
}

SHARES = [0.0, 0.5, 0.95]
"""Of a document's tokens, those that are not learnt: of some documents nearly nothing is."""
TRAIN, EVALUATION = (
    make_documents(lengths, seed=seed, shares=SHARES) for seed, lengths in enumerate((TRAIN_LENGTHS, EVAL_LENGTHS))
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_small_model(tmp_path_factory.mktemp("model"), hidden_size=64)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with a train and a test split."""
    folder = tmp_path_factory.mktemp("data")
    write_jsonl(folder / "train.jsonl", TRAIN)
    write_jsonl(folder / "test.jsonl", EVALUATION)
    return str(folder)


def dense_means(folder, documents):
    """Loss, accuracy and entropy over all label tokens, and the log-probability of every document's targets."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        logits, targets = dense_logits(model, documents)
    log_probs, learnt = logits.double().log_softmax(-1), targets != -100
    picked = log_probs.gather(-1, targets.clamp(min=0)[:, None])[:, 0] * learnt
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    correct = (logits.argmax(-1) == targets) & learnt
    count = learnt.sum().item()
    means = {"loss": -picked.sum() / count, "entropy": entropy[learnt].sum() / count}
    per_document = picked.roll(1).split([len(ids) for ids, _ in documents])
    return {name: float(value) for name, value in means.items()}, int(correct.sum()), count, per_document


def check_means(entry, expected, prefix):
    means, correct, count, _ = expected
    assert entry[f"{prefix}mean_token_accuracy"] * count == pytest.approx(correct, abs=1e-6)
    for name, value in means.items():
        assert entry[f"{prefix}{name}"] == pytest.approx(value, rel=1e-5), name


def trained(arguments, method=SFT):
    """A finished run on this process group."""
    from longctx.run import fit, load

    AcceleratorState._reset_state()
    prepared = prepared_run(arguments, method)
    return prepared, fit(prepared, load(prepared))


def run_evaluations(cases):
    """{case: (log, metrics of evaluate(), metrics and predictions of predict())} on this process group."""
    results = {}
    for case, arguments in one_by_one(cases):
        prepared, trainer = trained(arguments)
        documents = prepared.data.evaluation.documents
        again = trainer.evaluate(documents)
        predicted = trainer.predict(documents)
        results[case] = (trainer.state.log_history, again, predicted.metrics, predicted.predictions)
    return results


def check_evaluations(result, before, after):
    """What `run_evaluations` gives of a case, with what is expected before training and after it."""
    log, again, metrics, predictions = result
    assert after[0]["loss"] != pytest.approx(before[0]["loss"], rel=1e-4)
    start, end = [entry for entry in log if "eval_loss" in entry][:2]
    check_means(start, before, "eval_")
    check_means(end, after, "eval_")
    check_means(again, after, "eval_")
    check_means(metrics, after, "test_")
    trained_on = [entry["num_tokens"] for entry in log if "loss" in entry][-1]
    assert (start["eval_num_tokens"], end["eval_num_tokens"]) == (0, trained_on)
    assert [len(row) for row in predictions] == EVAL_LENGTHS
    for row, expected in zip(predictions, after[3], strict=True):
        np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", few(LAYOUTS, ["ring sp 2 × dp 2 on ZeRO-3"]))
def test_evaluation_equals_one_process(layout, model, data, tmp_path):
    """Before training, after it, by evaluate() on other rows, and by predict(); the weights after it are the saved."""
    processes, flags, kinds = LAYOUTS[layout]
    before, cases = dense_means(model, EVALUATION), {}
    for rows, batch in kinds.items():
        cases[rows] = [*COMMON, *EVALUATES, *ROWS[rows], *flags, "--per_device_eval_batch_size", str(batch)]
        cases[rows] += ["--model_name_or_path", model, "--dataset_name", data, "--output_dir", f"{tmp_path}/{rows}"]
    for results in run_ranks(processes, f"{__name__}:run_evaluations", cases):
        for case, result in results.items():
            check_evaluations(result, before, dense_means(tmp_path / case, EVALUATION))


# ------------------------------------------------------------------------------------------------
# The training log
# ------------------------------------------------------------------------------------------------

EPOCHS = 2


@pytest.mark.long
def test_the_training_log_is_that_of_one_process(model, tmp_path):
    """Accuracy, entropy, tokens, steps and epochs, with unequal label counts and a last step of 3 rows of 4.

    The learning rate is 0, so that every step sees the weights of the start.
    """
    data = write_jsonl(tmp_path / "data.jsonl", EVALUATION)
    flags = [*COMMON, "--max_steps", "-1", "--num_train_epochs", str(EPOCHS), "--learning_rate", "0"]
    flags += ["--train_sampling_strategy", "sequential", "--packing", "False", "--dataset_name", data]
    flags += ["--model_name_or_path", model, "--per_device_train_batch_size", "1", "--gradient_accumulation_steps"]
    steps = [EVALUATION[start : start + 4] for start in (0, 4, 8)] * EPOCHS
    expected = [dense_means(model, documents) for documents in steps]
    tokens = np.cumsum([sum(len(ids) for ids, _ in documents) for documents in steps]).tolist()
    epochs = [round(epoch + seen / 11, 6) for epoch in range(EPOCHS) for seen in (4, 8, 11)]
    for layout, accumulation in (("sp 1", 4), ("dp 4", 1), ("ring sp 2 × dp 2", 2), ("ulysses sp 2 × dp 2", 2)):
        processes, given, _ = LAYOUTS[layout]
        case = [*flags, str(accumulation), *given, "--output_dir", str(tmp_path / layout)]
        log = run_ranks(processes, "tests.training.test_training:log_of", case)[0]
        log = [entry for entry in log if "loss" in entry]
        assert [entry["num_tokens"] for entry in log] == tokens, layout
        assert [round(entry["epoch"], 6) for entry in log] == epochs, layout
        for entry, means in zip(log, expected, strict=True):
            check_means(entry, means, "")


# ------------------------------------------------------------------------------------------------
# Bad input
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--eval_strategy", "steps", "--per_device_eval_batch_size", "0"], ("--per_device_eval_batch_size 0",)),
        (["--eval_strategy", "steps", "--eval_steps", "-1"], ("--eval_steps -1",)),
        (["--eval_strategy", "epoch", "--dataset_test_split", "dev"], ("'dev'", "test, train", "--dataset_test_split")),
        (
            ["--eval_strategy", "epoch", "--dataset_test_split", "test[2:3]", "--overlong", "drop"],
            ("test[2:3]", "leaves no sequence to evaluate on", "--overlong"),
        ),
    ],
)
def test_bad_input(flags, parts, model, data, capsys):
    assert main(["--model_name_or_path", model, "--dataset_name", data, "--max_length", "100", *flags]) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in parts), error


def test_a_mixture_is_evaluated_on_the_whole_split_of_every_data_set(data, tmp_path):
    """Whatever its weights are."""
    write_jsonl(tmp_path / "train.jsonl", TRAIN)
    write_jsonl(tmp_path / "test.jsonl", TRAIN[:3])
    flags = ["--model_name_or_path", "tiny", "--datasets", data, str(tmp_path), "--dataset_weights", "9", "1"]
    flags += ["--eval_strategy", "steps", "--dataset_test_split", "test", "--max_length", "128", "--use_cpu", "True"]
    evaluation = prepare_data(resolve(parse_flags(flags), read_profile({}), {})).evaluation
    assert evaluation.documents["input_ids"][:] == [ids for ids, _ in [*EVALUATION, *TRAIN[:3]]]


def test_a_split_without_labels(model, tmp_path, capsys):
    """The message names the split and what it holds, and both ways out."""
    write_jsonl(tmp_path / "train.jsonl", TRAIN)
    write_jsonl(tmp_path / "test.jsonl", [([5, 6, 7], [-100] * 3), ([8, 9], [8, -100])])
    flags = ["--dataset_name", str(tmp_path), "--eval_strategy", "steps", "--max_length", "128"]
    assert main(["--model_name_or_path", model, *flags]) == 2
    error = capsys.readouterr().err
    for part in ("--dataset_test_split test", "in 2 documents with 5 tokens", "every label is -100", "--eval_strategy"):
        assert part in error, error


def test_rows_that_cannot_be_evaluated(model, data, tmp_path):
    flags = [*COMMON, "--max_steps", "1", "--dataset_name", data, "--output_dir", str(tmp_path / "out")]
    _, trainer = trained([*flags, "--model_name_or_path", model])
    with pytest.raises(ValueError, match=r"no evaluation data: .*--eval_strategy"):
        trainer.evaluate()
    with pytest.raises(ValueError, match=r"need input_ids, and these have \['text'\]"):
        trainer.evaluate(Dataset.from_dict({"text": ["a"]}))
    with pytest.raises(ValueError, match="need input_ids, and these have the type list"):
        trainer.predict([{"input_ids": [1]}])
    unlearnt = Dataset.from_dict({"input_ids": [[5, 6]], "labels": [[-100, -100]]})
    assert np.isnan(trainer.evaluate(unlearnt)["eval_loss"])

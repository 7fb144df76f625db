"""Every cell of tests/matrix.py: training runs against one process, and the page that says what they have shown."""

from __future__ import annotations

import json
import os
import random
import shutil
import string
import traceback
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, interleave_datasets
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from longctx.settings.dpo import DPO
from longctx.settings.flags import SFT
from tests import support_page
from tests.jsonl import write_lines
from tests.matrix import COMPILED, FEATURES, NUMBERS, RUNS, SETUPS, SOFT_DEVICE, TRAINED_MODELS, YARN
from tests.reference import dpo_log_of_trl, train_reference
from tests.small_model import save_with_tokenizer
from tests.training.test_evaluation import check_means, dense_means, trained
from tests.training.test_training import make_documents, relative, write_jsonl
from tests.workers import run_ranks

ROOT = Path(__file__).parents[1]
LEARNING_RATE = 5e-3
COMMON = ["--max_steps", "5", "--learning_rate", str(LEARNING_RATE), "--max_length", "256", "--logging_steps", "1"]
COMMON += ["--save_strategy", "no", "--report_to", "none", "--disable_tqdm", "True"]
SECONDS_TO_START, SECONDS_A_RUN = 200, 60


# ------------------------------------------------------------------------------------------------
# Models and data
# ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with a subfolder for each of TRAINED_MODELS."""
    folder = tmp_path_factory.mktemp("models")
    for name, (model_type, settings) in TRAINED_MODELS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**settings), dtype=torch.float32)
        with torch.no_grad():  # biases, sinks and norms count too
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.15)
        save_with_tokenizer(model, folder / name)
    return folder


@dataclass(frozen=True, kw_only=True)
class Data:
    """A file or folder to train on, and what its rows are by an account of our own."""

    path: str
    batches: list
    """The documents (input_ids, labels) of every optimizer step."""
    evaluation: list | None = None
    mixes: tuple[str, ...] = ()
    """Flags of a mixture, in the place of a path."""

    @property
    def flags(self):
        return self.mixes or ("--dataset_name", self.path)


LENGTHS = [90, 7, 41, 1, 130, 64, 2, 33, 17, 88]  # two packs of 256: with dp 4, two ranks have none
EVAL_LENGTHS = [50, 3, 121, 2, 1, 64, 9]
TURNS = [("How long is a piece of string?", "Twice half."), ("And now?", "Longer than it was."), ("Why?", "Look.")]


def documents_of(folder, tokenizer):
    documents = make_documents(LENGTHS)
    return Data(path=write_jsonl(folder / "data.jsonl", documents), batches=[documents] * 5)


def unequal_documents(folder, tokenizer):
    """40 rows, 16 a step, two epochs; from nearly none to all of the tokens of a row are learnt."""
    documents = make_documents(np.random.default_rng(1).integers(2, 60, 40).tolist(), masked=0.97)
    epoch = [documents[:16], documents[16:32], documents[32:]]
    return Data(path=write_jsonl(folder / "data.jsonl", documents), batches=epoch * 2)


def documents_with_a_test_split(folder, tokenizer):
    documents, evaluation = make_documents(LENGTHS), make_documents(EVAL_LENGTHS, seed=1)
    write_jsonl(folder / "train.jsonl", documents)
    write_jsonl(folder / "test.jsonl", evaluation)
    return Data(path=str(folder), batches=[documents] * 5, evaluation=evaluation)


def mixture(folder, tokenizer):
    """What `datasets` draws of two files, those of the smaller one repeatedly."""
    parts = [make_documents(lengths, seed=seed) for seed, lengths in enumerate((LENGTHS, EVAL_LENGTHS))]
    paths = [write_jsonl(folder / f"{number}.jsonl", part) for number, part in enumerate(parts)]
    sources = [Dataset.from_list([{"input_ids": ids, "labels": labels} for ids, labels in part]) for part in parts]
    drawn = interleave_datasets(sources, [0.6, 0.4], seed=42, stopping_strategy="all_exhausted")
    documents = list(zip(drawn["input_ids"][:], drawn["labels"][:], strict=True))
    flags = ("--datasets", *paths, "--dataset_weights", "3", "2", "--dataset_stopping_strategy", "all_exhausted")
    return Data(path="", batches=[documents] * 5, mixes=flags)


def chats(folder, tokenizer):
    """The tokens of the assistant's turns are learnt, as the tokenizer's template marks them."""
    records, documents = [], []
    for number in range(1, len(TURNS) + 1):
        turns = TURNS[:number]
        messages = [{"role": role, "content": text} for turn in turns for role, text in zip(ROLES, turn, strict=True)]
        encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ids, learnt = encoded["input_ids"], encoded["assistant_masks"]
        records.append({"messages": messages})
        documents.append((ids, [token if mark else -100 for token, mark in zip(ids, learnt, strict=True)]))
    return Data(path=write_lines(folder / "data.jsonl", records), batches=[documents] * 5)


def completions(folder, tokenizer):
    """Prompts are not learnt."""
    records = [{"prompt": prompt, "completion": " " + completion} for prompt, completion in TURNS]
    documents = []
    for record in records:
        prompt, completion = (tokenizer(record[name])["input_ids"] for name in ("prompt", "completion"))
        completion = [*completion, tokenizer.eos_token_id]
        documents.append((prompt + completion, [-100] * len(prompt) + completion))
    return Data(path=write_lines(folder / "data.jsonl", records), batches=[documents] * 5)


def pairs_of_answers(folder, tokenizer):
    """As many pairs in every step; TRL makes their tokens itself."""
    letters = random.Random(0)

    def text(longest):
        return "".join(letters.choices(string.ascii_lowercase + " ", k=letters.randint(3, longest)))

    records = [{"prompt": text(20), "chosen": text(40), "rejected": text(40)} for _ in range(8)]
    return Data(path=write_lines(folder / "data.jsonl", records), batches=[records] * 5)


ROLES = ("user", "assistant")
RECORDS = {
    "documents": documents_of,
    "unequal documents": unequal_documents,
    "documents with a test split": documents_with_a_test_split,
    "mixture": mixture,
    "chats": chats,
    "completions": completions,
    "pairs of answers": pairs_of_answers,
}


# ------------------------------------------------------------------------------------------------
# Runs
# ------------------------------------------------------------------------------------------------


def train_all(cases):
    """{case: (log, predictions or None), or the error} of (arguments, environment, command) on this group."""
    before, results = dict(os.environ), {}
    for case, (arguments, environment, command) in cases.items():
        print(f"case {case}", flush=True)
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before | environment)
        try:
            prepared, trainer = trained(arguments, DPO if command == DPO.command else SFT)
            evaluation = prepared.data.evaluation
            predictions = trainer.predict(evaluation.documents).predictions if evaluation else None
            results[case] = trainer.state.log_history, predictions
        except Exception:  # the same on all ranks, or the others' time-out ends the group
            results[case] = traceback.format_exc()
    return results


@pytest.fixture(scope="module")
def run_of(request, models, tmp_path_factory):
    """`run_of(set-up, run)` -> (log, predictions, Data, output folder); selected runs are trained group by group."""
    folder, done = tmp_path_factory.mktemp("runs"), {}
    selected = [item.callspec.params["cell"] for item in request.session.items if is_a_run(item)]
    refused = {
        (setup, run): support_page.refusal(
            models, setup, RUNS[run].model, flags_of(setup, run), method=RUNS[run].method
        )
        for setup, run in selected
    }
    data = {}
    for name in {RUNS[run].records for _, run in selected}:
        (folder / name).mkdir()
        data[name] = RECORDS[name](folder / name, AutoTokenizer.from_pretrained(models / "GQA"))

    def run_of(setup, run):
        if refused[setup, run] is not None:
            pytest.skip(f"refused: {refused[setup, run]}")
        group = group_of(setup, run)
        if (setup, run) not in done:
            here = [cell for cell in selected if group_of(*cell) == group and refused[cell] is None]
            done.update(dict.fromkeys(here, "the processes ended early; see the first failure"))
            cases = {cell: case(*cell) for cell in here}
            timeout = SECONDS_TO_START + SECONDS_A_RUN * len(cases)
            done.update(run_ranks(group[0], f"{__name__}:train_all", cases, timeout=timeout)[0])
        if isinstance(done[setup, run], str):
            pytest.fail(done[setup, run])
        return *done[setup, run], data[RUNS[run].records], folder / f"{setup} {run}"

    def case(setup, run):
        training, output = RUNS[run], folder / f"{setup} {run}"
        flags = [*COMMON, *data[training.records].flags, *flags_of(setup, run)]
        flags += ["--model_name_or_path", str(models / training.model), "--output_dir", str(output)]
        return flags, dict(SETUPS[setup].env), training.method.command

    return run_of


def is_a_run(item):
    return getattr(item, "originalname", None) == test_a_run_equals_one_process.__name__


def flags_of(setup, run):
    return RUNS[run].flags_on(SETUPS[setup])


def group_of(setup, run):
    """(processes, whether on DeepSpeed): accelerate keeps to one engine in a process."""
    return RUNS[run].shape_of(SETUPS[setup])[0], SETUPS[setup].on_deepspeed


CELLS = [(setup, run) for setup in SETUPS for run in RUNS if not SETUPS[setup].only_on_gpu]


@pytest.mark.long
@pytest.mark.parametrize("cell", [pytest.param(cell, id=": ".join(cell)) for cell in CELLS])
def test_a_run_equals_one_process(cell, run_of, models, parity_table, monkeypatch):
    """First step to 1e-5, all losses to 1e-4; what else the run shows is checked by name."""
    setup, name = cell
    log, predictions, data, output = run_of(setup, name)
    steps, model = [entry for entry in log if "loss" in entry], models / RUNS[name].model
    losses, norms = reference_of(name, model, data, monkeypatch)
    if name == "early stopping":  # the loss gets better, and the flags ask for a worse one
        losses, norms = losses[:3], norms[:3]
    assert len(steps) == len(losses) == len(norms)
    errors = [relative([steps[0][key]], expected[:1]) for key, expected in (("loss", losses), ("grad_norm", norms))]
    if name == "bf16":
        check_bf16(errors, model, data, losses, norms)
        return
    over_all = relative([entry["loss"] for entry in steps], losses)
    parity_table.append((f"{setup}: {name}", "torchrun", *errors, over_all))
    assert max(errors) <= 1e-5
    assert over_all <= 1e-4
    if name == "packed":
        assert max(norms) > 1  # clipping at 1 acted
    if "--num_train_epochs" in RUNS[name].flags:
        assert steps[-1]["epoch"] == pytest.approx(2)
    if name == "evaluation":
        check_evaluation(log, predictions, data.evaluation, model, output)


def reference_of(name, model, data, monkeypatch):
    """(losses, gradient norms) of one process."""
    given = {}
    if name == "DPO":
        return steps_of_trl(model, data)
    if name == "LoRA":
        from tests.model.test_peft import Adapt

        given["adapt"] = Adapt(r=16, lora_alpha=32)
    if name == "label smoothing":
        given["label_smoothing"] = 0.1
    if name in ("gated delta", "Mamba-2", "short convolutions"):
        from tests.model.test_families import documents_loss

        monkeypatch.setattr("tests.reference.dense_loss", documents_loss)
    if name == "YaRN":
        model = scaled(model)
    steps = len(data.batches)
    return train_reference(model, None, steps=steps, learning_rate=LEARNING_RATE, batches=data.batches, **given)


def steps_of_trl(model, data):
    """(losses, gradient norms) of TRL's DPOTrainer on one process."""
    history = dpo_log_of_trl(
        *(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) for _ in range(2)),
        AutoTokenizer.from_pretrained(model),
        Dataset.from_list(data.batches[0]),
        str(model.parent / "DPO"),
        loss_type=["sigmoid", "sft"],
        per_device_train_batch_size=len(data.batches[0]),
        max_steps=len(data.batches),
        learning_rate=LEARNING_RATE,
        gradient_checkpointing=False,
    )
    steps = [entry for entry in history if "loss" in entry]
    return [step["loss"] for step in steps], [step["grad_norm"] for step in steps]


def scaled(model):
    """A copy whose config.json has the scaling, in transformers' words."""
    copy = model.with_name(f"{model.name}, YaRN")
    if not copy.exists():
        shutil.copytree(model, copy)
        config = json.loads((copy / "config.json").read_text())
        config["rope_parameters"] |= json.loads(YARN)
        (copy / "config.json").write_text(json.dumps(config))
    return copy


def check_bf16(errors, model, data, losses, norms):
    """No further from fp32 than 1.5 times one process in bf16; 3e-3 and 1e-2 are bf16's own steps."""
    with torch.autocast("cpu", torch.bfloat16):
        loss, norm = train_reference(model, data.batches[0], steps=1, learning_rate=LEARNING_RATE)
    assert errors[0] <= max(1.5 * relative(loss, losses[:1]), 3e-3)
    assert errors[1] <= max(1.5 * relative(norm, norms[:1]), 1e-2)


def check_evaluation(log, predictions, documents, model, output):
    """Before training and after it, the second with the weights that were saved."""
    before, after = dense_means(model, documents), dense_means(output, documents)
    start, end = (entry for entry in log if "eval_loss" in entry)
    check_means(start, before, "eval_")
    check_means(end, after, "eval_")
    assert [len(row) for row in predictions] == [len(ids) for ids, _ in documents]
    for row, expected in zip(predictions, after[3], strict=True):
        np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------
# The page
# ------------------------------------------------------------------------------------------------


def test_what_shows_a_feature_without_a_gpu_is_there():
    proofs = [proof for part in (FEATURES | SETUPS).values() for proof in part.without_gpu]
    assert {proof.kind for proof in proofs} == {NUMBERS, COMPILED, SOFT_DEVICE}
    assert not [proof.test for proof in proofs if not (ROOT / proof.test).is_file()]


@pytest.mark.long
def test_the_page_is_what_flags_and_declarations_give():
    """Cells that are no longer so are named; the command at the page's end makes it anew, or only a part of it."""
    refused = support_page.refusals()
    every_test = dict.fromkeys(support_page.declared(refused), True)
    before = support_page.PAGE.read_text()
    after = support_page.page(before, every_test, refused)
    assert support_page.differences(before, after) == []
    assert support_page.body(before) == support_page.body(after)

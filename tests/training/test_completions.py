"""--eval_generate on real gloo ranks and engines: the answers are those of `model.generate` in one process, exactly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from longctx import dpo
from longctx.model.tiny import tiny_tokenizer
from longctx.ranks import hang
from longctx.run.preparation import prepare_data
from longctx.settings.dpo import DPO
from longctx.settings.flags import SFT
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from longctx.train import main
from longctx.training.callbacks import RESUMABLE
from longctx.training.completions import COMPLETIONS_FILE, read_completions
from longctx.training.dataset import Reading, evaluation_prompts
from tests.few import few
from tests.jsonl import write_lines
from tests.small_model import save_small_model
from tests.softcuda.ranks import soft_environment
from tests.workers import run_ranks

MAX_LENGTH = 96
PROMPT_LENGTHS = [85, 80, 75, 60, 95, 90]
"""The room of an answer is 96 tokens less these."""
TOO_LONG = 120
FLAGS = ["--max_length", str(MAX_LENGTH), "--overlong", "truncate", "--max_steps", "2", "--learning_rate", "5e-3"]
FLAGS += ["--logging_steps", "1", "--save_strategy", "no", "--disable_tqdm", "True", "--eval_strategy", "steps"]
FLAGS += ["--eval_steps", "2", "--eval_on_start", "True"]
GENERATES = ["--eval_generate", "7"]
WITHOUT = "without the flag: "
LAYOUTS = {  # processes, flags, ZeRO's stage
    "1 process": (1, [], None),
    "ring on FSDP2": (2, ["--sp", "2", "--sp_backend", "ring"], None),
    "Ulysses on ZeRO-3": (2, ["--sp", "2", "--sp_backend", "ulysses"], 3),
    "ring on ZeRO-1": (2, ["--sp", "2", "--sp_backend", "ring", "--engine", "deepspeed"], 1),
    "Ulysses on ZeRO-2": (2, ["--sp", "2", "--sp_backend", "ulysses", "--engine", "deepspeed"], 2),
    "dp 2, an adapter": (2, ["--num_processes", "2", "--use_peft", "True", "--packing", "False"], None),
    "ring, in chunks": (2, ["--sp", "2", "--sp_backend", "gather", "--sequence_chunk_size", "16"], None),
    "hybrid": (4, ["--sp", "4", "--sp_backend", "hybrid"], None),
    "Ulysses 2 × dp 2 on ZeRO-3": (4, ["--sp", "2", "--sp_backend", "ulysses"], 3),
}
ALWAYS = ("1 process", "ring on FSDP2", "Ulysses on ZeRO-3", "dp 2, an adapter")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small model that repeats itself little; a fifth of all bytes end its answers."""
    folder = save_small_model(tmp_path_factory.mktemp("model"), hidden_size=64)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.3)
    model.generation_config.eos_token_id = [tiny_tokenizer().eos_token_id, *range(3, 259, 5)]
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Prompts and completions; the fourth prompt of the test split is too long."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)

    def text(length):
        return "".join(map(chr, rng.integers(97, 123, length)))

    test_lengths = [*PROMPT_LENGTHS[:3], TOO_LONG, *PROMPT_LENGTHS[3:]]
    for split, lengths in (("train", [30, 9, 50, 20]), ("test", test_lengths)):
        records = [{"prompt": text(length), "completion": text(8)} for length in [*lengths, 33]]
        write_lines(folder / f"{split}.jsonl", records)
    return folder


def generated(model, prompts):
    """What `generate` answers to each prompt alone, and why it ends."""
    tokenizer, answers = tiny_tokenizer(), []
    for prompt in prompts:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        new = model.generate(ids, do_sample=False, max_new_tokens=MAX_LENGTH - ids.shape[1])[0, ids.shape[1] :]
        ends = new[-1].item() in np.atleast_1d(model.generation_config.eos_token_id)
        answers.append((tokenizer.decode(new, skip_special_tokens=True), "stop" if ends else "length"))
    return answers


def saved_model(folder, base):
    """The trained model of a run in one process."""
    if not (folder / "adapter_config.json").is_file():
        return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    trained = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    return PeftModel.from_pretrained(trained, folder)


def steps_of(log):
    """What a run has computed: the log without times and memory."""
    names = ("loss", "grad_norm", "eval_loss", "num_tokens", "entropy", "step")
    return [{name: entry[name] for name in names if name in entry} for entry in log]


def prompts_in(data):
    """Those of the test split's first seven records that leave room for an answer."""
    prompts = [json.loads(line)["prompt"] for line in (data / "test.jsonl").read_text().splitlines()[:7]]
    return [prompt for prompt in prompts if len(prompt) < MAX_LENGTH]


def check_answers(folder, prompts, start, end):
    """A run's file has these answers before its training and after it."""
    lines = [json.loads(line) for line in (folder / COMPLETIONS_FILE).read_text().splitlines()]
    for step, expected in ((0, start), (2, end)):
        found = [line for line in lines if line["step"] == step]
        assert [line["prompt"] for line in found] == prompts
        assert [(line["completion"], line["finish_reason"]) for line in found] == expected, (folder.name, step)


@pytest.mark.parametrize("processes", few([1, 2, 4, "all of 2"], 2))
def test_answers_are_those_of_one_process(processes, model, data, tmp_path):
    """Before training, and after it from the weights that are saved. The run is bitwise what it is without the flag."""
    names = [name for name, (count, *_) in LAYOUTS.items() if str(count) in str(processes)]
    names = [name for name in names if processes == 4 or (name in ALWAYS) == (processes in (1, 2))]
    cases = {}
    for name in names:
        common = [*FLAGS, *LAYOUTS[name][1], "--model_name_or_path", model, "--dataset_name", str(data), "--output_dir"]
        cases[name] = [*common, str(tmp_path / name), *GENERATES], LAYOUTS[name][2]
        if name not in ("1 process", "dp 2, an adapter"):  # which would show no more
            cases[WITHOUT + name] = [*common, str(tmp_path / f"{WITHOUT}{name}")], LAYOUTS[name][2]
    logs = run_ranks(LAYOUTS[names[0]][0], "tests.training.test_training:logs_on_engines", cases, timeout=600)[0]
    prompts = prompts_in(data)
    start = generated(AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager"), prompts)
    assert {reason for _, reason in start} == {"stop", "length"}
    for name in names:
        end = generated(saved_model(tmp_path / name, model), prompts)
        assert end != start, "the model has learnt"
        check_answers(tmp_path / name, prompts, start, end)
        if (without := WITHOUT + name) in cases:
            assert steps_of(logs[name]) == steps_of(logs[without])
            weights = [next((tmp_path / run).glob("*model.safetensors")).read_bytes() for run in (name, without)]
            assert weights[0] == weights[1], name


@pytest.mark.long
@pytest.mark.parametrize(
    "flags",
    [
        ["--accelerate_config", "fsdp1", "--num_processes", "2"],
        ["--sp", "2", "--sp_backend", "ring", "--activation_offloading", "True"],
        ["--sp", "2", "--sp_backend", "gather", "--sequence_chunk_size", "16"],
    ],
    ids=["FSDP1", "ring", "in chunks"],
)
def test_answers_on_soft_gpus(flags, model, data, tmp_path, soft_gpus):
    """FSDP1 has no CPU; hidden states of the chunked step are in host memory, and are read once they are there."""
    arguments = [*FLAGS, *GENERATES, *flags, "--model_name_or_path", model, "--dataset_name", str(data)]
    arguments += ["--bf16", "False", "--memory", "balanced", "--output_dir", str(tmp_path / "out")]
    command = [sys.executable, "-m", "longctx", "train", *arguments]
    subprocess.run(command, check=True, env=soft_environment(), timeout=300)
    start = generated(AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager"), prompts_in(data))
    end = generated(saved_model(tmp_path / "out", model), prompts_in(data))
    check_answers(tmp_path / "out", prompts_in(data), start, end)


# ------------------------------------------------------------------------------------------------
# The prompts
# ------------------------------------------------------------------------------------------------

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
CHAT = [*ASKED, {"role": "assistant", "content": "Me."}, {"role": "user", "content": "Why?"}]
ANSWER = {"role": "assistant", "content": "So."}
CHOICE = {"chosen": [ANSWER], "rejected": [{"role": "assistant", "content": "No."}]}
RECORDS = {  # of a chat, as lists of messages; else as text or tokens
    "chat": ({"messages": [*CHAT, ANSWER]}, CHAT),
    "chat that ends with a question": ({"messages": CHAT}, ASKED),
    "chat without an answer": ({"messages": ASKED}, ASKED),
    "ShareGPT": ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]}, None),
    "prompt and completion of messages": ({"prompt": CHAT, "completion": [ANSWER]}, CHAT),
    "prompt and completion": ({"prompt": "How? ", "completion": "So."}, "How? "),
    "pre-tokenised": ({"input_ids": [9, 8, 7, 6, 5, 4], "labels": [-100, 8, -100, -100, 5, 4]}, [9, 8, 7, 6]),
    "pairs of messages": ({"prompt": CHAT, **CHOICE}, CHAT),
    "pairs without a prompt": ({"chosen": [*CHAT, ANSWER], "rejected": [*CHAT, *CHOICE["rejected"]]}, CHAT),
    "pairs of text": ({"prompt": "How? ", "chosen": "So.", "rejected": "No."}, "How? "),
}


def write(folder, records):
    folder.mkdir(exist_ok=True)
    for split in ("train", "test"):
        write_lines(folder / f"{split}.jsonl", records)
    return ["--model_name_or_path", "tiny", "--dataset_name", str(folder), "--eval_strategy", "steps", "--use_cpu"]


def prompts_of(flags, method=SFT):
    run = resolve(parse_flags([*flags, "--max_length", "512"], method), read_profile({}), {})
    reading = Reading(run.settings, tiny_tokenizer(), run.model_config)
    return [prompt.tolist() for prompt in evaluation_prompts(reading)]


@pytest.mark.parametrize("kind", RECORDS)
def test_prompts_are_what_the_model_is_asked_with(kind, tmp_path, caplog):
    record, asked = RECORDS[kind]
    tokenizer = tiny_tokenizer()
    if isinstance(asked, str):
        asked = tokenizer(asked)["input_ids"]
    elif asked is None or isinstance(asked[0], dict):
        asked = asked or [{"role": "user", "content": "Hi"}]
        asked = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    flags = [*write(tmp_path / "data", [record] * 3), "--eval_generate", "2"]
    assert prompts_of(flags, DPO if "pairs" in kind else SFT) == [asked] * 2
    assert not caplog.records, "what is said of the documents is not said again"
    if kind == "chat":
        assert prompts_of([*flags, "--dataset_streaming", "True", "--max_steps", "1"]) == [asked] * 2


def test_prompts_are_those_of_the_documents_that_are_evaluated(tmp_path):
    """Of a share of the training data, which is drawn at random, of a mixture in its order, and all of few records."""
    flags = write(tmp_path / "data", [{"prompt": f"{i}? ", "completion": f"{i}."} for i in range(20)])
    run = resolve(parse_flags([*flags, "--test_split_size", "0.4", "--eval_generate", "3"], SFT), read_profile({}), {})
    evaluation, decode = prepare_data(run).evaluation, tiny_tokenizer().decode
    texts = [decode(ids) for ids in evaluation.documents["input_ids"][:]]
    asked = [decode(prompt) for prompt in evaluation.prompts]
    assert [text.startswith(prompt) for text, prompt in zip(texts, asked, strict=False)] == [True] * 3
    assert asked != ["0? ", "1? ", "2? "]
    other = write(tmp_path / "other", [{"prompt": "Other? ", "completion": "Yes."}])
    both = [*flags[:2], "--datasets", other[3], *flags[3:], "--eval_generate", "3"]
    assert [decode(prompt) for prompt in prompts_of(both)] == ["Other? ", "0? ", "1? "]
    assert len(prompts_of([*other, "--eval_generate", "9"])) == 1


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"text": "no answer"}, "'text' with plain text, which have no prompts"),
        ({"input_ids": [5, 6, 7]}, "'input_ids' without labels, which have no prompts"),
        ({"input_ids": [5, 6], "labels": [5, 6]}, "data/test.jsonl:1: no token comes before its answer"),
    ],
)
def test_records_without_prompts_are_refused(record, said, tmp_path, capsys):
    assert main([*write(tmp_path / "data", [record]), "--max_length", "64", "--eval_generate", "1"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "--eval_generate 1" in error


# ------------------------------------------------------------------------------------------------
# A run of its own: the file, the page, resuming, signals
# ------------------------------------------------------------------------------------------------


def test_answers_are_printed_kept_and_shown(data, tmp_path, capsys):
    """A run that resumes from an older checkpoint drops the answers after it, and another run all of them."""
    flags = ["--model_name_or_path", "tiny", "--dataset_name", str(data), *FLAGS, "--eval_generate", "4"]
    flags += ["--eval_steps", "1", "--save_strategy", "steps", "--save_steps", "1", "--use_cpu"]
    flags += ["--output_dir", str(tmp_path / "out")]
    assert main(flags) == 0
    printed, first = capsys.readouterr().out, read_completions(tmp_path / "out")
    assert [entry["step"] for entry in first] == [0] * 3 + [1] * 3 + [2] * 3
    passes = sum(MAX_LENGTH - length for length in PROMPT_LENGTHS[:3])  # each prompt fills a pack
    said = f"answers to 3 prompts at each evaluation, of up to 256 tokens: up to {passes} forward passes of 96 tokens"
    assert f"generate  {said}" in printed
    assert "1 that leave no room in --max_length are passed over" in printed
    assert printed.count("longctx: answers after step 1, in ") == 1
    assert all(entry["prompt"] in printed for entry in first)
    page = (tmp_path / "out" / "run_report.html").read_text(encoding="utf-8")
    assert "<h2>Answers</h2>" in page
    assert all(entry["prompt"] in page for entry in first)
    resume = ["--eval_on_start", "False", "--resume_from_checkpoint", str(tmp_path / "out" / "checkpoint-1")]
    assert main([*flags, *resume]) == 0
    assert read_completions(tmp_path / "out") == first
    assert main([*flags, *resume, "--eval_delay", "5"]) == 0
    assert read_completions(tmp_path / "out") == first[:6]
    assert main([*flags, "--overwrite_output_dir", "True", "--max_steps", "1", "--eval_on_start", "False"]) == 0
    assert [entry["step"] for entry in read_completions(tmp_path / "out")] == [1] * 3


def test_a_signal_ends_the_answers(data, tmp_path, monkeypatch, capsys):
    """The run takes its step, saves, and ends, without hundreds of forward passes before."""
    monkeypatch.setattr(hang.WATCH, "go_on", lambda: os.kill(os.getpid(), signal.SIGTERM))
    flags = ["--model_name_or_path", "tiny", "--dataset_name", str(data), *FLAGS, *GENERATES, "--use_cpu"]
    assert main([*flags, "--output_dir", str(tmp_path / "out")]) == RESUMABLE
    assert not read_completions(tmp_path / "out")
    assert "stopped by SIGTERM after step 1" in capsys.readouterr().out


@pytest.mark.long
def test_the_answers_of_a_dpo_run(tmp_path):
    data = write(tmp_path / "data", [RECORDS["pairs of text"][0]] * 4)[3]
    flags = ["--model_name_or_path", "tiny", "--dataset_name", data, *FLAGS, "--eval_generate", "1", "--use_cpu"]
    flags += ["--max_steps", "1", "--eval_steps", "1", "--eval_on_start", "False", "--output_dir", f"{tmp_path}/out"]
    assert dpo.main(flags) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    expected = generated(model, ["How? "])[0]
    assert [(e["completion"], e["finish_reason"]) for e in read_completions(tmp_path / "out")] == [expected]

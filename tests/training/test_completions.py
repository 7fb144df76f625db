"""--eval_generate on real gloo ranks and engines: the answers are those of `model.generate` in one process, exactly."""

from __future__ import annotations

import json
import os
import signal

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from longctx.model.tiny import tiny_tokenizer
from longctx.settings.dpo import DPO
from longctx.settings.flags import SFT
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from longctx.train import main
from longctx.training.completions import COMPLETIONS_FILE, LogCompletions, read_completions
from longctx.training.dataset import evaluation_prompts
from longctx.upstream.accelerate_internals import ENGINE_ENVIRONMENT
from tests.training.test_training import log_of
from tests.workers import one_by_one, run_ranks

MAX_LENGTH = 96
PROMPT_LENGTHS = [80, 5, 40, 61, 95, 70]
"""The room of an answer is 96 tokens less these. Several share a pack, and several packs are dealt over two ranks."""
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
    from tests.small_model import save_small_model

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

    for split, lengths in {
        "train": [30, 9, 50, 20],
        "test": [*PROMPT_LENGTHS[:3], TOO_LONG, *PROMPT_LENGTHS[3:]],
    }.items():
        records = [{"prompt": text(length), "completion": text(8)} for length in [*lengths, 33]]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def train_all(cases):
    """{case: the log} on this process group."""
    logs = {}
    for case, (arguments, stage) in one_by_one(cases):
        if stage is not None:
            os.environ.update(ENGINE_ENVIRONMENT["deepspeed"], ACCELERATE_DEEPSPEED_ZERO_STAGE=str(stage))
        logs[case] = log_of(arguments)
    return logs


def generated(model, prompts):
    """What `generate` answers to each prompt alone, and why it ends."""
    tokenizer, answers = tiny_tokenizer(), []
    for prompt in prompts:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        new = model.generate(ids, do_sample=False, max_new_tokens=MAX_LENGTH - ids.shape[1])[0, ids.shape[1] :]
        ends = new[-1].item() in model.generation_config.eos_token_id
        answers.append((tokenizer.decode(new, skip_special_tokens=True), "stop" if ends else "length"))
    return answers


def saved_model(folder, base):
    """The trained model of a run in one process."""
    import peft

    if not (folder / "adapter_config.json").is_file():
        return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    trained = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    return peft.PeftModel.from_pretrained(trained, folder)


def steps_of(log):
    """What a run has computed: the log without times and memory."""
    names = ("loss", "grad_norm", "eval_loss", "num_tokens", "entropy", "step")
    return [{name: entry[name] for name in names if name in entry} for entry in log]


@pytest.mark.parametrize(
    "processes", [1, 2, pytest.param(4, marks=pytest.mark.long), pytest.param("all of 2", marks=pytest.mark.long)]
)
def test_answers_are_those_of_one_process(processes, model, data, tmp_path):
    """Before training, and after it from the weights that are saved. The run is bitwise what it is without the flag."""
    names = [name for name, (count, *_) in LAYOUTS.items() if str(count) in str(processes)]
    names = [name for name in names if processes == 4 or (name in ALWAYS) == (processes in (1, 2))]
    cases = {}
    for name in names:
        common = [*FLAGS, *LAYOUTS[name][1], "--model_name_or_path", model, "--dataset_name", str(data), "--output_dir"]
        cases[name] = [*common, str(tmp_path / name), *GENERATES], LAYOUTS[name][2]
        cases[WITHOUT + name] = [*common, str(tmp_path / f"{WITHOUT}{name}")], LAYOUTS[name][2]
    logs = run_ranks(LAYOUTS[names[0]][0], f"{__name__}:train_all", cases, timeout=600)[0]
    prompts = [json.loads(line)["prompt"] for line in (data / "test.jsonl").read_text().splitlines()[:7]]
    prompts = [prompt for prompt in prompts if len(prompt) < MAX_LENGTH]
    start = generated(AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager"), prompts)
    assert {reason for _, reason in start} == {"stop", "length"}
    for name in names:
        folder = tmp_path / name
        lines = [json.loads(line) for line in (folder / COMPLETIONS_FILE).read_text().splitlines()]
        end = generated(saved_model(folder, model), prompts)
        assert end != start, "the model has learnt"
        for step, expected in ((0, start), (2, end)):
            found = [line for line in lines if line["step"] == step]
            assert [line["prompt"] for line in found] == prompts
            assert [(line["completion"], line["finish_reason"]) for line in found] == expected, (name, step)
        assert steps_of(logs[name]) == steps_of(logs[WITHOUT + name])
        weights = [next((tmp_path / run).glob("*model.safetensors")).read_bytes() for run in (name, WITHOUT + name)]
        assert weights[0] == weights[1], name

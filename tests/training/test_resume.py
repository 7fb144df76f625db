"""A run that is interrupted and resumed is the run that was not: real engines on gloo, every layout."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from peft import AutoPeftModelForCausalLM, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

from longctx.ranks.agreement import RefusedOnAllRanks, on_all_ranks
from tests.small_model import save_small_model, save_with_tokenizer
from tests.training.test_training import COMMON, EXPERTS, logs_of_cases, make_documents, write_jsonl
from tests.workers import run_ranks

STEPS = 5
LENGTHS = [90, 7, 41, 130, 64, 2, 33, 17, 88, 120, 5, 76, 31]  # of epochs that end between steps


def run_all(cases):
    """{case: what its log says of each step and of the whole run}, on every rank; no run acts on another."""
    with patch.dict(os.environ):
        logs = logs_of_cases(cases)
    return {case: [entry for entry in log if "loss" in entry or "train_loss" in entry] for case, log in logs.items()}


def run_once(arguments):
    return run_all({"": arguments})[""]


VALUES = ("step", "epoch", "loss", "grad_norm", "learning_rate", "num_tokens", "padding_fraction", "entropy")
VALUES += ("aux_loss", "experts")


def values(log):
    """Of each entry, and of the last one, which has the mean over the run."""
    return [{name: entry.get(name) for name in (*VALUES, "train_loss")} for entry in log]


def weights(folder):
    return load_file(next(Path(folder).glob("*model.safetensors")))  # or adapter_model


LAYOUTS = {
    "1 process": (1, []),
    "ring on FSDP2": (2, ["--sp", "2", "--sp_backend", "ring"]),
    "ulysses on ZeRO-3": (2, ["--sp", "2", "--sp_backend", "ulysses"]),
    "ulysses on ZeRO-1": (2, ["--sp", "2", "--sp_backend", "ulysses"]),
    "ulysses on ZeRO-2": (2, ["--sp", "2", "--sp_backend", "ulysses"]),
    "hybrid on FSDP2": (4, ["--sp", "4", "--sp_backend", "hybrid"]),
    "gather on ZeRO-3, dp 2": (4, ["--sp", "2", "--sp_backend", "gather", "--engine", "deepspeed"]),
    "HSDP, ring": (4, ["--sp", "2", "--sp_backend", "ring", "--dp_replicate", "2"]),
    "sp 8": (8, ["--sp", "8", "--sp_backend", "ring"]),
}
EVALUATION = ["--eval_strategy", "steps", "--eval_steps", "1", "--dataset_test_split", "train"]
EVALUATION += ["--save_strategy", "steps", "--save_steps", "1", "--load_best_model_at_end", "True"]
KINDS = {
    "fp32": [],
    "bf16": ["--bf16", "True"],
    "adapter": ["--use_peft", "True"],
    "states on the host": [],
    "rmsprop": ["--optim", "rmsprop"],
    "stream": ["--dataset_streaming", "True"],
    "single documents": ["--packing", "False"],
    "stream by workers": ["--dataset_streaming", "True", "--dataloader_num_workers", "2"],
    "first model is best": [*EVALUATION, "--metric_for_best_model", "loss", "--greater_is_better", "True"],
    "cosine": ["--lr_scheduler_type", "cosine", "--warmup_steps", "2", "--optim", "sgd"],
    "tied": [],
    "experts": ["--router_aux_loss_coef", "0.1"],
    "written meanwhile": ["--save_async", "True"],
}
EVERY_STEP = tuple(range(1, STEPS))
FURTHER = ["stream by workers", "first model is best", "cosine", "tied", "experts"]


def resumed_case(layout, kinds, steps=EVERY_STEP, **options):
    return pytest.param(layout, kinds, steps, id=f"{layout}-{kinds}", **options)


LATER = [kind for kind in KINDS if kind not in FURTHER]
CASES = [
    resumed_case("1 process", ["fp32"]),
    resumed_case("ring on FSDP2", ["stream", "experts"], (3,)),
    resumed_case("ulysses on ZeRO-3", ["bf16", "written meanwhile"], (3,)),
    *(resumed_case(layout, FURTHER, marks=pytest.mark.long) for layout in list(LAYOUTS)[:3]),
    resumed_case("1 process", [kind for kind in LATER if "host" not in kind], marks=pytest.mark.long),
    *(resumed_case(layout, LATER, marks=pytest.mark.long) for layout in LAYOUTS if layout not in ("1 process", "sp 8")),
]


def flags_of(layout, kind, data, models):
    """Four sequences a step in every layout."""
    processes, given = LAYOUTS[layout]
    sp = int(given[given.index("--sp") + 1]) if given else 1
    flags = [*COMMON, *given, *KINDS[kind], "--dataset_name", data]
    if kind == "states on the host" or (kind == "written meanwhile" and "ZeRO" in layout):  # FSDP2: all or nothing
        flags += ["--offload_optimizer_device" if "ZeRO" in layout else "--offload_param_device", "cpu"]
    flags += ["--model_name_or_path", models.get(kind, models["GQA 4:2"]), "--max_length", "160", "--overlong", "split"]
    flags += ["--logging_steps", "2", "--gradient_accumulation_steps", str(4 * sp // processes)]
    if "stream" not in kind:
        flags += ["--train_sampling_strategy", "random"]
    return flags


def stage_of(layout):
    """ZeRO's stage, if there is one."""
    return layout.partition("ZeRO-")[2][:1] or None


def check_loads(folder, kind):
    """As transformers and peft load it; safetensors alone."""
    if kind == "adapter":
        model = AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        found = get_peft_model_state_dict(model)
    else:
        found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    for name, expected in weights(folder).items():
        if ".experts." not in name:  # transformers makes one tensor of a layer's experts
            assert torch.equal(found[name], expected.float()), name
    assert not [path for path in Path(folder).glob("*.bin") if path.name != "training_args.bin"]


@pytest.fixture(scope="module")
def models(models, tmp_path_factory):
    tied = save_small_model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)
    config = Qwen3MoeConfig(**AutoConfig.from_pretrained(models["GQA 4:2"]).to_dict() | EXPERTS)
    experts = str(tmp_path_factory.mktemp("experts"))
    save_with_tokenizer(AutoModelForCausalLM.from_config(config), experts)
    return {**models, "tied": tied, "experts": experts}


@pytest.mark.parametrize(("layout", "kinds", "steps"), CASES)
def test_a_resumed_run_is_the_one_that_went_on(layout, kinds, steps, models, tmp_path, monkeypatch):
    """From every step, in the middle of an epoch and of a window of the log, and once more: the same bits.

    Of accelerate (#4071), other rows were reported after a resume in the middle of an epoch.
    """
    if (stage := stage_of(layout)) in ("1", "2"):
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", stage)
    data = write_jsonl(tmp_path / "data.jsonl", make_documents(LENGTHS))
    cases = {}
    for kind in kinds:
        common, folder = flags_of(layout, kind, data, models), tmp_path / kind
        saving = ["--save_strategy", "steps", "--save_steps", "1"]
        cases[kind, None] = [*common, *saving, "--output_dir", f"{folder}/whole"]
        for step in steps:
            cases[kind, step] = [*common, *saving, "--output_dir", f"{folder}/{step}"]
            cases[kind, step] += ["--resume_from_checkpoint", f"{folder}/whole/checkpoint-{step}"]
        if "best" not in kind:  # which is not beside the checkpoint, and so forgotten
            cases[kind, "again"] = [*common, "--output_dir", f"{folder}/again", "--resume_from_checkpoint"]
            cases[kind, "again"] += [f"{folder}/{steps[0]}/checkpoint-{steps[0] + 1}"]
    results = run_ranks(LAYOUTS[layout][0], f"{__name__}:run_all", cases, timeout=900)[0]
    for kind, step in cases:
        if step is None:
            expected, log = weights(tmp_path / kind / "whole"), values(results[kind, None])
            assert len(log) == STEPS // 2 + 1
            check_loads(tmp_path / kind / "whole" / "checkpoint-1", kind)
            continue
        assert values(results[kind, step]) == log, (kind, step)
        found = weights(tmp_path / kind / str(step))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected), (kind, step)
        check_loads(tmp_path / kind / str(step), kind)


@pytest.mark.long
def test_a_checkpoint_at_the_end_of_an_epoch_has_the_epochs_evaluation(models, tmp_path):
    """And its entry in the log: the run that goes on from there trains the next epoch, which verl #7401 skipped."""
    data = write_jsonl(tmp_path / "data.jsonl", make_documents(LENGTHS))
    flags = [*flags_of("1 process", "fp32", data, models), "--num_train_epochs", "2", "--max_steps", "-1"]
    flags += ["--eval_strategy", "epoch", "--logging_strategy", "epoch", "--dataset_test_split", "train"]
    saving = ["--save_strategy", "steps", "--save_steps", "1", "--output_dir", str(tmp_path / "whole")]
    log = run_ranks(1, "tests.training.test_training:log_of", [*flags, *saving])[0]
    logged, evaluated = ([entry for entry in log if name in entry] for name in ("loss", "eval_loss"))
    assert [entry["epoch"] for entry in logged] == [entry["epoch"] for entry in evaluated] == [1.0, 2.0]
    checkpoint = tmp_path / "whole" / f"checkpoint-{evaluated[0]['step']}"
    again = [*flags, "--output_dir", str(tmp_path / "again"), "--resume_from_checkpoint", str(checkpoint)]
    found = run_ranks(1, "tests.training.test_training:log_of", again)[0]
    for name in ("loss", "eval_loss"):
        assert [entry[name] for entry in found if name in entry] == [entry[name] for entry in log if name in entry]


ELASTIC = {
    "1 process": ["ring on FSDP2", "ulysses on ZeRO-3", "sp 8"],
    "hybrid on FSDP2": ["sp 8", "HSDP, ring", "1 process"],
    "sp 8": ["hybrid on FSDP2"],
    "ulysses on ZeRO-3": ["1 process", "sp 8"],
    "HSDP, ring": ["ring on FSDP2", "gather on ZeRO-3, dp 2"],
    "gather on ZeRO-3, dp 2": ["ulysses on ZeRO-3", "hybrid on FSDP2"],
}


@pytest.mark.parametrize(
    ("before", "after"),
    [("ulysses on ZeRO-3", ["1 process"]), *(pytest.param(*case, marks=pytest.mark.long) for case in ELASTIC.items())],
    ids=str,
)
def test_another_layout_goes_on_with_the_optimizer(before, after, models, tmp_path):
    """Losses to 1e-5, as another order of sums allows; weights to a tenth of the sum of learning rates."""
    data = write_jsonl(tmp_path / "data.jsonl", make_documents(LENGTHS))
    flags = [*flags_of(before, "fp32", data, models), "--logging_steps", "1"]
    flags += ["--save_strategy", "steps", "--save_steps", "2", "--output_dir", str(tmp_path / "before")]
    log = run_ranks(LAYOUTS[before][0], f"{__name__}:run_once", flags, timeout=900)[0]
    expected = weights(tmp_path / "before")
    for layout in after:
        flags = [*flags_of(layout, "fp32", data, models), "--logging_steps", "1"]
        flags += ["--resume_from_checkpoint", f"{tmp_path}/before/checkpoint-2", "--output_dir", f"{tmp_path}/{layout}"]
        found = run_ranks(LAYOUTS[layout][0], f"{__name__}:run_once", flags, timeout=900)[0]
        assert len(log) == len(found)
        for entry, other in zip(log[:-1], found[:-1], strict=True):
            assert entry["num_tokens"] == other["num_tokens"]
            assert other["loss"] == pytest.approx(entry["loss"], rel=1e-5), layout
            assert other["grad_norm"] == pytest.approx(entry["grad_norm"], rel=1e-4), layout
        rates = sum(entry["learning_rate"] for entry in log[2:-1])
        other = weights(tmp_path / layout)
        assert expected.keys() ^ other.keys() <= {"lm_head.weight"}  # tied: FSDP2 writes it by both of its names
        same = expected.keys() & other.keys()
        assert max((other[name] - expected[name]).abs().max() for name in same) <= 0.1 * rates, layout


ADAPTERS = {
    "LoRA": [],
    "DoRA": ["--use_dora", "True", "--lora_target_modules", "q_proj", "k_proj", "v_proj", "o_proj"],
    "rsLoRA": ["--use_rslora", "True", "--lora_target_modules", "all-linear", "--lora_r", "4"],
    "embeddings and norms": ["--lora_modules_to_save", "embed_tokens", "norm"],
}
ENGINES = ["1 process", "ring on FSDP2", "ulysses on ZeRO-1", "ulysses on ZeRO-2", "ulysses on ZeRO-3"]
EVERY_PAIR = list(itertools.product(ENGINES, ENGINES))
SOME_PAIRS = {"LoRA": [("ring on FSDP2", "ulysses on ZeRO-2"), ("ulysses on ZeRO-2", "ring on FSDP2")]}
"""What is run once: either engine goes on from the other, on one process group."""


@pytest.mark.parametrize("pairs", [SOME_PAIRS, *({name: EVERY_PAIR} for name in ADAPTERS)], ids=["some", *ADAPTERS])
@pytest.mark.long
def test_an_adapter_is_resumed_on_another_engine(pairs, tmp_path):
    """As above, and the learning rates are the same numbers: schedule and parameter groups are this run's own.

    Of LoRA's weights none is without weight decay; DeepSpeed drops such an empty group, and the others keep it.
    """
    model = save_small_model(tmp_path / "model", tie_word_embeddings=False)
    data = write_jsonl(tmp_path / "data.jsonl", make_documents(LENGTHS))
    schedule = ["--lr_scheduler_type", "cosine_with_min_lr", "--lr_scheduler_kwargs", '{"min_lr": 1e-3}']
    schedule += ["--weight_decay", "0.1", "--logging_steps", "1", "--use_peft", "True"]
    cases, resumed = ({1: {}, 2: {}} for _ in range(2))
    for adapter, engines in pairs.items():
        for before in dict.fromkeys(before for before, _ in engines):
            flags = [*flags_of(before, "fp32", data, {"GQA 4:2": model}), *schedule, *ADAPTERS[adapter]]
            flags += ["--save_strategy", "steps", "--save_steps", "2", "--output_dir", f"{tmp_path}/{adapter}/{before}"]
            cases[LAYOUTS[before][0]][adapter, before] = (flags, stage_of(before))
        for before, after in engines:
            flags = [*flags_of(after, "fp32", data, {"GQA 4:2": model}), *schedule, *ADAPTERS[adapter]]
            flags += ["--resume_from_checkpoint", f"{tmp_path}/{adapter}/{before}/checkpoint-2"]
            flags += ["--output_dir", f"{tmp_path}/{adapter}/{before} to {after}"]
            resumed[LAYOUTS[after][0]][adapter, before, after] = (flags, stage_of(after))
    logs = {}
    for processes, group in ((1, cases[1]), (2, cases[2] | resumed[2]), (1, resumed[1])):
        if group:
            logs |= run_ranks(processes, "tests.training.test_training:logs_on_engines", group, timeout=900)[0]
    for adapter, before, after in [*resumed[1], *resumed[2]]:
        names = (adapter, before), (adapter, before, after)
        expected, found = ([entry for entry in logs[name] if "loss" in entry] for name in names)
        assert len(expected) == len(found) == STEPS
        for entry, other in zip(expected, found, strict=True):
            assert other["learning_rate"] == entry["learning_rate"], (adapter, before, after)
            assert other["loss"] == pytest.approx(entry["loss"], rel=1e-5), (adapter, before, after)
            assert other["grad_norm"] == pytest.approx(entry["grad_norm"], rel=1e-4), (adapter, before, after)


def run_on_disks_of_their_own(flags, folder):
    """Every rank as if on a node that has `folder`/RANK to itself: what is said with a checkpoint in parts, in a folder
    that is damaged on one node, and without the flag; and the logs of the whole run and of the one that goes on."""
    rank = int(os.environ["RANK"])
    node = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank), "GROUP_WORLD_SIZE": "2"}
    os.environ.update(node, GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1")  # accelerate asks for the address
    flags = [*flags, "--output_dir", f"{folder}/{rank}", "--resume_from_checkpoint", "auto"]
    each = ["--save_on_each_node", "True"]
    said = {"no flag": refusal(flags), "best": refusal([*flags, *each, *EVALUATION])}
    whole = run_once([*flags, *each])
    shutil.rmtree(f"{folder}/{rank}/checkpoint-3")
    os.remove(f"{folder}/{rank}/run.json")  # which says that the run is finished
    kept = sorted(os.listdir(f"{folder}/{rank}/checkpoint-2"))
    said["in parts"] = refusal([*flags, *each])
    for source, target in ((1, 0), (0, 1)):  # by one rank, the other waits
        on_all_ranks(lambda source=source, target=target: rank or copy_over(f"{folder}/{source}", f"{folder}/{target}"))
    states = Path(f"{folder}/{rank}/checkpoint-2/states-00000-000.safetensors")
    contents = states.read_bytes()
    if rank == 1:
        states.write_bytes(contents[:-1] + bytes([contents[-1] ^ 1]))
    said["damaged"] = refusal([*flags, *each])
    states.write_bytes(contents)
    return said, kept, values(whole), values(run_once([*flags, *each]))


def refusal(flags):
    with pytest.raises(RefusedOnAllRanks) as refused:
        run_once(flags)
    return str(refused.value)


def copy_over(source, target):
    being_checked = shutil.ignore_patterns(".longctx-*")  # by the other rank, still
    shutil.copytree(f"{source}/checkpoint-2", f"{target}/checkpoint-2", dirs_exist_ok=True, ignore=being_checked)


@pytest.mark.long
def test_nodes_with_disks_of_their_own(models, tmp_path):
    data = write_jsonl(tmp_path / "data.jsonl", make_documents(LENGTHS))
    flags = [*flags_of("ring on FSDP2", "fp32", data, models), "--gradient_accumulation_steps", "1"]
    flags += ["--max_steps", "3", "--save_strategy", "steps", "--save_steps", "2"]
    results = run_ranks(2, f"{__name__}:run_on_disks_of_their_own", flags, str(tmp_path))
    for rank, (said, kept, whole, resumed) in enumerate(results):
        assert "is not the folder that rank 0 has by that name" in said["no flag"]
        assert "--load_best_model_at_end reads the files of all ranks" in said["best"]
        assert re.search(r"checkpoint-2/\S+ is missing on .* copy the states-\* and random-\*", said["in parts"])
        assert "1/checkpoint-2/states-00000-000.safetensors is damaged" in said["damaged"]
        assert f"random-0000{rank}.json" in kept
        assert ("model.safetensors" in kept) == (rank == 0)
        assert len(kept) == 3 or rank == 0
        assert whole == resumed


@pytest.mark.long
@pytest.mark.parametrize("layout", ["1 process", "ring", "ulysses", "stream"])
def test_runs_killed_at_random_moments_are_those_that_were_not(layout):
    """A short part of what benchmarks/soak.py does."""
    command = [sys.executable, "-m", "benchmarks.soak", "--kills", "2", "--layouts", layout]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    row = next((text for text in done.stdout.splitlines() if text.startswith(f"| {layout} |")), done.stderr)
    kills, _, steps, wrong, unequal = (int(cell) for cell in row.split("|")[2:7])
    assert (kills, wrong, unequal) == (2, 0, 0), row
    assert steps

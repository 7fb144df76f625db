"""`longctx dpo` against TRL's DPOTrainer on one process: loss, gradient norm and every metric of each step.

A step takes all pairs, however they are packed and spread, so that TRL's one batch is the same step. Sums of log-
probabilities are in fp64 here and in fp32 there, and are off by 1e-7 of themselves, which is 1e-5 of small differences
between them: these are compared absolutely, in units of the sums.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import string
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

import longctx.parallel
from longctx.attention.backends import BACKENDS
from longctx.collate import SequenceCollator
from longctx.model.tiny import tiny_model
from longctx.ranks import FAILED
from longctx.settings.dpo import DPO
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from longctx.training.preference import LOSS_FLAGS, PreferenceLoss
from longctx.training.reference_model import ReferencedPreferenceLoss
from tests.jsonl import write_lines
from tests.parity_page import DPO as STARTED_BY
from tests.reference import dpo_log_of_trl
from tests.small_model import save_with_tokenizer
from tests.training.test_training import log_of
from tests.workers import one_by_one, run_main, run_ranks

STEPS, LEARNING_RATE = 3, 3e-3
METRICS = (
    *("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected"),
    *("logits/chosen", "logits/rejected", "mean_token_accuracy", "entropy", "num_tokens"),
)
LOSSES = {
    "sigmoid": {},
    "hinge": {},
    "ipo": {"beta": 0.3},
    "robust": {"label_smoothing": 0.1},
    "apo_zero": {},
    "apo_down": {},
    "exo_pair": {"label_smoothing": 1e-3},
    "nca_pair": {},
    "bco_pair": {},
    "sppo_hard": {},
    "discopop": {},
    "sigmoid_norm": {"beta": 2.0},
    "sigmoid sft": {"loss_weights": [0.8, 0.5]},
    "sft": {},
    "sigmoid-ld": {"ld_alpha": 0.3},
    "sigmoid-forward": {"f_divergence_type": "forward_kl"},
    "hinge-js": {"f_divergence_type": "js_divergence"},
    "ipo-alpha": {"f_divergence_type": "alpha_divergence"},
}
EARLY = ("sigmoid", "ipo", "sigmoid sft", "sigmoid-ld")
ONE, PACKED = ["--packing", "False"], ["--packing", "True", "--max_length", "512"]
TWO = [*ONE, "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "4"]
ULYSSES = ["--sp", "2", "--sp_backend", "ulysses"]
GATHER, HYBRID = ["--sp", "2", "--sp_backend", "gather"], ["--sp", "4", "--sp_backend", "hybrid"]
RING = ["--sp_backend", "ring", "--sp"]
LAYOUTS = {  # (processes, flags)
    "ring sp 2, one pair at a time": (2, ["--cp", "2", *ONE, "--gradient_accumulation_steps", "8"]),
    "ring sp 2, packed": (2, [*RING, "2", *PACKED, "--per_device_train_batch_size", "4"]),
    "ulysses sp 2, two pairs at a time": (2, [*ULYSSES, *TWO]),
    "ulysses sp 2, packed": (2, [*ULYSSES, *PACKED, "--gradient_accumulation_steps", "9"]),
    "ring sp 2 × dp 2, packed": (4, ["--cp", "2", *PACKED, "--gradient_accumulation_steps", "4"]),
    "ring sp 4, packed": (4, [*RING, "4", *PACKED, "--per_device_train_batch_size", "9"]),
    "ulysses sp 2 × dp 2, packed": (4, [*ULYSSES, *PACKED, "--gradient_accumulation_steps", "4"]),
    "no sp, packed": (1, [*PACKED, "--gradient_accumulation_steps", "9"]),
    "dp 2, one pack for two ranks": (2, ["--packing", "True"]),
    "gather sp 2, packed": (2, [*GATHER, *PACKED, "--per_device_train_batch_size", "9"]),
    "gather sp 2, two pairs at a time": (2, [*GATHER, *TWO]),
    "hybrid sp 4, packed": (4, [*HYBRID, *PACKED, "--gradient_accumulation_steps", "9"]),
    "hybrid sp 4, one pair at a time": (4, [*HYBRID, *ONE, "--gradient_accumulation_steps", "8"]),
}
OFFLOADED = "optimizer on the host"
OPTIONS = {
    "no gradient checkpointing": ["--gradient_checkpointing", "False"],
    "memory longest": ["--memory", "longest"],
    "memory auto": ["--memory", "auto"],
    "activations on the host": ["--activation_offloading", "True"],
    "tiled MLP": ["--tiled_mlp", "True", "--tiled_mlp_num_shards", "3"],
    "sequence chunks": ["--sequence_chunk_size", "50"],
    "one head at a time": ["--heads_k_stride", "1"],
    OFFLOADED: ["--offload_optimizer_device", "cpu"],
    "parameters on the host": ["--offload_param_device", "cpu"],
    "compiled": ["--torch_compile", "True"],
    "sp auto": ["--sp", "auto"],
    "sp all": ["--sp", "all"],
    "bf16": ["--bf16", "True"],
    "prompts with each answer": ["--share_prompts", "False"],
}
"""Flags that change how a step is computed, and nothing else. Without them, `--memory balanced` is in force."""
NOT_TOGETHER = {
    OFFLOADED: ("ring sp 2, packed", "ring sp 4, packed", "gather sp 2, packed", "hybrid sp 4, packed"),
    **dict.fromkeys(("compiled", "sp auto", "sp all"), ("ulysses sp 2, packed",)),
}
"""Layouts whose engine refuses an option; `sp auto` and `sp all` would run on the other one."""
BF16 = 3e-3, 1e-2
"""Relative errors of loss and gradient norm that are bf16's own, as in tests/test_support_matrix.py."""


def make_pairs(conversational=False):
    """Records of prompts and answers of different lengths."""
    letters = random.Random(0)

    def text(low, high):
        return "".join(letters.choices(string.ascii_lowercase + " ", k=letters.randint(low, high)))

    pairs = [{"prompt": text(5, 60), "chosen": text(3, 90), "rejected": text(3, 90)} for _ in range(8)]
    pairs[6]["rejected"] = pairs[6]["chosen"]
    if not conversational:
        return pairs
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    return [{key: [{"role": roles[key], "content": said}] for key, said in pair.items()} for pair in pairs]


def flags_of(case, options, model, data, folder):
    losses = case.partition("-")[0].split()
    given = ["--loss_type", *losses]
    for name, value in options.items():
        given += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return [
        *given,
        *("--model_name_or_path", str(model), "--dataset_name", str(data), "--output_dir", str(folder)),
        *("--max_steps", str(STEPS), "--learning_rate", str(LEARNING_RATE), "--lr_scheduler_type", "constant"),
        *("--max_length", "2048", "--save_strategy", "no", "--report_to", "none", "--disable_tqdm", "True"),
        *("--max_grad_norm", "0"),
    ]


def histories(cases):
    """{case: entries of the log} of runs of `longctx dpo` in this process group."""
    results = {}
    for case, arguments in one_by_one(cases):
        results[case] = [entry for entry in log_of(arguments, DPO) if "loss" in entry or "eval_loss" in entry]
    return results


def histories_of_trl(model, records, cases, folder, lora):
    """{case: entries of the log} of DPOTrainer, with a batch of all pairs."""
    load = AutoModelForCausalLM.from_pretrained
    adapted = {"target_modules": "all-linear", "modules_to_save": ["norm"], "task_type": "CAUSAL_LM"}
    adapter = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, **adapted)
    results = {}
    trainer = {"eval_dataset": Dataset.from_list(records[:5]), "peft_config": adapter if lora else None}
    common = {"per_device_train_batch_size": len(records), "per_device_eval_batch_size": len(records)}
    common |= {"max_steps": STEPS, "learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant", "max_grad_norm": 0}
    common |= {"train_sampling_strategy": "sequential", "gradient_checkpointing": False}
    common |= {"eval_strategy": "steps", "eval_steps": 2}
    for case, options in cases.items():
        models = load(model, dtype="float32"), None if lora else load(model, dtype="float32")
        given = AutoTokenizer.from_pretrained(model), Dataset.from_list(records), folder
        losses = case.partition("-")[0].split()
        history = dpo_log_of_trl(*models, *given, trainer=trainer, loss_type=losses, **common, **options)
        results[case] = [e for e in history if "loss" in e or "eval_loss" in e]
    return results


@pytest.fixture(scope="module")
def trl(saved_model, tmp_path_factory):
    """Returns entries of DPOTrainer's log for cases of LOSSES, each of which it runs once."""
    known = {}

    def entries(cases, *, conversational=False, lora=False):
        missing = {case: LOSSES[case] for case in cases if (case, conversational, lora) not in known}
        if missing:
            folder = str(tmp_path_factory.mktemp("trl"))
            arguments = str(saved_model), make_pairs(conversational), missing, folder, lora
            [found] = run_ranks(1, f"{__name__}:histories_of_trl", *arguments)
            known.update({(case, conversational, lora): history for case, history in found.items()})
        return {case: known[case, conversational, lora] for case in cases}

    return entries


def compare(actual, expected, case, prefix="", norm=0.0):
    """Compare one entry of the logs.

    Args:
        norm: the gradient norm of the first step. A later gradient in which the two sides of a pair cancel is off by
            rounding of the sides' own gradients.
    """
    is_first = actual.get("step") == 1 and not prefix
    sums = abs(expected[f"{prefix}logps/chosen"])
    for name in ("loss",) if prefix else ("loss", "grad_norm"):
        bound = {"rel": 1e-5, "abs": 1e-6} if is_first else {"rel": 1e-4, "abs": 1e-6}
        if name == "grad_norm" and not is_first:
            bound["abs"] = 1e-4 * norm
        assert actual[prefix + name] == pytest.approx(expected[prefix + name], **bound), (case, name)
    for name in METRICS:
        bound = {"rel": 1e-5, "abs": 1e-6} if is_first else {"rel": 1e-4, "abs": max(1e-6 * sums, 1e-5)}
        if is_first and name.startswith("rewards"):
            bound = {"rel": 0, "abs": 0}  # 0 of a model that is its reference, to the last bit
        assert actual[prefix + name] == pytest.approx(expected[prefix + name], **bound), (case, name)


def run_layouts(layouts, losses, saved_model, tmp_path, extra=(), conversational=False, options=("",)):
    """{"layout: loss, option": entries of the log of rank 0}, one group of processes for each number and engine."""
    records = make_pairs(conversational)
    write_lines(tmp_path / "data" / "train.jsonl", records)
    write_lines(tmp_path / "data" / "test.jsonl", records[:5])
    groups = {}
    for layout in layouts:
        processes, flags = LAYOUTS[layout]
        for loss, option in itertools.product(losses, options):
            name = f"{layout}: {loss}, {option}".strip(", ")
            case = flags_of(loss, LOSSES[loss], saved_model, tmp_path / "data", tmp_path / name)
            case += [*flags, *extra, *OPTIONS.get(option, [])]
            groups.setdefault((processes, "ulysses" in layout), {})[name] = case
    found = {}
    for (processes, _), cases in groups.items():
        found |= run_ranks(processes, f"{__name__}:histories", cases, timeout=3000)[0]
    return found


def check_logs(found, expected, parity_table, name="{}"):
    """Compare every step and every evaluation of runs with those of TRL, and enter the errors into the parity table.

    Args:
        found: from `run_layouts`.
        expected: {loss: entries of DPOTrainer's log}.
    """
    for case, entries in found.items():
        layout, _, loss = case.partition(": ")
        loss, _, option = loss.partition(", ")
        kinds = "loss", "eval_loss"
        steps, evaluations = ([e for e in entries if kind in e] for kind in kinds)
        right, rated = ([e for e in expected[loss] if kind in e] for kind in kinds)
        assert len(steps) == STEPS == len(right)
        errors = [abs(steps[0][number] / right[0][number] - 1) for number in ("loss", "grad_norm")]
        run = max(abs(step["loss"] / (entry["loss"] or 1) - 1) for step, entry in zip(steps, right, strict=True))
        row = name.format(", ".join(part for part in (loss, layout, option) if part))
        parity_table.append((row, STARTED_BY, *errors, run if math.isfinite(run) else 0.0))
        if option == "bf16":
            assert all(error <= bound for error, bound in zip(errors, BF16, strict=True))
            assert {steps[0][name] for name in METRICS if name.startswith("rewards")} == {0}
            continue
        for step, entry in zip(steps, right, strict=True):
            compare(step, entry, case, norm=right[0]["grad_norm"])
        for evaluation, entry in zip(evaluations, rated, strict=True):
            compare(evaluation, entry, case, "eval_")


LONG = pytest.mark.long
EVALUATES = ["--eval_strategy", "steps", "--eval_steps", "2"]
PACKED_OR_NOT = [layout for layout in LAYOUTS if "dp 2" not in layout and layout.split(" sp ")[0] in BACKENDS.spread]


@pytest.mark.parametrize(
    ("layouts", "losses"),
    [
        (["ring sp 2, packed"], EARLY[:2]),
        pytest.param(["ring sp 2, one pair at a time", "dp 2, one pack for two ranks"], EARLY[:1], marks=LONG),
        (["ulysses sp 2, packed"], [*EARLY[2:], "sft"]),
        *(pytest.param([layout], list(LOSSES), marks=LONG) for layout in PACKED_OR_NOT),
        *(pytest.param([layout], EARLY, marks=LONG) for layout in LAYOUTS if "× dp 2" in layout),
        pytest.param(["no sp, packed"], EARLY[:2], marks=LONG),
    ],
    ids=lambda names: " and ".join(names) if len(names) < len(LOSSES) else "all losses",
)
def test_steps_are_those_of_trl(layouts, losses, saved_model, trl, tmp_path, parity_table):
    check_logs(run_layouts(layouts, losses, saved_model, tmp_path, EVALUATES), trl(losses), parity_table)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("gather sp 2, packed", ["memory longest", "activations on the host", "prompts with each answer"]),
        *(
            (layout, [option for option in OPTIONS if layout not in NOT_TOGETHER.get(option, ())])
            for layout in PACKED_OR_NOT
            if layout.endswith("packed")
        ),
    ],
    ids=lambda part: part if isinstance(part, str) else " and ".join(part[:2]),
)
@pytest.mark.long
def test_memory_options_change_nothing(layout, options, saved_model, trl, tmp_path, parity_table):
    found = run_layouts([layout], EARLY[:1], saved_model, tmp_path, EVALUATES, options=options)
    check_logs(found, trl(EARLY[:1]), parity_table)


@pytest.mark.long
def test_rewards_of_the_first_step_are_0_whatever_another_layout_has_cached(saved_model, tmp_path):
    """Also in bf16, in which another layout's sums are off by 1e-2, and in shuffled micro-batches of several pairs."""
    flags = ["--bf16", "True", "--share_prompts", "False", "--per_device_train_batch_size", "2", "--max_steps", "1"]
    layouts = "no sp, packed", "ring sp 2, packed", "ulysses sp 2, packed"
    found = run_layouts(layouts, EARLY[:1], saved_model, tmp_path, flags)
    rewards = {case: {log[0][name] for name in METRICS if name.startswith("rewards")} for case, log in found.items()}
    assert list(rewards.values()) == [{0.0}] * 3, rewards


@pytest.mark.parametrize(
    ("layout", "options", "said"),
    [
        *((layout, OPTIONS[OFFLOADED], "--offload_optimizer_device cpu") for layout in NOT_TOGETHER[OFFLOADED]),
        ("ulysses sp 2, packed", OPTIONS["compiled"], "--torch_compile True: the engine is deepspeed"),
        ("ring sp 2, packed", ["--use_liger_kernel", "True"], "--use_liger_kernel True"),
    ],
)
def test_options_without_an_exact_step_are_refused_by_name(layout, options, said, saved_model, tmp_path):
    """Before data is read or processes start."""
    processes, flags = LAYOUTS[layout]
    given = flags_of("sigmoid", {}, saved_model, tmp_path / "nothing.jsonl", tmp_path / "out")
    with pytest.raises(ValueError, match=re.escape(said)):
        resolve(parse_flags([*given, *flags, *options], DPO), read_profile({}), {"WORLD_SIZE": str(processes)})


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        *((layout, {"lora": True}) for layout in PACKED_OR_NOT),
        *((layout, {"conversational": True}) for layout in PACKED_OR_NOT[1:3]),
    ],
    ids=lambda part: part if isinstance(part, str) else next(iter(part)),
)
def test_chats_and_adapters_are_those_of_trl(layout, options, saved_model, trl, tmp_path, parity_table):
    adapter = ["--use_peft", "True", "--lora_target_modules", "all-linear", "--lora_modules_to_save", "norm"]
    chats, losses = "conversational" in options, EARLY[:3] if "two" not in layout else EARLY[:1]
    found = run_layouts([layout], losses, saved_model, tmp_path, adapter * ("lora" in options), conversational=chats)
    expected = {loss: [e for e in log if "loss" in e] for loss, log in trl(losses, **options).items()}
    check_logs(found, expected, parity_table, "{}, " + ("chats" if chats else "LoRA"))
    first, *_, last = next(iter(found.values()))
    assert last["loss"] < 0.9 * first["loss"]


def test_a_pair_of_equal_answers_prefers_neither():
    """Whatever rounding makes of its two sides, which lie in different places; and a pair of other answers does."""
    model, sequence = longctx.parallelize(tiny_model(), sp=1)
    flags = parse_flags([], DPO)
    loss = PreferenceLoss(sequence, {name: flags[name] for name in LOSS_FLAGS})
    labels, ids = [-100, 5, 6, -100, 5, 6, -100, 5, 6, -100, 5, 7], np.array([4, 5, 6, 4, 5, 6, 4, 5, 6, 4, 5, 7])
    row = {"input_ids": ids, "labels": np.array(labels), "seq_lengths": np.full(4, 3)}
    row["reference"] = np.array([[-999.0, 0.0], [-999.0, 0.0]])  # prefers every chosen answer
    batch, layout = SequenceCollator(pad_token_id=0, pad_to_multiple_of=16, padding_free=True).with_layout([row])
    extras = loss.collate([row], batch, layout, 0)
    shard = sequence.shard(batch)
    outputs = model(**shard.inputs, shift_labels=shard.shift_labels, token_outputs=True, **loss.model_options)
    exact = loss.document_sums(shard, outputs._replace(losses=outputs.losses / 1e4), extras["pairs"])[..., 0] * 2**30
    assert (exact == exact.round()).all(), "sums that are the same in any order"
    sums = dict(zip(loss.sums, loss.measure(shard, outputs, extras)[1].tolist(), strict=True))
    assert (sums["pairs"], sums["rewards/accuracies"]) == (2, 1)


RESUMED = {"ring": ["--cp", "2", *PACKED], "ulysses with LoRA": [*ULYSSES, *ONE, "--use_peft", "True"]}


def resume(cases, cache, folder):
    """Entries of whole runs and of runs that go on from their second step, with and without the reference's cache."""
    datasets.config.HF_DATASETS_CACHE = Path(cache)
    found, compute, computed = {}, ReferencedPreferenceLoss._compute, []
    ReferencedPreferenceLoss._compute = lambda *rows: computed.append(rows) or compute(*rows)
    for case, flags in cases.items():
        output = f"{folder}/{case}"
        found[case] = histories({"whole": [*flags, "--output_dir", output]})["whole"]
        for kept in (True, False):
            files = list(Path(cache, "longctx").glob("reference-*.npy"))
            dist.barrier()
            if dist.get_rank() == 0 and not kept:
                for file in files:
                    file.unlink()
            dist.barrier()
            arguments = [*flags, "--output_dir", output, "--resume_from_checkpoint", f"{output}/checkpoint-2"]
            before = len(computed)
            found[f"{case}, {'kept' if kept else 'anew'}"] = histories({"": arguments})[""]
            assert files
            assert len(computed) - before == (not kept)
    return found


@pytest.mark.long
@pytest.mark.parametrize("case", ["ring", "ulysses with LoRA"])
def test_a_resumed_run_is_the_run_that_was_not_interrupted(case, saved_model, tmp_path):
    data = write_lines(tmp_path / "pairs.jsonl", make_pairs())
    flags = [*flags_of("sigmoid", {}, saved_model, data, tmp_path), *RESUMED[case], "--max_steps", "4"]
    flags += ["--save_strategy", "steps", "--save_steps", "2"]
    found = run_ranks(2, f"{__name__}:resume", {case: flags}, str(tmp_path / "cache"), str(tmp_path))[0]
    values = ("step", "loss", "grad_norm", *METRICS)
    whole, *resumed = ([[entry[name] for name in values] for entry in log] for log in found.values())
    assert len(whole) == 4
    for log in resumed:
        assert log == whole


def files_kept(flags, cache):
    """Numbers of kept files after a run, after the same run again, and after it on as many nodes as devices."""
    datasets.config.HF_DATASETS_CACHE = Path(cache)
    found = []
    for devices_per_node in (2, 2, 1):
        longctx.parallel.devices_per_node = lambda *_, here=devices_per_node: here
        histories({"": flags})
        found.append(len(list(Path(cache, "longctx").glob("reference-*.npy"))))
    return found


@pytest.mark.long
def test_a_ring_that_another_machine_plans_computes_the_reference_anew(saved_model, tmp_path):
    """The speeds of links decide which rank holds which tokens, and thereby in which order attention sums its terms."""
    data = write_lines(tmp_path / "pairs.jsonl", make_pairs())
    flags = [*flags_of("sigmoid", {}, saved_model, data, tmp_path / "out"), "--overwrite_output_dir", "True"]
    flags += ["--cp", "2", *PACKED, "--max_steps", "1"]
    assert run_ranks(2, f"{__name__}:files_kept", flags, str(tmp_path / "cache"))[0] == [1, 1, 2]


def test_a_reference_that_is_nan_ends_the_run(tmp_path):
    model, data = tiny_model(), write_lines(tmp_path / "pairs.jsonl", make_pairs())
    model.model.norm.weight.data[3] = float("nan")
    save_with_tokenizer(model, tmp_path / "model")
    flags = flags_of("sigmoid", {}, tmp_path / "model", data, tmp_path / "out")
    [(code, _, errors)] = run_main(1, "longctx.dpo", flags)
    assert code == FAILED
    assert "the reference model gives pair 0 of the training data a log-probability of [nan, nan]" in errors

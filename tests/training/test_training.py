"""Whole training runs on real gloo processes and real engines, against training on one process.

Tolerances are the promise: relative 1e-5 for the first step, 1e-4 over five AdamW steps, all fp32. Sums run in
another order on several ranks, about 1e-7 a step; AdamW divides by the root of tiny second moments and enlarges it.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig

from longctx.attention.backends import BACKENDS
from longctx.attention.cost import Setup
from longctx.machine.here import Machine
from longctx.settings.flags import SFT
from longctx.upstream.accelerate_internals import ENGINE_ENVIRONMENT
from tests.few import together
from tests.jsonl import write_lines
from tests.reference import train_reference
from tests.small_model import HEADS, save_with_tokenizer
from tests.workers import one_by_one, run_ranks

ROOT = Path(__file__).parents[2]
LONG = pytest.mark.long
STEPS = 5
LEARNING_RATE = 5e-3
SHAPES = {
    "packed": ([90, 7, 41, 1, 130, 64, 2, 33, 17, 88], ["--packing", "True"]),
    "padded": ([90, 7, 41, 64], ["--packing", "False", "--per_device_train_batch_size", "4"]),
    "one long document": ([501], ["--packing", "True"]),
}
COMMON = ["--max_steps", str(STEPS), "--learning_rate", str(LEARNING_RATE), "--max_length", "512"]
COMMON += ["--per_device_train_batch_size", "1", "--logging_steps", "1", "--save_strategy", "no"]
COMMON += ["--report_to", "none", "--disable_tqdm", "True"]


def make_documents(lengths, *, seed=0, masked=0.4, shares=None):
    """(input_ids, labels) of random tokens; of the front of each document, one of `shares` is not learnt, or at most
    the share `masked`."""
    rng = np.random.default_rng(seed)
    documents = []
    for length in lengths:
        ids = rng.integers(3, 250, length).tolist()
        hidden = int((rng.choice(shares) if shares else rng.random() * masked) * length)
        documents.append((ids, [-100] * hidden + ids[hidden:]))
    return documents


def write_jsonl(path, documents):
    return write_lines(path, ({"input_ids": ids, "labels": labels} for ids, labels in documents))


def flags_of_run(model, data, folder):
    """COMMON, and where a run reads and writes; of a flag that is given again, the last value counts."""
    return [*COMMON, "--model_name_or_path", str(model), "--dataset_name", str(data), "--output_dir", str(folder)]


def packed_run(model, folder):
    """Documents that are packed, and the flags of a run on them, up to its folder; the file is written to `folder`."""
    documents = make_documents(SHAPES["packed"][0])
    data = write_jsonl(folder / "data.jsonl", documents)
    *flags, _ = flags_of_run(model, data, folder)
    return documents, ["--packing", "True", *flags]


def one_process(model, documents, **options):
    """Losses and gradient norms of STEPS steps, as `train_reference` has them."""
    return train_reference(model, documents, steps=STEPS, learning_rate=LEARNING_RATE, **options)


def run_cases(cases):
    """Train every case on this process group; returns {case: [(loss, grad_norm), ...]}."""
    return {case: steps_of(log) for case, log in logs_of_cases(cases).items()}


def logs_of_cases(cases):
    """Train every case on this process group, one after the other; returns {case: its log}."""
    return {case: log_of(arguments) for case, arguments in one_by_one(cases)}


def logs_on_engines(cases):
    """Train {case: (arguments, ZeRO's stage or None)}, as `logs_of_cases` does; returns {case: its log}."""
    logs = {}
    for case, (arguments, stage) in one_by_one(cases):
        if stage is not None:
            os.environ.update(ENGINE_ENVIRONMENT["deepspeed"], ACCELERATE_DEEPSPEED_ZERO_STAGE=str(stage))
        logs[case] = log_of(arguments)
    return logs


def prepared_run(arguments, method=SFT):
    """A run of these flags on this rank, before its model is loaded."""
    from longctx.run import prepare
    from longctx.settings.launcher import read_profile
    from longctx.settings.read import parse_flags
    from longctx.settings.resolve import resolve

    return prepare(resolve(parse_flags(arguments, method), read_profile(), os.environ))


def log_of(arguments, method=SFT):
    """The log's history of a run, on this rank."""
    from longctx.run import fit, load

    prepared = prepared_run(arguments, method)
    return fit(prepared, load(prepared)).state.log_history


def read_log(folder):
    """The log's history of a run that has saved its model to this folder."""
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


def steps_of(log):
    """[(loss, gradient norm), ...] of the entries of a log that have a loss."""
    return [(entry["loss"], entry["grad_norm"]) for entry in log if "loss" in entry]


def relative(actual, expected):
    return max(abs(a / e - 1) for a, e in zip(actual, expected, strict=True))


def check(results, reference, case, start, parity_table):
    """First step to 1e-5, all steps to 1e-4."""
    assert len(results) == len(reference[0])
    losses, norms = zip(*results, strict=True)
    first = relative(losses[:1], reference[0][:1]), relative(norms[:1], reference[1][:1])
    run = relative(losses, reference[0])
    parity_table.append((case, start, *first, run))
    assert max(first) <= 1e-5
    assert run <= 1e-4


ON_FSDP2 = [name for name, backend in BACKENDS.spread.items() if backend.engine == "fsdp2"]
ON_DEEPSPEED = [name for name, backend in BACKENDS.spread.items() if backend.engine == "deepspeed"]
GROUPS = [("ring", 1), (" ".join(ON_DEEPSPEED), 2), (" ".join(ON_FSDP2), 4)]
LONG_GROUPS = [("ring", 2), (" ".join(ON_DEEPSPEED), 4)]


def takes(backend, sp, num_heads, num_key_value_heads):
    """Whether a backend spreads so many heads over sp ranks."""
    sizes = {"num_heads": num_heads, "num_key_value_heads": num_key_value_heads, "head_size": 16, "element_size": 4}
    try:
        BACKENDS[backend].arrange(Setup(sp=sp, machine=Machine.of("CPU", sp), **sizes), None)
    except ValueError:
        return False
    return True


def heads_and_shapes(backend, sp):
    """The cases of a backend: those that cover every shape and all heads, and all others."""
    heads = [name for name, numbers in HEADS.items() if sp == 1 or takes(backend, sp, *numbers)]
    covering = [(heads[number % len(heads)], shape) for number, shape in enumerate(SHAPES)]
    if backend == "ring" and sp > 1:  # padded batches of a ring: test_equal_effective_batches_train_equally
        covering = [case for case in covering if case[1] != "padded"]
    if backend in ("gather", "hybrid"):  # the ring and Ulysses have these; the two put the same parts together
        heads.remove("MQA 4:1")
        covering = [(heads[0], "packed")]
    if backend == "hybrid":  # test_any_backend_on_either_engine has it with windows in one of two layers
        covering = []
    return covering, [case for case in itertools.product(heads, SHAPES) if case not in covering]


@pytest.mark.parametrize(
    ("backends", "sp", "parts"),
    [
        *(pytest.param(*group, ["covering"], id="{}-{}".format(*group)) for group in GROUPS),
        *(pytest.param(*group, ["others"], id="{}-{}-others".format(*group), marks=LONG) for group in GROUPS),
        *(pytest.param(*group, ["covering", "others"], id="{}-{}".format(*group), marks=LONG) for group in LONG_GROUPS),
    ],
)
def test_training_equals_one_process(backends, sp, parts, models, tmp_path, parity_table):
    """Backend × sp × {packed, padded, one long document} × heads; at sp 1 all are the local kernel."""
    cases, references = {}, {}
    chosen = [
        (backend, *case)
        for backend in backends.split()
        for part, found in zip(("covering", "others"), heads_and_shapes(backend, sp), strict=True)
        for case in found
        if part in parts
    ]
    for backend, heads_name, shape in chosen:
        lengths, flags = SHAPES[shape]
        case = f"{backend} sp {sp}, {shape}, {heads_name}"
        documents = make_documents(lengths)
        data = write_jsonl(tmp_path / f"{len(cases)}.jsonl", documents)
        cases[case] = [*flags_of_run(models[heads_name], data, tmp_path / f"out {len(cases)}"), *flags]
        cases[case] += ["--sp", str(sp), "--sp_backend", backend]
        references[case] = one_process(models[heads_name], documents)
    for case, results in run_ranks(sp, f"{__name__}:run_cases", cases)[0].items():
        check(results, references[case], case, "torchrun", parity_table)


@pytest.mark.long
def test_the_first_layers_of_a_model_are_trained_alone(models, tmp_path, parity_table):
    """As stock transformers loads them with the same key; what is saved is a model of one layer."""
    documents, arguments = packed_run(models["GQA 4:2"], tmp_path)
    arguments += [str(tmp_path / "out"), "--sp", "2", "--model_init_kwargs", '{"num_hidden_layers": 1}']
    stock = AutoModelForCausalLM.from_pretrained(models["GQA 4:2"], num_hidden_layers=1, attn_implementation="eager")
    reference = one_process(models["GQA 4:2"], documents, adapt=lambda _: stock)
    results = run_ranks(2, f"{__name__}:run_cases", {"first layer": arguments})[0]["first layer"]
    check(results, reference, "ring sp 2, first layer", "torchrun", parity_table)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert saved.config.layer_types == ["full_attention"]
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():  # five AdamW steps, as above
        torch.testing.assert_close(saved(input_ids=ids).logits, stock(input_ids=ids).logits, rtol=1e-3, atol=1e-4)


@pytest.mark.long
def test_train_loss_is_the_mean_of_all_steps_of_all_ranks(models, tmp_path):
    """Also of the steps since the last log, of which every rank has its own share."""
    documents = make_documents(SHAPES["one long document"][0])
    data = write_jsonl(tmp_path / "data.jsonl", documents)
    arguments = [*flags_of_run(models["GQA 4:2"], data, tmp_path / "out"), "--sp", "2", "--logging_steps", "3"]
    losses, _ = one_process(models["GQA 4:2"], documents)
    expected = sum(losses) / STEPS
    logs = run_ranks(2, f"{__name__}:log_of", arguments)
    assert [log[-1]["train_loss"] for log in logs] == pytest.approx([expected] * 2, rel=1e-4)


@pytest.mark.long
def test_ulysses_says_why_heads_do_not_fit(models, capfd, without_preflight):
    from longctx.train import main

    flags = ["--dataset_name", "stdlib", "--model_name_or_path", models["3 heads"]]
    assert main([*flags, "--sp", "2", "--sp_backend", "ulysses"]) == 2
    message = capfd.readouterr().err
    assert "3 heads cannot be divided by sp 2" in message
    assert "--sp 1, 3" in message
    assert main([*flags, "--sp", "2", "--dry_run", "--explain"]) == 0
    printed = capfd.readouterr().out
    assert "backend   ring 2 (auto): modelled ms per layer: ring 2: " in printed
    assert "; ulysses 2 cannot: 3 heads; " in printed


LAYOUTS = {  # (processes, sp, backend, per-device batch, accumulation): 8 sequences a step in every one
    "1 process × 8": (1, 1, "ring", 8, 1),
    "1 process × 2 × accumulation 4": (1, 1, "ring", 2, 4),
    "2 processes × 4, data parallel": (2, 1, "ring", 4, 1),
    "4 processes × 2, data parallel": (4, 1, "ring", 2, 1),
    "ring sp 2 × dp 2 × 2, accumulation 2": (4, 2, "ring", 2, 2),
    "ring sp 4, accumulation 8": (4, 4, "ring", 1, 8),
    "ring of all 4 × 2, accumulation 4": (4, "all", "ring", 2, 4),
    "hybrid of all 4 × 4, accumulation 2": (4, "all", "hybrid", 4, 2),
    "ulysses sp 2 × dp 2 × 2, accumulation 2": (4, 2, "ulysses", 2, 2),
}
"""What runs on DeepSpeed stands last: FSDP2 cannot follow in the same process."""


FEW_LAYOUTS = [name for name in LAYOUTS if name.startswith(("2 processes", "ring sp 2", "ulysses sp 2"))]
"""With data parallelism alone, and with accumulation, too, under each engine."""


@pytest.mark.parametrize("layouts", together(LAYOUTS, FEW_LAYOUTS))
def test_equal_effective_batches_train_equally(layouts, models, tmp_path, parity_table):
    """The same 8 sequences a step, spread differently, with very unequal numbers of label tokens.

    20 documents make the third step of an epoch a partial one: 4 rows, over up to 4 ranks and 8 micro-batches.
    """
    documents = make_documents(np.random.default_rng(1).integers(2, 120, 20).tolist(), masked=0.97)
    data = write_jsonl(tmp_path / "data.jsonl", documents)
    batches = [documents[:8], documents[8:16], documents[16:], documents[:8], documents[8:16]]
    reference = one_process(models["GQA 4:2"], None, batches=batches)
    groups = {}
    for name in layouts:
        processes, sp, backend, batch, accumulation = LAYOUTS[name]
        flags = ["--sp", str(sp), "--sp_backend", backend, "--per_device_train_batch_size", str(batch)]
        flags += ["--gradient_accumulation_steps", str(accumulation)]
        flags += ["--packing", "False", "--train_sampling_strategy", "sequential"]
        groups.setdefault(processes, {})[name] = [*flags_of_run(models["GQA 4:2"], data, tmp_path / name), *flags]
    for processes, cases in groups.items():
        for name, results in run_ranks(processes, f"{__name__}:run_cases", cases)[0].items():
            check(results, reference, name, "torchrun", parity_table)


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ELSEWHERE = {
    "deepspeed": {
        **{name: ["--sp", "4", "--sp_backend", name] for name in ON_FSDP2},
        "experts, ulysses": ["--sp", "4", "--sp_backend", "ulysses"],
    },
    "fsdp2": {
        **{name: ["--sp", "4", "--sp_backend", name] for name in ON_DEEPSPEED},
        "HSDP, ring": ["--sp", "2", "--sp_backend", "ring", "--dp_replicate", "2"],
        "HSDP, ulysses": ["--sp", "2", "--sp_backend", "ulysses", "--dp_replicate", "2"],
        "experts, ring": ["--sp", "4", "--sp_backend", "ring"],
        "windows, ring": ["--sp", "4", "--sp_backend", "ring"],
        "windows, hybrid": ["--sp", "4", "--sp_backend", "hybrid"],
        "windows, ulysses": ["--sp", "4", "--sp_backend", "ulysses"],
        "ring, workers": ["--sp", "4", "--sp_backend", "ring", "--dataloader_num_workers", "2"],
        "ring, no selective": ["--sp", "4", "--gradient_checkpointing_kwargs", '{"selective": false}'],
    },
}


@pytest.fixture(scope="session")
def other_models(models, tmp_path_factory):
    """Folders of models like `models`, with windows in one of two layers or with experts, and of the plain one."""
    plain = AutoConfig.from_pretrained(models["GQA 4:2"])
    windows, experts = copy.deepcopy(plain), Qwen3MoeConfig(**{**plain.to_dict(), **EXPERTS})
    windows.update({"use_sliding_window": True, "sliding_window": 24})
    windows.layer_types = ["sliding_attention", "full_attention"]
    folders = {"plain": models["GQA 4:2"]}
    for name, config in (("windows", windows), ("experts", experts)):
        folders[name] = str(tmp_path_factory.mktemp(name))
        torch.manual_seed(0)
        save_with_tokenizer(AutoModelForCausalLM.from_config(config), folders[name])
    return folders


SOME = ("ring", "experts, ulysses", "HSDP, ring", "windows, hybrid")
"""What a plain pytest runs of them."""


@pytest.mark.parametrize("only", [pytest.param(SOME, id="some"), pytest.param(None, id="all", marks=pytest.mark.long)])
@pytest.mark.parametrize("engine", ELSEWHERE)
def test_any_backend_on_either_engine(engine, only, other_models, tmp_path, parity_table):
    """What the backends do not run on by default; copies of the model; windows, experts; planning in workers."""
    documents, common = packed_run(other_models["plain"], tmp_path)
    cases, references = {}, {}
    processes = "2" if only == SOME and engine == "deepspeed" else "4"
    for name, flags in ELSEWHERE[engine].items():
        if only is not None and name not in only:
            continue
        kind = name.partition(",")[0]
        model = other_models.get(kind, other_models["plain"])
        flags = [processes if flag == "4" else flag for flag in flags]
        cases[name] = [*common, str(tmp_path / name), "--engine", engine, "--model_name_or_path", model, *flags]
        references[name] = one_process(model, documents)
    kinds = {name.partition(",")[0] for name in cases} & other_models.keys()
    assert len({losses[0] for losses, _ in references.values()}) == 1 + len(kinds)  # windows and experts do act
    for name, results in run_ranks(int(processes), f"{__name__}:run_cases", cases)[0].items():
        check(results, references[name], f"{name} on {engine}", "torchrun", parity_table)


def test_bf16_is_as_near_as_one_process_in_bf16(models, tmp_path):
    """bf16 rounds to 3 digits in every layer; spreading a sequence must not add to the error of one process."""
    documents, flags = packed_run(models["GQA 4:2"], tmp_path)
    given = ["--bf16", "True", "--max_steps", "1", "--sp_backend"]
    losses, norms = train_reference(models["GQA 4:2"], documents, steps=1, learning_rate=LEARNING_RATE)
    errors = {}
    for sp, backends in ((1, ["ring"]), (2, ["ring", "ulysses"])):
        cases = {name: [*flags, f"{tmp_path}/{name} {sp}", "--sp", str(sp), *given, name] for name in backends}
        for backend, [(loss, norm)] in run_ranks(sp, f"{__name__}:run_cases", cases)[0].items():
            errors[backend, sp] = relative([loss], losses), relative([norm], norms)
    for loss_error, norm_error in errors.values():
        # Rounding is random, so that two errors of the same size may differ by a factor; 3e-3 is bf16's own step.
        assert loss_error <= max(1.5 * errors["ring", 1][0], 3e-3), errors
        assert norm_error <= max(1.5 * errors["ring", 1][1], 1e-2), errors


def launch(arguments, cwd):
    """`accelerate launch …` as a user types it in a folder; returns its output."""
    command = [str(Path(sys.executable).parent / "accelerate"), "launch", *arguments]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long  # tests/settings/test_profiles.py has a launch in a plain run
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sp", [1, 2, 4])
@pytest.mark.parametrize("backend", ["ring", "ulysses"])
def test_accelerate_launch_equals_one_process(backend, sp, shape, models, tmp_path, parity_table):
    lengths, flags = SHAPES[shape]
    documents = make_documents(lengths)
    data = write_jsonl(tmp_path / "data.jsonl", documents)
    model = models["GQA 4:2"]
    arguments = [*flags_of_run(model, data, tmp_path / "out"), *flags, "--sp", str(sp), "--sp_backend", backend]
    output = launch(["-m", "longctx.train", *arguments], tmp_path)
    log = read_log(tmp_path / "out")
    reference = one_process(model, documents)
    check(steps_of(log), reference, f"{backend} sp {sp}, {shape}, GQA 4:2", "accelerate launch", parity_table)
    assert re.search(r"^mesh +(.*)$", output, re.M)[1] == ("1 process" if sp == 1 else f"{sp} processes = sp {sp}")
    packing = log[0]["packing"]
    assert (packing["documents"], packing["tokens"]) == (len(lengths), sum(lengths))
    assert packing["tokens_kept"] == sum(lengths)
    check_log(next(entry for entry in log if "loss" in entry), documents, sp)


def check_log(entry, documents, sp):
    """The keys that every run logs, and those values that are known."""
    names = {"loss", "grad_norm", "learning_rate", "num_tokens", "tokens_per_second", "tokens_per_second_per_device"}
    names |= {"mfu", "peak_memory_gib_max", "peak_memory_gib_min", "padding_fraction", "attention_imbalance"}
    assert names <= set(entry)
    assert entry["num_tokens"] == sum(len(ids) for ids, _ in documents)
    assert entry["tokens_per_second_per_device"] == pytest.approx(entry["tokens_per_second"] / sp)
    assert entry["mfu"] is entry["peak_memory_gib_max"] is entry["peak_memory_gib_min"] is None
    assert 0 <= entry["padding_fraction"] < 1
    assert entry["attention_imbalance"] >= 1


@pytest.mark.long
def test_the_example_of_the_trl_documentation(tmp_path):
    """Its Ulysses command, 100 steps at 4096 with packing, with a local model and chats in place of the hub names."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 272}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192}
    save_with_tokenizer(Qwen2ForCausalLM(Qwen2Config(**sizes, **heads)), tmp_path / "Qwen2-0.5B")
    turns = [{"role": "user", "content": "How long is string?"}, {"role": "assistant", "content": "Twice half."}]
    write_lines(tmp_path / "Capybara.jsonl", ({"messages": turns * n} for n in range(1, 7)))
    command = ["--config_file", str(ROOT / "configs/alst_ulysses_4gpu.yaml")]
    command += ["-m", "longctx.train", "--model_name_or_path", "Qwen2-0.5B", "--dataset_name", "Capybara.jsonl"]
    command += ["--learning_rate", "2e-4", "--max_steps", "100", "--max_seq_length", "4096", "--packing"]
    command += ["--torch_dtype", "bfloat16", "--attn_implementation", "flash_attention_2"]
    command += ["--output_dir", "output-alst-4gpu", "--disable_tqdm", "True"]
    output = launch(command, tmp_path)
    assert re.search(r"^mesh +(.*)$", output, re.M)[1] == "4 processes = dp_shard 2 × sp 2"
    assert "flash_attention_2 was asked for" in output
    log = read_log(tmp_path / "output-alst-4gpu")
    losses = [loss for loss, _ in steps_of(log)]
    assert log[-1]["step"] == 100
    assert losses[-1] < losses[0]
    assert AutoConfig.from_pretrained(tmp_path / "output-alst-4gpu").model_type == "qwen2"

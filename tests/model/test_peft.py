"""LoRA by --use_peft on real gloo ranks and engines, against peft on one process under dense attention, and refusals.

Adapters start alike everywhere: their random part is drawn from --seed on the CPU of every rank. The reference draws
it by torch.manual_seed too; a test compares the two bit by bit, and the first step's gradient norm depends on it.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from longctx.train import main
from tests.model.test_models import make_model
from tests.reference import dense_loss, train_reference
from tests.small_model import save_small_model
from tests.training.test_training import COMMON, LEARNING_RATE, SHAPES, STEPS, check, make_documents, write_jsonl
from tests.workers import one_by_one, run_ranks

peft = pytest.importorskip("peft")

SEED = 42
"""TrainingArguments' default."""
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
HEAD = "head"
"""Refused on FSDP2: test_adapters_that_are_refused."""
ADAPTERS = {  # flags, and peft's own names for them
    "default": ([], {"r": 16, "lora_alpha": 32}),
    "rank-stabilised, all layers": (
        ["--lora_target_modules", "all-linear", "--use_rslora", "True", "--lora_r", "4", "--lora_alpha", "8"],
        {"target_modules": "all-linear", "use_rslora": True, "r": 4, "lora_alpha": 8},
    ),
    "regular expression": (
        ["--lora_target_modules", ".*1.*_proj", "--lora_r", "2"],
        {"target_modules": ".*1.*_proj", "r": 2, "lora_alpha": 32},
    ),
    "DoRA": (
        ["--use_dora", "True", "--lora_target_modules", *ATTENTION],
        {"use_dora": True, "target_modules": ATTENTION, "r": 16, "lora_alpha": 32},
    ),
    "embeddings and norms": (
        ["--lora_modules_to_save", "embed_tokens", "norm"],
        {"modules_to_save": ["embed_tokens", "norm"], "r": 16, "lora_alpha": 32},
    ),
    HEAD: (["--lora_modules_to_save", "lm_head"], {"modules_to_save": ["lm_head"], "r": 16, "lora_alpha": 32}),
}
RING, ULYSSES = ["--sp", "2", "--sp_backend", "ring"], ["--sp", "2", "--sp_backend", "ulysses"]
LAYOUTS = {  # (processes, flags)
    "1 process": (1, []),
    "ring on FSDP2": (2, RING),
    "ulysses on ZeRO-3": (2, ULYSSES),
    "ring on ZeRO-3": (2, [*RING, "--engine", "deepspeed"]),
    "ulysses on FSDP2": (2, [*ULYSSES, "--engine", "fsdp2"]),
    "HSDP, ring": (4, [*RING, "--dp_replicate", "2"]),
    "ring × dp 2 on FSDP2": (4, RING),
    "ulysses × dp 2 on ZeRO-3": (4, ULYSSES),
}
CHECKPOINTING = {"": [], ", no checkpointing": ["--gradient_checkpointing", "False"]}
FEW = {"ring on FSDP2": ("default",)}
"""What a plain pytest runs."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose embeddings are not tied."""
    return save_small_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=False)


class Adapt:
    """peft's own adapter on one process; keeps the model, and its adapter as it started."""

    def __init__(self, **settings):
        self.config = peft.LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **settings)

    def __call__(self, model):
        torch.manual_seed(SEED)
        self.model = peft.get_peft_model(model, self.config)
        self.start = {name: value.clone() for name, value in peft.get_peft_model_state_dict(self.model).items()}
        return self.model


def run_cases(cases):
    """{case: (adapter at the start, log of steps, shards of FSDP2, trained parameters)} on this process group."""
    from torch.distributed.fsdp import FSDPModule

    from longctx.model.adapter import add_adapter
    from longctx.run import fit, load, prepare
    from longctx.settings.launcher import read_profile
    from longctx.settings.read import parse_flags
    from longctx.settings.resolve import resolve

    results = {}
    for case, arguments in one_by_one(cases):
        prepared = prepare(resolve(parse_flags(arguments), read_profile(), os.environ))
        start = peft.get_peft_model_state_dict(add_adapter(load(prepared), prepared.run.settings))
        trainer = fit(prepared, load(prepared))
        steps = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
        shards = [name for name, module in trainer.model.named_modules() if isinstance(module, FSDPModule)]
        trained = sorted(name for name, p in trainer.model.named_parameters() if p.requires_grad)
        results[case] = (start, steps, shards, trained)
    return results


def cases_of(layout, few):
    """(name, adapter, flags). Four processes are slow here, and run with checkpointing only."""
    is_fsdp2 = "FSDP2" in layout or "HSDP" in layout
    for adapter, checkpointing in itertools.product(ADAPTERS, CHECKPOINTING):
        if few and (adapter not in FEW[layout] or checkpointing):
            continue
        if (adapter == HEAD and is_fsdp2) or (LAYOUTS[layout][0] == 4 and checkpointing):
            continue
        yield adapter + checkpointing, adapter, CHECKPOINTING[checkpointing]


PARAMETERS = [pytest.param(name, True, id=f"{name}, some") for name in FEW]
PARAMETERS += [pytest.param(name, False, id=name, marks=pytest.mark.long) for name in LAYOUTS]


@pytest.mark.parametrize(("layout", "few"), PARAMETERS)
def test_an_adapter_trains_as_on_one_process(layout, few, folder, tmp_path, parity_table):
    """Five steps on packed documents; the adapter that is saved, on the base model, is the one process's."""
    documents = make_documents(SHAPES["packed"][0])
    data = write_jsonl(tmp_path / "data.jsonl", documents)
    processes, flags = LAYOUTS[layout]
    common = [*COMMON, *flags, "--use_peft", "True", "--model_name_or_path", folder, "--dataset_name", data]
    cases, adapts, references = {}, {}, {}
    for case, adapter, checkpointing in cases_of(layout, few):
        given, settings = ADAPTERS[adapter]
        cases[case] = [*common, *given, *checkpointing, "--output_dir", str(tmp_path / case)]
        adapts[case] = Adapt(**settings)
        how = {"steps": STEPS, "learning_rate": LEARNING_RATE, "adapt": adapts[case]}
        references[case] = train_reference(folder, documents, **how)
    for rank, results in enumerate(run_ranks(processes, f"{__name__}:run_cases", cases, timeout=900)):
        for case, (start, steps, shards, trained) in results.items():
            adapt = adapts[case]
            assert start.keys() == adapt.start.keys()
            if rank == 0 or "FSDP2" not in layout:  # FSDP2 reads weights on rank 0 and hands them on
                assert all(torch.equal(value, adapt.start[name]) for name, value in start.items())
            assert trained == sorted(name for name, p in adapt.model.named_parameters() if p.requires_grad)
            if "FSDP2" in layout or "HSDP" in layout:
                assert sum(name.endswith((".layers.0", ".layers.1")) for name in shards) == 2, shards
            if rank:
                continue
            check(steps, references[case], f"LoRA {case}, {layout}", "torchrun", parity_table)
            assert not (tmp_path / case / "model.safetensors").exists()
            base = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
            untrained = dense_loss(base, documents).item()
            saved = dense_loss(peft.PeftModel.from_pretrained(base, tmp_path / case), documents).item()
            assert saved == pytest.approx(dense_loss(adapt.model, documents).item(), rel=1e-4)
            assert saved < untrained - 0.01


# ------------------------------------------------------------------------------------------------
# Refusals: before weights load
# ------------------------------------------------------------------------------------------------

REFUSED = {
    "dropout": (["--lora_dropout", "0.1"], ("--lora_dropout 0.1", "use 0")),
    "task": (["--lora_task_type", "SEQ_CLS"], ("--lora_task_type SEQ_CLS", "CAUSAL_LM")),
    "no such parameters": (
        ["--lora_target_modules", "q_proj", "v_proj", "--lora_target_parameters", "mlp.experts.down_proj"],
        ("--lora_target_parameters names mlp.experts.down_proj", "no parameter", "leave it out"),
    ),
    "parameters of a layer": (
        ["--lora_target_modules", "q_proj", "v_proj", "--lora_target_parameters", "k_proj.weight"],
        ("--lora_target_parameters adapts weight", "not the matrices of experts", "--lora_target_modules"),
    ),
    "rank": (["--lora_r", "0"], ("--lora_r 0", "positive")),
    "a single name": (["--lora_target_modules", "q_proj"], ("q_proj not found", "all-linear", ".*q_proj")),
    "one name of two": (["--lora_target_modules", "q_proj", "v_porj"], ("--lora_target_modules names v_porj",)),
    "norms": (["--lora_target_modules", "q_proj", "norm"], ("RMSNorm", "not supported", "all-linear")),
    "embeddings": (
        ["--lora_target_modules", "q_proj", "embed_tokens"],
        ("embed_tokens (Embedding)", "not a plain linear"),
    ),
    "head": (["--lora_target_modules", "q_proj", "lm_head"], ("lm_head", "fused loss", "--lora_modules_to_save")),
    "no such module": (["--lora_modules_to_save", "score"], ("--lora_modules_to_save names score",)),
    "whole head on FSDP2": (
        ["--lora_modules_to_save", "lm_head", *RING],
        ("trains lm_head", "one rank alone", "--engine deepspeed"),
    ),
}


@pytest.fixture
def refusal(refusal):
    return partial(refusal, "--use_peft", "True")


@pytest.mark.parametrize("case", REFUSED)
def test_adapters_that_are_refused(case, folder, refusal):
    given, parts = REFUSED[case]
    error = refusal("--model_name_or_path", folder, *given)
    assert all(part in error for part in parts), error


def test_routers_of_llama_4_are_refused(tmp_path, refusal):
    """They are linear layers that also return their choice of experts."""
    make_model("llama4_text, chunks, temperatures").config.save_pretrained(tmp_path)
    error = refusal("--model_name_or_path", str(tmp_path), "--lora_target_modules", "all-linear")
    assert "feed_forward.router (Llama4Router), which is not a plain linear layer" in error


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens", "model.embed_tokens"])
def test_tied_embeddings_are_not_trained_apart(module, refusal):
    error = refusal("--model_name_or_path", "tiny", "--lora_modules_to_save", module)
    assert f"--lora_modules_to_save trains {'lm_head' if module == 'lm_head' else 'model.embed_tokens'}" in error
    assert "tied to its head" in error


@pytest.mark.parametrize(("found", "says"), [(None, "peft is not installed"), ("0.19.1", "peft 0.19.1 is installed")])
def test_peft_that_is_missing_or_old(found, says, refusal, monkeypatch):
    def version(package, real=importlib.metadata.version):
        if package != "peft":
            return real(package)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr("longctx.settings.machine_checks.version", version)
    error = refusal("--model_name_or_path", "tiny")
    assert says in error
    assert "--use_peft" in error
    assert "pip install -U 'peft>=0.20.0'" in error


@pytest.mark.long
def test_dropout_is_off_unless_asked_for(folder, monkeypatch, capsys):
    """TRL's default is 0.05: another value than TRL's is printed."""
    monkeypatch.setattr("longctx.settings.resolve.device_count", lambda: 0)
    assert main(["--dataset_name", "stdlib", "--model_name_or_path", folder, "--use_peft", "--dry_run"]) == 0
    assert "--lora_dropout 0.0 (TRL: 0.05)" in capsys.readouterr().out

"""Every allowed model type on every engine: one step on two ranks, against stock transformers on one process.

Each engine's loading, sharding and saving sees the parameters and buffers of every architecture here.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from transformers import AutoModelForCausalLM

from longctx.model.allow_list import ADDED_IN
from tests.model.test_families import documents_loss
from tests.model.test_models import CONFIG_MAPPING, FAMILIES
from tests.parity_page import MODELS as MODELS_PAGE
from tests.reference import adamw_steps
from tests.small_model import save_with_tokenizer
from tests.training.test_training import COMMON, LEARNING_RATE, logs_on_engines, make_documents, steps_of, write_jsonl
from tests.workers import run_ranks

STEPS = 2
FLAGS = [*COMMON, "--max_steps", str(STEPS), "--max_length", "128", "--lr_scheduler_type", "constant"]
FLAGS += ["--router_aux_loss_coef", "0"]  # tests/layers/test_routers.py compares the auxiliary loss
LENGTHS = [33, 7, 41, 1, 20]
LAYOUTS = {
    "ring on FSDP2": (["--sp", "2", "--sp_backend", "ring"], None),
    "ulysses on FSDP2": (["--sp", "2", "--sp_backend", "ulysses", "--engine", "fsdp2"], None),
    "dp on FSDP2": (["--num_processes", "2", "--engine", "fsdp2"], None),
    "ulysses on ZeRO-3": (["--sp", "2", "--sp_backend", "ulysses", "--engine", "deepspeed"], 3),
    "ulysses on ZeRO-2": (["--sp", "2", "--sp_backend", "ulysses", "--engine", "deepspeed"], 2),
    "ring on ZeRO-1": (["--sp", "2", "--sp_backend", "ring", "--engine", "deepspeed"], 1),
}
ODD = "gpt_oss, a layer of odd size"
MODELS = FAMILIES | {
    ODD: ("gpt_oss", FAMILIES["gpt_oss, sinks and windows"][1] | {"num_attention_heads": 3, "num_key_value_heads": 3})
}
FEW = [
    ("apertus", "ring on FSDP2"),
    ("glm4_moe", "ulysses on ZeRO-3"),
    ("sarvam_moe", "ulysses on ZeRO-3"),
    (ODD, "ring on ZeRO-1"),
    ("youtu", "ulysses on ZeRO-3"),
]
FEW = [case for case in FEW if case[0] in MODELS or case[0] not in ADDED_IN]


def every_case():
    """(family, layout): both engines for every model, and all layouts for those with saved buffers or an odd layer."""
    for family, layout in product(MODELS, LAYOUTS):
        is_special = family in ("apertus", "glm4_moe", ODD)
        odd = "ulysses" in layout and family == ODD  # three heads cannot be divided
        if (is_special or layout in ("dp on FSDP2", "ulysses on ZeRO-3")) and not odd:
            yield family, layout


def save_model(family, folder):
    """Save a model of noisy weights; its saved buffers have values of their own, which no initialisation gives."""
    torch.manual_seed(0)
    model_type, settings = MODELS[family]
    config = CONFIG_MAPPING[model_type](**settings | {"vocab_size": 260})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    saved = model.state_dict()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for name, buffer in model.named_buffers():
            if name in saved:
                buffer.add_(torch.rand_like(buffer), alpha=0.2)
    save_with_tokenizer(model, folder)


def reference_run(folder, documents):
    """Losses, gradient norms, and the trained model; each document is a forward pass of its own."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    rates = [LEARNING_RATE] * STEPS
    return *adamw_steps(model, rates, lambda step: documents_loss(model, documents)), model


def logits_of(model):
    """Return the logits of the 256 bytes. transformers may set those of Youtu's padding token to 0 when it loads it."""
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 40)[None], use_cache=False).logits[..., :256]


def run_cases(cases):
    """{case: [(loss, grad_norm), ...]} of {case: (arguments, ZeRO's stage or None)}."""
    return {case: steps_of(log) for case, log in logs_on_engines(cases).items()}


@pytest.mark.long
@pytest.mark.parametrize("cases", [FEW, list(every_case())], ids=["some", "all"])
def test_every_model_type_trains_and_is_saved_as_on_one_process(cases, tmp_path, parity_table):
    documents = make_documents(LENGTHS)
    data = write_jsonl(tmp_path / "data.jsonl", documents)
    runs, references = {}, {}
    for family, layout in cases:
        folder = tmp_path / family.replace(" ", "-")
        if family not in references:
            save_model(family, folder)
            references[family] = reference_run(folder, documents)
        flags, zero_stage = LAYOUTS[layout]
        given = [*FLAGS, *flags, "--model_name_or_path", str(folder), "--dataset_name", data]
        runs[family, layout] = [*given, "--output_dir", str(tmp_path / f"{family}, {layout}")], zero_stage
    results = run_ranks(2, f"{__name__}:run_cases", runs, timeout=3600)[0]
    wrong = {}
    for (family, layout), steps in results.items():
        errors = compare(steps, references[family], tmp_path / f"{family}, {layout}")
        parity_table.append((f"{family}, {layout}", MODELS_PAGE, *errors["first step"], errors["losses"]))
        if not (max(errors["first step"]) <= 1e-5 and errors["losses"] <= 1e-4 and errors["saved logits"] <= 1e-3):
            wrong[family, layout] = errors
    assert not wrong


def compare(steps, reference, folder):
    """Relative errors: loss and gradient norm of the first step, all losses, and the logits of the saved model."""
    losses, norms, model = reference
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected, actual = logits_of(model), logits_of(saved)
    for (name, buffer), (_, kept) in zip(model.named_buffers(), saved.named_buffers(), strict=True):
        assert torch.equal(buffer, kept), name
    return {
        "first step": (abs(steps[0][0] / losses[0] - 1), abs(steps[0][1] / norms[0] - 1)),
        "losses": max(abs(loss / expected - 1) for (loss, _), expected in zip(steps, losses, strict=True)),
        "saved logits": float((actual - expected).norm() / expected.norm()),
    }

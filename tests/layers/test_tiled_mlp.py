"""MLPs over tiles of tokens against all tokens at once, and training with them against one process."""

from __future__ import annotations

import copy
import itertools
import os

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

from longctx.layers.tiled_mlp import find_mlps, install_tiled_mlp
from tests.few import few
from tests.model.test_models import FAMILIES, make_model
from tests.model.test_peft import Adapt
from tests.reference import train_reference
from tests.small_model import save_small_model, save_with_tokenizer
from tests.training.test_training import COMMON, EXPERTS, LEARNING_RATE, STEPS, check, make_documents, write_jsonl
from tests.workers import run_ranks

TOLERANCE = 1e-5  # fp32; the same sums over tokens, in groups. Measured: at most 1e-6.


def results(mlp, x):
    """All that an MLP gives for x, and the gradients of x and of its parameters that are trained."""
    x = x.clone().requires_grad_()
    out = mlp(x)
    outputs = out if isinstance(out, tuple) else (out,)
    sum((part * torch.linspace(-1, 1, part.numel()).view_as(part)).sum() for part in outputs).backward()
    gradients = [tensor.grad for tensor in (x, *mlp.parameters()) if tensor.requires_grad]
    mlp.zero_grad()
    return [*(part.detach() for part in outputs), *gradients]


OTHER_NUMBERS = {
    "granitemoehybrid": 4,
    "granitemoeshared": 4,
    "granitemoe_swa, windows": 4,
    "nemotron_h": 2,
    "nemotron_h, no experts": 1,
}
"""A shared MLP beside the experts of each of two layers, and four layers of which two are MLPs."""


@pytest.mark.parametrize("family", few(FAMILIES))
def test_every_model_s_mlps_are_found_and_give_the_same(family):
    model = make_model(family)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 16, model.config.hidden_size, generator=generator)
    mlps = list(find_mlps(model))
    assert len(mlps) == OTHER_NUMBERS.get(family, model.config.num_hidden_layers)
    expected = [results(mlp, x) for mlp in mlps]
    install_tiled_mlp(model, 5)  # 32 tokens: the last tile is a shorter one
    lengths = []
    for mlp in mlps:
        part = next(part for part in mlp.modules() if part is not mlp and list(part.parameters()))
        part = mlp.router if family.startswith("llama4") and hasattr(mlp, "router") else part  # all experts take all
        part.register_forward_pre_hook(lambda _, args: lengths.append(args[0].numel() // x.shape[-1]))
    for mlp, references in zip(mlps, expected, strict=True):
        for actual, reference in zip(results(mlp, x), references, strict=True):
            assert actual.shape == reference.shape
            assert float((actual - reference).norm() / reference.norm()) <= TOLERANCE
    assert max(lengths) <= 7


@pytest.mark.parametrize("family", few(FAMILIES))
def test_every_model_with_its_norms_in_tiles_too_gives_the_same(family):
    """Dense attention over one document, so that nothing but tiles differs."""
    ids, logits, gradients = torch.arange(2, 34)[None], [], []
    for tiles in (None, 5):
        model = make_model(family)
        if tiles is not None:
            install_tiled_mlp(model, tiles)
        logits.append(model(ids, use_cache=False).logits)
        logits[-1].square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    for expected, actual in (logits, gradients):
        assert float((actual - expected).detach().norm() / expected.detach().norm()) <= TOLERANCE


def test_parts_behind_frozen_embeddings_and_copies_of_them_are_trained():
    """As adapters have them: peft copies what --lora_modules_to_save names."""
    model = make_model("qwen3")
    x, norm = torch.randn(1, 32, 32), model.model.layers[0].input_layernorm
    norm(x).square().sum().backward()
    expected, norm.weight.grad = norm.weight.grad, None
    install_tiled_mlp(model, 5)
    copied = copy.deepcopy(norm)
    copied(x).square().sum().backward()
    assert norm.weight.grad is None
    assert float((copied.weight.grad - expected).norm() / expected.norm()) <= TOLERANCE


def test_what_is_no_number_of_tiles_is_refused():
    with pytest.raises(ValueError, match="tiled_mlp_num_shards -1 is not a number of tiles"):
        install_tiled_mlp(make_model("llama, yarn rope"), -1)
    with pytest.raises(ValueError, match="No MLP was found in Linear"):
        install_tiled_mlp(torch.nn.Linear(2, 2), 2)


ZERO = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
}
LENGTHS = [90, 7, 41, 64]
MLP = ["gate_proj", "up_proj", "down_proj"]
KINDS = {
    "accumulation 2": [
        *("--packing", "False", "--per_device_train_batch_size", "2"),
        *("--gradient_accumulation_steps", "2"),
    ],
    "experts": ["--packing", "True"],
    "adapters of MLPs": [
        *("--packing", "True", "--gradient_checkpointing", "False", "--use_peft", "True"),
        *("--lora_target_modules", *MLP, "--lora_r", "2"),
    ],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A plain model and one with experts."""
    plain, experts = (tmp_path_factory.mktemp(name) for name in ("plain", "experts"))
    save_small_model(plain, tie_word_embeddings=False)
    config = Qwen3MoeConfig(**{**AutoConfig.from_pretrained(plain).to_dict(), **EXPERTS})
    torch.manual_seed(0)
    save_with_tokenizer(AutoModelForCausalLM.from_config(config), experts)
    return {"plain": str(plain), "experts": str(experts)}


def run_tiled(cases):
    """{(case, stage of ZeRO, tiles): log of steps} with one key/value head at a time."""
    from accelerate.state import AcceleratorState

    import longctx.run.model
    from longctx.settings.launcher import read_profile
    from longctx.settings.read import parse_flags
    from longctx.settings.resolve import resolve

    parallelize, environment, results = longctx.run.model.parallelize, dict(os.environ), {}
    for (case, stage, tiles), arguments in cases.items():
        AcceleratorState._reset_state()
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        if stage is not None:
            os.environ.update(ZERO, ACCELERATE_DEEPSPEED_ZERO_STAGE=str(stage))
        memory_options = {"tiled_mlp_num_shards": tiles, "heads_k_stride": 1}
        longctx.run.model.parallelize = lambda *args, memory_options=memory_options, **kwargs: parallelize(
            *args, **(kwargs | memory_options)
        )
        prepared = longctx.run.prepare(resolve(parse_flags(arguments), read_profile(), os.environ))
        log = longctx.run.fit(prepared, longctx.run.load(prepared)).state.log_history
        results[case, stage, tiles] = [(entry["loss"], entry["grad_norm"]) for entry in log if "loss" in entry]
    return results


@pytest.mark.long
@pytest.mark.parametrize(
    ("engine", "stages"), [("deepspeed", [1, 2, 3]), ("fsdp2", [None])], ids=["ZeRO-1, 2, 3", "FSDP2"]
)
def test_training_equals_one_process(engine, stages, folders, tmp_path, parity_table):
    documents = make_documents(LENGTHS)
    data = write_jsonl(tmp_path / "data.jsonl", documents)
    common = [*COMMON, "--dataset_name", data, "--sp", "2", "--sp_backend", "ulysses", "--engine", engine]
    cases, references = {}, {}
    for kind in KINDS:
        model = folders["experts" if kind == "experts" else "plain"]
        adapt = Adapt(r=2, lora_alpha=32, target_modules=MLP) if kind.startswith("adapters") else lambda model: model
        references[kind] = train_reference(model, documents, steps=STEPS, learning_rate=LEARNING_RATE, adapt=adapt)
        for stage, tiles in itertools.product(stages, (3, 6)):
            if tiles == 3 or stage == 3:
                flags = [*KINDS[kind], "--model_name_or_path", model, "--output_dir", f"{tmp_path}/{len(cases)}"]
                cases[kind, stage, tiles] = [*common, *flags]
    results = run_ranks(2, f"{__name__}:run_tiled", cases)[0]
    for (kind, stage, tiles), steps in results.items():
        name = engine if stage is None else f"ZeRO-{stage}"
        check(steps, references[kind], f"{tiles} tiles, {kind}, {name}", "torchrun", parity_table)

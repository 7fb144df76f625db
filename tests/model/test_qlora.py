"""QLoRA by --load_in_4bit on real gloo ranks, against peft on one process with the same 4-bit weights, and refusals."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3Config, Qwen3MoeConfig

from longctx.forecast.memory import states
from longctx.forecast.model_sizes import ModelSizes
from longctx.model.load import load_config, load_model
from longctx.model.quantized import ALIGNMENT, ShardableLinear4bit, loading_pieces, make_shardable
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from longctx.train import main
from tests.model.test_peft import Adapt
from tests.reference import dense_loss, train_reference
from tests.small_model import save_small_model
from tests.training.test_evaluation import trained
from tests.training.test_training import COMMON, LEARNING_RATE, SHAPES, STEPS, check, make_documents, write_jsonl
from tests.workers import one_by_one, run_ranks

peft = pytest.importorskip("peft")

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
QUANTIZED = {  # flags, and transformers' own names for them
    "nf4": ([], {"bnb_4bit_quant_type": "nf4"}),
    "fp4, nested": (
        ["--bnb_4bit_quant_type", "fp4", "--use_bnb_nested_quant", "True"],
        {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    ),
}
RING, ULYSSES = ["--sp", "2", "--sp_backend", "ring"], ["--sp", "2", "--sp_backend", "ulysses"]
CASES = {  # of each kind of 4-bit weights: (processes, {layout: flags})
    "nf4": (2, {"ring": RING, "ulysses": ULYSSES}),
    "fp4, nested": (2, {"ulysses, no checkpointing": [*ULYSSES, "--gradient_checkpointing", "False"]}),
    "nf4 on 1 process": (1, {"1 process": []}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose rows are whole blocks of 64 weights, as in published ones."""
    settings = {"hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": False}
    return save_small_model(tmp_path_factory.mktemp("model"), **settings)


class AdaptQuantized(Adapt):
    """The same on 4-bit weights, read by transformers."""

    def __init__(self, folder, quantization):
        super().__init__(**LORA)
        self.folder, self.quantization = folder, quantization

    def __call__(self, model):
        # In training, as from_pretrained does not leave it: out of it, bitsandbytes' kernel for CPUs rounds to bf16.
        return super().__call__(quantized(self.folder, self.quantization)).train()


def quantized(folder, quantization):
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, **quantization)
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, attn_implementation="eager", dtype=torch.float32
    )


@pytest.mark.long
@pytest.mark.parametrize("kind", CASES)
def test_an_adapter_of_4_bit_weights_trains_as_on_one_process(kind, folder, tmp_path, parity_table):
    """Five steps; the adapter that is saved, on the same base, is the one process's. Tolerances as for any adapter."""
    pytest.importorskip("bitsandbytes", reason='the qlora extra: pip install -e ".[qlora]"')
    processes, layouts = CASES[kind]
    given, quantization = QUANTIZED[kind.partition(" on ")[0]]
    documents = make_documents(SHAPES["packed"][0])
    data = write_jsonl(tmp_path / "data.jsonl", documents)
    common = [*COMMON, "--use_peft", "True", "--load_in_4bit", "True", "--lora_r", "4", "--lora_alpha", "8", *given]
    common += ["--lora_target_modules", "all-linear", "--model_name_or_path", folder, "--dataset_name", data]
    cases = {name: [*common, *flags, "--output_dir", str(tmp_path / name)] for name, flags in layouts.items()}
    adapt = AdaptQuantized(folder, quantization)
    reference = train_reference(folder, documents, steps=STEPS, learning_rate=LEARNING_RATE, adapt=adapt)
    whole = train_reference(folder, documents, steps=1, learning_rate=LEARNING_RATE, adapt=Adapt(**LORA))
    results = run_ranks(processes, "tests.model.test_peft:run_cases", cases, timeout=900)[0]
    for case, (start, steps, _, names) in results.items():
        assert all(torch.equal(value, adapt.start[name]) for name, value in start.items())
        assert names == sorted(name for name, p in adapt.model.named_parameters() if p.requires_grad)
        assert abs(steps[0][0] / whole[0][0] - 1) > 1e-5  # the weights are quantised: sums in another order make 1e-7
        check(steps, reference, f"QLoRA {kind}, {case}", "torchrun", parity_table)
        assert not (tmp_path / case / "model.safetensors").exists()
        base = quantized(folder, quantization)
        saved = dense_loss(peft.PeftModel.from_pretrained(base, tmp_path / case), documents).item()
        assert saved == pytest.approx(dense_loss(adapt.model, documents).item(), rel=1e-4)


SPREAD = {
    "ring sp 4": ["--sp", "4", "--sp_backend", "ring"],
    "ring sp 4, no checkpointing": ["--sp", "4", "--sp_backend", "ring", "--gradient_checkpointing", "False"],
    "ulysses sp 4": ["--sp", "4", "--sp_backend", "ulysses"],
    "ulysses sp 2 × dp 2, nested": [*ULYSSES, "--use_bnb_nested_quant", "True"],
    "ring sp 2, HSDP": [*RING, "--dp_replicate", "2"],
    "sp 1 × dp 4": ["--sp", "1"],
}
"""Layouts of four ranks, with nf4 weights."""
SAVING = ["--save_strategy", "steps", "--save_steps", "2"]
EVALUATING = ["--eval_strategy", "steps", "--eval_steps", "5", "--eval_on_start", "True"]
RESUMED = ["ring sp 4", "ulysses sp 2 × dp 2, nested"]
FLAGS = ["--use_peft", "True", "--load_in_4bit", "True", "--lora_r", "4", "--lora_alpha", "8"]
FLAGS += ["--lora_target_modules", "all-linear"]


def run_spread(cases):
    """{case: (log, bytes of 4-bit weights on this rank, forecast of all parameters' bytes)} on this process group."""
    results = {}
    for case, arguments in one_by_one(cases):
        with unsharded_bytes() as unsharded:
            prepared, trainer = trained(arguments)
        parameters = [parameter.to_local() for parameter in trainer.model.parameters()]
        layers = [layer for layer in trainer.model.modules() if isinstance(layer, ShardableLinear4bit)]
        held = {
            "whole": sum(layer.weight.numel() for layer in layers),
            "held": sum(layer.weight.to_local().untyped_storage().nbytes() for layer in layers),
            "unsharded at once": max(unsharded),
            "trained in": {parameter.dtype for parameter in trainer.model.parameters() if parameter.requires_grad},
            "all parameters": sum(tensor.numel() * tensor.element_size() for tensor in parameters),
        }
        results[case] = trainer.state.log_history, held, states(prepared.run.shape)["parameters"]
    return results


@contextmanager
def unsharded_bytes():
    """Yield a list that gets, at every call of a layer of 4-bit weights, the bytes of all that are whole then."""
    layers, found = set(), []

    def look(layer, inputs):
        if isinstance(layer, ShardableLinear4bit):
            layers.add(layer)
            weights = [known.weight for known in layers]
            found.append(sum(w.untyped_storage().nbytes() for w in weights if not isinstance(w, DTensor)))

    hook = register_module_forward_pre_hook(look)
    try:
        yield found
    finally:
        hook.remove()


@pytest.mark.long
def test_spread_4_bit_weights_train_evaluate_and_resume_as_on_one_process(folder, tmp_path, parity_table):
    """Each rank holds its part of the bytes, and at most one layer is whole besides, of two that the model has."""
    pytest.importorskip("bitsandbytes", reason='the qlora extra: pip install -e ".[qlora]"')
    documents, held_out = make_documents(SHAPES["packed"][0]), make_documents([60, 33, 101], seed=1)
    data = tmp_path / "data"
    data.mkdir()
    write_jsonl(data / "train.jsonl", documents)
    write_jsonl(data / "test.jsonl", held_out)
    common = [*COMMON, *FLAGS, *SAVING, *EVALUATING, "--model_name_or_path", folder, "--dataset_name", str(data)]
    cases = {name: [*common, *flags, "--output_dir", str(tmp_path / name)] for name, flags in SPREAD.items()}
    for name in RESUMED:
        again = ["--output_dir", str(tmp_path / "resumed" / name)]
        cases[f"{name}, resumed"] = [*common, *SPREAD[name], *again, "--resume_from_checkpoint"]
        cases[f"{name}, resumed"].append(str(tmp_path / name / "checkpoint-2"))
    nf4 = QUANTIZED["nf4"][1]
    references = {
        nested: quantized_reference(folder, documents, held_out, nf4 | {"bnb_4bit_use_double_quant": nested})
        for nested in (False, True)
    }
    for rank, results in enumerate(run_ranks(4, f"{__name__}:run_spread", cases, timeout=900)):
        for case, (log, held, forecast) in results.items():
            reference, before, after = references["nested" in case]
            steps = [(entry["loss"], entry["grad_norm"]) for entry in log if "loss" in entry]
            if rank == 0 and "resumed" not in case:
                check(steps, reference, f"QLoRA spread, {case}", "torchrun", parity_table)
            losses = [entry["eval_loss"] for entry in log if "eval_loss" in entry]
            assert losses[0] == pytest.approx(before, rel=1e-5)
            assert losses[-1] == pytest.approx(after, rel=1e-4)
            shards = 2 if "HSDP" in case else 4
            assert held["whole"] / shards <= held["held"] <= held["whole"] / shards + 14 * ALIGNMENT, case
            assert held["unsharded at once"] == held["whole"] / 2
            assert held["all parameters"] == pytest.approx(forecast, rel=0.05)
            assert held["trained in"] == {torch.float32}
    for name in RESUMED:
        assert_same_files(tmp_path / name, tmp_path / "resumed" / name)


def assert_same_files(one, other):
    saved, resumed = (load_file(folder / "adapter_model.safetensors") for folder in (one, other))
    assert saved.keys() == resumed.keys()
    assert all(torch.equal(value, resumed[name]) for name, value in saved.items())


def quantized_reference(folder, documents, held_out, quantization):
    """peft's log of training on one process, and the loss of other documents before and after it."""
    adapt = AdaptQuantized(folder, quantization)
    steps = train_reference(folder, documents, steps=STEPS, learning_rate=LEARNING_RATE, adapt=adapt)
    before = dense_loss(quantized(folder, quantization).train(), held_out).item()
    return steps, before, dense_loss(adapt.model, held_out).item()


def test_bytes_of_a_4_bit_weight_and_its_scale(folder, monkeypatch):
    """As the plan counts them; the long tests hold them against the parameters of a run."""
    common = ["--model_name_or_path", folder, "--dataset_name", "stdlib", *FLAGS, "--use_cpu", "True"]
    monkeypatch.setattr("longctx.settings.arrange.QLORA_VERSIONS", {})
    for flags, expected in (([], 0.56), (["--use_bnb_nested_quant", "True"], 0.52)):
        run = resolve(parse_flags([*common, *flags]), read_profile({}), {})
        assert round(run.shape.quantized_weight_bytes, 2) == expected


@pytest.mark.parametrize("has_experts", [False, True])
def test_the_forecast_counts_as_4_bit_what_is_quantised(has_experts, tmp_path):
    """Experts are not: transformers keeps them in tensors of three dimensions."""
    bnb = pytest.importorskip("bitsandbytes", reason='the qlora extra: pip install -e ".[qlora]"')
    shape = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256, "num_hidden_layers": 2, "head_dim": 16}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    config = Qwen3MoeConfig(**shape, **experts) if has_experts else Qwen3Config(**shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    config = load_config(str(tmp_path))
    model = load_model(str(tmp_path), config, quantization=BitsAndBytesConfig(load_in_4bit=True))
    weights = [layer.weight for layer in model.modules() if isinstance(layer, bnb.nn.Linear4bit)]
    assert ModelSizes.of_config(config).linear_parameters == sum(w.quant_state.shape.numel() for w in weights)


@pytest.mark.parametrize("nested", [False, True])
def test_a_shardable_layer_computes_what_bitsandbytes_does(nested, folder):
    """Bit by bit, forward and backward. The pieces that ranks load are those bytes."""
    bnb = pytest.importorskip("bitsandbytes", reason='the qlora extra: pip install -e ".[qlora]"')
    layer = bnb.nn.Linear4bit(192, 40, compute_dtype=torch.float32, compress_statistics=nested, quant_type="nf4")
    model = torch.nn.Sequential(layer.to("cpu"))
    x = torch.randn(5, 192, requires_grad=True)
    expected = model(x)
    (gradient,) = torch.autograd.grad(expected.square().sum(), x)
    make_shardable(model)
    found = model(x)
    assert torch.equal(found, expected)
    assert torch.equal(*torch.autograd.grad(found.square().sum(), x), gradient)
    assert model[0].weight.dtype == torch.uint8
    assert not model.state_dict()

    config = load_config(folder)
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=nested)
    whole = load_model(folder, config, quantization=quantization)
    make_shardable(whole)
    pieces = []
    for index in range(3):
        with loading_pieces(index, 3):
            pieces.append(load_model(folder, config, quantization=quantization))
        make_shardable(pieces[-1])
    for name, layer in whole.named_modules():
        if isinstance(layer, ShardableLinear4bit):
            assert torch.equal(torch.cat([model.get_submodule(name).piece for model in pieces]), layer.weight)
    assert ModelSizes.of_model(pieces[0]) == ModelSizes.of_model(whole)


@pytest.mark.long
def test_an_evaluation_changes_no_weight(folder):
    """Out of training bitsandbytes would pack the weights for a faster kernel that rounds to bf16."""
    pytest.importorskip("bitsandbytes", reason='the qlora extra: pip install -e ".[qlora]"')
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    model = load_model(folder, load_config(folder), quantization=quantization)
    tokens = torch.arange(3, 40)[None]
    before = model.train()(tokens).logits
    with torch.no_grad():
        evaluated = model.eval()(tokens).logits
    assert torch.equal(evaluated, before)
    assert torch.equal(model.train()(tokens).logits, before)


REFUSED = {
    "8 bit": (["--load_in_8bit", "True", "--use_peft"], ("--load_in_8bit True is refused", "--load_in_4bit")),
    "no adapter": ([], ("cannot be trained", "Add --use_peft")),
    "DeepSpeed": (["--use_peft", "--engine", "deepspeed", "--sp", "2"], ("on deepspeed", "--engine fsdp2")),
    "DoRA": (["--use_peft", "--use_dora"], ("--use_dora True with --load_in_4bit",)),
    "tiles": (["--use_peft", "--tiled_mlp", "True"], ("--tiled_mlp True with --load_in_4bit",)),
    "chunks": (["--use_peft", "--sequence_chunk_size", "64"], ("--sequence_chunk_size 64 with --load_in_4bit",)),
    "whole modules": (
        ["--use_peft", "--lora_modules_to_save", "norm"],
        ("--lora_modules_to_save ['norm'] with --load_in_4bit",),
    ),
    "storage": (["--use_peft", "--bnb_4bit_quant_storage", "bfloat16"], ("--bnb_4bit_quant_storage bfloat16",)),
    "offload": (
        ["--use_peft", "--offload_param_device", "cpu", "--sp", "2"],
        ("--offload_param_device cpu", "with --load_in_4bit True is not verified"),
    ),
}


@pytest.fixture
def refusal(refusal, monkeypatch):
    monkeypatch.setattr("longctx.settings.arrange.QLORA_VERSIONS", {})
    return partial(refusal, "--load_in_4bit", "True")


@pytest.mark.parametrize("case", REFUSED)
def test_what_4_bit_weights_are_refused_with(case, folder, refusal):
    given, parts = REFUSED[case]
    error = refusal("--model_name_or_path", folder, *given)
    assert all(part in error for part in parts), error


def test_models_whose_4_bit_weights_are_refused(tmp_path, refusal):
    narrow = save_small_model(tmp_path, hidden_size=48)
    assert "48 inputs, which is not a multiple of 64" in refusal("--model_name_or_path", narrow, "--use_peft")
    assert "built-in tiny" in refusal("--model_name_or_path", "tiny", "--use_peft")
    assert main(["--dataset_name", "stdlib", "--model_name_or_path", narrow, "--load_in_8bit", "True"]) == 2

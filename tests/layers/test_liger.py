"""--use_liger_kernel: Liger's kernels against torch's and transformers' own layers, in Triton's interpreter.

The interpreter (tests/triton_on_cpu) has a GPU's arithmetic and checks every address; what only a GPU and a compiler
do, it does not show. fp32 tolerances are those of tests/model/test_models.py.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from longctx.layers.liger import LIGER_MODELS, describe_liger, fuses_layers, liger_parts
from longctx.model.load import load_config
from longctx.model.tiny import tiny_config
from longctx.run import preparation
from tests.model.test_models import FAMILIES, TOLERANCE
from tests.reference import train_reference
from tests.settings.test_flags import resolved
from tests.training.test_training import COMMON, LEARNING_RATE, check, make_documents, write_jsonl
from tests.workers import run_ranks

CASES = "tests.liger_cases"
KERNELS = {
    "rms_norm": "_rms_norm_forward_kernel",
    "rope": "_triton_rope",
    "swiglu": "_swiglu_forward_kernel",
    "geglu": "_geglu_tanh_forward_kernel",
}
SMALL = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}
COMPARED = {name: model_type for name, (model_type, _) in FAMILIES.items() if model_type in LIGER_MODELS}
DEFAULT = ["gemma3_text, windows", "qwen3"]
"""Each of the kernels, and both kinds of norms."""


def check_families(results, names, backends):
    assert results.keys() == {(name, backend) for name in names for backend in backends}
    wrong = {case: errors for case, (errors, _) in results.items() if not max(errors.values()) <= TOLERANCE}
    assert not wrong
    for (name, _), (_, launched) in results.items():
        parts = LIGER_MODELS[COMPARED[name]]
        assert {part for part, kernel in KERNELS.items() if kernel in launched} == set(parts), name


# ------------------------------------------------------------------------------------------------
# In one process
# ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone():
    """What one process finds, by function."""
    return run_ranks(1, f"{CASES}:alone", backend=None)[0]


def test_no_other_model_is_changed(alone):
    assert alone["side_effects"] == {"gemma": [], "granite": [], "qwen3": []}


@pytest.mark.long
def test_a_model_that_its_owner_gave_to_liger_is_exact():
    """Its forward pass is Liger's with Liger's loss, which neither of our ways to a loss goes through."""
    errors = run_ranks(1, f"{CASES}:applied_by_the_user", backend=None)[0]
    assert errors.keys() == {"token outputs", "logits"}
    assert max(max(found.values()) for found in errors.values()) <= TOLERANCE, errors


def test_kernels_that_are_wrong_on_this_machine_are_refused(alone):
    said = alone["checked"]
    assert said["torch.float32"] == said["torch.bfloat16"] == ""
    assert "Liger's kernel of RMSNorm is off by" in said["unsound"]
    assert "in bf16, and 2e-02 is allowed. Leave it out." in said["unsound"]
    assert (
        "Liger's kernel of GeGLU fails on this machine in bf16: RuntimeError: no kernel image. Leave" in said["failing"]
    )
    assert "does not fit a llama model of transformers" in said["unfitting"]


@pytest.mark.long
@pytest.mark.parametrize("name", COMPARED)
def test_models_equal_stock_transformers(name):
    check_families(run_ranks(1, f"{CASES}:families", [name], ["auto"], backend=None)[0], [name], ["auto"])


MEMORY_OPTIONS = {
    "checkpoints": {"checkpoints": True},
    "attention kept": {"checkpoints": True, "selective_checkpointing": True},
    "tiled MLP": {"tiled_mlp_num_shards": 3},
    "tiled MLP and checkpoints": {"tiled_mlp_num_shards": 3, "checkpoints": True},
    "chunks of the sequence": {"sequence_chunk_size": 7},
}


@pytest.mark.long
@pytest.mark.parametrize("memory_option", MEMORY_OPTIONS)
def test_memory_options(memory_option):
    """Kernels that write a gradient or a rotated query in the place of their input, where inputs are used again."""
    names = [*DEFAULT, "olmo2"]
    check_families(
        run_ranks(1, f"{CASES}:families", names, ["auto"], MEMORY_OPTIONS[memory_option], backend=None)[0],
        names,
        ["auto"],
    )


# ------------------------------------------------------------------------------------------------
# On two ranks
# ------------------------------------------------------------------------------------------------


def case(folder, model, lengths, *flags):
    """Flags of a short run, and its documents."""
    documents = make_documents(lengths)
    data = write_jsonl(folder / "data.jsonl", documents)
    return [
        *COMMON,
        *("--packing", "True", "--dataset_name", data, "--model_name_or_path", model, "--sp", "2"),
        *("--output_dir", str(folder / "out"), "--use_liger_kernel", "True", *flags),
    ], documents


def test_two_ranks_train_as_one_process_without_liger(models, tmp_path, parity_table):
    flags = ("--max_steps", "1", "--max_length", "16", "--sp_backend", "ring")
    arguments, documents = case(tmp_path, models["GQA 4:2"], [9, 1, 5], *flags)
    reference = train_reference(models["GQA 4:2"], documents, steps=1, learning_rate=LEARNING_RATE)
    for trained, launched in run_ranks(2, f"{CASES}:train", {"liger": arguments}):
        check(trained["liger"], reference, "Liger, ring sp 2", "torchrun", parity_table)
        assert {KERNELS["rms_norm"], KERNELS["rope"], KERNELS["swiglu"]} <= launched


@pytest.mark.long
def test_two_ranks_equal_stock_transformers():
    backends = ["ring", "ulysses", "gather"]
    for results in run_ranks(2, f"{CASES}:families", DEFAULT, backends, timeout=600):
        check_families(results, DEFAULT, backends)


TRAINED = {
    "ulysses, ZeRO-3": ("--sp_backend", "ulysses", "--engine", "deepspeed"),
    "gather, FSDP2, checkpoints": ("--sp_backend", "gather", "--gradient_checkpointing", "True"),
    "tiled MLP": ("--sp_backend", "ring", "--tiled_mlp", "True", "--tiled_mlp_num_shards", "3"),
    "offloaded activations": ("--sp_backend", "ring", "--activation_offloading", "True"),
    "chunks": ("--sp_backend", "ulysses", "--memory", "longest"),
    "norms alone": ("--sp_backend", "ring", "--liger_kernel_config", '{"rope": false, "swiglu": false}'),
}


@pytest.mark.long
@pytest.mark.parametrize("name", TRAINED)
def test_training_equals_one_process(name, models, tmp_path, parity_table):
    flags = ("--max_steps", "3", "--max_length", "64", *TRAINED[name])
    arguments, documents = case(tmp_path, models["GQA 4:2"], [20, 9, 1, 30], *flags)
    reference = train_reference(models["GQA 4:2"], documents, steps=3, learning_rate=LEARNING_RATE)
    for trained, launched in run_ranks(2, f"{CASES}:train", {name: arguments}, timeout=600):
        check(trained[name], reference, f"Liger, {name}", "torchrun", parity_table)
        assert (KERNELS["rope"] in launched) == (name != "norms alone")


@pytest.mark.long
@pytest.mark.parametrize(("name", "tolerance"), [("use_peft", 1e-5), ("bf16", 1e-2)])
def test_training_equals_itself_without_liger(name, tolerance, models, tmp_path):
    """In bf16, up to its rounding, which Liger's kernels do at other places: 3e-3 in a loss, 1e-2 in a norm."""
    flags = ("--max_steps", "2", "--max_length", "64", "--sp_backend", "ring", f"--{name}", "True")
    arguments, _ = case(tmp_path, models["GQA 4:2"], [20, 9, 1, 30], *flags)
    cases = {"liger": arguments, "stock": [*arguments, "--use_liger_kernel", "False"]}
    for trained, launched in run_ranks(2, f"{CASES}:train", cases, timeout=600):
        assert KERNELS["rms_norm"] in launched
        for liger, stock in zip(trained["liger"], trained["stock"], strict=True):
            assert liger == pytest.approx(stock, rel=tolerance)
        if name == "bf16":
            assert trained["liger"] != trained["stock"]


# ------------------------------------------------------------------------------------------------
# Flags
# ------------------------------------------------------------------------------------------------


def test_on_a_gpu_the_run_says_what_liger_computes(monkeypatch, tmp_path):
    monkeypatch.setattr("longctx.settings.resolve.device_count", lambda: 2)
    run = resolved("--use_liger_kernel", "True", "--output_dir", str(tmp_path))
    says = "RMSNorm, SwiGLU, rotary embeddings by Liger's Triton kernels; the loss is longctx's own"
    assert any(line.startswith(f"liger     {says}") for line in run.describe())
    assert not run.training_arguments()["use_liger_kernel"]  # else transformers would apply it again, with its loss
    assert run.shape.fused_layers
    run = resolved("--use_liger_kernel", "True", "--liger_kernel_config", '{"swiglu": false}')
    assert run.liger_parts == ("rms_norm", "rope")
    assert not run.shape.fused_layers


ALL_OF_QWEN3 = ("rms_norm", "swiglu", "rope")


def test_liger_is_on_by_default_where_it_is_verified(monkeypatch, tmp_path):
    monkeypatch.setattr("longctx.settings.arrange.LIGER_ELEMENTS", 20 * tiny_config().hidden_size)
    assert resolved("--max_length", "20").liger_parts is None  # on the CPU
    monkeypatch.setattr("longctx.settings.resolve.device_count", lambda: 1)
    assert resolved("--max_length", "20").liger_parts == ALL_OF_QWEN3
    assert resolved("--max_length", "10").liger_parts is None
    assert resolved("--max_length", "10", "--per_device_train_batch_size", "2").liger_parts == ALL_OF_QWEN3
    assert resolved("--liger_kernel_config", '{"swiglu": false}').liger_parts == ("rms_norm", "rope")
    assert resolved("--use_liger_kernel", "False").liger_parts is None
    assert resolved("--torch_compile", "True").liger_parts is None
    LlamaConfig(**SMALL, hidden_act="gelu").save_pretrained(tmp_path)
    gelu = ("--model_name_or_path", str(tmp_path), "--dataset_name", "stdlib")
    run = resolved(*gelu)
    assert run.liger_parts is None
    assert not any("Liger" in note for note in run.notes)
    with pytest.raises(ValueError, match="Liger's SwiGLU kernel computes silu"):  # what is asked for is not left out
        resolved(*gelu, "--liger_kernel_config", '{"rope": false}')


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("shutil.which", "needs a C compiler for Triton, and neither gcc nor clang is found. Install gcc"),
        ("sysconfig.get_path", "Python.h for Triton, which is not there. Install python3"),
    ],
)
def test_without_a_compiler_liger_is_off_unless_it_is_asked_for(missing, message, monkeypatch):
    monkeypatch.setattr("longctx.settings.resolve.device_count", lambda: 1)
    monkeypatch.setattr("longctx.settings.arrange.LIGER_ELEMENTS", 1)
    monkeypatch.setattr(
        f"longctx.layers.liger.{missing}", lambda name: None if missing == "shutil.which" else "nowhere"
    )
    run = resolved()
    assert run.liger_parts is None
    assert [note for note in run.notes if "Liger's kernels are off, and steps take longer" in note and message in note]
    with pytest.raises(ValueError, match=message):
        resolved("--use_liger_kernel", "True")


def test_kernels_that_disagree_are_left_out_unless_they_are_asked_for(monkeypatch):
    monkeypatch.setattr("longctx.settings.resolve.device_count", lambda: 1)
    monkeypatch.setattr("longctx.settings.arrange.LIGER_ELEMENTS", 1)
    args = SimpleNamespace(bf16=True, device=torch.device("cpu"))
    asked_for, default = resolved("--use_liger_kernel", "True"), resolved()

    def check(config, parts, device, dtype):
        assert (parts, device.type, dtype) == (ALL_OF_QWEN3, "cpu", torch.bfloat16)
        if wrong:
            raise ValueError("Liger's kernel of RMSNorm is off by 3e-01")

    monkeypatch.setattr(preparation, "check_liger", check)
    wrong = False
    assert preparation._with_exact_liger(default, args) is default
    wrong = True
    run = preparation._with_exact_liger(default, args)
    assert (run.liger_parts, run.shape.fused_layers) == (None, False)
    assert "Liger's kernels are off, and steps take longer: Liger's kernel of RMSNorm is off by 3e-01" in run.notes
    with pytest.raises(ValueError, match="RMSNorm is off"):
        preparation._with_exact_liger(asked_for, args)


def test_the_cpu_is_refused(refusal):
    error = refusal("--model_name_or_path", "tiny", "--use_liger_kernel", "True")
    assert "--use_liger_kernel True on the CPU: Liger's Triton kernels need a GPU. Leave it out" in error


def test_a_missing_liger_is_refused(refusal, monkeypatch):
    monkeypatch.setattr("longctx.settings.arrange.LIGER_VERSIONS", {"liger-kernel-of-tomorrow": "9.0"})
    error = refusal("--model_name_or_path", "tiny", "--use_liger_kernel", "True")
    assert (
        "liger-kernel-of-tomorrow is not installed and --use_liger_kernel needs 9.0 or later. Run pip install" in error
    )


def _config(tmp_path, **settings):
    (tmp_path / "config.json").write_text(json.dumps(settings))
    return load_config(str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "asked", "message"),
    [
        ({"model_type": "cohere"}, None, "not verified with the layers of a cohere model. Leave it out, or use"),
        ({"model_type": "qwen3_5_moe_text"}, None, "not verified with the layers of a qwen3_5_moe_text model"),
        ({"model_type": "gemma3_text", "hidden_activation": "gelu"}, None, "is gelu, and Liger's GeGLU kernel"),
        ({"model_type": "llama", "hidden_act": "gelu"}, None, "is gelu, and Liger's SwiGLU kernel computes silu"),
        ({"model_type": "llama"}, '{"fused_linear_cross_entropy": true}', "exact mean over all ranks. Leave it"),
        ({"model_type": "llama"}, {"cross_entropy": True}, "--liger_kernel_config sets cross_entropy: Liger's"),
        ({"model_type": "mixtral"}, {"swiglu": True}, "of a mixtral model Liger computes rms_norm, rope here"),
        ({"model_type": "llama"}, {"layer_norm": True}, "--liger_kernel_config sets layer_norm, and of a llama"),
        ({"model_type": "llama"}, '{"rope": ', "is not a JSON object: Expecting value"),
        ({"model_type": "llama"}, '{"rope": 1}', "is not a JSON object of true and false. Example: "),
    ],
)
def test_what_liger_would_compute_otherwise_is_refused(settings, asked, message, tmp_path):
    with pytest.raises(ValueError, match=r"^--(use_liger_kernel|liger_kernel_config) ") as refused:
        liger_parts(_config(tmp_path, **settings), asked)
    assert message in str(refused.value)


def test_parts_that_are_switched_off(tmp_path):
    config = _config(tmp_path, model_type="llama", hidden_act="gelu")
    assert liger_parts(config, {"swiglu": False, "fused_linear_cross_entropy": False}) == ("rms_norm", "rope")
    assert describe_liger(()).startswith("nothing by Liger's")
    assert not fuses_layers(None)

"""Training with memory options, alone and together, is exact.

The runs are packed and use real gloo processes. They are compared with one process and dense attention.
tests/training/test_training.py explains the tolerances.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.reference import train_reference
from tests.small_model import save_small_model
from tests.training.test_training import COMMON, LEARNING_RATE, SHAPES, STEPS, check, make_documents, write_jsonl
from tests.workers import run_ranks


def offload(*kinds, device="cpu"):
    return [flag for kind in kinds for flag in (f"--offload_{kind}_device", device)]


ULYSSES = ["--sp", "2", "--sp_backend", "ulysses"]
LONGEST = ["--memory", "longest"]
TILED = ["--tiled_mlp", "True", "--tiled_mlp_num_shards", "3"]
EITHER = {
    "offloaded": ["--activation_offloading", "True"],
    "offloaded whole": ["--activation_offloading", "True", "--activation_checkpointing", "False"],
    "kept and offloaded": ["--activation_checkpointing_kwargs", '{"selective": true, "offload": true}'],
    "by layer": ["--activation_checkpointing_kwargs", '{"whole_layers": 1, "selective": 1, "offload": 1}'],
    "every 2 layers": ["--activation_checkpointing_kwargs", '{"every_n_layers": 2}'],
    "tiled MLP": TILED,
    "one head": ["--heads_k_stride", "1"],
    "fastest": ["--memory", "fastest"],
}
ON = {
    "ring on FSDP2": {
        "flags": ["--sp_backend", "ring", "--engine", "fsdp2"],
        "cases": EITHER | {"parameters offloaded": offload("param"), "longest, whole layers": [*LONGEST, *TILED]},
    },
    "ulysses on ZeRO-3": {
        "flags": ["--sp_backend", "ulysses", "--engine", "deepspeed"],
        "cases": EITHER
        | {
            "optimizer offloaded": offload("optimizer"),
            "parameters offloaded": offload("param"),
            "both offloaded": offload("optimizer", "param"),
            "sequence chunks": ["--sequence_chunk_size", "50"],
            "exchange beside attention": ["--overlap_exchange", "True"],
            "longest, whole layers": [*LONGEST, *TILED, *offload("param")],
        },
    },
}


@pytest.mark.long
@pytest.mark.parametrize("only", [True, False], ids=["longest", "alone"])
def test_memory_options_train_as_one_process(only, models, tmp_path, parity_table):
    """--memory longest is all of them at once. One process group: accelerate goes from FSDP2 to DeepSpeed, not back."""
    documents = make_documents(SHAPES["packed"][0])
    data = write_jsonl(tmp_path / "data.jsonl", documents)
    common = [*COMMON, "--packing", "True", "--dataset_name", data, "--model_name_or_path", models["GQA 4:2"]]
    common += ["--sp", "2", "--output_dir"]
    cases = {
        f"{name}, {engine}": [*common, str(tmp_path / f"{name} {engine}"), *of_engine["flags"], *flags]
        for engine, of_engine in ON.items()
        for name, flags in ({"longest": LONGEST} if only else of_engine["cases"]).items()
    }
    reference = train_reference(models["GQA 4:2"], documents, steps=STEPS, learning_rate=LEARNING_RATE)
    for name, results in run_ranks(2, "tests.training.test_training:run_cases", cases, timeout=600)[0].items():
        check(results, reference, name, "torchrun", parity_table)


@pytest.mark.long
@pytest.mark.parametrize("stage", ["1", "2"])
def test_optimizer_offload_on_lower_stages(stage, models, tmp_path, parity_table, monkeypatch):
    documents = make_documents(SHAPES["packed"][0])
    data = write_jsonl(tmp_path / "data.jsonl", documents)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", stage)
    case = [*COMMON, "--packing", "True", "--dataset_name", data, "--model_name_or_path", models["GQA 4:2"], *ULYSSES]
    case += ["--output_dir", str(tmp_path / "out"), *offload("optimizer")]
    reference = train_reference(models["GQA 4:2"], documents, steps=STEPS, learning_rate=LEARNING_RATE)
    name = f"optimizer offloaded, ZeRO-{stage}"
    check(
        run_ranks(2, "tests.training.test_training:run_cases", {name: case})[0][name],
        reference,
        name,
        "torchrun",
        parity_table,
    )


@pytest.mark.long
def test_one_process_with_deepspeed(models, tmp_path, parity_table):
    """What one GPU needs to have optimizer states in host memory, started without a launcher."""
    documents = make_documents(SHAPES["packed"][0])
    data = write_jsonl(tmp_path / "data.jsonl", documents)
    case = [*COMMON, "--packing", "True", "--dataset_name", data, "--model_name_or_path", models["GQA 4:2"], *LONGEST]
    case += ["--output_dir", str(tmp_path / "out"), "--engine", "deepspeed", "--use_cpu", "True"]
    done = subprocess.run([sys.executable, "-m", "longctx.train", *case], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "optimizer states on the host" in done.stdout
    log = json.loads((tmp_path / "out/trainer_state.json").read_text())["log_history"]
    results = [(entry["loss"], entry["grad_norm"]) for entry in log if "loss" in entry]
    reference = train_reference(models["GQA 4:2"], documents, steps=STEPS, learning_rate=LEARNING_RATE)
    check(results, reference, "longest, ZeRO-3 on one process", "python -m", parity_table)


@pytest.mark.long
@pytest.mark.parametrize("engine", ON)
def test_reduction_in_bf16(engine, models, tmp_path):
    """Another rounding of gradients, to 3 digits: it acts on FSDP2, and is as near to fp32 as bf16 is.

    ZeRO-3's gradients are bf16 before and after, so that two ranks' sum is rounded once, whatever it is made in.
    """
    documents = make_documents(SHAPES["packed"][0])
    data = write_jsonl(tmp_path / "data.jsonl", documents)
    common = [*COMMON, "--packing", "True", "--dataset_name", data, "--model_name_or_path", models["GQA 4:2"]]
    common += ["--sp", "2", *ON[engine]["flags"], "--bf16", "True", "--output_dir"]
    cases = {dtype: [*common, str(tmp_path / dtype), "--communication_data_type", dtype] for dtype in ("fp32", "bf16")}
    results = run_ranks(2, "tests.training.test_training:run_cases", cases)[0]
    losses, norms = train_reference(models["GQA 4:2"], documents, steps=STEPS, learning_rate=LEARNING_RATE)
    assert (results["fp32"] == results["bf16"]) == (engine == "ulysses on ZeRO-3")
    assert results["fp32"][0][0] == results["bf16"][0][0]  # before the first reduction
    for values in results.values():
        # 2^-8 is bf16's step; the norm is a sum over many, and three steps of AdamW enlarge it.
        assert max(abs(norm / expected - 1) for (_, norm), expected in zip(values[:1], norms, strict=False)) <= 1e-2
        assert max(abs(loss / expected - 1) for (loss, _), expected in zip(values, losses, strict=True)) <= 2e-2


@pytest.mark.long
def test_nvme(tmp_path, parity_table):
    """Optimizer states and parameters of ZeRO-3 in a folder, through DeepSpeed's async_io; the files are there.

    A model whose MLP is large enough: what is below 1 MB stays in memory.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("DeepSpeed's async_io cannot be built here: it needs libaio's headers (apt install libaio-dev)")
    documents = make_documents(SHAPES["packed"][0])
    data = write_jsonl(tmp_path / "data.jsonl", documents)
    model = save_small_model(tmp_path / "model", hidden_size=512, intermediate_size=1024)
    common = [*COMMON, "--packing", "True", "--dataset_name", data, "--model_name_or_path", model, *ULYSSES]
    cases = {}
    for kinds in (("optimizer",), ("optimizer", "param")):
        name = f"{' and '.join(kinds)} in a folder, ZeRO-3"
        paths = [flag for kind in kinds for flag in (f"--offload_{kind}_nvme_path", str(tmp_path / "nvme"))]
        cases[name] = [*common, *offload(*kinds, device="nvme"), *paths, "--output_dir", str(tmp_path / name)]
    reference = train_reference(model, documents, steps=STEPS, learning_rate=LEARNING_RATE)
    for name, results in run_ranks(2, "tests.training.test_training:run_cases", cases, timeout=1200)[0].items():
        check(results, reference, name, "torchrun", parity_table)
    assert sum(path.stat().st_size for path in (tmp_path / "nvme").rglob("*.swp")) > 0

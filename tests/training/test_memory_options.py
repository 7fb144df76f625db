"""Training with memory options, alone and together, is exact.

The runs are packed and use real gloo processes. They are compared with one process and dense attention.
tests/training/test_training.py explains the tolerances.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from deepspeed.ops.op_builder import AsyncIOBuilder

from tests.few import together
from tests.reference import train_reference
from tests.small_model import save_small_model
from tests.training.test_training import check, one_process, packed_run, read_log, relative, steps_of
from tests.workers import run_ranks


@pytest.fixture(scope="module")
def packed(models, tmp_path_factory):
    """Flags of a run of packed documents, up to the name of its folder, and what one process gives."""
    documents, flags = packed_run(models["GQA 4:2"], tmp_path_factory.mktemp("data"))
    return flags, one_process(models["GQA 4:2"], documents), documents


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
def test_memory_options_train_as_one_process(only, packed, tmp_path, parity_table):
    """--memory longest is all of them at once. One process group: accelerate goes from FSDP2 to DeepSpeed, not back."""
    common, reference, _ = packed
    cases = {
        f"{name}, {engine}": [*common, str(tmp_path / f"{name} {engine}"), "--sp", "2", *of_engine["flags"], *flags]
        for engine, of_engine in ON.items()
        for name, flags in ({"longest": LONGEST} if only else of_engine["cases"]).items()
    }
    for name, results in run_ranks(2, "tests.training.test_training:run_cases", cases, timeout=600)[0].items():
        check(results, reference, name, "torchrun", parity_table)


@pytest.mark.long
def test_optimizer_offload_on_lower_stages(packed, tmp_path, parity_table):
    common, reference, _ = packed
    cases = {
        f"optimizer offloaded, ZeRO-{stage}": ([*common, f"{tmp_path}/{stage}", *ULYSSES, *offload("optimizer")], stage)
        for stage in (1, 2)
    }
    for name, log in run_ranks(2, "tests.training.test_training:logs_on_engines", cases)[0].items():
        check(steps_of(log), reference, name, "torchrun", parity_table)


@pytest.mark.long
def test_one_process_with_deepspeed(packed, tmp_path, parity_table):
    """What one GPU needs to have optimizer states in host memory, started without a launcher."""
    common, reference, _ = packed
    case = [*common, str(tmp_path / "out"), *LONGEST, "--engine", "deepspeed", "--use_cpu", "True"]
    done = subprocess.run([sys.executable, "-m", "longctx.train", *case], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "optimizer states on the host" in done.stdout
    log = read_log(tmp_path / "out")
    check(steps_of(log), reference, "longest, ZeRO-3 on one process", "python -m", parity_table)


@pytest.mark.long
@pytest.mark.parametrize("engine", ON)
def test_reduction_in_bf16(engine, packed, tmp_path):
    """Another rounding of gradients, to 3 digits: it acts on FSDP2, and is as near to fp32 as bf16 is.

    ZeRO-3's gradients are bf16 before and after, so that two ranks' sum is rounded once, whatever it is made in.
    """
    common, (losses, norms), _ = packed
    flags = ["--sp", "2", *ON[engine]["flags"], "--bf16", "True", "--communication_data_type"]
    cases = {dtype: [*common, str(tmp_path / dtype), *flags, dtype] for dtype in ("fp32", "bf16")}
    results = run_ranks(2, "tests.training.test_training:run_cases", cases)[0]
    assert (results["fp32"] == results["bf16"]) == (engine == "ulysses on ZeRO-3")
    assert results["fp32"][0][0] == results["bf16"][0][0]  # before the first reduction
    for values in results.values():
        # 2^-8 is bf16's step; the norm is a sum over many, and three steps of AdamW enlarge it.
        assert relative([values[0][1]], norms[:1]) <= 1e-2
        assert relative([loss for loss, _ in values], losses) <= 2e-2


STAGES = {"ZeRO-3": 3, "ZeRO-3, states on the CPU": 3, "ZeRO-2": 2, "ZeRO-1": 1, "FSDP2": None}


@pytest.mark.parametrize("layouts", together(STAGES, ("ZeRO-3", "FSDP2")))
def test_small_updates_count_in_bf16(layouts, packed, models, tmp_path):
    """Updates of weights stored in fp32 have the effect on the loss that they have in fp32.

    A step changes each weight by about 2e-5, and bf16 values near the models' weights, 0.02, are 1.2e-4 apart.
    """
    common, _, documents = packed
    given = ["--max_steps", "3", "--learning_rate", "2e-5", "--bf16", "True", "--sp", "2", "--engine"]
    runs = {}
    for name in layouts:
        flags = ["deepspeed" if STAGES[name] else "fsdp2", *(offload("optimizer", "param") * ("states" in name))]
        runs[name] = [*common, str(tmp_path / name), *given, *flags], STAGES[name]
    (before, *_, after), _ = train_reference(models["GQA 4:2"], documents, steps=3, learning_rate=2e-5)
    assert before - after > 0.002, "the updates would not be seen"
    for name, log in run_ranks(2, "tests.training.test_training:logs_on_engines", runs)[0].items():
        losses = [loss for loss, _ in steps_of(log)]
        effect = (losses[0] - losses[-1]) / (before - after)
        assert effect == pytest.approx(1, abs=0.1), name  # 0.99 in all; 0.75 with weights that were rounded first


@pytest.mark.long
def test_nvme(packed, tmp_path, parity_table):
    """Optimizer states and parameters of ZeRO-3 in a folder, through DeepSpeed's async_io; the files are there.

    A model whose MLP is large enough: what is below 1 MB stays in memory.
    """
    if not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("DeepSpeed's async_io cannot be built here: it needs libaio's headers (apt install libaio-dev)")
    common, _, documents = packed
    model = save_small_model(tmp_path / "model", hidden_size=512, intermediate_size=1024)
    cases = {}
    for kinds in (("optimizer",), ("optimizer", "param")):
        name = f"{' and '.join(kinds)} in a folder, ZeRO-3"
        paths = [flag for kind in kinds for flag in (f"--offload_{kind}_nvme_path", str(tmp_path / "nvme"))]
        cases[name] = [*common, str(tmp_path / name), *ULYSSES, *offload(*kinds, device="nvme"), *paths]
        cases[name] += ["--model_name_or_path", model]
    reference = one_process(model, documents)
    for name, results in run_ranks(2, "tests.training.test_training:run_cases", cases, timeout=1200)[0].items():
        check(results, reference, name, "torchrun", parity_table)
    assert sum(path.stat().st_size for path in (tmp_path / "nvme").rglob("*.swp")) > 0

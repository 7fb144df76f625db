"""Metrics against numbers that were worked out by hand; the working is beside each.

The model is that of tests/forecast/test_by_hand.py, with 2,088 parameters.
"""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import CONFIG_MAPPING, LlamaConfig

import longctx.training.metrics
import longctx.training.peak_memory
from longctx.machine.speeds import PEAK_FLOPS
from longctx.ring.planner import plan_ring
from longctx.training.metrics import StepMetrics, _peak_flops
from longctx.training.peak_memory import GIB, PeakMemory
from tests.forecast.test_by_hand import CONFIG
from tests.model.test_models import FAMILIES
from tests.reference import layout_of
from tests.training.test_epochs import built_trainer
from tests.training.test_resume import run_all
from tests.training.test_training import COMMON, make_documents, write_jsonl
from tests.workers import run_ranks

SECONDS = 4.0
DOCUMENTS, PADDING = (6, 6), 4
"""The lengths in tokens of the documents and the padding in a row of 16 tokens."""


def a_meter(sp: int = 1, rank: int = 0) -> StepMetrics:
    config, device = LlamaConfig(**CONFIG), torch.device("cpu")
    return StepMetrics(sp=sp, sp_rank=rank, config=config, flops_per_token=6 * 2088, device=device)


def read_metrics() -> dict:
    """Return what one of two ranks logs after SECONDS, and again 1 second later, for two micro-batches of one row."""
    rank, now = dist.get_rank(), [100.0]
    longctx.training.metrics.time = SimpleNamespace(perf_counter=lambda: now[0])
    peak = ((3 + 3 * rank) * GIB, 7 * GIB, (10 - rank) * GIB, 0, 80 * GIB, 200 * GIB)
    longctx.training.peak_memory.PeakMemory.here = classmethod(lambda cls, device: peak)
    metrics = a_meter(sp=2, rank=rank)
    metrics.peak_flops = 1e6
    cu_seqlens = np.cumsum([0, *DOCUMENTS, PADDING])
    plan = plan_ring(cu_seqlens, 2)
    layout = layout_of(cu_seqlens, ring=2, plan=plan, lengths=DOCUMENTS)
    labels = torch.tensor([[1, 2, 3, -100, 5, 6, -100, -100]]) if rank == 0 else torch.tensor([[7] * 5 + [-100] * 3])
    is_label = (labels != -100).double()
    shard = SimpleNamespace(layout=layout, learnt=is_label.nonzero())
    for _ in range(2):
        metrics.add(shard=shard, correct=is_label * (rank == 0), entropy=is_label * 0.5)
    now[0] += SECONDS
    before = metrics.tokens_so_far()
    first = metrics.read()
    now[0] += 1
    metrics.add(shard=shard, correct=0 * is_label, entropy=0 * is_label)
    return {"so far": before, "first": first, "second": metrics.read(), "ranks": plan.rank_of_token.tolist()}


def test_what_is_logged_of_two_ranks() -> None:
    """24 tokens of 32 are no padding, 20 of them labels, in 4 seconds on 2 devices of 1 MFLOP a second."""
    results = run_ranks(2, f"{__name__}:read_metrics")
    assert results[0]["first"] == results[1]["first"]
    logged = results[0]["first"]
    assert results[0]["so far"] == logged["num_tokens"] == 2 * 12
    assert logged["tokens_per_second"] == pytest.approx(24 / 4)
    assert logged["tokens_per_second_per_device"] == pytest.approx(24 / 4 / 2)
    assert logged["padding_fraction"] == pytest.approx(8 / 32)
    # 5 labels on rank 0, all right, and 5 on rank 1, all wrong, twice; each with an entropy of a half.
    assert logged["mean_token_accuracy"] == pytest.approx(10 / 20)
    assert logged["entropy"] == pytest.approx(0.5)
    # A document of n tokens has n (n + 1) / 2 pairs, 21 + 21 + 10. A pair costs 12 · D FLOPs a head and layer: two
    # products of D multiplications and additions, forward once and backward twice. A token costs 6 a parameter.
    pairs = 2 * (21 + 21 + 10)
    flops = 6 * 2088 * 24 + 12 * 4 * 4 * 2 * pairs
    assert logged["mfu"] == pytest.approx(flops / 4 / 2 / 1e6)
    # Every token attends to those before it in its document, and to itself.
    work = np.zeros(2)
    np.add.at(work, results[0]["ranks"], np.concatenate([np.arange(n) + 1 for n in (*DOCUMENTS, PADDING)]))
    assert work.sum() == 52
    assert logged["attention_imbalance"] == pytest.approx(work.max() / 26)
    assert (logged["peak_memory_gib_max"], logged["peak_memory_gib_min"]) == (6, 3)
    assert (logged["peak_host_memory_gib_max"], logged["peak_host_memory_gib_min"]) == (10, 9)
    second = results[0]["second"]
    assert (second["num_tokens"], second["tokens_per_second"]) == (36, pytest.approx(12))
    assert (second["mean_token_accuracy"], second["entropy"]) == (0, 0)


def test_ulysses_ranks_share_pairs_equally() -> None:
    """In a hybrid, the two Ulysses ranks of a ring rank share the pairs of that rank."""
    cu_seqlens = np.array([0, 6, 12, 16])
    without_ring = layout_of(cu_seqlens, ulysses=4)
    assert [without_ring.work(rank) for rank in range(4)] == [52 / 4] * 4
    plan = plan_ring(cu_seqlens, 2)
    hybrid = layout_of(cu_seqlens, ring=2, ulysses=2, plan=plan)
    work = [hybrid.work(rank) for rank in range(4)]
    assert work[0] == work[1]
    assert work[2] == work[3]
    assert [2 * work[0], 2 * work[2]] == plan.area_per_rank.tolist()
    assert sum(work) == 52


def test_peaks_are_those_of_the_data_sheets() -> None:
    """Dense bf16: half of what NVIDIA gives with sparsity (A100 624, H100 and H200 SXM 1,979, B200 4,500 and L40S
    724 TFLOPS), and of GeForce cards the rate with sums in fp32.
    """
    expected = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "L40S": 362e12}
    expected |= {"RTX 3090": 71e12, "RTX 4090": 165.2e12}
    assert expected == PEAK_FLOPS
    config = LlamaConfig(**CONFIG)
    assert _peak_flops("NVIDIA H100 80GB HBM3", config) == 989e12
    assert _peak_flops("NVIDIA A100-SXM4-80GB", config) == 312e12
    assert _peak_flops("NVIDIA L4", config) is None
    assert _peak_flops("CPU", config) is None
    for family in ("mixtral", "mistral, window", "qwen3_5_text"):  # which do not use all parameters or keys for a token
        model_type, settings = FAMILIES[family]
        assert _peak_flops("NVIDIA H100 80GB HBM3", CONFIG_MAPPING[model_type](**settings)) is None, family


@pytest.mark.parametrize("adapter", [False, True])
def test_a_token_costs_six_flops_a_parameter_and_four_where_it_is_frozen(adapter, tmp_path, clean_state) -> None:
    """Forward 2, the gradient of what went in 2, and 2 more for the gradient of a weight that is trained."""
    (tmp_path / "data.jsonl").write_text('{"text": "abc"}\n')
    flags = ["--model_name_or_path", "tiny", "--dataset_name", str(tmp_path / "data.jsonl"), "--max_length", "64"]
    flags += ["--output_dir", str(tmp_path / "out"), "--use_cpu", "True", "--report_to", "none"]
    trainer = built_trainer([*flags, *(["--use_peft", "True", "--lora_r", "2"] if adapter else [])])[1]
    frozen, learnt = (
        sum(p.numel() for p in trainer.model.parameters() if p.requires_grad == is_learnt)
        for is_learnt in (False, True)
    )
    assert learnt > 0
    assert (frozen > 0) == adapter
    assert trainer.step_metrics.flops_per_token == 6 * learnt + 4 * frozen


@pytest.mark.long
def test_an_entry_of_two_steps_has_their_loss_and_the_norm_and_rate_of_the_last(models, tmp_path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", make_documents([90, 41, 130]))
    flags = [*COMMON, "--model_name_or_path", models["GQA 4:2"], "--dataset_name", data, "--use_cpu", "True"]
    flags += ["--max_steps", "2", "--max_length", "140", "--logging_steps"]
    logs = run_all({steps: [*flags, steps, "--output_dir", str(tmp_path / steps)] for steps in "12"})
    of_each, [both] = ([entry for entry in log if "loss" in entry] for log in logs.values())
    assert both["loss"] == pytest.approx(np.mean([entry["loss"] for entry in of_each]))
    for name in ("grad_norm", "learning_rate", "num_tokens", "step"):
        assert (both[name] == of_each[1][name]) != (both[name] == of_each[0][name]), name


def test_peak_memory_of_four_ranks_on_two_nodes() -> None:
    peak = PeakMemory.of_ranks([(n * GIB, 2 * n * GIB, (5 - n) * GIB, 0, 80 * GIB, 100 * GIB) for n in (1, 2, 4, 3)])
    names = ("gib_max", "gib_min", "gib_mean", "rank_of_max", "gib_by_rank")
    assert peak.to_dict() == {
        "allocated": dict(zip(names, (4, 1, 2.5, 2, [1, 2, 4, 3]), strict=True)),
        "reserved": dict(zip(names, (8, 2, 5, 2, [2, 4, 8, 6]), strict=True)),
        "host": dict(zip(names, (4, 1, 2.5, 0, [4, 3, 1, 2]), strict=True)),
        "allocation_retries": {"max": 0, "min": 0, "mean": 0, "rank_of_max": 0, "by_rank": [0, 0, 0, 0]},
    }
    assert peak.of_fullest_node(2) == (4 + 3) * GIB
    assert peak.of_fullest_node(4) == (4 + 3 + 1 + 2) * GIB


@pytest.mark.parametrize("num_ranks", [64, 65])
def test_a_log_entry_does_not_grow_with_the_ranks(num_ranks):
    """It lists the numbers of each rank on up to 64 ranks, which torch's `fake` backend stands for."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        metrics = a_meter()
        entry = metrics.read() | metrics.details
    finally:
        dist.destroy_process_group()
    listed = num_ranks <= 64
    assert ("gib_by_rank" in entry["memory"]["host"]) == listed
    for of in (entry["memory"]["allocation_retries"], *entry["seconds"].values()):
        assert {"max", "min", "mean", "rank_of_max"} <= set(of)
        assert len(of.get("by_rank", ())) == num_ranks * listed
    assert (len(json.dumps(entry)) < 1500) != listed


def test_seconds_pass_in_a_pause_of_the_metrics_and_do_not_count() -> None:
    metrics = a_meter()
    with metrics.paused():
        time.sleep(0.05)
    assert time.perf_counter() - metrics._started < 0.05

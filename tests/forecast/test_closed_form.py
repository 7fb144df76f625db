"""The closed form of a step's memory: against published lengths, against traces of our own step, and in itself."""

from __future__ import annotations

import copy
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    CohereConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    Olmo2Config,
    PretrainedConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from benchmarks import closed_form as published
from benchmarks.memory.step import StepSettings, trace_training_step
from benchmarks.published import CONFIGS, HELD_BACK, PUBLISHED
from benchmarks.shapes import shape_of, traced_settings, traced_shape
from longctx.forecast import memory
from longctx.forecast.cost import cost, reach
from longctx.forecast.documents import one_pair
from longctx.forecast.memory import GB
from longctx.forecast.model_sizes import ModelSizes
from longctx.machine.here import Machine
from tests.few import few

ROOT = Path(__file__).parents[2]
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 200}


@pytest.fixture(scope="module")
def llama() -> ModelSizes:
    return ModelSizes.of_config(CONFIGS["meta-llama/Llama-3.1-8B"])


def test_published_lengths_are_met() -> None:
    """Within 20%, but for rows whose reason is stated; the median within 10%, fitted on or not."""
    errors = {}
    for path in (PUBLISHED, HELD_BACK):
        found = {row: abs(row.error()[2]) for row in published.compared(path)}
        assert statistics.median(found.values()) <= 0.10, path
        errors |= found
    assert len(errors) >= 39
    assert max(error for row, error in errors.items() if row.miss() is None) <= 0.20, "say in MISSES why"
    assert all(error > 0.20 for row, error in errors.items() if row.miss()), "MISSES names a row that is met"
    assert sum(row.miss() is not None for row in errors) <= 5
    assert not any(row.miss() for row in published.rows(PUBLISHED))


def test_committed_table_is_what_the_command_prints() -> None:
    [committed] = (ROOT / "benchmarks" / "results").glob("closed_form_*.md")
    text = committed.read_text()
    for part in (published.table(), published.table(HELD_BACK), published.constants()):
        assert part in text


@pytest.mark.long
def test_constants_are_near_the_best_fit() -> None:
    *best, in_use = published.fit().splitlines()
    assert float(in_use.split()[0]) <= 2 * float(best[0].split()[0])


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL),
        Qwen3Config(**SMALL, tie_word_embeddings=True),
        GemmaConfig(**SMALL),
        Qwen3MoeConfig(**SMALL, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2),
    ],
    ids=lambda config: config.model_type,
)
def test_parameters_are_counted_exactly(config: PretrainedConfig) -> None:
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    sizes = ModelSizes.of_config(config)
    assert sizes == ModelSizes.of_model(model)
    assert sizes.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert sizes.layer_parameters == sum(parameter.numel() for parameter in model.model.layers[0].parameters())


@pytest.mark.parametrize("rank", [16, None])
def test_projections_of_latent_attention_are_counted_exactly(rank: int | None) -> None:
    config = DeepseekV3Config(
        **SMALL,
        moe_intermediate_size=8,
        q_lora_rank=rank,
        kv_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=10,
    )
    layer = MODEL_FOR_CAUSAL_LM_MAPPING[DeepseekV3Config](config).model.layers[0]
    matrices = [weight.numel() for weight in layer.self_attn.parameters() if weight.dim() == 2]
    assert ModelSizes.of_config(config).projection_parameters == sum(matrices)


@pytest.mark.parametrize(
    ("config", "hidden", "heads"),
    [
        (LlamaConfig(**SMALL), 2 * 64, 0),
        (CohereConfig(**SMALL), 64, 0),
        (Gemma2Config(**SMALL), 4 * 64, 0),
        (Gemma3TextConfig(**SMALL), 4 * 64, (4 + 2) * 16),
        (Olmo2Config(**{**SMALL, "num_key_value_heads": 4}), 2 * 64, 2 * 64),  # one norm for all heads
        (Qwen3_5TextConfig(**SMALL | {"num_hidden_layers": 4}), 2 * 64, (4 + 2) * 16),  # of the layer with attention
        (DeepseekV3Config(**SMALL, q_lora_rank=10, kv_lora_rank=12, qk_rope_head_dim=4), 2 * 64, 10 + 12),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_norms_are_counted(config: PretrainedConfig, hidden: int, heads: int) -> None:
    sizes = ModelSizes.of_config(config)
    assert (sizes.norm_width, sizes.head_norm_width) == (hidden, heads)


EIGHT = Machine.of("H100", 8, host_bytes=2000 * GB)


def test_reach_is_the_last_length_that_fits(llama: ModelSizes) -> None:
    shape = shape_of(llama, world_size=8, sp=8, engine="fsdp2", activation_offloading=True)
    small_host = replace(EIGHT, host_bytes=100 * GB)
    on_device, on_host = reach(shape, EIGHT), reach(shape, small_host)
    assert (on_device.binds, on_host.binds) == ("device", "host")
    assert 0.99 * 85 * GB < cost(shape, EIGHT, on_device.length).device_bytes <= 85 * GB
    assert 0.99 * 100 * GB < cost(shape, small_host, on_host.length).host_bytes <= 100 * GB
    beside = reach(shape, EIGHT, beside_device=10 * GB)
    assert cost(shape, EIGHT, beside.length).device_bytes == pytest.approx(75 * GB, rel=0.01)
    assert reach(shape, replace(EIGHT, device_bytes=1 * GB)).length == 0


def test_chunked_step_is_bound_by_the_host(llama: ModelSizes) -> None:
    shape = shape_of(llama, world_size=8, sp=8, engine="zero3", sequence_chunk_size=8192)
    near, far = cost(shape, EIGHT, 2**20), cost(shape, EIGHT, 2**24)
    of_keys = 2 * 4 * 128 * 2**24  # fp32 gradients of a rank's one key/value head, for all tokens
    assert far.device_bytes < near.device_bytes + 1.1 * of_keys
    waiting = [sum(memory.offloaded(shape, length).values()) for length in (2**20, 2**24)]
    assert waiting[1] == pytest.approx(16 * waiting[0])
    assert reach(shape, replace(EIGHT, host_bytes=1900 * GB)).binds == "host"


def test_a_layer_of_a_chunked_step_waits_on_the_host(llama: ModelSizes) -> None:
    """By hand, in bf16 with q = h = 4096, k and v of 1024 each and 32 heads: q, k and v, 2 · 6144; attention's output
    and its gradient, 2 · 2 · 4096; an fp32 log-sum-exp a head; and the gradients of the layer's output and input, which
    are fp32 without an engine, 2 · 4 · 4096."""
    waits = cost(shape_of(llama, sequence_chunk_size=8192), EIGHT, 2**20).host["sequence chunks"] / 2**20
    assert waits == 2 * 6144 + 4 * 4096 + 4 * 32 + 8 * 4096


def test_all_memory_of_a_cpu_is_the_hosts(llama: ModelSizes) -> None:
    shape = shape_of(llama, world_size=8, sp=8, engine="zero3", activation_offloading=True)
    of_gpu, of_cpu = (cost(shape, Machine.of(device, 4, host_bytes=2000 * GB), 2**17) for device in ("H100", "CPU"))
    assert not of_cpu.device
    on_host = 4 * sum(memory.offloaded(shape, 2**17).values())
    assert of_cpu.host_bytes == pytest.approx(4 * of_gpu.allocated_bytes + on_host)


@pytest.mark.parametrize(("stage", "share"), [(1, 4 + 12 / 64), (2, 2 + 14 / 64), (3, 16 / 64)])
def test_states_follow_the_zero_stage(llama: ModelSizes, stage: int, share: float) -> None:
    shape = shape_of(llama, world_size=64, engine=f"zero{stage}", communication_data_type="bf16")
    device = cost(shape, EIGHT, 1).device
    states = device["parameters"] + device["gradients"] + device["optimizer states"]
    assert states == pytest.approx(share * llama.num_parameters)


def test_the_host_is_fullest_while_weights_are_read_or_a_checkpoint_is_saved(llama: ModelSizes) -> None:
    """On a node of eight ranks, each of which writes files of at most 5 GB."""
    zero1, fsdp2 = (shape_of(llama, world_size=8, engine=engine) for engine in ("zero1", "fsdp2"))
    assert cost(zero1, EIGHT, 1024).host_moment == "loading"
    saving = cost(fsdp2, EIGHT, 1024)
    assert saving.host_moment == "saving"
    assert saving.host["file of a checkpoint"] == 8 * 5 * GB


def _config(**changes) -> PretrainedConfig:
    """Llama-8B's layers, two of them, with few words, whose states would hide what is compared."""
    config = copy.deepcopy(CONFIGS["meta-llama/Llama-3.1-8B"])
    config.update({"num_hidden_layers": 2, "vocab_size": 4096} | changes)
    return config


def _gemma() -> PretrainedConfig:
    """The same with Gemma 2's layers, all with full attention."""
    sizes = {name: getattr(_config(), name) for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")}
    of_layers = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "intermediate_size": 14336}
    return Gemma2Config(**sizes, **of_layers, head_dim=128, vocab_size=4096)


SMALL_MLP = {"intermediate_size": 1024}  # so that attention or norms are the peak
TRACES = {
    "ulysses 8": (_config(), {"sp": 8}, {}),
    "ring 8": (_config(**SMALL_MLP), {"sp": 8, "ring": 8}, {}),
    "one GPU": (_config(), {}, {}),
    "ulysses 8, checkpoints on the host": (_config(**SMALL_MLP), {"sp": 8, "activation_offloading": True}, {}),
    "ulysses 8, exchange beside attention": (
        _config(**SMALL_MLP),
        {"sp": 8, "overlap_exchange": True},
        {"overlap_exchange": True},
    ),
    "no checkpoints": (_config(), {"sp": 8, "activation_checkpointing": False}, {}),
    "gather 8": (_config(**SMALL_MLP), {"sp": 8, "ring": 8, "backend": "gather"}, {}),
    "four norms a layer": (_gemma(), {"sp": 8}, {}),
}


@pytest.mark.parametrize(("case", "bound"), [("ulysses 8", 0.15), pytest.param("ring 8", 0.17, marks=pytest.mark.long)])
def test_a_step_of_pairs_takes_the_memory_of_fine_tuning(case: str, bound: float) -> None:
    """To 15% of the forecast; and in these traces, where the loss is not the peak, to 1% of each other.

    A ring of two documents sends fewer blocks at a time than the ring of one that is forecast: 17%.
    """
    config, given, memory_options = TRACES[case]
    shape = traced_shape(ModelSizes.of_config(config), given)
    settings = StepSettings(
        length=2**18, document_lengths=one_pair(2**18), **_traced(traced_settings(shape), memory_options)
    )
    threads = torch.get_num_threads()
    pairs = trace_training_step(config, settings, loss_of=published.loss_of_pairs)
    documents = trace_training_step(config, settings)
    torch.set_num_threads(threads)
    assert any("AllReduce" in part or "IndexAdd" in part for part in pairs.peaks), "sums over documents"
    assert pairs.peak_bytes == pytest.approx(documents.peak_bytes, rel=0.01)
    assert cost(shape, EIGHT, settings.length).allocated_bytes == pytest.approx(pairs.peak_bytes, rel=bound)


def _traced(settings: dict[str, Any], memory_options: dict[str, Any]) -> dict[str, Any]:
    return settings | {"memory_options": settings["memory_options"] | memory_options}


@pytest.mark.parametrize("case", few(TRACES, ["ulysses 8", "ring 8", "four norms a layer"]))
def test_prediction_is_near_a_trace(case: str) -> None:
    """To 15%: formulas count what is large. The optimizer's step, without activations, is no part of either."""
    config, given, memory_options = TRACES[case]
    shape = traced_shape(ModelSizes.of_config(config), given)
    length = 2**18 if shape.sp > 1 else 2**16
    settings = StepSettings(length=length, **_traced(traced_settings(shape), memory_options))
    threads = torch.get_num_threads()
    trace = trace_training_step(config, settings)
    torch.set_num_threads(threads)
    moment, device = memory.largest(memory.device_moments(shape, length, is_cpu=True))
    assert sum(device.values()) == pytest.approx(trace.peak_bytes, rel=0.15), f"{moment} {device}\n{trace.table()}"
    on_host = sum(memory.offloaded(shape, length).values())
    assert on_host == pytest.approx(trace.host_peak_bytes, rel=0.05)

"""The tracer against torch's own and against itself on real tensors; and what it finds in a traced step of ours."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.memory import step
from benchmarks.memory import trace as trace_module
from benchmarks.memory.step import StepSettings, fsdp2, row_of, trace_training_step
from benchmarks.memory.trace import (
    GATHERED,
    GRADIENTS,
    OPTIMIZER_STATES,
    PARAMETERS,
    Allocation,
    MemoryTrace,
    MemoryTracer,
)
from longctx.layers.loss import TILE_BYTES
from longctx.model.tiny import tiny_config
from longctx.parallel import parallelize
from tests.workers import run_ranks

SP, LENGTH, VOCAB, HIDDEN = 4, 65536, 131072, 32
LOCAL = LENGTH // SP
HEADS, KEY_VALUE_HEADS, HEAD_DIM, INTERMEDIATE = 8, 4, 16, 192
"""Sizes in which logits [S/sp, V], masks [S, S] and full-length tensors each lie far above everything else."""

WIDTH = (HEADS + 2 * KEY_VALUE_HEADS) * HEAD_DIM
"""Queries, keys and values of a token, which Ulysses exchanges together: the widest that a layer makes of it."""
BOUND = 4 * max(LOCAL * max(WIDTH, INTERMEDIATE), VOCAB * HIDDEN + HIDDEN)
"""Bytes of the largest tensor in a step: one of S/sp tokens, as wide as said, or what FSDP2 gathers at once, in fp32.
In the head, a tile's logits, `longctx.layers.loss.TILE_BYTES`."""


def _config() -> Qwen3Config:
    config = tiny_config()
    config.update({"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE})
    config.update({"head_dim": HEAD_DIM, "num_attention_heads": HEADS, "num_key_value_heads": KEY_VALUE_HEADS})
    return config


DOCUMENTS = [LENGTH // 2, 3, LENGTH // 4 - 3, LENGTH // 8, LENGTH // 8]


def _trace(backend: str, *, fused_loss: bool = True, **memory_options) -> MemoryTrace:
    settings = StepSettings(
        length=LENGTH,
        document_lengths=DOCUMENTS,
        sp=SP,
        sp_backend=backend,
        fused_loss=fused_loss,
        memory_options=memory_options,
    )
    return trace_training_step(_config(), settings, rank=1)


def _too_large(trace: MemoryTrace) -> list[Allocation]:
    return [x for x in trace.allocations if x.nbytes > (TILE_BYTES if "lm_head" in x.module else BOUND)]


def _full_length(trace: MemoryTrace) -> list[Allocation]:
    """Tensors of all the row's tokens, ids, positions, labels and plans aside, which are whole numbers."""
    return [x for x in trace.allocations if LENGTH in x.shape and x.dtype.is_floating_point]


GATHERED_WIDTH = 2 * math.ceil(KEY_VALUE_HEADS / 4) * HEAD_DIM
"""Keys and values of all ranks' tokens, some heads at a time."""
STEPS = {
    "ring": ("ring", {}, 0),
    "gather": ("gather", {}, GATHERED_WIDTH),
    "ulysses": ("ulysses", {}, WIDTH // SP),
    "ulysses, one head at a time": ("ulysses", {"heads_k_stride": 1}, WIDTH // SP),
    "ulysses, exchange beside attention": ("ulysses", {"overlap_exchange": True}, WIDTH // SP),
    "hybrid": ("hybrid", {"ring_size": 2}, 0),
    "ulysses in chunks": ("ulysses", {"sequence_chunk_size": 8192}, WIDTH // SP),
}
"""(backend, memory options, numbers a token of the row that attention may hold): Ulysses has a few heads of all tokens
in the place of all heads of a few."""


@pytest.mark.long
@pytest.mark.parametrize("step", STEPS)
def test_no_tensor_of_a_packed_step_is_larger_than_a_ranks_tokens(step) -> None:
    backend, memory_options, full_width = STEPS[step]
    trace = _trace(backend, **memory_options)
    assert not _too_large(trace), "\n".join(map(str, _too_large(trace)))
    wider = [x for x in _full_length(trace) if math.prod(x.shape) > LENGTH * full_width]
    assert not wider, "\n".join(map(str, wider))


@pytest.mark.long
def test_a_chunked_step_takes_the_same_of_the_device_at_any_length() -> None:
    """But for ids, labels, positions, losses and the like: 114 bytes a token, whatever the model's width."""
    peaks = []
    for length in (4 * 4096 * SP, 8 * 4096 * SP):
        settings = StepSettings(
            length=length, sp=SP, sp_backend="ulysses", memory_options={"sequence_chunk_size": 4096}
        )
        trace = trace_training_step(_config(), settings)
        peaks.append(trace.peak_bytes)
        assert trace.host_peak_bytes > 2 * length // SP * HIDDEN * 2  # a hidden state of each layer, in bf16
    assert peaks[1] - peaks[0] <= 120 * 4 * 4096  # a hidden state more would be 64 bytes a token


@pytest.mark.long
def test_tiles_of_an_offloaded_step_stay_on_the_device() -> None:
    """What an MLP saves tile by tile, in the backward pass, is not what offloading is for."""
    settings = StepSettings(length=4096, sp=SP, sp_backend="ulysses", saved_on_host=True)
    whole = trace_training_step(_config(), settings)
    tiled = trace_training_step(_config(), replace(settings, memory_options={"tiled_mlp_num_shards": 4}))
    assert 0 < tiled.host_peak_bytes <= whole.host_peak_bytes


def test_logits_are_found_and_named() -> None:
    trace = _trace("ulysses", fused_loss=False)
    assert any(x.shape == (LOCAL, VOCAB) and "lm_head" in x.module for x in _too_large(trace)), trace.table()


def _step(model, optimizer, row) -> None:
    loss = model(**row, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_agrees_with_mem_tracker_to_the_byte() -> None:
    """On a stock step: nothing on the host, no operator of ours, and the batch said to both."""

    def run(make):
        with FakeTensorMode():
            model = Qwen3ForCausalLM(tiny_config())
            row = {name: torch.zeros(1, 512, dtype=torch.int64) for name in ("input_ids", "labels")}
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            with make(model, optimizer, row) as tracker:
                _step(model, optimizer, row)
            return tracker

    def mem_tracker(model, optimizer, row):
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *row.values())
        return tracker

    theirs = run(mem_tracker).get_tracker_snapshot("peak")[torch.device("cpu")]
    ours = run(lambda model, optimizer, row: MemoryTracer(model, optimizer)).trace()
    assert ours.peak_bytes == theirs["Total"]


REAL_LENGTH = 8192
REAL_DOCUMENTS = [4000, 3, 2189, 2000]


def _real_config() -> Qwen3Config:
    config = _config()
    config.update({"vocab_size": 512, "hidden_size": 64})
    return config


def _real_settings(backend: str, memory_options: dict) -> StepSettings:
    lengths = {"length": REAL_LENGTH, "document_lengths": REAL_DOCUMENTS}
    return StepSettings(**lengths, sp=SP, sp_backend=backend, memory_options=memory_options)


def real_step(backend: str, memory_options: dict) -> int:
    """On this rank of a gloo group: bytes at the peak of a real step, the first one over."""
    model, sequence = parallelize(Qwen3ForCausalLM(_real_config()), SP, sp_backend=backend, **memory_options)
    model.gradient_checkpointing_enable()
    model.train()
    model = fsdp2()(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    row = row_of(REAL_DOCUMENTS)
    row["input_ids"].random_(512)
    for _ in range(2):
        shard = sequence.shard(row)
        with MemoryTracer(model, optimizer) as tracer:
            with torch.autocast("cpu", torch.bfloat16):
                losses = model(**shard.inputs, shift_labels=shard.shift_labels, token_outputs=True).losses
                loss = sequence.reduce(losses, REAL_LENGTH)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracer.trace().peak_bytes


REAL_STEPS = {
    "ring": ("ring", {}),
    "ring, MLP in tiles": ("ring", {"tiled_mlp_num_shards": 4, "selective_checkpointing": False}),
    "ulysses": ("ulysses", {}),
    "hybrid": ("hybrid", {"ring_size": 2}),
    "gather, MLP in tiles": ("gather", {"tiled_mlp_num_shards": 4}),
    "hybrid, one head at a time": ("hybrid", {"ring_size": 2, "heads_k_stride": 1, "selective_checkpointing": False}),
}


def real_steps() -> dict[str, int]:
    return {name: real_step(backend, memory_options) for name, (backend, memory_options) in REAL_STEPS.items()}


@pytest.mark.long
def test_fake_steps_of_a_rank_take_what_real_ones_over_gloo_do(monkeypatch) -> None:
    """Every rank of four, with FSDP2 and the CPU's kernel: within 5% of the measured peak."""
    measured = run_ranks(SP, "tests.forecast.test_memory_trace:real_steps", timeout=900)
    monkeypatch.setattr(step, "flash_kernel", contextlib.nullcontext)
    monkeypatch.setattr(trace_module, "FLASH_WORKSPACE", {})
    for name, (backend, memory_options) in REAL_STEPS.items():
        for rank, real in enumerate(measured):
            traced = trace_training_step(_real_config(), _real_settings(backend, memory_options), rank=rank).peak_bytes
            assert traced == pytest.approx(real[name], rel=0.05), (name, rank)


def test_states_that_an_engine_offloads_are_host_memory() -> None:
    layer = torch.nn.Linear(8, 16, bias=False)
    optimizer = torch.optim.Adam(layer.parameters())
    with MemoryTracer(layer, optimizer, on_host=(PARAMETERS, GRADIENTS, OPTIMIZER_STATES)) as tracer:
        layer(torch.zeros(4, 8)).sum().backward()
        optimizer.step()
    trace, size = tracer.trace(), 8 * 16 * 4
    assert trace.host_peak_bytes >= 4 * size
    assert not trace.by_category[PARAMETERS] + trace.by_category[GRADIENTS] + trace.by_category[OPTIMIZER_STATES]


def test_fsdp2_frees_what_it_gathers() -> None:
    """By resizing storages, which no operator tells. At the peak, in the head, all layers are shards again."""
    trace = _trace("ulysses")
    assert trace.by_category[GATHERED] == 2 * (VOCAB * HIDDEN + HIDDEN)  # head and last norm in bf16
    assert sum(x.category == GATHERED for x in trace.allocations) > 10

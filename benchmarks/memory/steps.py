"""Real steps of a small model on the CPU: bytes of states by engine, and seconds by memory option."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig
from trl.trainer.utils import add_fused_lm_head

from longctx.launch.network import choose_interface
from longctx.parallel import SequenceParallel, parallelize
from longctx.sequence.host_tensors import SavedOnHost
from longctx.training.engines import start_on_cpu
from longctx.upstream.transformers_internals import enable_checkpointing

from ..packing import print_head, print_row
from ..ranks import results_of
from .rows import STATES, count_parameters
from .step import (
    StepSettings,
    fsdp2,
    row_of,
)
from .trace import MemoryTracer


def small_config(hidden_size: int = 256, num_layers: int = 4) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=64 * hidden_size,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 64,
        head_dim=32,
        max_position_embeddings=65536,
    )


def timed_config() -> LlamaConfig:
    return small_config(128, 2)


def print_states() -> None:
    """Bytes of states that a rank holds, in bf16, of real steps on gloo."""
    parameters = count_parameters(small_config())
    print(f"\n## States a rank: real steps on gloo, bf16, AdamW, {parameters:,} parameters, bytes a parameter")
    print("\nGradients: those that the optimizer is given. ZeRO's in bf16, 2 bytes, come and go in the backward pass.")
    print_head("engine", "devices", "parameters", "gradients", "optimizer states", "all", "saving")
    sizes = {world_size: results_of(world_size, _states_of_engines)[0] for world_size in (1, 2, 4)}
    whole = sum(sizes[1]["none"].values())
    for engine in ENGINES:
        for world_size, by_engine in sizes.items():
            if engine != "none" or world_size == 1:
                held = [by_engine[engine][name] for name in STATES]
                each = (f"{nbytes / parameters:.2f}" for nbytes in (*held, sum(held)))
                print_row([engine, world_size, *each, f"{whole / sum(held):.2f}x"])


ENGINES = ("none", "zero1", "zero2", "zero3", "fsdp2")


def _states_of_engines() -> dict[str, dict[str, int]]:
    """Called by every rank of a new group."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    choose_interface(os.environ)
    warnings.simplefilter("ignore")
    start_on_cpu("deepspeed")
    found = {engine: _state_bytes(engine) for engine in ENGINES}
    dist.barrier()
    dist.destroy_process_group()
    return found


def _state_bytes(engine: str) -> dict[str, int]:
    """By category, of a second step: what stays, and the gradients that the optimizer is given. ZeRO's in bf16, whole
    in ZeRO-1 and a rank's part in ZeRO-2, come and go before.
    """
    torch.manual_seed(0)
    dtype = torch.bfloat16 if engine.startswith("zero") else torch.float32
    model: Any = AutoModelForCausalLM.from_config(small_config(), dtype=dtype)
    ids = torch.zeros(1, 64, dtype=torch.int64)
    run, model, optimizer = _zero(model, int(engine[-1])) if engine.startswith("zero") else _plain(model, engine)
    run(ids)
    with MemoryTracer(model, optimizer) as tracer:
        run(ids)
    trace = tracer.trace()
    held: dict[str, int] = dict.fromkeys(STATES, 0)
    for allocation in trace.allocations:
        if allocation.category in held:
            held[allocation.category] += allocation.nbytes
    return held


def _plain(model: Any, engine: str) -> tuple[Callable[[Tensor], None], nn.Module, torch.optim.Optimizer]:
    if engine == "fsdp2":
        model = fsdp2(StepSettings(length=1))(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def run(ids: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run, model, optimizer


def _zero(model: Any, stage: int) -> tuple[Callable[[Tensor], None], nn.Module, torch.optim.Optimizer]:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def run(ids: Tensor) -> None:
        engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
        engine.step()

    return run, engine.module, engine.optimizer.optimizer


TIMED_TOKENS, TIMED_PAIRS, TIMED_CHUNK = 2048, 3, 512


def print_times() -> None:
    """CPU seconds of a step with a memory option over those of the step without it, in turn."""
    print(
        f"\n## Cost in time: real steps of a small model ({count_parameters(timed_config()):,} parameters, "
        f"{TIMED_TOKENS} tokens, fp32, one CPU process), CPU seconds over those of the plain step, "
        f"median and range of {TIMED_PAIRS} pairs"
    )
    print_head("memory_option", "over", "ratio", "range")
    ours = _timed_step()
    for name, over, make in (
        ("fused loss", "all logits made", lambda: (ours, _timed_step(fused_loss=False))),
        ("checkpointing", "none", lambda: (ours, _timed_step(checkpointing=None))),
        ("checkpointing of every 2nd layer", "none", lambda: (_timed_step({"every_n_layers": 2}), _timed_step(None))),
        ("activations on the host", "on the device", lambda: (_timed_step(saved_on_host=True), ours)),
        ("tiled MLP", "whole", lambda: (_timed_step(tiled_mlp_num_shards=0), ours)),
        (
            f"{TIMED_CHUNK} tokens at a time",
            "whole layers",
            lambda: (_timed_step(sequence_chunk_size=TIMED_CHUNK), ours),
        ),
        ("balanced", "TRL's stock step, whose fused head is made for Triton", lambda: (ours, _timed_trl_step())),
    ):
        ratios = paired_ratios(*make())
        print_row([name, over, f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"])


def paired_ratios(first: Callable[[], None], second: Callable[[], None]) -> list[float]:
    """CPU time, in which other work on the machine does not count; each once beforehand."""
    ratios = []
    for pair in range(TIMED_PAIRS + 1):
        times = []
        for step in (first, second):
            start = time.process_time()
            step()
            times.append(time.process_time() - start)
        if pair:
            ratios.append(times[0] / times[1])
    return ratios


def _timed_step(
    checkpointing: Mapping[str, Any] | None = MappingProxyType({}),
    *,
    fused_loss: bool = True,
    saved_on_host: bool = False,
    **memory_options: Any,
) -> Callable[[], None]:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(timed_config())
    sequence: SequenceParallel
    model, sequence = parallelize(model, sp=1, **memory_options)
    if checkpointing is not None:
        enable_checkpointing(model, **checkpointing)
    model.train()
    shard = sequence.shard(row_of([TIMED_TOKENS]))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        shard.context.calls = 0
        with SavedOnHost() if saved_on_host else contextlib.nullcontext():
            if fused_loss:
                losses = model(**shard.inputs, shift_labels=shard.shift_labels, token_outputs=True).losses
                loss = sequence.reduce(losses, TIMED_TOKENS)
            else:
                loss = sequence.loss(model(**shard.inputs).logits, shard.shift_labels, TIMED_TOKENS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _timed_trl_step() -> Callable[[], None]:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(timed_config(), attn_implementation="sdpa")
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    enable_checkpointing(model)
    model.train()
    ids = torch.zeros(1, TIMED_TOKENS, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(input_ids=ids, labels=ids, fused_lm_head=True).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step

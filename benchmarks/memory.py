"""How long a sequence can be: every memory option, alone and together, from traced steps.

    python -m benchmarks.memory > benchmarks/results/memory_traced_DATE.md     # all parts
    python -m benchmarks.memory --parts lengths --models Qwen3-0.6B --sp 8
    python -m benchmarks.memory --parts states time                            # real steps on the CPU, small model

Lengths are predicted, not measured. One training step is traced on fake tensors (`longctx.forecast.traced_step`), for
one rank of a fake process group, with FlashAttention-2 as the kernel and one document a row: FSDP2 over all devices in
accelerate's wrapping, fp32 shards, bf16 compute, AdamW, activation checkpointing. What the device or the host holds
while a part of the step runs is linear in the length and in the number of layers, so each part's line is fitted to
four traces (two depths, two lengths), and the longest sequence is the last at which every part fits. *check* is a
whole model at a third length, its traced peak over the fitted one.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import math
import multiprocessing
import operator
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3
from trl.kernels import chunked_logprob
from trl.trainer.utils import add_fused_lm_head

from longctx.forecast.memory_trace import GRADIENTS, OPTIMIZER_STATES, PARAMETERS, MemoryTrace, MemoryTracer
from longctx.forecast.traced_step import (
    StepSettings,
    fake_process_group,
    fsdp2,
    row_of,
    trace_fake_step,
    trace_training_step,
)
from longctx.launch.network import choose_interface
from longctx.launch.terminal import token_label
from longctx.parallel import SequenceParallel, parallelize
from longctx.sequence.host_tensors import SavedOnHost
from longctx.training.engines import start_on_cpu

from .packing import print_head, print_row
from .published import CONFIGS, read
from .ranks import results_of

RESERVE = 5_500_000_000
"""Bytes of the device for its context, libraries, messages and fragmentation: fitted from published tables."""
DEVICE = 80 * 2**30 - RESERVE
HOST = 1_900_000_000_000 // 8
"""Bytes for a device: of a node's 1.9 TB an eighth."""

MODELS = {name.partition("/")[2]: config for name, config in CONFIGS.items()}

STATES = (PARAMETERS, GRADIENTS, OPTIMIZER_STATES)
CHUNK = 8192
"""Tokens of a rank at a time, as `--memory longest` has it."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One set of memory options."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of StepSettings."""
    sizes: tuple[int, int] = (65536, 131072)
    """Tokens of a rank in the two lengths that are traced."""
    bf16_shards: bool = False
    """Whether a formula adds them on the device: ZeRO-3 with its optimizer alone on the host, which no trace runs."""
    trl: bool = False
    """TRL's step in the place of ours."""

    @property
    def layers(self) -> tuple[int, int]:
        """Of the two models that are traced: more than TRL's offloading leaves on the device, where it is on."""
        return (7, 8) if self.settings.get("activation_offloading") else (3, 4)

    def __or__(self, other: Row) -> Row:
        """Both together, the other's name."""
        memory_options = {**self.settings.get("memory_options", {}), **other.settings.get("memory_options", {})}
        return Row(
            name=other.name,
            settings={**self.settings, **other.settings, "memory_options": memory_options},
            sizes=min(self.sizes, other.sizes),
            bf16_shards=self.bf16_shards or other.bf16_shards,
        )


def _memory_option(name: str, sizes: tuple[int, int] = (65536, 131072), **settings: Any) -> Row:
    return Row(name=name, settings=settings, sizes=sizes)


FLOOR = _memory_option("fused loss, checkpointing: always on")
UNFUSED = _memory_option("without the fused loss", (16384, 32768), fused_loss=False)
STATES_ON_HOST = _memory_option("states on the host", on_host=STATES)
OPTIMIZER_ON_HOST = replace(STATES_ON_HOST, name="ZeRO-3, optimizer on the host (formula)", bf16_shards=True)
OFFLOAD = _memory_option("activations on the host", activation_offloading=True)
TILED = _memory_option("tiled MLP", (32768, 65536), memory_options={"tiled_mlp_num_shards": 0})
HEADS = _memory_option("1 key/value head at a time", memory_options={"heads_k_stride": 1})
REDUCE = _memory_option("gradients reduced in bf16", reduce_dtype=torch.bfloat16)
CHUNKED = _memory_option(
    f"{CHUNK} tokens a rank at a time", (2 * CHUNK, 4 * CHUNK), memory_options={"sequence_chunk_size": CHUNK}
)
RING = _memory_option("ring, not Ulysses", sp_backend="ring")
GATHER = _memory_option("gather, not Ulysses", sp_backend="gather")
HYBRID = _memory_option("hybrid 2 x 4, not Ulysses", sp_backend="hybrid", memory_options={"ring_size": 2})


def combined(memory_options: Sequence[Row]) -> Row:
    """Return the floor with all of these memory options."""
    return replace(
        functools.reduce(operator.or_, memory_options, FLOOR),
        name=", ".join(memory_option.name for memory_option in memory_options),
    )


TRL_STEP = replace(OFFLOAD, name="TRL: sdpa, fused loss, checkpointing, activations on the host", trl=True)
TRL_STATES_ON_HOST = replace(TRL_STEP | STATES_ON_HOST, name=f"{TRL_STEP.name}; states on the host", trl=True)


def rows_of(model: str, sp: int) -> Iterator[tuple[str, Row]]:
    """(kind, row). Where the states do not fit one device, they are on the host from the start."""
    exchanged = [HEADS] if sp > 1 else []
    ladder = [STATES_ON_HOST, OFFLOAD, TILED, *exchanged]
    base = FLOOR
    if sp == 1 and model != "Qwen3-0.6B":
        base = replace(STATES_ON_HOST, name=f"{FLOOR.name}; {STATES_ON_HOST.name}")
    yield "ours", base
    alone = [UNFUSED, *ladder[base is not FLOOR :], CHUNKED]
    for row in [*alone, *([REDUCE, OPTIMIZER_ON_HOST, RING, GATHER, HYBRID] if sp > 1 else [])]:
        yield "alone", base | row
    for joined in [*(ladder[:n] for n in range(2, len(ladder) + 1)), [STATES_ON_HOST, CHUNKED]]:
        yield "together", base | combined(joined)
    if sp == 1:
        yield from (("peer", row) for row in (TRL_STEP, TRL_STATES_ON_HOST)[base is not FLOOR :])


# Traces and what is fitted to them


@dataclass(frozen=True)
class Fit:
    """Bytes by part of the step, linear in the tokens of a rank, for a model of all its layers."""

    device: dict[str, tuple[float, float]]
    """part -> (constant, slope)"""
    host: dict[str, tuple[float, float]]

    def longest(self, device: float = DEVICE, host: float = HOST) -> tuple[int, int]:
        """The most tokens of a rank for the device and for the host."""
        limits = []
        for parts, budget in ((self.device, device), (self.host, host)):
            bounds = [(budget - constant) / slope for constant, slope in parts.values() if slope > 1e-6]
            too_large = any(constant > budget for constant, _ in parts.values())
            limits.append(0 if too_large else max(0, math.floor(min(bounds, default=2**40))))
        return limits[0], limits[1]

    def at(self, tokens: int) -> tuple[float, float]:
        """(device, host) bytes at the peak."""
        device, host = (max(c + s * tokens for c, s in parts.values()) for parts in (self.device, self.host))
        return device, host


Trace = Callable[[PretrainedConfig, int], MemoryTrace]
"""(configuration, tokens of a rank) -> one step's trace."""


def fit(config: PretrainedConfig, trace: Trace, row: Row) -> Fit:
    """From traces of models of a few layers."""
    sizes, layers = row.sizes, row.layers
    traces = {(n, size): trace(with_layers(config, n), size).peaks for n in layers for size in sizes}
    parts = set.intersection(*(set(peaks) for peaks in traces.values()))
    sides = []
    for side in (0, 1):
        lines = {}
        for part in parts:
            at = {}
            for size in sizes:  # along the layers, then along the length
                few, more = (traces[n, size][part][side] for n in layers)
                at[size] = few + (more - few) / (layers[1] - layers[0]) * (config.num_hidden_layers - layers[0])
            slope = (at[sizes[1]] - at[sizes[0]]) / (sizes[1] - sizes[0])
            lines[part] = (at[sizes[0]] - slope * sizes[0], slope)
        sides.append(lines)
    return Fit(*sides)


def with_layers(config: PretrainedConfig, num_layers: int) -> PretrainedConfig:
    values = config.to_dict() | {"num_hidden_layers": num_layers}
    if values.get("layer_types"):
        values["layer_types"] = values["layer_types"][:num_layers]
    return type(config).from_dict(values)


def trace_of(row: Row, sp: int) -> Trace:
    if row.trl:
        return trl_trace(row.settings.get("on_host", ()))

    def trace(config: PretrainedConfig, tokens: int) -> MemoryTrace:
        settings = {"sp_backend": "ulysses" if sp > 1 else "auto", **row.settings}
        engine = "fsdp2" if sp > 1 or row.settings.get("on_host") else "none"
        return trace_training_step(config, StepSettings(length=tokens * sp, sp=sp, engine=engine, **settings))

    return trace


def count_parameters(config: PretrainedConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())


@dataclass(frozen=True)
class Task:
    """A row to fit, or a whole model to trace at a third length."""

    model: str
    sp: int
    row: Row
    is_check: bool = False

    @property
    def key(self) -> str:
        return repr((self.model, self.sp, self.row.settings, self.row.sizes, self.row.trl, self.is_check))


CHECK_TOKENS = 98304
"""Of a rank."""


def run_task(task: Task) -> Fit | tuple[float, float] | str:
    """The fit, or the check's (device, host) bytes, or why there is none."""
    warnings.simplefilter("ignore")
    config, trace = MODELS[task.model], trace_of(task.row, task.sp)
    try:
        if task.is_check:
            checked = trace(config, CHECK_TOKENS)
            return checked.peak_bytes, checked.host_peak_bytes
        return fit(config, trace, task.row)
    except ValueError as error:  # what a setting or a model refuses
        return f"no trace: {str(error).splitlines()[0]}"


class Results:
    """What tasks came to, each run once, `jobs` at a time."""

    def __init__(self, tasks: Iterable[Task], jobs: int):
        todo = {task.key: task for task in tasks}
        self._by_key: dict[str, Any] = {}
        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            running = {pool.submit(run_task, task): key for key, task in todo.items()}
            for done in as_completed(running):
                self._by_key[running[done]] = done.result()
                print(f"{len(self._by_key)} of {len(todo)}: {todo[running[done]].row.name}", file=sys.stderr)

    def fit(self, model: str, sp: int, row: Row) -> Fit | str:
        fitted = self._by_key[Task(model, sp, row).key]
        if isinstance(fitted, str) or not row.bf16_shards:
            return fitted
        shards = 2 * count_parameters(MODELS[model]) / sp
        return Fit({part: (constant + shards, slope) for part, (constant, slope) in fitted.device.items()}, fitted.host)

    def check(self, model: str, sp: int, row: Row) -> tuple[float, float] | str:
        return self._by_key[Task(model, sp, row, is_check=True).key]


# TRL's step, traced the same way


def trl_trace(on_host: Sequence[str]) -> Trace:
    """Stock model and sdpa attention, one document without padding, which needs no mask; checkpointing, activation
    offloading and TRL's fused head, whose Triton kernels work in place.
    """

    def trace(config: PretrainedConfig, tokens: int) -> MemoryTrace:
        with fake_process_group(1), _as_on_a_gpu():
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            with mode:
                model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
            add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
            model.activation_checkpointing_enable()
            model.train()
            prepare = fsdp2(StepSettings(length=tokens)) if on_host else lambda model: model

            def loss(model: nn.Module, input_ids: Tensor, position_ids: Tensor) -> Tensor:
                with torch.autocast("cpu", torch.bfloat16):
                    outputs = model(
                        input_ids=input_ids, position_ids=position_ids, labels=input_ids, fused_lm_head=True
                    )
                return outputs.loss

            row = row_of([tokens])
            arguments = (row["input_ids"], row["position_ids"])
            return trace_fake_step(mode, model, prepare, loss, arguments, on_host=on_host, activation_offloading=True)

    return trace


@contextlib.contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """transformers takes fake tensors for tracing, and makes a mask that a run never has; TRL's fused head has Triton
    kernels in the place of the torch functions that it has for a CPU.
    """
    replaced = [
        *((module, "create_causal_mask", lambda *args, **kwargs: None) for module in (modeling_llama, modeling_qwen3)),
        *((chunked_logprob, name, _Kernel()) for name in ("_forward_tile", "_backward_tile")),
    ]
    originals = [getattr(module, name) for module, name, _ in replaced]
    for module, name, value in replaced:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), original in zip(replaced, originals, strict=True):
            setattr(module, name, original)


class _Kernel:
    """Allocates nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pass


# The tables


def length_text(tokens: float) -> str:
    return "does not fit" if tokens < 1 else token_label(tokens)


LENGTH_COLUMNS = (
    "memory_options",
    "",
    "longest",
    "bound by",
    "device alone",
    "device, bytes a token",
    "host, bytes a token",
)


def length_cells(name: str, kind: str, fitted: Fit, sp: int) -> list[str]:
    device, host = fitted.longest()
    tokens = min(device, host)
    slope = [0.0, 0.0]
    for side, parts in enumerate((fitted.device, fitted.host)):
        slope[side] = max(parts.values(), key=lambda line: line[0] + line[1] * max(tokens, 1))[1]
    return [
        name,
        kind,
        length_text(tokens * sp),
        "" if tokens < 1 else "host" if host < device else "device",
        length_text(device * sp),
        f"{slope[0]:,.0f}",
        f"{slope[1]:,.0f}",
    ]


def length_tasks(model: str, sp: int) -> Iterator[Task]:
    rows = [row for _, row in rows_of(model, sp)]
    yield from (Task(model, sp, row) for row in rows)
    yield Task(model, sp, rows[0], is_check=True)


def print_lengths(model: str, sp: int, results: Results) -> None:
    """The ablation of one model on one number of devices."""
    print(f"\n## {model}, sp {sp}")
    print_head(*LENGTH_COLUMNS)
    for kind, row in rows_of(model, sp):
        fitted = results.fit(model, sp, row)
        print_row([row.name, kind, fitted] if isinstance(fitted, str) else length_cells(row.name, kind, fitted, sp))
    _, first = next(rows_of(model, sp))
    fitted, traced = results.fit(model, sp, first), results.check(model, sp, first)
    if not isinstance(fitted, str) and not isinstance(traced, str):
        device, host = fitted.at(CHECK_TOKENS)
        print(
            f"\n*Check*, all {MODELS[model].num_hidden_layers} layers at {CHECK_TOKENS * sp:,} tokens, first row: "
            f"traced over fitted {traced[0] / device:.4f} on the device ({traced[0] / 2**30:.2f} GiB)"
            + (f", {traced[1] / host:.4f} on the host." if host else ".")
        )


SAME_AND_OURS = "the same, and ours"
COUNTERPARTS: list[tuple[str, str, str, list[Row]]] = [
    ("ALST", "baseline+fused-loss+ulysses8", "Llama-3.1-8B", [OPTIMIZER_ON_HOST]),
    ("ALST", "baseline+fused-loss+ulysses8+tiled-mlp", "Llama-3.1-8B", [OPTIMIZER_ON_HOST, TILED]),
    ("ALST", "baseline+fused-loss+ulysses8+checkpoint-offload", "Llama-3.1-8B", [OPTIMIZER_ON_HOST, OFFLOAD]),
    ("ALST", "all", "Llama-3.1-8B", [OPTIMIZER_ON_HOST, OFFLOAD, TILED]),
    (
        "UPipe paper",
        "head-chunked ulysses+checkpoint-offload+tiled-mlp, FA3",
        "Llama-3.1-8B",
        [OPTIMIZER_ON_HOST, OFFLOAD, TILED, HEADS],
    ),
    ("UPipe paper", SAME_AND_OURS, "Llama-3.1-8B", [CHUNKED]),
    ("TRL 1.13 CP", "fsdp2+cp8+chunked-loss+checkpoint-offload", "Qwen3-8B", [GATHER, OFFLOAD]),
    ("TRL 1.13 CP", SAME_AND_OURS, "Qwen3-8B", [CHUNKED]),
]
"""(stack, its features, model, our memory options for the same)."""


def published_tasks() -> Iterator[Task]:
    yield from (Task(model, 8, combined(memory_options)) for _, _, model, memory_options in COUNTERPARTS)


def print_published(results: Results) -> None:
    """Rows of the table of published lengths on 8 devices, and ours with the same features and budget."""
    print("\n## Published on 8 devices, and ours with the same features\n")
    print(
        "A published run that states its peak (TRL's) is compared at that peak, maxima at 80 GiB less the reserve. "
        "*the same, and ours*: the row above, against our longest."
    )
    print_head("stack", "features", "model", "published", "ours, predicted", "ratio", "bound by", "device alone")
    by_features = {(row.stack, row.features): row for row in read() if row.gpus == 8}
    for stack, features, model, memory_options in COUNTERPARTS:
        if features != SAME_AND_OURS:
            theirs = by_features[stack, features]
        fitted = results.fit(model, 8, combined(memory_options))
        if isinstance(fitted, str):
            print_row([stack, features, model, theirs.length, fitted])
            continue
        budget = theirs.peak_gib * 2**30 - RESERVE if theirs.peak_gib else DEVICE
        device, host = fitted.longest(device=budget)
        ours, bound = min(device, host) * 8, "host" if host < device else "device"
        ratio = f"{ours / theirs.length:.2f}"
        figures = (f"{theirs.length:,}", length_text(ours), ratio, bound, length_text(device * 8))
        print_row([stack, features, model, *figures])


# Real steps of a small model on the CPU


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
        model.activation_checkpointing_enable(**checkpointing)
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
    model.activation_checkpointing_enable()
    model.train()
    ids = torch.zeros(1, TIMED_TOKENS, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(input_ids=ids, labels=ids, fused_lm_head=True).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


# The command


def machine() -> str:
    """Processor and versions."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [s for s in Path("/proc/cpuinfo").read_text().splitlines() if s.startswith("model name")]
        name = names[0].split(":", 1)[1].strip() if names else name
    packages = ", ".join(f"{p} {version(p)}" for p in ("torch", "transformers", "accelerate", "trl", "deepspeed"))
    return f"{name}, {os.cpu_count()} CPUs; Python {platform.python_version()}, {packages}"


PARTS = ("lengths", "published", "states", "time")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["Qwen3-0.6B", "Llama-3.1-8B"])
    parser.add_argument("--sp", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="traces at a time")
    options = parser.parse_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    warnings.simplefilter("ignore")
    print("# Memory options\n")
    print(f"`{' '.join(['python -m benchmarks.memory', *given])}`  \n{machine()}  \n{time.strftime('%Y-%m-%d')}\n")
    print((__doc__ or "").split("\n\n", 2)[2].rstrip())
    print(
        f"\nBudget: {DEVICE / 2**30:.2f} GiB of a device (80 GiB less {RESERVE / 1e9} GB) and {HOST / 1e9:.1f} GB of "
        "host memory for each device, an eighth of 1.9 TB. *alone*: with the first row. *together*: what is listed, "
        "with the first row. *device alone*: were host memory without end."
    )
    settings = list(itertools.product(options.models, options.sp)) if "lengths" in options.parts else []
    tasks = [task for model, sp in settings for task in length_tasks(model, sp)]
    if "published" in options.parts:
        tasks += published_tasks()
    results = Results(tasks, options.jobs)
    for model, sp in settings:
        print_lengths(model, sp, results)
    if "published" in options.parts:
        print_published(results)
    if "states" in options.parts:
        print_states()
    if "time" in options.parts:
        print_times()


if __name__ == "__main__":
    main()

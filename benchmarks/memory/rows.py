"""What is traced: the memory options, one row each, and the line fitted to each part of a step."""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import operator
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3
from trl.kernels import chunked_logprob
from trl.trainer.utils import add_fused_lm_head

from longctx.upstream.transformers_internals import enable_checkpointing

from ..published import CONFIGS
from .step import (
    StepSettings,
    fake_process_group,
    fsdp2,
    row_of,
    trace_fake_step,
    trace_training_step,
)
from .trace import GRADIENTS, OPTIMIZER_STATES, PARAMETERS, MemoryTrace

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
    """Return the fit, the (device, host) bytes of a check, or the reason why there is no trace."""
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
            enable_checkpointing(model)
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

"""Every way to spread a model over devices, with the length that fits and the seconds that a step takes."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from transformers import PretrainedConfig

from longctx.attention.backends import BACKENDS
from longctx.attention.choice import Documents, exchange_overlaps
from longctx.forecast.closed_form import Breakdown, predict, reach
from longctx.forecast.documents import RowLengths, one_document
from longctx.forecast.expected_step import FREE_PART
from longctx.forecast.memory_options import AUTO, CPU, RunTraits
from longctx.forecast.memory_presets import CHUNK_TOKENS, memory_flags, resolve_memory_options
from longctx.forecast.memory_setup import MemorySetup
from longctx.forecast.model_sizes import ModelSizes
from longctx.forecast.option_search import Room, fastest_memory_options
from longctx.forecast.step_time import Speeds, StepTime, attention_setup, step_time
from longctx.layers.liger import liger_parts
from longctx.model.allow_list import num_heads
from longctx.model.recurrent import recurrent_sizes
from longctx.sequence.mesh import ParallelDims

GIB = 2**30

SetupOf = Callable[[Mapping[str, Any]], MemorySetup]

DEVICE_BYTES = {"A100": 85.0e9, "H100": 85.0e9, "H200": 150.1e9, "B200": 191.5e9}
DEVICE_BYTES |= {"RTX 3090": 25.4e9, "RTX 4090": 25.4e9, "L40S": 47.7e9}
"""Memory of a device, as `torch.cuda.mem_get_info` gives its total. A100 and H100 are those named 80 GB."""
HOST_BYTES_PER_DEVICE = 1.9e12 / 8
"""Host memory of a node for each device, if it is not given: that of common nodes of eight H100s."""

LONG_ROW = 2**30
"""Tokens of a sequence that is so long that presets do not shorten their chunks."""

A_TIE = 1.02
"""Speeds within this ratio of the fastest count as equal. Of these the smallest sp is recommended, and then the backend
that is registered first."""

FARTHEST: Sequence[Mapping[str, Any]] = (
    {"memory": "longest"},
    {"sequence_chunk_size": CHUNK_TOKENS, "selective": False},
    {"activation_offloading": True, "selective": False},
)
"""Options with which sequences are longest, in one set-up or another: the second set leaves the host to activations,
and the third is for set-ups that refuse the others, such as those with 4-bit weights."""

WORTH_NAMING = 1.1
"""How many times faster than the recommendation a candidate has to be to be named beside it."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices to run on."""

    gpus: int
    gpus_per_node: int
    device: str
    """Name of the devices."""
    device_bytes: float
    """Memory of one device."""
    host_bytes: float
    """Host memory of one node."""
    kernel: str
    """Name of the attention kernel."""
    speeds: Speeds


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run: degrees, backend, engine and preset."""

    backend: str
    dims: ParallelDims
    memory: str
    """A value of --memory: a preset, or auto for memory options that are chosen for each length."""
    setup: MemorySetup
    max_length: int
    """Tokens of the longest sequence that fits; 0 if none does."""
    binds: str
    """The memory that is full then: device or host."""
    setup_of: SetupOf = field(compare=False)
    """Returns the set-up with other memory options."""
    memory_options: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The memory options of auto that were chosen for a length, by flag, with its preset as `memory`."""

    @property
    def engine(self) -> str:
        """deepspeed, fsdp2 or none."""
        return "deepspeed" if self.setup.engine.startswith("zero") else self.setup.engine

    def flags(self) -> list[str]:
        """Return the flags of longctx.train that select it."""
        spread = ["--sp", str(self.dims.sp), *(["--sp_backend", self.backend] if self.dims.sp > 1 else [])]
        ring = ["--ring_size", str(self.dims.ring)] if BACKENDS[self.backend].has_ring_size else []
        engine = ["--engine", self.engine] if self.dims.world_size == 1 and self.engine != "none" else []
        return [*spread, *ring, *engine, *self._memory_flags()]

    def _memory_flags(self) -> list[str]:
        memory_options = {"memory": "balanced" if self.memory_options else self.memory, **self.memory_options}
        return [word for name, value in memory_flags(memory_options).items() for word in (f"--{name}", str(value))]

    @property
    def name(self) -> str:
        """The candidate's text with its --memory, the same at every length."""
        return f"{self} --memory {self.memory}"

    @property
    def label(self) -> str:
        """The candidate's text with its preset, or the memory options that were chosen."""
        return f"{self} {shlex.join(self._memory_flags())}"

    def __str__(self) -> str:
        both = self.dims.ring > 1 and self.dims.ulysses > 1
        ways = f"{self.dims.ulysses} x ring {self.dims.ring}" if both else str(self.dims.sp)
        return f"{self.backend} {ways}" if self.dims.sp > 1 else "sp 1"


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """The forecast of a candidate at one length."""

    candidate: Candidate
    length: int
    memory: Breakdown
    time: StepTime | None
    """None if the length does not fit."""
    used: float
    """The used part of the device's memory or of the host's, whichever is larger."""

    @property
    def has_room(self) -> bool:
        """Whether FREE_PART of each memory is left free."""
        return self.used <= 1 - FREE_PART

    @property
    def speed(self) -> float:
        """Tokens per second and device; 0 if the length does not fit."""
        return self.time.tokens_per_second_per_device if self.time else 0.0


def candidates(
    config: PretrainedConfig,
    machine: Machine,
    *,
    presets: Sequence[str] = ("balanced", "longest", AUTO),
    settings: dict[str, Any] | None = None,
) -> list[Candidate]:
    """Return every candidate for the model, in the order of sp.

    Args:
        presets: values of --memory; auto after the others.
        settings: other flags of longctx.train that affect memory, such as use_peft and lora_r; with load_in_4bit also
            model_name_or_path.

    Raises:
        ValueError: if training refuses 4-bit weights with a preset.
    """
    model = ModelSizes.of_config(config)
    flags: dict[str, Any] = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    flags |= {"bf16": True, "dtype": "float32"}
    with suppress(ValueError):  # models whose layers Liger does not compute
        flags |= {"use_liger_kernel": True, "liger_kernel_config": dict.fromkeys(liger_parts(config), True)}
    found = []
    for backend, dims in _arrangements(config, machine.gpus, min(machine.gpus, machine.gpus_per_node)):
        for preset in presets:
            found.append(_candidate(config, model, machine, backend, dims, preset, flags | (settings or {})))
    return found


def _arrangements(config: PretrainedConfig, gpus: int, per_node: int) -> Iterator[tuple[str, ParallelDims]]:
    """Yield backends and degrees whose sequence groups are a part of a node or whole nodes.

    Beyond a node, a hybrid only has the widest exchange that stays in one.
    """
    heads = num_heads(config)[0]
    for sp in (n for n in range(1, gpus + 1) if gpus % n == 0 and (per_node % n == 0 or n % per_node == 0)):
        if sp == 1:
            yield "local", ParallelDims.arrange(gpus)
            continue
        for name, backend in BACKENDS.spread.items():
            ways = [arrangement for arrangement in backend.arrangements(sp) if heads % arrangement.ulysses == 0]
            if sp > per_node and backend.has_ring_size:
                ways = [arrangement for arrangement in ways if arrangement.ulysses <= per_node][:1]
            for arrangement in ways:
                yield name, ParallelDims.arrange(gpus, ring=arrangement.ring, ulysses=arrangement.ulysses)


def _candidate(
    config: PretrainedConfig,
    model: ModelSizes,
    machine: Machine,
    backend: str,
    dims: ParallelDims,
    preset: str,
    flags: dict[str, Any],
) -> Candidate:
    setup_of = functools.partial(_setup, config, model, machine, backend, dims, flags)
    found = Candidate(
        backend=backend,
        dims=dims,
        memory=preset,
        setup=setup_of({"memory": "balanced" if preset == AUTO else preset}),
        max_length=0,
        binds="device",
        setup_of=setup_of,
    )
    return with_reach(found, machine)


def _setup(
    config: PretrainedConfig,
    model: ModelSizes,
    machine: Machine,
    backend: str,
    dims: ParallelDims,
    flags: dict[str, Any],
    memory_options: Mapping[str, Any],
) -> MemorySetup:
    """Return the set-up with these memory options, by flag, and their preset as `memory`."""
    preset, asked = memory_options.get("memory", "balanced"), {k: v for k, v in memory_options.items() if k != "memory"}
    in_4_bit, is_compiled = flags.get("load_in_4bit"), bool(flags.get("torch_compile"))
    on_fsdp2 = in_4_bit or is_compiled  # which shards 4-bit weights
    engine = "none" if dims.world_size == 1 else "fsdp2" if on_fsdp2 else BACKENDS[backend].engine
    offloads = preset == "longest" or asked.get("offload_optimizer_device") == CPU
    if engine == "none" and offloads and not in_4_bit:
        engine = "deepspeed"  # only DeepSpeed offloads states of a single device
    stage = 3 if engine == "deepspeed" else None
    place = RunTraits(
        backend_can_chunk=BACKENDS[backend].can_chunk,
        exchanges_heads=dims.ulysses > 1,
        engine=engine,
        zero_stage=stage,
        bf16=True,
        local_tokens=LONG_ROW // dims.sp,
        has_linear_attention=recurrent_sizes(config) is not None,
        num_layers=model.num_layers,
        is_compiled=is_compiled,
    )
    resolved = resolve_memory_options(preset, asked, place, checkpoints_by_default=True).settings()
    if in_4_bit:
        from longctx.model.adapter import check_quantization

        check_quantization({**flags, "memory": preset, **resolved}, config, engine, use_cpu=False)
    setup = MemorySetup.of_settings(
        model,
        {**flags, "memory": preset, **resolved},
        dims=dims,
        backend=backend,
        engine=engine,
        zero_stage=stage,
        use_cpu=False,
        ranks_per_node=min(machine.gpus_per_node, machine.gpus),
    )
    return replace(setup, kernel="flash-attn 3") if machine.kernel == "flash-attn 3" else setup


def with_reach(candidate: Candidate, machine: Machine) -> Candidate:
    """Return the candidate with the length that fits; memory options of auto go as far as any of FARTHEST."""
    setups = [candidate.setup]
    if candidate.memory == AUTO:
        for memory_options in FARTHEST:
            with suppress(ValueError):
                setups.append(candidate.setup_of(memory_options))
    longest = max(reach(setup, machine.device_bytes, machine.host_bytes) for setup in setups)
    return replace(candidate, max_length=longest.length, binds=longest.binds)


def outlook(candidate: Candidate, machine: Machine, length: int, documents: RowLengths = one_document) -> Outlook:
    """Return the forecast of the candidate for sequences of `length` tokens."""
    padded = -(-length // candidate.dims.multiple) * candidate.dims.multiple
    lengths = [*documents(length), *([padded - length] if padded > length else [])]
    if candidate.memory == AUTO:
        candidate = _tuned(candidate, machine, padded, lengths)
    candidate = replace(candidate, setup=_with_overlap(candidate.setup, machine, lengths))
    memory = predict(candidate.setup, padded)
    used = max(memory.device_bytes / machine.device_bytes, memory.host_bytes / machine.host_bytes)
    time = step_time(candidate.setup, padded, machine.speeds, documents=lengths) if used <= 1 else None
    return Outlook(candidate=candidate, length=length, memory=memory, time=time, used=used)


def _with_overlap(setup: MemorySetup, machine: Machine, documents: Sequence[int]) -> MemorySetup:
    """Return the set-up with an exchange that overlaps with attention where longctx.train would choose that."""
    if setup.heads_k_stride is not None or setup.sequence_chunk_size is not None:
        return setup
    attention, arrangement = attention_setup(setup, machine.speeds.device)
    known = Documents(rows=[np.asarray(documents)], source="the plan's")
    return replace(setup, overlap_exchange=exchange_overlaps(attention, arrangement, known))


def _tuned(candidate: Candidate, machine: Machine, length: int, documents: Sequence[int]) -> Candidate:
    """Return the candidate with the fastest memory options for this length, or as it is if none fit."""
    found = fastest_memory_options(
        candidate.setup_of,
        {},
        length=length,
        documents=documents,
        speeds=machine.speeds,
        room=Room(device_bytes=machine.device_bytes, host_bytes=machine.host_bytes),
    )
    return candidate if found is None else replace(candidate, setup=found.setup, memory_options=found.asked)


def ranked(outlooks: Sequence[Outlook]) -> list[Outlook]:
    """Return what fits, the best first: by speed, and what leaves less than FREE_PART of a memory free at the end."""
    fitting = [outlook for outlook in outlooks if outlook.time is not None]
    return sorted(fitting, key=lambda outlook: (not outlook.has_room, -outlook.speed))


def recommend(outlooks: Sequence[Outlook]) -> Outlook | None:
    """Return the first outlook of those that are as good as the best; None if nothing fits."""
    order = ranked(outlooks)
    if not order:
        return None
    as_room = [outlook for outlook in outlooks if outlook.time is not None and outlook.has_room == order[0].has_room]
    return next(outlook for outlook in as_room if outlook.speed >= order[0].speed / A_TIE)


def next_best(outlooks: Sequence[Outlook]) -> Outlook | None:
    """Return what is recommended without the sp and the preset of the recommended outlook; None if nothing is left."""
    best = recommend(outlooks)
    if best is None:
        return None
    same = best.candidate.dims.sp, best.candidate.memory
    return recommend([one for one in outlooks if (one.candidate.dims.sp, one.candidate.memory) != same])


def why(best: Outlook, outlooks: Sequence[Outlook]) -> str:
    """Return the reason for a recommendation."""
    free = f"{FREE_PART:.0%} of memory free"
    if not best.has_room:
        return f"the fastest that fits; nothing leaves {free}"
    fastest = max((outlook for outlook in outlooks if outlook.time is not None), key=lambda outlook: outlook.speed)
    text = f"the fastest that leaves {free}"
    if fastest.speed > WORTH_NAMING * best.speed:
        text += f" ({fastest.candidate.label}: {fastest.speed:,.0f} tokens/s a device, and {fastest.used:.0%} full)"
    return text

"""What traces of the model at hand say of the closed form: a factor for its layers, and the recommendation retraced.

A closed form knows the decoder layer that most models have. One with more norms, another MLP or experts saves more or
less, and what a backend or a preset has in hand is counted roughly there. So for each backend and preset two steps of
a few layers are traced (`longctx.forecast.traced_step`: fake tensors, FSDP2 over a fake process group), one with twice
the tokens of the other: the difference is the bytes that a token takes, states and buffers cancelling out. Tokens times
bytes is what any length takes at any degree, so one number corrects all: `MemorySetup.layer_factor`, which scales
everything that a layer saves and makes, and so counts once where layers are checkpointed and for every layer where they
are not. Checkpoints, states and the loss stay the closed form's.

DeepSpeed runs on no fake tensors: its twin on FSDP2 is traced, and ZeRO's states and buffers stay formulas, which
`benchmarks.memory` holds against real runs. FlashAttention-2 is the kernel of all traces.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from transformers import PretrainedConfig

from longctx.attention.backends import BACKENDS
from longctx.forecast.candidates import Candidate, Machine, Outlook
from longctx.forecast.closed_form import Reach, predict, reach
from longctx.forecast.memory_setup import MemorySetup
from longctx.forecast.memory_trace import GRADIENTS, OPTIMIZER_STATES, PARAMETERS
from longctx.forecast.model_sizes import ModelSizes
from longctx.forecast.traced_step import StepSettings, trace_training_step

VOCAB_SIZE = 1024
"""Of the models that calibrate: the loss is not what they are about."""
FEW, MANY = 0.25, 4.0
"""Factors outside of which something else than a layer peaks."""
MOST_TILES = 8
"""Of a retraced step's MLPs, each of which takes its time; longer steps are on the same lines."""


class Calibration(NamedTuple):
    """What the traces of a backend and a preset came to."""

    backend: str
    memory: str
    ulysses: int
    """Of hybrid, where a few of a rank's heads are in hand at a time; 0: of any."""
    factor: float
    """Of the closed form's bytes of a layer."""
    problem: str = ""
    """Why the factor is 1 for want of a trace."""


@dataclass(frozen=True, kw_only=True)
class Retraced:
    """The recommendation's own trace."""

    traced_bytes: float
    """Allocated at the device's peak, in the trace; of its twin on FSDP2 where the engine is DeepSpeed."""
    predicted_bytes: float
    """The same, by the closed form."""
    device_bytes: float
    """All that a device has to have, where the trace is right."""
    longest: Reach
    """The longest row, corrected likewise."""
    stands_in: bool
    """Whether it is FSDP2's trace in the place of DeepSpeed's."""


def calibrate(config: PretrainedConfig, found: Sequence[Candidate]) -> list[Calibration]:
    """By traces, of each kind of candidate, at its smallest sp; what cannot be traced keeps the closed form."""
    groups: dict[tuple[str, str, int], list[Candidate]] = {}
    for candidate in found:
        groups.setdefault(_kind(candidate), []).append(candidate)
    results = []
    for kind, group in groups.items():
        least = min(group, key=lambda candidate: candidate.dims.sp)
        try:
            results.append(Calibration(*kind, layer_factor(config, least.setup)))
        except (RuntimeError, ValueError, TypeError) as error:
            problem = str(error).strip().partition("\n")[0]
            results.append(Calibration(*kind, 1.0, problem or type(error).__name__))
    return results


def corrected(found: Sequence[Candidate], machine: Machine, calibrations: Sequence[Calibration]) -> list[Candidate]:
    """The candidates with the layers that traces found."""
    factors = {(c.backend, c.memory, c.ulysses): c.factor for c in calibrations}
    result = []
    for candidate in found:
        setup = replace(candidate.setup, layer_factor=factors[_kind(candidate)])
        longest = reach(setup, machine.device_bytes, machine.host_bytes)
        result.append(replace(candidate, setup=setup, max_length=longest.length, binds=longest.binds))
    return result


def _kind(candidate: Candidate) -> tuple[str, str, int]:
    """Candidates with the same factor: degrees change a token's bytes alike, but for hybrid's heads at a time."""
    by_heads = BACKENDS[candidate.backend].has_ring_size and candidate.setup.heads_k_stride is not None
    return candidate.backend, candidate.memory, candidate.dims.ulysses if by_heads else 0


def layer_factor(config: PretrainedConfig, setup: MemorySetup) -> float:
    """The factor of a layer's bytes with which the closed form says what a trace says of a token.

    Raises:
        ValueError: where no factor does.
        RuntimeError: for a model that does not run on fake tensors.
    """
    small = first_layers(config, pattern_length(config), vocab_size=VOCAB_SIZE)
    twin = replace(traceable(setup), model=ModelSizes.of_config(small), world_size=max(setup.sp, 2))
    if setup.engine == "none":
        twin = replace(twin, world_size=1)
    fewer, more = (2 * times * config.get_text_config().hidden_size for times in (1, 2))
    before, after = (trace_parts(small, _in_two_chunks(twin, tokens), tokens) for tokens in (fewer, more))
    traced = max(after[part][0] - before[part][0] for part in before.keys() & after.keys()) / (more - fewer)

    def predicted(factor: float) -> float:
        long = 512 * fewer  # where nothing constant is left in the difference
        peaks = [
            predict(_in_two_chunks(replace(twin, layer_factor=factor), tokens), tokens * twin.sp).allocated_bytes
            for tokens in (long, 2 * long)
        ]
        return (peaks[1] - peaks[0]) / long

    low, high = FEW, MANY
    if not predicted(low) < traced < predicted(high):
        raise ValueError(
            f"a token takes {traced:,.0f} bytes in a trace, and the closed form says {predicted(1.0):,.0f}"
        )
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if predicted(middle) < traced else (low, middle)
    return (low + high) / 2


def _in_two_chunks(setup: MemorySetup, tokens: int) -> MemorySetup:
    """What is chunked has its layer in hand for a chunk's tokens alone: they have to grow for it to grow."""
    return setup if setup.sequence_chunk_size is None else replace(setup, sequence_chunk_size=tokens // 2)


def retrace(config: PretrainedConfig, outlook: Outlook, machine: Machine) -> Retraced:
    """Trace the step of an outlook: its backend, degrees, levers and length.

    What the device holds in a part of the step is linear in the layers, which are alike, and in the tokens: traces of
    two depths and two lengths, the step's own where that is short enough, give the whole model's.

    Raises:
        ValueError, RuntimeError: for a model that cannot be traced.
    """
    setup = outlook.candidate.setup
    twin = replace(traceable(setup), model=ModelSizes.of_config(config))
    traced = _traced_bytes(config, twin, int(setup.local_tokens(outlook.length)))

    def missing(length: int) -> float:
        return traced(setup.local_tokens(length)) - predict(twin, length).allocated_bytes

    longest = outlook.candidate.max_length
    for _ in range(4):  # what is missing hardly changes with the length
        found = reach(setup, machine.device_bytes, machine.host_bytes, beside_device=missing(max(longest, setup.sp)))
        longest = found.length
    return Retraced(
        traced_bytes=traced(setup.local_tokens(outlook.length)),
        predicted_bytes=predict(twin, outlook.length).allocated_bytes,
        device_bytes=predict(setup, outlook.length).device_bytes + missing(outlook.length),
        longest=found,
        stands_in=setup.engine.startswith("zero"),
    )


def _traced_bytes(config: PretrainedConfig, setup: MemorySetup, tokens: int) -> Callable[[float], float]:
    """Tokens of a rank -> bytes at the device's peak, of all layers."""
    text = config.get_text_config()
    unit = max(2 * setup.ring, setup.ulysses)
    if setup.sequence_chunk_size is not None:
        more = 4 * setup.sequence_chunk_size
    else:
        most = tokens if setup.tiled_mlp_num_shards is None else min(tokens, MOST_TILES * text.hidden_size)
        more = max(2, most // unit) * unit
    fewer = -(-more // 2 // unit) * unit
    all_layers, few = text.num_hidden_layers, pattern_length(config)
    depths = sorted({few, min(2 * few, all_layers)})
    traces = {
        (depth, size): trace_parts(first_layers(config, depth), setup, size)
        for depth in depths
        for size in (fewer, more)
    }
    lines = []
    for part in set.intersection(*(set(parts) for parts in traces.values())):
        ends = []
        for size in (fewer, more):
            shallow, deep = (traces[depth, size][part][0] for depth in (depths[0], depths[-1]))
            ends.append(deep + (deep - shallow) / max(1, depths[-1] - depths[0]) * (all_layers - depths[-1]))
        slope = (ends[1] - ends[0]) / (more - fewer)
        lines.append((ends[1] - slope * more, slope))
    return lambda local: max(constant + slope * local for constant, slope in lines)


def trace_parts(config: PretrainedConfig, setup: MemorySetup, tokens: int) -> dict[str, tuple[int, int]]:
    """The most (device, host) bytes in every part of a step of one row, as `MemoryTrace.peaks`.

    Args:
        tokens: of a rank.
    """
    on_host = (PARAMETERS, GRADIENTS, OPTIMIZER_STATES) if setup.offload_param != "none" else ()
    checkpointing = {"offload": setup.activation_offloading, "every_n_layers": setup.every_n_layers}
    levers = {
        name: getattr(setup, name)
        for name in ("selective_checkpointing", "tiled_mlp_num_shards", "heads_k_stride", "sequence_chunk_size")
    }
    settings = StepSettings(
        length=tokens * setup.sp,
        sp=setup.sp,
        dp=setup.world_size // setup.sp,
        engine=setup.engine,
        sp_backend=setup.backend,
        reduce_dtype=torch.bfloat16 if setup.reduce_bytes == 2 else torch.float32,
        activation_checkpointing=checkpointing if setup.gradient_checkpointing else None,
        on_host=on_host,
        levers=levers | ({"ring_size": setup.ring} if BACKENDS[setup.backend].has_ring_size else {}),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trace_training_step(config, settings).peaks


def traceable(setup: MemorySetup) -> MemorySetup:
    """The same on FSDP2 where the engine is DeepSpeed, and in full precision where weights are in 4 bits."""
    setup = replace(setup, quantized_weight_bytes=None)
    if not setup.engine.startswith("zero"):
        return setup
    return replace(setup, engine="fsdp2", offload_optimizer="none", offload_param="none", bucket_size=None)


def pattern_length(config: PretrainedConfig) -> int:
    """The fewest layers, two at least, that hold every kind of the model's."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or []
    return min(max([2, *(kinds.index(kind) + 1 for kind in set(kinds))]), text.num_hidden_layers)


def first_layers(config: PretrainedConfig, num_layers: int, **changes: int) -> PretrainedConfig:
    """The configuration of a model of its first layers, without a pad token, which an embedding may not have."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    all_layers = text.num_hidden_layers
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == all_layers:  # layer_types, no_rope_layers
            setattr(text, name, value[:num_layers])
    for name, value in {"num_hidden_layers": num_layers, "pad_token_id": None, **changes}.items():
        setattr(text, name, value)
    return config

"""Corrections of the closed form by traces of the model: a factor for its layers, and a trace of the recommended run.

The closed form counts the decoder layer that most models have. A layer with more norms, another MLP or experts saves
more or less, and the temporary memory of backends and presets is only roughly counted. So for each backend and preset
two steps of a few layers are traced (`longctx.forecast.traced_step`: fake tensors, FSDP2 over a fake process group),
one with twice the tokens of the other. Their difference is the bytes that a token takes, since states and buffers
cancel out. A token takes as many bytes at any length and degree, so one number corrects all:
`MemorySetup.layer_factor`, which scales everything that a layer saves and makes. It counts once if layers are
checkpointed, and for every layer if they are not. Checkpoints, states and the loss stay those of the closed form.

DeepSpeed does not run on fake tensors. The same run on FSDP2 is traced instead, and ZeRO's states and buffers stay
formulas, which `benchmarks.memory` compares with real runs. All traces use FlashAttention-2.
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
from longctx.forecast.candidates import Candidate, Machine, Outlook, with_reach
from longctx.forecast.closed_form import Reach, predict, reach
from longctx.forecast.memory_options import AUTO
from longctx.forecast.memory_setup import MemorySetup
from longctx.forecast.memory_trace import GRADIENTS, OPTIMIZER_STATES, PARAMETERS
from longctx.forecast.model_sizes import ModelSizes
from longctx.forecast.traced_step import StepSettings, trace_training_step
from longctx.layers.chunked.tiles import tile_tokens

VOCAB_SIZE = 1024
"""Vocabulary of the traced models, which is small since the loss is not calibrated."""
FEW, MANY = 0.25, 4.0
"""The least and the largest factor. Beyond them the peak is not in a layer."""
MOST_TILES = 8
"""Most tiles in a retraced MLP, since each takes time to trace. The memory of longer steps is extrapolated."""


class Calibration(NamedTuple):
    """The result of the traces of a backend and a preset."""

    backend: str
    memory: str
    ulysses: int
    """Ulysses degree of a hybrid that computes a few heads at a time; 0 means any degree."""
    factor: float
    """Factor of the closed form's bytes of a layer."""
    problem: str = ""
    """Why there is no trace, so that the factor is 1."""


@dataclass(frozen=True, kw_only=True)
class Retraced:
    """A trace of the recommended run."""

    traced_bytes: float
    """Bytes allocated at the device's peak in the trace, which is of FSDP2 if the engine is DeepSpeed."""
    predicted_bytes: float
    """The same bytes by the closed form."""
    device_bytes: float
    """Bytes that a device needs according to the trace."""
    longest: Reach
    """The longest sequence that fits according to the trace."""
    stands_in: bool
    """Whether FSDP2 was traced in place of DeepSpeed."""


def calibrate(config: PretrainedConfig, found: Sequence[Candidate]) -> list[Calibration]:
    """Trace each kind of candidate at its smallest sp, and return the factors.

    A kind that cannot be traced keeps the closed form, with a factor of 1.
    """
    groups: dict[tuple[str, str, int], list[Candidate]] = {}
    for candidate in found:
        if candidate.memory != AUTO:
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
    """Return the candidates with the factors of their kinds, and with the lengths that fit then.

    Memory options of auto have the largest factor of their backend.
    """
    factors = {(c.backend, c.memory, c.ulysses): c.factor for c in calibrations}
    result = []
    for candidate in found:
        if candidate.memory == AUTO:
            factor = max(c.factor for c in calibrations if c.backend == candidate.backend)
        else:
            factor = factors[_kind(candidate)]
        corrected = replace(candidate, setup=replace(candidate.setup, layer_factor=factor))
        result.append(with_reach(corrected, machine))
    return result


def _kind(candidate: Candidate) -> tuple[str, str, int]:
    """Return the kind of a candidate, whose members share a factor.

    Degrees do not matter, except the Ulysses degree of a hybrid that computes a few heads at a time.
    """
    by_heads = BACKENDS[candidate.backend].has_ring_size and candidate.setup.heads_k_stride is not None
    return candidate.backend, candidate.memory, candidate.dims.ulysses if by_heads else 0


def layer_factor(config: PretrainedConfig, setup: MemorySetup) -> float:
    """Return the factor of a layer's bytes with which the closed form gives the traced bytes of a token.

    Raises:
        ValueError: if no factor does.
        RuntimeError: for a model that does not run on fake tensors.
    """
    small = first_layers(config, pattern_length(config), vocab_size=VOCAB_SIZE)
    twin = replace(traceable(setup), model=ModelSizes.of_config(small), world_size=max(setup.sp, 2))
    if setup.engine == "none":
        twin = replace(twin, world_size=1)
    width = config.get_text_config().hidden_size
    tile = width if setup.tiled_mlp_num_shards is None else tile_tokens(width)
    fewer, more = (2 * times * tile for times in (1, 2))
    before, after = (trace_parts(small, _in_two_chunks(twin, tokens), tokens) for tokens in (fewer, more))
    traced = max(after[part][0] - before[part][0] for part in before.keys() & after.keys()) / (more - fewer)

    def predicted(factor: float) -> float:
        long = 512 * fewer  # so long that constants cancel out of the difference
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
    """Return the setup with chunks of half the tokens, if it is chunked.

    Only one chunk of a layer is on the device at a time, so it has to grow with the tokens.
    """
    return setup if setup.sequence_chunk_size is None else replace(setup, sequence_chunk_size=tokens // 2)


def retrace(config: PretrainedConfig, outlook: Outlook, machine: Machine) -> Retraced:
    """Trace the step of an outlook with its backend, degrees, memory options and length.

    The memory in each part of the step is linear in the number of layers, if these are alike, and in the tokens. So two
    depths and two lengths are traced, of which one is the step's own if that is short, and the rest is extrapolated.
    Where layers differ in what they keep, all of them are traced.

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
    """Return a function from the tokens of a rank to the bytes at the device's peak, of all layers."""
    text = config.get_text_config()
    unit = max(2 * setup.ring, setup.ulysses)
    if setup.sequence_chunk_size is not None:
        more = 4 * setup.sequence_chunk_size
    else:
        most = tokens if setup.tiled_mlp_num_shards is None else min(tokens, MOST_TILES * tile_tokens(text.hidden_size))
        more = max(2, most // unit) * unit
    fewer = -(-more // 2 // unit) * unit
    all_layers, few = text.num_hidden_layers, pattern_length(config)
    depths = [all_layers] if setup.differs_by_layer else sorted({few, min(2 * few, all_layers)})
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
    """Return the most (device, host) bytes in every part of a step of one sequence, as `MemoryTrace.peaks`.

    Args:
        tokens: tokens of a rank.
    """
    on_host = (PARAMETERS, GRADIENTS, OPTIMIZER_STATES) if setup.offload_param != "none" else ()
    by_layer = setup.differs_by_layer
    checkpointing = {"offload": setup.activation_offloading and not by_layer, "every_n_layers": setup.every_n_layers}
    memory_options = {
        name: getattr(setup, name)
        for name in ("selective_checkpointing", "tiled_mlp_num_shards", "heads_k_stride", "sequence_chunk_size")
    }
    if by_layer:
        memory_options |= {"whole_layers": setup.whole_layers, "selective_checkpointing": int(setup.num_selective)}
        offloaded = setup.num_offloaded if setup.sequence_chunk_size is None else setup.offloaded_layers
        memory_options |= {"offloaded_layers": None if offloaded is None else int(offloaded)}
    settings = StepSettings(
        length=tokens * setup.sp,
        sp=setup.sp,
        dp=setup.world_size // setup.sp,
        engine=setup.engine,
        sp_backend=setup.backend,
        reduce_dtype=torch.bfloat16 if setup.reduce_bytes == 2 else torch.float32,
        activation_checkpointing=checkpointing if setup.gradient_checkpointing else None,
        saved_on_host=setup.activation_offloading and by_layer,
        on_host=on_host,
        memory_options=memory_options | ({"ring_size": setup.ring} if BACKENDS[setup.backend].has_ring_size else {}),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trace_training_step(config, settings).peaks


def traceable(setup: MemorySetup) -> MemorySetup:
    """Return a setup that can be traced: on FSDP2 in place of DeepSpeed, without 4-bit weights or Liger's kernels."""
    setup = replace(setup, quantized_weight_bytes=None, fused_layers=False)
    if not setup.engine.startswith("zero"):
        return setup
    return replace(setup, engine="fsdp2", offload_optimizer="none", offload_param="none", bucket_size=None)


def pattern_length(config: PretrainedConfig) -> int:
    """Return how many of the first layers, at least two, contain every kind of the model's layers."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or []
    return min(max([2, *(kinds.index(kind) + 1 for kind in set(kinds))]), text.num_hidden_layers)


def first_layers(config: PretrainedConfig, num_layers: int, **changes: int) -> PretrainedConfig:
    """Return the configuration with only the first layers.

    It has no pad token, which may be beyond a smaller vocabulary.
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    all_layers = text.num_hidden_layers
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == all_layers:  # layer_types, no_rope_layers
            setattr(text, name, value[:num_layers])
    if hasattr(text, "num_kv_shared_layers"):  # of earlier layers, which the first ones are
        changes["num_kv_shared_layers"] = 0
    for name, value in {"num_hidden_layers": num_layers, "pad_token_id": None, **changes}.items():
        setattr(text, name, value)
    return config

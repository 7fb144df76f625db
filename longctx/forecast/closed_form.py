"""A step's peak memory in closed form, by category, and the longest sequence that fits.

Memory peaks at one of a few moments: the loss, or in a layer the backward pass of the MLP, of the norm before it, or of
attention; in a sequence-chunked step also that of the projections before attention. A prediction takes the largest of
them. It is made of

- `longctx.forecast.memory_setup`: what memory depends on, the model's sizes (`longctx.forecast.model_sizes`) included;
- `longctx.forecast.layer_memory`: what a layer saves and what its backward pass adds;
- parameters, gradients and optimizer states, by engine and by where they are kept (`placed_states`);
- `longctx.forecast.coefficients`: every constant with its source. Most are counted in code. Four cannot be, and are
  fitted to published runs.

A closed form predicts and never measures: `benchmarks.closed_form` compares it with published lengths, and tests
compare it with traces. Sizes are bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from longctx.forecast import coefficients
from longctx.forecast.coefficients import (
    ADAMW_STATE_BYTES,
    FP32,
    FP32_LOGIT_BYTES,
    HOST_BUFFERS,
    LOG_SUM_EXP_BYTES,
    LOGIT_BYTES,
    LOSS_TILES,
    TOKEN_BYTES,
)
from longctx.forecast.layer_memory import Layer, chunked_layer_bytes, chunked_moments, layer_bytes
from longctx.forecast.memory_setup import MemorySetup
from longctx.layers.chunked.tiles import tile_tokens
from longctx.layers.loss import TILE_BYTES
from longctx.recurrent.cost import given_bytes, written_bytes


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """The peak of one rank's device and the host memory of its whole node, by category, in bytes."""

    device: Mapping[str, float]
    host: Mapping[str, float]
    moment: str
    """The moment of the device's peak: loss, MLP, norm, attention or projections; or loading, of 4-bit weights."""

    NOT_ALLOCATED = ("copies in flight", "fragmentation", "fixed")
    """Categories of the device that `torch.cuda.max_memory_allocated` does not count."""

    @property
    def device_bytes(self) -> float:
        """Bytes that a GPU needs."""
        return sum(self.device.values())

    @property
    def allocated_bytes(self) -> float:
        """The part of `device_bytes` that tensors take."""
        return sum(size for name, size in self.device.items() if name not in self.NOT_ALLOCATED)

    @property
    def host_bytes(self) -> float:
        return sum(self.host.values())


class Reach(NamedTuple):
    """The longest sequence that fits."""

    length: int
    binds: Literal["device", "host"]
    """The memory that is full at this length."""


def predict(setup: MemorySetup, length: int) -> Breakdown:
    """Return the peak memory of a step whose sequences have `length` tokens each, before they are cut."""
    moments = _moments(setup, length)
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    device, host = moments[moment], _host(setup, setup.local_tokens(length))
    if setup.is_cpu:
        host |= {name: host.get(name, 0.0) + size * setup.ranks_per_node for name, size in device.items()}
        device = {}
    return Breakdown(device=_present(device), host=_present(host), moment=moment)


def peak_bytes(setup: MemorySetup, length: int) -> tuple[Any, Any]:
    """Return the bytes that a GPU and the host of a node need, as `predict`; arrays if the setup has arrays."""
    device = functools.reduce(np.maximum, (sum(sizes.values()) for sizes in _moments(setup, length).values()))
    host = sum(_host(setup, setup.local_tokens(length)).values())
    return (np.zeros_like(device), host + setup.ranks_per_node * device) if setup.is_cpu else (device, host)


def max_length(setup: MemorySetup, device_bytes: float, host_bytes: float) -> int:
    """Return the length of the longest sequences that fit; 0 if none do.

    Args:
        device_bytes: memory of one GPU.
        host_bytes: host memory of one node.
    """
    return reach(setup, device_bytes, host_bytes).length


def reach(
    setup: MemorySetup,
    device_bytes: float,
    host_bytes: float,
    *,
    beside_device: float = 0.0,
    beside_host: float = 0.0,
) -> Reach:
    """Return the longest sequence that fits, as `max_length`, and which memory limits it.

    Args:
        beside_device, beside_host: bytes that the prediction leaves out at any length, such as the difference to a
            measured peak.
    """

    def full(length: int) -> Literal["device", "host"] | None:
        peak = predict(setup, length)
        if peak.device_bytes + beside_device > device_bytes and not setup.is_cpu:
            return "device"
        return "host" if peak.host_bytes + beside_host > host_bytes else None

    fits, too_long = 0, setup.sp
    while (binds := full(too_long)) is None:
        fits, too_long = too_long, 2 * too_long
        if too_long > 2**48:
            raise ValueError(
                f"{device_bytes:.3g} bytes of the device and {host_bytes:.3g} of the host limit no length. Use "
                "finite numbers."
            )
    while too_long - fits > max(setup.sp, fits // 4096):
        middle = (fits + too_long) // 2
        found = full(middle)
        fits, too_long, binds = (middle, too_long, binds) if found is None else (fits, middle, found)
    return Reach(fits, binds)


def _present(sizes: Mapping[str, float]) -> Mapping[str, float]:
    return MappingProxyType({name: float(size) for name, size in sizes.items() if size})


def _moments(setup: MemorySetup, length: int) -> dict[str, dict[str, Any]]:
    """Return the device's memory at each moment, by category."""
    tokens, layer = setup.local_tokens(length), layer_bytes(setup)
    model, b, stream = setup.model, setup.element_size, setup.stream_size
    at_once = min(tokens, setup.sequence_chunk_size or tokens)
    last = (stream + 2 * b + (0 if setup.fused_layers else 4)) * model.hidden_size
    kept = _checkpoints(setup, layer) * tokens
    fetched = stream * model.hidden_size * np.minimum(setup.num_offloaded, 1) * at_once
    at_loss = {
        "checkpoints": kept + fetched,
        "hidden states": last * at_once,
        "logits and loss": _logits(setup, tokens),
    }
    # In a layer's backward pass, what the layer keeps is no longer counted as kept.
    last_is_whole = np.minimum(setup.whole_layers, 1) if setup.gradient_checkpointing else 1
    of_last = (_whole(setup, layer) - _input(setup)) * last_is_whole * tokens
    others = {"checkpoints": kept - of_last + fetched}
    if setup.sequence_chunk_size is None:
        moments = _layer_moments(setup, layer, tokens)
    else:
        moments, others = chunked_moments(setup, layer, tokens), {"checkpoints": kept}
    states = device_states(setup)
    beside = {} if setup.is_cpu else {"copies in flight": _copies_in_flight(setup, tokens)}
    always = {"tokens": TOKEN_BYTES * tokens}
    loading = {}
    if setup.quantized_weight_bytes is not None and setup.engine == "fsdp2":
        loading = {"loading": {"parameters": loaded_weights(setup)} | _unallocated(setup, {}, {})}
    return loading | {
        name: with_gradients(setup, states | _unsharded(setup, name) | sizes) | _unallocated(setup, sizes, beside)
        for name, sizes in {
            "loss": always | at_loss,
            **{name: always | others | sizes for name, sizes in moments.items()},
        }.items()
    }


def _unsharded(setup: MemorySetup, moment: str) -> dict[str, float]:
    return {"unsharded parameters": unsharded_parameters(setup, at_loss=moment == "loss")}


def _layer_moments(setup: MemorySetup, layer: Layer, tokens: float) -> dict[str, dict[str, Any]]:
    """Return what a whole layer has on the device at each moment of its backward pass, by category."""
    model, stream, in_tiles = setup.model, setup.stream_size, tokens
    if setup.tiled_mlp_num_shards is not None:
        in_tiles = tokens / (setup.tiled_mlp_num_shards or max(1, math.ceil(tokens / tile_tokens(model.hidden_size))))
    tiled = 3 * setup.element_size * model.hidden_size if in_tiles < tokens else 0  # inputs, outputs, gradients, whole
    return {
        "attention": {
            "hidden states": (layer.norm_before_attention + stream * model.hidden_size) * tokens,
            "attention": (layer.attention + layer.attention_backward) * tokens,
            "exchange": layer.exchange * tokens + _maps(setup),
            "scan": 0.0 if model.recurrent is None else written_bytes(model.recurrent, tokens),
        },
        "norm": {
            "hidden states": (layer.norm_before_attention + 4 * model.hidden_size + layer.norm_backward) * tokens,
            "attention": layer.attention * tokens,
        },
        "MLP": {
            "hidden states": (layer.norm_before_attention + layer.norm_before_mlp) * tokens,
            "attention": layer.attention * tokens,
            "MLP": (layer.mlp + layer.mlp_backward) * in_tiles + tiled * tokens,
        },
    }


def _maps(setup: MemorySetup) -> float:
    """Return the bytes of what ranks gather of the states of recurrent layers, and of its gradients."""
    if setup.model.recurrent is None or setup.sp == 1:
        return 0.0
    return 2 * given_bytes(setup.model.recurrent, setup.sp, 2 if setup.ring > 1 else 1)


def _unallocated(setup: MemorySetup, activations: Mapping[str, Any], beside: Mapping[str, Any]) -> dict[str, Any]:
    """Return the categories of a GPU that no tensor takes, and `beside`."""
    if setup.is_cpu:
        return {}
    communicators = (setup.world_size > 1) + (setup.sp > 1)
    # Fitted coefficients are read from their module, where a fit sets them.
    return {
        **beside,
        "fragmentation": coefficients.FRAGMENTATION * (sum(activations.values()) + sum(beside.values())),
        "fixed": coefficients.CONTEXT_BYTES + coefficients.COMMUNICATOR_BYTES * communicators,
    }


def _checkpoints(setup: MemorySetup, layer: Layer) -> float:
    """Return the bytes per token that all layers keep on the device for their backward pass."""
    whole = setup.model.num_layers - setup.num_checkpointed
    on_device = setup.num_checkpointed - setup.num_offloaded
    selective = setup.num_selective - setup.num_selective_offloaded
    return whole * _whole(setup, layer) + _kept(setup, on_device, selective)


def _whole(setup: MemorySetup, layer: Layer) -> float:
    """Return the bytes per token that a layer keeps without checkpointing; tiles of an MLP keep only their input."""
    return _input(setup) + layer.saved - layer.mlp * (setup.tiled_mlp_num_shards is not None)


def _input(setup: MemorySetup) -> float:
    """Return the bytes per token of a layer's input that its first norm keeps; of bf16, a stock norm keeps a copy."""
    return setup.stream_size * setup.model.hidden_size * (setup.fused_layers or setup.stream_size == FP32)


def _kept(setup: MemorySetup, layers: int, selective: int) -> float:
    """Return the bytes per token of the inputs of `layers` layers, and of the outputs of attention of `selective`."""
    model, b = setup.model, setup.element_size
    output = b * model.query_size + LOG_SUM_EXP_BYTES * model.num_heads
    return layers * setup.stream_size * model.hidden_size + selective * output


def _logits(setup: MemorySetup, tokens: float) -> float:
    vocab = setup.model.vocab_size
    if not setup.fused_loss:
        return (LOGIT_BYTES if setup.bf16 else FP32_LOGIT_BYTES) * vocab * tokens
    tile = min(FP32 * vocab * tokens, max(TILE_BYTES, FP32 * vocab))
    head_gradient = FP32 * vocab * setup.model.hidden_size  # summed up over the tiles
    if setup.quantized_weight_bytes is not None:
        head_gradient = 0  # the head is frozen
    return LOSS_TILES * tile + head_gradient


def _host(setup: MemorySetup, tokens: float) -> dict[str, float]:
    """Return the host memory of a whole node that its devices use, by category."""
    placed = placed_states(setup)
    is_zero = setup.engine.startswith("zero")
    gradients = FP32 / setup.reduce_bytes if is_zero else 1  # the optimizer on the host has its own copies, in fp32
    states = {
        "parameters": placed["parameters"] if setup.offload_param == "cpu" else 0.0,
        "gradients": gradients * placed["gradients"] if gradients_on_host(setup) else 0.0,
        "optimizer states": placed["optimizer states"] if setup.offload_optimizer == "cpu" else 0.0,
    }
    states["buffers"] = HOST_BUFFERS * sum(states.values()) if is_zero else 0.0
    chunked = setup.sequence_chunk_size is not None
    checkpoints = _kept(setup, setup.num_offloaded, setup.num_selective_offloaded)
    of_rank = states | {
        "checkpoints": checkpoints * tokens,
        "sequence chunks": chunked_layer_bytes(setup) * tokens if chunked else 0.0,
    }
    return {name: size * setup.ranks_per_node for name, size in of_rank.items()}


def _copies_in_flight(setup: MemorySetup, tokens: float) -> float:
    if setup.sequence_chunk_size is not None:
        return 0.0  # a sequence-chunked step waits for copies before it frees what they read
    layers = coefficients.COPIES_IN_FLIGHT * np.minimum(setup.num_offloaded, 1)
    return layers * setup.stream_size * setup.model.hidden_size * tokens


def device_states(setup: MemorySetup) -> dict[str, float]:
    """Return the bytes of the states that are on the device throughout, by category."""
    placed = placed_states(setup)
    on_device = {
        "parameters": setup.offload_param == "none",
        "gradients": not gradients_on_host(setup),
        "optimizer states": setup.offload_optimizer == "none",
    }
    return {name: size if on_device[name] else 0.0 for name, size in placed.items()}


def placed_states(setup: MemorySetup) -> dict[str, float]:
    """Return the bytes of one rank's states by category, wherever they are."""
    model, shards = setup.model, setup.world_size / setup.dp_replicate
    parameters, trained = model.num_parameters, model.num_trained_parameters
    if not setup.engine.startswith("zero"):
        spread = shards if setup.engine == "fsdp2" else 1
        each = setup.weight_bytes / spread
        weights = each * parameters
        if setup.quantized_weight_bytes is not None:
            weights = each * (parameters - model.linear_parameters) + _quantized_part(setup)
            each = FP32 / spread  # peft keeps adapters in fp32
            weights += each * trained
        return {"parameters": weights, "gradients": each * trained, "optimizer states": 2 * each * trained}
    stage = int(setup.engine.removeprefix("zero"))
    return {
        "parameters": setup.element_size * parameters / (shards if stage == 3 else 1),
        "gradients": setup.reduce_bytes * trained / (shards if stage >= 2 else 1),
        "optimizer states": ADAMW_STATE_BYTES * trained / shards,
    }


def gradients_on_host(setup: MemorySetup) -> bool:
    """Whether gradients are kept on the host.

    ZeRO-2 and 3 add gradients up where the optimizer is; FSDP2 offloads all states or none.
    """
    if setup.engine == "fsdp2":
        return setup.offload_param != "none"
    return setup.engine in ("zero2", "zero3") and setup.offload_optimizer != "none"


def with_gradients(setup: MemorySetup, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes with only the gradients and checkpoints that are there at the same time.

    The first layer's backward pass finds all other gradients, the last layer's all checkpoints; the larger counts.
    ZeRO, and a run that accumulates, have all gradients throughout.
    """
    if setup.engine.startswith("zero") or setup.accumulates_gradients:
        return sizes
    model, gradients = setup.model, sizes["gradients"]
    of_head = gradients * model.vocab_size * model.hidden_size / model.num_parameters
    others = sizes["checkpoints"] * (1 - 1 / model.num_layers)
    at_last = others > gradients - of_head
    return sizes | {
        "gradients": np.where(at_last, of_head, gradients)[()],
        "checkpoints": np.where(at_last, sizes["checkpoints"], sizes["checkpoints"] - others)[()],
    }


def loaded_weights(setup: MemorySetup) -> float:
    """Return the bytes of weights that a rank has loaded with --load_in_4bit, before FSDP2 wraps the model.

    Of 4-bit weights it keeps its part; embeddings and head are still whole.
    """
    others = setup.model.num_parameters - setup.model.linear_parameters
    return _quantized_part(setup) + setup.weight_bytes * others


def _quantized_part(setup: MemorySetup) -> float:
    """Return the bytes of a rank's 4-bit weights, scales included."""
    assert setup.quantized_weight_bytes is not None, "weights are quantised"
    shards = setup.world_size / setup.dp_replicate if setup.engine == "fsdp2" else 1
    return setup.quantized_weight_bytes * setup.model.linear_parameters / shards


def _unsharded_quantized(setup: MemorySetup, quantized_weight_bytes: float, at_loss: bool) -> float:
    """Return the same for 4-bit weights: a dequantised matrix for its products, and on FSDP2 what is gathered.

    The head, which is not quantised, is gathered for the loss.
    """
    model, b = setup.model, setup.element_size
    numbers = b + (setup.weight_bytes if setup.weight_bytes != b else 0)
    matrix = (
        numbers * model.hidden_size * (model.query_size if model.num_experts_per_token else model.intermediate_size)
    )
    if setup.engine == "none":
        return 0.0 if at_loss else matrix
    linear = model.linear_parameters / model.num_layers
    layer = quantized_weight_bytes * linear + b * (model.layer_parameters - linear)
    return b * model.vocab_size * model.hidden_size + layer if at_loss else matrix + 2 * layer


def unsharded_parameters(setup: MemorySetup, *, at_loss: bool) -> float:
    """Return the bytes of the whole parameters that a layer needs, their gradients, and the buffers of collectives.

    Args:
        at_loss: whether the loss is computed rather than a layer, which matters for 4-bit weights.
    """
    if setup.quantized_weight_bytes is not None:
        return _unsharded_quantized(setup, setup.quantized_weight_bytes, at_loss)
    model, b = setup.model, setup.element_size
    layer, head = model.layer_parameters, model.vocab_size * model.hidden_size
    trains_all = model.num_trained_parameters == model.num_parameters
    gradients, sums = b * layer if trains_all else 0, 0.0
    if setup.sequence_chunk_size is not None:  # a chunk's own gradients come when its activations have gone
        gradients, sums = 0, FP32 * layer * model.num_trained_parameters / model.num_parameters
    if setup.engine == "none":
        return sums + (gradients + b * layer if setup.stream_size > b else 0.0)  # autocast's copies
    if setup.engine == "fsdp2":  # this layer and the next; the head's gradient is reduced meanwhile
        return sums + 2 * b * layer + gradients + (setup.reduce_bytes * max(layer, head) if trains_all else 0)
    bucket = setup.reduce_bytes * min(setup.bucket_size or layer, model.num_trained_parameters)
    gathered = b * min(setup.live_parameters, model.num_parameters) if setup.engine == "zero3" else 0
    return sums + bucket + gathered

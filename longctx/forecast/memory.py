"""Bytes that a rank's device and the host of a node hold at the moments at which a step's memory peaks.

The device peaks at the loss, or in the backward pass of a layer's attention or MLP (`longctx.forecast.layer_memory`).
The host of a node is fullest in the step, while weights are loaded, or while a checkpoint is written.
`benchmarks.closed_form` compares the sums with published lengths, and tests compare them with traces. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from longctx.forecast.layer_memory import (
    LOG_SUM_EXP_BYTES,
    ChunkSizes,
    Layer,
    Sizes,
    chunked_moments,
    layer_bytes,
    whole_moments,
)
from longctx.forecast.shape import FP32, RunShape
from longctx.layers.loss import TILE_BYTES

GB = 1e9

# Fitted to ALST's rows of the published lengths; `python -m benchmarks.closed_form --fit` repeats the fit.

CONTEXT_BYTES = 2.0 * GB
"""On each GPU: CUDA's context, and the workspaces of cuBLAS and cuDNN."""
COMMUNICATOR_BYTES = 3.5 * GB
"""On each GPU, for each process group: NCCL's buffers. The world is one group, and a sequence group another."""
FRAGMENTATION = 0.10
"""Memory that the caching allocator reserves beyond what is allocated, as a fraction of the activations."""
COPIES_IN_FLIGHT = 4
"""How many layers' inputs the allocator cannot reuse yet, while offloaded ones are copied to the host and back."""
FITTED = ("CONTEXT_BYTES", "COMMUNICATOR_BYTES", "FRAGMENTATION", "COPIES_IN_FLIGHT")
"""The names of all constants that are fitted."""

# Counted in the code of torch, transformers, flash-attn, DeepSpeed and longctx.

LOGIT_BYTES = 2 + 3 * FP32
"""For each element of bf16 logits: the logit, and in fp32 its log-probability and the gradients of both."""
FP32_LOGIT_BYTES = 4 * FP32
"""The same for logits in fp32."""
LOSS_TILES = 3
"""Most tiles of fp32 logits that `longctx.layers.loss` holds at a time, their gradient included."""
ADAMW_STATE_BYTES = 3 * FP32
"""For each trained parameter under ZeRO: an fp32 copy of it, and AdamW's two moments."""
HOST_BUFFERS = 0.5
"""ZeRO's buffers in host memory, as a fraction of its states there: DeepSpeed's own allowance in
`estimate_zero3_model_states_mem_needs`."""
PROCESS_BYTES = 1.9 * GB
"""Host memory of a rank on a GPU besides what it offloads: libraries, CUDA, and data. Measured on an H200."""
LARGEST_FILE = 5 * GB
"""Bytes of a file of weights, which a rank holds in host memory while it writes a checkpoint."""

NOT_ALLOCATED = ("copies in flight", "fragmentation", "fixed")
"""Categories of the device that `torch.cuda.max_memory_allocated` does not count."""


def states(shape: RunShape) -> dict[str, float]:
    """Return the bytes of one rank's parameters, gradients and optimizer states, wherever they are."""
    model = shape.model
    parameters, trained = model.num_parameters, model.num_trained_parameters
    if (stage := shape.zero_stage) is not None:
        return {
            "parameters": shape.element_size * parameters / (shape.shards if stage == 3 else 1),
            "gradients": shape.reduce_bytes * trained / (shape.shards if stage >= 2 else 1),
            "optimizer states": ADAMW_STATE_BYTES * trained / shape.shards,
        }
    spread = shape.shards if shape.is_fsdp else 1
    each = shape.weight_bytes / spread
    weights = each * parameters
    if shape.quantized_weight_bytes is not None:
        weights = each * (parameters - model.linear_parameters) + _quantized_part(shape)
        each = FP32 / spread  # peft keeps adapters in fp32
        weights += each * trained
    return {"parameters": weights, "gradients": each * trained, "optimizer states": 2 * each * trained}


def places(shape: RunShape) -> dict[str, str]:
    """Return where each kind of state is throughout a step: none means the device, else cpu or nvme.

    ZeRO-2 and 3 add gradients up where the optimizer is; FSDP2 offloads all states or none.
    """
    param, optimizer = shape.options.offload_param_device, shape.options.offload_optimizer_device
    if shape.is_fsdp:
        return dict.fromkeys(("parameters", "gradients", "optimizer states"), param)
    gradients = "cpu" if (shape.zero_stage or 0) >= 2 and optimizer != "none" else "none"
    return {"parameters": param, "gradients": gradients, "optimizer states": optimizer}


def _quantized_part(shape: RunShape) -> float:
    """Return the bytes of a rank's 4-bit weights, scales included."""
    assert shape.quantized_weight_bytes is not None, "weights are quantised"
    return shape.quantized_weight_bytes * shape.model.linear_parameters / (shape.shards if shape.is_fsdp else 1)


def _unsharded_quantized(shape: RunShape, quantized_weight_bytes: float, at_loss: bool) -> float:
    """Return `_unsharded` for 4-bit weights: a dequantised matrix for its products, and on FSDP2 what is gathered.

    The head, which is not quantised, is gathered for the loss.
    """
    model, b = shape.model, shape.element_size
    numbers = b + (shape.weight_bytes if shape.weight_bytes != b else 0)
    matrix = (
        numbers * model.hidden_size * (model.query_size if model.num_experts_per_token else model.intermediate_size)
    )
    if shape.engine == "none":
        return 0.0 if at_loss else matrix
    linear = model.linear_parameters / model.num_layers
    layer = quantized_weight_bytes * linear + b * (model.layer_parameters - linear)
    return b * model.vocab_size * model.hidden_size + layer if at_loss else matrix + 2 * layer


def _unsharded(shape: RunShape, *, at_loss: bool) -> float:
    """Return the bytes of the whole parameters that a layer needs, their gradients, and the buffers of collectives."""
    if shape.quantized_weight_bytes is not None:
        return _unsharded_quantized(shape, shape.quantized_weight_bytes, at_loss)
    model, b, options, stack = shape.model, shape.element_size, shape.options, shape.stack
    layer, head = model.layer_parameters, model.vocab_size * model.hidden_size
    trains_all = model.num_trained_parameters == model.num_parameters
    gradients, sums = b * layer if trains_all else 0, 0.0
    if options.sequence_chunk_size is not None:  # a chunk's own gradients come when its activations have gone
        gradients, sums = 0, FP32 * layer * shape.trained_share
    if shape.engine == "none":
        return sums + (gradients + b * layer if shape.stream_size > b else 0.0)  # autocast's copies
    if shape.is_fsdp:  # this layer and the next; the head's gradient is reduced meanwhile
        return sums + 2 * b * layer + gradients + (shape.reduce_bytes * max(layer, head) if trains_all else 0)
    bucket_size, live = stack.bucket_size or layer, stack.live_parameters
    if options.small_buckets:
        bucket_size, live = min(layer, model.hidden_size**2), 2 * layer
    bucket = shape.reduce_bytes * min(bucket_size, model.num_trained_parameters)
    return sums + bucket + (b * min(live, model.num_parameters) if shape.zero_stage == 3 else 0)


def _with_gradients(shape: RunShape, sizes: Sizes) -> Sizes:
    """Return the sizes with only the gradients and checkpoints that are there at the same time.

    The first layer's backward pass finds all other gradients, the last layer's all checkpoints; the larger counts.
    ZeRO, and a run that accumulates, have all gradients throughout.
    """
    if shape.zero_stage is not None or shape.micro_batches > 1:
        return sizes
    model, gradients = shape.model, sizes["gradients"]
    of_head = gradients * model.vocab_size * model.hidden_size / model.num_parameters
    others = sizes["checkpoints"] * (1 - 1 / model.num_layers)
    at_last = others > gradients - of_head
    return sizes | {
        "gradients": np.where(at_last, of_head, gradients)[()],
        "checkpoints": np.where(at_last, sizes["checkpoints"], sizes["checkpoints"] - others)[()],
    }


def device_moments(shape: RunShape, length: int, *, is_cpu: bool) -> dict[str, Sizes]:
    """Return the device's memory at each moment of a step, by category: loss, attention, MLP, or loading 4-bit weights.

    Args:
        length: tokens of a row, padding included.
    """
    tokens, layer, options = shape.local_tokens(length), layer_bytes(shape), shape.options
    model, b, stream = shape.model, shape.element_size, shape.stream_size
    at_once = min(tokens, options.sequence_chunk_size or tokens)
    last = (stream + 2 * b + (0 if shape.fused_layers else 4)) * model.hidden_size
    kept = _checkpoints(shape, layer) * tokens
    fetched = stream * model.hidden_size * np.minimum(shape.num_offloaded, 1) * at_once
    at_loss = {
        "checkpoints": kept + fetched,
        "hidden states": last * at_once,
        "logits and loss": _logits(shape, tokens),
    }
    if options.sequence_chunk_size is None:
        # In a layer's backward pass, what the layer keeps is no longer counted as kept.
        last_is_whole = np.minimum(options.whole_layers, 1) if options.activation_checkpointing else 1
        of_last = (_whole(shape, layer) - _input(shape)) * last_is_whole * tokens
        moments, others = whole_moments(shape, layer, tokens), {"checkpoints": kept - of_last + fetched}
    else:
        moments, others = chunked_moments(shape, layer, tokens), {"checkpoints": kept}
    on_device = {name: size if places(shape)[name] == "none" else 0.0 for name, size in states(shape).items()}
    in_flight = 0.0
    if options.sequence_chunk_size is None:  # a sequence-chunked step waits for copies before it frees what they read
        layers = COPIES_IN_FLIGHT * np.minimum(shape.num_offloaded, 1)
        in_flight = layers * stream * model.hidden_size * tokens
    found = {}
    for name, sizes in {"loss": at_loss, **{name: others | sizes for name, sizes in moments.items()}}.items():
        allocated = on_device | {"unsharded parameters": _unsharded(shape, at_loss=name == "loss")} | sizes
        beside = {} if is_cpu else _beside(shape, sum(sizes.values()), in_flight)
        found[name] = _with_gradients(shape, allocated) | beside
    if shape.quantized_weight_bytes is not None and shape.is_fsdp:
        # Before FSDP2 wraps the model, a rank has its part of the 4-bit weights, and embeddings and head whole.
        weights = _quantized_part(shape) + shape.weight_bytes * (model.num_parameters - model.linear_parameters)
        found = {"loading": {"parameters": weights} | ({} if is_cpu else _beside(shape, 0.0, 0.0))} | found
    return found


def _beside(shape: RunShape, activations: Any, in_flight: Any) -> Sizes:
    """Return the categories of a GPU that no tensor takes."""
    communicators = (shape.world_size > 1) + (shape.sp > 1)
    return {
        "copies in flight": in_flight,
        "fragmentation": FRAGMENTATION * (activations + in_flight),
        "fixed": CONTEXT_BYTES + COMMUNICATOR_BYTES * communicators,
    }


def _checkpoints(shape: RunShape, layer: Layer) -> Any:
    """Return the bytes per token that all layers keep on the device for their backward pass."""
    whole = shape.model.num_layers - shape.num_checkpointed
    on_device = shape.num_checkpointed - shape.num_offloaded
    selective = shape.num_selective - shape.num_selective_offloaded
    return whole * _whole(shape, layer) + _kept(shape, on_device, selective)


def _whole(shape: RunShape, layer: Layer) -> float:
    """Return the bytes per token that a layer keeps without checkpointing; tiles of an MLP keep only their input."""
    return _input(shape) + layer.saved - layer.mlp * (shape.options.tiled_mlp_num_shards is not None)


def _input(shape: RunShape) -> float:
    """Return the bytes per token of a layer's input that its first norm keeps; of bf16, a stock norm keeps a copy."""
    return shape.stream_size * shape.model.hidden_size * (shape.fused_layers or shape.stream_size == FP32)


def _kept(shape: RunShape, layers: Any, selective: Any) -> Any:
    """Return the bytes per token of the inputs of `layers` layers, and of the outputs of attention of `selective`."""
    output = shape.element_size * shape.model.query_size + LOG_SUM_EXP_BYTES * shape.model.num_heads
    return layers * shape.stream_size * shape.model.hidden_size + selective * output


def _logits(shape: RunShape, tokens: float) -> float:
    vocab = shape.model.vocab_size
    if not shape.stack.fused_loss:
        return (LOGIT_BYTES if shape.element_size == 2 else FP32_LOGIT_BYTES) * vocab * tokens
    tile = min(FP32 * vocab * tokens, max(TILE_BYTES, FP32 * vocab))
    is_frozen = shape.quantized_weight_bytes is not None
    head_gradient = 0 if is_frozen else FP32 * vocab * shape.model.hidden_size  # summed up over the tiles
    return LOSS_TILES * tile + head_gradient


def host_moments(shape: RunShape, length: int, ranks: int, *, is_cpu: bool) -> dict[str, Sizes]:
    """Return the host memory of a whole node at each moment, by category: loading, step or saving.

    Args:
        length: tokens of a row, padding included.
        ranks: of the node.
    """
    moments: dict[str, Sizes] = {"step": offloaded(shape, length)}
    if not is_cpu:
        kept = {name: size for name, size in offloaded(shape, 0).items() if name != "gradients"}
        whole = shape.weight_bytes * shape.model.num_parameters
        read = 0.0 if shape.is_fsdp else whole / (shape.shards if shape.zero_stage == 3 else 1)
        written = min(LARGEST_FILE, 2 * FP32 * shape.model.num_trained_parameters / shape.shards)
        moments |= {"loading": {"weights": read}, "saving": kept | {"file of a checkpoint": written}}
    processes = 0.0 if is_cpu else PROCESS_BYTES
    return {
        name: {kind: ranks * size for kind, size in {"processes": processes, **sizes}.items()}
        for name, sizes in moments.items()
    }


def offloaded(shape: RunShape, length: int) -> Sizes:
    """Return what a rank keeps in host memory during a step, by category.

    Args:
        length: tokens of a row, padding included.
    """
    where, of = places(shape), states(shape)
    if shape.zero_stage is not None:
        of["gradients"] *= FP32 / shape.reduce_bytes  # the optimizer on the host has its own copies, in fp32
    found: Sizes = {name: size for name, size in of.items() if where[name] == "cpu"}
    if shape.zero_stage is not None:
        found["buffers"] = HOST_BUFFERS * sum(found.values())
    tokens = shape.local_tokens(length)
    found["checkpoints"] = _kept(shape, shape.num_offloaded, shape.num_selective_offloaded) * tokens
    if shape.options.sequence_chunk_size is not None:
        # The layer that the backward pass computes. The gradients of queries, keys and values take their place.
        sizes = ChunkSizes.of(shape, 0.0)
        attention = 3 * sizes.query + sizes.key_value + sizes.log_sum_exp  # with its output, and that one's gradient
        found["sequence chunks"] = (attention + 2 * sizes.hidden) * tokens
    return found


def largest(moments: Mapping[str, Sizes]) -> tuple[str, Sizes]:
    """Return the moment with the largest sum, and its sizes."""
    name = max(moments, key=lambda name: sum(moments[name].values()))
    return name, moments[name]

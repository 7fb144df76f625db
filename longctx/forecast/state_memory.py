"""Bytes of parameters, gradients and optimizer states, by engine and by where they are kept."""

from __future__ import annotations

from typing import Any

import numpy as np

from longctx.forecast.coefficients import ADAMW_BYTES, FP32
from longctx.forecast.memory_setup import MemorySetup


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
            others = parameters - model.num_layers * model.layer_parameters
            weights = each * others + _quantized_part(setup)
            each = FP32 / spread  # peft keeps adapters in fp32
            weights += each * trained
        return {"parameters": weights, "gradients": each * trained, "optimizer states": 2 * each * trained}
    stage = int(setup.engine.removeprefix("zero"))
    return {
        "parameters": setup.element_size * parameters / (shards if stage == 3 else 1),
        "gradients": setup.reduce_bytes * trained / (shards if stage >= 2 else 1),
        "optimizer states": ADAMW_BYTES * trained / shards,
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
    others = setup.model.num_parameters - setup.model.num_layers * setup.model.layer_parameters
    return _quantized_part(setup) + setup.weight_bytes * others


def _quantized_part(setup: MemorySetup) -> float:
    """Return the bytes of a rank's 4-bit weights, scales included."""
    assert setup.quantized_weight_bytes is not None, "weights are quantised"
    shards = setup.world_size / setup.dp_replicate if setup.engine == "fsdp2" else 1
    return setup.quantized_weight_bytes * setup.model.num_layers * setup.model.layer_parameters / shards


def _unsharded_quantized(setup: MemorySetup, quantized_weight_bytes: float, at_loss: bool) -> float:
    """Return the same for 4-bit weights: a whole matrix of the MLP for its products, and on FSDP2 what is gathered.

    The head, which is not quantised, is gathered for the loss.
    """
    model, b = setup.model, setup.element_size
    numbers = b + (setup.weight_bytes if setup.weight_bytes != b else 0)
    matrix = numbers * model.hidden_size * model.intermediate_size
    if setup.engine == "none":
        return 0.0 if at_loss else matrix
    layer = quantized_weight_bytes * model.layer_parameters
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

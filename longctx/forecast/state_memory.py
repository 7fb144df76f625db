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
        each = setup.weight_bytes / (shards if setup.engine == "fsdp2" else 1)
        weights = each * parameters
        if setup.quantized_weight_bytes is not None:
            weights += (setup.quantized_weight_bytes - each) * model.num_layers * model.layer_parameters
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


def unsharded_parameters(setup: MemorySetup) -> float:
    """Return the bytes of the whole parameters that a layer needs, their gradients, and the buffers of collectives."""
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

"""Modelled seconds of a whole training step: what it computes, and what it waits for.

Three rates describe how fast a device computes: its dense bf16 peak, the part of it that large matrices reach, and the
parts that the attention kernel reaches, forward and backward. Links, and the waiting of ranks in attention, are those
of `longctx.attention.cost`. Speeds come from the table of `longctx.attention.speeds` (`Speeds.of`), or
`longctx.forecast.measure` measures them on this machine. `benchmarks.step_time` compares the seconds with published
steps, and with real ones on this machine.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longctx.attention.cost import (
    FLOPS_BACKWARD,
    FLOPS_FORWARD,
    Arrangement,
    Device,
    Setup,
    both_passes,
    devices_of,
)
from longctx.attention.kernels.choose import LONG_DOCUMENT
from longctx.attention.modelled import modelled_seconds, planned_work
from longctx.attention.speeds import SPEEDS, SpeedTable
from longctx.forecast.coefficients import FP32, LOGIT_BYTES
from longctx.forecast.layer_memory import Pass, passes, saved_by_layer
from longctx.forecast.memory_setup import MemorySetup
from longctx.forecast.model_sizes import ModelSizes
from longctx.layers.chunked.tiles import tile_tokens
from longctx.recurrent.cost import recurrent_time, written_seconds

FLASH_2, CUDNN = "flash-attn 2", "cuDNN"
"""Kernels of the table that torch has, too."""

KERNELS: Mapping[str, Mapping[str, tuple[float, float]]] = SPEEDS.kernels()
"""Parts of the peak on long documents with heads of 128: kernel -> device -> (forward, backward)."""

ADAMW_TRAFFIC_BYTES = 28
"""Bytes read and written for each parameter: weight, gradient and two moments in fp32."""
HOST_OPTIMIZER_BYTES = ADAMW_TRAFFIC_BYTES + 8 + 6
"""The same in host memory, with the pass that scales gradients and the one that rounds weights to bf16."""
OPTIMIZER_COPIES = 2 + 2 + 4 + 2
"""Bytes of each parameter that DeepSpeed copies between device and host: the gradient in bf16 there and back and in
fp32, the new weight (partition_grads and _reassign_or_swap_out_partitioned_parameters of its stage3.py)."""
UNPINNED_PASSES = 3
"""Passes through host memory of what is copied to or from memory that is not pinned: it is staged in between."""
TRAFFIC = 2
"""How often each pass moves a byte that is saved for the backward pass: it is written and read again."""


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """What the devices, kernels and links of a machine do in a second."""

    matmul_flops: float
    """FLOPs per second of large matrices, on one device."""
    attention_forward_flops: float
    attention_backward_flops: float
    device: Device
    """Memory, links and latencies of one device. Its attention speed is that of both passes together."""
    host_link: float
    """Bytes per second between a device and pinned host memory."""
    host_memory: float
    """Bytes per second that all processes of a node together read and write in host memory."""

    @classmethod
    def of(cls, device: str, kernel: str, table: SpeedTable = SPEEDS) -> Speeds:
        """Return the speeds of a device and an attention kernel from a table, by their names in PEAK_FLOPS and KERNELS.

        Raises:
            ValueError: for a name that the table does not have, with those that it has.
        """
        peaks, kernels = table.values("peak_flops"), table.kernels()
        if device not in peaks:
            raise ValueError(f"No speeds are known for the device {device!r}. Use one of {', '.join(peaks)}.")
        if device not in kernels.get(kernel, {}):
            known = ", ".join(name for name, devices in kernels.items() if device in devices)
            raise ValueError(f"No speeds are known for the kernel {kernel!r} on {device}. Use one of {known}.")
        forward, backward = (part * peaks[device] for part in kernels[kernel][device])
        return cls(
            matmul_flops=table.value(device, "matmul_part") * peaks[device],
            attention_forward_flops=forward,
            attention_backward_flops=backward,
            device=replace(devices_of(table)[device], attention_flops=both_passes(forward, backward)),
            host_link=table.value(device, "host_link"),
            host_memory=table.value(device, "host_memory"),
        )

    @classmethod
    def of_device(cls, name: str, documents: Sequence[int], table: SpeedTable = SPEEDS) -> Speeds | None:
        """Return the speeds of a GPU and of the kernel that attends to such documents; None for an unknown GPU.

        That is the first kernel that the table has for the GPU. Where it is torch's own, FlashAttention-2, a long
        document that is alone goes to cuDNN.

        Args:
            name: the name that torch gives the GPU, such as NVIDIA H100 80GB HBM3.
            documents: lengths of a sequence's documents.
        """
        device = next((known for known in table.values("peak_flops") if known in name), None)
        if device is None:
            return None
        kernel, *others = (kernel for kernel, devices in table.kernels().items() if device in devices)
        is_alone = len(documents) == 1 and documents[0] >= LONG_DOCUMENT
        return cls.of(device, CUDNN if is_alone and kernel == FLASH_2 and CUDNN in others else kernel, table)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of one micro-batch."""

    parts: Mapping[str, float]
    """Seconds by part: linear, elementwise, attention, recurrent, recomputed, launches, weights, host, optimizer.
    Hidden ones are left out. They are arrays if the setup has arrays."""
    tokens: int
    """Tokens of all ranks."""
    world_size: int

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second_per_device(self) -> float:
        return self.tokens / self.seconds / self.world_size


def step_time(setup: MemorySetup, length: int, speeds: Speeds, *, documents: Sequence[int] | None = None) -> StepTime:
    """Return the modelled time of an optimizer step of one micro-batch, whose rows have `length` tokens.

    Args:
        documents: lengths of a row's documents, `length` in all; None means one document.
    """
    attention = attention_setup(setup, speeds.device)
    work = planned_work(tuple(documents or [length]), *attention)
    pairs = setup.num_rows * work.pairs.sum() / setup.sp
    linear, recomputed, elementwise = tokenwise_seconds(setup, length, speeds)
    of_layer = _attention_seconds(*attention, work)
    parts: dict[str, Any] = {
        "linear": linear,
        "elementwise": elementwise,
        "attention": setup.num_rows * setup.model.num_attended * of_layer,
        "recurrent": recurrent_seconds(setup, length, speeds),
        "recomputed": recomputed + attended_again_seconds(setup, pairs, speeds),
    }
    computed = sum(parts.values())
    parts["launches"] = np.maximum(0.0, launch_seconds(setup, speeds.device) - computed)
    computed += parts["launches"]
    parts["weights"] = np.maximum(0.0, weights_seconds(setup, speeds.device) - computed)
    parts["host"] = host_seconds(setup, length, pairs, speeds, computed)
    parts["optimizer"] = optimizer_seconds(setup, speeds)
    tokens = length * setup.num_rows * setup.world_size // setup.sp
    return StepTime({name: part for name, part in parts.items() if np.any(part)}, tokens, setup.world_size)


def forward_seconds(setup: MemorySetup, time: StepTime, speeds: Speeds) -> float:
    """Return the modelled time of the forward pass in a step, as a reference model runs it.

    Of matrices it is one of the two or three passes of the step, and of operators that only move bytes one of three or
    four, as it is of waiting for the host. Of weights that are waited for it is taken to be a third.
    """
    model, parts = setup.model, time.parts
    attention = speeds.device.attention_flops * FLOPS_FORWARD / speeds.attention_forward_flops
    shares = {
        "linear": 1 / (2 + model.num_trained_parameters / model.num_parameters),
        "attention": attention / (FLOPS_FORWARD + FLOPS_BACKWARD),
        "elementwise": 1 / (3 + _recomputed_share(setup)),
        "launches": 1 / (3 + _recomputed_share(setup)),
        "weights": 1 / 3,
    }
    return float(sum(share * parts.get(name, 0.0) for name, share in shares.items()))


_attention_seconds = functools.lru_cache(maxsize=64)(modelled_seconds)
"""`modelled_seconds`, which set-ups that differ in their memory options share."""


def tokenwise_seconds(setup: MemorySetup, length: int, speeds: Speeds) -> tuple[float, float, float]:
    """Return the seconds of a rank's micro-batch without attention.

    They are those of matrices forward and backward, those of matrices computed again, and those of operators that only
    move bytes, such as norms and activations.
    """
    model, again, tokens = setup.model, _recomputed_share(setup), setup.local_tokens(length)
    once = 2 * matmul_parameters(model) * tokens / speeds.matmul_flops
    moved = TRAFFIC * (model.num_layers * saved_by_layer(setup) + LOGIT_BYTES * model.vocab_size) * tokens
    elementwise = (1 + again + 2) * moved / speeds.device.memory_speed  # backward counts as two passes
    elementwise += _gradient_sum_bytes(setup, tokens) / speeds.device.memory_speed
    elementwise += (1 + again + 1) * _dequantized_bytes(setup) / speeds.device.memory_speed
    return once * (1 + 1 + model.num_trained_parameters / model.num_parameters), once * again, elementwise


LAUNCHES_OF_A_LAYER = 800
"""Launches of empty kernels in the time in which the host goes through a layer, forward and backward. Steps of
Qwen3-0.6B with 4,096 tokens on an H200, which waits for its host, take 710 to 920 (benchmarks/results/gpu_H200)."""


def launch_seconds(setup: MemorySetup, device: Device) -> NDArray[np.float64]:
    """Return the seconds that the host takes to launch the kernels of a micro-batch's layers, at any length.

    A forward pass that is computed again is taken to be a third of both.
    """
    passes_over = np.asarray(1 + _recomputed_share(setup) / 3, np.float64)
    return setup.model.num_layers * LAUNCHES_OF_A_LAYER * device.launch_seconds * passes_over


def attended_again_seconds(setup: MemorySetup, pairs: float | NDArray[Any], speeds: Speeds) -> NDArray[np.float64]:
    """Return the seconds of attention that checkpoints make a rank compute again, in all layers.

    Args:
        pairs: legal pairs of query and key that it attends to with all heads; of any shape, as is the result.
    """
    layers = (setup.num_checkpointed - setup.num_selective) * setup.model.num_attended / setup.model.num_layers
    flops = FLOPS_FORWARD * setup.model.query_size * layers
    again = _again_with_chunks(setup) if setup.sequence_chunk_size is not None else 1.0
    return again * flops / speeds.attention_forward_flops * np.asarray(pairs, np.float64)


def recurrent_seconds(setup: MemorySetup, length: int, speeds: Speeds) -> Any:
    """Return the seconds of the scans of a rank's micro-batch in recurrent layers, and of spreading them.

    One document is assumed to fill each row, which takes most to spread.
    """
    sizes, layers = setup.model.recurrent, setup.model.num_recurrent_layers
    if sizes is None:
        return 0.0
    attention, arrangement = attention_setup(setup, speeds.device)
    spread = recurrent_time(attention, arrangement, length)
    assert spread is not None, "the model has recurrent layers"
    passes = 3 + setup.num_checkpointed / setup.model.num_layers  # backward counts as two
    scan = passes * sizes.flops * setup.local_tokens(length) / speeds.attention_forward_flops
    scan += (passes + 1) * written_seconds(sizes, setup.local_tokens(length), speeds.device.memory_speed)
    return layers * (scan + setup.num_rows * spread.seconds)


def host_seconds(setup: MemorySetup, length: int, pairs: float, speeds: Speeds, computed: float) -> Any:
    """Return the seconds of copies to and from host memory that no computation hides, without the optimizer's.

    An offloaded layer's checkpoint leaves while the layer computes, and comes back while the layer before it does. A
    sequence-chunked step copies one part while it computes another.

    Args:
        pairs: legal pairs of query and key that a rank attends to with all heads.
        computed: seconds that all layers compute.
    """
    if setup.sequence_chunk_size is not None:
        every, again = passes(setup, setup.local_tokens(length), pairs)
        repeated = setup.num_checkpointed - setup.num_selective
        return setup.model.num_layers * sum(_exposed(setup, one, speeds) for one in every) + repeated * _exposed(
            setup, again, speeds
        )
    offloaded = setup.model.hidden_size * setup.num_offloaded + setup.model.query_size * setup.num_selective_offloaded
    copied = 2 * setup.element_size * offloaded * setup.local_tokens(length)
    if not setup.pins_host_memory:
        return UNPINNED_PASSES * copied * setup.ranks_per_node / speeds.host_memory
    seconds = copied / speeds.host_link
    meanwhile = computed * setup.num_offloaded / setup.model.num_layers
    forward = meanwhile / (3 + _recomputed_share(setup))  # backward counts as two passes
    exposed = [np.maximum(0.0, seconds / 2 - hidden) for hidden in (forward, meanwhile - forward)]
    return exposed[0] + exposed[1]


def _exposed(setup: MemorySetup, one: Pass, speeds: Speeds) -> float:
    """Return the seconds of a pass's copies that its computation does not hide: those of the first part to arrive, of
    the last one to leave, and of what takes longer than to compute. A link carries both directions at once.
    """
    both = one.arriving + one.leaving
    if not setup.pins_host_memory:
        return UNPINNED_PASSES * both * setup.ranks_per_node / speeds.host_memory
    computed = one.matmul_flops / speeds.matmul_flops
    computed += (
        one.forward_flops / speeds.attention_forward_flops + one.backward_flops / speeds.attention_backward_flops
    )
    return both / one.parts / speeds.host_link + max(0.0, max(one.arriving, one.leaving) / speeds.host_link - computed)


def _gradient_sum_bytes(setup: MemorySetup, tokens: float) -> float:
    """Return the bytes that are moved to add up the gradients of weights over tiles of an MLP, or over chunks."""
    model = setup.model
    if setup.sequence_chunk_size is not None:
        parts, summed = tokens / setup.sequence_chunk_size, model.layer_parameters
    elif setup.tiled_mlp_num_shards is not None:
        parts, summed = setup.tiled_mlp_num_shards or tokens / tile_tokens(model.hidden_size), 3 * model.hidden_size
        summed *= model.intermediate_size
    else:
        return 0.0
    trained = model.num_trained_parameters / model.num_parameters
    return trained * model.num_layers * max(0.0, parts - 1) * summed * (2 * setup.element_size + 2 * FP32)


def _dequantized_bytes(setup: MemorySetup) -> float:
    """Return the bytes that a pass moves to dequantise weights: it reads 4-bit ones, then writes and reads others."""
    if setup.quantized_weight_bytes is None:
        return 0.0
    moved = setup.quantized_weight_bytes + TRAFFIC * setup.element_size
    return moved * setup.model.linear_parameters


def matmul_parameters(model: ModelSizes) -> int:
    """Return how many parameters a token is multiplied with: all matrices but the embedding and unused experts."""
    projections = model.projection_parameters
    if projections is None:
        projections = 2 * model.hidden_size * (model.query_size + model.key_value_size)
    layer = projections + 3 * model.hidden_size * model.intermediate_size
    return model.num_layers * layer + model.vocab_size * model.hidden_size


def _recomputed_share(setup: MemorySetup) -> float:
    """Return the fraction of a forward pass, without attention, that is computed again."""
    if setup.sequence_chunk_size is not None:
        return _again_with_chunks(setup)
    layers = setup.model.num_layers
    share = setup.num_checkpointed / layers
    if setup.tiled_mlp_num_shards is not None:  # which computes its tiles again in the other layers, too
        mlp = 3 * layers * setup.model.hidden_size * setup.model.intermediate_size / matmul_parameters(setup.model)
        share += (1 - share) * mlp
    return share


def _again_with_chunks(setup: MemorySetup) -> float:
    """Return the same for a sequence-chunked step, which projects q, k and v three more times."""
    projections = setup.model.num_layers * setup.model.hidden_size * 2 * setup.model.key_value_size
    projections += setup.model.num_layers * setup.model.hidden_size * setup.model.query_size
    return 1 + 2 * projections / matmul_parameters(setup.model)


def attention_setup(setup: MemorySetup, device: Device) -> tuple[Setup, Arrangement]:
    """Return what `longctx.attention.cost` needs to know of the setup."""
    model = setup.model
    attention = Setup(
        sp=setup.sp,
        num_heads=model.num_heads,
        num_key_value_heads=model.num_key_value_heads,
        head_size=model.head_size,
        element_size=setup.element_size,
        device=device,
        devices_per_node=setup.ranks_per_node,
        heads_k_stride=setup.heads_k_stride,
        overlap_exchange=setup.overlap_exchange,
        recurrent=model.recurrent,
    )
    arrangement = Arrangement(name=setup.backend, ring=setup.ring, ulysses=setup.ulysses)
    return attention, arrangement


def weights_seconds(setup: MemorySetup, device: Device) -> float:
    """Return the seconds to gather weights, forward and backward, and to reduce their gradients, in one micro-batch."""
    attention, _ = attention_setup(setup, device)
    copies = setup.dp_replicate
    sharded = setup.world_size // copies
    times = 2 if setup.engine in ("fsdp2", "zero3") else 1
    reduced = setup.reduce_bytes * setup.model.num_trained_parameters
    gathered: float = setup.element_size * setup.model.num_parameters
    if setup.quantized_weight_bytes is not None:
        gathered += (setup.quantized_weight_bytes - setup.element_size) * setup.model.linear_parameters
    seconds = attention.gather_seconds(times * gathered + reduced, sharded)
    seconds += 3 * setup.model.num_layers * attention.gather_latency(sharded) * (sharded > 1)
    # Each rank's share of the gradients is reduced over the replicas, which lie in other nodes, and sent back.
    return seconds + 2 * reduced / sharded * (copies - 1) / copies / device.across.exchange


def optimizer_seconds(setup: MemorySetup, speeds: Speeds) -> float:
    """Return the seconds of the optimizer, once a step."""
    shards = 1 if setup.engine == "none" else setup.world_size / setup.dp_replicate
    parameters = setup.model.num_trained_parameters / shards
    if "cpu" not in (setup.offload_optimizer, setup.offload_param):
        return parameters * ADAMW_TRAFFIC_BYTES / speeds.device.memory_speed
    staged, copied = 0.0, OPTIMIZER_COPIES / speeds.host_link
    if not setup.pins_host_memory:
        staged, copied = UNPINNED_PASSES * OPTIMIZER_COPIES, 0.0
    return parameters * ((HOST_OPTIMIZER_BYTES + staged) * setup.ranks_per_node / speeds.host_memory + copied)

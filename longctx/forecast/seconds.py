"""Seconds of an optimizer step by part: what it computes, and what it waits for.

Speeds and links are those of the machine (`longctx.machine.speeds`), and attention's seconds those of
`longctx.attention.modelled`. `benchmarks.step_time` compares the sums with published steps, and with real ones on this
machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from longctx.attention.modelled import attention_time, planned_work
from longctx.forecast.layer_memory import ChunkSizes, layer_bytes
from longctx.forecast.memory import LOGIT_BYTES
from longctx.forecast.model_sizes import ModelSizes
from longctx.forecast.shape import RunShape
from longctx.machine.here import Machine
from longctx.machine.speeds import ADAMW_TRAFFIC_BYTES, FLOPS_BACKWARD, FLOPS_FORWARD, Speeds
from longctx.recurrent.cost import recurrent_time, written_seconds

HOST_OPTIMIZER_BYTES = ADAMW_TRAFFIC_BYTES + 8 + 6
"""Bytes read and written in host memory for each parameter, with the pass that scales gradients and the one that rounds
weights to bf16."""
OPTIMIZER_COPIES = 2 + 2 + 4 + 2
"""Bytes of each parameter that DeepSpeed copies between device and host: the gradient in bf16 there and back and in
fp32, the new weight (partition_grads and _reassign_or_swap_out_partitioned_parameters of its stage3.py)."""
UNPINNED_PASSES = 3
"""Passes through host memory of what is copied to or from memory that is not pinned: it is staged in between."""
TRAFFIC = 2
"""How often each pass moves a byte that is saved for the backward pass: it is written and read again."""

EAGER_BYTES = 90
"""Bytes that norms and rotary embeddings move in each pass for each element of queries and keys, where no kernel fuses
them. In steps of Qwen3-0.6B without Liger's kernels on an H200, these are 80 to 110 (benchmarks/results/gpu_H200)."""
LAUNCHES_OF_A_LAYER = 665
"""Launches of empty kernels in the time in which the host goes through a layer, forward and backward. Steps of
Qwen3-0.6B with 4,096 tokens on an H200, which waits for its host, take 605 to 735 (benchmarks/results/gpu_H200)."""
OF_FSDP, OF_ZERO, OF_RING = 1.9, 2.6, 1.2
"""How many times as long the host takes for a layer on FSDP and on DeepSpeed as on no engine, and in a ring as with
Ulysses. DeepSpeed's is of an H200 (benchmarks/results/gpu_H200); the others are of calls on a CPU, which do not depend
on the device (benchmarks/results/host_time_cpu_2026-11-27.md)."""


def step_seconds(
    shape: RunShape, machine: Machine, length: int, documents: Sequence[int], *, counts_experts: bool = False
) -> dict[str, Any]:
    """Return the seconds of an optimizer step by part; arrays if the shape has arrays. Hidden ones are left out.

    Args:
        length: tokens of a row, padding included.
        documents: lengths of a row's documents, `length` in all.
        counts_experts: whether a step of several micro-batches runs them forward once more, for the routers' auxiliary
            loss.
    """
    machine = machine.with_documents(documents)
    speeds, attention = machine.speeds, shape.attention(machine)
    work = planned_work(tuple(documents), attention, shape.arrangement)
    pairs = shape.rows * work.pairs.sum() / shape.sp
    linear, recomputed, elementwise = tokenwise_seconds(shape, length, speeds)
    parts: dict[str, Any] = {
        "linear": linear,
        "elementwise": elementwise,
        "attention": shape.rows * shape.model.num_attended * attention_time(attention, shape.arrangement, work).seconds,
        "recurrent": recurrent_seconds(shape, length, machine),
        "recomputed": recomputed + attended_again(shape, pairs, speeds),
    }
    computed = sum(parts.values())
    parts["launches"] = np.maximum(0.0, launch_seconds(shape, speeds) - computed)
    computed += parts["launches"]
    parts["weights"] = np.maximum(0.0, weights_seconds(shape, machine) - computed)
    parts["host"] = host_seconds(shape, machine, length, pairs, computed)
    again = 0.0
    if counts_experts and shape.micro_batches > 1:
        again = _forward_share(shape) * sum(parts[name] for name in ("linear", "elementwise", "attention", "launches"))
    parts = {name: shape.micro_batches * seconds for name, seconds in parts.items()}
    parts["experts counted"] = shape.micro_batches * again
    parts["optimizer"] = optimizer_seconds(shape, machine)
    return {name: machine.correction.seconds * seconds for name, seconds in parts.items() if np.any(seconds)}


def launch_seconds(shape: RunShape, speeds: Speeds) -> Any:
    """Return the seconds that the host takes to launch the kernels of a micro-batch's layers, at any length.

    A forward pass that is computed again is taken to be a third of both.
    """
    of_engine = OF_FSDP if shape.is_fsdp else 1.0 if shape.engine == "none" else OF_ZERO
    launches = LAUNCHES_OF_A_LAYER * of_engine * (OF_RING if shape.ring > 1 else 1.0)
    return shape.model.num_layers * launches * speeds.launch_seconds * (1 + _recomputed_share(shape) / 3)


def forward_seconds(shape: RunShape, seconds: dict[str, Any]) -> float:
    """Return the seconds of the forward passes in a step, as a reference model runs them."""
    return float(
        _forward_share(shape)
        * sum(seconds.get(name, 0.0) for name in ("linear", "elementwise", "attention", "launches", "weights"))
    )


def _forward_share(shape: RunShape) -> Any:
    """Return the part of a step's seconds that is a forward pass: backward counts as two, but for frozen weights."""
    return 1 / (2 + shape.trained_share)


def layer_matrices(model: ModelSizes) -> int:
    """Return how many parameters of a layer multiply a token: all its matrices, except experts that are not used."""
    projections = model.projection_parameters
    if projections is None:
        projections = 2 * model.hidden_size * (model.query_size + model.key_value_size)
    return projections + 3 * model.hidden_size * model.intermediate_size


def tokenwise_seconds(shape: RunShape, length: int, speeds: Speeds) -> tuple[Any, Any, Any]:
    """Return the seconds of a rank's micro-batch without attention.

    They are those of matrices forward and backward, those of matrices computed again, and those of operators that only
    move bytes, such as norms, activations, and the dequantisation of 4-bit weights. The head is never computed again.
    """
    model, again, tokens = shape.model, _recomputed_share(shape), shape.local_tokens(length)
    layers = 2 * model.num_layers * layer_matrices(model) * tokens / speeds.matmul
    head = 2 * model.vocab_size * model.hidden_size * tokens / speeds.matmul
    of_heads = 0 if shape.fused_layers else EAGER_BYTES * (model.query_size + model.key_value_size)
    moved = model.num_layers * (TRAFFIC * layer_bytes(shape).saved + of_heads) * tokens
    of_logits = TRAFFIC * LOGIT_BYTES * model.vocab_size * tokens
    elementwise = ((1 + again + 2) * moved + (1 + 2) * of_logits) / speeds.memory  # backward counts as two passes
    if shape.quantized_weight_bytes is not None:  # which are read, and then others are written and read
        dequantized = (shape.quantized_weight_bytes + TRAFFIC * shape.element_size) * model.linear_parameters
        elementwise += (1 + again + 1) * dequantized / speeds.memory
    return (layers + head) * (2 + shape.trained_share), layers * again, elementwise


def attended_again(shape: RunShape, pairs: Any, speeds: Speeds) -> Any:
    """Return the seconds of attention that checkpoints make a rank compute again, in all layers.

    Args:
        pairs: legal pairs of query and key that it attends to with all heads; of any shape, as is the result.
    """
    layers = (shape.num_checkpointed - shape.num_selective) * shape.model.num_attended / shape.model.num_layers
    flops = FLOPS_FORWARD * shape.model.query_size * layers
    again = _again_with_chunks(shape) if shape.options.sequence_chunk_size is not None else 1.0
    return again * flops / speeds.attention_forward * np.asarray(pairs, np.float64)


def _recomputed_share(shape: RunShape) -> Any:
    """Return the fraction of the layers' forward pass, without attention, that is computed again."""
    if shape.options.sequence_chunk_size is not None:
        return _again_with_chunks(shape)
    layers = shape.model.num_layers
    share = shape.num_checkpointed / layers
    if shape.options.tiled_mlp_num_shards is not None:  # which computes its tiles again in the other layers, too
        mlp = 3 * shape.model.hidden_size * shape.model.intermediate_size / layer_matrices(shape.model)
        share += (1 - share) * mlp
    return share


def _again_with_chunks(shape: RunShape) -> float:
    """Return the same for a sequence-chunked step, which projects q, k and v three more times."""
    projections = shape.model.hidden_size * (2 * shape.model.key_value_size + shape.model.query_size)
    return 1 + 2 * projections / layer_matrices(shape.model)


def recurrent_seconds(shape: RunShape, length: int, machine: Machine) -> Any:
    """Return the seconds of the scans of a rank's micro-batch in recurrent layers, and of spreading them.

    One document is assumed to fill each row, which takes most to spread.
    """
    sizes, layers, speeds = shape.model.recurrent, shape.model.num_recurrent_layers, machine.speeds
    if sizes is None:
        return 0.0
    spread = recurrent_time(shape.attention(machine), shape.arrangement, length)
    assert spread is not None, "the model has recurrent layers"
    passes = 3 + shape.num_checkpointed / shape.model.num_layers  # backward counts as two
    scan = passes * sizes.flops * shape.local_tokens(length) / speeds.attention_forward
    scan += (passes + 1) * written_seconds(sizes, shape.local_tokens(length), speeds.memory)
    return layers * (scan + shape.rows * spread.seconds)


def weights_seconds(shape: RunShape, machine: Machine) -> float:
    """Return the seconds to gather weights, forward and backward, and to reduce their gradients, in one micro-batch."""
    attention, copies, sharded = shape.attention(machine), shape.dp_replicate, shape.shards
    times = 2 if shape.is_fsdp or shape.zero_stage == 3 else 1
    reduced = shape.reduce_bytes * shape.model.num_trained_parameters
    gathered: float = shape.element_size * shape.model.num_parameters
    if shape.quantized_weight_bytes is not None:
        gathered += (shape.quantized_weight_bytes - shape.element_size) * shape.model.linear_parameters
    seconds = attention.gather_seconds(times * gathered + reduced, sharded)
    seconds += 3 * shape.model.num_layers * attention.gather_latency(sharded) * (sharded > 1)
    # Each rank's share of the gradients is reduced over the replicas, which lie in other nodes, and sent back.
    return seconds + 2 * reduced / sharded * (copies - 1) / copies / machine.speeds.across.exchange


def optimizer_seconds(shape: RunShape, machine: Machine) -> float:
    """Return the seconds of the optimizer, once a step."""
    speeds, options = machine.speeds, shape.options
    parameters = shape.model.num_trained_parameters / (1 if shape.engine == "none" else shape.shards)
    if "cpu" not in (options.offload_optimizer_device, options.offload_param_device):
        return parameters * ADAMW_TRAFFIC_BYTES / speeds.memory
    staged, copied = 0.0, OPTIMIZER_COPIES / speeds.host_link
    if not shape.stack.pins_host_memory:
        staged, copied = UNPINNED_PASSES * OPTIMIZER_COPIES, 0.0
    return parameters * ((HOST_OPTIMIZER_BYTES + staged) * node_ranks(shape, machine) / speeds.host_memory + copied)


def node_ranks(shape: RunShape, machine: Machine) -> int:
    """Return the ranks of a node, which share its host memory."""
    return min(machine.per_node, shape.world_size)


# Copies to and from host memory


class Pass(NamedTuple):
    """A pass over all tokens of a layer, part by part: what a rank copies, and what it computes meanwhile."""

    arriving: float
    """Bytes copied to the device."""
    leaving: float
    parts: int
    matmul_flops: float = 0.0
    forward_flops: float = 0.0
    """Of attention, forward."""
    backward_flops: float = 0.0
    """Of attention, backward."""


def host_seconds(shape: RunShape, machine: Machine, length: int, pairs: float, computed: Any) -> Any:
    """Return the seconds of copies to and from host memory that no computation hides, without the optimizer's.

    An offloaded layer's checkpoint leaves while the layer computes, and comes back while the layer before it does. A
    sequence-chunked step copies one part while it computes another.

    Args:
        pairs: legal pairs of query and key that a rank attends to with all heads.
        computed: seconds that all layers compute.
    """
    model, speeds, tokens = shape.model, machine.speeds, shape.local_tokens(length)
    if shape.options.sequence_chunk_size is not None:
        every, again = passes(shape, tokens, pairs)
        repeated = shape.num_checkpointed - shape.num_selective
        of_layer = sum(_exposed(one, speeds) for one in every)
        return model.num_layers * of_layer + repeated * _exposed(again, speeds)
    offloaded = model.hidden_size * shape.num_offloaded + model.query_size * shape.num_selective_offloaded
    copied = 2 * shape.element_size * offloaded * tokens
    if not shape.stack.pins_host_memory:
        return UNPINNED_PASSES * copied * node_ranks(shape, machine) / speeds.host_memory
    seconds = copied / speeds.host_link
    meanwhile = computed * shape.num_offloaded / model.num_layers
    forward = meanwhile / (3 + _recomputed_share(shape))  # backward counts as two passes
    exposed = [np.maximum(0.0, seconds / 2 - hidden) for hidden in (forward, meanwhile - forward)]
    return exposed[0] + exposed[1]


def _exposed(one: Pass, speeds: Speeds) -> float:
    """Return the seconds of a pass's copies that its computation does not hide: those of the first part to arrive, of
    the last one to leave, and of what takes longer than to compute. A link carries both directions at once.
    """
    computed = one.matmul_flops / speeds.matmul
    computed += one.forward_flops / speeds.attention_forward + one.backward_flops / speeds.attention_backward
    exposed = max(0.0, max(one.arriving, one.leaving) / speeds.host_link - computed)
    return (one.arriving + one.leaving) / one.parts / speeds.host_link + exposed


def passes(shape: RunShape, tokens: float, pairs: float) -> tuple[list[Pass], Pass]:
    """Return the passes of a layer's sequence-chunked training step, and the one that computes its attention again.

    Args:
        tokens: of a rank.
        pairs: legal pairs of query and key that the rank attends to with all heads.
    """
    model, of = shape.model, ChunkSizes.of(shape, tokens)
    h, q, kv = of.hidden, of.query, of.key_value
    projection = 2 * model.hidden_size * (model.query_size + 2 * model.key_value_size) * tokens
    rest = 2 * model.hidden_size * (model.query_size + 3 * model.intermediate_size) * tokens
    attended, parts, reads = model.query_size * pairs, of.groups, 1.0
    if shape.ring == 1:
        block = of.chunk * shape.ulysses * of.groups
        parts = of.groups * math.ceil(tokens * shape.ulysses / block)
        keys = pairs / tokens  # that a token attends to, on average
        reads = (keys + block / 2) / block  # of each key: by its own block of queries, and by those after it
    project = Pass(h * tokens, (q + kv) * tokens, of.chunks, projection)
    arriving, leaving = (q + reads * kv) * tokens, (q + of.log_sum_exp) * tokens
    attend = Pass(arriving, leaving, parts, forward_flops=FLOPS_FORWARD * attended)
    backward, arriving = 1 + shape.trained_share, (3 * q + of.log_sum_exp + reads * kv) * tokens
    return [
        project,
        attend,
        Pass((h + q) * tokens, h * tokens, of.chunks, projection + rest),
        project,
        Pass((2 * h + q) * tokens, (h + q) * tokens, of.chunks, projection + (1 + backward) * rest),
        Pass(arriving, (q + kv) * tokens, parts, backward_flops=FLOPS_BACKWARD * attended),
        Pass((2 * h + q + kv) * tokens, h * tokens, of.chunks, (1 + backward) * projection),
    ], attend

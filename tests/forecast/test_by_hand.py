"""Modelled costs against numbers that were worked out by hand, one by one; the working is beside each.

The model: 2 layers of width h = 8, 4 query and 2 key/value heads of 4 (q = 16, kv = 8), an MLP of width I = 16, and
32 words; norms without anything on queries and keys, no tied embeddings. bf16, so an element has 2 bytes. Two ranks
share a row of 1,024 tokens, 512 each.

    matrices of a layer  q 8·16 + k 8·8 + v 8·8 + o 16·8 = 384, gate, up and down 3 · 8·16 = 384: 768
    parameters           2 layers of 768 + two norms of 8 = 784 each, the last norm 8, embeddings and head 32·8 = 256
                         each: 2 · 784 + 8 + 2 · 256 = 2,088
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from transformers import LlamaConfig

from benchmarks.scaling.simulate import simulate
from benchmarks.shapes import changed, shape_of
from longctx.attention.cost import Arrangement, RingWork, Setup
from longctx.attention.modelled import attention_time
from longctx.forecast import memory
from longctx.forecast.cost import cost
from longctx.forecast.layer_memory import layer_bytes
from longctx.forecast.memory import PROCESS_BYTES
from longctx.forecast.model_sizes import ModelSizes
from longctx.forecast.seconds import forward_seconds, optimizer_seconds, step_seconds, weights_seconds
from longctx.forecast.shape import RunShape
from longctx.machine.here import Machine
from longctx.machine.speeds import Link, Speeds

CONFIG = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 4}
CONFIG |= {"num_key_value_heads": 2, "vocab_size": 32, "tie_word_embeddings": False}
MODEL = ModelSizes.of_config(LlamaConfig(**CONFIG))
ULYSSES = shape_of(MODEL, world_size=2, sp=2, engine="fsdp2")
LENGTH, TOKENS = 1024, 512


def machine_of(**slow: float) -> Machine:
    """Two devices of a node on which nothing takes time but what is named."""
    both, link = slow.get("attention", math.inf), slow.get("link", math.inf)
    across = slow.get("across", link)
    speeds = Speeds(
        matmul=slow.get("matmul", math.inf),
        attention_forward=slow.get("attention_forward", both),
        attention_backward=slow.get("attention_backward", both),
        memory=slow.get("memory", math.inf),
        within=Link(link, link),
        across=Link(across, across),
        host_link=slow.get("host_link", math.inf),
        host_memory=slow.get("host_memory", math.inf),
        message_seconds=slow.get("message", 0.0),
        launch_seconds=slow.get("launch", 0.0),
        entry_seconds=slow.get("entry", 0.0),
    )
    return Machine(device="made up", per_node=2, device_bytes=1.0, host_bytes=1.0, speeds=speeds)


def setup_on(**slow: float) -> Setup:
    machine = machine_of(**slow)
    return Setup(sp=2, num_heads=4, num_key_value_heads=2, head_size=4, element_size=2, machine=machine)


# ------------------------------------------------------------------------------------------------
# Attention
# ------------------------------------------------------------------------------------------------


def test_a_ring_of_two_hop_by_hop() -> None:
    """On a device made for this: a pair takes 1 s forward, a merged query as long, and k and v of a token travel 1 s.

    A pair costs 4·D FLOPs a head forward (q·k and p·v, a multiplication and an addition each) and 10·D backward (five
    such products: scores again, dv, dp, dq and dk), over 16 elements of all heads: 64 and 160. A query that is merged
    moves 38 bytes an element (fp32 out read and written 8; the difference from the block's bf16 4 + 2 + 4; weighted
    4 + 4; taken off 4 + 4 + 4), and 10 backward (dq read and written 8, bf16 added 2). k and v of a token are
    2·2·4 = 16 elements: 32 bytes in bf16, and 64 of fp32 gradients.
    """
    setup = setup_on(
        attention=64.0,
        memory=608.0,  # 38 · 16
        link=32.0,
        message=0.25,
        launch=0.01,
        entry=0.1,
    )
    work = RingWork(
        pairs=np.array([[10, 4], [6, 8]]),
        entries=np.array([[1, 1], [1, 2]]),
        merged_rows=np.array([[0, 2], [0, 4]]),
        received=np.array([[0, 3], [0, 5]]),
        num_tokens=8,
    )
    how = Arrangement(name="ring", ring=2, ulysses=1)
    # Forward, own block: 10 pairs, an entry and a kernel, 10.11 s; 6.11 s on rank 1. The messages of 3.25 and 5.25 s
    # are there by then. The other block: 4 pairs, 2 merged queries, an entry, 6 kernels, 6.16 s; rank 1 has 8 + 4
    # + 0.2 + 0.06 = 12.26 s.
    forward = max(10.11 + 6.16, 6.11 + 12.26)
    # Backward a pair takes 2.5 s and a merged query 160 / 608. The other block comes first, when both messages are
    # there, after 5.25 s: 10 + 2 · 160 / 608 + 0.16 and 20 + 4 · 160 / 608 + 0.26. Then come the own blocks, 25.11 and
    # 15.11 s, while the gradients go home: 3 and 5 tokens of 2 s, and a message, from when both are computed.
    row = 160 / 608
    others = 10.16 + 2 * row, 20.26 + 4 * row
    backward = 5.25 + max(others[0] + 25.11, others[1] + 15.11, max(others) + 5 * 2 + 0.25)
    assert attention_time(setup, how, work).seconds == pytest.approx(forward + backward)
    found = attention_time(setup, how, work)
    assert found.compute == pytest.approx([16.27 + 35.27 + 2 * row, 18.37 + 35.37 + 4 * row])
    assert found.link == pytest.approx(5.25 + 3.25 + 10.25)  # what rank 1 receives forward, and rank 0 backward


def test_ulysses_exchanges_and_attends() -> None:
    """Two ranks; all of a row's pairs, 8 · 9 / 2 = 36, for half of the heads each.

    Each rank has 4 of 8 tokens, with q and out of 16 elements and k and v of 8: 48 elements of 2 bytes, 384 bytes,
    and in the backward pass as many. Half of them leave. All are read or written four times besides.
    """
    setup = setup_on(attention=1.0, memory=2.0, link=10.0, across=1e-9, message=0.5, launch=3.0)
    time = attention_time(setup, Arrangement(name="ulysses", ring=1, ulysses=2), RingWork.of(np.array([8]), 1))
    held = 2 * 48 * 2 * 4
    exchanged = held / 2 / 10.0 + 4 * held / 2.0 + 4 * 0.5
    attended = 36 * (4 + 10) * 16 / 2 / 1.0 + 2 * 3.0
    assert time.seconds == pytest.approx(exchanged + attended)


# ------------------------------------------------------------------------------------------------
# A step's time
# ------------------------------------------------------------------------------------------------


LAYERS, HEAD = 2 * 768, 256
MATRICES = LAYERS + HEAD
"""Parameters that a token is multiplied with: of both layers, and of the head."""
PAIRS = 1024 * 1025 // 2 // 2
"""Of a rank, with all heads: half of the row's."""


def parts(shape: RunShape = ULYSSES, **slow: float) -> dict[str, float]:
    return step_seconds(shape, machine_of(**slow), LENGTH, [LENGTH])


def test_matrices_forward_backward_and_again() -> None:
    """2 FLOPs a parameter and token forward, 4 backward, 2 more in checkpoints, and attention's 4·q a pair again."""
    assert parts(matmul=1e3) == pytest.approx(
        {"linear": 6 * MATRICES * TOKENS / 1e3, "recomputed": 2 * LAYERS * TOKENS / 1e3}
    )
    frozen = changed(ULYSSES, model=replace(MODEL, num_trained_parameters=0), activation_checkpointing=False)
    assert parts(frozen, matmul=1e3) == pytest.approx({"linear": 4 * MATRICES * TOKENS / 1e3})
    again = 4 * 16 * 2 * PAIRS / 1e3
    assert parts(attention_forward=1e3) == pytest.approx({"attention": again, "recomputed": again})
    assert parts(changed(ULYSSES, selective=True), attention_forward=1e3) == pytest.approx({"attention": again})
    every_other = changed(ULYSSES, every_n_layers=2)
    assert parts(every_other, matmul=1e3)["recomputed"] == pytest.approx(LAYERS * TOKENS / 1e3)


def test_attention_and_its_exchange() -> None:
    """14·q FLOPs a pair and layer; 48 elements of 2 bytes a token, of which half leave, forward and backward."""
    assert parts(attention=1e3)["attention"] == pytest.approx(14 * 16 * 2 * PAIRS / 1e3)
    found = parts(link=1e3)
    assert found["attention"] == pytest.approx(2 * (2 * 48 * 2 * TOKENS / 2) / 1e3)
    # Weights are gathered twice in bf16 and their gradients reduced in fp32: of 8 bytes each, half come from elsewhere.
    gather_objects = 8 * 2088 / 2 / 1e3
    assert weights_seconds(ULYSSES, machine_of(link=1e3)) == pytest.approx(gather_objects)
    assert found.get("weights", 0.0) == pytest.approx(max(0.0, gather_objects - found["attention"]))
    # ZeRO-1 gathers bf16 weights once, and this one reduces in bf16.
    zero1 = changed(ULYSSES, engine="zero1", communication_data_type="bf16")
    assert weights_seconds(zero1, machine_of(link=1e3)) == pytest.approx(4 * 2088 / 2 / 1e3)


def test_four_copies_of_a_model_also_reduce_among_themselves() -> None:
    """8 ranks, 4 copies of 2 shards: of a shard's fp32 gradients, 3 of 4 parts go there and back again."""
    setup = changed(ULYSSES, world_size=8, dp_replicate=4)
    gather_objects, shard = 8 * 2088 / 2, 4 * 2088 / 2
    assert weights_seconds(setup, machine_of(link=1e3)) == pytest.approx((gather_objects + 2 * shard * 3 / 4) / 1e3)


SAVED = 64 + 64 + (64 + 64 + 16) + 128
"""Bytes a token that a layer saves. Each of the two norms: an fp32 copy of its input, the normalised bf16 and what
matrices read, (4 + 2 + 2) · 8. Attention: q, k and v, 2 · 32; the output for heads and for tokens, 2 · 2 · 16; and an
fp32 log-sum-exp a head, 4 · 4. The MLP: gate, up, activation and product, 4 · 2 · 16."""


def test_bytes_that_are_only_moved() -> None:
    """What is saved is written and read; logits have 14 bytes. Forward once, again once, backward twice as much.

    Norms and rotary embeddings of the 24 queries and keys move 90 bytes each, if no kernel of Liger's computes them.
    """
    assert layer_bytes(ULYSSES).saved == SAVED
    logits = 3 * 2 * 14 * 32
    found = parts(memory=1e3)
    assert found["elementwise"] == pytest.approx((4 * 2 * (2 * SAVED + 90 * 24) + logits) * TOKENS / 1e3)
    fused = changed(ULYSSES, fused_layers=True)
    moved = 4 * 2 * 2 * layer_bytes(fused).saved + logits
    assert parts(fused, memory=1e3)["elementwise"] == pytest.approx(moved * TOKENS / 1e3)
    # Of AdamW: weight, gradient and two moments in fp32 are read, all but the gradient written: 28 bytes.
    assert found["optimizer"] == pytest.approx(28 * 2088 / 2 / 1e3)


def test_host_memory() -> None:
    """Checkpoints of 2 · 8 bytes a token and layer go there and back, behind computation. The optimizer there reads and
    writes 28 bytes a parameter, 8 more to scale gradients and 6 to round weights, and copies 10; for both ranks."""
    offloaded = changed(ULYSSES, activation_offloading=True)
    assert parts(offloaded, host_link=1e3) == pytest.approx({"host": 2 * 2 * 16 * TOKENS / 1e3})
    assert "host" not in parts(offloaded, host_link=1e3, matmul=1e3)
    unpinned = changed(offloaded, pins_host_memory=False)
    assert parts(unpinned, host_memory=1e3)["host"] == pytest.approx(3 * 2 * 2 * 16 * TOKENS * 2 / 1e3)
    there = changed(ULYSSES, engine="zero3", offload_optimizer_device="cpu")
    assert optimizer_seconds(there, machine_of(host_memory=1e3)) == pytest.approx(42 * 1044 * 2 / 1e3)
    assert optimizer_seconds(there, machine_of(host_link=1e3)) == pytest.approx(10 * 1044 / 1e3)
    there = changed(there, pins_host_memory=False)  # what is copied goes through it three times more
    assert optimizer_seconds(there, machine_of(host_memory=1e3)) == pytest.approx((42 + 3 * 10) * 1044 * 2 / 1e3)


LAUNCHED = 2 * 665 * 1.9 * (1 + 1 / 3)
"""Launches in the time in which the host goes through both layers, forward, backward and forward again."""


def test_the_host_that_goes_through_the_layers() -> None:
    """What the device computes meanwhile hides it. Attention's kernel is launched twice a layer."""
    attention = 2 * 2 * 1e3
    assert parts(launch=1e3) == pytest.approx({"attention": attention, "launches": LAUNCHED * 1e3 - attention})
    once = changed(ULYSSES, activation_checkpointing=False)
    assert parts(once, launch=1e3)["launches"] == pytest.approx(2 * 665 * 1.9 * 1e3 - attention)
    computed = (8 * LAYERS + 6 * HEAD) * TOKENS / 1e3 + 2 * 2 * 8.0
    assert parts(matmul=1e3, launch=8.0)["launches"] == pytest.approx(LAUNCHED * 8.0 - computed)
    assert "launches" not in parts(matmul=1e3, launch=1.0)


def test_a_forward_pass_alone_also_waits_for_the_host() -> None:
    """The step computes its forward pass again, and counts experts by a forward pass of each of two micro-batches."""
    slow = machine_of(launch=1e3, attention=1e9)
    step = step_seconds(ULYSSES, slow, LENGTH, [LENGTH])
    assert forward_seconds(ULYSSES, step) == pytest.approx(LAUNCHED * 1e3 / 3, rel=1e-3)
    two = changed(ULYSSES, micro_batches=2)
    plain, counting = (step_seconds(two, slow, LENGTH, [LENGTH], counts_experts=counts) for counts in (False, True))
    assert counting["experts counted"] == pytest.approx(2 * LAUNCHED * 1e3 / 3, rel=0.01)
    assert sum(counting.values()) - sum(plain.values()) == pytest.approx(counting["experts counted"])


def test_a_simulated_step_of_two_micro_batches() -> None:
    """Nothing takes time but matrices, attention and AdamW; both ranks compute equally long and wait for nobody."""
    slow = {"matmul": 1e3, "attention": 1e6}
    work = RingWork.of(np.array([LENGTH]), 1)
    step = simulate(ULYSSES, [[work], [work]], machine_of(**slow))
    one = (8 * LAYERS + 6 * HEAD) * TOKENS / 1e3 + (14 + 4) * 16 * 2 * PAIRS / 1e6
    assert step.compute == pytest.approx([2 * one] * 2)
    assert step.exchange == pytest.approx([0, 0])
    assert step.wait == pytest.approx([0, 0])
    assert (step.tokens, step.efficiency) == (2 * 1024, pytest.approx(1))
    assert step.tokens_per_second_per_device == pytest.approx(2 * 1024 / (2 * one) / 2)


# ------------------------------------------------------------------------------------------------
# Memory
# ------------------------------------------------------------------------------------------------


def test_every_byte_of_a_rank_at_the_loss() -> None:
    """FSDP2, fp32 weights, with gradients of an earlier micro-batch; the peak is at the loss."""
    peak = cost(changed(ULYSSES, micro_batches=2, fused_loss=False), machine_of(), LENGTH)
    assert peak.moment == "loss"
    expected = {
        "parameters": 4 * 1044,
        "gradients": 4 * 1044,
        "optimizer states": 8 * 1044,
        # This layer and the next in bf16, the gradient of this one, and the fp32 one that is reduced.
        "unsharded parameters": 2 * 2 * 784 + 2 * 784 + 4 * 784,
        "checkpoints": 2 * 2 * 8 * TOKENS,
        # The last layer's output, its norm's fp32 copy and output, and the gradient: 2 + 4 + 2 + 2.
        "hidden states": 10 * 8 * TOKENS,
        # Logits in bf16, 2, and three times in fp32: log-probabilities, their gradients and those of logits.
        "logits and loss": 14 * 32 * TOKENS,
        "fixed": 2.0e9 + 2 * 3.5e9,
    }
    at_the_loss = sum(expected[name] for name in ("checkpoints", "hidden states", "logits and loss"))
    assert dict(peak.device) == pytest.approx(expected | {"fragmentation": 0.1 * at_the_loss})
    assert peak.allocated_bytes == pytest.approx(sum(expected.values()) - 9e9)
    # Fused: three fp32 tiles, here of all logits, and the fp32 gradient of the head.
    assert moments(ULYSSES)["loss"]["logits and loss"] == 3 * 4 * 32 * TOKENS + 4 * 32 * 8


def moments(shape: RunShape) -> dict[str, dict[str, float]]:
    return memory.device_moments(shape, LENGTH, is_cpu=False)


def test_every_byte_of_the_backward_pass_of_a_layer() -> None:
    """Of Ulysses, made by attention: gradients of q, k and v 2 · 32, the fp32 sum of dq 4 · 16, and dk and dv for every
    query head 2 · 2 · 16; the output's gradient takes the place of its copy. Of the MLP: 2 gradients of I, one of h."""
    found = moments(ULYSSES)
    assert found["attention"]["hidden states"] == (64 + 2 * 8) * TOKENS
    assert found["attention"]["attention"] == (144 + 64 + 64 + 64) * TOKENS
    assert found["MLP"]["attention"] == 144 * TOKENS
    assert found["MLP"]["MLP"] == (128 + 2 * 2 * 16 + 2 * 8) * TOKENS
    assert found["MLP"]["hidden states"] == (64 + 64) * TOKENS
    tiled = moments(changed(ULYSSES, tiled_mlp_num_shards=4))
    # A quarter of it at a time, and whole: what goes in, what comes out, and a gradient.
    assert tiled["MLP"]["MLP"] == (128 + 64 + 16) * TOKENS / 4 + 3 * 2 * 8 * TOKENS


@pytest.mark.parametrize(
    ("backend", "exchanged"),
    [
        # Own k and v, 2 · 2 · 8; two blocks of k and v that arrive in turn, 64; four of fp32 gradients, 4 · 2 · 4 · 8.
        ("ring", 32 + 64 + 256),
        # Own k and v; of both ranks, one of the two heads at a time and the next one, 2 · 32; fp32 gradients, own and
        # of both ranks for one head of two, 2 · 4 · 8 + 2 · 2 · 4 · 8 / 2.
        ("gather", 32 + 64 + 64 + 64),
    ],
)
def test_what_a_ring_of_two_holds(backend, exchanged) -> None:
    """Beside q, k, v and the output (2 · 48), a log-sum-exp; and in the backward pass, of the output 2 · 16, of dq in
    fp32 and of a block 8 · 16, and the kernel's 2 · 32 + 2 · 2 · 16."""
    found = moments(changed(ULYSSES, sp=2, ring=2, backend=backend))["attention"]
    assert found["exchange"] == exchanged * TOKENS
    assert found["attention"] == (96 + 16 + 32 + 128 + 64 + 64) * TOKENS


@pytest.mark.parametrize(
    ("values", "on_device"),
    [
        ({"activation_checkpointing": False}, 2 * SAVED),
        ({"selective": True}, 2 * (16 + 2 * 16 + 4 * 4)),  # attention's output and log-sum-exp, too
        ({"every_n_layers": 2}, SAVED + 16),
        ({"activation_offloading": True}, 0),
    ],
)
def test_what_layers_keep_for_their_backward_pass(values, on_device) -> None:
    shape = changed(ULYSSES, **values)
    assert memory._checkpoints(shape, layer_bytes(shape)) == on_device


def test_host_memory_of_a_node() -> None:
    """Two ranks: checkpoints of 2 · 8 bytes; of ZeRO-3's optimizer there fp32 weights and moments, 12 bytes, and fp32
    gradients, 4, and half as much for buffers."""
    offloaded = cost(changed(ULYSSES, activation_offloading=True), machine_of(), LENGTH)
    processes = {"processes": 2 * PROCESS_BYTES}
    assert dict(offloaded.host) == {"checkpoints": 2 * 2 * 16 * TOKENS} | processes
    assert offloaded.device["copies in flight"] == 4 * 2 * 8 * TOKENS
    there = changed(ULYSSES, engine="zero3", offload_optimizer_device="cpu", communication_data_type="bf16")
    expected = {"gradients": 2 * 4 * 1044, "optimizer states": 2 * 12 * 1044}
    found = memory.host_moments(there, LENGTH, 2, is_cpu=False)["step"]
    assert found == expected | {"buffers": sum(expected.values()) / 2, "checkpoints": 0} | processes


def test_host_memory_while_weights_are_read_and_written() -> None:
    """ZeRO-1 reads all fp32 weights on each of two ranks, ZeRO-3 half of them, FSDP2 straight to the GPU. A checkpoint
    is written in parts of a rank: of AdamW's two moments, 8 bytes a parameter, more than the weights' 4. Offloaded
    states stay where they are, but gradients are gone by then."""

    def host(engine: str, moment: str, **values: str) -> dict[str, float]:
        found = memory.host_moments(changed(ULYSSES, engine=engine, **values), LENGTH, 2, is_cpu=False)
        return {name: size for name, size in found[moment].items() if size and name != "processes"}

    assert host("zero1", "loading") == {"weights": 2 * 4 * 2088}
    assert host("zero3", "loading") == {"weights": 2 * 4 * 1044}
    assert host("fsdp2", "loading") == {}
    file = {"file of a checkpoint": 2 * 8 * 1044}
    assert host("fsdp2", "saving") == file
    there = {"parameters": 2 * 4 * 1044, "optimizer states": 2 * 8 * 1044}
    assert host("fsdp2", "saving", offload_param_device="cpu") == there | file
    assert host("fsdp2", "step", offload_param_device="cpu") == there | {"gradients": 2 * 4 * 1044}

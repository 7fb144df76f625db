"""`longctx.parallelize` in a loop of one's own: cutting and joining batches, leaks, gradients."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist

import longctx
from longctx.collate import SequenceCollator
from longctx.sequence.layout import Layout
from longctx.sequence.mesh import ParallelDims
from longctx.sequence.shard import cut, shard_tokens, unshard_tokens
from tests.reference import layout_of
from tests.workers import run_ranks

LENGTHS = [40, 3, 100, 1, 17, 64, 9]


def packed_batch(multiple, *, change=None, seed=0):
    """Seven documents in one padded row; `change` names a document whose second token is another one."""
    rng = np.random.default_rng(seed)
    documents = [rng.integers(3, 250, length) for length in LENGTHS]
    if change is not None:
        documents[change][1] += 1
    collator = SequenceCollator(pad_token_id=0, pad_to_multiple_of=multiple, padding_free=True)
    return collator([{"input_ids": document} for document in documents])


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 1), (2, 1), (4, 1), (1, 4), (3, 1)])
def test_cutting_and_joining_are_inverse(ring, ulysses):
    dims = ParallelDims.arrange(ring * ulysses, ring=ring, ulysses=ulysses)
    batch = packed_batch(dims.multiple)
    layout = Layout.of_batch(batch).spread(dims)
    shards = [shard_tokens(batch["input_ids"], layout, rank) for rank in range(dims.sp)]
    assert {tuple(shard.shape) for shard in shards} == {(1, layout.local_length)}
    assert torch.equal(unshard_tokens(torch.cat(shards), layout), batch["input_ids"])


def test_labels_are_shifted_within_documents():
    labels = torch.arange(10, 20).reshape(2, 5)
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
    batch = {"input_ids": labels, "labels": labels, "position_ids": positions}
    layout = Layout.of_batch(batch)
    shard = cut(batch, layout, 0)
    assert shard.labels.tolist() == [[11, 12, -100, 14, -100, -100, 17, 18, 19, -100]]
    assert shard.learnt.tolist() == [0, 1, 3, 6, 7, 8]
    assert layout.num_targets == 6


def test_right_padding_needs_no_positions_and_left_padding_is_refused():
    tokens = torch.full((2, 4), -100)
    batch = {"input_ids": tokens, "labels": tokens, "attention_mask": torch.tensor([[1, 1, 1, 0], [1] * 4])}
    assert Layout.of_batch(batch).position_ids().tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    batch["attention_mask"] = torch.tensor([[0, 1, 1, 1], [1] * 4])
    with pytest.raises(ValueError, match="right padding"):
        Layout.of_batch(batch)
    with pytest.raises(ValueError, match="must start at 0"):
        Layout.of_batch({"input_ids": tokens, "labels": tokens, "position_ids": torch.tensor([[1, 0, 1, 2]] * 2)})


def test_a_length_that_cannot_be_cut_evenly_is_refused():
    dims = ParallelDims.arrange(4, ring=4)
    with pytest.raises(ValueError, match="pad_to_multiple_of=8"):
        layout_of([0, 12]).spread(dims)


def outputs_of_documents(change):
    """Logits of every document, put back in order, on ring and Ulysses; one document changed or none."""
    from longctx.model.tiny import tiny_model

    logits = {}
    for backend in ("ring", "ulysses"):
        model, sequence = longctx.parallelize(tiny_model(), sp=dist.get_world_size(), sp_backend=backend)
        shard = sequence.shard(packed_batch(sequence.dims.multiple, change=change))
        with torch.no_grad():
            logits[backend] = sequence.unshard(model(**shard.inputs).logits, shard.layout)[0]
    return logits


def leaks():
    """For each backend, the documents whose outputs change, bit for bit, when a token of document 2 does."""
    bounds = np.cumsum([0, *LENGTHS])
    before, after = outputs_of_documents(None), outputs_of_documents(2)
    return {
        backend: [
            document
            for document, (a, b) in enumerate(pairwise(bounds))
            if not torch.equal(before[backend][a:b], after[backend][a:b])
        ]
        for backend in before
    }


def test_a_changed_token_changes_its_own_document_only():
    for changed in run_ranks(4, f"{__name__}:leaks"):
        assert changed == {"ring": [2], "ulysses": [2]}


def loop_of_ones_own():
    """The README's loop: FSDP2 over all ranks, sp 2, three steps; returns the losses."""
    from torch.distributed.fsdp import fully_shard

    from longctx.model.tiny import tiny_model

    model, sequence = longctx.parallelize(tiny_model(), sp=2)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    for step in range(3):
        batch = packed_batch(sequence.dims.multiple, seed=10 * step + sequence.dims.dp_rank(dist.get_rank()))
        num_label_tokens = sequence.count_label_tokens([batch])
        shard = sequence.shard(batch)
        loss = sequence.loss(model(**shard.inputs).logits, shard.shift_labels, num_label_tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        losses.append(loss.item())
    return losses


def checkpointed(kwargs, compiled):
    """One step of sp 2 with activation checkpointing: how often each schedule ran, and the error of the gradients."""
    from longctx.attention.operator import LocalSchedule
    from longctx.model.tiny import tiny_model
    from longctx.ring.attention import RingSchedule

    runs = []

    def counted(forward):
        def run(self, *args):
            runs.append(type(self).__name__)
            return forward(self, *args)

        return run

    for schedule in (RingSchedule, LocalSchedule):
        schedule.forward = counted(schedule.forward)
    results = {}
    for backend in ("ring", "gather", "ulysses"):
        selective = kwargs.get("selective")
        gradients = []
        for checkpointing in (False, True):
            model, sequence = longctx.parallelize(
                tiny_model(), sp=2, sp_backend=backend, selective_checkpointing=selective
            )
            model.train()
            if checkpointing:
                asked = {key: value for key, value in kwargs.items() if key != "selective"}
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=asked or None)
                if compiled:
                    model.compile(backend="aot_eager")
            batch = packed_batch(sequence.dims.multiple)
            shard = sequence.shard(batch)
            runs.clear()
            loss = sequence.loss(model(**shard.inputs).logits, shard.shift_labels, sequence.count_label_tokens([batch]))
            loss.backward()
            gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        error = float((gradients[0] - gradients[1]).norm() / gradients[0].norm())
        results[backend] = len(runs) / model.config.num_hidden_layers, error
    return results


@pytest.mark.parametrize(
    ("kwargs", "compiled", "ring_runs", "ulysses_runs"),
    [
        ({}, False, 1, 2),
        ({"selective": True}, False, 1, 1),
        pytest.param({"selective": False}, False, 2, 2, marks=pytest.mark.long),
        pytest.param({"use_reentrant": True}, False, 2, 2, marks=pytest.mark.long),
        pytest.param({}, True, 1, 2, marks=pytest.mark.long),
    ],
)
def test_checkpointing_does_not_run_the_ring_again(kwargs, compiled, ring_runs, ulysses_runs):
    for results in run_ranks(2, f"{__name__}:checkpointed", kwargs, compiled):
        assert {backend: runs for backend, (runs, _) in results.items()} == {
            "ring": ring_runs,
            "gather": ring_runs,
            "ulysses": ulysses_runs,
        }
        assert max(error for _, error in results.values()) <= 1e-6  # the same sums; compiled ones in another order


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")  # its older name works everywhere
def test_a_second_backward_pass_over_saved_attention_is_refused():
    from longctx.model.tiny import tiny_model

    model, sequence = longctx.parallelize(tiny_model(), sp=1, selective_checkpointing=True)
    model.train()
    model.gradient_checkpointing_enable()
    batch = packed_batch(8)
    shard = sequence.shard(batch)
    loss = sequence.loss(model(**shard.inputs).logits, shard.shift_labels, sequence.count_label_tokens([batch]))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="selective_checkpointing=False"):
        loss.backward()


@pytest.mark.long  # tests/layers/test_compiled.py has the same break at attention
def test_torch_compile_takes_the_rest_of_the_model():
    """Attention breaks the graph in every layer; the other graphs are compiled once and serve every batch."""
    from torch._dynamo.testing import CompileCounterWithBackend

    from longctx.model.tiny import tiny_model

    counter, gradients = CompileCounterWithBackend("aot_eager"), []
    for compiled in (False, True):
        model, sequence = longctx.parallelize(tiny_model(), sp=1)
        if compiled:
            model.compile(backend=counter)
        graphs = []
        for seed in range(3):
            batch = packed_batch(8, seed=seed)
            shard = sequence.shard(batch)
            loss = sequence.loss(model(**shard.inputs).logits, shard.shift_labels, sequence.count_label_tokens([batch]))
            loss.backward()
            graphs.append(counter.frame_count)
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert graphs[0] > model.config.num_hidden_layers
    assert len(set(graphs)) == 1
    assert float((gradients[0] - gradients[1]).norm() / gradients[0].norm()) <= 1e-6


def test_a_loop_of_ones_own_equals_one_process():
    from longctx.model.tiny import tiny_model
    from tests.reference import dense_loss

    model = tiny_model()
    model.set_attn_implementation("eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    expected = []
    for step in range(3):
        documents = []
        for dp_rank in range(2):
            rng = np.random.default_rng(10 * step + dp_rank)
            ids = [rng.integers(3, 250, length).tolist() for length in LENGTHS]
            documents += [(tokens, tokens) for tokens in ids]
        loss = dense_loss(model, documents)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    for losses in run_ranks(4, f"{__name__}:loop_of_ones_own"):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_calling_the_model_without_a_cut_batch_is_refused():
    from longctx.model.tiny import tiny_model

    model, _ = longctx.parallelize(tiny_model(), sp=1)
    with pytest.raises(ValueError, match=r"sequence\.shard"):
        model(input_ids=torch.zeros(1, 4, dtype=torch.long))
    model.set_attn_implementation("sdpa")
    assert model(input_ids=torch.zeros(1, 4, dtype=torch.long)).logits.shape == (1, 4, model.config.vocab_size)


def test_a_cut_that_did_not_happen_stops_the_first_step():
    from longctx.model.tiny import tiny_model

    model, sequence = longctx.parallelize(tiny_model(), sp=1)
    shard = sequence.shard(packed_batch(8))
    shard.context.local_length //= 2  # as if two ranks shared the row, while the model gets all of it
    with pytest.raises(AssertionError, match=r"attention sees 240 tokens where this rank's shard has 120"):
        model(**shard.inputs)

"""Batches, models and calls that longctx refuses because training would not follow them exactly."""

from __future__ import annotations

import re

import pytest
import torch
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import AutoModelForSequenceClassification, DynamicCache, LlamaConfig

import longctx
from longctx.attention.interface import longctx_attention
from longctx.data import DataError
from longctx.model.tiny import tiny_model
from longctx.sequence.layout import Layout
from longctx.sequence.mesh import ParallelDims
from tests.workers import run_ranks

LENGTH = 16


def batch_of(*, rows: int = 1, **more: object) -> dict[str, object]:
    ids = torch.arange(3, 3 + rows * LENGTH).view(rows, LENGTH)
    return {"input_ids": ids, "labels": ids.clone(), **more}


POSITIONS = torch.arange(LENGTH)[None]
LEFT = torch.tensor([[0] * 4 + [1] * 12])
HOLE = torch.tensor([[1] * 4 + [0] * 4 + [1] * 8])
BATCHES = {
    "left padding with positions": ({"position_ids": POSITIONS, "attention_mask": LEFT}, "right padding"),
    "a hole with positions": ({"position_ids": POSITIONS, "attention_mask": HOLE}, "right padding"),
    "a mask of four dimensions": (
        {"position_ids": POSITIONS, "attention_mask": torch.ones(1, 1, LENGTH, LENGTH)},
        "must be [B, S]",
    ),
    "documents numbered by a mask": (
        {"attention_mask": torch.tensor([[1] * 8 + [2] * 8])},
        "position_ids that restart",
    ),
    "labels on padding": ({"attention_mask": LEFT.flip(1)}, "4 labels stand on padding"),
    "labels beyond the lengths": ({"lengths": [12]}, "4 labels stand on padding"),
    "lengths of another batch": ({"lengths": [8, 12]}, "do not fit a batch of 1 × 16"),
    "cu_seq_lens of fewer tokens": (
        {"cu_seq_lens_q": torch.tensor([0, 8, 12])},
        "must ascend from 0 to the batch's 16",
    ),
    "cu_seq_lens that do not ascend": ({"cu_seq_lens_q": torch.tensor([0, 8, 4, 16])}, "must ascend from 0"),
    "cu_seq_lens beside other positions": (
        {"cu_seq_lens_q": torch.tensor([0, 8, 16]), "position_ids": POSITIONS},
        "position_ids begin documents at [0], and cu_seq_lens_q at [0, 8]",
    ),
    "lengths beside another mask": (
        {"lengths": [12], "attention_mask": torch.ones(1, LENGTH)},
        "lengths [12] and an attention_mask with [16] tokens a row contradict each other",
    ),
    "embeddings": ({"inputs_embeds": torch.ones(1, LENGTH, 8)}, "the batch has inputs_embeds"),
    "lengths of documents in another form": ({"seq_lengths": torch.tensor([8, 8])}, "the batch has seq_lengths"),
    "a mask of the loss": ({"loss_mask": torch.ones(1, LENGTH)}, "the batch has loss_mask"),
    "types of tokens": ({"token_type_ids": torch.ones(1, LENGTH)}, "the batch has token_type_ids"),
    "negative labels": ({"labels": torch.full((1, LENGTH), -1)}, "labels hold -1"),
    "no labels": ({"labels": None}, "the batch has no labels"),
}


@pytest.fixture(scope="module")
def parallelized():
    return longctx.parallelize(tiny_model(), sp=1)


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_that_would_be_read_in_another_way_is_refused(name, parallelized):
    more, said = BATCHES[name]
    with pytest.raises(ValueError, match=re.escape(said)):
        parallelized[1].shard(batch_of() | more)


def test_right_padding_may_come_with_positions(parallelized):
    model, sequence = parallelized
    mask, labels = LEFT.flip(1), batch_of()["labels"].masked_fill(LEFT.flip(1) == 0, -100)
    with torch.no_grad():
        padded = sequence.log_probs(model, batch_of(position_ids=POSITIONS, attention_mask=mask, labels=labels))
        short = {name: values[:, :12] for name, values in batch_of().items()}
        assert torch.allclose(padded[:, :12], sequence.log_probs(model, short), atol=1e-6)


@pytest.mark.parametrize("rows", [1, 2])
def test_documents_may_be_given_by_cu_seq_lens(rows, parallelized):
    """As transformers' DataCollatorWithFlattening gives them, without positions; a row begins a document."""
    model, sequence = parallelized
    batch, starts = batch_of(rows=rows), [0, 5, 8]
    positions = torch.cat([torch.arange(5), torch.arange(3), torch.arange(8)]).expand(rows, -1)
    bounds = torch.tensor([row * LENGTH + start for row in range(rows) for start in starts] + [rows * LENGTH])
    with torch.no_grad():
        expected = sequence.log_probs(model, batch | {"position_ids": positions})
        assert torch.equal(sequence.log_probs(model, batch | {"cu_seq_lens_q": bounds.int()}), expected)


def test_a_layout_of_another_batch_is_refused(parallelized):
    batch = batch_of(position_ids=POSITIONS)
    layout, other = Layout.of_batch(batch), Layout.of_batch(batch | {"labels": batch["labels"].flip(1)})
    with pytest.raises(ValueError, match="layout is of ring 1 × ulysses 2"):
        parallelized[1].shard(batch | {"layout": layout.spread(ParallelDims.arrange(2, ulysses=2))})
    with pytest.raises(ValueError, match="layout is of another batch"):
        parallelized[1].shard(batch | {"layout": other})
    parallelized[1].shard(batch | {"layout": layout})


def test_what_is_said_beside_a_cut_batch_is_refused(parallelized):
    model, sequence = parallelized
    shard = sequence.shard(batch_of())
    for more, said in (
        ({"attention_mask": LEFT}, "attention_mask beside a batch that was cut"),
        ({"past_key_values": DynamicCache()}, "(past_key_values|cache) beside a batch that was cut"),
        ({"labels": shard.shift_labels}, "labels beside a batch that was cut"),
        ({"position_ids": None}, "without its position_ids"),
    ):
        with pytest.raises(ValueError, match=said):
            model(**shard.inputs | more)


def test_tuples_are_not_what_is_read():
    """`config.return_dict = False` makes stock models return tuples."""
    model, sequence = longctx.parallelize(tiny_model(), sp=1)
    with torch.no_grad():
        expected = sequence.log_probs(model, batch_of())
        model.config.return_dict = False
        assert torch.equal(expected, sequence.log_probs(model, batch_of()))


def test_other_attention_is_refused_until_ours_is_back():
    model, sequence = longctx.parallelize(tiny_model(), sp=1)
    with torch.no_grad():
        before = sequence.log_probs(model, batch_of())
        model.set_attn_implementation("sdpa")
        model(input_ids=batch_of()["input_ids"])
        with pytest.raises(ValueError, match=r"its attention is 'sdpa'.*set_attn_implementation\('longctx'\) first"):
            sequence.log_probs(model, batch_of())
        model.set_attn_implementation("longctx")
        assert torch.equal(before, sequence.log_probs(model, batch_of()))


def test_a_layer_that_does_not_call_us_is_refused():
    model, sequence = longctx.parallelize(tiny_model(), sp=1)
    model.model.layers[0].self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    layers = len(model.model.layers)
    with pytest.raises(ValueError, match=f"{layers - 1} of {layers} attention layers went through longctx"):
        sequence.log_probs(model, batch_of())


def test_more_keys_than_tokens_are_refused(parallelized):
    model, sequence = parallelized
    q, longer = torch.ones(1, 2, LENGTH, 8), torch.ones(1, 2, LENGTH + 4, 8)
    context = sequence.shard(batch_of()).context
    with pytest.raises(ValueError, match="attends to 20 keys from 16 tokens"):
        longctx_attention(model.model.layers[0].self_attn, q, longer, longer, None, sequence=context)


def test_keys_that_an_adapter_adds_are_refused():
    prefix = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model, sequence = longctx.parallelize(tiny_model(), sp=1)
    adapted = get_peft_model(model, prefix)
    shard = sequence.shard(batch_of())
    with pytest.raises(ValueError, match="beside a batch that was cut"):
        adapted(**shard.inputs, shift_labels=shard.shift_labels, token_outputs=True)


def test_models_that_are_wrapped_or_have_no_head_are_refused_unchanged():
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
    classifier = AutoModelForSequenceClassification.from_config(config)
    with pytest.raises(ValueError, match="the head of LlamaForSequenceClassification is NoneType"):
        longctx.parallelize(classifier, sp=1)
    assert classifier.config._attn_implementation != "longctx"
    with pytest.raises(ValueError, match="Sequential is not a model of transformers"):
        longctx.parallelize(nn.Sequential(tiny_model()), sp=1)
    prompted = get_peft_model(tiny_model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ValueError, match="learn a prompt or a prefix"):
        longctx.parallelize(prompted, sp=1)
    dropping = tiny_model()
    dropping.model.layers[0].mlp.dropout = nn.Dropout(0.3)
    with pytest.raises(ValueError, match=r"mlp.dropout drops values with p 0\.3"):
        longctx.parallelize(dropping, sp=1)
    with pytest.raises(ValueError, match=r"and wrap or compile it afterwards"):
        longctx.parallelize(torch.compile(tiny_model()), sp=1)


def refusals_of_two_ranks():
    """Return the errors of a rank for batches that differ within the group, and for another number of processes."""
    import torch.distributed as dist

    said = []
    for backend in ("ulysses", "ring"):
        model, sequence = longctx.parallelize(tiny_model(), sp=2, sp_backend=backend)
        batch = batch_of()
        batch["labels"][0, 3] = -100 if dist.get_rank() else 5
        try:
            sequence.log_probs(model, batch)
        except ValueError as error:
            said.append(str(error))
        sequence.log_probs(model, batch_of())
    sequence.dims = ParallelDims.arrange(1)
    try:
        sequence.count_label_tokens([batch_of()])
    except ValueError as error:
        said.append(str(error))
    return said


def test_ranks_that_differ_are_refused():
    for said in run_ranks(2, f"{__name__}:refusals_of_two_ranks"):
        assert len(said) == 3, said
        for refusal in said[:2]:
            assert "the 2 ranks of a sequence group have cut 2 different batches" in refusal
        assert "parallelize was called for 1 processes, and there are 2" in said[2]


def steps_of_four_ranks():
    """Return what a rank is told when it counts steps of two micro-batches: the same ones, and others on rank 3.

    All ranks are told what rank 2 could not read.
    """
    import torch.distributed as dist

    _, sequence = longctx.parallelize(tiny_model(), sp=2)
    said = []
    for other in ({}, {"input_ids": POSITIONS}, {"labels": POSITIONS}, {"position_ids": POSITIONS % 8}):
        batches = [batch_of(position_ids=POSITIONS) for _ in range(2)]
        if dist.get_rank() == 3:
            batches[1] |= other
        try:
            said.append(sequence.count_label_tokens(batches))
        except ValueError as error:
            said.append(str(error))
    broken = DataError("data.jsonl:7: no text.") if dist.get_rank() == 2 else None  # sp ranks of its group have batches
    step = sequence.begin_step([] if broken else [Layout.of_batch(batch_of())], 0, error=broken)
    with pytest.raises(DataError, match=r"^data\.jsonl:7: no text\.$"):
        step.read()
    return said


def test_a_step_in_which_a_rank_has_other_batches_is_refused_on_all_ranks():
    for counted, *refused in run_ranks(4, f"{__name__}:steps_of_four_ranks"):
        assert counted == 4 * (LENGTH - 1)
        assert all(error.startswith("rank 3 has other batches in this step than rank 2") for error in refused)

"""Which forward pass the routers' auxiliary loss belongs to: recomputed, compiled, copied and interleaved passes.

The reference is the same model and loss without what a test adds. Each loss is compared with stock transformers in
test_routers.py.
"""

from __future__ import annotations

import copy

import peft
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from longctx import parallelize
from longctx.collate import SequenceCollator
from tests.model.more_families import EXPERTS
from tests.model.test_models import gradients, largest_error

SETTINGS = EXPERTS | {"router_aux_loss_coef": 0.3, "output_router_logits": True}


def make_model(**settings):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["qwen3_moe"](**SETTINGS | settings), dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.mul_(30)  # far from balanced
    return model


def make_batch(length=16, padding=0, seed=1):
    ids = torch.randint(2, 60, (1, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, length - padding :] = -100
    return {"input_ids": ids, "labels": labels, "lengths": [length - padding]}


def run(model, sequence, batch, count, **options):
    shard = sequence.shard(batch)
    return sequence.loss(model(**shard.inputs, **options).logits, shard.shift_labels, count)


def loss_of(model, sequence, batch, **options):
    return run(model, sequence, batch, sequence.count_label_tokens([batch]), **options)


def expected_gradients(batch):
    model, sequence = parallelize(make_model(), 1)
    loss_of(model, sequence, batch).backward()
    return gradients(model)


def error_without_the_loss(batch, expected):
    """Check that the gradient is large enough for a test to notice its absence."""
    model, sequence = parallelize(make_model(output_router_logits=False), 1)
    loss_of(model, sequence, batch).backward()
    return largest_error(gradients(model), expected)


MEMORY_OPTIONS = {
    "checkpointed": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "tiled": {"tiled_mlp_num_shards": 3},
    "chunked": {"sequence_chunk_size": 5},
}


def gradients_with(loss, **options):
    checkpointing = {name: options.pop(name) for name in ["use_reentrant"] if name in options}
    model, sequence = parallelize(make_model(), 1, **options)
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(checkpointing)
    model.train()
    loss(model, sequence).backward()
    return gradients(model)


def of_two_batches(model, sequence):
    """Return the loss of a step with two micro-batches, for one backward pass."""
    step = [make_batch(16, padding=4), make_batch(24, padding=1, seed=2)]
    count = sequence.count_label_tokens(step)
    sequence.count_experts(model, step)
    return sum(run(model, sequence, batch, count) for batch in step)


def beside_log_probs(model, sequence):
    """The log-probabilities of other tokens have no auxiliary loss."""
    log_probs = sequence.log_probs(model, make_batch(24, padding=1, seed=2))
    return loss_of(model, sequence, make_batch(16, padding=4)) - 0.1 * log_probs.mean()


@pytest.mark.parametrize("option", MEMORY_OPTIONS)
@pytest.mark.parametrize("loss", [of_two_batches, beside_log_probs])
def test_two_passes_before_one_backward_pass(loss, option):
    """A layer that is computed again uses the tokens and the gradient of its own pass."""
    expected = gradients_with(loss)
    assert largest_error(gradients_with(loss, **MEMORY_OPTIONS[option]), expected) <= 1e-5


def test_two_micro_batches_with_one_backward_pass_equal_two():
    def one_by_one(model, sequence):
        step = [make_batch(16, padding=4), make_batch(24, padding=1, seed=2)]
        count = sequence.count_label_tokens(step)
        sequence.count_experts(model, step)
        run(model, sequence, step[0], count).backward()
        return run(model, sequence, step[1], count)

    assert largest_error(gradients_with(of_two_batches), gradients_with(one_by_one)) <= 1e-5


@pytest.mark.long
@pytest.mark.parametrize("part", ["layers", "model"])
def test_compiled_models_have_the_gradient(part):
    batch = make_batch(padding=4)
    expected = expected_gradients(batch)
    assert error_without_the_loss(batch, expected) > 1e-2
    torch._dynamo.reset()
    model, sequence = parallelize(make_model(), 1)
    for module in model.model.layers if part == "layers" else [model]:
        module.compile(backend="aot_eager")
    loss_of(model, sequence, batch).backward()
    assert largest_error(gradients(model), expected) <= 1e-5


def test_a_copy_of_a_model_uses_its_own_weights_and_counts_for_itself():
    batch, other = make_batch(padding=4), make_batch(24, seed=2)
    model, sequence = parallelize(make_model(), 1)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        expected = sequence.log_probs(copied, other)
        for parameter in model.model.parameters():
            parameter.mul_(1.5)
    found = sequence.log_probs(copied, other)
    assert torch.equal(found, expected)
    found.sum().backward()
    assert not gradients(model)
    assert gradients(copied).keys() == dict(copied.named_parameters()).keys()
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.div_(1.5)
    count = sequence.count_label_tokens([batch])
    shard = sequence.shard(batch)
    logits = model(**shard.inputs).logits
    sequence.log_probs(copied, other)  # between a pass and its loss
    sequence.loss(logits, shard.shift_labels, count).backward()
    assert largest_error(gradients(model), expected_gradients(batch)) <= 1e-5


def test_a_copy_is_parallelized_for_a_loss_of_its_own():
    batch = make_batch(padding=4)
    model, sequence = parallelize(make_model(), 1)
    copied = copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"has not run on a batch.*copy of the model, use parallelize on the copy"):
        loss_of(copied, sequence, batch)
    again, its_sequence = parallelize(copied, 1)
    loss_of(again, its_sequence, batch).backward()
    assert largest_error(gradients(copied), expected_gradients(batch)) <= 1e-5


def test_the_configuration_may_change_after_parallelize():
    """TRL's SFTTrainer changes the configuration in this way."""
    batch = make_batch(padding=4)
    model, sequence = parallelize(make_model(output_router_logits=False), 1)
    model.config.output_router_logits = True
    loss_of(model, sequence, batch).backward()
    assert largest_error(gradients(model), expected_gradients(batch)) <= 1e-5
    document = {"input_ids": list(range(5, 13)), "labels": [-100] * 3 + [8, 9, -100, 10, 11], "branch_starts": [2, 5]}
    with pytest.raises(ValueError, match=r"cannot share their beginnings here, since the routers' auxiliary loss"):
        sequence.shard(SequenceCollator(0)([document]))


def test_a_call_that_asks_for_router_logits():
    batch = make_batch()
    model, sequence = parallelize(make_model(output_router_logits=False), 1)
    with pytest.raises(ValueError, match=r"in a call of the model, whose configuration says False\. Set model\.config"):
        loss_of(model, sequence, batch, output_router_logits=True)
    loss_of(model, sequence, batch, output_router_logits=False)
    model.config.output_router_logits = True
    losses = [loss_of(model, sequence, batch, output_router_logits=value) for value in (True, False, None)]
    assert losses[0] == losses[1] == losses[2]


def test_a_pass_without_gradients_between_a_pass_and_its_loss():
    batch = make_batch()
    model, sequence = parallelize(make_model(), 1)
    count, shard = sequence.count_label_tokens([batch]), sequence.shard(batch)
    logits = model(**shard.inputs).logits
    with torch.no_grad():
        sequence.log_probs(model, batch)
        sequence.label_loss(torch.zeros(1, 16), count)
    with pytest.raises(ValueError, match=r"ran without gradients or before.*Make the loss directly after its forward"):
        sequence.loss(logits, shard.shift_labels, count)
    with torch.no_grad():
        assert loss_of(model, sequence, batch) > 0  # nothing is trained


def test_a_pass_with_gradients_between_a_pass_and_its_loss():
    batch = make_batch()
    model, sequence = parallelize(make_model(), 1)
    count, shard = sequence.count_label_tokens([batch]), sequence.shard(batch)
    first, last = (model(**sequence.shard(batch).inputs).logits for _ in range(2))
    with pytest.raises(ValueError, match=r"this loss is that of another one\. Make each loss directly after"):
        sequence.loss(first, shard.shift_labels, count)
    sequence.loss(last, shard.shift_labels, count).backward()


@pytest.mark.parametrize("order", ["before", "after"])
def test_routers_that_an_adapter_trains(order):
    """peft trains copies of the routers, whether it makes them before or after `parallelize`."""
    batch = make_batch()
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["gate"], task_type="CAUSAL_LM")
    torch.manual_seed(5)
    stock = peft.get_peft_model(make_model(), config)
    ids = batch["input_ids"]
    expected = stock(input_ids=ids, labels=ids, output_router_logits=True).loss
    expected.backward()
    torch.manual_seed(5)
    if order == "before":
        model, sequence = parallelize(peft.get_peft_model(make_model(), config), 1)
    else:
        model, sequence = parallelize(make_model(), 1)
        model = peft.get_peft_model(model, config)
    loss = loss_of(model, sequence, batch)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert sequence.routers.shape == (2, 4)
    assert largest_error(gradients(model), gradients(stock)) <= 1e-5


def test_routers_that_were_replaced_are_refused():
    model, sequence = parallelize(make_model(), 1)
    model.model.layers[1].mlp.gate = make_model().model.layers[1].mlp.gate
    with pytest.raises(ValueError, match=r"covers 2 routers, and only 1 of them ran.*Replace routers before"):
        loss_of(model, sequence, make_batch())

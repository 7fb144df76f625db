"""What layers keep for the backward pass: each as often as it says, where it says, and the same gradients."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import longctx
from benchmarks.shapes import changed, shape_of
from longctx.attention.backends import BACKENDS
from longctx.attention.operator import LocalSchedule
from longctx.forecast.memory_presets import asked_memory_options, with_options
from longctx.forecast.model_sizes import ModelSizes
from longctx.model.tiny import tiny_config, tiny_model
from longctx.settings.read import parse_flags
from tests.toy_backend import TOY

# The older name works everywhere.
pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")

LAYERS = 4
DOCUMENTS = [5, 12, 7]


def a_batch():
    generator = torch.Generator().manual_seed(0)
    position_ids = torch.cat([torch.arange(length) for length in DOCUMENTS])[None]
    input_ids = torch.randint(0, 250, position_ids.shape, generator=generator)
    labels = input_ids.masked_fill(position_ids == 0, -100)
    return {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}


def step(monkeypatch, *, checkpointing=True, every_n_layers=1, is_on_before=False, **memory_options):
    """Return the gradients, the runs of attention, and the numbers of layers whose tensors were offloaded.

    Args:
        is_on_before: whether checkpointing is switched on before `parallelize`, and not after it.
    """
    config = tiny_config()
    config.num_hidden_layers, config.layer_types = LAYERS, ["full_attention"] * LAYERS
    model = tiny_model(torch.float64, config)
    if is_on_before:
        model.gradient_checkpointing_enable(every_n_layers=every_n_layers)
    model, sequence = longctx.parallelize(model, sp=1, **memory_options)
    model.train()
    if checkpointing and not is_on_before:
        model.gradient_checkpointing_enable(every_n_layers=every_n_layers)
    runs, offloaded, current = [], set(), [None]
    forward = LocalSchedule.forward
    monkeypatch.setattr(LocalSchedule, "forward", lambda *args: runs.append(current[0]) or forward(*args))
    numbers = {layer: number for number, layer in enumerate(model.model.layers)}
    call = type(model.model.layers[0]).__call__

    def call_with_number(layer, *args, **kwargs):
        current[0] = numbers.get(layer)
        try:
            return call(layer, *args, **kwargs)
        finally:
            current[0] = None

    # Around hooks: before transformers 5.23, these run within the checkpoint, which has saved the input by then.
    monkeypatch.setattr(type(model.model.layers[0]), "__call__", call_with_number)

    def pack(tensor):
        if current[0] is not None and not isinstance(tensor, torch.nn.Parameter):
            offloaded.add(current[0])
        return tensor

    batch = a_batch()
    shard = sequence.shard(batch)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = sequence.loss(model(**shard.inputs).logits, shard.shift_labels, sequence.count_label_tokens([batch]))
    forward_runs = len(runs)
    loss.backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return gradients, len(runs) - forward_runs, offloaded


@pytest.fixture
def run(monkeypatch):
    return functools.partial(step, monkeypatch)


@pytest.mark.parametrize(
    ("memory_options", "attended_again", "offloaded"),
    [
        ({"selective_checkpointing": False}, {0, 1, 2, 3}, {0, 1, 2, 3}),
        ({"selective_checkpointing": True, "offloaded_layers": 3}, set(), {0, 1, 2}),
        ({"whole_layers": 1, "selective_checkpointing": 2, "offloaded_layers": 1}, {0}, {0}),
        ({"whole_layers": 2, "selective_checkpointing": False, "offloaded_layers": 0}, {0, 1}, set()),
        ({"whole_layers": 1, "selective_checkpointing": 0}, {0, 1, 2}, {0, 1, 2, 3}),
        ({"whole_layers": 4, "offloaded_layers": 0}, set(), set()),
    ],
    ids=str,
)
def test_each_layer_keeps_what_it_is_told(run, memory_options, attended_again, offloaded):
    gradients, again, gone = run(**memory_options)
    expected = run(checkpointing=False)[0]
    assert again == len(attended_again)
    assert gone == offloaded
    assert run(is_on_before=True, **memory_options)[1:] == (again, gone)
    torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-15)


def test_layers_that_are_not_checkpointed_stay_on_the_device(run):
    for is_on_before in (False, True):
        options = {"selective_checkpointing": False, "offloaded_layers": 2, "is_on_before": is_on_before}
        assert run(every_n_layers=2, **options)[1:] == (2, {0, 2})


@pytest.mark.parametrize(
    ("memory_options", "message"),
    [
        ({"whole_layers": 5}, "whole_layers 5 is not a number of this model's layers: it has 4. Use 0 to 4."),
        ({"whole_layers": 1, "selective_checkpointing": 4}, "it has 4, of which 3 are checkpointed. Use 0 to 3."),
        ({"offloaded_layers": -1}, "offload -1 is not a number"),
    ],
    ids=str,
)
def test_a_model_has_only_so_many_layers(run, memory_options, message):
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        run(**memory_options)


SIZES = replace(ModelSizes.of_config(tiny_config()), num_layers=LAYERS, num_attended=LAYERS)
SHAPE = shape_of(SIZES, world_size=2, sp=2, engine="fsdp2")


def of_kwargs(kwargs):
    return asked_by({"activation_checkpointing_kwargs": kwargs})


def asked_by(flags):
    words = (word for name, value in flags.items() for word in (f"--{name}", str(value)))
    return asked_memory_options(parse_flags([*words]))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ('{"whole_layers": -1}', "whole_layers -1 is not a number of layers"),
        ('{"whole_layers": true}', "whole_layers True is not a number of layers"),
        ('{"selective": 1.5}', "selective 1.5 is neither true, false nor a number of layers"),
        ('{"whole_layers": 5}', "whole_layers 5 is not a number of this model's layers: it has 4"),
        ('{"whole_layers": 1, "every_n_layers": 2}', "every_n_layers 2 and numbers of layers"),
        ('{"selective": 2, "use_reentrant": true}', "selective 2 keeps attention's output, and reentrant"),
    ],
)
def test_numbers_of_layers_that_cannot_be_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        with_options(SHAPE, "balanced", of_kwargs(kwargs), 8192)


def test_numbers_of_layers_need_checkpoints_and_whole_layers():
    asked = of_kwargs('{"whole_layers": 1}')
    with pytest.raises(ValueError, match="sets whole_layers, and activation checkpointing is off"):
        with_options(SHAPE, "balanced", {**asked, "activation_checkpointing": False}, 8192)
    with pytest.raises(ValueError, match="leaves no whole layer that whole_layers could act on"):
        with_options(SHAPE, "balanced", {**asked, "sequence_chunk_size": 64}, 8192)
    assert not with_options(SHAPE, "fastest", asked, 8192).options.set_by_preset
    with_options(SHAPE, "balanced", asked, 8192)  # is not refused


def test_chunks_need_a_backend_that_has_them():
    BACKENDS.register(TOY)
    try:
        shape = changed(SHAPE, sp=2, ring=2, backend="toy")
        with pytest.raises(ValueError, match="64 is not supported by this run's attention backend"):
            with_options(shape, "balanced", {"sequence_chunk_size": 64}, 8192)
    finally:
        del BACKENDS["toy"]

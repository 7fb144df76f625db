"""The memory options that the forecast chooses, against every uniform choice, and against plain predictions."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.memory.step import StepSettings, trace_training_step
from benchmarks.published import CONFIGS
from longctx.forecast.candidates import HOST_BYTES_PER_DEVICE, Machine, candidates, outlook, recommend
from longctx.forecast.closed_form import peak_bytes, predict
from longctx.forecast.memory_setup import MemorySetup
from longctx.forecast.model_sizes import ModelSizes
from longctx.forecast.option_search import Room, fastest_memory_options
from longctx.forecast.step_time import Speeds, step_time

KERNEL = "flash-attn 3"
MACHINE = Machine(
    gpus=8,
    gpus_per_node=8,
    device="H100",
    device_bytes=85.0e9,
    host_bytes=8 * HOST_BYTES_PER_DEVICE,
    kernel=KERNEL,
    speeds=Speeds.of("H100", KERNEL),
)
CONFIG = CONFIGS["Qwen/Qwen3-8B"]


@pytest.fixture(scope="module")
def found():
    return candidates(CONFIG, MACHINE, presets=("balanced", "longest", "fastest", "auto"))


def uniform_setups(candidate):
    """Yield the set-up of every combination of memory options with which all layers, or every n-th, keep the same."""
    kinds = [
        {"activation_checkpointing": False},
        *(
            {"every_n_layers": n, "selective": selective, "activation_offloading": offload}
            for n, selective, offload in itertools.product((1, 2, 3, 4), (True, False), (True, False))
        ),
    ]
    whole = itertools.product(("none", "cpu"), ("none", "cpu"), (None, True), (None, 1, 2), kinds)
    for optimizer, param, tiled, stride, kind in whole:
        yield {"tiled_mlp": tiled, "heads_k_stride": stride, **kind} | {
            f"offload_{name}_device": place for name, place in (("optimizer", optimizer), ("param", param))
        }
    for optimizer, chunk, selective in itertools.product(("none", "cpu"), (8192, 32768, 65536), (True, False)):
        yield {"offload_optimizer_device": optimizer, "sequence_chunk_size": chunk, "selective": selective}


def fastest_uniform(found, length):
    """Return the highest speed that leaves a tenth of the memory free, in tokens a second and device."""
    best = 0.0
    for candidate in (c for c in found if c.memory == "auto"):
        for memory_options in uniform_setups(candidate):
            asked = {name: value for name, value in memory_options.items() if value not in (None, "none")}
            try:
                setup = candidate.setup_of(asked)
            except ValueError:
                continue
            peak = predict(setup, length)
            if max(peak.device_bytes / MACHINE.device_bytes, peak.host_bytes / MACHINE.host_bytes) <= 0.9:
                best = max(best, step_time(setup, length, MACHINE.speeds).tokens_per_second_per_device)
    return best


@pytest.mark.parametrize(
    "length",
    [65536, 1 << 20, *(pytest.param(n, marks=pytest.mark.long) for n in (32768, 131072, 1 << 19, 1 << 21, 1 << 22))],
)
def test_no_uniform_choice_is_faster(found, length):
    """The recommendation takes the simplest within 2%, so the fastest outlook is compared."""
    outlooks = [outlook(candidate, MACHINE, length) for candidate in found]
    roomy = [one for one in outlooks if one.time is not None and one.has_room]
    assert max(one.speed for one in roomy) >= 0.99 * fastest_uniform(found, length)  # below 1%, layers stay equal
    assert recommend(outlooks).speed >= max(one.speed for one in roomy) / 1.02


@pytest.mark.parametrize(("length", "gain"), [(139264, 1.01), (3 << 20, 1.1)])
def test_layers_that_differ_are_faster_where_memory_is_left(found, length, gain):
    """Between lengths at which every second layer would fit, and where attention's output fits in some layers only."""
    outlooks = [outlook(candidate, MACHINE, length) for candidate in found if candidate.memory == "auto"]
    best = max((one for one in outlooks if one.time is not None and one.has_room), key=lambda one: one.speed)
    assert best.candidate.memory_options.keys() & {"whole_layers", "offloaded_layers"}
    assert best.speed > gain * fastest_uniform(found, length)


def test_speed_falls_continuously_with_the_length(found):
    """No cliff, as between two presets: 10% more tokens take the same speed per token, or at most 14% off it.

    Attention's share of a token's work grows with the length, by at most a tenth here.
    """
    ulysses = next(c for c in found if (c.backend, c.dims.sp, c.memory) == ("ulysses", 8, "auto"))
    lengths = [int(32768 * 1.1**n) for n in range(48)]
    speeds = [one.speed for one in (outlook(ulysses, MACHINE, length) for length in lengths) if one.has_room]
    drops = 1 - np.array(speeds[1:]) / np.array(speeds[:-1])
    assert drops.max() < 0.14


def test_arrays_are_forecast_as_single_setups_are(found):
    candidate = next(c for c in found if (c.backend, c.memory) == ("ring", "auto"))
    setup = replace(
        candidate.setup, gradient_checkpointing=True, selective_checkpointing=True, activation_offloading=True
    )
    counts = [(0, 0, 0), (36, 0, 0), (3, 20, 5), (0, 36, 36), (1, 0, 35), (10, 26, 3)]
    many = replace(
        setup,
        **{
            name: np.array(values)
            for name, values in zip(
                ("whole_layers", "selective_layers", "offloaded_layers"), zip(*counts, strict=True), strict=True
            )
        },
    )
    device, host = peak_bytes(many, 131072)
    seconds = step_time(many, 131072, MACHINE.speeds).seconds
    for number, (whole, selective, offloaded) in enumerate(counts):
        one = replace(setup, whole_layers=whole, selective_layers=selective, offloaded_layers=offloaded)
        assert predict(one, 131072).device_bytes == pytest.approx(device[number])
        assert predict(one, 131072).host_bytes == pytest.approx(host[number])
        assert step_time(one, 131072, MACHINE.speeds).seconds == pytest.approx(seconds[number])


LAYERS = 8
KEPT = {
    "whole 3": {"whole_layers": 3},
    "whole 2, selective 4, offloaded 3": {
        "whole_layers": 2,
        "selective_layers": 4,
        "activation_offloading": True,
        "offloaded_layers": 3,
    },
    "whole 5, offloaded 2, tiles": {
        "whole_layers": 5,
        "tiled_mlp_num_shards": 0,
        "activation_offloading": True,
        "offloaded_layers": 2,
    },
    "all offloaded, tiles": {"tiled_mlp_num_shards": 0, "activation_offloading": True, "offloaded_layers": LAYERS},
    "tiles, heads at a time": {
        "tiled_mlp_num_shards": 0,
        "heads_k_stride": 1,
        "selective_layers": 5,
        "activation_offloading": True,
        "offloaded_layers": LAYERS,
    },
    "chunks": {"sequence_chunk_size": 32768, "selective_layers": 3},
    "chunks, 4 kept on the device": {"sequence_chunk_size": 32768, "selective_layers": 6, "offloaded_layers": 4},
    "chunks in a ring": {"sequence_chunk_size": 32768, "selective_layers": 5, "ring": 2},
}


TRACED = "whole 5, offloaded 2, tiles"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name != TRACED)) for name in KEPT],
)
def test_layers_that_differ_take_what_a_trace_of_the_step_has(name):
    """To 5%, the goal for combinations that the search can choose, on two ranks."""
    config = copy.deepcopy(CONFIG)
    config.update({"num_hidden_layers": LAYERS, "layer_types": ["full_attention"] * LAYERS, "vocab_size": 4096})
    setup = MemorySetup(
        model=ModelSizes.of_config(config),
        engine="fsdp2",
        sp=2,
        world_size=2,
        selective_checkpointing=True,
        **KEPT[name],
    )
    tokens = 131072 if setup.sequence_chunk_size else 32768  # of a rank
    traced = trace_training_step(config, step_settings(setup, tokens)).peak_bytes
    assert predict(setup, 2 * tokens).allocated_bytes == pytest.approx(traced, rel=0.05)


def step_settings(setup: MemorySetup, tokens: int) -> StepSettings:
    """Return how a step of a set-up whose layers differ is traced, with this many tokens of a rank."""
    offloaded = setup.num_offloaded if setup.sequence_chunk_size is None else setup.offloaded_layers
    names = ("whole_layers", "tiled_mlp_num_shards", "heads_k_stride", "sequence_chunk_size")
    layers = {"selective_checkpointing": int(setup.num_selective), "offloaded_layers": offloaded}
    return StepSettings(
        length=tokens * setup.sp,
        sp=setup.sp,
        sp_backend=setup.backend,
        activation_checkpointing={},
        saved_on_host=setup.activation_offloading,
        memory_options={name: getattr(setup, name) for name in names} | layers,
    )


def test_what_is_asked_for_is_kept(found):
    candidate = next(c for c in found if (c.backend, c.dims.sp, c.memory) == ("ulysses", 8, "auto"))
    room = Room(device_bytes=MACHINE.device_bytes, host_bytes=MACHINE.host_bytes)

    def fastest(asked, room=room):
        return fastest_memory_options(
            candidate.setup_of, asked, length=262144, documents=[262144], speeds=MACHINE.speeds, room=room
        )

    free, tiled = fastest({}), fastest({"tiled_mlp": False, "selective": False})
    assert tiled.asked["tiled_mlp"] is False
    assert (tiled.setup.num_selective, tiled.setup.whole_layers) == (0, 0)
    assert tiled.seconds > free.seconds
    assert fastest({}, Room(device_bytes=10e9, host_bytes=1e9)) is None

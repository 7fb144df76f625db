"""The memory options that the search chooses, against every choice there is, and against plain forecasts."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.memory.step import StepSettings, trace_training_step
from benchmarks.published import CONFIGS
from benchmarks.shapes import changed, shape_of
from longctx.attention.choice import Documents, arrangements, exchange_overlaps
from longctx.forecast import search as search_module
from longctx.forecast.cost import Cost, cost, level_of, peaks_and_seconds
from longctx.forecast.memory_presets import with_options
from longctx.forecast.model_sizes import ModelSizes
from longctx.forecast.search import A_TIE, Choice, _Candidate, ranked, search
from longctx.forecast.shape import ONE_DEVICE, RunShape
from longctx.machine.here import Machine
from tests.few import few

CONFIG = CONFIGS["Qwen/Qwen3-8B"]
MACHINE = Machine.of("H100", 8, "flash-attn 3")


def every_shape(model: ModelSizes, gpus: int = 8) -> list[RunShape]:
    """Every arrangement of eight devices, on the engine that its backend is paired with."""
    shapes = []
    for sp in (n for n in range(1, gpus + 1) if gpus % n == 0):
        for how in arrangements(sp) if sp > 1 else [ONE_DEVICE]:
            if model.num_heads % how.ulysses == 0:
                engine = "zero3" if how.ring == 1 and sp > 1 else "fsdp2"
                shapes.append(RunShape(model=model, arrangement=how, world_size=gpus, engine=engine, flash3=True))
    return shapes


@pytest.fixture(scope="module")
def shapes() -> list[RunShape]:
    return every_shape(ModelSizes.of_config(CONFIG))


def uniform_options():
    """Yield every combination of memory options with which all layers, or every n-th, keep the same."""
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


def fastest_uniform(shapes: list[RunShape], length: int, machine: Machine = MACHINE) -> float:
    """Return the highest speed that leaves a tenth of the memory free, in tokens a second and device."""
    best = 0.0
    for shape in shapes:
        for options in uniform_options():
            asked = {name: value for name, value in options.items() if value not in (None, "none")}
            try:
                found = cost(with_options(shape, "balanced", asked, length), machine, length)
            except ValueError:
                continue
            if found.used <= 0.9:
                best = max(best, found.speed)
    return best


@pytest.mark.parametrize("length", few([65536, 1 << 20, 32768, 131072, 1 << 19, 1 << 21, 1 << 22], 2))
def test_no_uniform_choice_is_faster(shapes, length) -> None:
    """By more than the 2% within which the simplest is taken."""
    best = search(shapes, MACHINE, length)[0]
    assert best.cost.used <= 0.9
    assert best.cost.speed >= fastest_uniform(shapes, length) / A_TIE


@pytest.mark.parametrize(("length", "gain"), [(3 << 20, 1.05)])
def test_layers_that_differ_are_faster_where_memory_is_left(shapes, length, gain) -> None:
    """Where attention's output fits in some layers only."""
    best = search(shapes, MACHINE, length)[0]
    assert best.asked.keys() & {"whole_layers", "offloaded_layers", "selective"}
    assert best.cost.speed > gain * fastest_uniform(shapes, length)


def of_few_layers(name: str, layers: int) -> ModelSizes:
    """Return the sizes of a model with its layers only so far, so that all numbers of layers can be tried."""
    sizes = ModelSizes.of_config(CONFIGS[name])
    of_all = sizes.num_parameters * layers // sizes.num_layers
    return replace(sizes, num_layers=layers, num_attended=layers, num_parameters=of_all, num_trained_parameters=of_all)


SMALL = [
    shape
    for model in (of_few_layers("Qwen/Qwen3-8B", 6), of_few_layers("meta-llama/Llama-3.1-8B", 5))
    for gpus in (1, 2, 4)
    for shape in every_shape(model, gpus)
]


def exhaustive(shape: RunShape, machine: Machine, length: int) -> tuple[int, float]:
    """Return the best level of used memory, and the least seconds at it: of all options and numbers of layers.

    Where nothing fits, it is the least used part of the memory instead.
    """
    states, layers = "offload_param_device" if shape.is_fsdp else "offload_optimizer_device", shape.model.num_layers
    whole, selective, offloaded = np.indices((layers + 1,) * 3).reshape(3, -1)
    possible = np.maximum(selective, offloaded) <= layers - whole
    best = (3, np.inf)
    for chunk, host, tiled, stride in itertools.product((None, 8192), (None, "cpu"), (None, True), (None, 1)):
        option = {"sequence_chunk_size": chunk, states: host, "tiled_mlp": tiled, "heads_k_stride": stride}
        asked = {name: value for name, value in option.items() if value is not None}
        try:
            resolved = with_options(shape, "balanced", asked, length)
        except ValueError:
            continue
        if chunk is None and stride is None:  # as a run would choose it
            row = Documents(rows=[np.array([shape.padded(length)])], source="the row")
            overlaps = exchange_overlaps(shape.attention(machine), shape.arrangement, row)
            resolved = replace(resolved, options=replace(resolved.options, overlap_exchange=overlaps))
        counts = possible & (whole == 0) & (offloaded > 0) if chunk else possible
        many = resolved.with_layers(whole[counts], selective[counts], offloaded[counts])
        padded = shape.padded(length)
        used, seconds, _ = np.broadcast_arrays(*peaks_and_seconds(many, machine, padded, [padded]))
        level = np.vectorize(level_of)(used)
        best = min(best, *zip(level.tolist(), np.where(level == 2, used, seconds).tolist(), strict=True))
    return best


@pytest.mark.long
@pytest.mark.parametrize(("gib", "host_bytes"), [(24, 1e11), (48, 2e11), (80, 4e11)])
@pytest.mark.parametrize("length", [16384, 131072, 1 << 19])
def test_the_choice_is_at_most_1_percent_slower_than_any_there_is(gib, host_bytes, length, monkeypatch) -> None:
    """It fits as well, and costs at most 2% more where that takes fewer options or less host memory."""

    def weighed(choice: Choice) -> float:
        return choice.cost.used if choice.cost.level == 2 else choice.cost.step_seconds

    assert len(SMALL) >= 20
    for shape in SMALL:
        machine = replace(
            MACHINE, device_bytes=gib * 2**30, per_node=shape.world_size, host_bytes=host_bytes * shape.world_size
        )
        [simple] = search([shape], machine, length)
        with monkeypatch.context() as patch:
            patch.setattr(search_module, "A_TIE", 1.0)
            [fast] = search([shape], machine, length)
        level, best = exhaustive(shape, machine, length)
        assert simple.cost.level == fast.cost.level == level
        assert weighed(fast) <= 1.01 * best
        assert weighed(simple) <= A_TIE * weighed(fast)
        assert (len(simple.asked), simple.cost.host_bytes) <= (len(fast.asked), fast.cost.host_bytes)


def test_a_search_takes_at_most_20_forecasts_a_shape(shapes, monkeypatch) -> None:
    """And at most 1,000 for all arrangements of eight devices at four lengths."""
    calls = []
    monkeypatch.setattr(search_module, "peaks_and_seconds", lambda *of: calls.append(of) or peaks_and_seconds(*of))
    for length, shape in itertools.product((32768, 131072, 1 << 19, 1 << 20), shapes):
        before = len(calls)
        assert len(search([shape], MACHINE, length)) == 1
        assert 1 <= len(calls) - before <= 20
    assert len(calls) <= 1000


def candidate(speed: float, options: int, host_bytes: float, used: float = 0.5) -> _Candidate:
    asked = dict.fromkeys(map(str, range(options)))
    return _Candidate(of=None, asked=asked, used=used, speed=speed, host_bytes=host_bytes)


def test_within_2_percent_the_fewest_options_come_first_and_of_as_many_the_least_host_memory() -> None:
    """What leaves a tenth of the memory free comes before what only fits, and that before what does not fit."""
    fastest, simple, lean = candidate(100, 3, 0), candidate(99, 1, 50), candidate(98.1, 1, 20)
    slow, full = candidate(97.9, 0, 0), candidate(200, 0, 0, used=0.95)
    over, far_over = candidate(300, 5, 0, used=1.2), candidate(400, 0, 0, used=1.3)
    found = ranked([far_over, over, full, slow, fastest, simple, lean])
    assert found == [lean, simple, fastest, slow, full, over, far_over]


def test_arrays_are_forecast_as_single_shapes_are(shapes) -> None:
    shape = next(shape for shape in shapes if str(shape.arrangement) == "ring 8")
    counts = [(0, 0, 0), (36, 0, 0), (3, 20, 5), (0, 36, 36), (1, 0, 35), (10, 26, 3)]
    many = shape.with_layers(*map(np.array, zip(*counts, strict=True)))
    used, seconds, host = peaks_and_seconds(many, MACHINE, 131072, [131072])
    for number, of_layers in enumerate(counts):
        one: Cost = cost(shape.with_layers(*of_layers), MACHINE, 131072)
        assert one.used == pytest.approx(used[number])
        assert one.host_bytes == pytest.approx(host[number])
        assert one.step_seconds == pytest.approx(seconds[number])


LAYERS = 8
KEPT = {
    "whole 3": {"whole_layers": 3},
    "whole 2, selective 4, offloaded 3": {
        "whole_layers": 2,
        "selective": 4,
        "activation_offloading": True,
        "offloaded_layers": 3,
    },
    "whole 5, offloaded 2, tiles": {
        "whole_layers": 5,
        "tiled_mlp_num_shards": 2,
        "activation_offloading": True,
        "offloaded_layers": 2,
    },
    "all offloaded, tiles": {"tiled_mlp_num_shards": 0, "activation_offloading": True, "offloaded_layers": LAYERS},
    "tiles, heads at a time": {
        "tiled_mlp_num_shards": 0,
        "heads_k_stride": 1,
        "selective": 5,
        "activation_offloading": True,
        "offloaded_layers": LAYERS,
    },
    "chunks": {"sequence_chunk_size": 32768, "selective": 3},
    "chunks, 4 kept on the device": {"sequence_chunk_size": 32768, "selective": 6, "offloaded_layers": 4},
    "chunks in a ring": {"sequence_chunk_size": 32768, "selective": 5, "sp": 2, "ring": 2},
}


TRACED = "whole 5, offloaded 2, tiles"


@pytest.mark.parametrize("name", few(KEPT, [TRACED]))
def test_layers_that_differ_take_what_a_trace_of_the_step_has(name) -> None:
    """To 5%, the goal for combinations that the search can choose, on two ranks."""
    config = copy.deepcopy(CONFIG)
    config.update({"num_hidden_layers": LAYERS, "layer_types": ["full_attention"] * LAYERS, "vocab_size": 4096})
    model = ModelSizes.of_config(config)
    shape = shape_of(model, **{"engine": "fsdp2", "sp": 2, "world_size": 2, "selective": True} | KEPT[name])
    tokens = 131072 if shape.options.sequence_chunk_size else 32768  # of a rank
    traced = trace_training_step(config, step_settings(shape, tokens)).peak_bytes
    assert cost(shape, MACHINE, 2 * tokens).allocated_bytes == pytest.approx(traced, rel=0.05)


def step_settings(shape: RunShape, tokens: int) -> StepSettings:
    """Return how a step of a shape whose layers differ is traced, with this many tokens of a rank."""
    options = shape.options
    offloaded = shape.num_offloaded if options.sequence_chunk_size is None else options.offloaded_layers
    names = ("whole_layers", "tiled_mlp_num_shards", "heads_k_stride", "sequence_chunk_size")
    layers = {"selective_checkpointing": int(shape.num_selective), "offloaded_layers": offloaded}
    return StepSettings(
        length=tokens * shape.sp,
        sp=shape.sp,
        sp_backend=shape.arrangement.name,
        activation_checkpointing={},
        saved_on_host=options.activation_offloading,
        memory_options={name: getattr(options, name) for name in names} | layers,
    )


def test_what_is_asked_for_is_kept(shapes) -> None:
    ulysses = [shape for shape in shapes if str(shape.arrangement) == "ulysses 8"]
    fixed = {"tiled_mlp": False, "selective": False}
    [free], [tiled] = search(ulysses, MACHINE, 262144), search(ulysses, MACHINE, 262144, fixed=fixed)
    assert tiled.asked["tiled_mlp"] is False
    assert (tiled.shape.num_selective, tiled.shape.options.whole_layers) == (0, 0)
    assert tiled.cost.speed < free.cost.speed
    [tight] = search(ulysses, replace(MACHINE, device_bytes=10e9, host_bytes=1e9), 262144)
    assert tight.cost.level == 2


def test_a_preset_is_taken_as_it_is(shapes) -> None:
    [choice] = search([changed(shapes[0])], MACHINE, 65536, memory="longest")
    assert (choice.memory, choice.asked) == ("longest", {})
    assert choice.shape.options.memory == "longest"

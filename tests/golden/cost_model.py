"""The ways into longctx's cost model that `tests.golden.forecasts` takes: what a rebuilt cost model has to adapt.

Every function describes the machine it asks about and returns JSON values, whose kinds `forecasts.KINDS` knows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import PretrainedConfig

from benchmarks import closed_form, step_time
from benchmarks.memory.step import StepSettings, trace_training_step
from benchmarks.published import HELD_BACK, PUBLISHED
from longctx.attention.choice import Documents, choose_backend
from longctx.attention.cost import Arrangement, Setup
from longctx.attention.modelled import plan_time
from longctx.forecast import candidates as planner
from longctx.forecast.closed_form import predict
from longctx.forecast.documents import RowLengths, drawn_from, one_document, one_pair
from longctx.forecast.hardware import Hardware
from longctx.forecast.memory_setup import MemorySetup
from longctx.forecast.model_sizes import ModelSizes
from longctx.forecast.step_time import Speeds
from longctx.report.memory_advice import out_of_memory_explained
from longctx.ring.planner import plan_ring
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from tests.golden.digests import digest

GIB = 2**30
PRESETS = ("balanced", "longest", "fastest", "auto")
FIELDS = ("device", "host", "seconds", "used")
"""What an arrangement takes with each of PRESETS, in this order. The flags that auto chose follow."""
FILLS: dict[str, RowLengths] = {
    "one document": one_document,
    "a pair": one_pair,
    "documents": drawn_from(PUBLISHED.with_name("document_lengths.csv")),
}
"""The documents that a sequence is assumed to hold."""


class Machine(NamedTuple):
    """GPUs, and the host memory of a node of up to eight."""

    gpus: int
    gpu: str
    host_gib: int
    kernel: str = "flash-attn 2"


class Plan(NamedTuple):
    """How far every arrangement reaches, what it takes, and what is recommended."""

    reach: dict[str, Any]
    takes: dict[int, dict[str, list[Any]]]
    """By length."""
    recommended: dict[int, dict[str, Any] | None]
    """By length; None where nothing fits."""


def plan(
    config: PretrainedConfig, machine: Machine, lengths: Sequence[int], fill: str, settings: Mapping[str, Any]
) -> Plan:
    """Plan as `longctx plan` does, without traces of the model."""
    room = planner.Machine(
        gpus=machine.gpus,
        gpus_per_node=8,
        device=machine.gpu,
        device_bytes=planner.DEVICE_BYTES[machine.gpu],
        host_bytes=machine.host_gib * GIB,
        kernel=machine.kernel,
        speeds=Speeds.of(machine.gpu, machine.kernel),
    )
    is_fused = settings.keys() & {"load_in_4bit", "torch_compile"}  # which refuse what the other presets set
    presets = ("balanced", "auto") if is_fused else PRESETS
    found = planner.candidates(config, room, presets=presets, settings=dict(settings))
    result = Plan({}, {}, {})
    for one in found:
        reached = result.reach.setdefault(str(one), {})
        reached[one.memory] = {"tokens": one.max_length, "full": one.binds, "engine": one.engine}
    for length in lengths:
        outlooks = [planner.outlook(candidate, room, length, FILLS[fill]) for candidate in found]
        result.takes[length] = takes = {str(one): [None] * (len(PRESETS) * len(FIELDS) + 1) for one in found}
        for one in outlooks:
            row, first = takes[str(one.candidate)], len(FIELDS) * PRESETS.index(one.candidate.memory)
            seconds = None if one.time is None else one.time.seconds
            row[first : first + len(FIELDS)] = one.memory.device_bytes, one.memory.host_bytes, seconds, one.used
            if one.candidate.memory == "auto":
                row[-1] = " ".join(one.candidate.flags())
        result.recommended[length] = _recommended(outlooks)
    return result


def _recommended(outlooks: list[planner.Outlook]) -> dict[str, Any] | None:
    best, second = planner.recommend(outlooks), planner.next_best(outlooks)
    if best is None or best.time is None:
        return None
    return {
        "flags": " ".join(best.candidate.flags()),
        "moment": best.memory.moment,
        "device": dict(best.memory.device),
        "host": dict(best.memory.host),
        "seconds": dict(best.time.parts),
        "speed": best.speed,
        "next": second and {"flags": " ".join(second.candidate.flags()), "speed": second.speed},
        "text": planner.why(best, outlooks),
    }


def backend(
    config: PretrainedConfig,
    sp: int,
    rows: Sequence[Sequence[int]],
    *,
    name: str = "auto",
    device: str = "H100",
    per_node: int = 8,
    before: Sequence[Sequence[int]] | None = None,
    heads_k_stride: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Choose a backend for rows of documents.

    Args:
        before: rows that it was chosen for before.
        options: of `choose_backend`.
    """
    setup = Setup.of_model(config, sp, element_size=2, device_name=device, devices_per_node=per_node)
    setup = replace(setup, heads_k_stride=heads_k_stride)
    earlier = before and choose_backend(name, setup, _documents(before))
    choice = choose_backend(name, setup, _documents(rows), before=earlier, **options)
    return {
        "arrangement": str(choice.arrangement),
        "text": choice.reason,
        "overlaps": choice.overlaps_exchange,
        "modelled": {str(arrangement): seconds for arrangement, seconds in choice.modelled},
        "refused": {str(arrangement): why for arrangement, why in choice.refused},
        "recurrent": choice.recurrent,
    }


def _documents(rows: Sequence[Sequence[int]]) -> Documents:
    return Documents(rows=[np.array(row, np.int64) for row in rows], source="documents")


def ring_plan(config: PretrainedConfig, ranks: int, documents: Sequence[int]) -> dict[str, Any]:
    """Plan a ring of H100s as training does, by the modelled seconds of a layer."""
    setup = Setup.of_model(config, ranks, element_size=2, device_name="H100", devices_per_node=8)
    time_of = partial(plan_time, setup, Arrangement(name="ring", ring=ranks, ulysses=1))
    found = plan_ring(np.concatenate(([0], np.cumsum(documents))), ranks, time_of=time_of)
    numbers = {"tokens_sent": found.kv_tokens_sent, "most_pairs": int(found.area_per_rank.max())}
    return {"permutation": digest(found.permutation), **numbers, **dict(time_of(found)._asdict())}


def published() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what is predicted for the rows that others published: bytes or the longest sequence, and seconds."""
    for path in (PUBLISHED, HELD_BACK):
        for row in closed_form.compared(path):
            of = row.published
            if of.peak_gib or of.device_gib:
                peak = predict(row.setup, of.length)
                yield f"{_name(row)}, bytes", {"device": dict(peak.device), "host": dict(peak.host)}
            else:
                yield f"{_name(row)}, longest", {"tokens": row.reach().length, "full": row.binds()}
        for row in step_time.timed(path):
            yield f"{_name(row)}, seconds", {"seconds": dict(step_time.modelled(row).parts)}


def _name(row: closed_form.Row) -> str:
    of = row.published
    return f"published: {of.stack}, {of.gpus} {of.gpu}, {of.model.split('/')[1]}, {of.features}, {of.length:,}"


def traced(config: PretrainedConfig, tokens: int, changes: Mapping[str, Any], *, pairs: bool = False) -> dict[str, Any]:
    """Trace a training step of `tokens` tokens a rank on fake tensors, and predict its bytes."""
    setup = MemorySetup(model=ModelSizes.of_config(config), engine="fsdp2" if "sp" in changes else "none", **changes)
    setup = replace(setup, world_size=setup.sp, selective_checkpointing=setup.ring > 1)
    length = tokens * setup.sp
    options = {name: changes[name] for name in (*closed_form.MEMORY_OPTIONS, "overlap_exchange") if name in changes}
    settings = StepSettings(
        length=length,
        document_lengths=one_pair(length) if pairs else one_document(length),
        sp=setup.sp,
        engine=setup.engine,
        sp_backend=setup.backend,
        activation_checkpointing={"offload": setup.activation_offloading} if setup.gradient_checkpointing else None,
        memory_options=options | ({"ring_size": setup.ring} if setup.backend == "hybrid" else {}),
    )
    threads = torch.get_num_threads()
    trace = trace_training_step(config, settings, loss_of=closed_form.loss_of_pairs if pairs else None)
    torch.set_num_threads(threads)
    peak = predict(setup, length)
    return {
        "traced": {"allocated": trace.peak_bytes, "on the host": trace.host_peak_bytes},
        "device": peak.allocated_bytes,
        "host": peak.host_bytes,
        "moment": peak.moment,
    }


NAMES = {"A100": "NVIDIA A100-SXM4-80GB", "H100": "NVIDIA H100 80GB HBM3", "RTX 4090": "NVIDIA GeForce RTX 4090"}
DEVICE_GIB = {"A100": 79.2, "H100": 79.2, "RTX 4090": 23.6, "Some Other GPU": 48.0, "CPU": 0.0}
LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Variables that launchers set."""


@contextlib.contextmanager
def found(machine: Machine, env: Mapping[str, str]) -> Iterator[None]:
    """Let a run find these devices, as much host memory and this launch, instead of those of the machine at hand."""
    gpus, gpu, host = machine.gpus, machine.gpu, machine.host_gib * GIB
    device_bytes = int(DEVICE_GIB[gpu] * GIB)
    hardware = Hardware(gpus=gpus, gpu_name=NAMES.get(gpu, gpu), gpu_bytes=device_bytes, host_bytes=host)
    with pytest.MonkeyPatch.context() as patch:
        for name in LAUNCH:
            patch.delenv(name, raising=False)
        for name, value in env.items():
            patch.setenv(name, value)
        patch.setattr("longctx.settings.resolve.device_count", lambda: gpus)
        patch.setattr(Hardware, "here", lambda gpus: hardware)
        for module in ("longctx.settings.machine_checks", "longctx.report.memory_advice"):
            patch.setattr(f"{module}.available_host_memory", lambda: host)
        patch.setattr("longctx.report.memory_advice.address_room", lambda: float("inf"))
        total = SimpleNamespace(total_memory=device_bytes)
        patch.setattr(torch.cuda, "get_device_properties", lambda *_: total)
        yield


def run(flags: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    """Resolve a run, and return what --sp auto and --memory auto stand for and what its steps are predicted to take."""
    of = resolve(parse_flags(flags), read_profile(dict(env)), dict(env))
    values = {"sequences": of.settings["per_device_train_batch_size"], "text": [of.layout_reason, *of.notes]}
    choice = f"--sp {of.dims.sp} --memory {of.settings['memory']}"
    values |= {"flags": [choice, f"{of.backend.arrangement} on {of.engine}", of.memory_options.describe()]}
    step = of.forecast
    assert step is not None, "a model can be made of these configurations"
    values |= {"device": dict(step.memory.device), "host": dict(step.memory.host), "used": step.used}
    return values | {"seconds": step.seconds, "speed": step.tokens_per_second_per_device}


def advice(flags: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Return what an error says beside its own message if a run's memory is full."""
    error = torch.OutOfMemoryError("CUDA out of memory")
    of = resolve(parse_flags(flags), read_profile(dict(env)), dict(env))
    with contextlib.suppress(torch.OutOfMemoryError), out_of_memory_explained(of):
        raise error
    return [line for note in error.__notes__ for line in note.splitlines()]

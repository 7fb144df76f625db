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
from benchmarks.shapes import traced_settings, traced_shape
from longctx.attention.choice import Documents, choose_backend
from longctx.attention.cost import Arrangement, Setup
from longctx.attention.modelled import plan_time
from longctx.forecast.cost import cost
from longctx.forecast.documents import RowLengths, drawn_from, one_document, one_pair
from longctx.forecast.memory import offloaded
from longctx.forecast.model_sizes import ModelSizes
from longctx.machine.here import Machine as Node
from longctx.report.memory_advice import out_of_memory_explained
from longctx.report.plan_text import Plan, flags_of
from longctx.ring.planner import plan_ring
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from tests.golden.digests import digest

GIB = 2**30
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
    kernel: str | None = None

    @property
    def node(self) -> Node:
        """The machine as the cost model knows it."""
        return Node.of(self.gpu, min(self.gpus, 8), self.kernel, host_bytes=self.host_gib * GIB)


def plan(folder: str, machine: Machine, lengths: Sequence[int], fill: str, flags: Sequence[str]) -> dict[str, Any]:
    """Plan as `longctx plan` does, for a model in a folder."""
    settings = parse_flags(["--model_name_or_path", folder, *flags])
    found = Plan(settings, machine.node, machine.gpus, lengths=lengths, documents=FILLS[fill])
    reaches = {
        name: {"plain": plain and plain.length, "tokens": farthest.length, "full": farthest.binds}
        for name, (plain, farthest) in found.reaches.items()
    }
    best = {length: choices[0] for length, choices in found.choices.items()}
    return {
        "longest": reaches,
        **{
            f"{length:,} tokens": {
                "flags": flags_of(one),
                "moment": one.cost.moment,
                "device": dict(one.cost.device),
                "host": dict(one.cost.host),
                "seconds": dict(one.cost.seconds),
                "speed": one.cost.speed,
                "used": one.cost.used,
            }
            for length, one in best.items()
        },
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
    setup = Setup.of_model(config, sp, element_size=2, machine=Node.of(device, per_node))
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
    setup = Setup.of_model(config, ranks, element_size=2, machine=Node.of("H100", 8))
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
                peak = cost(row.shape, row.machine, of.length)
                yield f"{_name(row)}, bytes", {"device": dict(peak.device), "host": dict(peak.host)}
            else:
                yield f"{_name(row)}, longest", {"tokens": row.reach().length, "full": row.binds()}
        for row in step_time.timed(path):
            yield f"{_name(row)}, seconds", {"seconds": step_time.modelled(row)}


def _name(row: closed_form.Row) -> str:
    of = row.published
    return f"published: {of.stack}, {of.gpus} {of.gpu}, {of.model.split('/')[1]}, {of.features}, {of.length:,}"


def traced(config: PretrainedConfig, tokens: int, changes: Mapping[str, Any], *, pairs: bool = False) -> dict[str, Any]:
    """Trace a training step of `tokens` tokens a rank on fake tensors, and predict its bytes."""
    shape = traced_shape(ModelSizes.of_config(config), changes)
    length = tokens * shape.sp
    settings = StepSettings(
        length=length, document_lengths=one_pair(length) if pairs else one_document(length), **traced_settings(shape)
    )
    threads = torch.get_num_threads()
    trace = trace_training_step(config, settings, loss_of=closed_form.loss_of_pairs if pairs else None)
    torch.set_num_threads(threads)
    peak = cost(shape, Node.of("H100", 8), length)
    return {
        "traced": {"allocated": trace.peak_bytes, "on the host": trace.host_peak_bytes},
        "device": peak.allocated_bytes,
        "host": sum(offloaded(shape, length).values()),
        "moment": peak.moment,
    }


NAMES = {"A100": "NVIDIA A100-SXM4-80GB", "H100": "NVIDIA H100 80GB HBM3", "RTX 4090": "NVIDIA GeForce RTX 4090"}
DEVICE_GIB = {"A100": 79.2, "H100": 79.2, "RTX 4090": 23.6, "Some Other GPU": 48.0, "CPU": 0.0}
LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Variables that launchers set."""


@contextlib.contextmanager
def found(machine: Machine, env: Mapping[str, str]) -> Iterator[None]:
    """Let a run find these devices, as much host memory and this launch, instead of those of the machine at hand."""
    host, total = machine.host_gib * GIB, int(DEVICE_GIB[machine.gpu] * GIB)
    here = Node.of(NAMES.get(machine.gpu, machine.gpu), max(machine.gpus, 1), device_bytes=total, host_bytes=host)
    with pytest.MonkeyPatch.context() as patch:
        for name in LAUNCH:
            patch.delenv(name, raising=False)
        for name, value in env.items():
            patch.setenv(name, value)
        patch.setattr("longctx.settings.resolve.device_count", lambda: machine.gpus)
        patch.setattr(Node, "here", lambda gpus: here)
        for module in ("longctx.settings.machine_checks", "longctx.report.memory_advice"):
            patch.setattr(f"{module}.available_host_memory", lambda: host)
        patch.setattr("longctx.report.memory_advice.address_room", lambda: float("inf"))
        device = SimpleNamespace(total_memory=total)
        patch.setattr(torch.cuda, "get_device_properties", lambda *_: device)
        yield


def run(flags: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    """Resolve a run, and return what --sp auto and --memory auto stand for and what its steps are predicted to take."""
    of = resolve(parse_flags(flags), read_profile(dict(env)), dict(env))
    values = {"sequences": of.settings["per_device_train_batch_size"], "text": [of.layout_reason, *of.notes]}
    choice = f"--sp {of.dims.sp} --memory {of.settings['memory']}"
    values |= {"flags": [choice, f"{of.backend.arrangement} on {of.engine}", of.memory_options.describe()]}
    step = of.forecast
    assert step is not None, "a model can be made of these configurations"
    values |= {"device": dict(step.device), "host": dict(step.host), "used": step.used}
    return values | {"seconds": step.step_seconds, "speed": step.known_speed}


def advice(flags: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Return what an error says beside its own message if a run's memory is full."""
    error = torch.OutOfMemoryError("CUDA out of memory")
    of = resolve(parse_flags(flags), read_profile(dict(env)), dict(env))
    with contextlib.suppress(torch.OutOfMemoryError), out_of_memory_explained(of):
        raise error
    return [line for note in error.__notes__ for line in note.splitlines()]

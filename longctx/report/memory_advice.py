"""The report on a run's memory: how long its sequences could have been, and what helps if it was too little."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from longctx.attention.choice import arrangements, choose_backend, chunking_backend
from longctx.forecast.hardware import address_room, available_host_memory, host_bytes
from longctx.forecast.memory_presets import CHUNK_TOKENS, memory_flags, prefers_ulysses
from longctx.forecast.memory_setup import MemorySetup
from longctx.forecast.model_sizes import ModelSizes
from longctx.sequence.mesh import ParallelDims
from longctx.settings.run import Run
from longctx.training.peak_memory import (
    PeakMemory,
    describe_reach,
    is_first_to_say,
    is_out_of_memory,
    suggest_savings,
)

MEMORY_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "--memory longest": {"memory": "longest"},
    "--gradient_checkpointing True": {"activation_checkpointing": True, "every_n_layers": 1},
    "--activation_offloading True": {"activation_offloading": True},
    "--tiled_mlp True": {"tiled_mlp": True},
    "--heads_k_stride 1": {"heads_k_stride": 1},
    f"--sequence_chunk_size {CHUNK_TOKENS}": {"sequence_chunk_size": CHUNK_TOKENS},
    "--offload_optimizer_device cpu": {"offload_optimizer_device": "cpu"},
    "--offload_param_device cpu": {"offload_param_device": "cpu"},
    "--communication_data_type bf16": {"communication_data_type": "bf16"},
    "--per_device_train_batch_size 1": {"per_device_train_batch_size": 1},
}
"""Flags that save memory, with what they set."""


def describe_memory(run: Run, peak: PeakMemory, longest_row: int, model: torch.nn.Module) -> list[str]:
    """Describe the peaks of the ranks and, on the last line, how long sequences can be with the same settings.

    Args:
        longest_row: tokens of the longest micro-batch, padding included.
    """
    setup = replace(_setup(run), model=ModelSizes.of_model(model))
    return [*peak.describe(), describe_reach(setup, peak, longest_row // setup.num_rows)]


@contextmanager
def out_of_memory_explained(run: Run) -> Iterator[None]:
    """Complete an error about exhausted memory by what would have helped, on the first rank that raises one.

    Enter it before weights are read.
    """
    setup = _setup(run)
    room = min(_host_room(), setup.ranks_per_node * address_room())
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error) and is_first_to_say():
            error.add_note(_advice(run, setup, room))
        raise


def _host_room() -> int:
    try:
        return available_host_memory()
    except OSError:  # no Linux
        return host_bytes()


def _advice(run: Run, setup: MemorySetup, room: float) -> str:
    try:
        device = torch.cuda.get_device_properties().total_memory if not run.use_cpu else 0
        return suggest_savings(setup, run.settings["max_length"], device, room, _memory_options(run, setup))
    except Exception as error:  # there is no memory for this either; the error itself is what counts
        return f"longctx: out of memory, and too little is left to say what would have helped ({error!r})"


def _setup(run: Run) -> MemorySetup:
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or run.setup.devices_per_node
    return run.memory_setup(min(local, run.dims.world_size))


def _memory_options(run: Run, setup: MemorySetup) -> dict[str, MemorySetup]:
    """Return every flag that can be added to this run, with the run that it makes."""
    found: dict[str, MemorySetup] = {}
    for flags, values in MEMORY_OPTIONS.items():
        with suppress(ValueError):  # there is no place for it in this run
            found[flags] = replace(_setup(_with(run, values)), model=setup.model)
    if (memory_options := run.fastest_memory_options()) is not None:
        flags = " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in memory_flags(memory_options).items())
        found[f"--memory auto, which is {flags}"] = replace(run.setup_with(memory_options), model=setup.model)
    return found | _spread(setup)


def _with(run: Run, values: Mapping[str, Any]) -> Run:
    """Return the run with these flags set, too.

    Raises:
        ValueError: where they would be refused.
    """
    settings = {name: value for name, value in values.items() if name in ("memory", "per_device_train_batch_size")}
    asked = {name: value for name, value in values.items() if name not in settings}
    changed = replace(
        run, settings={**run.settings, **settings}, asked_memory_options={**run.asked_memory_options, **asked}
    )
    chunks = prefers_ulysses(changed.settings["memory"], changed.asked_memory_options)
    name = chunking_backend(run.setup) if run.wanted_backend == "auto" and chunks else None
    if name is not None:
        choice = choose_backend(name, run.setup, None)
        ring, ulysses = choice.arrangement.ring, choice.arrangement.ulysses
        dims = ParallelDims.arrange(run.dims.world_size, ring=ring, ulysses=ulysses, dp_replicate=run.dims.dp_replicate)
        changed = replace(changed, backend=choice, dims=dims)
    return changed.with_memory_options()


def _spread(setup: MemorySetup) -> dict[str, MemorySetup]:
    """Twice as many devices for a sequence, of those there are or of twice as many."""
    sp = 2 * setup.sp
    more = 1 if setup.world_size % sp == 0 else 2
    ways = [one for one in arrangements(sp) if setup.model.num_heads % one.ulysses == 0]
    arrangement = next((one for one in ways if one.name == setup.backend), ways[0])
    spread = replace(
        setup,
        sp=sp,
        ring=arrangement.ring,
        sp_backend=arrangement.name,
        world_size=more * setup.world_size,
        ranks_per_node=more * setup.ranks_per_node if setup.is_cpu else setup.ranks_per_node,
        engine="fsdp2" if setup.engine == "none" else setup.engine,
    )
    return {f"--sp {sp}" + (f", on {spread.world_size} devices" if more > 1 else ""): spread}

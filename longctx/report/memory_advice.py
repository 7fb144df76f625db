"""The report on a run's memory: how long its sequences could have been, and what helps if it was too little."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from longctx.attention.choice import arrangements, choose_backend, chunking_backend
from longctx.forecast.closed_form import max_length, predict, reach
from longctx.forecast.hardware import address_room, available_host_memory, host_bytes
from longctx.forecast.memory_presets import CHUNK_TOKENS, memory_flags, prefers_ulysses
from longctx.forecast.memory_setup import MemorySetup
from longctx.forecast.model_sizes import ModelSizes
from longctx.launch.terminal import token_label
from longctx.sequence.mesh import ParallelDims
from longctx.settings.run import Run
from longctx.training.peak_memory import GIB, PeakMemory

DIGITS = 2
"""Significant digits of predicted lengths, which are no more exact."""

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
    lines = []
    for kind, of in peak.to_dict().items():
        if kind != "allocation_retries":
            lines.append(
                f"{kind:9} {of['gib_max']:.2f} GiB at most, on rank {of['rank_of_max']}; {of['gib_min']:.2f} at "
                f"least; {of['gib_mean']:.2f} on average"
            )
    return [*lines, describe_reach(setup, peak, longest_row // setup.num_rows)]


def describe_reach(setup: MemorySetup, peak: PeakMemory, length: int) -> str:
    """Return the run's last line: `peak 41.2 of 80.0 GiB on rank 3; these settings reach about 1.9M tokens`.

    Args:
        peak: peak of a run whose longest micro-batch had rows of `length` tokens on average; the closed form's
            difference between lengths is added to it.
    """
    predicted, node = predict(setup, length), peak.of_fullest_node(setup.ranks_per_node)
    device_total, host_total = min(peak.device_total), min(peak.host_total)
    longest = reach(
        setup,
        device_total,
        host_total,
        beside_device=max(peak.allocated) - predicted.allocated_bytes,
        beside_host=node - predicted.host_bytes,
    )
    reached = f"these settings reach about {token_label(longest.length, DIGITS)} tokens"
    on_host = f"{node / GIB:.1f} of {host_total / GIB:.1f} GiB of host memory"
    if not peak.has_devices:
        ranks = f", by the {setup.ranks_per_node} ranks of a machine" if setup.ranks_per_node > 1 else ""
        return f"peak {on_host}{ranks}; {reached}"
    rank = peak.allocated.index(max(peak.allocated))
    on_device = f"peak {max(peak.allocated) / GIB:.1f} of {device_total / GIB:.1f} GiB on rank {rank}"
    if longest.binds == "host":
        return f"{on_device}, {on_host}; {reached}, where host memory is full"
    return f"{on_device}; {reached}"


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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one of its causes, says that device or host memory is full."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(seen, RuntimeError) and _SAYS_OUT_OF_MEMORY.search(str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


_SAYS_OUT_OF_MEMORY = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|CUDA.*out of memory|bad_alloc"
)


def is_first_to_say() -> bool:
    """Whether no other rank ran out of memory before; true for all if they cannot communicate."""
    if not dist.is_initialized():
        return True
    with suppress(RuntimeError):  # the store ended with its rank
        return dist.distributed_c10d._get_default_store().add("longctx/out of memory", 1) == 1
    return True


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


def suggest_savings(
    setup: MemorySetup,
    length: int,
    device_bytes: float,
    host_bytes: float,
    memory_options: Mapping[str, MemorySetup],
) -> str:
    """Return advice for an out-of-memory error: the largest consumers, and the memory options by effect.

    Args:
        length: tokens of a row.
        device_bytes, host_bytes: memory for the step on one GPU (ignored on the CPU) and on one node.
        memory_options: flags that can be added -> the set-up with them.
    """
    peak = predict(setup, length)
    taken, place = (peak.host, "host memory") if setup.is_cpu else (peak.device, "a GPU")
    largest = sorted(taken.items(), key=lambda item: -item[1])[:4]
    fits = max_length(setup, device_bytes, host_bytes)
    lengths = {flags: max_length(changed, device_bytes, host_bytes) for flags, changed in memory_options.items()}
    helpful = sorted((flags for flags in lengths if lengths[flags] > 1.02 * fits), key=lambda flags: -lengths[flags])
    room = f"{host_bytes / GIB:.1f} GiB of host memory"
    if not setup.is_cpu:
        room = f"{device_bytes / GIB:.1f} GiB of a GPU and {room}"
    rank = f" on rank {dist.get_rank()}" if dist.is_initialized() else ""
    return "\n".join(
        [
            f"longctx: out of memory{rank}, with sequences of {length:,} tokens, {setup.local_tokens(length):,.0f} of "
            "them a rank. What would have helped, all predicted:",
            f"longctx: largest   {', '.join(f'{name} {size / GIB:.2f}' for name, size in largest)} GiB of {place}",
            f"longctx: as it is  sequences of about {token_label(fits, DIGITS)} tokens, in {room}",
            *(f"longctx: add       {flags}: about {token_label(lengths[flags], DIGITS)}" for flags in helpful),
            "longctx: or        a shorter --max_length" if fits else "longctx: or        more devices, a smaller model",
        ]
    )

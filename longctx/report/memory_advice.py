"""The report on a run's memory: how long its sequences could have been, and what helps if it was too little."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from longctx.attention.choice import arrangements
from longctx.forecast.cost import cost, reach
from longctx.forecast.memory_presets import CHUNK_TOKENS, with_options
from longctx.forecast.model_sizes import ModelSizes
from longctx.forecast.search import as_flags, search
from longctx.forecast.shape import RunShape
from longctx.launch.terminal import token_label
from longctx.machine.here import Machine, address_room, available_host_memory, host_bytes
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
    "--per_device_train_batch_size 1": {"rows": 1},
}
"""Flags that save memory, with what they set."""


def describe_memory(run: Run, peak: PeakMemory, longest_row: int, model: torch.nn.Module) -> list[str]:
    """Describe the peaks of the ranks and, on the last line, how long sequences can be with the same settings.

    Args:
        longest_row: tokens of the longest micro-batch, padding included.
    """
    norms = {name: getattr(run.shape.model, name) for name in ("norm_width", "head_norm_width")}  # unknown once sharded
    shape = replace(run.shape, model=replace(ModelSizes.of_model(model), **norms))
    kinds = peak.to_dict()
    del kinds["allocation_retries"]
    lines = [
        f"{kind:9} {of['gib_max']:.2f} GiB at most, on rank {of['rank_of_max']}; {of['gib_min']:.2f} at least; "
        f"{of['gib_mean']:.2f} on average"
        for kind, of in kinds.items()
    ]
    return [*lines, describe_reach(shape, machine_of(run), peak, -(-longest_row // shape.rows))]


def describe_reach(shape: RunShape, machine: Machine, peak: PeakMemory, length: int) -> str:
    """Return the run's last line: `peak 41.2 of 80.0 GiB on rank 3; these settings reach about 1.9M tokens`.

    Args:
        machine: whose memory is replaced by that which the ranks found.
        peak: peak of a run whose longest micro-batch had rows of `length` tokens on average; the forecast's difference
            between lengths is added to it.
    """
    device_total, host_total = min(peak.device_total), min(peak.host_total)
    machine = replace(machine, device_bytes=device_total, host_bytes=host_total)
    predicted, node = cost(shape, machine, length), peak.of_fullest_node(machine.per_node)
    longest = reach(
        shape,
        machine,
        beside_device=max(peak.allocated) - predicted.allocated_bytes,
        beside_host=node - predicted.host_bytes,
    )
    reached = f"these settings reach about {token_label(longest.length, DIGITS)} tokens"
    on_host = f"{node / GIB:.1f} of {host_total / GIB:.1f} GiB of host memory"
    if not peak.has_devices:
        ranks = f", by the {machine.per_node} ranks of a machine" if machine.per_node > 1 else ""
        return f"peak {on_host}{ranks}; {reached}"
    rank = peak.allocated.index(max(peak.allocated))
    on_device = f"peak {max(peak.allocated) / GIB:.1f} of {device_total / GIB:.1f} GiB on rank {rank}"
    if longest.binds == "host":
        return f"{on_device}, {on_host}; {reached}, where host memory is full"
    return f"{on_device}; {reached}"


def machine_of(run: Run) -> Machine:
    """Return the run's machine, with as many ranks a node as there are."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or run.machine.per_node
    return replace(run.machine, per_node=min(local, run.dims.world_size))


@contextmanager
def out_of_memory_explained(run: Run) -> Iterator[None]:
    """Complete an error about exhausted memory by what would have helped, on the first rank that raises one.

    Enter it before weights are read.
    """
    machine, room = machine_of(run), host_bytes()
    with suppress(OSError):  # no Linux
        room = available_host_memory()
    machine = replace(machine, host_bytes=min(room, machine.per_node * address_room()))
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error) and is_first_to_say():
            try:
                error.add_note(_advice(run, machine))
            except Exception as other:  # there is no memory for this either; the error itself is what counts
                error.add_note(f"longctx: out of memory, and too little is left to say what would help ({other!r})")
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


def _advice(run: Run, machine: Machine) -> str:
    """Return what is largest, and how long sequences can be as it is and with each flag that helps, the longest first.

    Args:
        machine: with the memory for the step.
    """
    shape, length = run.shape, run.settings["max_length"]
    peak = cost(shape, machine, length)
    taken, place = (peak.host, "host memory") if machine.is_cpu else (peak.device, "a GPU")
    largest = sorted(taken.items(), key=lambda item: -item[1])[:4]
    fits = reach(shape, machine).length
    lengths = {flags: reach(other, there).length for flags, (other, there) in _changed(run, machine).items()}
    helpful = sorted((flags for flags in lengths if lengths[flags] > 1.02 * fits), key=lambda flags: -lengths[flags])
    room = "" if machine.is_cpu else f"{machine.device_bytes / GIB:.1f} GiB of a GPU and "
    room += f"{machine.host_bytes / GIB:.1f} GiB of host memory"
    rank = f" on rank {dist.get_rank()}" if dist.is_initialized() else ""
    lines = [
        f"longctx: out of memory{rank}, with sequences of {length:,} tokens, {shape.local_tokens(length):,.0f} of them "
        "a rank. What would have helped, all predicted:",
        f"longctx: largest   {', '.join(f'{name} {size / GIB:.2f}' for name, size in largest)} GiB of {place}",
        f"longctx: as it is  sequences of about {token_label(fits, DIGITS)} tokens, in {room}",
        *(f"longctx: add       {flags}: about {token_label(lengths[flags], DIGITS)}" for flags in helpful),
        "longctx: or        a shorter --max_length" if fits else "longctx: or        more devices, a smaller model",
    ]
    if run.next_choice:
        lines.append(f"longctx: run again with {run.next_choice}: the next choice of --memory auto")
    return "\n".join(lines)


def _changed(run: Run, machine: Machine) -> dict[str, tuple[RunShape, Machine]]:
    """Return the flags that can be added to this run, with the shape that it has then, and the machines that it needs.

    They are those of MEMORY_OPTIONS, what --memory auto would set, and twice as many devices for a sequence.
    """
    shape, length, asked = run.shape, run.settings["max_length"], run.asked_memory_options
    found: dict[str, tuple[RunShape, Machine]] = {}
    for flags, values in MEMORY_OPTIONS.items():
        options = {**asked, **values}
        memory, rows = options.pop("memory", run.settings["memory"]), options.pop("rows", shape.rows)
        with suppress(ValueError):  # there is no place for it in this run
            found[flags] = with_options(replace(shape, rows=rows), memory, options, length), machine
    for one in search([shape], machine, length, fixed=asked) if machine.is_known else ():
        if one.cost.fits:
            found[f"--memory auto, which is {as_flags(one.memory_flags)}"] = one.shape, machine
    sp = 2 * shape.sp
    more = 1 if shape.world_size % sp == 0 else 2
    ways = [one for one in arrangements(sp) if shape.model.num_heads % one.ulysses == 0]
    spread = replace(
        shape,
        arrangement=next((one for one in ways if one.name == shape.arrangement.name), ways[0]),
        world_size=more * shape.world_size,
        engine="fsdp2" if shape.engine == "none" else shape.engine,
    )
    nodes = replace(machine, per_node=more * machine.per_node) if machine.is_cpu else machine
    found[f"--sp {sp}" + (f", on {spread.world_size} devices" if more > 1 else "")] = spread, nodes
    return found

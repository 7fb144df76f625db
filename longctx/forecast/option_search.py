"""The fastest memory options that fit, found by forecast among all that a run supports.

Some of them are set for the whole model: tiles of the MLP, heads at a time, states on the host, sequence chunks. For
each combination of these, layers may differ in what they keep for the backward pass (`longctx.layers.checkpoints`), so
that the memory that is left saves recomputation. Three numbers of layers describe that, and all of them are forecast at
once, as arrays: first on a coarse grid, then around its best point.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longctx.attention.backends import BACKENDS
from longctx.forecast.closed_form import peak_bytes
from longctx.forecast.expected_step import FREE_PART
from longctx.forecast.memory_options import CPU, NONE
from longctx.forecast.memory_presets import CHUNK_TOKENS
from longctx.forecast.memory_setup import MemorySetup
from longctx.forecast.step_time import Speeds, step_time

GRID = 16
"""Values of each number of layers on the coarse grid."""

WORTH_MIXING = 0.99
"""Layers differ only if that takes less than this part of the seconds that the best step with equal layers takes."""

BY_LAYER = {"activation_checkpointing", "every_n_layers", "whole_layers", "selective", "activation_offloading"}
"""Options that say what layers keep. If one of them is asked for, layers keep what is asked."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """The memory for a step."""

    device_bytes: float
    """Memory of one GPU."""
    host_bytes: float
    """Memory of a node's host."""


@dataclass(frozen=True, kw_only=True)
class FoundMemoryOptions:
    """Memory options by their flags, and what a step with them is predicted to take."""

    asked: Mapping[str, Any]
    """Values as `asked_memory_options` returns them, those that were asked for included."""
    setup: MemorySetup
    seconds: float
    used: float
    """The used part of the device's memory or of the host's, whichever is larger."""


def fastest_memory_options(
    setup_of: Callable[[Mapping[str, Any]], MemorySetup],
    asked: Mapping[str, Any],
    *,
    length: int,
    documents: Sequence[int],
    speeds: Speeds,
    room: Room,
) -> FoundMemoryOptions | None:
    """Return the fastest options that leave FREE_PART of the memory free, else the fastest that fit; None if none do.

    Args:
        setup_of: returns the set-up of a run that asks for these options, whose `memory` is balanced unless it is among
            them; raises ValueError if it does not support them.
        asked: memory options that are fixed, by flag.
        length: tokens of a padded sequence.
        documents: lengths of its documents, `length` in all.
    """
    found: list[FoundMemoryOptions] = []
    for option in _uniform(asked):
        try:
            setup = setup_of(option)
        except ValueError:
            continue
        best = _by_layer(setup, option, asked, length, documents, speeds, room)
        if best is not None:
            found.append(best)
    if not found:
        return None
    return min(found, key=lambda one: (one.used > 1 - FREE_PART, one.seconds))


def _uniform(asked: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the memory options of the whole model, each with those that are asked for; the simplest first."""
    seen: list[dict[str, Any]] = []
    whole = itertools.product((NONE, CPU), (NONE, CPU), (None, True), (None, 1))
    for optimizer, param, tiled, stride in whole:
        seen.append(
            {
                "offload_optimizer_device": optimizer,
                "offload_param_device": param,
                "tiled_mlp": tiled,
                "heads_k_stride": stride,
            }
        )
    chunked = itertools.product((NONE, CPU), (NONE, CPU), (8 * CHUNK_TOKENS, 4 * CHUNK_TOKENS, CHUNK_TOKENS))
    for optimizer, param, chunk in chunked:
        seen.append(
            {
                "offload_optimizer_device": optimizer,
                "offload_param_device": param,
                "sequence_chunk_size": chunk,
            }
        )
    seen.append({"memory": "longest"})
    for memory_options in seen:
        yield {name: value for name, value in memory_options.items() if value is not None and value != NONE} | dict(
            asked
        )


def _by_layer(
    setup: MemorySetup,
    option: dict[str, Any],
    asked: Mapping[str, Any],
    length: int,
    documents: Sequence[int],
    speeds: Speeds,
    room: Room,
) -> FoundMemoryOptions | None:
    """Return the fastest numbers of layers for memory options of the whole model; None if nothing fits."""
    forecast = _Forecast(length, documents, speeds, room)
    if BY_LAYER & asked.keys() or option.get("memory") == "longest":
        seconds, used = forecast.of(setup)
        return (
            FoundMemoryOptions(asked=option, setup=setup, seconds=float(seconds), used=float(used))
            if used <= 1
            else None
        )
    setup = replace(setup, gradient_checkpointing=True, selective_checkpointing=True, activation_offloading=True)
    layers = setup.model.num_layers
    step = max(1, -(-layers // GRID))
    values = (*range(0, layers, step), layers)
    whole, offloaded = values, values
    if setup.sequence_chunk_size is not None:  # no layer is whole, and as many as can be are on the host
        whole, offloaded = (0,), values[:0:-1]
    found, equal = forecast.best(setup, _grid(whole, values, offloaded, layers))
    if found is None:
        return None
    near = [tuple(n for n in range(count - step, count + step + 1) if 0 <= n <= layers) for count in found.counts]
    if setup.sequence_chunk_size is not None:
        near = [(0,), near[1], tuple(n for n in reversed(near[2]) if n > 0)]
    mixed, _ = forecast.best(setup, _grid(near[0], near[1], near[2], layers))
    assert mixed is not None
    if equal is not None and not equal.is_worse_than(mixed):
        mixed = equal
    kept = _flags(setup, *mixed.counts)
    return FoundMemoryOptions(
        asked=option | kept, setup=_with(setup, *mixed.counts), seconds=mixed.seconds, used=mixed.used
    )


@dataclass(frozen=True)
class _Point:
    counts: tuple[int, int, int]
    """Layers that are whole, selective and offloaded."""
    seconds: float
    used: float

    def is_worse_than(self, other: _Point) -> bool:
        """Whether the other leaves FREE_PART free and this does not, or is faster by more than WORTH_MIXING."""
        if (self.used > 1 - FREE_PART) != (other.used > 1 - FREE_PART):
            return self.used > other.used
        return other.seconds < WORTH_MIXING * self.seconds


@dataclass(frozen=True)
class _Forecast:
    length: int
    documents: Sequence[int]
    speeds: Speeds
    room: Room

    def of(self, setup: MemorySetup) -> tuple[Any, Any]:
        """Return the seconds of a step and the used part of memory, arrays if the setup has arrays."""
        device, host = peak_bytes(setup, self.length)
        used = np.maximum(device / self.room.device_bytes, host / self.room.host_bytes)
        return step_time(setup, self.length, self.speeds, documents=self.documents).seconds, used

    def best(self, setup: MemorySetup, grid: Grid) -> tuple[_Point | None, _Point | None]:
        """Return the best point of a grid: the fastest that leaves FREE_PART free, else that fits.

        The second is the best of those at which all layers are equal.
        """
        seconds, used = np.broadcast_arrays(*self.of(_with(setup, *grid.counts)))
        order = np.lexsort((seconds, (used > 1 - FREE_PART), (used > 1)))

        def point(first: int) -> _Point | None:
            if used[first] > 1:
                return None
            whole, selective, offloaded = (int(count[first]) for count in grid.counts)
            return _Point((whole, selective, offloaded), float(seconds[first]), float(used[first]))

        equal = order[grid.is_uniform[order]]
        return point(order[0]), point(equal[0]) if len(equal) else None


class Grid(NamedTuple):
    """Combinations of numbers of layers."""

    counts: tuple[NDArray[np.int64], ...]
    """Layers that are whole, selective and offloaded, int64 [n] each."""
    is_uniform: NDArray[np.bool_]
    """Whether all layers are equal, [n]."""


@functools.lru_cache(maxsize=256)
def _grid(whole: tuple[int, ...], selective: tuple[int, ...], offloaded: tuple[int, ...], layers: int) -> Grid:
    """Return every combination of these numbers that is possible in a model of `layers` layers."""
    grid = np.stack(np.meshgrid(whole, selective, offloaded, indexing="ij")).reshape(3, -1)
    checkpointed = layers - grid[0]
    grid = grid[:, (grid[1] <= checkpointed) & (grid[2] <= checkpointed)]
    return Grid(tuple(grid), ((grid == 0) | (grid == layers)).all(axis=0))


def _with(setup: MemorySetup, whole: Any, selective: Any, offloaded: Any) -> MemorySetup:
    return replace(setup, whole_layers=whole, selective_layers=selective, offloaded_layers=offloaded)


def _flags(setup: MemorySetup, whole: int, selective: int, offloaded: int) -> dict[str, Any]:
    """Return the numbers of layers as memory options by flag, without those that are the default."""
    checkpointed = setup.model.num_layers - whole
    if not checkpointed:
        return {"activation_checkpointing": False}
    memory_options: dict[str, Any] = {}
    if whole:
        memory_options["whole_layers"] = whole
    if selective != checkpointed * BACKENDS[setup.backend].keeps_output:
        memory_options["selective"] = selective if 0 < selective < checkpointed else bool(selective)
    if offloaded and (setup.sequence_chunk_size is None or offloaded < checkpointed):
        memory_options["activation_offloading"] = True
        if offloaded < checkpointed:
            memory_options["offloaded_layers"] = offloaded
    return memory_options

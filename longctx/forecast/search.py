"""The search over memory options: for each shape of a run, the fastest options that fit.

Some options are set for the whole model: states on the host, tiles of the MLP, heads at a time, sequence chunks. For
each combination of these, layers may differ in what they keep for the backward pass (`longctx.layers.checkpoints`), so
that the memory that is left saves recomputation. Three numbers of layers describe that, and all of them are forecast at
once, as arrays: first on a coarse grid, then around its best point.
"""

from __future__ import annotations

import functools
import itertools
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longctx.attention.choice import Documents, exchange_overlaps
from longctx.forecast.cost import FREE_PART, Cost, cost, filled, level_of, peaks_and_seconds
from longctx.forecast.memory_options import AUTO, CPU
from longctx.forecast.memory_presets import CHUNK_TOKENS, memory_flags, with_options
from longctx.forecast.shape import RunShape
from longctx.machine.here import Machine

GRID = 16
"""Values of each number of layers on the coarse grid."""

A_TIE = 1.02
"""Speeds within this ratio of the best count as equal. Of these the run with the fewest options is taken, then the one
that needs least host memory, then the first."""

WORTH_REFINING = 1.1
"""Numbers of layers are refined around a point that takes at most this many times the seconds of the best so far."""

WORTH_MIXING = 0.99
"""Layers differ only if that takes less than this part of the seconds that the best step with equal layers takes."""

BY_LAYER = {"activation_checkpointing", "every_n_layers", "whole_layers", "selective", "activation_offloading"}
"""Options that say what layers keep. If one of them is asked for, layers keep what is asked."""


def as_flags(flags: Mapping[str, Any]) -> str:
    """Return flags, by name, as a shell reads them."""
    return shlex.join(word for name, value in flags.items() for word in (f"--{name}", str(value)))


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A shape with memory options, and what a step costs."""

    shape: RunShape
    cost: Cost
    memory: str
    """The preset, a value of --memory."""
    asked: Mapping[str, Any]
    """Memory options besides the preset, by the names of `longctx.forecast.memory_presets.asked_memory_options`."""

    @property
    def memory_flags(self) -> dict[str, Any]:
        """The values of the flags that ask for the preset and the options."""
        return {"memory": self.memory, **memory_flags(self.asked)}


@dataclass(frozen=True, kw_only=True, eq=False)
class _Candidate:
    """Memory options of a shape, and what is needed to compare them with others."""

    of: _Search
    """What found them."""
    memory: str = "balanced"
    asked: Mapping[str, Any]
    used: float
    speed: float
    """Tokens a second and device."""
    host_bytes: float
    counts: tuple[int, ...] = ()
    """Layers that are whole, selective and offloaded, where they were searched."""
    is_uniform: bool = True
    """Whether all layers keep the same."""

    @property
    def level(self) -> int:
        return level_of(self.used)

    @property
    def num_options(self) -> int:
        """Memory options beside the default."""
        return len(self.asked) + (self.memory != "balanced")


def search(
    shapes: Iterable[RunShape],
    machine: Machine,
    length: int,
    documents: Sequence[int] | None = None,
    *,
    memory: str = AUTO,
    fixed: Mapping[str, Any] | None = None,
    counts_experts: bool = False,
) -> list[Choice]:
    """Return the best choice for each shape that supports the options, the best of all first.

    Args:
        shapes: of the runs, whose own memory options do not matter.
        length: tokens of a row, before it is padded.
        documents: lengths of a row's documents, at most `length` in all; None means one document.
        memory: a preset that all of them have, or auto for the best options of each.
        fixed: memory options that somebody asked for, by name; auto leaves them as they are.
    """
    searches = [
        _Search(s, machine, length, filled(documents or [length], s.padded(length)), fixed or {}) for s in shapes
    ]
    pool = [
        candidate
        for one in searches
        for candidate in (one.candidates() if memory == AUTO else one.single(memory, one.fixed))
    ]
    best: dict[int, _Candidate] = {}
    for candidate in ranked(pool):
        best.setdefault(id(candidate.of), candidate)
    found = []
    for one in best.values():
        shape = one.of.resolved(one.memory, one.asked)
        taken = cost(shape, machine, length, documents, counts_experts=counts_experts)
        found.append(Choice(shape=shape, cost=taken, memory=one.memory, asked=one.asked))
    return found


def ranked(found: Sequence[_Candidate]) -> list[_Candidate]:
    """Return candidates, the best first.

    What leaves FREE_PART of the memory free comes first, then what fits, then what needs least. In the first two groups
    the fastest come first; of those within A_TIE of the fastest, the simplest.
    """
    left, order = list(found), []
    while left:
        level = min(one.level for one in left)
        same = [one for one in left if one.level == level]
        if level == 2:
            best = min(same, key=attrgetter("used"))
        else:
            fastest = max(one.speed for one in same)
            ties = [one for one in same if one.speed * A_TIE >= fastest]
            best = min(ties, key=lambda one: (one.num_options, one.host_bytes))
        order.append(best)
        left.remove(best)
    return order


@dataclass(frozen=True)
class _Search:
    """The search for the memory options of one shape."""

    shape: RunShape
    machine: Machine
    length: int
    """Tokens of a row, before it is padded."""
    row: Sequence[int]
    """Lengths of a row's documents and of its padding."""
    fixed: Mapping[str, Any]

    def resolved(self, memory: str, asked: Mapping[str, Any]) -> RunShape:
        """Return the shape with memory options.

        An exchange overlaps with attention where a run would choose that.

        Raises:
            ValueError: if it does not support them.
        """
        found = with_options(self.shape, memory, asked, self.length)
        options = found.options
        if options.overlap_exchange is not None or options.heads_k_stride is not None or options.sequence_chunk_size:
            return found
        return replace(found, options=replace(options, overlap_exchange=self._overlaps))

    @property
    def _tokens(self) -> float:
        """Tokens of an optimizer step for each device."""
        shape = self.shape
        return shape.padded(self.length) * shape.rows * shape.micro_batches * shape.dp / shape.world_size

    @functools.cached_property
    def _overlaps(self) -> bool:
        known = Documents(rows=[np.asarray(self.row)], source="the row")
        return exchange_overlaps(self.shape.attention(self.machine), self.shape.arrangement, known)

    def single(self, memory: str, asked: Mapping[str, Any]) -> Iterator[_Candidate]:
        """Yield a preset with these options, if the shape supports them."""
        with suppress(ValueError):
            used, seconds, host = self._forecast(self.resolved(memory, asked))
            speed = self._tokens / float(seconds)
            yield _Candidate(of=self, memory=memory, asked=asked, used=float(used), speed=speed, host_bytes=float(host))

    def candidates(self) -> Iterator[_Candidate]:
        """Yield options that may be the best, the simplest first."""
        states = "offload_param_device" if self.shape.is_fsdp else "offload_optimizer_device"
        best, has_room = 0.0, False
        for chunk, host, tiled, stride in _UNIFORM:
            if chunk is not None and has_room:
                continue
            option = {states: host, "tiled_mlp": tiled, "heads_k_stride": stride, "sequence_chunk_size": chunk}
            asked = {name: value for name, value in option.items() if value is not None} | dict(self.fixed)
            with suppress(ValueError):
                shape = self.resolved("balanced", asked)
                for one in self._by_layer(shape, asked, best):
                    yield one
                    if one.level == 0:
                        best, has_room = max(best, one.speed), has_room or host is None
        yield from self.single("longest", self.fixed)

    def _by_layer(self, shape: RunShape, asked: Mapping[str, Any], best: float) -> Iterator[_Candidate]:
        """Yield the fastest numbers of layers for options of the whole model, or those that need least.

        Args:
            best: the highest speed so far of what leaves FREE_PART of the memory free.
        """
        if BY_LAYER & self.fixed.keys():
            yield from self.single("balanced", asked)
            return
        layers, is_chunked = shape.model.num_layers, shape.options.sequence_chunk_size is not None
        step = max(1, -(-layers // GRID))
        values = (*range(0, layers, step), layers)
        # With chunks, no layer is whole, and as many as can be are on the host.
        whole, offloaded = ((0,), values[:0:-1]) if is_chunked else (values, values)
        points = self._points(shape, asked, _grid(whole, values, offloaded, layers))
        mixed = points[0]
        if mixed.used <= 1 and mixed.speed * WORTH_REFINING >= best and not mixed.is_uniform:
            near = [
                tuple(n for n in range(count - step, count + step + 1) if 0 <= n <= layers) for count in mixed.counts
            ]
            if is_chunked:
                near = [(0,), near[1], tuple(n for n in reversed(near[2]) if n > 0)]
            mixed = self._points(shape, asked, _grid(near[0], near[1], near[2], layers))[0]
        uniform = [one for one in points if one.is_uniform]
        if not mixed.is_uniform and all(_is_faster(mixed, one) for one in uniform):
            yield mixed
        yield from uniform

    def _points(self, shape: RunShape, asked: Mapping[str, Any], counts: NDArray[np.int64]) -> list[_Candidate]:
        """Return the best numbers of layers of a grid, and the best of those at which all layers are equal.

        Args:
            counts: [3, n], layers that are whole, selective and offloaded.
        """
        used, seconds, host = np.broadcast_arrays(*self._forecast(shape.with_layers(*counts)))
        is_uniform = ((counts == 0) | (counts == shape.model.num_layers)).all(axis=0)
        order = np.lexsort((np.where(used > 1, used, seconds), used > 1 - FREE_PART, used > 1))
        equal = order[is_uniform[order]]
        return [
            _Candidate(
                of=self,
                asked={**asked, **_options_of(shape, *counts[:, i].tolist())},
                used=float(used[i]),
                speed=self._tokens / float(seconds[i]),
                host_bytes=float(host[i]),
                counts=tuple(counts[:, i].tolist()),
                is_uniform=bool(is_uniform[i]),
            )
            for i in dict.fromkeys((*order[:1].tolist(), *equal[:1].tolist()))
        ]

    def _forecast(self, shape: RunShape) -> tuple[Any, Any, Any]:
        return peaks_and_seconds(shape, self.machine, shape.padded(self.length), self.row)


_UNIFORM = (
    *itertools.product((None,), (None, CPU), (None, True), (None, 1)),
    *itertools.product((CHUNK_TOKENS,), (None, CPU), (None,), (None,)),
)
"""Sequence chunks, place of the states, tiles of the MLP and heads at a time, in the order of the search."""


def _is_faster(one: _Candidate, other: _Candidate) -> bool:
    """Whether one leaves FREE_PART free where another does not, or is faster by more than WORTH_MIXING."""
    if one.level != other.level:
        return one.used < other.used
    return WORTH_MIXING * one.speed > other.speed


@functools.lru_cache(maxsize=256)
def _grid(
    whole: tuple[int, ...], selective: tuple[int, ...], offloaded: tuple[int, ...], layers: int
) -> NDArray[np.int64]:
    """Return every combination of these numbers that is possible in a model of `layers` layers, int64 [3, n]."""
    grid = np.stack(np.meshgrid(whole, selective, offloaded, indexing="ij")).reshape(3, -1)
    checkpointed = layers - grid[0]
    return grid[:, (grid[1] <= checkpointed) & (grid[2] <= checkpointed)]


def _options_of(shape: RunShape, whole: int, selective: int, offloaded: int) -> dict[str, Any]:
    """Return the numbers of layers as memory options by name, without those that are the default."""
    checkpointed = shape.model.num_layers - whole
    if not checkpointed:
        return {"activation_checkpointing": False}
    options: dict[str, Any] = {}
    if whole:
        options["whole_layers"] = whole
    if selective != checkpointed * shape.backend.keeps_output:
        options["selective"] = selective if 0 < selective < checkpointed else bool(selective)
    if offloaded and (shape.options.sequence_chunk_size is None or offloaded < checkpointed):
        options["activation_offloading"] = True
        if offloaded < checkpointed:
            options["offloaded_layers"] = offloaded
    return options

"""The record of an attention backend: everything that the rest of the project knows of it.

A backend defines such a record, and `longctx.attention.backends` registers it. Flags, the choice of a backend, its
modelled time, the memory forecast, pictures and the sweep read the record, and nothing else tells backends apart by
name.

Shape legend: P = R · U ranks share a sequence, R of them in a ring and U of Ulysses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from longctx.attention.cost import Arrangement, AttentionTime, RingWork, Setup
from longctx.attention.operator import Schedule
from longctx.sequence.batch import Attend, AttentionKind
from longctx.sequence.layout import Layout
from longctx.sequence.mesh import SequenceGroups

AttentionOfBatch = Callable[..., Attend]
"""(layout: Layout, groups: SequenceGroups, kind: AttentionKind, heads_k_stride: int | None = None,
overlap_exchange: bool = False) -> attention.

It serves all layers of the batch whose attention is of this kind. `heads_k_stride` is how many
key/value heads of a rank travel and are attended at a time; None means the backend's default. `overlap_exchange` asks a
backend that exchanges tokens for heads to exchange some heads while it attends to others.
"""

ScheduleOfBatch = Callable[[Layout, SequenceGroups, AttentionKind], Schedule]
"""(layout, groups, kind) -> schedule, for all layers of the batch whose attention is of this kind."""


@dataclass(frozen=True, kw_only=True)
class KeyValues:
    """The sizes of a layer's keys and values on which the memory of a ring depends."""

    elements: float
    """Elements of k, or of v, for one token and all heads."""
    element_size: int
    """Bytes of an element."""
    num_heads: int
    """Key/value heads."""
    ring: int
    """Ranks in the ring, R; at least 2."""
    heads_k_stride: int | None
    """Key/value heads that travel at a time; None means the backend's default."""


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One attention backend. Every field has to be given, so that an incomplete backend cannot be made."""

    name: str
    """The value of --sp_backend."""
    attention: AttentionOfBatch
    """Return the attention of a batch on this rank."""
    arrangements: Callable[[int], Sequence[Arrangement]]
    """Return every arrangement of this many ranks, at least 2, those with the smallest ring first.

    The degrees decide the order of the tokens: with a ring of at least 2 it is that of `plan_ring`, else every rank
    holds a contiguous slice."""
    arrange: Callable[[Setup, int | None], Arrangement]
    """Return the arrangement for a run that asks for this backend, from its heads and its --ring_size.

    Raises ValueError with the heads or degrees, the legal ones and the remedy.
    """
    has_ring_size: bool
    """Whether --ring_size chooses among its arrangements."""
    passes: Callable[[Setup, Arrangement, RingWork], tuple[AttentionTime, AttentionTime]]
    """Return the modelled seconds of a layer's attention, forward and backward, without the exchange for heads."""
    held: Callable[[KeyValues], tuple[float, float]]
    """Return the bytes that a ring holds for each token of a rank in the backward pass: those of received keys and
    values, and those of gradients of keys and values."""
    engine: Literal["deepspeed", "fsdp2"]
    """The engine that --engine auto selects."""
    keeps_output: bool
    """Whether activation checkpoints keep attention's output by default, since recomputing it would send messages."""
    has_stages: bool
    """Whether --heads_k_stride splits all of attention into stages, not only the collection of keys and values."""
    schedule: ScheduleOfBatch | None
    """Return the attention of a rank's heads for the sequence-chunked step, which exchanges tokens for heads itself;
    None if the backend does not support this step."""
    has_branches: bool
    """Whether it computes documents with branches, see `longctx.sequence.layout`."""
    accelerate_degree: str | None
    """The degree of accelerate's ParallelismConfig that selects it, `cp` or `sp`; None if neither does."""
    color: str
    """Color in pictures, as `#RRGGBB`."""
    marker: str
    """Marker in pictures, by Matplotlib's name."""

    @property
    def can_chunk(self) -> bool:
        """Whether it supports the sequence-chunked step."""
        return self.schedule is not None

    @property
    def fewest_ranks(self) -> int | None:
        """The fewest ranks that it spreads a sequence over; None for a backend of one rank."""
        return next((sp for sp in _TRIED if self.arrangements(sp)), None)


_TRIED = (2, 3, 4, 8)
"""Numbers of ranks for which the registry looks at a backend's arrangements."""


class Registry(dict[str, Backend]):
    """The backends by name, in the order in which messages list them."""

    def register(self, backend: Backend) -> None:
        """Add a backend.

        Raises:
            ValueError: if its name is taken or reserved, or if an arrangement has another name or another number of
                ranks than the one that was asked for.
        """
        if backend.name in (*self, "auto"):
            raise ValueError(f"An attention backend {backend.name!r} is registered already. Choose another name.")
        for sp in _TRIED:
            for arrangement in backend.arrangements(sp):
                if (arrangement.name, arrangement.ring * arrangement.ulysses) != (backend.name, sp):
                    raise ValueError(
                        f"Attention backend {backend.name!r} arranges {sp} ranks as {arrangement!r}. Return "
                        f"arrangements of its own name whose degrees multiply to {sp}."
                    )
        self[backend.name] = backend

    def __missing__(self, name: str) -> Backend:
        raise ValueError(f"The attention backend {name!r} is unknown. Use one of {', '.join(self)}.")

    def of_degree(self, accelerate_degree: str) -> str:
        """Return the name of the backend that a degree of accelerate's ParallelismConfig, `cp` or `sp`, selects."""
        return next(name for name, backend in self.items() if backend.accelerate_degree == accelerate_degree)

    @property
    def spread(self) -> dict[str, Backend]:
        """The backends that spread a sequence over several ranks: all but `local`."""
        return {name: backend for name, backend in self.items() if backend.fewest_ranks is not None}

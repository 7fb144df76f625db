"""The stages of attention for a few heads at a time: which heads of a rank are exchanged and attended to together.

Shape legend: a rank attends to M key/value heads, each shared by G query heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

OVERLAPPED_STAGES = 4
"""Stages of an exchange that is hidden, if the heads allow it. The first message and the last one are not hidden, and
more stages make these smaller. But every stage costs messages and launches."""


def check_stride(heads_k_stride: int) -> None:
    """Raise ValueError for a stride below 1."""
    if heads_k_stride < 1:
        raise ValueError(
            f"heads_k_stride {heads_k_stride} must be at least 1, the key/value heads of a rank that are exchanged at "
            "a time. Leave it out to exchange all of them at once."
        )


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The heads of one stage."""

    keys: slice
    """The stage's part of every rank's M key/value heads."""
    queries: slice
    """The stage's part of the G query heads that share each of them."""
    is_first: bool
    """Whether it is the first stage of its key/value heads."""
    is_last: bool

    @property
    def sharing(self) -> int:
        """Query heads in the stage for each of its key/value heads."""
        return self.queries.stop - self.queries.start


def head_stages(per_rank: int, sharing: int, heads_k_stride: int | None, *, split_queries: bool) -> Iterator[Stage]:
    """Yield the stages of a rank that attends to M = `per_rank` key/value heads, each shared by G = `sharing` queries.

    Args:
        heads_k_stride, split_queries: as in `HeadChunks`.
    """
    if heads_k_stride is None:
        stride = -(-per_rank // OVERLAPPED_STAGES)
        parts = OVERLAPPED_STAGES // -(-per_rank // stride) if split_queries else 1
        step = -(-sharing // parts)
    else:
        stride, step = heads_k_stride, 1 if split_queries else sharing
    for start in range(0, per_rank, stride):
        for query in range(0, sharing, step):
            yield Stage(
                keys=slice(start, min(start + stride, per_rank)),
                queries=slice(query, min(query + step, sharing)),
                is_first=query == 0,
                is_last=query + step >= sharing,
            )

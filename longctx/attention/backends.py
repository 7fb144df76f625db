"""The attention backends by name. A new one is a package of its own and a line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from longctx.attention.kernels import varlen_attention
from longctx.batch import BatchLayout
from longctx.ring import ring_attention
from longctx.ulysses import heads_message, legal_sizes, ulysses_attention

Attend = Callable[[Tensor, Tensor, Tensor, BatchLayout, dist.ProcessGroup | None, float | None], Tensor]


@dataclass(frozen=True, kw_only=True)
class Backend:
    """How attention is spread over the ranks of a sequence group."""

    attend: Attend
    """(q [1, H, T/P, D], k, v [1, K, T/P, D], layout, group, scale) -> [1, H, T/P, D]"""
    engine: str
    """The engine it runs on by default."""
    splits_heads: bool
    """Whether the sp ranks are Ulysses ranks, which divide heads; else they form a ring."""


def _local(q, k, v, layout, group, scale):
    return varlen_attention(q, k, v, layout.cu_seqlens, scale)


def _ring(q, k, v, layout, group, scale):
    return ring_attention(q, k, v, layout.plan, group, scale)


def _ulysses(q, k, v, layout, group, scale):
    return ulysses_attention(q, k, v, layout.cu_seqlens, group, scale)


BACKENDS = {
    "local": Backend(attend=_local, engine="fsdp2", splits_heads=False),
    "ring": Backend(attend=_ring, engine="fsdp2", splits_heads=False),
    "ulysses": Backend(attend=_ulysses, engine="deepspeed", splits_heads=True),
}
"""`local` is attention on one device: what sp 1 means."""

PLANNED = ("gather", "hybrid")
"""Names of the interface that are not built yet, and are refused by name."""


def choose_backend(name: str, sp: int, num_heads: int) -> tuple[str, str]:
    """The backend that runs, and why: `name` or, for `auto`, Ulysses as far as the heads allow, else the ring.

    Raises:
        ValueError: for an unknown name, one that is not built yet, or heads that Ulysses cannot divide.
    """
    if name in PLANNED:
        raise ValueError(f"--sp_backend {name} is not built yet. Use --sp_backend ring, ulysses or auto.")
    if name not in ("auto", "ring", "ulysses"):
        raise ValueError(f"--sp_backend {name} is unknown. Use one of auto, ulysses, ring.")
    if sp == 1:
        return "local", "sp 1: every sequence stays on one device"
    if name == "ring":
        return "ring", "asked for"
    if num_heads % sp == 0:
        why = "asked for" if name == "ulysses" else f"auto: {num_heads} heads divide over sp {sp}, one exchange a layer"
        return "ulysses", why
    if name == "ulysses":
        raise ValueError(heads_message(num_heads, sp))
    legal = ", ".join(map(str, legal_sizes(num_heads, num_heads)))
    return "ring", f"auto: {num_heads} heads do not divide over sp {sp} (Ulysses could use sp {legal})"

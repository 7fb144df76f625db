"""Which backend runs: as asked for, or as the heads allow."""

from __future__ import annotations

from dataclasses import dataclass

from longctx.attention.backends import BACKENDS
from longctx.ulysses import heads_message, legal_sizes


@dataclass(frozen=True, kw_only=True)
class BackendChoice:
    """How attention is spread over the ranks of a sequence group."""

    name: str
    ring: int
    """Ranks that pass keys and values around."""
    ulysses: int
    """Ranks that exchange tokens for heads."""
    reason: str

    @property
    def engine(self) -> str:
        """The engine it runs on by default."""
        return "deepspeed" if self.name == "ulysses" else "fsdp2"


def choose_backend(name: str, sp: int, num_heads: int, ring_size: int | None = None) -> BackendChoice:
    """The backend that runs, its degrees, and why.

    Args:
        name: a backend, or `auto`: Ulysses as far as the heads divide, the ring for what is left.
        sp: ranks that share a sequence.
        num_heads: query heads of every layer.
        ring_size: ring ranks of `hybrid`; the rest are Ulysses ranks.

    Raises:
        ValueError: for an unknown name, heads that Ulysses cannot divide, or a ring that does not divide sp.
    """
    if name not in ("auto", *BACKENDS) or name == "local":
        raise ValueError(f"--sp_backend {name} is unknown. Use one of auto, ulysses, ring, gather, hybrid.")
    if ring_size is not None and name != "hybrid":
        raise ValueError(
            f"--ring_size {ring_size} splits --sp_backend hybrid; it is {name}. Leave it out, or use hybrid."
        )
    if sp == 1:
        return BackendChoice(name="local", ring=1, ulysses=1, reason="sp 1: every sequence stays on one device")
    if name in ("ring", "gather"):
        return BackendChoice(name=name, ring=sp, ulysses=1, reason="asked for")
    if name == "hybrid":
        ring = _hybrid_ring(sp, num_heads) if ring_size is None else _checked_ring(sp, num_heads, ring_size)
        return _product(ring, sp // ring, "asked for")
    if num_heads % sp == 0:
        why = "asked for" if name == "ulysses" else f"auto: {num_heads} heads divide over sp {sp}, one exchange a layer"
        return BackendChoice(name="ulysses", ring=1, ulysses=sp, reason=why)
    if name == "ulysses":
        raise ValueError(heads_message(num_heads, sp))
    why = f"auto: {num_heads} heads do not divide over sp {sp} (Ulysses could use sp {legal_sizes(num_heads)})"
    ring = _hybrid_ring(sp, num_heads)
    return _product(ring, sp // ring, why)


def _product(ring: int, ulysses: int, reason: str) -> BackendChoice:
    """ring × ulysses by its own name, which is hybrid only where both are above 1."""
    name = "ring" if ulysses == 1 else "ulysses" if ring == 1 else "hybrid"
    return BackendChoice(name=name, ring=ring, ulysses=ulysses, reason=reason)


def _hybrid_ring(sp: int, num_heads: int) -> int:
    """The smallest ring, above 1 where sp allows, that leaves a Ulysses degree the heads divide over."""
    return next(ring for ring in range(2, sp + 1) if sp % ring == 0 and num_heads % (sp // ring) == 0)


def _checked_ring(sp: int, num_heads: int, ring_size: int) -> int:
    if ring_size < 1 or sp % ring_size:
        raise ValueError(f"--ring_size {ring_size} does not divide sp {sp}. Use a divisor of {sp}.")
    if num_heads % (sp // ring_size):
        raise ValueError(
            f"--ring_size {ring_size} leaves {sp // ring_size} Ulysses ranks. "
            f"{heads_message(num_heads, sp // ring_size)}"
        )
    return ring_size

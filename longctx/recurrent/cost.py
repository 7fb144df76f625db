"""Modelled seconds of spreading a recurrent layer, by heads and by states.

**By heads**, every rank sends what the scan reads and what it returns, but for its own part, forward and backward:

    2 · exchanged · s · e · (P-1)/P bytes.

**By states**, every rank gathers what the pieces of cut documents give, and sums its gradients, in fp32. Before its own
scan it computes the maps of its pieces, which takes the scan's FLOPs for wider values, and two times as many backward.
A document that fills the sequence is cut into P pieces, or 2·P in a ring's zigzag, and takes most; documents that no
rank shares take nothing. So the way is chosen for every batch.

What both send for the convolution, a few tokens of each piece, is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from longctx.attention.cost import EXCHANGE_COPIES, Arrangement, Setup
from longctx.model.recurrent import SEGMENT, RecurrentSizes
from longctx.recurrent.pieces import Pieces
from longctx.sequence.layout import Layout

FP32_SIZE = 4

WRITTEN_TRAFFIC = 15 * FP32_SIZE
"""Bytes read and written for each of `RecurrentSizes.written`, forward: for differences of decays, their mask and
exponentials, and two products of keys or queries with keys, times these and summed."""

WRITTEN_KEPT = 6 * FP32_SIZE
"""Bytes on the device for each of `RecurrentSizes.written` at the peak of a segment's backward pass. Measured: 5.8
fp32 elements."""

MESSAGES_BY_HEADS = 3
"""In a pass: q, k, v and strengths together, decays in fp32, and the output."""


@dataclass(frozen=True, kw_only=True)
class RecurrentTime:
    """Modelled seconds of a recurrent layer in a micro-batch, forward and backward, besides the scan of its tokens."""

    by_heads: float | None
    """None if the ranks cannot share the heads."""
    by_states: float

    @property
    def prefers_heads(self) -> bool:
        """Whether ranks exchange tokens for heads."""
        return self.by_heads is not None and self.by_heads <= self.by_states

    @property
    def seconds(self) -> float:
        """Seconds of the way that is taken."""
        return self.by_heads if self.by_heads is not None and self.prefers_heads else self.by_states

    def describe(self) -> str:
        """Return a text such as `recurrent layers by states, at most 0.9 ms, or by heads, 0.41 ms`."""
        states = f"recurrent layers by states, at most {self.by_states * 1e3:.3g} ms"
        if self.by_heads is None:
            return f"{states}, since the ranks cannot share their heads"
        return f"{states}, or by heads, {self.by_heads * 1e3:.3g} ms, whichever is less for a batch"


def recurrent_time(
    setup: Setup, arrangement: Arrangement, num_tokens: int, pieces: Pieces | None = None
) -> RecurrentTime | None:
    """Return the modelled times for a sequence of `num_tokens` tokens; None without recurrent layers.

    Args:
        pieces: of any rank; None stands for one document that fills the sequence.
    """
    sizes, ranks = setup.recurrent, arrangement.ring * arrangement.ulysses
    if sizes is None:
        return None
    if ranks == 1:
        return RecurrentTime(by_heads=0.0, by_states=0.0)
    slots = (2 if arrangement.ring > 1 else 1) if pieces is None else pieces.slots
    given = num_tokens // ranks if pieces is None else pieces.most_given
    return RecurrentTime(
        by_heads=_by_heads(setup, sizes, ranks, num_tokens) if sizes.heads and sizes.heads % ranks == 0 else None,
        by_states=_by_states(setup, sizes, ranks, slots, given) if slots else 0.0,
    )


def prefers_heads(setup: Setup, arrangement: Arrangement, layout: Layout, pieces: Pieces) -> bool:
    """Return whether ranks had better exchange tokens for heads in a batch. It is the same on all of them."""
    time = recurrent_time(setup, arrangement, layout.num_tokens, pieces)
    return time is not None and time.prefers_heads


def _by_heads(setup: Setup, sizes: RecurrentSizes, ranks: int, num_tokens: int) -> float:
    num_bytes = sizes.exchanged * setup.element_size * num_tokens / ranks
    copied = EXCHANGE_COPIES * num_bytes / setup.machine.speeds.memory
    return 2 * (
        setup.exchange_seconds(num_bytes, ranks) + copied + MESSAGES_BY_HEADS * setup.machine.speeds.message_seconds
    )


def _by_states(setup: Setup, sizes: RecurrentSizes, ranks: int, slots: int, given: int) -> float:
    gathered = given_bytes(sizes, ranks, slots)
    send = setup.gather_seconds(gathered, ranks) + setup.gather_latency(ranks)
    maps = sizes.given_flops * given / setup.machine.speeds.attention
    written = 4 * written_seconds(sizes, given, setup.machine.speeds.memory)  # computed again before the backward pass
    applied = gathered / setup.machine.speeds.memory + ranks * slots * setup.machine.speeds.launch_seconds
    return 2 * (send + applied) + 3 * maps + written


def written_seconds(sizes: RecurrentSizes, num_tokens: float, memory_speed: float) -> float:
    """Return the seconds of a pass over these tokens, forward, for what operators write beside products."""
    return WRITTEN_TRAFFIC * sizes.written * num_tokens / memory_speed


def written_bytes(sizes: RecurrentSizes, num_tokens: float) -> float:
    """Return the bytes of a rank's device that this takes."""
    return WRITTEN_KEPT * sizes.written * min(num_tokens, SEGMENT)


def given_bytes(sizes: RecurrentSizes, ranks: int, slots: int) -> float:
    """Return the bytes that every rank gathers, where a rank gives the maps of up to `slots` pieces."""
    return float(FP32_SIZE * sizes.given * ranks * slots)

"""What ranks tell each other of cut documents: the tokens before a piece, and the state that it goes on from.

A layer is a recurrence whose state behind a piece depends on the one before it by an affine map. Every rank computes
the maps of its pieces from what they hold, all at once; the group gathers them, and a rank applies those of a document
one after the other. Passing the states themselves from rank to rank would be as exact, but a rank could only begin when
the one before it is done, P times for a document that fills the sequence and 2·P times in a ring's zigzag.

Shape legend: s tokens of this rank in n pieces, of which g give and r receive; C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from longctx.attention.kernels.entries import upload
from longctx.recurrent.pieces import Pieces
from longctx.sequence.gather import gather_beside

Compose = Callable[[Tensor, Tensor | None], Tensor]
"""(map of a piece, state before it or None for 0) -> state behind it."""


def convolve_pieces(
    channels: Tensor,
    pieces: Pieces,
    group: dist.ProcessGroup | None,
    convolve: Callable[[Tensor], Tensor],
    reach: int,
) -> Tensor:
    """Convolve [1, C, s] -> [1, C, s] so that every token sees those before it in its document, and no others.

    Before each piece lie `reach` more tokens: the last ones before it in its document, and zeros in front of these.
    This works with every implementation of the model's convolution, in one call.

    Args:
        convolve: a causal convolution [1, C, length] -> [1, C, length] that looks back by `reach` tokens.
    """
    piece = np.repeat(np.arange(len(pieces.lengths)), pieces.lengths)
    places = np.arange(len(piece)) + reach * (1 + piece)
    index = upload(places, channels.device)
    if pieces.slots:
        (channels,), before = halos(channels, pieces, group, reach)
    apart = channels.new_zeros(*channels.shape[:2], int(places[-1]) + 1).index_copy(2, index, channels)
    if pieces.slots and len(pieces.receives):
        starts = (pieces.starts + reach * np.arange(len(pieces.lengths)))[pieces.receives]
        apart = apart.index_copy(2, upload((starts[:, None] + np.arange(reach)).ravel(), apart.device), before)
    return convolve(apart).index_select(2, index)


def halos(
    channels: Tensor, pieces: Pieces, group: dist.ProcessGroup | None, reach: int
) -> tuple[Sequence[Tensor], Tensor]:
    """Return the channels to use from now on, and [1, C, r · reach]: the tokens before each receiving piece."""
    tokens, at = (upload(x, channels.device) for x in pieces.tails(reach))
    tails = channels.new_zeros(pieces.slots * reach, channels.shape[1])
    tails = tails.index_copy(0, at, channels[0].T.index_select(0, tokens))
    gathered, passed = gather_beside(tails, _of(group), [channels])
    source, places = (upload(x, channels.device) for x in pieces.halos(reach))
    before = channels.new_zeros(len(pieces.receives) * reach, channels.shape[1])
    before = before.index_copy(0, places, gathered.flatten(0, 1).index_select(0, source))
    return passed, before.T[None]


def incoming_states(
    maps: Tensor,
    pieces: Pieces,
    group: dist.ProcessGroup | None,
    compose: Compose,
    anchors: Sequence[Tensor],
) -> tuple[Tensor | None, Sequence[Tensor]]:
    """Return the state before each receiving piece [r, ...], None without any, and the anchors to use from now on.

    Args:
        maps: [g, ...] of the giving pieces, in fp32 or wider, in the form that `compose` applies.
        anchors: what the maps are made of, as in `gather_beside`.
    """
    rows = torch.cat([maps, maps.new_zeros(pieces.slots - len(maps), *maps.shape[1:])])
    gathered, passed = gather_beside(rows, _of(group), anchors)
    table = gathered.flatten(0, 1)
    before: dict[int, Tensor] = {}
    for chain in pieces.chains:
        state = None
        for row, receiver in chain:
            state = compose(table[row], state)
            if receiver >= 0:
                before[receiver] = state
    return (torch.stack([before[i] for i in range(len(before))]) if before else None), passed


def run_pieces(
    run: Callable[[Sequence[Tensor], np.ndarray, Tensor | None], Tensor],
    inputs: Sequence[Tensor],
    pieces: Pieces,
    before: Tensor | None,
) -> Tensor:
    """Run a recurrence over this rank's tokens: each input [1, s, ...] -> [1, s, ...].

    Pieces that go on from a state run together, and those that start anew run without states, which would be many.

    Args:
        run: (inputs of some pieces, their lengths, their states or None) -> output.
        before: [r, ...], the state before each receiving piece; None without any.
    """
    if before is None:
        return run(inputs, pieces.lengths, None)
    fresh = np.setdiff1d(np.arange(len(pieces.lengths)), pieces.receives)
    order = np.concatenate([pieces.tokens(pieces.receives), pieces.tokens(fresh)])
    outputs = []
    for which, states in ((pieces.receives, before), (fresh, None)):
        if len(which):
            outputs.append(run(select(inputs, pieces, which), pieces.lengths[which], states))
    return torch.cat(outputs, dim=1).index_select(1, upload(np.argsort(order), before.device))


def select(inputs: Sequence[Tensor], pieces: Pieces, which: np.ndarray) -> list[Tensor]:
    """Return the tokens of some pieces of each input [1, s, ...], one piece after the other."""
    index = upload(pieces.tokens(which), inputs[0].device)
    return [x.index_select(1, index) for x in inputs]


def by_piece(
    run: Callable[..., tuple[Tensor, Tensor | None]],
    inputs: Sequence[Tensor],
    lengths: np.ndarray,
    states: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Run a recurrence over one piece after the other, which is exact with any implementation.

    Args:
        run: (inputs [1, length, ...], the state before [1, ...] or None) -> output and the state behind it, or None.

    Returns:
        The outputs [1, s, ...], and the states behind the pieces [n, ...] if `run` returns them.
    """
    pieces = zip(*(x.split(lengths.tolist(), dim=1) for x in inputs), strict=True)
    befores = [None] * len(lengths) if states is None else states.split(1)
    outputs, behind = zip(*map(run, pieces, befores), strict=True)
    return torch.cat(outputs, dim=1), None if behind[0] is None else torch.cat(behind)


def _of(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    assert group is not None, "documents are cut between the ranks of a group"
    return group

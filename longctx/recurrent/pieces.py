"""The pieces of documents that each rank of a sequence group holds, and what a piece needs of those before it.

A rank holds neighbouring tokens of a document in one or several pieces: a slice of a contiguous cut, or the zigzag
pieces of a ring. A layer with a state starts anew in a piece that begins a document. In any other it goes on from the
state behind the piece before, which another rank may hold. For `documents 0 0 0 0 0 1` on two ranks, rank 1 receives a
state for the two last tokens of document 0, and starts anew for document 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from longctx.sequence.layout import Layout


@dataclass(frozen=True, eq=False, kw_only=True)
class Pieces:
    """This rank's pieces, in the order of its tokens, and how they follow those of the other ranks.

    A piece that another one continues gives what lies behind it to the group. The group collects this in a table of
    `world_size` × `slots` rows, of which each rank fills the first ones of its part.
    """

    lengths: np.ndarray
    """int64 [n]: tokens of each piece."""
    gives: np.ndarray
    """int64 [g]: this rank's pieces that are continued, on any rank, in the order of its rows."""
    receives: np.ndarray
    """int64 [r]: this rank's pieces that continue another one."""
    slots: int
    """Rows of a rank in the table: the largest g of all ranks; 0 if no document is cut."""
    most_given: int
    """Tokens of the giving pieces of the rank that has most of them."""
    chains: tuple[tuple[tuple[int, int], ...], ...]
    """For each document that this rank goes on with: (row, receiver) of its pieces from the first one on, where
    `receiver` is the index into `receives` of the piece that follows the row's, or -1 if another rank holds that."""
    _begin: np.ndarray
    """int64 [r]: position in the row of the first token of each receiving piece."""
    _table: _Table

    @classmethod
    def of(cls, layout: Layout, rank: int) -> Pieces:
        """Return the pieces of rank `rank` of the sequence group."""
        table = _Table.of(layout)
        own = np.flatnonzero(table.rank == rank)
        receives = np.flatnonzero(table.continues[own])
        receiver = np.full(len(table.begin), -1)
        receiver[own[receives]] = np.arange(len(receives))
        return cls(
            lengths=table.length[own],
            gives=np.flatnonzero(table.row[own] >= 0),
            receives=receives,
            slots=table.slots,
            most_given=int(np.bincount(table.rank, table.length * (table.row >= 0)).max()),
            chains=_chains(table, receiver),
            _begin=table.begin[own[receives]],
            _table=table,
        )

    @property
    def starts(self) -> np.ndarray:
        """int64 [n]: this rank's first token of each piece."""
        return np.cumsum(self.lengths) - self.lengths

    def tokens(self, pieces: np.ndarray) -> np.ndarray:
        """Return the indices of the tokens of these pieces, one piece after the other."""
        return np.concatenate([np.arange(0), *(np.arange(self.lengths[i]) + self.starts[i] for i in pieces)])

    def tails(self, reach: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the last tokens of the giving pieces and their places, at most `reach` of each.

        Returns:
            int64 [m] tokens of this rank, and int64 [m] places in its part of a table of `slots` × `reach` tokens.
        """
        lengths = np.minimum(self.lengths[self.gives], reach)
        ends = (self.starts + self.lengths)[self.gives]
        index = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths), lengths)  # -length, ..., -1 of each piece
        return np.repeat(ends, lengths) + index, np.repeat(np.arange(1, len(lengths) + 1) * reach, lengths) + index

    def halos(self, reach: int) -> tuple[np.ndarray, np.ndarray]:
        """Return where the tokens before each receiving piece are, at most `reach` of its own document.

        Returns:
            int64 [m] places in the group's table of tails, and int64 [m] their places among r × `reach` tokens.
        """
        table = self._table
        at = np.arange(len(self.receives) * reach)
        position = np.repeat(self._begin, reach) - reach + at % max(reach, 1)
        in_document = position >= np.repeat(table.document_start(self._begin), reach)
        at, position = at[in_document], position[in_document]
        piece = table.by_position[np.searchsorted(table.begin[table.by_position], position, side="right") - 1]
        before_end = table.begin[piece] + table.length[piece] - position
        return table.row[piece] * reach + reach - before_end, at


@dataclass(frozen=True, eq=False, kw_only=True)
class _Table:
    """All pieces of a sequence group, rank by rank; every array is int64 [m] or bool [m]."""

    begin: np.ndarray
    """Position of the first token in the whole row, before it was cut."""
    length: np.ndarray
    rank: np.ndarray
    continues: np.ndarray
    """Whether another piece of its document lies before it."""
    row: np.ndarray
    """Row of a piece that is continued, in the group's table; -1 for the others."""
    slots: int
    by_position: np.ndarray
    """Pieces in the order of the whole row."""
    cu_seqlens: np.ndarray

    @classmethod
    def of(cls, layout: Layout) -> _Table:
        position = np.arange(layout.num_tokens) if layout.plan is None else layout.plan.permutation
        is_new = np.zeros(layout.num_tokens, bool)
        is_new[:: layout.local_length] = True
        is_new[1:] |= position[1:] != position[:-1] + 1
        is_start = np.zeros(layout.num_tokens, bool)
        is_start[layout.cu_seqlens[:-1]] = True
        is_new |= is_start[position]
        place = np.flatnonzero(is_new)
        begin, rank = position[place], place // layout.local_length
        by_position = np.argsort(begin)
        continues = ~is_start[begin]
        gives = np.zeros(len(place), bool)
        gives[by_position[:-1]] = continues[by_position[1:]]
        count = np.bincount(rank[gives], minlength=layout.sp)
        slots = int(count.max())
        row = np.full(len(place), -1)
        row[gives] = np.arange(gives.sum()) + np.repeat(np.arange(layout.sp) * slots - np.cumsum(count) + count, count)
        return cls(
            begin=begin,
            length=np.diff(np.append(place, layout.num_tokens)),
            rank=rank,
            continues=continues,
            row=row,
            slots=slots,
            by_position=by_position,
            cu_seqlens=layout.cu_seqlens,
        )

    def document_start(self, position: np.ndarray) -> np.ndarray:
        return self.cu_seqlens[np.searchsorted(self.cu_seqlens, position, side="right") - 1]


def _chains(table: _Table, receiver: np.ndarray) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return `Pieces.chains`, given the index of this rank's receiving pieces, -1 for all others."""
    cut = table.by_position[(table.continues | (table.row >= 0))[table.by_position]]  # documents in several pieces
    bounds = np.append(np.flatnonzero(~table.continues[cut]), len(cut))
    found = []
    for first, end in pairwise(bounds.tolist()):
        rows, receivers = table.row[cut[first : end - 1]], receiver[cut[first + 1 : end]]
        chain = list(zip(rows.tolist(), receivers.tolist(), strict=True))
        while chain and chain[-1][1] < 0:
            chain.pop()
        found += [tuple(chain)] if chain else []
    return tuple(found)

"""The packing plan: which documents, or pieces of them, make up each pack. No tokens are touched here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .bfd import best_fit_decreasing

STRATEGIES = ("bfd", "bfd_split", "wrapped", "none")


class Piece(NamedTuple):
    """Tokens start..stop-1 of a document; stop is None where the whole document is taken."""

    document: int
    start: int
    stop: int | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """A plan: pack b holds the pieces offsets[b] .. offsets[b + 1] - 1, in this order.

    About 4 bytes a document plus 8 a pack. Documents without tokens are in no pack.

        lengths 4 3 2 1 2, capacity 6, "bfd"     ->  indices 0 2 | 1 4 3      offsets 0 2 5
        lengths 4 3,       capacity 6, "wrapped" ->  indices 0 1 | 1          offsets 0 2 3
                                                     starts  0 0 | 2          stops   4 2 3
    """

    indices: NDArray[np.unsignedinteger]
    """Document of each piece, [n_pieces], the smallest unsigned dtype that holds the number of documents."""

    offsets: NDArray[np.int64]
    """First piece of each pack, int64 [n_packs + 1]."""

    capacity: int
    """Most tokens in a pack."""

    starts: NDArray[np.int64] | None = None
    """First token of each piece in its document, int64 [n_pieces]; None where no document is cut."""

    stops: NDArray[np.int64] | None = None
    """End of each piece in its document, int64 [n_pieces]; None where no document is cut."""

    def __post_init__(self) -> None:
        assert (self.starts is None) == (self.stops is None), "starts and stops come together"
        assert self.offsets[-1] == len(self.indices), "offsets must end at the last piece"

    def __len__(self) -> int:
        """Number of packs."""
        return len(self.offsets) - 1

    @property
    def bins(self) -> Iterator[NDArray[np.unsignedinteger]]:
        """Iterates over the packs: the document indices of each."""
        for index in range(len(self)):
            yield self.documents(index)

    @property
    def nbytes(self) -> int:
        """Memory of the plan in bytes."""
        return sum(a.nbytes for a in (self.indices, self.offsets, self.starts, self.stops) if a is not None)

    def documents(self, index: int) -> NDArray[np.unsignedinteger]:
        """Document of each piece of pack `index`."""
        return self.indices[self.offsets[index] : self.offsets[index + 1]]

    def piece(self, index: int) -> Piece:
        """Piece `index`, counted over all packs."""
        if self.starts is None or self.stops is None:
            return Piece(int(self.indices[index]), 0, None)
        return Piece(int(self.indices[index]), int(self.starts[index]), int(self.stops[index]))

    def spans(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """(starts, stops) of the pieces of pack `index`, or None where no document of the plan is cut."""
        if self.starts is None or self.stops is None:
            return None
        pieces = slice(self.offsets[index], self.offsets[index + 1])
        return self.starts[pieces], self.stops[pieces]

    def piece_lengths(self, lengths: NDArray[np.integer]) -> NDArray[np.int64]:
        """Tokens of each piece, int64 [n_pieces], given the documents' lengths [n_documents]."""
        if self.starts is None or self.stops is None:
            return np.asarray(lengths, dtype=np.int64)[self.indices]
        return self.stops - self.starts

    def fills(self, lengths: NDArray[np.integer]) -> NDArray[np.int64]:
        """Tokens in each pack, int64 [n_packs], given the documents' lengths [n_documents]."""
        sums = np.concatenate(([0], np.cumsum(self.piece_lengths(lengths))))
        return np.diff(sums[self.offsets])

    def select(self, packs: ArrayLike) -> Packing:
        """The plan with only these packs, in this order: a shuffled, sorted or shortened epoch."""
        chosen = np.asarray(packs, dtype=np.int64)
        sizes = np.diff(self.offsets)[chosen]
        offsets = np.concatenate(([0], np.cumsum(sizes)))
        pieces = np.repeat(self.offsets[chosen] - offsets[:-1], sizes) + np.arange(offsets[-1])
        return Packing(
            indices=self.indices[pieces],
            offsets=offsets,
            capacity=self.capacity,
            starts=None if self.starts is None else self.starts[pieces],
            stops=None if self.stops is None else self.stops[pieces],
        )


def check_lengths(lengths: ArrayLike, capacity: int) -> NDArray[np.int64]:
    """Lengths as int64 [n]; ValueError unless they are non-negative integers and the capacity positive."""
    array = np.asarray(lengths)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"lengths must be a flat array of integers, one per document, got shape {array.shape} of {array.dtype}"
        )
    array = array.astype(np.int64, copy=False)
    if array.size and array.min() < 0:
        raise ValueError(f"lengths must not be negative, got {array.min()} for document {array.argmin()}")
    if isinstance(capacity, bool) or not isinstance(capacity, int | np.integer) or capacity < 1:
        raise ValueError(f"capacity must be a number of tokens of at least 1, got {capacity!r}")
    return array


def index_dtype(documents: int) -> np.dtype:
    """The smallest unsigned dtype that holds the indices of so many documents."""
    return np.min_scalar_type(max(documents - 1, 0))


def pack(lengths: ArrayLike, capacity: int, strategy: str = "bfd") -> Packing:
    """Distribute documents over packs of at most `capacity` tokens.

    Args:
        lengths: tokens of each document, integers [n]. Documents of 0 tokens are left out of the plan.
        capacity: most tokens in a pack.
        strategy: "bfd" (best fit decreasing; never cuts a document), "bfd_split" (the same after cutting
            longer documents into pieces of `capacity` tokens; nothing is lost), "wrapped" (all documents in
            order, cut every `capacity` tokens), "none" (one document a pack, in order).

    Returns:
        The plan, the same for the same arguments on every machine.

    Raises:
        ValueError: "bfd" or "none" with a document longer than `capacity`; malformed arguments.
    """
    array = check_lengths(lengths, capacity)
    capacity = int(capacity)
    if strategy not in STRATEGIES:
        raise ValueError(f"unknown packing strategy {strategy!r}, must be one of {', '.join(STRATEGIES)}")
    if strategy == "wrapped":
        return _pack_wrapped(array, capacity)
    if strategy == "bfd_split":
        return pack_pieces(array, capacity, *cut_into_pieces(array, capacity))
    too_long = int(np.count_nonzero(array > capacity))
    if too_long:
        raise ValueError(
            f"{too_long} of {len(array)} documents are longer than the capacity of {capacity} tokens, the "
            "longest "
            f"has {array.max()} (document {array.argmax()}). Raise the capacity, cut them with "
            "strategy='bfd_split', or use plan_packing(..., overlong='truncate'|'drop'|'split')."
        )
    if strategy == "none":
        return one_per_bin(array, capacity)
    placed, offsets = best_fit_decreasing(array, capacity)
    return Packing(indices=placed.astype(index_dtype(len(array))), offsets=offsets, capacity=capacity)


def one_per_bin(lengths: ArrayLike, capacity: int | None = None) -> Packing:
    """No packing: one document a pack, in order, documents of 0 tokens left out.

    Args:
        lengths: tokens of each document, integers [n].
        capacity: recorded in the plan; the longest document when None.
    """
    array = check_lengths(lengths, 1)
    present = np.flatnonzero(array)
    if capacity is None:
        capacity = max(int(array.max(initial=0)), 1)
    return Packing(
        indices=present.astype(index_dtype(len(array))),
        offsets=np.arange(len(present) + 1, dtype=np.int64),
        capacity=capacity,
    )


def cut_into_pieces(
    lengths: NDArray[np.int64], capacity: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Cut every document each `capacity` tokens: (documents, starts, stops), int64 [n_pieces], in order."""
    pieces = -(-lengths // capacity)
    documents = np.repeat(np.arange(len(lengths)), pieces)
    number = np.arange(len(documents)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = number * capacity
    return documents, starts, np.minimum(starts + capacity, lengths[documents])


def pack_pieces(
    lengths: NDArray[np.int64],
    capacity: int,
    documents: NDArray[np.int64],
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    *,
    join: bool = True,
) -> Packing:
    """Pack given pieces of documents, best fit decreasing, or one a pack where `join` is False.

    Args:
        lengths: tokens of each document, int64 [n].
        capacity: most tokens in a pack.
        documents, starts, stops: int64 [n_pieces], none of them empty.
        join: whether a pack may hold several pieces.
    """
    placed, offsets = np.arange(len(documents)), np.arange(len(documents) + 1)
    if join:
        placed, offsets = best_fit_decreasing(stops - starts, capacity)
    starts, stops, documents = starts[placed], stops[placed], documents[placed]
    cut = bool((stops - starts < lengths[documents]).any())
    return Packing(
        indices=documents.astype(index_dtype(len(lengths))),
        offsets=offsets,
        capacity=capacity,
        starts=starts if cut else None,
        stops=stops if cut else None,
    )


def _pack_wrapped(lengths: NDArray[np.int64], capacity: int) -> Packing:
    """Concatenate the documents and cut every `capacity` tokens, wherever that falls."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    borders = np.union1d(np.append(ends[lengths > 0], 0), np.append(np.arange(0, total, capacity), total))
    documents = np.searchsorted(ends, borders[:-1], side="right")
    first = (ends - lengths)[documents]
    starts, stops = borders[:-1] - first, borders[1:] - first
    packs = np.append(np.arange(0, total, capacity), total) if total else np.zeros(1, dtype=np.int64)
    cut = bool((stops - starts < lengths[documents]).any())
    return Packing(
        indices=documents.astype(index_dtype(len(lengths))),
        offsets=np.searchsorted(borders, packs).astype(np.int64),
        capacity=capacity,
        starts=starts if cut else None,
        stops=stops if cut else None,
    )

"""The packing plan: which documents, or pieces of them, make up each pack. No tokens are touched here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .bfd import best_fit_decreasing

STRATEGIES = ("bfd", "bfd_split", "wrapped", "none")


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

    def piece_lengths(self, lengths: NDArray[np.integer]) -> NDArray[np.int64]:
        """Tokens of each piece, int64 [n_pieces], given the documents' lengths [n_documents]."""
        if self.starts is None or self.stops is None:
            return np.asarray(lengths, dtype=np.int64)[self.indices]
        return self.stops - self.starts

    def fills(self, lengths: NDArray[np.integer]) -> NDArray[np.int64]:
        """Tokens in each pack, int64 [n_packs], given the documents' lengths [n_documents]."""
        sums = np.concatenate(([0], np.cumsum(self.piece_lengths(lengths))))
        return np.diff(sums[self.offsets])


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
    if strategy in ("bfd", "none") and (too_long := int(np.count_nonzero(array > capacity))):
        raise ValueError(
            f"{too_long} of {len(array)} documents are longer than the capacity of {capacity} tokens, the longest "
            f"has {array.max()} (document {array.argmax()}). Raise the capacity, cut them with "
            "strategy='bfd_split', or use plan_packing(..., overlong='truncate'|'drop'|'split')."
        )
    return pack_kept(array, array, capacity, strategy)


def one_per_bin(lengths: ArrayLike, capacity: int | None = None) -> Packing:
    """No packing: one document a pack, in order, documents of 0 tokens left out.

    Args:
        lengths: tokens of each document, integers [n].
        capacity: recorded in the plan; the longest document when None.
    """
    array = check_lengths(lengths, 1)
    return pack(array, max(int(array.max(initial=0)), 1) if capacity is None else capacity, "none")


def pack_kept(lengths: NDArray[np.int64], kept: NDArray[np.int64], capacity: int, strategy: str) -> Packing:
    """Pack the first tokens of documents; those that are longer than a pack are cut, whatever the strategy.

    Args:
        lengths: tokens of each document, int64 [n].
        kept: those that are packed, int64 [n]: 0 for a document that is left out.
        capacity: most tokens in a pack.
        strategy: as in `pack`.
    """
    if strategy == "wrapped":
        documents, starts, stops, offsets = _cut_in_order(kept, capacity)
    else:
        documents, starts, stops = _cut_into_pieces(kept, capacity)
        offsets = np.arange(len(documents) + 1)
    if strategy in ("bfd", "bfd_split"):
        placed, offsets = best_fit_decreasing(stops - starts, capacity)
        documents, starts, stops = documents[placed], starts[placed], stops[placed]
    is_cut = bool((stops - starts < lengths[documents]).any())
    return Packing(
        indices=documents.astype(np.min_scalar_type(max(len(lengths) - 1, 0))),
        offsets=offsets,
        capacity=capacity,
        starts=starts if is_cut else None,
        stops=stops if is_cut else None,
    )


def _cut_into_pieces(
    lengths: NDArray[np.int64], capacity: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Cut every document each `capacity` tokens: (documents, starts, stops), int64 [n_pieces], in order."""
    pieces = -(-lengths // capacity)
    documents = np.repeat(np.arange(len(lengths)), pieces)
    number = np.arange(len(documents)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = number * capacity
    return documents, starts, np.minimum(starts + capacity, lengths[documents])


def _cut_in_order(
    lengths: NDArray[np.int64], capacity: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Concatenate the documents and cut every `capacity` tokens: (documents, starts, stops, offsets of packs)."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    packs = np.append(np.arange(0, total, capacity), total) if total else np.zeros(1, dtype=np.int64)
    borders = np.union1d(np.append(ends[lengths > 0], 0), packs)
    documents = np.searchsorted(ends, borders[:-1], side="right")
    first = (ends - lengths)[documents]
    offsets = np.searchsorted(borders, packs).astype(np.int64)
    return documents, borders[:-1] - first, borders[1:] - first, offsets

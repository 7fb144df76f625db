"""The choices for documents longer than a pack, with an exact count of every token that is not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .plan import STRATEGIES, Packing, check_lengths, pack_kept

OVERLONG = ("raise", "truncate", "drop", "split", "turns")


@dataclass(frozen=True, kw_only=True)
class PackingReport:
    """Where every document and token of the data set went: tokens == tokens_kept + tokens_cut +
    tokens_dropped.
    """

    strategy: str
    overlong: str
    capacity: int
    """Most tokens in a pack."""
    documents: int
    """Documents in the data set, empty and too long ones included."""
    tokens: int
    """Tokens in the data set."""
    empty_documents: int
    """Documents of 0 tokens; they are in no pack."""
    too_long_documents: int
    """Documents longer than the capacity."""
    longest_document: int
    """Tokens in the longest document."""
    tokens_cut: int
    """Tokens lost at the end of truncated documents."""
    documents_dropped: int
    """Documents that were too long and left out whole."""
    tokens_dropped: int
    """Tokens in them."""
    pieces: int
    """Pieces in the packs: documents, or parts of them."""
    packs: int
    tokens_kept: int
    """Tokens in the packs, or waiting for one."""
    tokens_waiting: int = 0
    """Tokens that a stream has read ahead and that are in no pack yet."""
    unit: str = "documents"
    """What the documents are: documents, or pairs of answers."""

    @property
    def fill(self) -> float:
        """Share of the packs' room that holds tokens."""
        in_packs = self.tokens_kept - self.tokens_waiting
        return in_packs / (self.packs * self.capacity) if self.packs else 0.0

    def to_dict(self) -> dict[str, int | float | str]:
        """Plain values for trainer_state.json."""
        values = asdict(self) | {"fill": self.fill}
        if self.unit == "documents":
            del values["unit"]
        return values

    def short(self) -> str:
        """Return the counts that matter most: documents, tokens, packs, and what became of overlong documents."""
        text = (
            f"{self.documents:,} {self.unit} with {self.tokens:,} tokens in {self.packs:,} sequences, {self.fill:.1%} "
            "full"
        )
        if self.tokens_cut:
            text += f"; {self.tokens_cut:,} tokens cut off"
        if self.documents_dropped:
            text += f"; {self.documents_dropped:,} {self.unit} dropped"
        elif self.too_long_documents and not self.tokens_cut:
            text += f"; {self.too_long_documents:,} split"
        return text

    def __str__(self) -> str:
        parts = [
            f"{self.documents:,} {self.unit} with {self.tokens:,} tokens in {self.packs:,} packs of up to "
            f"{self.capacity:,} tokens ({self.strategy}, {self.fill:.2%} full)"
        ]
        if self.tokens_waiting:
            parts.append(f"{self.tokens_waiting:,} tokens read ahead")
        if self.too_long_documents:
            parts.append(
                f"{self.too_long_documents:,} longer than a pack (the longest {self.longest_document:,} tokens)"
            )
        if self.tokens_cut:
            parts.append(f"{self.tokens_cut:,} tokens cut off ({self.tokens_cut / self.tokens:.2%})")
        if self.documents_dropped:
            share = self.tokens_dropped / self.tokens
            parts.append(
                f"{self.documents_dropped:,} {self.unit} dropped with {self.tokens_dropped:,} tokens ({share:.2%})"
            )
        if self.pieces > self.documents - self.empty_documents - self.documents_dropped:
            parts.append(f"{self.pieces:,} pieces after cutting, no token lost by it")
        if self.empty_documents:
            parts.append(f"{self.empty_documents:,} empty {self.unit} left out")
        return "; ".join(parts)


def plan_packing(
    lengths: ArrayLike,
    capacity: int,
    *,
    strategy: str = "bfd",
    overlong: str = "raise",
    turn_ends: Sequence[ArrayLike] | None = None,
) -> tuple[Packing, PackingReport]:
    """Pack documents of any length, and report what happened to every token.

    Args:
        lengths: tokens of each document, integers [n].
        capacity: most tokens in a pack (`--max_length`).
        strategy: as in `pack`.
        overlong: for documents longer than `capacity`: "raise", "truncate" (keep the first `capacity`
            tokens), "drop" (leave them out), "split" (cut every `capacity` tokens, nothing lost) or "turns"
            (`whole_turns`). It comes before the strategy. The strategies "bfd_split" and "wrapped" cut documents
            themselves, so "raise" never raises with them.
        turn_ends: tokens before the end of each turn of each document, int [turns] each; for "turns".

    Raises:
        ValueError: overlong="raise" and a document is too long; the message says what each choice would cost.
    """
    array = check_lengths(lengths, capacity)
    if strategy not in STRATEGIES:
        raise ValueError(f"unknown packing strategy {strategy!r}, must be one of {', '.join(STRATEGIES)}")
    if overlong not in OVERLONG:
        raise ValueError(f"unknown overlong={overlong!r}, must be one of {', '.join(OVERLONG)}")
    too_long = array > capacity
    if overlong == "raise" and strategy in ("bfd", "none") and too_long.any():
        raise ValueError(too_long_message(array, capacity))
    kept = array
    if overlong == "truncate":
        kept = np.minimum(array, capacity)
    elif overlong == "drop":
        kept = np.where(too_long, 0, array)
    elif overlong == "turns":
        if turn_ends is None:
            raise ValueError("overlong='turns' needs the turn_ends of the documents; choose another value for text")
        kept = array.copy()
        for document in np.flatnonzero(too_long):
            kept[document] = whole_turns(turn_ends[int(document)], capacity)
    packing = pack_kept(array, kept, int(capacity), strategy)
    return packing, report_of(packing, array, kept, strategy=strategy, overlong=overlong)


def report_of(packing: Packing, lengths: NDArray[np.int64], kept: NDArray[np.int64], **how: Any) -> PackingReport:
    """Return the report on a packing.

    Args:
        lengths: tokens of each document.
        kept: tokens of each document that were packed.
        how: the report's strategy, overlong and unit.
    """
    too_long = lengths > packing.capacity
    dropped = too_long & (kept == 0)
    report = PackingReport(
        **how,
        capacity=packing.capacity,
        documents=len(lengths),
        tokens=int(lengths.sum()),
        empty_documents=int(np.count_nonzero(lengths == 0)),
        too_long_documents=int(too_long.sum()),
        longest_document=int(lengths.max(initial=0)),
        tokens_cut=int((lengths - kept)[~dropped].sum()),
        documents_dropped=int(dropped.sum()),
        tokens_dropped=int(lengths[dropped].sum()),
        pieces=len(packing.indices),
        packs=len(packing),
        tokens_kept=int(packing.piece_lengths(kept).sum()),
    )
    assert report.tokens == report.tokens_kept + report.tokens_cut + report.tokens_dropped, "tokens unaccounted for"
    return report


def whole_turns(turn_ends: ArrayLike, capacity: int) -> int:
    """Return the tokens of as many whole turns from the beginning as fit: 0 if the first turn alone is too long.

    Args:
        turn_ends: tokens before the end of each turn, int [turns], rising.
    """
    ends = np.asarray(turn_ends)
    return int(ends[ends <= capacity].max(initial=0))


def too_long_message(lengths: NDArray[np.int64], capacity: int) -> str:
    """Return which document is too long, by how much, and what each choice of --overlong would do to it."""
    too_long = lengths[lengths > capacity]
    tokens = int(too_long.sum())
    share = f"of the {int(lengths.sum()):,} tokens"
    return (
        f"{len(too_long):,} of {len(lengths):,} documents are longer than max_length = {capacity:,} tokens; "
        "the "
        f"longest is document {int(lengths.argmax())} with {int(lengths.max()):,}. Raise --max_length to "
        f"{int(lengths.max())}, or choose what happens to them: --overlong truncate cuts "
        f"{tokens - len(too_long) * capacity:,} {share}, drop leaves out {tokens:,} of them, split makes "
        f"{int((-(-too_long // capacity)).sum()):,} pieces and loses none, and turns keeps the whole turns of "
        "conversations that fit."
    )

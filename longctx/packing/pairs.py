"""Pairs of answers in packs: a pair is placed as a whole, and its two sides are documents of the pack.

pairs of sides (4 3) (2 2) (3 1), capacity 8, "bfd"  ->  packs  4 3 | 2 2 3 1
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longctx.data.sides import Sides

from .dataset import PackedDataset
from .overlong import OVERLONG, PackingReport, plan_packing
from .plan import Packing


class PairedDataset(PackedDataset):
    """A map-style data set of packs of pairs, cut on access as in `PackedDataset`.

    A row's `seq_lengths` are those of the sides, the chosen one of each pair before the rejected one.
    """

    reference: NDArray[np.float64] | None = None
    """float64 [pairs of the source, 2]: log-probabilities of the answers, chosen and rejected, under the reference
    model. A row then has those of its pairs as `reference`, [pairs, 2]."""

    def __init__(self, source: Any, packing: Packing, sides: Sides, kept: NDArray[np.int64]) -> None:
        """
        Args:
            source: pairs, as `longctx.data.preferences` makes them.
            packing: plan over these pairs.
            sides: of the pairs.
            kept: int64 [pairs, 2], the tokens at the front of each side that a row has, from `kept_of_sides`.
        """
        self.sides, self.kept = sides, kept
        super().__init__(source, packing)

    def _lengths(self) -> NDArray[np.int64]:
        super()._lengths()
        return self.kept.sum(1)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"sides": self.sides, "kept": self.kept, "reference": self.reference}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.sides, self.kept, self.reference = state["sides"], state["kept"], state["reference"]
        super().__setstate__(state)

    def __getitem__(self, index: int) -> dict[str, NDArray[Any]]:
        row = super().__getitem__(index)
        if self.reference is not None:
            row["reference"] = self.reference[self.packing.documents(self._checked(index))]
        return row

    def _pieces(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64] | None, NDArray[np.int64]]:
        pairs = self.packing.documents(index).astype(np.int64)
        rows = pairs if self._rows is None else self._rows[pairs].astype(np.int64)
        starts = np.zeros((len(pairs), 2), dtype=np.int64)
        starts[:, 1] = self.sides.chosen[pairs]
        return np.repeat(rows, 2), starts.ravel(), self.kept[pairs].ravel()


def kept_of_sides(sides: Sides, capacity: int, overlong: str) -> NDArray[np.int64]:
    """Return the tokens of each side that are trained on, int64 [pairs, 2]: 0 and 0 for a pair that is left out.

    Of a pair longer than the capacity, `truncate` keeps the first half of the capacity of each side. A pair whose
    prompt fills that half is left out, as TRL leaves it out, since no answer would remain.
    """
    kept = np.stack([sides.chosen, sides.rejected], axis=1)
    too_long = kept.sum(1) > capacity
    if overlong == "drop":
        kept[too_long] = 0
    elif overlong == "truncate":
        half = capacity // 2
        kept[too_long] = np.minimum(kept[too_long], half)
        kept[too_long & (sides.prompt >= half)] = 0
    return kept


def plan_pairs(
    sides: Sides, capacity: int, *, strategy: str = "bfd", overlong: str = "raise"
) -> tuple[Packing, PackingReport]:
    """Pack pairs, and report what happened to every token. The documents of the report are pairs.

    Args:
        sides: of the pairs.
        capacity: most tokens in a pack (`--max_length`).
        strategy: `bfd`, or `none` for one pair in a pack.
        overlong: for pairs longer than `capacity`: "raise", "truncate" or "drop", as in `kept_of_sides`.

    Raises:
        ValueError: overlong="raise" and a pair is too long; for "split", which would separate the sides.
    """
    if overlong not in OVERLONG or overlong == "split":
        raise ValueError(
            f"overlong={overlong!r} for pairs of answers: a piece of an answer cannot be compared with the other "
            "answer. Use raise, truncate or drop."
        )
    lengths = sides.chosen + sides.rejected
    too_long = lengths > capacity
    if overlong == "raise" and too_long.any():
        raise ValueError(_too_long_message(sides, capacity))
    kept = kept_of_sides(sides, capacity, overlong).sum(1)
    packing, report = plan_packing(kept, capacity, strategy=strategy)
    dropped = kept == 0
    return packing, replace(
        report,
        overlong=overlong,
        unit="pairs",
        tokens=int(lengths.sum()),
        empty_documents=0,
        too_long_documents=int(too_long.sum()),
        longest_document=int(lengths.max(initial=0)),
        tokens_cut=int((lengths - kept)[~dropped].sum()),
        documents_dropped=int(dropped.sum()),
        tokens_dropped=int(lengths[dropped].sum()),
    )


def _too_long_message(sides: Sides, capacity: int) -> str:
    lengths = sides.chosen + sides.rejected
    too_long = lengths > capacity
    cut = kept_of_sides(sides, capacity, "truncate").sum(1)
    left_out = int((cut[too_long] == 0).sum())
    share = f"of the {int(lengths.sum()):,} tokens"
    return (
        f"{int(too_long.sum()):,} of {len(lengths):,} pairs are longer than max_length = {capacity:,} tokens, in which "
        f"both sides have to fit, each with the prompt; the longest is pair {int(lengths.argmax())} with "
        f"{int(lengths.max()):,}. Raise --max_length to {int(lengths.max())}, or choose what happens to them:\n"
        f"  --overlong truncate  cuts {int((lengths - cut)[cut > 0].sum()):,} {share}, each side at {capacity // 2:,}"
        + (f", and leaves out {left_out:,} pairs with longer prompts\n" if left_out else "\n")
        + f"  --overlong drop      drops {int(too_long.sum()):,} pairs with {int(lengths[too_long].sum()):,} {share}"
    )

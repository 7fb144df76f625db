"""Pairs of answers in packs: a pair is placed as a whole, and its two sides are documents of the pack.

pairs of sides (4 3) (2 2) (3 1), capacity 8, "bfd"  ->  packs  4 3 | 2 2 3 1

Where the sides share their prompt, a pair is one document with two branches (`longctx.sequence.layout`): its prompt
without the last token, then the rest of each side.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from longctx.data.sides import Sides

from .dataset import PackedDataset
from .overlong import OVERLONG, PackingReport, plan_packing, report_of
from .plan import Packing


class PairedDataset(PackedDataset):
    """A map-style data set of packs of pairs, cut on access as in `PackedDataset`.

    The chosen side of each pair comes before the rejected one. A row's `seq_lengths` are those of the sides. Sides that
    share tokens are one document, whose branches begin at the row's `branch_starts`.
    """

    reference: NDArray[np.float64] | None = None
    """float64 [pairs of the source, 2]: log-probabilities of the answers, chosen and rejected, under the reference
    model. A row then has those of its pairs as `reference`, [pairs, 2]."""

    def __init__(self, source: Any, packing: Packing, sides: Sides, kept: NDArray[np.int64], *, share: bool = False):
        """
        Args:
            source: pairs, as `longctx.data.preferences` makes them.
            packing: plan over these pairs.
            sides: of the pairs.
            kept: int64 [pairs, 2], the tokens at the front of each side that a row has, from `kept_of_sides`.
            share: whether the sides of a pair share their prompt.
        """
        self.sides, self.kept, self.shared = sides, kept, shared_tokens(sides, share=share)
        super().__init__(source, packing)

    def _lengths(self) -> NDArray[np.int64]:
        super()._lengths()
        return lengths_of_pairs(self.kept, self.shared)

    def __getitem__(self, index: int) -> dict[str, NDArray[Any]]:
        row = super().__getitem__(index)
        pairs = self.packing.documents(self._checked(index)).astype(np.int64)
        if self.reference is not None:
            row["reference"] = self.reference[pairs]
        shared = self.shared[pairs]
        if shared.any():
            lengths = row["seq_lengths"]
            begin, second = (np.cumsum(lengths) - lengths).reshape(-1, 2).T
            starts = np.stack((begin + shared, second), axis=1)[shared > 0].ravel()
            cu_seqlens = np.sort(np.concatenate((begin, second[shared == 0], [lengths.sum()])))
            row |= {"seq_lengths": np.diff(cu_seqlens), "branch_starts": starts}
            first = np.stack((begin, second - shared), axis=1).ravel()
            row["position_ids"] = np.arange(lengths.sum()) - np.repeat(first, lengths)
        return row

    def _pieces(self, pieces: slice) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        pairs = self.packing.indices[pieces].astype(np.int64)
        rows = pairs if self._rows is None else self._rows[pairs].astype(np.int64)
        starts, lengths = np.zeros((len(pairs), 2), dtype=np.int64), self.kept[pairs]
        starts[:, 1] = self.sides.chosen[pairs] + self.shared[pairs]
        lengths[:, 1] -= self.shared[pairs]
        return np.repeat(rows, 2), starts.ravel(), lengths.ravel()


def shared_tokens(sides: Sides, *, share: bool) -> NDArray[np.int64]:
    """Return the tokens that a row has once for both sides of each pair, int64 [pairs].

    They are the prompt without its last token, which has a next token in each answer.
    """
    return (sides.prompt - 1) * share


def lengths_of_pairs(kept: NDArray[np.int64], shared: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the tokens of each pair in a row, int64 [pairs]: 0 for a pair that is left out.

    Args:
        kept: int64 [pairs, 2], from `kept_of_sides`.
        shared: int64 [pairs], from `shared_tokens`.
    """
    return np.where(kept[:, 0] > 0, kept.sum(1) - shared, 0)


def kept_of_sides(sides: Sides, capacity: int, overlong: str, *, share: bool = False) -> NDArray[np.int64]:
    """Return the tokens of each side that are trained on, int64 [pairs, 2]: 0 and 0 for a pair that is left out.

    Of a pair longer than the capacity, `truncate` keeps the first tokens of each side, as many of both as there is room
    for: half of the capacity where they do not share the prompt. A pair whose prompt fills that is left out, as TRL
    leaves it out, since no answer would remain.
    """
    kept, shared = np.stack([sides.chosen, sides.rejected], axis=1), shared_tokens(sides, share=share)
    too_long = lengths_of_pairs(kept, shared) > capacity
    if overlong == "drop":
        kept[too_long] = 0
    elif overlong == "truncate":
        room = (capacity + shared) // 2
        kept[too_long] = np.minimum(kept, room[:, None])[too_long]
        kept[too_long & (sides.prompt >= room)] = 0
    return kept


def plan_pairs(
    sides: Sides, capacity: int, *, strategy: str = "bfd", overlong: str = "raise", share: bool = False
) -> tuple[Packing, PackingReport]:
    """Pack pairs, and report what happened to every token. The documents of the report are pairs.

    Args:
        sides: of the pairs.
        capacity: most tokens in a pack (`--max_length`).
        strategy: `bfd`, or `none` for one pair in a pack.
        overlong: for pairs longer than `capacity`: "raise", "truncate" or "drop", as in `kept_of_sides`.
        share: whether the sides of a pair share their prompt.

    Raises:
        ValueError: overlong="raise" and a pair is too long; for "split", which would separate the sides.
    """
    if overlong not in OVERLONG or overlong in ("split", "turns"):
        raise ValueError(
            f"overlong={overlong!r} for pairs of answers: a piece of an answer cannot be compared with the other "
            "answer. Use raise, truncate or drop."
        )
    shared = shared_tokens(sides, share=share)
    lengths = sides.chosen + sides.rejected - shared
    if overlong == "raise" and (lengths > capacity).any():
        cut = lengths_of_pairs(kept_of_sides(sides, capacity, "truncate", share=share), shared)
        raise ValueError(_too_long_message(lengths, cut, capacity, share=share))
    kept = lengths_of_pairs(kept_of_sides(sides, capacity, overlong, share=share), shared)
    packing, _ = plan_packing(kept, capacity, strategy=strategy)
    return packing, report_of(packing, lengths, kept, strategy=strategy, overlong=overlong, unit="pairs")


def _too_long_message(lengths: NDArray[np.int64], cut: NDArray[np.int64], capacity: int, *, share: bool) -> str:
    """
    Args:
        lengths, cut: tokens of each pair, and those that "truncate" would keep, int64 [pairs].
    """
    too_long = lengths > capacity
    left_out = int((cut[too_long] == 0).sum())
    of = f"of the {int(lengths.sum()):,} tokens"
    prompt = "after the prompt that they share" if share else "each with the prompt"
    return (
        f"{int(too_long.sum()):,} of {len(lengths):,} pairs are longer than max_length = {capacity:,} tokens, in which "
        f"both sides have to fit, {prompt}; the longest is pair {int(lengths.argmax())} with "
        f"{int(lengths.max()):,}. Raise --max_length to {int(lengths.max())}, or choose what happens to them: "
        f"--overlong truncate cuts {int((lengths - cut)[cut > 0].sum()):,} {of}, from both sides alike"
        + (f", and leaves out {left_out:,} pairs with longer prompts" if left_out else "")
        + f"; drop leaves out {int(lengths[too_long].sum()):,} of them."
    )

"""The two sides of pairs of answers, which lie in one document; `longctx.data.preferences` makes such documents."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longctx.data.columns import IGNORE_INDEX, arrow_table, token_columns


class Sides(NamedTuple):
    """The tokens of pairs, int64 [pairs] each."""

    prompt: NDArray[np.int64]
    """Of the prompt, which is in both sides."""
    chosen: NDArray[np.int64]
    """Of the prompt and the chosen answer."""
    rejected: NDArray[np.int64]
    """Of the prompt and the rejected answer."""


def sides_of_pairs(source: Any) -> Sides:
    """Return the lengths of the sides of pairs of answers.

    Args:
        source: the pairs, a datasets.Dataset or pyarrow.Table.
    """
    table, rows = arrow_table(source)
    labels = token_columns(table, ["labels"])["labels"].rows()
    cut = np.array([_side_lengths(pair) for pair in labels], dtype=np.int64).reshape(-1, 3)
    return Sides(*(cut if rows is None else cut[rows]).T)


def _side_lengths(labels: NDArray[np.integer]) -> tuple[int, int, int]:
    """Return the tokens of the prompt, of the chosen side and of the rejected side."""
    begins = np.flatnonzero(np.diff(labels == IGNORE_INDEX, prepend=False))  # prompt, answer, prompt, answer
    assert len(begins) == 4, f"a pair has two masked prompts, and these labels change at {begins}"
    _, answer, second, _ = begins.tolist()
    return answer, second, len(labels) - second

"""The documents of a packed sequence, where only their lengths matter: assumed, one, or drawn from a histogram."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from longctx.attention.choice import assumed_documents
from longctx.untrusted.files import check_file

RowLengths = Callable[[int], Sequence[int]]
"""Length of a packed sequence -> lengths of the documents in it."""


def assumed(length: int, *, packed: bool) -> list[int]:
    """Return lengths of documents that are assumed where the data is not known, `length` in all."""
    drawn = assumed_documents(length, packed=packed).rows[0]
    repeated = np.tile(drawn, -(-length // int(drawn.sum())))  # a very long sequence repeats the assumed documents
    lengths = np.diff(np.minimum(np.cumsum(repeated), length), prepend=0)
    return lengths[lengths > 0].tolist()


def one_document(length: int) -> list[int]:
    """Return the length of one document that fills the sequence."""
    return [length]


def one_pair(length: int) -> list[int]:
    """Return the lengths of a pair of answers, each with its own copy of the prompt, that fills the sequence."""
    return [length - length // 2, length // 2]


def drawn_from(path: Path) -> RowLengths:
    """Return a function that draws documents from a histogram, the same each time.

    The last document is cut at the end of the sequence.

    Args:
        path: a CSV file with the columns low, high, documents: the number of documents with low to high tokens. Lines
            that begin with # are skipped.

    Raises:
        ValueError: if the file is not such a CSV file.
    """
    try:
        lines = [line for line in check_file(path).read_text().splitlines() if not line.startswith("#")]
        bins = [(int(row["low"]), int(row["high"]), float(row["documents"])) for row in csv.DictReader(lines)]
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(
            f"--document_lengths {path} is not a CSV file with columns low,high,documents of whole numbers: {error!r}."
        ) from None
    if not bins or min(low for low, _, _ in bins) < 1 or sum(number for *_, number in bins) <= 0:
        raise ValueError(f"--document_lengths {path} has no document of at least 1 token.")

    lows, highs, numbers = (np.array(column) for column in zip(*bins, strict=True))

    def draw(length: int) -> list[int]:
        random = np.random.default_rng(0)
        drawn = np.zeros(0, np.int64)
        while drawn.sum() < length:
            which = random.choice(len(bins), size=1024, p=numbers / numbers.sum())
            drawn = np.append(drawn, random.integers(lows[which], highs[which] + 1))
        ends = np.minimum(np.cumsum(drawn), length)
        documents = np.diff(ends, prepend=0)
        return documents[documents > 0].tolist()

    return draw

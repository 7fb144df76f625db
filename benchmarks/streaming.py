"""Packing a stream with bounded look-ahead: how full rows are, how late documents come, and what one costs.

    python -m benchmarks.streaming

Documents longer than L are split. "density" is tokens over the room of every row but the last `look_ahead`, whose
gaps nothing is left to close; "with the end" is over all rows. "late" is how many places later than in the source a
document (the last piece of a split one) comes out at most. Plan is the look-ahead alone, from lengths; row is all of
`PackedStream`, from NumPy documents to the rows of one rank out of one. "best fit decreasing" knows every length.
Times are CPU seconds of one thread, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Iterator
from importlib.metadata import version

import numpy as np
from numpy.typing import NDArray

from benchmarks.packing import DISTRIBUTIONS, PACKAGES, Lengths, device, line, timed
from longctx.packing import PackedStream, plan_packing
from longctx.packing.lookahead import LookAhead

HEADER = [
    "lengths",
    "L",
    "rows",
    "density",
    "with the end",
    "best fit decreasing",
    "late",
    "plan µs/doc (min–max)",
    "row µs/doc",
    "Mtokens/s",
]


class Documents:
    """A source of documents of these lengths: slices of one array, so that making them costs little."""

    def __init__(self, lengths: Lengths) -> None:
        self.lengths = lengths.tolist()
        self.ids = np.zeros(int(lengths.max()), dtype=np.int32)

    def __iter__(self) -> Iterator[dict[str, NDArray[np.int32]]]:
        for length in self.lengths:
            yield {"input_ids": self.ids[:length]}


def plan(lengths: list[int], capacity: int, look_ahead: int) -> list[list[int]]:
    """The documents of each row, rows of one full piece of a split document among them."""
    queue: LookAhead[int] = LookAhead(capacity, look_ahead)
    rows = []
    for number, length in enumerate(lengths):
        full, rest = divmod(length, capacity)
        rows += [[number]] * full
        if rest:
            queue.add(rest, number)
            while queue.full:
                rows.append(queue.take())
    while len(queue):
        rows.append(queue.take())
    return rows


def latest(rows: list[list[int]]) -> int:
    """The most places that a document's last piece comes after its place in the source."""
    order = np.concatenate([np.array(row) for row in rows])[::-1]
    _, from_end = np.unique(order, return_index=True)  # documents in order: where each is seen last
    place = np.argsort(np.argsort(-from_end))
    return int((place - np.arange(len(place))).max())


def measure(name: str, documents: int, capacity: int, look_ahead: int, repeats: int) -> list[str]:
    rng = np.random.default_rng([documents, capacity])
    lengths = DISTRIBUTIONS[name](rng, documents, capacity)
    as_list = lengths.tolist()
    rows, seconds = timed(lambda: plan(as_list, capacity, look_ahead), repeats)
    start = time.process_time()
    stream = PackedStream(Documents(lengths), capacity, overlong="split", look_ahead=look_ahead)
    tokens = np.array([len(row["input_ids"]) for row in stream])
    row_seconds = time.process_time() - start
    assert len(tokens) == len(rows), "the stream and its plan have the same rows"
    assert tokens.sum() == lengths.sum(), "no token is lost"
    _, report = plan_packing(lengths, capacity, overlong="split")
    microseconds = np.array(seconds) / documents * 1e6
    return [
        name,
        f"{capacity:,}",
        f"{len(rows):,}",
        f"{tokens[:-look_ahead].mean() / capacity:.4%}",
        f"{tokens.mean() / capacity:.4%}",
        f"{report.fill:.4%}",
        f"{latest(rows):,}",
        f"{np.median(microseconds):.2f} ({microseconds.min():.2f}–{microseconds.max():.2f})",
        f"{row_seconds / documents * 1e6:.2f}",
        f"{lengths.sum() / row_seconds / 1e6:,.0f}",
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--lengths", nargs="+", choices=DISTRIBUTIONS, default=list(DISTRIBUTIONS))
    parser.add_argument("--capacity", type=int, nargs="+", default=[4096, 32768, 131072])
    parser.add_argument("--look_ahead", type=int, default=16, help="packs of tokens that wait")
    parser.add_argument("--repeats", type=int, default=3, help="plans timed for each case")
    options = parser.parse_args(arguments)

    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    print(f"{device()}; Python {platform.python_version()}, {versions}; {options.documents:,} documents\n")
    print(line(HEADER), line(["---"] * len(HEADER)), sep="\n", flush=True)
    for name in options.lengths:
        for capacity in options.capacity:
            cells = measure(name, options.documents, capacity, options.look_ahead, options.repeats)
            print(line(cells), flush=True)


if __name__ == "__main__":
    main()

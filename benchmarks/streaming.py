"""Packing a stream with bounded look-ahead: how full rows are, how late documents come, and what one costs.

    python -m benchmarks.streaming

Documents longer than L are split. "density" is tokens over the room of every row but the last `look_ahead`, whose
gaps nothing is left to close; "with the end" is over all rows. "late" is how many places later than in the source a
document (the last piece of a split one) comes out at most. "best fit decreasing" knows every length.

Times are CPU seconds of one thread, so that other work on the machine does not count. Plan is the look-ahead alone,
from lengths; row is all of `PackedStream`, from NumPy documents to the rows of one rank out of one; copy is the part of
it that no packing can save: `input_ids` and `position_ids` of these rows, 16 bytes a token, written by NumPy at once.

The last table reads Arrow files as a stream (`datasets.load_from_disk(...).to_iterable_dataset()`). Examples: the
documents as Python lists, as iterating gives them; tables: as `PackedStream` reads them, without packing; rows: all of
`PackedStream`, reading included.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from longctx.packing import PackedStream, plan_packing
from longctx.packing.lookahead import LookAhead

from .packing import DISTRIBUTIONS, PACKAGES, Lengths, device, line, timed

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
    "copy µs/doc",
    "Mtokens/s",
]

READ_HEADER = ["lengths", "documents", "L", "examples µs/doc", "tables µs/doc", "rows µs/doc", "of it reading"]
READ_TOKENS = 50_000_000
"""Most tokens written to files for the last table."""


class Source:
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
    stream = PackedStream(Source(lengths), capacity, overlong="split", look_ahead=look_ahead)
    tokens = np.array([len(row["input_ids"]) for row in stream])
    row_seconds = time.process_time() - start
    assert len(tokens) == len(rows), "the stream and its plan have the same rows"
    assert tokens.sum() == lengths.sum(), "no token is lost"
    copy_seconds = time_copies(tokens.tolist(), capacity)
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
        f"{copy_seconds / documents * 1e6:.2f}",
        f"{lengths.sum() / row_seconds / 1e6:,.0f}",
    ]


def time_copies(rows: list[int], capacity: int) -> float:
    """CPU seconds to write token ids and positions of rows with so many tokens, one row kept while the next is made."""
    ids, places = np.zeros(capacity, dtype=np.int32), np.arange(capacity)
    row: tuple[NDArray[np.int64], ...] = ()
    start = time.process_time()
    for tokens in rows:
        row = (ids[:tokens].astype(np.int64), places[:tokens].copy())
    assert len(row) == 2
    return time.process_time() - start


def measure_reading(name: str, documents: int, capacity: int, look_ahead: int) -> list[str]:
    """Time a stream of Arrow files on disk: as examples, as tables, and packed."""
    rng = np.random.default_rng([documents, capacity])
    lengths = DISTRIBUTIONS[name](rng, documents, capacity)
    lengths = lengths[np.cumsum(lengths) <= READ_TOKENS]
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    ids = pa.array(rng.integers(0, 150_000, int(offsets[-1]), dtype=np.int32))
    table = pa.table({"input_ids": pa.ListArray.from_arrays(pa.array(offsets, type=pa.int32()), ids)})
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        datasets.Dataset(table).save_to_disk(folder)
        source = datasets.load_from_disk(folder).to_iterable_dataset(num_shards=4)
        stream = PackedStream(source, capacity, overlong="split", look_ahead=look_ahead)

        def count(documents: Iterable[Mapping[str, Any]]) -> int:
            return sum(len(document["input_ids"]) for document in documents)

        work = (lambda: count(source), lambda: count(stream._read_tables(0)), lambda: count(stream))
        timings = [timed(part, 3) for part in work]
    assert all(tokens == lengths.sum() for tokens, _ in timings), "no token is lost"
    examples, tables, rows = (float(np.median(seconds)) / len(lengths) * 1e6 for _, seconds in timings)
    numbers = [f"{examples:.2f}", f"{tables:.2f}", f"{rows:.2f}", f"{tables / rows:.0%}"]
    return [name, f"{len(lengths):,}", f"{capacity:,}", *numbers]


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
    print("", line(READ_HEADER), line(["---"] * len(READ_HEADER)), sep="\n", flush=True)
    for name in options.lengths:
        for capacity in options.capacity:
            print(line(measure_reading(name, options.documents, capacity, options.look_ahead)), flush=True)


if __name__ == "__main__":
    main()

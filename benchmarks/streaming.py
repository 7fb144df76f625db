"""Packing a stream with bounded look-ahead: how full rows are, how late documents come, and what one costs.

    python -m benchmarks.streaming

Documents longer than L are split. "density" is tokens over the room of every row but the last `look_ahead` of a lane,
whose gaps nothing is left to close; "with the end" is over all rows; "of a pass" is over a row of every lane in every
step, until the longest lane ends. "before" is the density of one order for all documents with 16 packs of look-ahead,
as streams had it before lanes. "late" is how many places later than in its lane a document (the last piece of a split
one) comes out at most. "waiting" is the most tokens that a lane holds. "best fit decreasing" knows every length.

Times are CPU seconds of one thread, so that other work on the machine does not count. Plan is the look-ahead alone,
from lengths; row is all of `PackedStream`, from NumPy documents to the rows of one rank out of one; copy is the part of
it that no packing can save: `input_ids` and `position_ids` of these rows, 16 bytes a token, written by NumPy at once.

The second table reads Arrow files as a stream (`datasets.load_from_disk(...).to_iterable_dataset()`). Examples: the
documents as Python lists, as iterating gives them; tables: as `PackedStream` reads them, without packing; rows: all of
`PackedStream`, reading included.

The last table reads texts from JSON lines and tokenises them, as one of --dp ranks does, whose lanes are one in --dp:
"passed" is what a record of another rank costs, "own" one of its own, and "a step" is what each rank spends on a step
of --dp sequences of --step_length tokens. "all" is a rank that tokenises every record, as each did before lanes.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from longctx.data import stdlib_files, stream_records, tokenize_stream
from longctx.packing import PackedStream, plan_packing
from longctx.packing.lookahead import LookAhead

from . import page
from .packing import DISTRIBUTIONS, PACKAGES, Lengths, timed

HEADER = ["lengths", "L", "lanes", "rows", "before", "density", "with the end", "of a pass", "best fit decreasing"]
HEADER += ["late", "waiting", "plan µs/doc (min–max)", "row µs/doc", "copy µs/doc", "Mtokens/s"]

BEFORE = 16
"""Packs of look-ahead of the one order that streams had before lanes."""
READ_HEADER = ["lengths", "documents", "L", "examples µs/doc", "tables µs/doc", "rows µs/doc", "of it reading"]
RANK_HEADER = ["ranks", "L", "tokens/doc", "passed µs/doc", "own µs/doc", "core-s a step", "all"]
TEXT_BYTES, TEXT_LENGTH = 16_000_000, 2400
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
    """The documents of each row of a lane, rows of one full piece of a split document among them."""
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
    """The longest delay: by how many places of its lane a document's last piece follows the document's own place."""
    order = np.concatenate([np.array(row) for row in rows])[::-1]
    _, from_end = np.unique(order, return_index=True)  # documents in order: where each is seen last
    place = np.argsort(np.argsort(-from_end))
    return int((place - np.arange(len(place))).max())


def read_pass(stream: PackedStream, lanes: int) -> tuple[list[list[int]], int]:
    """Return the tokens of each row of each lane, and the most tokens that are held for a lane on average."""
    of_lane, most = stream.lanes(lanes, range(lanes)), 0
    tokens: list[list[int]] = [[] for _ in of_lane]
    reader = of_lane[0]._reader
    rows: list[Any] = [{}]
    while any(row is not None for row in rows):
        rows = [lane.take() for lane in of_lane.values()]
        for counts, row in zip(tokens, rows, strict=True):
            counts += [] if row is None else [len(row["input_ids"])]
        held = sum(lane._waiting.waiting + sum(map(len, lane._ready)) for lane in of_lane.values())
        queued = (document for queue in reader._queues.values() for document in queue)
        most = max(most, held + sum(len(document.columns["input_ids"]) for document in queued))
    return tokens, most // lanes


def share(tokens: list[list[int]], capacity: int) -> str:
    rows = sum(map(len, tokens))
    return f"{sum(map(sum, tokens)) / (rows * capacity):.4%}" if rows else "–"


def measure(name: str, documents: int, capacity: int, lanes: int, look_ahead: int, repeats: int) -> list[str]:
    rng = np.random.default_rng([documents, capacity])
    lengths = DISTRIBUTIONS[name](rng, documents, capacity)
    of_lanes = [lengths[lane::lanes].tolist() for lane in range(lanes)]
    rows, seconds = timed(lambda: [plan(own, capacity, look_ahead) for own in of_lanes], repeats)
    tokens, waiting = read_pass(PackedStream(Source(lengths), capacity, overlong="split", look_ahead=look_ahead), lanes)
    start = time.process_time()
    stream = PackedStream(Source(lengths), capacity, overlong="split", look_ahead=look_ahead)
    read = stream.lanes(lanes, range(lanes))
    while [row for row in [lane.take() for lane in read.values()] if row is not None]:
        pass
    row_seconds = time.process_time() - start
    assert [len(own) for own in tokens] == [len(own) for own in rows], "the stream and its plan have the same rows"
    assert sum(map(sum, tokens)) == lengths.sum(), "no token is lost"
    before = PackedStream(Source(lengths), capacity, overlong="split", look_ahead=BEFORE)
    of_one = [len(row["input_ids"]) for row in before]
    copy_seconds = time_copies([count for own in tokens for count in own], capacity)
    _, report = plan_packing(lengths, capacity, overlong="split")
    microseconds = np.array(seconds) / documents * 1e6
    return [
        name,
        f"{capacity:,}",
        f"{lanes:,}",
        f"{sum(map(len, rows)):,}",
        share([of_one[:-BEFORE]], capacity),
        share([own[:-look_ahead] for own in tokens], capacity),
        share(tokens, capacity),
        f"{lengths.sum() / (max(map(len, tokens)) * lanes * capacity):.2%}",
        f"{report.fill:.4%}",
        f"{max(latest(own) for own in rows):,}",
        f"{waiting:,}",
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

        def read() -> int:
            return count(document.columns for document in stream.documents_from(0, lambda number: True, {}))

        work = (lambda: count(source), read, lambda: count(stream))
        timings = [timed(part, 3) for part in work]
    assert all(tokens == lengths.sum() for tokens, _ in timings), "no token is lost"
    examples, tables, rows = (float(np.median(seconds)) / len(lengths) * 1e6 for _, seconds in timings)
    numbers = [f"{examples:.2f}", f"{tables:.2f}", f"{rows:.2f}", f"{tables / rows:.0%}"]
    return [name, f"{len(lengths):,}", f"{capacity:,}", *numbers]


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of 32,000 tokens, as fast as those of models."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=32_000, special_tokens=["<eos>"], show_progress=False)
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def measure_ranks(ranks: int, step_length: int) -> list[str]:
    """Time a rank's reading of JSON lines of the standard library's texts: of all records, and of one in `ranks`."""
    whole = "\n".join(path.read_text(encoding="utf-8") for path in stdlib_files())[:TEXT_BYTES]
    texts = [whole[start : start + TEXT_LENGTH] for start in range(0, len(whole), TEXT_LENGTH)]
    tokenizer = train_tokenizer(texts[::20])
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

        def read(lanes: int) -> tuple[int, float]:
            stream = tokenize_stream(stream_records(str(path)), tokenizer)
            before = os.times()
            tokens = sum(len(d.columns["input_ids"]) for d in stream.documents_from(0, lambda k: k % lanes == 0))
            stream.encoder.process.close()
            return tokens, sum(os.times()[:4]) - sum(before[:4])

        (tokens, seconds), (_, of_lane) = read(1), read(ranks)
    passed = (of_lane - seconds / ranks) / (len(texts) * (1 - 1 / ranks))
    records = ranks * step_length / (tokens / len(texts))
    numbers = [f"{passed * 1e6:.1f}", f"{seconds / len(texts) * 1e6:.1f}"]
    steps = [f"{records * of_lane / len(texts):.1f}", f"{records * seconds / len(texts):.1f}"]
    return [f"{ranks}", f"{step_length:,}", f"{tokens / len(texts):.0f}", *numbers, *steps]


def main(arguments: list[str] | None = None) -> None:
    parser = page.parser("streaming", __doc__)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--lengths", nargs="+", choices=DISTRIBUTIONS, default=list(DISTRIBUTIONS))
    parser.add_argument("--capacity", type=int, nargs="+", default=[4096, 32768, 131072])
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 8, 64], help="sequences of a step")
    parser.add_argument("--look_ahead", type=int, default=16, help="packs of tokens that wait in a lane")
    parser.add_argument("--dp", type=int, default=128, help="ranks of the last table")
    parser.add_argument("--step_length", type=int, default=131072, help="tokens of a sequence in the last table")
    parser.add_argument("--repeats", type=int, default=3, help="plans timed for each case")
    options = parser.parse_args(arguments)

    print(f"{page.device()}; {page.versions(PACKAGES)}; {options.documents:,} documents\n")
    print(page.head(HEADER), flush=True)
    for name in options.lengths:
        for capacity in options.capacity:
            for lanes in options.lanes:
                cells = measure(name, options.documents, capacity, lanes, options.look_ahead, options.repeats)
                print(page.row(cells), flush=True)
    print("", page.head(READ_HEADER), sep="\n", flush=True)
    for name in options.lengths:
        for capacity in options.capacity:
            print(page.row(measure_reading(name, options.documents, capacity, options.look_ahead)), flush=True)
    print("", page.head(RANK_HEADER), sep="\n", flush=True)
    print(page.row(measure_ranks(options.dp, options.step_length)), flush=True)


if __name__ == "__main__":
    main()

"""Packing a stream: every token once, documents whole, for any number of ranks and workers, interrupted or not."""

from __future__ import annotations

import itertools
import json
import pickle
from dataclasses import dataclass

import datasets
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longctx.data import DataError
from longctx.data.columns import Document
from longctx.packing import PackedStream
from longctx.packing.lanes import lane_of
from longctx.packing.lookahead import LookAhead
from longctx.training.data_order import StepStream, StreamLoader

STREAMS = st.tuples(
    st.lists(st.integers(0, 70), max_size=60),  # lengths
    st.integers(1, 40),  # capacity
    st.integers(1, 6),  # look-ahead
)


def make_documents(lengths: list[int]) -> list[dict[str, np.ndarray]]:
    """Every token names its document and place: ids 1000 d + t, and the same as labels and a mask."""
    documents = []
    for number, length in enumerate(lengths):
        ids = 1000 * number + np.arange(length)
        documents.append({"input_ids": ids, "labels": -ids, "mask": ids % 3 == 0, "name": f"document {number}"})
    return documents


def pieces_of(rows: list[dict[str, np.ndarray]]) -> list[np.ndarray]:
    """The token ids of every piece, in the order of the rows; checks each row's own consistency."""
    pieces = []
    for row in rows:
        assert list(row) == ["input_ids", "labels", "mask", "seq_lengths", "position_ids"]
        ids = row["input_ids"]
        assert ids.dtype == row["seq_lengths"].dtype == row["position_ids"].dtype == np.int64
        assert row["labels"].tolist() == (-ids).tolist()
        assert row["mask"].tolist() == (ids % 3 == 0).tolist()
        assert row["mask"].dtype == bool
        assert row["seq_lengths"].sum() == len(ids)
        assert row["seq_lengths"].min() > 0
        borders = np.cumsum(row["seq_lengths"])
        assert row["position_ids"].tolist() == [t for n in row["seq_lengths"] for t in range(n)]
        pieces += np.split(ids, borders[:-1])
    return pieces


def ids_of(rows) -> list[list[int]]:
    return [row["input_ids"].tolist() for row in rows]


@settings(max_examples=150, deadline=None)
@given(STREAMS)
def test_every_token_comes_out_once_and_documents_stay_whole(stream):
    lengths, capacity, look_ahead = stream
    rows = list(PackedStream(make_documents(lengths), capacity, overlong="split", look_ahead=look_ahead))
    assert all(len(row["input_ids"]) <= capacity for row in rows)
    found: dict[int, list[np.ndarray]] = {}
    for piece in pieces_of(rows):
        assert (np.diff(piece) == 1).all()
        found.setdefault(int(piece[0]) // 1000, []).append(piece)
    assert sorted(found) == [number for number, length in enumerate(lengths) if length]
    for number, pieces in found.items():
        ids = np.concatenate(sorted(pieces, key=lambda piece: piece[0]))
        assert ids.tolist() == (1000 * number + np.arange(lengths[number])).tolist()
        assert len(pieces) == -(-lengths[number] // capacity)


@settings(max_examples=60, deadline=None)
@given(STREAMS, st.sampled_from(["truncate", "drop", "split"]))
def test_the_report_accounts_for_every_token(stream, overlong):
    lengths, capacity, look_ahead = stream
    packed = PackedStream(make_documents(lengths), capacity, overlong=overlong, look_ahead=look_ahead)
    rows = list(packed)
    report = packed.report
    long = [length for length in lengths if length > capacity]
    assert (report.documents, report.tokens) == (len(lengths), sum(lengths))
    assert (report.empty_documents, report.too_long_documents) == (lengths.count(0), len(long))
    assert report.longest_document == max(lengths, default=0)
    assert report.tokens_kept == sum(len(row["input_ids"]) for row in rows)
    assert report.tokens_cut == (sum(long) - len(long) * capacity if overlong == "truncate" else 0)
    assert report.tokens_dropped == (sum(long) if overlong == "drop" else 0)
    assert report.documents_dropped == (len(long) if overlong == "drop" else 0)
    assert (report.packs, report.pieces) == (len(rows), sum(len(row["seq_lengths"]) for row in rows))
    if overlong == "truncate":
        kept = {int(piece[0]) // 1000: len(piece) for piece in pieces_of(rows)}
        assert kept == {number: min(length, capacity) for number, length in enumerate(lengths) if length}


def _same(row):
    return row


@pytest.mark.parametrize("epoch", [0, 2])
def test_tables_are_read_in_the_order_of_the_examples(epoch):
    """An epoch's shuffle included; and what makes examples in Python is read as examples."""
    lengths = np.random.default_rng(3).integers(0, 40, 700).tolist()
    data = datasets.Dataset.from_list([{"input_ids": document["input_ids"]} for document in make_documents(lengths)])
    shards = data.to_iterable_dataset(num_shards=5)
    kinds = {"files": shards.shuffle(seed=3, buffer_size=1), "buffer": shards.shuffle(seed=3, buffer_size=50)}
    kinds["chain"] = datasets.concatenate_datasets([shards.take(300), shards.skip(200)])
    kinds["python"] = shards.map(_same)
    for name, source in kinds.items():
        source.set_epoch(epoch)
        examples = [{"input_ids": example["input_ids"]} for example in source]
        assert ids_of(PackedStream(source, 40)) == ids_of(PackedStream(examples, 40)), name


def test_wrong_documents_of_a_streaming_data_set_are_named():
    lists = datasets.List(datasets.Value("int64"))
    features = datasets.Features({"input_ids": lists, "labels": lists, "mask": datasets.List(datasets.Value("bool"))})
    right = {"input_ids": [1, 2], "labels": [1, 2], "mask": [True, False]}
    for wrong, words in [
        ({"labels": None}, "has no 'labels'"),
        ({"labels": [1]}, "has 1 values of 'labels' for 2"),
        ({"labels": [1, None]}, "'labels' has shape"),
        ({"input_ids": list(range(9)), "labels": list(range(9)), "mask": [True] * 9}, "has 9 tokens"),
    ]:
        for place in (0, 300):
            records = [right] * place + [right | wrong] + [right] * 5
            source = datasets.Dataset.from_list(records, features=features).to_iterable_dataset()
            with pytest.raises(DataError, match=rf"document {place} .*{words}"):
                list(PackedStream(source, 8))


@settings(max_examples=80, deadline=None)
@given(STREAMS, st.booleans())
def test_without_packing_every_piece_is_a_row_in_order(stream, split):
    lengths, capacity, _ = stream
    rows = PackedStream(make_documents(lengths), capacity, overlong="split" if split else "drop", strategy="none")
    documents = [list(range(1000 * number, 1000 * number + length)) for number, length in enumerate(lengths)]
    pieces = [ids[start : start + capacity] for ids in documents for start in range(0, len(ids), capacity)]
    expected = pieces if split else [ids for ids in documents if 0 < len(ids) <= capacity]
    assert ids_of(rows) == expected
    assert ids_of(rows) == expected  # again, from the start
    assert (rows.report.strategy, rows.report.packs) == ("none", len(expected))


def test_tokens_that_wait_are_in_no_pack_yet():
    stream = PackedStream(make_documents([30, 30, 100, 7]), 40, overlong="split", look_ahead=2)
    next(iter(stream))
    assert (stream.report.tokens, stream.report.packs, stream.report.tokens_waiting) == (160, 1, 120)
    assert stream.report.fill == 1.0
    assert len(list(stream)) == 5
    assert stream.report.tokens_waiting == 0


LAYOUTS = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))  # micro-batch size, dp, accumulation


def step_stream(stream, layout, rank):
    micro_batch_size, dp, accumulation = layout
    options = {"micro_batch_size": micro_batch_size, "accumulation_steps": accumulation}
    return StepStream(stream, dp=dp, dp_rank=rank, **options)


@dataclass
class Collated:
    """What the trainer's collator makes a Shard of."""

    rows: list
    stream_read: object = None


class Run:
    """The ranks of a run in this process: what each reads of every step, and their counts, which go to all of them."""

    def __init__(self, make, layout, position=None, *, drop_last=False, workers=0):
        options = {"drop_last": drop_last, "num_workers": workers}
        ranks = [step_stream(make(), layout, rank) for rank in range(layout[1])]
        self.loaders = [StreamLoader(steps, Collated, **options) for steps in ranks]
        for loader in self.loaders if position else ():
            loader.go_on_from(position)

    def step(self):
        """Return the token ids of the step's rows by lane, the passes, the report and the position."""
        for _ in range(2):
            shards = [loader.step() for loader in self.loaders]
            counts = [loader.counts(of_rank) for loader, of_rank in zip(self.loaders, shards, strict=True)]
            reads = [loader.take(of_rank, counts) for loader, of_rank in zip(self.loaders, shards, strict=True)]
            if None not in reads:
                break
            assert reads == [None] * len(reads)  # the ranks agree on the end of a pass
        rows = [row for micro_batches in zip(*shards, strict=True) for shard in micro_batches for row in shard.rows]
        assert len({read[:3] for read in [(read.report, read.passes, str(read.counts)) for read in reads]}) == 1
        lanes = {lane: where for read in reads for lane, where in read.lanes.items()}
        position = json.loads(json.dumps(self.loaders[0].position_of(reads[0], lanes)))
        return ids_of(rows), reads[0].passes, reads[0].report, position

    def steps(self, number):
        return [self.step() for _ in range(number)]


def lanes_of(lengths, size, **options):
    """The token ids of the rows of each lane, each by itself."""
    documents = make_documents(lengths)
    return [
        ids_of(PackedStream([d for k, d in enumerate(documents) if lane_of(k, size) == lane], **options))
        for lane in range(size)
    ]


@settings(max_examples=100, deadline=None)
@given(STREAMS, LAYOUTS, st.booleans())
@example(([5], 10, 1), (2, 1, 1), True)  # no step at all, which random streams may never have
def test_a_step_has_a_row_of_every_lane_whatever_the_layout(stream, layout, drop_last):
    """Each lane by itself, over more than two passes: every row once a pass, and the counts of the first pass."""
    lengths, capacity, look_ahead = stream
    size, options = int(np.prod(layout)), {"capacity": capacity, "overlong": "split", "look_ahead": look_ahead}
    lanes = lanes_of(lengths, size, **options)
    steps = [[row for row in rows if row is not None] for rows in itertools.zip_longest(*lanes)]
    if drop_last:
        steps = [rows for rows in steps if len(rows) == size]
    run = Run(lambda: PackedStream(make_documents(lengths), **options), layout, drop_last=drop_last)
    if not steps:
        with pytest.raises(DataError, match=f"no sequence for a step of {size}"):
            run.step()
        return
    found = run.steps(2 * len(steps) + 1)
    assert [rows for rows, *_ in found] == (3 * steps)[: len(found)]
    assert [passes for _, passes, *_ in found] == [1] * len(steps) + [2] * len(steps) + [3]
    if drop_last:
        return
    report = found[-1][2]
    long = [length for length in lengths if length > capacity]
    assert (report.documents, report.tokens) == (len(lengths), sum(lengths))
    assert (report.too_long_documents, report.longest_document) == (len(long), max(lengths))
    assert (report.packs, report.tokens_kept) == (sum(map(len, lanes)), sum(lengths))
    assert report.tokens_waiting == 0


@settings(max_examples=60, deadline=None)
@given(STREAMS, LAYOUTS, st.integers(0, 7), st.integers(0, 7), st.sampled_from(["stream", "none"]), st.booleans())
def test_steps_go_on_from_a_position_in_any_layout(stream, layout, first, more, strategy, drop_last):
    """Twice, in any pass, with the documents that wait read again and JSON in between."""
    lengths, capacity, look_ahead = stream
    size, dp, accumulation = layout

    def make():
        options = {"overlong": "split", "look_ahead": look_ahead, "strategy": strategy}
        return PackedStream(make_documents(lengths), capacity, **options)

    lanes = lanes_of(lengths, int(np.prod(layout)), capacity=capacity, overlong="split", strategy=strategy)
    if not all(lanes) if drop_last else not any(lanes):
        return
    before = Run(make, layout, drop_last=drop_last).steps(first + more + 4)
    for other in ((size, 1, accumulation * dp), (1, dp * size, accumulation), (1, 1, int(np.prod(layout)))):
        once = Run(make, other, before[first][-1], drop_last=drop_last).steps(more + 1)
        assert once == before[first + 1 : first + more + 2]
        twice = Run(make, layout, once[-1][-1], drop_last=drop_last).steps(2)
        assert twice == before[first + more + 2 :]


def test_a_rank_tokenises_its_own_lanes_alone():
    """And a worker those of its micro-batches."""
    documents, read = make_documents([5] * 64), []

    class Source:
        def documents_from(self, first, wanted, lengths):
            for number in filter(wanted, range(first, len(documents))):
                read.append(number)
                yield Document(number, documents[number])

    for rank in range(4):
        read.clear()
        steps = step_stream(PackedStream(Source(), 10), (1, 4, 2), rank)
        list(itertools.islice(steps, 12))
        assert sorted(read) == [number for number in range(64) if lane_of(number, 8) % 4 == rank]
    read.clear()
    PackedStream(Source(), 10).lanes(8, [3])[3].take()
    assert {lane_of(number, 8) for number in read} == {3}


def test_documents_that_are_long_at_regular_intervals_fill_all_lanes_alike():
    lengths = [90, 10] * 400
    for size in (2, 8):
        rows = [len(lane) for lane in lanes_of(lengths, size, capacity=100)]
        assert max(rows) - min(rows) <= 1


def test_a_stream_goes_to_another_process_before_and_while_it_is_read():
    stream = PackedStream(make_documents([5, 7, 9, 3]), 10)
    expected, rows = ids_of(stream), iter(stream)
    assert ids_of(pickle.loads(pickle.dumps(stream))) == expected
    next(rows)
    assert ids_of(pickle.loads(pickle.dumps(stream))) == expected


def test_a_position_in_other_documents_is_refused():
    lengths = np.random.default_rng(0).integers(1, 30, 60).tolist()
    stream = PackedStream(make_documents(lengths), 40, look_ahead=2)
    rows = iter(stream)
    list(itertools.islice(rows, 5))
    position = stream.position()
    lengths[position["lanes"][0]["read"] - 1] -= 1
    changed = PackedStream(make_documents(lengths), 40, look_ahead=2)
    changed.go_on_from(position)
    with pytest.raises(DataError, match="other documents than when it was read before"):
        next(iter(changed))
    with pytest.raises(ValueError, match="its sequences would differ"):
        PackedStream(make_documents(lengths), 48, look_ahead=2).go_on_from(position)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_change_no_step(workers):
    """Of 4 micro-batches, which 3 workers could not share out, over the end of a pass and from a position."""
    documents = make_documents(np.random.default_rng(0).integers(0, 70, 60).tolist())

    def make():
        return PackedStream(documents, 40, overlong="split")

    expected = Run(make, (1, 2, 4)).steps(16)
    assert expected[-1][1] > 1
    run = Run(make, (1, 2, 4), workers=workers)
    assert [loader.num_workers for loader in run.loaders] == [workers] * 2
    assert run.steps(16) == expected
    assert Run(make, (1, 2, 4), expected[2][-1], workers=workers).steps(13) == expected[3:]
    assert Run(make, (1, 2, 4), workers=3).loaders[0].num_workers == 2


@pytest.mark.parametrize("capacity", [4096, 32768])
@pytest.mark.parametrize("long", [0.0, 0.1])
def test_rows_are_full_and_no_document_waits_long(capacity, long):
    """The targets: 16 packs of look-ahead fill 99.8% of the room, and no document comes 1,000 places late."""
    rng, n = np.random.default_rng(0), 10_000
    lengths = np.clip(rng.lognormal(np.log(600) - 1.125, 1.5, n), 8, 65536)
    lengths = np.where(rng.random(n) < long, np.exp(rng.uniform(np.log(4096), np.log(131072), n)), lengths).astype(int)
    queue: LookAhead[int] = LookAhead(capacity, 16)
    packs, fills = [], []
    for number, length in enumerate((lengths % capacity).tolist()):
        if length:
            queue.add(length, number)
        while queue.full:
            packs.append(queue.take())
            fills.append(sum(lengths[number] % capacity for number in packs[-1]))
    assert np.mean(fills) / capacity >= 0.998
    order = np.concatenate(packs)
    late = np.arange(len(order)) - np.searchsorted(np.sort(order), order)
    assert late.max() <= 1000


def test_the_gap_is_closed_by_the_best_one_or_two():
    def packs(sizes, capacity):
        queue: LookAhead[int] = LookAhead(capacity, 1)
        for size in sizes:
            queue.add(size, size)
        while len(queue):
            yield queue.take()

    assert list(packs([6, 5, 3, 1, 4], 10)) == [[6, 4], [5, 3, 1]]
    assert list(packs([60, 50, 30, 8, 9, 10], 78)) == [[60, 10, 8], [50, 9], [30]]
    # A gap too wide for two is filled in order, all but its end.
    small = [5, 4, 6] * 4 + [5]
    assert list(packs([40, 90, *small], 100)) == [[40, *small[:11], 6], [90, 5]]


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"input_ids": [1, 2]}, "document 1 .* no 'labels'"),
        ({"input_ids": [1, 2], "labels": None}, "document 1 .* no 'labels'"),
        ({"input_ids": [1, 2], "labels": [1]}, "document 1 .* 1 values of 'labels' for 2 input_ids"),
        ({"input_ids": [[1, 2]], "labels": [1]}, "document 1 .*shape"),
        ({"input_ids": ["a"], "labels": [1]}, "document 1 .*flat list of numbers"),
        ({"input_ids": [1.5], "labels": [1]}, "document 1 .*flat list of numbers"),
        ({"input_ids": [1] * 9, "labels": [1] * 9}, "document 1 .* 9 tokens, more than max_length = 8"),
    ],
)
def test_a_wrong_document_is_named(document, words):
    first = {"input_ids": [1, 2, 3], "labels": [1, 2, 3]}
    with pytest.raises(DataError, match=words):
        list(PackedStream([first, document], 8))


def test_whole_turns_need_the_ends_of_turns():
    with pytest.raises(DataError, match=r"document 1 .*has no 'turn_ends', which overlong='turns' needs"):
        list(PackedStream([{"input_ids": [1]}, {"input_ids": [1] * 9}], 8, overlong="turns"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"capacity": 0}, "capacity must be"),
        ({"overlong": "cut"}, "unknown overlong='cut'"),
        ({"strategy": "bfd"}, "unknown strategy='bfd'"),
        ({"look_ahead": 0}, "look_ahead must be"),
        ({"source": iter([])}, "read only once"),
    ],
)
def test_a_wrong_argument_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        PackedStream(**({"source": [], "capacity": 8} | arguments))


def test_a_pack_is_no_document_and_other_settings_are_no_resumption():
    with pytest.raises(DataError, match="a pack already"):
        list(PackedStream([{"input_ids": [1], "seq_lengths": [1]}], 8))
    with pytest.raises(ValueError, match=r"'capacity': 8.*'capacity': 16"):
        PackedStream([], 16).go_on_from(PackedStream([], 8).position())

"""The order of documents: packs, rows, mixtures and streams, and which rank reads what in which micro-batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from accelerate import skip_first_batches
from datasets import Dataset

from longctx.data import MixedStream, Mixture, load_records, mix, stream_records, tokenize_records, tokenize_stream
from longctx.data.sides import Sides
from longctx.model.tiny import tiny_tokenizer
from longctx.packing import (
    OVERLONG,
    PackedDataset,
    PackedStream,
    Packing,
    PairedDataset,
    add_counts,
    balanced_order,
    kept_of_sides,
    lower_bound,
    pack,
    pack_costs,
    pack_dataset,
    plan_packing,
    plan_pairs,
)
from longctx.run.preparation import prepare_data
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from longctx.training.data_order import MicroBatch, StepLoader, StepSampler, StepStream
from tests.golden.data_sets import own_folder
from tests.golden.digests import digest
from tests.jsonl import write_lines

Value = Iterator[tuple[str, Any]]

# --------------------------------------------------------------------------------------------------
# Adapters: what is read of longctx's inner objects
# --------------------------------------------------------------------------------------------------


def plan_of(packing: Packing) -> dict[str, Any]:
    """Return a plan: how many packs, and digests of the documents in each and of the parts of documents."""
    cut = None if packing.starts is None else digest(packing.starts, packing.stops)
    found = {"packs": len(packing), "documents": digest(packing.indices, packing.offsets), "cut": cut}
    return found | {"dtype": packing.indices.dtype.name, "capacity": packing.capacity}


def report_of(report: Any) -> dict[str, Any]:
    """Return the counts of a packing report."""
    return {name: value for name, value in asdict(report).items() if value}


def rows_of(rows: Any) -> dict[str, Any]:
    """Return the columns of rows with their types, and a digest of each over all rows."""
    found = [*rows] if not hasattr(rows, "packing") else [rows[i] for i in range(len(rows))]
    names = {name: None for row in found for name in row}
    columns = {name: [np.asarray(row[name]) for row in found if name in row] for name in names}
    return {"rows": len(found)} | {
        name: f"{values[0].dtype} {digest([len(value) for value in values], np.concatenate(values))}"
        for name, values in columns.items()
    }


def reads_of(sampler: StepSampler) -> list[list[int]]:
    """Return the numbers of the rows in each micro-batch of an epoch."""
    return [*sampler]


# --------------------------------------------------------------------------------------------------
# Plans
# --------------------------------------------------------------------------------------------------


def _drawn(kind: str, number: int) -> list[int]:
    """Lengths of documents: of many values or few, all above half a pack, with empty ones."""
    random = Random(f"{kind} {number}")
    draw: dict[str, Callable[[], int]] = {
        "uniform": lambda: random.randrange(1, 1025),
        "heavy-tailed": lambda: min(1024, int(8 * random.paretovariate(0.8))),
        "ties": lambda: random.choice([3, 64, 64, 100, 100, 341, 512, 512, 700, 1024]),
        "large": lambda: random.randrange(500, 1025),
        "with empty ones": lambda: max(0, random.randrange(-100, 400)),
    }
    return [draw[kind]() for _ in range(number)]


KINDS = ("uniform", "heavy-tailed", "ties", "large", "with empty ones")


def _plans(quick: bool) -> Value:
    for number, kind in product((1, 40, 5000) if quick else (0, 1, 7, 40, 300, 5000, 40_000), KINDS):
        lengths = _drawn(kind, number)
        plan = plan_of(pack(lengths, 1024))
        yield f"{number} {kind} documents", plan | {"lower bound": lower_bound(np.array(lengths, np.int64), 1024)}
    for capacity, kind in product((512, 1024), KINDS if not quick else KINDS[2:3]):
        for strategy, overlong in product(("bfd", "bfd_split", "wrapped", "none"), OVERLONG[:4]):
            name = f"200 {kind} documents in packs of {capacity}, {strategy}, {overlong}"
            try:
                plan, report = plan_packing(_drawn(kind, 200), capacity, strategy=strategy, overlong=overlong)
                yield name, [plan_of(plan)["documents"], plan_of(plan)["cut"], report_of(report)]
            except ValueError as error:
                yield name, str(error)


def _documents(lengths: Sequence[int]) -> Dataset:
    """Every token names its document and its place."""
    ids = [[1000 * number + place for place in range(length)] for number, length in enumerate(lengths)]
    labels = [[-100 if token % 7 < 2 else token for token in row] for row in ids]
    return Dataset.from_dict({"input_ids": ids, "labels": labels, "text": [str(len(row)) for row in ids]})


def _rows(quick: bool) -> Value:
    for kind in KINDS[2:3] if quick else KINDS:
        lengths = [length // 16 for length in _drawn(kind, 60)]
        documents, costs = _documents(lengths), []
        for strategy, overlong in (("bfd", "truncate"), ("bfd", "split"), ("bfd", "drop"), ("wrapped", "raise")):
            packing, _ = plan_packing(lengths, 48, strategy=strategy, overlong=overlong)
            rows = PackedDataset(documents, packing)
            costs = pack_costs(packing, np.array(lengths), linear_cost=1000)
            order = balanced_order(costs, 4, seed=3, epoch=1)
            beside = {"targets": digest(rows.target_counts()), "costs": digest(costs), "balanced": digest(order)}
            yield f"rows of {kind} documents, {strategy}, {overlong}", rows_of(rows) | beside
        for shuffled in (documents.shuffle(seed=1), documents.select(range(5, 50, 3))):
            rows = PackedDataset(shuffled, plan_packing([*map(len, shuffled["input_ids"])], 64)[0], ["input_ids"])
            yield f"rows of {kind} documents, {len(shuffled)} selected", rows_of(rows)
        for strategy in ("bfd", "bfd_split", "wrapped"):
            packed = pack_dataset(documents, 70, strategy, {"keep_in_memory": True})
            yield f"pack_dataset of {kind} documents, {strategy}", rows_of(packed)


def _pairs(quick: bool) -> Value:
    for number in range(2 if quick else 12):
        random = Random(number)
        prompts = [random.randrange(1, 60) for _ in range(30)]
        chosen, rejected = ([prompt + random.randrange(1, 40) for prompt in prompts] for _ in range(2))
        sides = Sides(*(np.array(lengths) for lengths in (prompts, chosen, rejected)))
        ids = [[*range(a), *range(1000, 1000 + b)] for a, b in zip(chosen, rejected, strict=True)]
        source = Dataset.from_dict({"input_ids": ids, "labels": ids})
        for share, overlong in product((False, True), ("raise", "truncate", "drop")):
            name = f"pairs {number}, {overlong}{', shared prompts' if share else ''}"
            strategy = "bfd" if number % 3 else "none"
            try:
                packing, report = plan_pairs(
                    sides, 100 + 20 * number, strategy=strategy, overlong=overlong, share=share
                )
            except ValueError as error:
                yield name, str(error)
                continue
            kept = kept_of_sides(sides, 100 + 20 * number, overlong, share=share)
            rows = PairedDataset(source, packing, sides, kept, share=share)
            rows.reference = np.stack([-sides.chosen, -sides.rejected], axis=1).astype(float)
            yield name, rows_of(rows) | report_of(report)


# --------------------------------------------------------------------------------------------------
# Steps
# --------------------------------------------------------------------------------------------------


def _costs(number: int) -> np.ndarray:
    """Heavy-tailed, with equal ones among them."""
    random = Random(number)
    return np.array([round(random.paretovariate(2.0), 1) for _ in range(number)])


def _samplers(quick: bool) -> Value:
    layouts = ((1, 1, 1), (1, 4, 1), (2, 2, 2), (1, 1, 8), (3, 2, 1), (1, 3, 5), (2, 8, 4))
    kinds = ("in order", "shuffled", "balanced")
    for (size, dp, accumulation), number, kind in product(layouts, (1, 23, 150, 1000), kinds):
        if quick and number != 150:
            continue
        name = f"{number} rows {kind}, {size} a micro-batch, dp {dp}, accumulation {accumulation}"
        found = {}
        for seed, epoch, drop_last in ((0, 0, False), (42, 0, True), (42, 1, False), (7, 3, False)):
            samplers = [
                StepSampler(
                    number,
                    micro_batch_size=size,
                    accumulation_steps=accumulation,
                    dp=dp,
                    dp_rank=rank,
                    seed=None if kind == "in order" else seed,
                    costs=_costs(number) if kind == "balanced" else None,
                    drop_last=drop_last,
                )
                for rank in range(dp)
            ]
            for sampler in samplers:
                sampler.set_epoch(epoch)
            reads = [reads_of(sampler) for sampler in samplers]
            steps = [samplers[0].num_steps, len(samplers[0])]
            resumed = "resumed" if _resumed(samplers[-1], reads[-1]) else "cannot be resumed"
            found[f"seed {seed}, epoch {epoch}{', full steps' * drop_last}"] = [
                *steps,
                digest(json.dumps(reads)),
                resumed,
            ]
        yield name, found
    sampler = StepSampler(
        11, micro_batch_size=1, accumulation_steps=2, dp=2, dp_rank=1, seed=42, costs=_costs(11), drop_last=False
    )
    yield "11 rows balanced: the micro-batches of the second of two ranks", reads_of(sampler)


def _resumed(sampler: StepSampler, reads: list[list[int]]) -> bool:
    """Return whether the rest of an epoch is the same where a run is resumed in it, as transformers' Trainer does."""
    loader = StepLoader(range(sampler.num_rows), batch_sampler=sampler, collate_fn=list)  # type: ignore[arg-type]
    return all([*skip_first_batches(loader, done)] == reads[done:] for done in {len(reads) // 3, len(reads) // 2})


# --------------------------------------------------------------------------------------------------
# Mixtures and streams
# --------------------------------------------------------------------------------------------------


def _sources(folder: Path, sizes: Sequence[int]) -> list[str]:
    """Files of text, of prompts and completions, and of tokens, which have labels or not."""
    random = Random(0)
    texts = [f"{number} {'x' * random.randrange(1, 60)}" for number in range(max(sizes))]
    records = (
        [{"text": f"a{text}"} for text in texts[: sizes[0]]],
        [{"prompt": f"b{text}", "completion": text} for text in texts[: sizes[1]]],
        [{"input_ids": [3, place % 250, place // 250], "labels": [3, -100, 5]} for place in range(sizes[2])],
    )
    return [write_lines(folder / f"{name}.jsonl", lines) for name, lines in zip("abc", records, strict=True)]


MIXTURES: dict[str, dict[str, Any]] = {
    "one after the other": {},
    **{
        f"weights 5 2 3, {strategy}, seed {seed}": {"weights": (5, 2, 3), "stopping_strategy": strategy, "seed": seed}
        for strategy in ("first_exhausted", "all_exhausted", "all_exhausted_without_replacement")
        for seed in (0, 42)
    },
    "fractions": {"fractions": (0.5, 0.25, 0.25)},
    "weights, a quarter for evaluation": {"weights": (1, 1, 2), "test_size": 0.25, "seed": 3},
}


def _mixtures(quick: bool) -> Value:
    tokenizer = tiny_tokenizer()
    with own_folder() as folder:
        files = _sources(folder, (40, 7, 300))
        sources = [tokenize_records(load_records(file), tokenizer) for file in files]
        streams = [tokenize_stream(stream_records(file), tokenizer) for file in files]
        for name, options in MIXTURES.items():
            mixture = Mixture(names=("a", "b", "c"), **options)
            for part in ("train", "test") if mixture.test_size else ("train",):
                documents, reports = mix(sources, mixture, part)
                found = {"documents": rows_of(documents), "sources": [report_of(report) for report in reports]}
                yield f"mixture, {name}: {part}", found
            if mixture.fractions or mixture.test_size:  # which a stream does not have
                continue
            stream = MixedStream(streams, mixture)
            for row in _rows_and_positions(stream, 128, full=not quick):
                yield f"stream of a mixture, {name}: {row[0]}", row[1]
        for stream in streams:
            if stream.encoder.tokenizer is not None:
                stream.encoder.process.close()


def _rows_and_positions(source: Any, capacity: int, *, full: bool, **options: Any) -> Value:
    """Yield the rows of a stream, where it stands after some, and that it goes on from there with the same rows."""
    stream = PackedStream(source, capacity, **options)
    rows, positions, numbers = [], {}, []
    for row in stream:
        if len(rows) % 7 == 2:
            positions[len(rows) + 1] = json.loads(json.dumps(stream.position()))
        rows.append({name: np.array(values) for name, values in row.items()})
        numbers.append(stream.report.documents)
    yield "rows", rows_of(rows) | {"read": digest(numbers), "report": report_of(stream.report)}
    places, goes_on = [*positions], {}
    for read in places if full else places[:1]:
        again = PackedStream(source, capacity, **options)
        again.go_on_from(positions[read])
        goes_on[read] = rows_of(again) == rows_of(rows[read:])
    yield "the rest from a position is the same", all(goes_on.values())
    shown = {read: digest(json.dumps(position)) for read, position in positions.items()}
    yield "positions", shown | {places[0]: positions[places[0]]}


def _streams(quick: bool) -> Value:
    for kind, (look_ahead, strategy, overlong) in product(
        KINDS[2:4] if quick else KINDS,
        ((1, "stream", "split"), (4, "stream", "truncate"), (16, "stream", "drop"), (4, "none", "split")),
    ):
        lengths = [length // 10 for length in _drawn(kind, 120)]
        options = {"look_ahead": look_ahead, "strategy": strategy, "overlong": overlong}
        source = [*_documents(lengths).with_format("numpy", columns=["input_ids", "labels"])]
        for name, value in _rows_and_positions(source, 64, full=not quick, **options):
            yield f"stream of {kind} documents, look-ahead {look_ahead}, {strategy}, {overlong}: {name}", value
        for size, dp, accumulation in ((1, 1, 4), (1, 2, 2), (2, 3, 1)):
            layout = {"micro_batch_size": size, "dp": dp, "accumulation_steps": accumulation}
            name = f"{size} a micro-batch, dp {dp}, accumulation {accumulation}"
            found = _steps(PackedStream(source, 64, **options), quick, **layout)
            yield f"steps of a stream of {kind} documents, {strategy}, {overlong}, {name}", found


def _steps(stream: PackedStream, quick: bool, *, dp: int, **layout: Any) -> list[Any]:
    """Return digests of the documents in each rank's micro-batches of a pass, and of where the lanes stand."""
    number, size = 40, layout["micro_batch_size"] * dp * layout["accumulation_steps"]

    def steps(position: dict[str, Any] | None) -> list[list[MicroBatch]]:
        ranks = [StepStream(stream, dp=dp, dp_rank=rank, **layout) for rank in range(dp)]
        for rank in ranks if position else ():
            rank.go_on_from(position)
        read = [iter(rank) for rank in ranks]
        return [[next(rank) for _ in range(layout["accumulation_steps"]) for rank in read] for _ in range(number)]

    def reads(steps: list[list[MicroBatch]]) -> list[Any]:
        return [[[row["input_ids"].tolist() for row in batch.rows] for batch in step] for step in steps]

    whole = steps(None)
    lanes = [{lane: where for batch in step for lane, where in batch.lanes.items()} for step in whole]
    same = True
    for stop in (3,) if quick else (0, 3, number // 2):
        position = stream.position_of([lanes[stop][lane] for lane in range(size)], {})
        rest = steps(json.loads(json.dumps(position)))
        same &= reads(rest)[: number - stop - 1] == reads(whole)[stop + 1 :]
    counts = [add_counts(batch.counts for batch in step) for step in whole]
    told = [digest(json.dumps(counts)), digest(json.dumps(lanes))]
    return [digest(json.dumps(reads(whole))), *told, "resumed" if same else "cannot be resumed"]


# --------------------------------------------------------------------------------------------------
# From flags to rows
# --------------------------------------------------------------------------------------------------

FLAGS = {
    "by default": [],
    "shuffled": ["--shuffle_dataset", "True", "--seed", "5"],
    "wrapped": ["--packing_strategy", "wrapped"],
    "not packed": ["--packing", "False", "--overlong", "split"],
    "not balanced, truncated": ["--balance_packs", "False", "--overlong", "truncate"],
    "split pieces": ["--packing_strategy", "bfd_split"],
    "evaluation not packed": ["--eval_strategy", "steps", "--eval_packing", "False", "--test_split_size", "0.2"],
}


def _flags(quick: bool) -> Value:
    with own_folder() as folder:
        files = _sources(folder, (150, 30, 100))
        for name, flags in [*FLAGS.items()][: 2 if quick else None]:
            given = ["--model_name_or_path", "tiny", "--max_length", "64", "--output_dir", str(folder / "run")]
            given += ["--datasets", *files] if "evaluation" in name else ["--dataset_name", files[0]]
            overlong = [] if "--overlong" in flags else ["--overlong", "drop"]
            data = prepare_data(resolve(parse_flags([*given, *overlong, *flags]), read_profile({}), {}))
            found = rows_of(data.rows) | report_of(data.report)
            found["costs"] = None if data.costs is None else digest(np.round(data.costs))
            yield f"flags, {name}", found | ({"evaluation": rows_of(data.evaluation.rows)} if data.evaluation else {})


def golden(quick: bool) -> Value:
    with own_folder():  # which hides progress bars
        for part in (_plans, _rows, _pairs, _samplers, _mixtures, _streams, _flags):
            yield from part(quick)

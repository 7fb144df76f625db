"""The order of documents: packs, mixtures and streams, and which rank reads what in which micro-batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from longctx.data import MixedStream, Mixture, load_records, mix, stream_records, tokenize_records, tokenize_stream
from longctx.model.tiny import tiny_tokenizer
from longctx.packing import PackedStream, pack, plan_packing
from longctx.run.preparation import prepare_data
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from longctx.training.data_order import StepSampler, StepStream
from tests.golden.data_sets import own_folder
from tests.golden.digests import digest
from tests.jsonl import write_lines

Value = Iterator[tuple[str, Any]]


def _plan(packing: Any) -> list[Any]:
    """The number of packs, and digests of the documents in each and of the parts of documents."""
    cut = None if packing.starts is None else digest(packing.starts, packing.stops)
    return [len(packing), digest(packing.indices, packing.offsets), cut]


def _rows(rows: Any) -> dict[str, Any]:
    """The columns of rows with their types, and a digest of each over all rows."""
    found = [*rows] if not hasattr(rows, "packing") else [rows[i] for i in range(len(rows))]
    names = {name: None for row in found for name in row}
    columns = {name: [np.asarray(row[name]) for row in found if name in row] for name in names}
    return {"rows": len(found)} | {
        name: f"{values[0].dtype} {digest([len(value) for value in values], np.concatenate(values))}"
        for name, values in columns.items()
    }


def _drawn(kind: str, number: int) -> list[int]:
    """Lengths of documents: of many values or few, all above half a pack, with empty ones."""
    random = Random(f"{kind} {number}")
    draw: dict[str, Callable[[], int]] = {
        "heavy-tailed": lambda: min(1024, int(8 * random.paretovariate(0.8))),
        "ties": lambda: random.choice([3, 64, 64, 100, 100, 341, 512, 512, 700, 1024]),
        "large": lambda: random.randrange(500, 1025),
        "with empty ones": lambda: max(0, random.randrange(-100, 400)),
    }
    return [draw[kind]() for _ in range(number)]


KINDS = ("heavy-tailed", "ties", "large", "with empty ones")


def _plans() -> Value:
    for number, kind in product((40, 5000), KINDS):
        yield f"{number} {kind} documents", _plan(pack(_drawn(kind, number), 1024))
    for strategy, overlong in product(("bfd", "bfd_split", "wrapped", "none"), ("truncate", "split", "drop")):
        name = f"200 documents with ties in packs of 512, {strategy}, {overlong}"
        try:
            yield name, _plan(plan_packing(_drawn("ties", 200), 512, strategy=strategy, overlong=overlong)[0])
        except ValueError as error:
            yield name, str(error)


def _samplers() -> Value:
    random = Random(150)
    costs = np.array([round(random.paretovariate(2.0), 1) for _ in range(150)])  # with equal ones among them
    orders = {"in order": {"seed": None}, "shuffled": {"seed": 42}, "balanced": {"seed": 42, "costs": costs}}
    for (size, dp, accumulation), (kind, order) in product(((1, 1, 8), (2, 2, 2), (1, 3, 5)), orders.items()):
        for epoch, drop_last in ((0, True), (1, False)):
            layout = {"micro_batch_size": size, "accumulation_steps": accumulation, "dp": dp}
            samplers = [
                StepSampler(150, **layout, dp_rank=rank, **{"costs": None} | order, drop_last=drop_last, epoch=epoch)
                for rank in range(dp)
            ]
            name = f"150 rows {kind}, {size} a micro-batch, dp {dp}, accumulation {accumulation}, epoch {epoch}"
            yield name, [samplers[0].num_steps, digest(json.dumps([[*sampler] for sampler in samplers]))]


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
        f"weights 5 2 3, {strategy}": {"weights": (5, 2, 3), "stopping_strategy": strategy, "seed": 42}
        for strategy in ("first_exhausted", "all_exhausted", "all_exhausted_without_replacement")
    },
    "fractions": {"fractions": (0.5, 0.25, 0.25)},
    "weights, a quarter for evaluation": {"weights": (1, 1, 2), "test_size": 0.25, "seed": 3},
}


def _mixtures(folder: Path) -> Value:
    tokenizer = tiny_tokenizer()
    files = _sources(folder, (40, 7, 300))
    sources = [tokenize_records(load_records(file), tokenizer) for file in files]
    streams = [tokenize_stream(stream_records(file), tokenizer) for file in files]
    for name, options in MIXTURES.items():
        mixture = Mixture(names=("a", "b", "c"), **options)
        for part in ("train", "test") if mixture.test_size else ("train",):
            yield f"mixture, {name}: {part}", _rows(mix(sources, mixture, part)[0])
        if not (mixture.fractions or mixture.test_size):  # which a stream does not have
            yield f"stream of a mixture, {name}", _read(PackedStream(MixedStream(streams, mixture), 128))
    for stream in streams:
        if stream.encoder.tokenizer is not None:
            stream.encoder.process.close()


def _read(stream: PackedStream) -> dict[str, Any]:
    """The rows of a stream, and where it stands after the third."""
    rows, position = [], {}
    for row in stream:
        rows.append({name: np.array(values) for name, values in row.items()})
        position = stream.position() if len(rows) == 3 else position
    return _rows(rows) | {"position": position}


def _streams() -> Value:
    for kind, (look_ahead, strategy, overlong) in product(
        KINDS, ((1, "stream", "split"), (4, "stream", "truncate"), (16, "stream", "drop"), (4, "none", "split"))
    ):
        lengths = [length // 10 for length in _drawn(kind, 120)]
        documents = [{"input_ids": 1000 * number + np.arange(length)} for number, length in enumerate(lengths)]
        stream = PackedStream(documents, 64, look_ahead=look_ahead, strategy=strategy, overlong=overlong)
        name = f"{kind} documents, look-ahead {look_ahead}, {strategy}, {overlong}"
        yield f"stream of {name}", _read(stream)
        layout = {"micro_batch_size": 2, "accumulation_steps": 1, "dp": 3}
        ranks = [iter(StepStream(stream, **layout, dp_rank=rank)) for rank in range(3)]
        read = [next(rank) for _ in range(40) for rank in ranks]
        rows = [[row["input_ids"].tolist() for row in batch.rows] for batch in read]
        yield f"steps of {name}", [digest(json.dumps(rows)), digest(json.dumps([batch.lanes for batch in read]))]


FLAGS = {
    "by default": [],
    "shuffled": ["--shuffle_dataset", "True", "--seed", "5"],
    "wrapped": ["--packing_strategy", "wrapped"],
    "not packed": ["--packing", "False", "--overlong", "split"],
    "not balanced, truncated": ["--balance_packs", "False", "--overlong", "truncate"],
    "split pieces": ["--packing_strategy", "bfd_split"],
    "evaluation not packed": ["--eval_strategy", "steps", "--eval_packing", "False", "--test_split_size", "0.2"],
}


def _flags(folder: Path) -> Value:
    files = _sources(folder, (150, 30, 100))
    for name, flags in FLAGS.items():
        given = ["--model_name_or_path", "tiny", "--max_length", "64", "--output_dir", str(folder / "run")]
        given += ["--datasets", *files] if "evaluation" in name else ["--dataset_name", files[0]]
        overlong = [] if "--overlong" in flags else ["--overlong", "drop"]
        data = prepare_data(resolve(parse_flags([*given, *overlong, *flags]), read_profile({}), {}))
        found = _rows(data.rows) | {name: value for name, value in asdict(data.report).items() if value}
        found["costs"] = None if data.costs is None else digest(np.round(data.costs))
        yield f"flags, {name}", found | ({"evaluation": _rows(data.evaluation.rows)} if data.evaluation else {})


def golden(quick: bool) -> Value:
    with own_folder() as folder:  # which hides progress bars
        yield from _plans()
        yield from _samplers()
        yield from _mixtures(folder / "mixtures")
        yield from _streams()
        yield from _flags(folder / "flags")

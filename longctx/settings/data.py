"""Flags of the data: mixtures of data sets (TRL's `datasets:`, and weights), and data sets that are streamed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from longctx.settings.schema import FLOAT, TEXT, Rule
from longctx.settings.values import Settings
from longctx.untrusted.files import check_path


@dataclass(frozen=True)
class Source:
    """An entry of `datasets`, with the keys of TRL's DatasetConfig."""

    path: str
    """A file, folder or glob, or a name on the hub."""
    name: str | None = None
    """A configuration on the hub."""
    split: str = "train"
    columns: list[str] | None = None
    """Columns that are read. Default: all."""
    fraction: float | None = None
    """The share of its documents that is read."""

    def __str__(self) -> str:
        return self.path


_KINDS = {"name": TEXT, "split": TEXT, "fraction": FLOAT}
"""Kinds of a Source's values, which are the same as those of flags."""


_OF_ONE = ("dataset_name", "dataset_config", "dataset_train_split")
"""Flags of a single data set, which TRL ignores beside `datasets`."""


def mixture(settings: Settings) -> Settings:
    """Return settings in which `datasets` is a list of Source, and --streaming sets `dataset_streaming`.

    --test_split_size of a single data set makes it a mixture of one. TRL would ignore it there.

    Raises:
        ValueError: for an entry that names no data set, or with keys that are not built.
    """
    sources = [_source(entry) for entry in settings["datasets"] or []]
    size = settings["test_split_size"]
    if not sources:
        if size is None or settings["dataset_name"] is None:
            return settings.decided(datasets=[]).note(*_idle_names(settings))
        name, config, split = (settings[flag] for flag in _OF_ONE)
        one = Source(path=name, name=config, split=split)
        note = f"--test_split_size {size} of --dataset_name {name} is kept for evaluation; TRL ignores it here"
        settings = settings.note(note, *_idle_names(settings))  # of what was asked, which is no mixture
        return settings.decided(datasets=[one], dataset_weights=None, dataset_stopping_strategy="first_exhausted")
    streamed = settings["dataset_streaming"] or settings["streaming"]
    return settings.decided(datasets=sources, dataset_streaming=streamed).note(*_idle_names(settings))


def _idle_names(settings: Settings) -> Iterator[str]:
    """Yield notes on flags without effect in a mixture, or without one."""
    if not settings["datasets"]:
        for name in filter(settings.is_set, ("streaming", "dataset_weights", "dataset_stopping_strategy")):
            yield f"--{name} has no effect without --datasets"
    else:
        for name in filter(settings.is_set, _OF_ONE):
            yield f"--{name} has no effect with --datasets: each names its own"
        if settings["dataset_weights"] is None and settings.is_set("dataset_stopping_strategy"):
            yield "--dataset_stopping_strategy has no effect without --dataset_weights"
    if settings["test_split_size"] is not None and settings.is_set("dataset_test_split"):
        yield "--dataset_test_split has no effect with --test_split_size"


def _source(entry: object) -> Source:
    if isinstance(entry, Source):
        return entry
    values = {"path": entry} if isinstance(entry, str) else entry
    if not isinstance(values, Mapping) or not isinstance(values.get("path"), str) or not values["path"]:
        raise ValueError(
            f"datasets: {entry!r} is not a data set. Expected '- path: FILE, FOLDER OR NAME' in each entry."
        )
    path = values["path"]
    for name in ("data_dir", "data_files"):
        if values.get(name) is not None:
            raise ValueError(
                f"datasets: {path} sets {name} {values[name]}, which is not supported. Name the file, folder or glob "
                "itself: path: my_data/*.jsonl."
            )
    if unknown := sorted(set(map(str, values)) - {field.name for field in fields(Source)} - {"data_dir", "data_files"}):
        raise ValueError(
            f"datasets: {path} sets {unknown[0]}, which is not a key. The keys are path, name, split, columns and "
            "fraction. Give weights with --dataset_weights."
        )
    check_path("datasets", path)
    given = {name: value for name, value in values.items() if value is not None}
    for name in given.keys() & _KINDS:
        try:
            given[name] = _KINDS[name].convert(given[name])
        except (ValueError, TypeError):
            raise ValueError(f"datasets: {path} has {name} {given[name]!r}; expected {_KINDS[name].name}.") from None
    source = Source(**given)
    if source.columns is not None and not (
        isinstance(source.columns, list) and all(isinstance(column, str) for column in source.columns)
    ):
        raise ValueError(f"datasets: {path} has columns {source.columns!r}; expected a list of names.")
    return source


def _fractions(settings: Settings) -> list[Any]:
    return [source.fraction for source in settings["datasets"]]


MIXTURE_RULES = (
    Rule(
        "dataset_name datasets",
        lambda s: s["dataset_name"] is not None and s.is_set("datasets") and s["datasets"],
        lambda s: f"beside --datasets {' '.join(source.path for source in s['datasets'])}: keep one of the two",
    ),
    Rule(
        "dataset_weights datasets",
        lambda s: s["datasets"] and s["dataset_weights"] and len(s["dataset_weights"]) != len(s["datasets"]),
        lambda s: f"for {len(s['datasets'])} --datasets: give one weight for each data set",
    ),
    Rule(
        "dataset_weights datasets",
        lambda s: s["datasets"] and s["dataset_weights"] and set(_fractions(s)) != {None},
        "and a fraction in datasets are both given. Keep one of the two",
    ),
    Rule(
        "datasets",
        lambda s: not s["dataset_weights"] and len({fraction is None for fraction in _fractions(s)}) > 1,
        lambda s: f"with fractions {_fractions(s)}: set a fraction for all data sets or for none, as in TRL",
    ),
    Rule(
        "datasets",
        lambda s: any(fraction is not None and not 0 < fraction < math.inf for fraction in _fractions(s)),
        lambda s: f"with fractions {_fractions(s)}: each has to be a number above 0",
    ),
    Rule(
        "datasets dataset_streaming",
        lambda s: s["dataset_streaming"] and any(_fractions(s)),
        lambda s: (
            f"with fractions {_fractions(s)}: a stream cannot have a fraction, since its length is unknown. Use "
            "--dataset_weights, or leave out streaming"
        ),
    ),
    Rule(
        "test_split_size dataset_streaming",
        lambda s: s["test_split_size"] is not None and s["dataset_streaming"],
        "of a stream, whose length is unknown. Leave it out, and evaluate on --dataset_test_split of each data set",
    ),
    Rule(
        "test_split_size dataset_weights dataset_stopping_strategy",
        lambda s: (
            s["test_split_size"] is not None
            and s["dataset_weights"] is not None
            and s["dataset_stopping_strategy"] == "all_exhausted"
        ),
        "with --dataset_stopping_strategy all_exhausted would evaluate on documents that are trained on, too, since it "
        "repeats some. Use all_exhausted_without_replacement",
    ),
)

_NO_EPOCHS = "the length of a stream is not known, so neither are its epochs"
_WHOLE = {
    "balance_packs": (True, "packs are balanced over windows of the whole data set, and of a stream few are known"),
    "eval_strategy": ("epoch", _NO_EPOCHS),
    "logging_strategy": ("epoch", _NO_EPOCHS),
    "prepare_only": (True, "a stream is tokenised and packed as it is read"),
    "save_strategy": ("epoch", _NO_EPOCHS),
    "shuffle_dataset": (True, "a stream is read in order"),
}
"""Values that need the whole data set or its length, and why."""


def _needs_whole(name: str, value: object) -> Callable[[Settings], bool]:
    is_own = name == "balance_packs"  # whose default has this value
    return lambda s: s["dataset_streaming"] and s[name] == value and (s.is_set(name) or not is_own)


STREAM_RULES = (
    Rule(
        "dataset_streaming max_steps",
        lambda s: s["dataset_streaming"] and s["max_steps"] <= 0,
        lambda s: (
            f"with --max_steps {s['max_steps']}: the number of steps of a stream is unknown. Add --max_steps N; if the "
            "data set ends earlier, it is read again from its start"
        ),
    ),
    *(
        Rule(
            f"{name} dataset_streaming",
            _needs_whole(name, value),
            f"with --dataset_streaming True: {reason}. "
            + (f"Use --{name} steps" if value == "epoch" else f"Leave out --{name}")
            + ", or leave out --dataset_streaming",
        )
        for name, (value, reason) in _WHOLE.items()
    ),
    Rule(
        "packing_strategy dataset_streaming",
        lambda s: s["dataset_streaming"] and s["packing"] and s["packing_strategy"] != "bfd",
        "with --dataset_streaming True: documents of a stream are packed as they come, whole. Leave it out, and use "
        "--overlong split for documents longer than a sequence",
    ),
)

_IDLE = ("data_seed", "dataset_num_proc", "num_train_epochs", "train_sampling_strategy")
"""Flags without effect on a stream, which has no order, epochs or cache."""


def streams(settings: Settings) -> Settings:
    """Return settings of a stream, whose packs are not balanced, with notes on what that changes."""
    if not settings["dataset_streaming"]:
        return settings
    return settings.decided(balance_packs=False).note(
        "streaming: documents come in the order of the data set, and nothing is shuffled; the data set is read again "
        "from its start for as long as --max_steps says",
        *(f"--{name} has no effect on a stream" for name in _IDLE if settings.is_set(name)),
    )

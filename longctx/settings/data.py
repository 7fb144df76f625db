"""Flags of the data: mixtures of data sets (TRL's `datasets:`, and weights), and data sets that are streamed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from trl.scripts.utils import DatasetConfig

from longctx.settings.checks import check
from longctx.settings.values import Values
from longctx.untrusted.files import check_path

_OF_ONE = ("dataset_name", "dataset_config", "dataset_train_split")
"""Flags of a single data set, which TRL ignores beside `datasets`."""

_NEEDS_DATASETS = ("streaming", "dataset_weights", "dataset_stopping_strategy")


@check("datasets", "dataset_name", "streaming")
def take_mixture(values: Values) -> Values:
    """Check that the data is a single set or a mixture.

    `datasets` becomes a list of DatasetConfig, and --streaming sets --dataset_streaming.

    Raises:
        ValueError: for flags that conflict or are not implemented.
    """
    sources = [_source(entry) for entry in values["datasets"] or []]
    if not sources:
        values = values.note(
            *(f"--{name} has no effect without --datasets" for name in _NEEDS_DATASETS if values.is_given(name))
        )
        return values.set(datasets=[]) if values["test_split_size"] is None else _split_one(values)
    values = values.set(datasets=sources)
    if values["dataset_name"] is not None:
        paths = " ".join(source.path for source in sources)
        raise ValueError(f"--dataset_name {values['dataset_name']} beside --datasets {paths}: keep one of the two.")
    values = values.set(dataset_streaming=values["dataset_streaming"] or values["streaming"])
    _check_shares(values, sources)
    _check_test_split(values)
    idle = [name for name in _OF_ONE if values.is_given(name)]
    if values["dataset_weights"] is None and values.is_given("dataset_stopping_strategy"):
        idle.append("dataset_stopping_strategy")
    reasons = dict.fromkeys(_OF_ONE, "with --datasets: each names its own") | {
        "dataset_stopping_strategy": "without --dataset_weights"
    }
    return _note_test_split(values.note(*(f"--{name} has no effect {reasons[name]}" for name in idle)))


def _split_one(values: Values) -> Values:
    """Return values that split the single data set, as a mixture of one. TRL would ignore --test_split_size here."""
    name, config, split = (values[flag] for flag in _OF_ONE)
    values = values.set(
        datasets=[DatasetConfig(path=name, name=config, split=split)],
        dataset_weights=None,
        dataset_stopping_strategy="first_exhausted",
    )
    _check_test_split(values)
    size = values["test_split_size"]
    values = values.note(
        f"--test_split_size {size} of --dataset_name {name} is kept for evaluation; TRL ignores it here"
    )
    return _note_test_split(values)


def _note_test_split(values: Values) -> Values:
    """Note that no split is read where a part of the training split is kept."""
    if values["test_split_size"] is not None and values.is_given("dataset_test_split"):
        return values.note("--dataset_test_split has no effect with --test_split_size")
    return values


@check("datasets")
def _source(entry: object) -> DatasetConfig:
    """Check that an entry of `datasets` names a data set, and nothing that is not built.

    Raises:
        ValueError: for an entry that names no data set, or with keys that are not built.
    """
    values = asdict(entry) if isinstance(entry, DatasetConfig) else entry
    if not isinstance(values, Mapping) or not isinstance(values.get("path"), str):
        raise ValueError(
            f"datasets: {entry!r} is not a data set. Expected '- path: FILE, FOLDER OR NAME' in each entry."
        )
    if unknown := sorted(set(values) - set(DatasetConfig.__dataclass_fields__)):
        raise ValueError(
            f"datasets: {values['path']} sets {unknown[0]}, which is not a key. The keys are path, name, split, "
            f"columns and fraction. Give weights with --dataset_weights."
        )
    check_path("datasets", values["path"])
    source = DatasetConfig(**values)
    for name in ("data_dir", "data_files"):
        if getattr(source, name) is not None:
            raise ValueError(
                f"datasets: {source.path} sets {name} {getattr(source, name)}, which is not supported. Name the file, "
                "folder or glob itself: path: my_data/*.jsonl."
            )
    if source.columns is not None and not (
        isinstance(source.columns, list) and all(isinstance(column, str) for column in source.columns)
    ):
        raise ValueError(f"datasets: {source.path} has columns {source.columns!r}; expected a list of names.")
    return source


@check("dataset_weights", "datasets", "dataset_streaming")
def _check_shares(settings: Mapping[str, Any], sources: list[DatasetConfig]) -> None:
    """Check that data sets have one weight each, one fraction each, or neither."""
    weights, fractions = settings["dataset_weights"], [source.fraction for source in sources]
    if weights is not None:
        if not isinstance(weights, list) or len(weights) != len(sources):
            raise ValueError(
                f"--dataset_weights {weights} for {len(sources)} --datasets: give one weight for each data set."
            )
        _check_positive("--dataset_weights", weights)
        if any(fraction is not None for fraction in fractions):
            raise ValueError("--dataset_weights and a fraction in datasets are both given. Keep one of the two.")
        return
    if any(fraction is not None for fraction in fractions):
        if any(fraction is None for fraction in fractions):
            raise ValueError(
                f"datasets: fractions {fractions}: set a fraction for all data sets or for none, as in TRL."
            )
        _check_positive("datasets: fractions", fractions)
        if settings["dataset_streaming"]:
            raise ValueError(
                "datasets: a stream cannot have a fraction, since its length is unknown. Use --dataset_weights, or "
                "leave out streaming."
            )


@check("dataset_weights", "datasets")
def _check_positive(name: str, values: list[Any]) -> None:
    """Check that each weight or fraction is above 0."""
    if not all(isinstance(value, int | float) and 0 < value < math.inf for value in values):
        raise ValueError(f"{name} {values}: each has to be a number above 0. Leave out a data set of weight 0.")


@check("test_split_size", "dataset_streaming", "dataset_weights", "dataset_stopping_strategy")
def _check_test_split(settings: Mapping[str, Any]) -> None:
    """Check that the test split is a share of the documents, of which none is trained on."""
    size = settings["test_split_size"]
    if size is None:
        return
    if not 0 < size < 1:
        raise ValueError(f"--test_split_size {size} is not a share of the documents between 0 and 1.")
    if settings["dataset_streaming"]:
        raise ValueError(
            f"--test_split_size {size} of a stream, whose length is unknown. Leave it out, and evaluate on "
            "--dataset_test_split of each data set."
        )
    if settings["dataset_weights"] is not None and settings["dataset_stopping_strategy"] == "all_exhausted":
        raise ValueError(
            f"--test_split_size {size} with --dataset_stopping_strategy all_exhausted would evaluate on documents that "
            "are trained on, too, since it repeats some. Use all_exhausted_without_replacement."
        )


_NO_EPOCHS = "the length of a stream is not known, so neither are its epochs"
_REFUSED = {
    "balance_packs": (True, "packs are balanced over windows of the whole data set, and of a stream few are known"),
    "eval_strategy": ("epoch", _NO_EPOCHS),
    "logging_strategy": ("epoch", _NO_EPOCHS),
    "prepare_only": (True, "a stream is tokenised and packed as it is read"),
    "save_strategy": ("epoch", _NO_EPOCHS),
    "shuffle_dataset": (True, "a stream is read in order"),
}
"""Values that need the whole data set or its length, and why."""

_IDLE = ("data_seed", "dataset_num_proc", "num_train_epochs", "train_sampling_strategy")
"""Flags without effect on a stream, which has no order, epochs or cache."""


@check("dataset_streaming", "max_steps", "packing_strategy", *_REFUSED)
def stream(values: Values) -> Values:
    """Check that no other flag needs the whole data set, or its length.

    Raises:
        ValueError: for the first that does.
    """
    if not values["dataset_streaming"]:
        return values
    if values["max_steps"] <= 0:
        raise ValueError(
            f"--dataset_streaming True with --max_steps {values['max_steps']}: the number of steps of a stream is "
            f"unknown. Add --max_steps N; if the data set ends earlier, it is read again from its start."
        )
    if not values.is_given("balance_packs"):
        values = values.set(balance_packs=False)
    for name, (value, reason) in _REFUSED.items():
        if getattr(values[name], "value", values[name]) == value:
            remedy = f"Use --{name} steps" if value == "epoch" else f"Leave out --{name}"
            raise ValueError(
                f"--{name} {value} with --dataset_streaming True: {reason}. {remedy}, or leave out --dataset_streaming."
            )
    if values["packing"] and values["packing_strategy"] != "bfd":
        raise ValueError(
            f"--packing_strategy {values['packing_strategy']} with --dataset_streaming True: documents of a stream "
            "are packed as they come, whole. Leave it out, and use --overlong split for documents longer than a "
            "sequence."
        )
    return values.note(
        "streaming: documents come in the order of the data set, and nothing is shuffled; the data set is read again "
        "from its start for as long as --max_steps says",
        *(f"--{name} has no effect on a stream" for name in _IDLE if values.is_given(name)),
    )

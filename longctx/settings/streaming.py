"""Apply --dataset_streaming, and reject flags that need the whole data set or its length."""

from __future__ import annotations

from longctx.settings.checks import check
from longctx.settings.values import Values

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

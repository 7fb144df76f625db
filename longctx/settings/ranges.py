"""The range of every numeric flag: values that are not finite, or that an optimizer cannot use, are refused."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from longctx.settings.checks import check


@dataclass(frozen=True, kw_only=True)
class _Range:
    """Numbers of at least 0, up to a limit."""

    most: float = math.inf
    below: float = math.inf
    remedy: str = ""

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and 0 <= value <= self.most and value < self.below

    def __str__(self) -> str:
        if self.most < math.inf:
            return f"from 0 to {self.most:,}"
        return "of at least 0" + (f" and below {self.below:g}" if self.below < math.inf else "")


_FP32 = _Range(below=3.4e38)
"""The range of fp32: torch converts these numbers to the dtype of the weights."""
_SEED = _Range(most=2**32 - 1)
"""Seeds that NumPy's generators take."""

_RANGES: Mapping[str, _Range] = {
    "adam_beta1": _Range(below=1),
    "adam_beta2": _Range(below=1),
    "adam_epsilon": _FP32,
    "early_stopping_threshold": _Range(remedy="It is an improvement in the metric's unit"),
    "data_seed": _SEED,
    "dataloader_num_workers": _Range(),
    "eval_delay": _Range(),
    "label_smoothing_factor": _Range(most=1),
    "learning_rate": _FP32,
    "logging_steps": _Range(),
    "max_grad_norm": _Range(remedy="Use 0 for no clipping"),
    "num_train_epochs": _Range(),
    "router_aux_loss_coef": _FP32,
    "save_steps": _Range(),
    "seed": _SEED,
    "warmup_steps": _Range(),
    "weight_decay": _FP32,
}
"""Limits by flag. Flags that no entry names may have any finite value."""


@check(*_RANGES)
def check_numbers(settings: Mapping[str, Any]) -> None:
    """Check that every number is finite, and in its range.

    Raises:
        ValueError: with the flag, its value, and the range.
    """
    for name, value in settings.items():
        for number in _floats(value):
            if not math.isfinite(number):
                raise _out_of_range(name, value, _RANGES.get(name, ""))
        if name in _RANGES and value is not None and value not in _RANGES[name]:
            raise _out_of_range(name, value, _RANGES[name])


def _floats(value: Any) -> Iterator[float]:
    """Yield the floating-point numbers of a setting, also those in lists and mappings."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _floats(item)
    elif isinstance(value, Mapping):
        yield from _floats(list(value.values()))


def _out_of_range(name: str, value: Any, expected: _Range | str) -> ValueError:
    remedy = f" {expected.remedy}." if isinstance(expected, _Range) and expected.remedy else ""
    return ValueError(f"--{name} {value} is out of range: expected a finite number {expected}".rstrip() + f".{remedy}")

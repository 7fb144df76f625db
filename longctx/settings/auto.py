"""Forecast a run's steps, and choose --sp and --memory by forecast where they are auto.

A forecast errs, so a run that is predicted not to fit starts all the same, with a warning, and auto keeps a tenth of
the memory free.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from longctx.forecast.expected_step import FREE_PART, ExpectedStep
from longctx.forecast.memory_options import ALL, AUTO
from longctx.forecast.memory_presets import PRESETS, memory_flags
from longctx.settings.run import Run
from longctx.settings.values import Settings

AUTO_FLAGS = ("sp", "memory")
"""Flags that can be auto."""

Resolve = Callable[[Settings], Run]
"""Resolves values in which no flag is auto; raises ValueError if such a run is not possible."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """A run that auto can stand for."""

    run: Run
    forecast: ExpectedStep
    memory_options: Mapping[str, Any] = field(default_factory=dict)
    """Values of flags about memory, besides its preset."""

    @property
    def flags(self) -> str:
        """The flags that ask for this run."""
        dims = self.run.dims
        flags = {"sp": dims.sp, "memory": self.run.settings["memory"], **self.memory_options}
        if dims.world_size > dims.sp * dims.dp_replicate and not self.run.launched:
            flags["num_processes"] = dims.world_size
        return shlex.join(word for name, value in flags.items() for word in (f"--{name}", str(value)))


def choose_layout(values: Settings, world_size: int, resolve: Resolve) -> Run:
    """Check that a run with --sp auto or --memory auto has an arrangement, and return the best one.

    Args:
        world_size: processes of the run.
        resolve: resolves values in which neither flag is auto.

    Raises:
        ValueError: if no arrangement can run; the message is that of the first one.
    """
    asked = " and ".join(f"--{name} auto" for name in AUTO_FLAGS if values[name] == AUTO and values.is_set(name))
    ranked, obstacles = _ranked(values, world_size, resolve)
    if not ranked and asked:
        raise ValueError(f"{asked}: no arrangement can run. {obstacles[0]}")
    if not ranked:
        raise obstacles[0]
    best = ranked[0]
    others = [option for option in ranked[1:] if option.forecast.used <= 1 - FREE_PART]
    return replace(best.run, layout_reason=_reason(asked, best, others[0] if others else None))


def one_group(values: Settings, world_size: int, resolve: Resolve) -> Settings:
    """Check that all devices can share sequences, and return the values that --sp all stands for.

    One group of all devices takes as many sequences at a time as the groups of --sp auto would together, or
    --per_device_train_batch_size if that is given. The steps have the same sequences, and the plan spreads their
    documents over all devices, so that none of them waits for the group with the longest documents.

    Raises:
        ValueError: if no arrangement can run.
    """
    sequences, why = values["per_device_train_batch_size"], "--per_device_train_batch_size"
    if not values.is_set("per_device_train_batch_size"):
        groups = choose_layout(values.with_("auto", sp=AUTO, num_processes=world_size), world_size, resolve).dims
        sequences, why = groups.world_size // groups.sp, f"as many as groups of --sp {groups.sp} would take"
    note = f"--sp {ALL}: one group of {world_size} devices takes {sequences} sequences at a time, {why}"
    return values.with_("auto", sp=world_size, num_processes=world_size, per_device_train_batch_size=sequences).note(
        note
    )


def with_forecast(run: Run, values: Settings, resolve: Resolve) -> Run:
    """Return the run with its forecast, and with a warning if it is predicted not to fit."""
    predicted = run.forecast_for()
    run = replace(run, forecast=predicted)
    if predicted.fits:
        return run
    free = values.with_("auto", **dict.fromkeys(AUTO_FLAGS, AUTO))
    world_size = run.dims.world_size if run.launched or run.use_cpu else max(run.dims.world_size, run.hardware.gpus)
    fitting = [option for option in _ranked(free, world_size, resolve)[0] if option.forecast.fits]
    remedy = "No --sp and --memory do; use a shorter --max_length, more devices, or an adapter (--use_peft True)"
    if fitting:
        remedy = f"{fitting[0].flags} is predicted to fit ({fitting[0].forecast.describe()})"
    note = f"this run is predicted not to fit ({predicted.describe()}). {remedy}"
    return replace(run, notes=(*run.notes, note))


def _ranked(values: Settings, world_size: int, resolve: Resolve) -> tuple[list[Option], list[ValueError]]:
    """Return what can run, the best first, and the errors of what cannot."""
    options, obstacles = [], []
    for flags in _possible(values, world_size):
        try:
            run = resolve(values.with_("auto", **flags))
            predicted = run.forecast_for()
        except ValueError as error:
            obstacles.append(error)
        else:
            options.append(Option(run=run, forecast=predicted))
    if values["memory"] == AUTO:
        options += _with_memory_options(values, options, resolve)
    return sorted(options, key=_rank), obstacles


def _with_memory_options(values: Settings, options: list[Option], resolve: Resolve) -> list[Option]:
    """Return the run with the fastest memory options for each degree and backend, where these are faster."""
    groups: dict[tuple[int, str], list[Option]] = {}
    for option in options:
        groups.setdefault((option.run.dims.sp, option.run.backend.name), []).append(option)
    found = []
    for (sp, _), group in groups.items():
        run = group[0].run
        memory_options = run.fastest_memory_options()
        if memory_options is None:
            continue
        memory = memory_options.pop("memory", "balanced")
        flags = memory_flags(memory_options)
        degree = {"sp": sp, "num_processes": run.dims.world_size} if values["sp"] == AUTO else {}
        with suppress(ValueError):
            tuned = resolve(values.with_("auto", **degree, memory=memory, **flags))
            predicted = tuned.forecast_for()
            if all(_is_faster(predicted, other.forecast) for other in group):
                found.append(Option(run=tuned, forecast=predicted, memory_options=flags))
    return found


def _is_faster(one: ExpectedStep, other: ExpectedStep) -> bool:
    """Whether a forecast leaves more room where the other leaves too little, or else is faster by a hundredth."""
    if _level(one) != _level(other):
        return _level(one) < _level(other)
    return (one.tokens_per_second_per_device or 0) > 1.01 * (other.tokens_per_second_per_device or 0)


def _possible(values: Settings, world_size: int) -> Iterator[dict[str, Any]]:
    """Yield the flags that auto can stand for."""
    degrees: list[dict[str, Any]] = [{}]
    if values["sp"] == AUTO:
        degrees = [{"sp": sp, "num_processes": world_size} for sp in range(1, world_size + 1) if world_size % sp == 0]
    for degree in degrees:
        for memory in PRESETS if values["memory"] == AUTO else [values["memory"]]:
            yield degree | {"memory": memory}


def _rank(option: Option) -> tuple[float, ...]:
    """Return a key that is smallest for the best option.

    What leaves a tenth of the memory free comes first, by speed; then what fits, by speed; then what needs least.
    Where speeds are unknown, offloading counts as slowest, and else a small sp as fastest.
    """
    predicted, level = option.forecast, _level(option.forecast)
    if not predicted.fits:
        return level, predicted.used
    if predicted.tokens_per_second_per_device is None:
        return (
            level,
            option.run.memory_options.offloads,
            option.run.dims.sp,
            option.run.memory_options.activation_checkpointing,
        )
    return level, -predicted.tokens_per_second_per_device


def _level(predicted: ExpectedStep) -> int:
    """Return 0 for what leaves a tenth of the memory free, 1 for what fits, and 2 for what does not."""
    return (predicted.used > 1 - FREE_PART) + (predicted.used > 1)


def _reason(asked: str, best: Option, second: Option | None) -> str:
    """Return why the option was chosen, and the next best one."""
    if best.forecast.used <= 1 - FREE_PART:
        why = f"predicted to be the fastest that leaves {FREE_PART:.0%} of memory free"
    else:
        why = "predicted to need the least memory" if not best.forecast.fits else "the fastest that is predicted to fit"
    text = f"{best.flags} ({asked or 'by default'}: {why}"
    if second is not None:
        text += f"; next best: {second.flags}, {second.forecast.describe().removesuffix(' (predicted)')}"
    return f"{text})"

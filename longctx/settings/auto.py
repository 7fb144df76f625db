"""Forecast a run's steps, and choose --sp and --memory by forecast where they are auto.

A forecast errs, so a run that is predicted not to fit starts all the same, with a warning, and auto keeps a tenth of
the memory free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from longctx.forecast.cost import FREE_PART
from longctx.forecast.documents import assumed
from longctx.forecast.memory_options import ALL, AUTO
from longctx.forecast.search import Choice, as_flags, search
from longctx.settings.arrange import arranged
from longctx.settings.run import Facts, Run
from longctx.settings.values import Settings

AUTO_FLAGS = ("sp", "memory")
"""Flags that can be auto."""

SMALLER = 0.95
"""What is to be tried where memory did not suffice needs at most this part of it on a device."""


def choose_layout(values: Settings, world_size: int, facts: Facts) -> Run:
    """Check that a run with --sp auto or --memory auto has an arrangement, and return the best one.

    Args:
        world_size: processes of the run.

    Raises:
        ValueError: if no arrangement can run; the message is that of the first one.
    """
    asked = " and ".join(f"--{name} auto" for name in AUTO_FLAGS if values[name] == AUTO and values.is_set(name))
    runs, obstacles = _possible(values, world_size, facts)
    order = iter(_ranked(values, runs))
    for best, run in arranged(((one, _with(values, one)) for one in order), facts, obstacles):
        rest, launched = list(order), values["num_processes"]
        second = next((one for one in rest if one.cost.level == 0), None)
        smaller = (one for one in rest if one.cost.fits and one.cost.of_device < SMALLER * best.cost.of_device)
        return replace(
            run,
            forecast=best.cost,
            layout_reason=_reason(asked, values, best, second),
            next_choice=next((_flags(one, launched) for one in smaller), ""),
        )
    raise ValueError(f"{asked}: no arrangement can run. {obstacles[0]}") if asked else obstacles[0]


def one_group(values: Settings, world_size: int, facts: Facts) -> Settings:
    """Check that all devices can share sequences, and return the values that --sp all stands for.

    One group of all devices takes as many sequences at a time as the groups of --sp auto would together, or
    --per_device_train_batch_size if that is given. The steps have the same sequences, and the plan spreads their
    documents over all devices, so that none of them waits for the group with the longest documents.

    Raises:
        ValueError: if no arrangement can run.
    """
    sequences, why = values["per_device_train_batch_size"], "--per_device_train_batch_size"
    if not values.is_set("per_device_train_batch_size"):
        groups = choose_layout(values.with_("auto", sp=AUTO, num_processes=world_size), world_size, facts).dims
        sequences, why = groups.world_size // groups.sp, f"as many as groups of --sp {groups.sp} would take"
    note = f"--sp {ALL}: one group of {world_size} devices takes {sequences} sequences at a time, {why}"
    return values.with_("auto", sp=world_size, num_processes=world_size, per_device_train_batch_size=sequences).note(
        note
    )


def with_forecast(run: Run, values: Settings) -> Run:
    """Return the run with its forecast, and with a warning if it is predicted not to fit."""
    predicted = run.cost()
    run = replace(run, forecast=predicted)
    if predicted.fits:
        return run
    free = values.with_("auto", **dict.fromkeys(AUTO_FLAGS, AUTO))
    launched = run.facts.launcher.launched
    world_size = run.world_size if launched or run.use_cpu else max(run.world_size, run.facts.gpus)
    remedy = "No --sp and --memory do; use a shorter --max_length, more devices, or an adapter (--use_peft True)"
    fitting = (one for one in _ranked(free, _possible(free, world_size, run.facts)[0]) if one.cost.fits)
    for one, _ in arranged(((one, _with(free, one)) for one in fitting), run.facts, []):
        remedy = f"{_flags(one, world_size if launched else None)} is predicted to fit ({one.cost.describe()})"
        break
    note = f"this run is predicted not to fit ({predicted.describe()}). {remedy}"
    return run.decide(note)


def _possible(values: Settings, world_size: int, facts: Facts) -> tuple[list[Run], list[ValueError]]:
    """Return a run for each --sp that auto can stand for, with plain memory options, and the errors of the others."""
    degrees = [sp for sp in range(1, world_size + 1) if world_size % sp == 0] if values["sp"] == AUTO else [None]
    memory = "balanced" if values["memory"] == AUTO else values["memory"]
    flags = ({} if sp is None else {"sp": sp, "num_processes": world_size} for sp in degrees)
    obstacles: list[ValueError] = []
    each = ((None, values.with_("auto", **degree, memory=memory)) for degree in flags)
    runs = [run for _, run in arranged(each, facts, obstacles)]
    return runs, obstacles


def _ranked(values: Settings, runs: Sequence[Run]) -> list[Choice]:
    """Return the best memory options for each run, the best of all first.

    Plain options come last, for where nothing fits, since a run may not offload more than the host has.
    """
    if not runs:
        return []
    first, length = runs[0], runs[0].settings["max_length"]
    row = assumed(length, packed=first.settings["packing"])
    found = partial(
        search,
        [run.shape for run in runs],
        first.machine,
        length,
        row,
        fixed=first.asked_memory_options,
        counts_experts=first.counts_experts,
    )
    presets = [AUTO, "balanced"] if values["memory"] == AUTO else [values["memory"]]
    return [one for memory in presets for one in found(memory=memory)]


def _with(values: Settings, choice: Choice) -> Settings:
    """Return values that ask for a choice."""
    degree = {"sp": choice.shape.sp, "num_processes": choice.shape.world_size} if values["sp"] == AUTO else {}
    return values.with_("auto", **degree, **choice.memory_flags)


def _flags(choice: Choice, launched: int | None) -> str:
    """Return the flags that ask for a choice.

    Args:
        launched: processes that a launcher has started; None if there is no launcher.
    """
    shape = choice.shape
    flags = {"sp": shape.sp, **choice.memory_flags}
    if launched is None and shape.world_size > shape.sp * shape.dp_replicate:
        flags["num_processes"] = shape.world_size
    return as_flags(flags)


def _reason(asked: str, values: Settings, best: Choice, second: Choice | None) -> str:
    """Return why the option was chosen, and the next best one."""
    launched = values["num_processes"]
    if best.cost.level == 0:
        why = f"predicted to be the fastest that leaves {FREE_PART:.0%} of memory free"
    else:
        why = "predicted to need the least memory" if best.cost.level == 2 else "the fastest that is predicted to fit"
    text = f"{_flags(best, launched)} ({asked or 'by default'}: {why}"
    if second is not None:
        text += f"; next best: {_flags(second, launched)}, {second.cost.describe()}"
    return f"{text})"

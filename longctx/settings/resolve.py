"""Resolve flags, profile, environment and model config to one run, in stages that change nothing in place.

Nothing here starts a process, opens data or reads weights, so a bad combination costs seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from longctx.attention.backends import BACKENDS
from longctx.data import STDLIB
from longctx.data.kinds import PAIRS
from longctx.forecast.learned import corrected
from longctx.forecast.memory_options import ALL, AUTO
from longctx.forecast.memory_presets import asked_memory_options
from longctx.launch.spawn import device_count
from longctx.launch.store import STORE_FILE, share_decision
from longctx.machine.here import Machine
from longctx.model.allow_list import num_heads
from longctx.model.tiny import TINY
from longctx.ranks import is_first_rank
from longctx.ranks.agreement import RefusedOnAllRanks
from longctx.settings.arrange import arrange, arranged
from longctx.settings.auto import AUTO_FLAGS, choose_layout, one_group, with_forecast
from longctx.settings.launcher import Launcher, read_profile
from longctx.settings.machine_checks import REQUIRED_VERSIONS, check_versions
from longctx.settings.model_config import check_layer_classes, configure_model
from longctx.settings.processes import count_all_processes
from longctx.settings.rules import fill
from longctx.settings.run import Facts, Run
from longctx.settings.values import Settings
from longctx.training.checkpoint.files import read_manifest
from longctx.training.checkpoint.folder import check_output, checkpoint_of, default_folder, is_restarted

REFUSED_SECONDS = 3.0
"""By how much ranks outlive a rank 0 that refuses, since a launcher stops all of them once one has ended."""


def resolve_together(
    settings: Settings,
    launcher: Launcher,
    env: Mapping[str, str],
    complete: Callable[[Run], Run] = lambda run: run,
) -> Run:
    """Return the resolved run on all ranks of a launcher, or in a single process.

    Rank 0 refuses for all, and decides what depends on the free memory and the speed of a device. Ranks without the
    address of a place to meet decide alone, until the process group refuses them.

    Args:
        settings: as `fill` returns them.
        complete: what else is decided, or refused by a ValueError.

    Raises:
        RefusedOnAllRanks: if rank 0 refuses the run.
        ValueError: for what this process alone cannot carry out; see `resolve`.
    """
    alone = launcher.world_size in (None, 1) or not {STORE_FILE, "MASTER_ADDR"} & env.keys()
    if alone or settings["dry_run"] or settings["prepare_only"]:
        return complete(_resolve(settings, launcher, env))
    seconds = settings["ddp_timeout"]
    if not is_first_rank():
        decided = share_decision(None, seconds)
        if "refused" in decided:
            time.sleep(REFUSED_SECONDS)
            raise RefusedOnAllRanks(decided["refused"], is_mine=False)
        return complete(_resolve(settings, launcher, env, decided))
    try:
        run = complete(_resolve(settings, launcher, env))
    except BaseException as error:
        refused = str(error) if isinstance(error, ValueError) else f"rank 0 stopped with {type(error).__name__}"
        share_decision({"refused": refused}, seconds)
        if isinstance(error, ValueError):
            raise RefusedOnAllRanks(refused, is_mine=True) from error
        raise
    share_decision(run.decided, seconds)
    return run


def resolve(settings: Settings, launcher: Launcher, env: Mapping[str, str]) -> Run:
    """Return the resolved run of one process.

    Args:
        settings: as `parse_flags` returns them.
        env: the environment, for the launcher's ranks and nodes.

    Raises:
        ValueError: for the first setting that cannot be carried out exactly, with its value, limit and remedy.
    """
    return _resolve(fill(settings, launcher), launcher, env)


def _resolve(
    settings: Settings, launcher: Launcher, env: Mapping[str, str], decided: Mapping[str, Any] | None = None
) -> Run:
    """Return the resolved run.

    Args:
        settings: as `fill` returns them.
        decided: what another process has decided, as `Run.decided` has it.
    """
    check_versions(REQUIRED_VERSIONS, "longctx")
    gpus = device_count()
    machine = Machine.here(gpus)
    if settings["learned"] and machine.is_known:
        machine = corrected(machine)
    try:
        if decided is not None:
            settings = settings.decided(output_dir=decided["output_dir"]).with_("auto", **decided["chosen"])
        settings, model_config = configure_model(_take_output(_of_method(settings), env))
        check_layer_classes(launcher.layer_classes, model_config)
        facts = Facts(model_config=model_config, machine=machine, launcher=launcher, gpus=gpus, env=env)
        if decided is None:
            return _choose(settings, facts)
        run = arrange(settings if settings["memory"] else settings.decided(memory="balanced"), facts)
        return replace(run, layout_reason=decided["reason"], forecast=run.cost())
    except ValueError as error:
        raise ValueError(settings.as_asked(str(error))) from error


def _choose(settings: Settings, facts: Facts) -> Run:
    """Return the run with its forecast, and with what --sp and --memory stand for.

    --memory is auto on GPUs whose speeds are known, unless a flag or a key chooses memory options itself.
    """
    machine, world_size = facts.machine, count_all_processes(settings, facts.launcher, facts.gpus)
    settings, reason = _as_before(settings, world_size, "CPU" if settings["use_cpu"] else machine.device)
    if settings["memory"] is None:
        # On an H200, `fastest` took 1.31 and 1.17 times TRL's speed where `balanced` took 0.78 and 0.95
        # (benchmarks/results/gpu_H200_settled_2026-11-27.md).
        is_known = machine.is_known and not (settings["use_cpu"] or machine.is_cpu or asked_memory_options(settings))
        settings = settings.decided(memory=AUTO if is_known else "balanced")
    if settings["sp"] == ALL:
        settings = one_group(settings, world_size, facts)
    if AUTO in (settings["sp"], settings["memory"]):
        run = choose_layout(settings, world_size, facts)
    else:
        run = replace(arrange(settings, facts), layout_reason=reason)
    return with_forecast(run, settings)


def _as_before(settings: Settings, world_size: int, device: str) -> tuple[Settings, str]:
    """Return settings with what auto chose when a run that goes on began, and why; on other devices, with a note.

    Free memory and speeds vary from day to day, and another choice could round differently.
    """
    free = {name for name in AUTO_FLAGS if settings[name] in ((AUTO, ALL) if name == "sp" else (AUTO, None))}
    asked = settings["resume_from_checkpoint"]
    checkpoint = checkpoint_of(asked, Path(settings["output_dir"])) if asked is not None and free else None
    if checkpoint is None:
        return settings, ""
    before = read_manifest(checkpoint).choice
    if not before:
        return settings, ""
    chosen, devices = before["chosen"], f"{world_size} × {device}"
    others = {name for name, value in chosen.items() if settings[name] != value and settings.is_set(name)} - free
    if devices != before["devices"]:
        why = f"had {before['devices']}, and this one has {devices}"
    elif others or ("sp" in free) != ("sp" in chosen):
        why = "was started with other flags"
    else:
        return settings.with_("auto", **chosen), f"{before['reason']}, as when the run began"
    return settings.note(f"auto chooses anew: the run of {checkpoint} {why}"), ""


def spreads(settings: Settings, facts: Facts, world_size: int) -> list[Run]:
    """Return a run for every way to spread it over the devices of a machine that is described, and not at hand.

    A sequence is shared by a part of a node or by whole nodes. Beyond a node, a hybrid only has the widest exchange
    that stays in one. On one device, DeepSpeed is another way, which keeps states on the host. --sp, --sp_backend,
    --ring_size and --engine that were asked for are kept.

    Args:
        settings, facts: as `described` returns them.

    Raises:
        ValueError: if there is none, as `resolve`.
    """
    obstacles: list[ValueError] = []
    ways = _ways(settings, num_heads(facts.model_config)[0], facts.machine.per_node, world_size)
    each = ((None, settings.with_("auto", **flags)) for flags in ways)
    runs = [run for _, run in arranged(each, facts, obstacles)]
    if not runs:
        raise obstacles[0]
    return runs


def resolve_on(settings: Settings, machine: Machine, world_size: int) -> Run:
    """Return the resolved run of a machine that is described, and not at hand.

    Raises:
        ValueError: as `resolve`.
    """
    return _choose(*described(settings, machine, world_size))


def described(settings: Settings, machine: Machine, world_size: int) -> tuple[Settings, Facts]:
    """Return what a run on a machine that is described, and not at hand, is arranged from."""
    launcher = read_profile({})
    if world_size > 1:
        launcher = replace(launcher, world_size=world_size, local_world_size=machine.per_node)
    settings, model_config = configure_model(_of_method(fill(settings, launcher)))
    return settings, Facts(
        model_config=model_config,
        machine=machine,
        launcher=launcher,
        gpus=machine.per_node,
        env={"LOCAL_WORLD_SIZE": str(machine.per_node)},
        is_here=False,
    )


def _ways(settings: Settings, heads: int, per_node: int, world_size: int) -> Iterator[dict[str, Any]]:
    """Yield the flags of each way of `spreads`."""
    asked = {name: settings[name] for name in ("sp", "sp_backend", "ring_size") if settings.is_set(name)}
    asked = {name: value for name, value in asked.items() if value not in (AUTO, ALL, None)}
    memory = "balanced" if settings["memory"] in (None, AUTO) else settings["memory"]
    for sp in (n for n in range(1, world_size + 1) if world_size % n == 0 and (per_node % n == 0 or n % per_node == 0)):
        ways: list[dict[str, Any]] = [{"sp_backend": AUTO, "ring_size": None}] if sp == 1 else []
        for name, backend in BACKENDS.spread.items() if sp > 1 else ():
            of = [one for one in backend.arrangements(sp) if heads % one.ulysses == 0]
            if sp > per_node and backend.has_ring_size:
                of = [one for one in of if one.ulysses <= per_node][:1]
            ways += [{"sp_backend": name, "ring_size": one.ring if backend.has_ring_size else None} for one in of]
        if world_size == 1 and not settings.is_set("engine"):
            ways.append({**ways[0], "engine": "deepspeed"})
        for way in ways:
            if sp == asked.get("sp", sp) and all(way[name] == asked[name] for name in way.keys() & asked.keys()):
                yield {"sp": sp, "memory": memory, **way}


def _of_method(settings: Settings) -> Settings:
    """Return the settings with what the method's records need."""
    if not settings.method.reads_pairs:
        return settings
    return settings.decided(dataset_text_field=PAIRS, padding_free=True)


def _take_output(values: Settings, env: Mapping[str, str]) -> Settings:
    """Return values with the output folder, after a check that this run may write there; restarts go on in it."""
    asked = values["resume_from_checkpoint"]
    folder = Path(values["output_dir"]) if values["output_dir"] else default_folder(resuming=asked is not None)
    values = values.decided(output_dir=str(folder))
    restarted = is_restarted(folder, env)
    if restarted:
        values = values.decided(resume_from_checkpoint=asked or "auto", overwrite_output_dir=False)
    if not values["prepare_only"]:
        paths = [(name, values[name]) for name in ("model_name_or_path", "dataset_name", "chat_template_path")]
        paths += [("datasets", data_set.path) for data_set in values["datasets"] or []]
        check_output(
            folder,
            asked=values["resume_from_checkpoint"],
            overwrite=values["overwrite_output_dir"],
            timeout=values["ddp_timeout"] if is_first_rank() and not restarted else None,
            reads=[(flag, path) for flag, path in paths if path and path not in (TINY, STDLIB)],
        )
    return values

"""Resolve flags, profile, environment and model config to one run, in stages that change nothing in place.

Nothing here starts a process, opens data or reads weights, so a bad combination costs seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from longctx.attention.backends import BACKENDS
from longctx.attention.cost import Setup
from longctx.data import STDLIB
from longctx.data.kinds import PAIRS
from longctx.forecast.learned import corrected
from longctx.forecast.memory_options import ALL, AUTO
from longctx.forecast.memory_presets import asked_memory_options
from longctx.launch.spawn import device_count
from longctx.launch.store import STORE_FILE, share_decision
from longctx.layers.compiled import check_compile
from longctx.layers.liger import check_liger_machine, liger_parts
from longctx.machine.here import Machine, devices_per_node
from longctx.model.adapter import check_adapter, check_quantization
from longctx.model.allow_list import num_heads
from longctx.model.tiny import TINY
from longctx.ranks import is_first_rank
from longctx.ranks.agreement import RefusedOnAllRanks
from longctx.settings.auto import AUTO_FLAGS, choose_layout, one_group, with_forecast
from longctx.settings.engine import choose, choose_engine, clipping, kernel_notes, precision_notes
from longctx.settings.launcher import Launcher, read_profile
from longctx.settings.machine_checks import (
    LIGER_VERSIONS,
    PEFT_VERSIONS,
    QLORA_VERSIONS,
    REQUIRED_VERSIONS,
    check_machine,
    check_versions,
)
from longctx.settings.model_config import check_layer_classes, configure_model, limit_length
from longctx.settings.processes import Processes, accumulate, check_dp_shard, count_all_processes, count_processes
from longctx.settings.rules import fill
from longctx.settings.run import Run, arrange, given_multiple, pad_multiple
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
        complete: what else is decided, or refused by a ValueError.

    Raises:
        RefusedOnAllRanks: if rank 0 refuses the run.
        ValueError: for what this process alone cannot carry out; see `resolve`.
    """
    alone = launcher.world_size in (None, 1) or not {STORE_FILE, "MASTER_ADDR"} & env.keys()
    if alone or settings["dry_run"] or settings["prepare_only"]:
        return complete(resolve(settings, launcher, env))
    seconds = settings["ddp_timeout"]
    if not is_first_rank():
        decided = share_decision(None, seconds)
        if "refused" in decided:
            time.sleep(REFUSED_SECONDS)
            raise RefusedOnAllRanks(decided["refused"], is_mine=False)
        return complete(resolve(settings, launcher, env, decided))
    try:
        run = complete(resolve(settings, launcher, env))
    except BaseException as error:
        refused = str(error) if isinstance(error, ValueError) else f"rank 0 stopped with {type(error).__name__}"
        share_decision({"refused": refused}, seconds)
        if isinstance(error, ValueError):
            raise RefusedOnAllRanks(refused, is_mine=True) from error
        raise
    share_decision(run.decided, seconds)
    return run


def resolve(
    settings: Settings, launcher: Launcher, env: Mapping[str, str], decided: Mapping[str, Any] | None = None
) -> Run:
    """Return the resolved run.

    Args:
        settings: as `parse_flags` returns them.
        env: the environment, for the launcher's ranks and nodes.
        decided: what another process has decided, as `Run.decided` has it.

    Raises:
        ValueError: for the first setting that cannot be carried out exactly, with its value, limit and remedy.
    """
    check_versions(REQUIRED_VERSIONS, "longctx")
    gpus = device_count()
    machine = Machine.here(gpus)
    if settings["learned"] and machine.is_known:
        machine = corrected(machine)
    settings = fill(settings, launcher)
    try:
        return _resolved(settings, launcher, env, machine, gpus, decided)
    except ValueError as error:
        raise ValueError(settings.as_asked(str(error))) from error


def _resolved(
    settings: Settings,
    launcher: Launcher,
    env: Mapping[str, str],
    machine: Machine,
    gpus: int,
    decided: Mapping[str, Any] | None,
) -> Run:
    if decided is not None:
        settings = settings.decided(output_dir=decided["output_dir"]).with_("auto", **decided["chosen"])
    settings, model_config = configure_model(_take_output(_of_method(settings), env))
    check_layer_classes(launcher.layer_classes, model_config)
    arranged = partial(_arranged, model_config=model_config, launcher=launcher, env=env, machine=machine, gpus=gpus)
    if decided is not None:
        run = arranged(settings if settings["memory"] else settings.decided(memory="balanced"))
        return replace(run, layout_reason=decided["reason"], forecast=run.cost())
    world_size = count_all_processes(settings, launcher, gpus)
    settings, reason = _as_before(settings, world_size, "CPU" if settings["use_cpu"] else machine.device)
    if settings["memory"] is None:
        settings = settings.decided(memory=_memory_by_default(settings, machine))
    if settings["sp"] == ALL:
        settings = one_group(settings, world_size, arranged)
    if AUTO in (settings["sp"], settings["memory"]):
        run = choose_layout(settings, world_size, arranged)
    else:
        run = replace(arranged(settings), layout_reason=reason)
    return with_forecast(run, settings, arranged)


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


def spreads(settings: Settings, machine: Machine, world_size: int) -> list[Run]:
    """Return a run for every way to spread it over the devices of a machine that is described, and not at hand.

    A sequence is shared by a part of a node or by whole nodes. Beyond a node, a hybrid only has the widest exchange
    that stays in one. On one device, DeepSpeed is another way, which keeps states on the host. --sp, --sp_backend,
    --ring_size and --engine that were asked for are kept.

    Raises:
        ValueError: if there is none, as `resolve`.
    """
    settings, model_config, arranged = described(settings, machine, world_size)
    runs, obstacles = [], []
    for flags in _ways(settings, num_heads(model_config)[0], machine.per_node, world_size):
        try:
            runs.append(arranged(settings.with_("auto", **flags)))
        except ValueError as error:
            obstacles.append(error)
    if not runs:
        raise obstacles[0]
    return runs


def described(
    settings: Settings, machine: Machine, world_size: int
) -> tuple[Settings, PretrainedConfig, Callable[[Settings], Run]]:
    """Return settings and their model, and what resolves them on a machine that is described, and not at hand.

    Values of --sp and --memory that it resolves are not auto.
    """
    launcher = read_profile({})
    if world_size > 1:
        launcher = replace(launcher, world_size=world_size, local_world_size=machine.per_node)
    settings, model_config = configure_model(_of_method(fill(settings, launcher)))
    env = {"LOCAL_WORLD_SIZE": str(machine.per_node)}
    of_machine = partial(_arranged, launcher=launcher, env=env, machine=machine, gpus=machine.per_node, is_here=False)
    return settings, model_config, partial(of_machine, model_config=model_config)


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


def _memory_by_default(settings: Settings, machine: Machine) -> str:
    """Return auto on GPUs whose speeds are known, unless a flag or a key chooses memory options itself; else balanced.

    On an H200, `fastest` took 1.31 and 1.17 times TRL's speed where `balanced` took 0.78 and 0.95
    (benchmarks/results/gpu_H200_settled_2026-11-27.md).
    """
    is_known = not settings["use_cpu"] and not machine.is_cpu and machine.is_known
    return AUTO if is_known and not asked_memory_options(settings) else "balanced"


def _arranged(
    settings: Settings,
    *,
    model_config: PretrainedConfig,
    launcher: Launcher,
    env: Mapping[str, str],
    machine: Machine,
    gpus: int,
    is_here: bool = True,
) -> Run:
    """Return the run for values of --sp and --memory that are not auto, without a forecast.

    Args:
        is_here: whether it is for this machine, which is looked at then.
    """
    asked = settings
    settings, processes = count_processes(settings, launcher, gpus)
    use_cpu = processes.use_cpu
    on_gpus = {"bf16": not use_cpu, "dataloader_num_workers": int(not use_cpu)}
    settings = settings.decided(**{name: value for name, value in on_gpus.items() if settings[name] is None})
    settings = limit_length(settings, model_config)

    setup = _attention_setup(settings, model_config, processes, env, machine, gpus)
    memory_options = asked_memory_options(settings)
    wanted_backend, backend = choose(
        processes.wanted_backend, setup, settings, memory_options, packed=settings["packing"] and is_here
    )
    dims = arrange(processes.world_size, backend, processes.dp_replicate)
    check_dp_shard(launcher, dims)
    settings = accumulate(settings, dims)
    launcher.check_train_batch_size(
        micro_batch_size=settings["per_device_train_batch_size"],
        accumulation=settings["gradient_accumulation_steps"],
        world_size=dims.world_size,
    )
    engine = choose_engine(settings, launcher, backend, dims, use_cpu=use_cpu)
    if settings["use_peft"]:
        if is_here:
            check_versions(PEFT_VERSIONS, "--use_peft")
        check_adapter(settings, model_config, engine.name)
    settings = _take_liger(settings, model_config, sp=dims.sp, use_cpu=use_cpu, is_here=is_here)
    if settings["torch_compile"]:
        check_compile(settings, engine.name, model_config)
    settings = settings.note(*kernel_notes(settings["attn_implementation"], use_cpu=use_cpu))
    settings = settings.note(*precision_notes(settings, engine.name, use_cpu=use_cpu)).decided(
        max_grad_norm=clipping(settings["max_grad_norm"], engine.name),
        pad_to_multiple_of=pad_multiple(given_multiple(asked), dims),
    )
    if settings["measure_links"] and processes.sp == 1:
        settings = settings.note("--measure_links has no effect at sp 1: no sequence is shared")

    run = Run(
        flags=asked,
        settings=dict(settings),
        model_config=model_config,
        dims=dims,
        wanted_backend=wanted_backend,
        setup=setup,
        backend=backend,
        engine=engine.name,
        engine_reason=engine.reason,
        promotes_engine=engine.is_promoted,
        zero_stage=engine.zero_stage,
        asked_memory_options=memory_options,
        use_cpu=use_cpu,
        gpus=gpus,
        launched=launcher.launched,
        notes=settings.notes,
    )
    run = run.with_memory_options().with_prompts()
    if settings["load_in_4bit"]:
        if is_here:
            check_versions(QLORA_VERSIONS, "--load_in_4bit")
        check_quantization(run.settings, model_config, engine.name, use_cpu)
    if is_here:
        check_machine(run, env)
    return run


def _take_output(values: Settings, env: Mapping[str, str]) -> Settings:
    """Return values with the output folder, after a check that this run may write there; restarts go on in it."""
    asked = values["resume_from_checkpoint"]
    folder = Path(values["output_dir"]) if values["output_dir"] else default_folder(resuming=asked is not None)
    values = values.decided(output_dir=str(folder))
    restarted = is_restarted(folder, env)
    if restarted:
        values = values.decided(resume_from_checkpoint=asked or "auto", overwrite_output_dir=False)
    if not values["prepare_only"]:
        check_output(
            folder,
            asked=values["resume_from_checkpoint"],
            overwrite=values["overwrite_output_dir"],
            timeout=values["ddp_timeout"] if is_first_rank() and not restarted else None,
            reads=_read_by(values),
        )
    return values


def _read_by(values: Settings) -> list[tuple[str, str]]:
    """Return flags and the paths that they name, of what a run reads besides checkpoints."""
    of_flags = [(name, values[name]) for name in ("model_name_or_path", "dataset_name", "chat_template_path")]
    of_flags += [("datasets", data_set.path) for data_set in values["datasets"] or []]
    return [(flag, path) for flag, path in of_flags if path and path not in (TINY, STDLIB)]


def _attention_setup(
    values: Settings,
    model_config: PretrainedConfig,
    processes: Processes,
    env: Mapping[str, str],
    machine: Machine,
    gpus: int,
) -> Setup:
    """Return the heads and speeds that the choice of a backend needs."""
    is_half = values["bf16"] or values["dtype"] == "bfloat16"
    return Setup.of_model(
        model_config,
        processes.sp,
        element_size=2 if is_half else 4,
        machine=replace(
            Machine.of("CPU", 1, host_bytes=machine.host_bytes) if processes.use_cpu else machine,
            per_node=devices_per_node(processes.world_size, env, 0 if processes.use_cpu else gpus),
        ),
    )


def _take_liger(values: Settings, model_config: PretrainedConfig, *, sp: int, use_cpu: bool, is_here: bool) -> Settings:
    """Return values whose `liger_kernel_config` names the parts that Liger computes.

    Where nobody asked, Liger computes on GPUs what it is verified for, unless layers are compiled, or are so small that
    a step waits for the host, which Liger's kernels keep busy for longer.

    Raises:
        ValueError: if Liger was asked for and cannot compute this model here.
    """
    if values["use_liger_kernel"] is False:
        return values
    off = values.decided(use_liger_kernel=False)
    is_asked = bool(values["use_liger_kernel"] or values["liger_kernel_config"])
    tokens = values["per_device_train_batch_size"] * values["max_length"] // sp
    is_small = is_here and tokens * model_config.get_text_config().hidden_size < LIGER_ELEMENTS
    if not is_asked and (use_cpu or values["torch_compile"] or is_small):
        return off
    try:
        parts = liger_parts(model_config, values["liger_kernel_config"])
    except ValueError:
        if is_asked:
            raise
        return off
    try:
        if is_here:
            check_versions(LIGER_VERSIONS, "--use_liger_kernel")
        if is_here and not values["prepare_only"]:
            check_liger_machine(use_cpu)
    except ValueError as error:
        if is_asked:
            raise
        return off.note(f"Liger's kernels are off, and steps take longer: {error}")
    return values.decided(use_liger_kernel=True, liger_kernel_config=dict.fromkeys(parts, True))


LIGER_ELEMENTS = 1 << 23
"""Hidden states of a micro-batch and rank, by elements, from which Liger's kernels are on unless a flag says otherwise.

On an H200, Qwen3-0.6B has 1,024 a token: a step of 16,384 tokens takes 0.70 of its time with Liger. With 4,096 tokens,
the host sets the pace, and TRL's step takes 1.2 times as long (benchmarks/results/gpu_H200_settled_2026-11-27.md).
"""

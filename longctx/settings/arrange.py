"""Arrange a run on its processes: backend, engine, batch and kernels, for values of flags that are not auto."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from longctx.attention.choice import assumed_documents
from longctx.attention.kernels import flash_attn
from longctx.attention.kernels.choose import FLASH_ATTENTION
from longctx.layers.compiled import check_compile
from longctx.layers.liger import check_liger_machine, liger_parts
from longctx.model.adapter import check_adapter, check_quantization
from longctx.settings.launcher import profile_name
from longctx.settings.machine_checks import (
    LIGER_VERSIONS,
    MINIMUM_VERSIONS,
    PEFT_VERSIONS,
    QLORA_VERSIONS,
    check_machine,
    check_versions,
)
from longctx.settings.model_config import limit_length
from longctx.settings.processes import count_processes
from longctx.settings.run import Facts, Run, attention_setup, row_length, spread
from longctx.settings.values import Settings

Item = TypeVar("Item")


def arrange(settings: Settings, facts: Facts) -> Run:
    """Return the run for values of --sp and --memory that are not auto, without a forecast.

    Raises:
        ValueError: for the first setting that cannot be carried out exactly, with its value, limit and remedy.
    """
    settings, world_size = count_processes(settings, facts.launcher, facts.gpus)
    use_cpu = settings["use_cpu"]
    on_gpus = {"bf16": not use_cpu, "dataloader_num_workers": int(not use_cpu)}
    settings = settings.decided(**{name: value for name, value in on_gpus.items() if settings[name] is None})
    settings = limit_length(settings, facts.model_config)
    documents = assumed_documents(row_length(settings), packed=settings["packing"] and facts.is_here)
    backend = spread(settings, attention_setup(settings, facts, world_size), documents)
    run = _with_batch(Run(flags=settings, facts=facts, world_size=world_size, backend=backend))
    run = _with_engine(run)
    if settings["use_peft"]:
        if facts.is_here:
            check_versions(PEFT_VERSIONS, "--use_peft")
        check_adapter(settings, facts.model_config, run.engine)
    run = _with_liger(run)
    if settings["torch_compile"]:
        check_compile(settings, run.engine, facts.model_config)
    # Without clipping the bound is infinite, or 0 on DeepSpeed: both measure the norm.
    unbounded = 0.0 if run.engine == "deepspeed" else math.inf
    run = run.decide(*_notes(run), max_grad_norm=settings["max_grad_norm"] or unbounded)
    if run.settings["load_in_4bit"]:
        if facts.is_here:
            check_versions(QLORA_VERSIONS, "--load_in_4bit")
        check_quantization(run.settings, facts.model_config, run.engine, use_cpu)
    if facts.is_here:
        check_machine(run)
    return run


def arranged(
    each: Iterable[tuple[Item, Settings]], facts: Facts, obstacles: list[ValueError]
) -> Iterator[tuple[Item, Run]]:
    """Yield each item whose settings are not refused, with its run, and add the other errors to `obstacles`."""
    for item, settings in each:
        try:
            run = arrange(settings, facts)
        except ValueError as error:
            obstacles.append(error)
        else:
            yield item, run


def _with_batch(run: Run) -> Run:
    """Check the sequences of a step and the processes that share them, and set the accumulation that they need.

    Raises:
        ValueError: if --global_batch_size is no whole number of micro-batches or contradicts the accumulation, or if
            the launcher's profile asks for another number of sequences or shards.
    """
    settings, dims, launcher = run.flags, run.dims, run.facts.launcher
    if launcher.dp_shard not in (None, dims.dp_shard):
        raise ValueError(
            f"parallelism_config_dp_shard_size {launcher.dp_shard} in {profile_name()} contradicts dp_shard "
            f"{dims.dp_shard} of {dims}. dp_replicate × dp_shard × sp must equal num_processes {dims.world_size}."
        )
    name, micro = "gradient_accumulation_steps", settings["per_device_train_batch_size"]
    if (wanted := settings["global_batch_size"]) is not None:
        at_once = micro * dims.dp
        if wanted % at_once:
            nearest = max(at_once, wanted // at_once * at_once)
            raise ValueError(
                f"--global_batch_size {wanted} is not a multiple of the {at_once} sequences that {dims.world_size} "
                f"devices take at once: per_device_train_batch_size {micro} × (world {dims.world_size} / sp "
                f"{dims.sp}). Use {nearest} or {nearest + at_once}, another --sp, or another number of devices."
            )
        steps = wanted // at_once
        if settings.is_set(name) and settings[name] != steps:
            remedy = "Leave out one of the two" if name in settings.explicit else "Leave the key out"
            raise ValueError(
                f"--global_batch_size {wanted} needs {steps} micro-batches a step here, and {settings.subject(name)} "
                f"asks for others. {remedy}."
            )
        run = run.decide(**{name: steps})
    accumulation = run.flags[name]
    product = micro * accumulation * dims.world_size
    if launcher.train_batch_size is not None and str(launcher.train_batch_size.value) != str(product):
        value, key = launcher.train_batch_size
        raise ValueError(
            f"{key} is {value}, and per_device_train_batch_size {micro} × gradient_accumulation_steps {accumulation} × "
            f"{dims.world_size} processes is {product}. Set the key to {product} or to auto."
        )
    return run


def _with_engine(run: Run) -> Run:
    """Return the run with the engine that the profile or the flag names, else the one that suits the backend.

    Raises:
        ValueError: if the run cannot use it.
    """
    asked, of_profile, backend, dims = run.flags["engine"], run.facts.launcher.engine, run.backend, run.dims
    if of_profile is not None:
        if asked not in ("auto", of_profile):
            raise ValueError(
                f"--engine {asked} contradicts {profile_name()}, which starts {of_profile}. Change one of them."
            )
        engine, reason = of_profile, "the launcher's profile"
    elif asked != "auto":
        engine, reason = asked, "asked for"
    elif dims.world_size == 1:
        engine, reason = "none", "one process"
    elif run.flags["load_in_4bit"]:
        engine, reason = "fsdp2", "auto: FSDP2 shards 4-bit weights"
    elif dims.dp_replicate > 1:
        engine, reason = "fsdp2", "auto: copies of a sharded model are FSDP2's"
    else:
        engine, runs_on = backend.engine, "DeepSpeed ZeRO-3" if backend.engine == "deepspeed" else "FSDP2"
        reason = f"auto: {'sp 1' if backend.name == 'local' else backend.name} runs on {runs_on}"
    check_versions(MINIMUM_VERSIONS.get(engine, {}), f"the {engine} engine")
    run = replace(run, engine=engine, engine_reason=reason)
    _check_engine(run)
    return run


def _check_engine(run: Run) -> None:
    """Check that the engine can shard over these processes, and is exact."""
    engine, dims = run.engine, run.dims
    if engine in ("fsdp2", "fsdp1") and dims.world_size == 1:
        raise ValueError(
            f"The engine {engine} shards over processes, and this run has one. Leave out --engine, or start more "
            f"processes."
        )
    if engine == "deepspeed" and run.zero_stage == 0:
        raise ValueError(
            f"ZeRO stage 0 is not verified against one process. Set zero_stage to 1, 2 or 3 in {profile_name()}, or "
            "use --engine fsdp2 without it."
        )
    if engine == "deepspeed" and dims.dp_replicate > 1:
        raise ValueError(
            f"--dp_replicate {dims.dp_replicate} keeps copies of a sharded model, which FSDP2 supports and DeepSpeed "
            f"does not. Use --engine fsdp2, or dp_replicate 1."
        )
    if engine == "fsdp1" and dims.sp > 1:
        raise ValueError(f"sp {dims.sp} needs FSDP2 or DeepSpeed; the profile asks for FSDP1. Set fsdp_version: 2.")
    if engine == "fsdp2" and dims.dp_replicate > 1 and dims.dp_replicate == dims.world_size:
        raise ValueError(
            f"--dp_replicate {dims.dp_replicate} on {dims.world_size} processes leaves nothing to shard. "
            "Lower it, or leave it out to shard over all processes."
        )
    if engine == "fsdp1" and run.use_cpu:
        raise ValueError(
            f"fsdp_version 1 in {profile_name()}: PyTorch's FSDP1 does not run on the CPU. "
            "Set fsdp_version: 2 (--config_file configs/fsdp2.yaml), or use a machine with GPUs."
        )


LIGER_ELEMENTS = 1 << 23
"""Hidden states of a micro-batch and rank, by elements, from which Liger's kernels are on unless a flag says otherwise.

On an H200, Qwen3-0.6B has 1,024 a token: a step of 16,384 tokens takes 0.70 of its time with Liger. With 4,096 tokens,
the host sets the pace, and TRL's step takes 1.2 times as long (benchmarks/results/gpu_H200_settled_2026-11-27.md).
"""


def _with_liger(run: Run) -> Run:
    """Return the run with the parts that Liger computes in its `liger_kernel_config`.

    Where nobody asked, Liger computes on GPUs what it is verified for, unless layers are compiled, or are so small that
    a step waits for the host, which Liger's kernels keep busy for longer.

    Raises:
        ValueError: if Liger was asked for and cannot compute this model here.
    """
    settings, config, is_here = run.flags, run.model_config, run.facts.is_here
    if settings["use_liger_kernel"] is False:
        return run
    off = run.decide(use_liger_kernel=False)
    is_asked = bool(settings["use_liger_kernel"] or settings["liger_kernel_config"])
    tokens = row_length(settings) // run.dims.sp
    is_small = is_here and tokens * config.get_text_config().hidden_size < LIGER_ELEMENTS
    if not is_asked and (run.use_cpu or settings["torch_compile"] or is_small):
        return off
    try:
        parts = liger_parts(config, settings["liger_kernel_config"])
    except ValueError:
        if is_asked:
            raise
        return off
    try:
        if is_here:
            check_versions(LIGER_VERSIONS, "--use_liger_kernel")
        if is_here and not settings["prepare_only"]:
            check_liger_machine(run.use_cpu)
    except ValueError as error:
        if is_asked:
            raise
        return off.decide(f"Liger's kernels are off, and steps take longer: {error}")
    return run.decide(use_liger_kernel=True, liger_kernel_config=dict.fromkeys(parts, True))


def _notes(run: Run) -> Iterator[str]:
    """Yield notes on the kernel and the precision, where users may not expect them, and on what has no effect."""
    settings = run.flags
    if kernel := kernel_note(settings["attn_implementation"], use_cpu=run.use_cpu):
        yield kernel
    if settings["dtype"] != "float32" and run.engine == "none":
        yield f"--dtype {settings['dtype']}: one process keeps no fp32 copy of the weights, as the engines do"
    if not run.use_cpu and not settings["bf16"]:
        yield "fp32 on a GPU: attention is slower than in bf16, for which flash kernels are made"
    if settings["measure_links"] and run.dims.sp == 1:
        yield "--measure_links has no effect at sp 1: no sequence is shared"


def kernel_note(name: str | None, *, use_cpu: bool) -> str:
    """Return a note on the kernel that takes the place of the one of `--attn_implementation`; empty if it is that."""
    if name in FLASH_ATTENTION and use_cpu:
        return f"--attn_implementation {name} is made for GPUs: torch's kernel for the CPU computes the same"
    if name == "flash_attention_2" and not flash_attn.is_installed(FLASH_ATTENTION[name]):
        return f"--attn_implementation {name}: flash-attn is not installed, so torch's own build is used"
    return ""

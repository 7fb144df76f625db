"""Choose the engine that shards the model, the precision and the attention backend."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from longctx.attention.choice import BackendChoice, assumed_documents, choose_backend, chunking_backend
from longctx.attention.cost import Setup
from longctx.attention.kernels import flash_attn
from longctx.attention.kernels.choose import FLASH_ATTENTION
from longctx.forecast.memory_presets import prefers_ulysses
from longctx.sequence.mesh import ParallelDims
from longctx.settings.launcher import Launcher, profile_name
from longctx.settings.machine_checks import MINIMUM_VERSIONS, check_versions
from longctx.settings.run import given_multiple, row_length
from longctx.settings.values import Settings


class Engine(NamedTuple):
    """The library that shards the model."""

    name: str
    """deepspeed, fsdp2, fsdp1 or none (one process)."""
    reason: str
    """Why it was chosen."""
    zero_stage: int | None
    is_promoted: bool
    """Whether the launcher named no engine, so that longctx tells accelerate."""


def choose_engine(
    settings: Settings, launcher: Launcher, backend: BackendChoice, dims: ParallelDims, *, use_cpu: bool
) -> Engine:
    """Return the engine that the profile or the flag names, else the one that suits the backend.

    Raises:
        ValueError: if the run cannot use it.
    """
    name, reason = _choose(settings, launcher, backend, dims)
    check_versions(MINIMUM_VERSIONS.get(name, {}), f"the {name} engine")
    zero_stage = (3 if launcher.zero_stage is None else launcher.zero_stage) if name == "deepspeed" else None
    _check_engine(name, zero_stage, dims, use_cpu=use_cpu)
    return Engine(name, reason, zero_stage, is_promoted=launcher.engine is None and name != "none")


def _choose(settings: Settings, launcher: Launcher, backend: BackendChoice, dims: ParallelDims) -> tuple[str, str]:
    """Check that flag and profile name the same engine."""
    asked = settings["engine"]
    if launcher.engine is not None:
        if asked not in ("auto", launcher.engine):
            raise ValueError(
                f"--engine {asked} contradicts {profile_name()}, which starts {launcher.engine}. Change one of them."
            )
        return launcher.engine, "the launcher's profile"
    if asked != "auto":
        return asked, "asked for"
    if dims.world_size == 1:
        return "none", "one process"
    if settings["load_in_4bit"]:
        return "fsdp2", "auto: FSDP2 shards 4-bit weights"
    if dims.dp_replicate > 1:
        return "fsdp2", "auto: copies of a sharded model are FSDP2's"
    runs_on = "DeepSpeed ZeRO-3" if backend.engine == "deepspeed" else "FSDP2"
    return backend.engine, f"auto: {'sp 1' if backend.name == 'local' else backend.name} runs on {runs_on}"


def _check_engine(engine: str, zero_stage: int | None, dims: ParallelDims, *, use_cpu: bool) -> None:
    """Check that the engine can shard over these processes, and is exact."""
    if engine in ("fsdp2", "fsdp1") and dims.world_size == 1:
        raise ValueError(
            f"The engine {engine} shards over processes, and this run has one. Leave out --engine, or start more "
            f"processes."
        )
    if engine == "deepspeed" and zero_stage == 0:
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
    if engine == "fsdp1" and use_cpu:
        raise ValueError(
            f"fsdp_version 1 in {profile_name()}: PyTorch's FSDP1 does not run on the CPU. "
            "Set fsdp_version: 2 (--config_file configs/fsdp2.yaml), or use a machine with GPUs."
        )


def precision_notes(values: Settings, engine: str, *, use_cpu: bool) -> list[str]:
    """Return notes on what the precision costs, where users may not expect it."""
    notes = []
    if values["dtype"] != "float32" and engine == "none":
        notes.append(f"--dtype {values['dtype']}: one process keeps no fp32 copy of the weights, as the engines do")
    if not use_cpu and not values["bf16"]:
        notes.append("fp32 on a GPU: attention is slower than in bf16, for which flash kernels are made")
    return notes


def kernel_notes(name: str | None, *, use_cpu: bool) -> list[str]:
    """Return notes on the kernel that takes the place of the one of `--attn_implementation`."""
    if name not in FLASH_ATTENTION:
        return []
    if use_cpu:
        return [f"--attn_implementation {name} is made for GPUs: torch's kernel for the CPU computes the same"]
    if name == "flash_attention_2" and not flash_attn.is_installed(FLASH_ATTENTION[name]):
        return [f"--attn_implementation {name}: flash-attn is not installed, so torch's own build is used"]
    return []


def clipping(value: float | None, engine: str) -> float:
    """Return the bound on the gradient norm. Without clipping it is infinite, or 0 on DeepSpeed: both measure it."""
    return value or (0.0 if engine == "deepspeed" else math.inf)


def choose(
    wanted: str, setup: Setup, values: Settings, memory_options: Mapping[str, Any], *, packed: bool
) -> tuple[str, BackendChoice]:
    """Return the wanted backend's name, and the choice before the data is known.

    With a sequence-chunked step, `auto` wants the backend that has least of it on the device.

    Args:
        packed: whether rows of several documents are assumed.
    """

    def choice(name: str) -> BackendChoice:
        return choose_backend(
            name,
            setup,
            assumed_documents(row_length(values), packed=packed),
            ring_size=values["ring_size"],
            pad_to_multiple_of=given_multiple(values),
        )

    chunks = prefers_ulysses(values["memory"], memory_options) and setup.recurrent is None
    if wanted == "auto" and setup.sp > 1 and chunks and (name := chunking_backend(setup)) is not None:
        return name, replace(choice(name), reason="auto: the sequence-chunked step has least on the device")
    return wanted, choice(wanted)

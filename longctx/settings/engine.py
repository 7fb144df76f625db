"""Choose the engine that shards the model, and the precision."""

from __future__ import annotations

import math
from typing import NamedTuple

from longctx.attention.choice import BackendChoice
from longctx.sequence.mesh import ParallelDims
from longctx.settings.checks import check
from longctx.settings.flags import Flags
from longctx.settings.profile import LaunchProfile
from longctx.settings.profile_values import profile_name
from longctx.settings.values import Values
from longctx.settings.versions import MINIMUM_VERSIONS, check_versions


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
    flags: Flags, profile: LaunchProfile, backend: BackendChoice, dims: ParallelDims, *, use_cpu: bool
) -> Engine:
    """Return the engine that the profile or the flag names, else the one that suits the backend.

    Raises:
        ValueError: if the run cannot use it.
    """
    name, reason = _choose(flags, profile, backend, dims)
    check_versions(MINIMUM_VERSIONS.get(name, {}), f"the {name} engine")
    zero_stage = (3 if profile.zero_stage is None else profile.zero_stage) if name == "deepspeed" else None
    _check_engine(name, zero_stage, dims)
    _check_fsdp1(name, use_cpu)
    is_promoted = profile.engine is None and name != "none"
    return Engine(name, reason, zero_stage, is_promoted)


@check("engine", "distributed_type")
def _choose(flags: Flags, profile: LaunchProfile, backend: BackendChoice, dims: ParallelDims) -> tuple[str, str]:
    """Check that flag and profile name the same engine."""
    if profile.engine is not None:
        if flags.engine not in ("auto", profile.engine):
            raise ValueError(
                f"--engine {flags.engine} contradicts {profile_name()}, which starts {profile.engine}. "
                "Change one of them."
            )
        return profile.engine, "the launcher's profile"
    if flags.engine != "auto":
        return flags.engine, "asked for"
    if dims.world_size == 1:
        return "none", "one process"
    if flags.load_in_4bit:
        return "fsdp2", "auto: FSDP2 shards 4-bit weights"
    if dims.dp_replicate > 1:
        return "fsdp2", "auto: copies of a sharded model are FSDP2's"
    runs_on = "DeepSpeed ZeRO-3" if backend.engine == "deepspeed" else "FSDP2"
    return backend.engine, f"auto: {'sp 1' if backend.name == 'local' else backend.name} runs on {runs_on}"


@check("engine", "zero_stage", "dp_replicate", "sp", "fsdp_version")
def _check_engine(engine: str, zero_stage: int | None, dims: ParallelDims) -> None:
    """Check that the engine can shard over these processes, and is exact."""
    if engine in ("deepspeed", "fsdp2", "fsdp1") and dims.world_size == 1 and engine != "deepspeed":
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


@check("fsdp_version", "use_cpu")
def _check_fsdp1(engine: str, use_cpu: bool) -> None:
    """Check that FSDP1 has GPUs."""
    if engine == "fsdp1" and use_cpu:
        raise ValueError(
            f"fsdp_version 1 in {profile_name()}: PyTorch's FSDP1 does not run on the CPU. "
            "Set fsdp_version: 2 (--config_file configs/fsdp2.yaml), or use a machine with GPUs."
        )


@check("bf16", "mixed_precision")
def choose_precision(values: Values, profile: LaunchProfile, *, use_cpu: bool) -> Values:
    """Check that flag and profile name the same precision; by default it is bf16 on GPUs and fp32 on the CPU."""
    given = values.flags.bf16 if values.is_given("bf16") else None
    if given is False and profile.mixed_precision == "bf16":
        raise ValueError(f"--bf16 False contradicts {profile_name()}, which sets mixed_precision bf16. Change one.")
    return values.set(bf16=bool(given) if given is not None else profile.mixed_precision == "bf16" or not use_cpu)


def precision_notes(values: Values, engine: str, *, use_cpu: bool) -> list[str]:
    """Return notes on what the precision costs, where users may not expect it."""
    notes = []
    if values["dtype"] != "float32" and engine == "none":
        notes.append(f"--dtype {values['dtype']}: one process keeps no fp32 copy of the weights, as the engines do")
    if not use_cpu and not values["bf16"]:
        notes.append("fp32 on a GPU: attention is slower than in bf16, for which flash kernels are made")
    return notes


def clipping(value: float | None, engine: str) -> float:
    """Return the bound on the gradient norm. Without clipping it is infinite, or 0 on DeepSpeed: both measure it."""
    return value or (0.0 if engine == "deepspeed" else math.inf)

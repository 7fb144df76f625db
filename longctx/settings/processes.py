"""How many processes a run has, how many share a sequence, and what a step of them trains on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from longctx.attention.backends import BACKENDS
from longctx.sequence.mesh import ParallelDims
from longctx.settings.checks import check
from longctx.settings.flags import Flags
from longctx.settings.profile import LaunchProfile
from longctx.settings.values import Values, agree, profile_name


@dataclass(frozen=True, kw_only=True)
class Processes:
    """A run's processes."""

    sp: int
    """Processes that share a sequence."""
    wanted_backend: str
    """The name of a backend, or auto."""
    dp_replicate: int
    world_size: int
    use_cpu: bool


def count_processes(
    values: Values, profile: LaunchProfile, env: Mapping[str, str], devices: int
) -> tuple[Values, Processes]:
    """Work out the processes from flags, profile and launcher.

    Args:
        devices: GPUs that this process can see.

    Raises:
        ValueError: if these contradict each other, or there are too few GPUs.
    """
    flags = values.flags
    sp, wanted_backend = _degrees(flags, profile)
    dp_replicate = agree(flags, "dp_replicate", profile.dp_replicate, "parallelism_config_dp_replicate_size") or 1
    use_cpu = bool(values["use_cpu"]) or profile.use_cpu or devices == 0
    wanted = Processes(sp=sp, wanted_backend=wanted_backend, dp_replicate=dp_replicate, world_size=0, use_cpu=use_cpu)
    if values.is_demo and not use_cpu and not values.is_given("use_cpu"):
        wanted, notes = _fit_demo(wanted, flags, profile, env, devices)
        values = values.note(*notes)
    needs_no_gpu = wanted.use_cpu or values["prepare_only"]  # data may be prepared on another machine
    world_size = _world_size(wanted, flags, profile, env, None if needs_no_gpu else devices)
    return values, replace(wanted, world_size=world_size)


def count_all_processes(flags: Flags, profile: LaunchProfile, env: Mapping[str, str], devices: int) -> int:
    """Return the processes of a run whose --sp is auto: those started, else --num_processes, else one for each GPU."""
    if profile.launched:
        return int(env["WORLD_SIZE"])
    return flags.num_processes or (1 if flags.use_cpu else max(devices, 1))


@check("sp", "cp", "sp_backend", "parallelism_config_cp_size", "parallelism_config_sp_size")
def _degrees(flags: Flags, profile: LaunchProfile) -> tuple[int, str]:
    """Check that flags and profile ask for the same degree and backend."""
    backend = flags.sp_backend
    if flags.cp is not None:
        of_cp = BACKENDS.of_degree("cp")
        if flags.sp not in (None, flags.cp) or ("sp_backend" in flags.explicit and backend != of_cp):
            raise ValueError(
                f"--cp {flags.cp} means --sp {flags.cp} --sp_backend {of_cp}, but --sp {flags.sp} --sp_backend "
                f"{backend} is given too. Keep one of the two."
            )
        backend = of_cp
    asked = flags.cp if flags.cp is not None else flags.sp
    if profile.cp and profile.sp:
        raise ValueError(
            f"parallelism_config_cp_size {profile.cp} and parallelism_config_sp_size {profile.sp} in "
            f"{profile_name()}: set one of them to 1. Both at once are --sp_backend hybrid."
        )
    for size, degree in ((profile.cp, "cp"), (profile.sp, "sp")):
        if size is None:
            continue
        its_backend = BACKENDS.of_degree(degree)
        if asked not in (None, size) or backend not in ("auto", its_backend):
            raise ValueError(
                f"--sp {asked} --sp_backend {backend} contradicts {profile_name()}, which sets "
                f"parallelism_config_{degree}_size {size} ({its_backend}). Change one of them."
            )
        return size, its_backend
    return asked or 1, backend


def _fit_demo(
    wanted: Processes, flags: Flags, profile: LaunchProfile, env: Mapping[str, str], devices: int
) -> tuple[Processes, list[str]]:
    """Fit the demo to a machine with fewer GPUs than it asks for, and return notes on what that changes.

    The demo has to run anywhere. With fewer GPUs than ranks it runs on the CPU, since NCCL refuses two ranks on one
    GPU. If a launcher has started fewer processes than --sp, all of them share a sequence.
    """
    world_size, local = _started(wanted, flags, profile, env)
    sp = wanted.sp
    if local > devices:
        why = f"{local} processes need {local} GPUs, and {devices} {'is' if devices == 1 else 'are'} visible"
        note = f"the demo runs on the CPU: {why}; --sp {devices} runs it on the GPU{'s' * (devices > 1)}"
        return replace(wanted, use_cpu=True), [note]
    if profile.launched and world_size < sp:
        note = f"the demo runs at sp {world_size}: the launcher started so many, and --sp is {sp}"
        return replace(wanted, sp=world_size), [note]
    return wanted, []


def _started(wanted: Processes, flags: Flags, profile: LaunchProfile, env: Mapping[str, str]) -> tuple[int, int]:
    """Return the processes of the run and of this machine; the latter are 0 where a launcher does not say."""
    if profile.launched:
        return int(env["WORLD_SIZE"]), int(env.get("LOCAL_WORLD_SIZE", 0))
    world_size = flags.num_processes or wanted.sp * wanted.dp_replicate
    return world_size, world_size


@check("num_processes", "sp", "use_cpu")
def _world_size(
    wanted: Processes, flags: Flags, profile: LaunchProfile, env: Mapping[str, str], devices: int | None
) -> int:
    """Check that the launcher has started as many processes as are asked for, and that each has a GPU.

    Args:
        devices: visible GPUs; None where none is needed.
    """
    world_size, local = _started(wanted, flags, profile, env)
    if profile.launched and flags.num_processes not in (None, world_size):
        raise ValueError(
            f"--num_processes {flags.num_processes} contradicts the launcher, which started {world_size}. Leave "
            f"the flag out, or have the launcher start {flags.num_processes}."
        )
    if world_size < 1:
        raise ValueError(f"--num_processes {world_size} is below 1. Use at least 1.")
    if devices is not None and local > devices:
        raise ValueError(
            f"{local} processes on this machine need {local} GPUs, and {devices} are visible. "
            f"Use --sp {devices}, or --use_cpu to run on the CPU."
        )
    return world_size


@check("parallelism_config_dp_shard_size", "num_processes")
def check_dp_shard(profile: LaunchProfile, dims: ParallelDims) -> None:
    """Check that the profile's dp_shard is that of the run."""
    if profile.dp_shard is not None and profile.dp_shard != dims.dp_shard:
        raise ValueError(
            f"parallelism_config_dp_shard_size {profile.dp_shard} in {profile_name()} contradicts dp_shard "
            f"{dims.dp_shard} of {dims}. dp_replicate × dp_shard × sp must equal num_processes {dims.world_size}."
        )


@check("global_batch_size", "gradient_accumulation_steps", "per_device_train_batch_size", "sp")
def accumulate(values: Values, profile: LaunchProfile, dims: ParallelDims) -> Values:
    """Check that --global_batch_size is a whole number of micro-batches, and set the accumulation that it needs.

    Raises:
        ValueError: if it is not, or if the accumulation is set to another number.
    """
    wanted = values["global_batch_size"]
    if wanted is None:
        return values
    micro = values["per_device_train_batch_size"]
    at_once = micro * dims.dp
    if wanted < 1 or wanted % at_once:
        nearest = max(at_once, wanted // at_once * at_once)
        raise ValueError(
            f"--global_batch_size {wanted} is not a multiple of the {at_once} sequences that {dims.world_size} devices "
            f"take at once: per_device_train_batch_size {micro} × (world {dims.world_size} / sp {dims.sp}). "
            f"Use {nearest} or {nearest + at_once}, another --sp, or another number of devices."
        )
    steps = wanted // at_once
    is_flag = values.is_given("gradient_accumulation_steps")
    if (is_flag or profile.gradient_accumulation_steps is not None) and values["gradient_accumulation_steps"] != steps:
        name = "gradient_accumulation_steps"
        where, remedy = f"{name} in {profile_name()}", "Set the key to auto."
        if is_flag:
            where, remedy = f"--{name}", "Leave out one of the two."
        raise ValueError(
            f"--global_batch_size {wanted} needs {steps} micro-batches a step here, and {where} is {values[name]}. "
            f"{remedy}"
        )
    return values.set(gradient_accumulation_steps=steps)

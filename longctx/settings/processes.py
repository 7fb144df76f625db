"""How many processes a run has, how many share a sequence, and what a step of them trains on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from longctx.launch.spawn import device_count
from longctx.settings.launcher import Launcher, profile_name
from longctx.settings.rules import fill
from longctx.settings.values import Settings

if TYPE_CHECKING:
    from longctx.sequence.mesh import ParallelDims


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


def count_processes(settings: Settings, launcher: Launcher, devices: int) -> tuple[Settings, Processes]:
    """Work out the processes from flags, profile and launcher.

    Args:
        devices: GPUs that this process can see.

    Raises:
        ValueError: if these contradict each other, or there are too few GPUs.
    """
    wanted = Processes(
        sp=settings["sp"] or 1,
        wanted_backend=settings["sp_backend"],
        dp_replicate=settings["dp_replicate"] or 1,
        world_size=0,
        use_cpu=settings["use_cpu"] or devices == 0,
    )
    if settings.is_demo and not wanted.use_cpu and not settings.is_set("use_cpu"):
        wanted, notes = _fit_demo(wanted, settings, launcher, devices)
        settings = settings.note(*notes)
    world_size, local = _started(wanted, settings, launcher)
    if launcher.launched and settings["num_processes"] not in (None, world_size):
        raise ValueError(
            f"--num_processes {settings['num_processes']} contradicts the launcher, which started {world_size}. Leave "
            f"the flag out, or have the launcher start {settings['num_processes']}."
        )
    if local > devices and not wanted.use_cpu and not settings["prepare_only"]:  # data may be prepared elsewhere
        raise ValueError(
            f"{local} processes on this machine need {local} GPUs, and {devices} are visible. "
            f"Use --sp {devices}, or --use_cpu to run on the CPU."
        )
    return settings, replace(wanted, world_size=world_size)


def count_all_processes(settings: Settings, launcher: Launcher, devices: int) -> int:
    """Return the processes of a run whose --sp is auto: those started, else --num_processes, else one for each GPU."""
    return launcher.world_size or settings["num_processes"] or (1 if settings["use_cpu"] else max(devices, 1))


def count_to_start(settings: Settings, launcher: Launcher) -> int:
    """Return how many processes this one has to start: all of the run, or none if a launcher has or one is enough.

    torch is not imported. `longctx.settings.resolve` does the same again in every process, and then the rest.

    Raises:
        ValueError: if flags, profile and launcher contradict each other, or there are too few GPUs.
    """
    settings = fill(settings, launcher)
    if launcher.launched or settings["dry_run"] or settings["prepare_only"]:
        return 0
    devices = device_count()
    if isinstance(settings["sp"], str):  # auto or all
        count = count_all_processes(settings, launcher, devices)
    else:
        try:
            count = count_processes(settings, launcher, devices)[1].world_size
        except ValueError as error:
            raise ValueError(settings.as_asked(str(error))) from error
    return count if count > 1 or "deepspeed" in (settings["engine"], launcher.engine) else 0


def _fit_demo(wanted: Processes, settings: Settings, launcher: Launcher, devices: int) -> tuple[Processes, list[str]]:
    """Fit the demo to a machine with fewer GPUs than it asks for, and return notes on what that changes.

    The demo has to run anywhere. With fewer GPUs than ranks it runs on the CPU, since NCCL refuses two ranks on one
    GPU. If a launcher has started fewer processes than --sp, all of them share a sequence.
    """
    world_size, local = _started(wanted, settings, launcher)
    if local > devices:
        why = f"{local} processes need {local} GPUs, and {devices} {'is' if devices == 1 else 'are'} visible"
        note = f"the demo runs on the CPU: {why}; --sp {devices} runs it on the GPU{'s' * (devices > 1)}"
        return replace(wanted, use_cpu=True), [note]
    if launcher.launched and world_size < wanted.sp:
        note = f"the demo runs at sp {world_size}: the launcher started so many, and --sp is {wanted.sp}"
        return replace(wanted, sp=world_size), [note]
    return wanted, []


def _started(wanted: Processes, settings: Settings, launcher: Launcher) -> tuple[int, int]:
    """Return the processes of the run and of this machine; the latter are 0 where a launcher does not say."""
    if launcher.world_size is not None:
        return launcher.world_size, launcher.local_world_size or 0
    world_size = settings["num_processes"] or wanted.sp * wanted.dp_replicate
    return world_size, world_size


def check_dp_shard(launcher: Launcher, dims: ParallelDims) -> None:
    """Check that the profile's dp_shard is that of the run."""
    if launcher.dp_shard not in (None, dims.dp_shard):
        raise ValueError(
            f"parallelism_config_dp_shard_size {launcher.dp_shard} in {profile_name()} contradicts dp_shard "
            f"{dims.dp_shard} of {dims}. dp_replicate × dp_shard × sp must equal num_processes {dims.world_size}."
        )


def accumulate(settings: Settings, dims: ParallelDims) -> Settings:
    """Check that --global_batch_size is a whole number of micro-batches, and set the accumulation that it needs.

    Raises:
        ValueError: if it is not, or if the accumulation is set to another number.
    """
    wanted = settings["global_batch_size"]
    if wanted is None:
        return settings
    micro = settings["per_device_train_batch_size"]
    at_once = micro * dims.dp
    if wanted % at_once:
        nearest = max(at_once, wanted // at_once * at_once)
        raise ValueError(
            f"--global_batch_size {wanted} is not a multiple of the {at_once} sequences that {dims.world_size} devices "
            f"take at once: per_device_train_batch_size {micro} × (world {dims.world_size} / sp {dims.sp}). "
            f"Use {nearest} or {nearest + at_once}, another --sp, or another number of devices."
        )
    steps, name = wanted // at_once, "gradient_accumulation_steps"
    if settings.is_set(name) and settings[name] != steps:
        remedy = "Leave out one of the two" if name in settings.explicit else "Leave the key out"
        raise ValueError(
            f"--global_batch_size {wanted} needs {steps} micro-batches a step here, and {settings.subject(name)} "
            f"asks for others. {remedy}."
        )
    return settings.decided(gradient_accumulation_steps=steps)

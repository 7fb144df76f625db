"""How many processes a run has. torch is not imported: the launcher counts them, too, before it starts them."""

from __future__ import annotations

from longctx.launch.spawn import device_count
from longctx.settings.launcher import Launcher
from longctx.settings.values import Settings


def count_processes(settings: Settings, launcher: Launcher, devices: int) -> tuple[Settings, int]:
    """Work out the run's processes from flags, profile and launcher, and whether they are on the CPU.

    Args:
        devices: GPUs that this process can see.

    Raises:
        ValueError: if these contradict each other, or there are too few GPUs.
    """
    if settings.is_demo and devices and not settings.is_set("use_cpu"):
        settings = _fit_demo(settings, launcher, devices)
    world_size, local = _started(settings, launcher)
    if launcher.launched and settings["num_processes"] not in (None, world_size):
        raise ValueError(
            f"--num_processes {settings['num_processes']} contradicts the launcher, which started {world_size}. Leave "
            f"the flag out, or have the launcher start {settings['num_processes']}."
        )
    settings = settings.decided(use_cpu=settings["use_cpu"] or devices == 0)
    if local > devices and not settings["use_cpu"] and not settings["prepare_only"]:  # data may be prepared elsewhere
        raise ValueError(
            f"{local} processes on this machine need {local} GPUs, and {devices} are visible. "
            f"Use --sp {devices}, or --use_cpu to run on the CPU."
        )
    return settings, world_size


def count_all_processes(settings: Settings, launcher: Launcher, devices: int) -> int:
    """Return the processes of a run whose --sp is auto: those started, else --num_processes, else one for each GPU."""
    return launcher.world_size or settings["num_processes"] or (1 if settings["use_cpu"] else max(devices, 1))


def count_to_start(settings: Settings, launcher: Launcher) -> int:
    """Return how many processes this one has to start: all of the run, or none if a launcher has or one is enough.

    `longctx.settings.resolve` counts them again in every process, and then decides the rest.

    Args:
        settings: as `longctx.settings.rules.fill` returns them.

    Raises:
        ValueError: if flags, profile and launcher contradict each other, or there are too few GPUs.
    """
    if launcher.launched or settings["dry_run"] or settings["prepare_only"]:
        return 0
    devices = device_count()
    if isinstance(settings["sp"], str):  # auto or all
        count = count_all_processes(settings, launcher, devices)
    else:
        try:
            count = count_processes(settings, launcher, devices)[1]
        except ValueError as error:
            raise ValueError(settings.as_asked(str(error))) from error
    return count if count > 1 or "deepspeed" in (settings["engine"], launcher.engine) else 0


def _fit_demo(settings: Settings, launcher: Launcher, devices: int) -> Settings:
    """Fit the demo to a machine with fewer GPUs than it asks for, with a note on what that changes.

    The demo has to run anywhere. With fewer GPUs than ranks it runs on the CPU, since NCCL refuses two ranks on one
    GPU. If a launcher has started fewer processes than --sp, all of them share a sequence.
    """
    world_size, local = _started(settings, launcher)
    if local > devices:
        why = f"{local} processes need {local} GPUs, and {devices} {'is' if devices == 1 else 'are'} visible"
        note = f"the demo runs on the CPU: {why}; --sp {devices} runs it on the GPU{'s' * (devices > 1)}"
        return settings.decided(use_cpu=True).note(note)
    if launcher.launched and world_size < (settings["sp"] or 1):
        note = f"the demo runs at sp {world_size}: the launcher started so many, and --sp is {settings['sp']}"
        return settings.decided(sp=world_size).note(note)
    return settings


def _started(settings: Settings, launcher: Launcher) -> tuple[int, int]:
    """Return the processes of the run and of this machine; the latter are 0 where a launcher does not say."""
    if launcher.world_size is not None:
        return launcher.world_size, launcher.local_world_size or 0
    world_size = settings["num_processes"] or (settings["sp"] or 1) * (settings["dp_replicate"] or 1)
    return world_size, world_size

"""This machine: its devices, and the memory of the host, of its control groups and of this process."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One machine. All machines of a run are taken to be alike."""

    gpus: int
    """GPUs that a process sees."""
    gpu_name: str
    """The name of the first GPU, or CPU if there is none."""
    gpu_bytes: int
    """Memory of one GPU; 0 if there is none."""
    host_bytes: int
    """Memory of the host, or the limit of this process's control group if that is less."""

    @classmethod
    def here(cls, gpus: int) -> Hardware:
        """Return this machine, on which `gpus` GPUs are visible."""
        has_gpu = gpus > 0 and torch.cuda.is_available()
        return cls(
            gpus=gpus,
            gpu_name=torch.cuda.get_device_name() if has_gpu else "CPU",
            gpu_bytes=torch.cuda.get_device_properties().total_memory if has_gpu else 0,
            host_bytes=host_bytes(),
        )


class Group(NamedTuple):
    """A control group of this process, in bytes; None if the kernel does not say or there is no limit."""

    limit: int | None
    used: int | None
    cache: int
    """The part of `used` that is page cache and can be dropped."""


def available_host_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process and its children can still take from the machine and its control groups.

    Raises:
        OSError: if there is no /proc/meminfo.
    """
    fields = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
    left = [max(0, g.limit - g.used + g.cache) for g in _groups(root) if g.limit is not None and g.used is not None]
    return min([int(fields["MemAvailable"].split()[0]) * 1024, *left])


@cache
def host_bytes() -> int:
    """Return the memory of this machine in bytes, or the limit of this process's control group if that is less.

    Every entry of the log asks for it, so the files that say it are read once.
    """
    limits = [group.limit for group in _groups(Path("/")) if group.limit is not None]
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *limits])


def address_room() -> float:
    """Return the bytes that this process can still map; infinite without a limit (`ulimit -v`)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return float("inf") if soft == resource.RLIM_INFINITY else max(soft - _status_bytes("VmSize"), 0)


def peak_resident_bytes() -> int:
    """Return the most bytes that were resident since this process began."""
    return _status_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _groups(root: Path) -> Iterator[Group]:
    """Yield the control groups of this process and those around them, of versions 2 and 1."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, limit, usage, cache = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            folder, limit = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            usage, cache = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = folder / path.strip("/")
        for level in [group, *group.parents]:  # a parent's limit binds too; in a container the path may not be there
            if not level.is_relative_to(folder):
                break
            used, dropped = _number_in(level / usage), _statistic(level / "memory.stat", cache)
            yield Group(_number_in(level / limit), used, dropped)


def _number_in(path: Path) -> int | None:
    """Return the number in a file; None if there is no such file, or no limit in it."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _statistic(path: Path, name: str) -> int:
    try:
        return next((int(line.split()[1]) for line in path.read_text().splitlines() if line.split()[0] == name), 0)
    except OSError:
        return 0


def _status_bytes(name: str) -> int:
    """Return a value of /proc/self/status in bytes, given in kB there; 0 if there is none."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0

"""A machine: its devices with their speeds and memory, and the memory of the host, of control groups and processes."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from longctx.machine.speeds import CUDNN, FLASH_2, TABLE, Speeds

HOST_BYTES_PER_DEVICE = 1.9e12 / 8
"""Host memory of a node for each device, if it is not known: that of common nodes of eight H100s."""


class Correction(NamedTuple):
    """What runs took, divided by what was predicted for them."""

    seconds: float = 1.0
    memory: float = 1.0
    runs: int = 0
    """How many runs say so."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One node and its devices. All nodes of a run are taken to be alike."""

    device: str
    """Name of the devices: that of a row of the table of speeds, that which torch gives, or CPU."""
    per_node: int
    """Devices of a node, as many as ranks of a run on it."""
    device_bytes: float
    """Memory of one device; 0 where all memory is the host's."""
    host_bytes: float
    """Host memory of one node, in bytes."""
    speeds: Speeds
    of_long_documents: Speeds | None = None
    """Speeds where a sequence is one long document, which another attention kernel computes."""
    kernel: str = ""
    """The name of the attention kernel in that table."""
    is_known: bool = True
    """Whether the speeds are those of this device; those of others only order what is compared."""

    corrections: tuple[tuple[str, Correction], ...] = ()
    """By attention kernel, see `longctx.forecast.learned`."""

    @classmethod
    def of(
        cls,
        device: str,
        per_node: int,
        kernel: str | None = None,
        *,
        device_bytes: float | None = None,
        host_bytes: float | None = None,
    ) -> Machine:
        """Return a machine with devices of a name.

        Args:
            device: the name of a row of the table of speeds, that which torch gives a GPU, or CPU.
            kernel: of attention, in that row; None means those that a run takes there.
            device_bytes: memory of a device; None takes that of the table.
            host_bytes: host memory of a node; None assumes HOST_BYTES_PER_DEVICE for each device.

        Raises:
            ValueError: for a kernel of which nothing is known on this device.
        """
        row = TABLE.row(device)
        kernels = [] if row is None else [*TABLE.kernels(row)]
        takes_cudnn = kernel is None and kernels[:1] == [FLASH_2] and CUDNN in kernels
        return cls(
            device=device,
            per_node=per_node,
            device_bytes=device_bytes or TABLE.values("device_bytes").get(row or "", 0.0),
            host_bytes=host_bytes or HOST_BYTES_PER_DEVICE * per_node,
            speeds=Speeds.named(device, kernel),
            kernel=kernel or next(iter(kernels), ""),
            of_long_documents=Speeds.named(device, CUDNN) if takes_cudnn else None,
            is_known=row is not None,
        )

    @classmethod
    def here(cls, gpus: int) -> Machine:
        """Return this machine, of which a run uses its `gpus` visible GPUs, or the CPU if there is none."""
        if not gpus or not torch.cuda.is_available():
            return cls.of("CPU", 1, host_bytes=host_bytes())
        memory = torch.cuda.get_device_properties().total_memory
        return cls.of(torch.cuda.get_device_name(), gpus, device_bytes=memory, host_bytes=host_bytes())

    @property
    def is_cpu(self) -> bool:
        """Whether the devices are the host's own CPU, so that all memory is the host's."""
        return self.device == "CPU"

    @property
    def correction(self) -> Correction:
        """The correction of what is predicted with the machine's kernel."""
        return dict(self.corrections).get(self.kernel, Correction())

    def with_documents(self, documents: Sequence[int]) -> Machine:
        """Return the machine with the speeds of the attention kernel that computes documents of these lengths.

        That is cuDNN's for a long document that is alone, where the usual kernel is torch's FlashAttention-2.
        """
        from longctx.attention.kernels.choose import LONG_DOCUMENT

        if self.of_long_documents is None or len(documents) != 1 or documents[0] < LONG_DOCUMENT:
            return self
        return replace(self, speeds=self.of_long_documents, of_long_documents=None, kernel=CUDNN)


def devices_per_node(world_size: int, env: Mapping[str, str], visible: int) -> int:
    """Return a number n such that ranks 0..n-1, n..2n-1 and so on are sure to share a node.

    It is LOCAL_WORLD_SIZE if all nodes are full.

    Args:
        world_size: processes of the run.
        env: the environment of a launched process.
        visible: GPUs that a process sees, or 0; replaces LOCAL_WORLD_SIZE if the launcher does not set it.
    """
    local = int(env.get("LOCAL_WORLD_SIZE") or min(world_size, visible or world_size))
    return math.gcd(local, world_size)  # for nodes of different sizes, what divides them all


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

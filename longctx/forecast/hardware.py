"""The devices and memory of this machine, as far as settings depend on them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from longctx.forecast.machine_memory import host_bytes


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

"""NCCL as a backend of torch.distributed: cpp/softnccl.cpp in the place of ProcessGroupNCCL."""

from __future__ import annotations

import datetime
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.softcuda.library import NCCL_PATH


def install() -> None:
    """Tell torch.distributed that it has NCCL, and that gloo is for CPU tensors."""
    spec = importlib.util.spec_from_file_location("softnccl", NCCL_PATH)
    assert spec is not None, f"{NCCL_PATH} is no module"
    assert spec.loader is not None, f"{NCCL_PATH} is no module"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    c10d: Any = dist.distributed_c10d
    for place in (c10d, dist, torch._C._distributed_c10d):
        place.ProcessGroupNCCL = module.ProcessGroupNCCL  # type: ignore[attr-defined]
    c10d._NCCL_AVAILABLE = True
    # CUDA builds let gloo take GPU tensors and copy them to the host and back, which is never meant here.
    dist.Backend.backend_capability["gloo"] = ["cpu"]
    c10d.new_group = dist.new_group = _gloo_unbound(c10d.new_group)
    timeout = datetime.timedelta(minutes=10)  # as in CUDA builds
    c10d.default_pg_nccl_timeout = dist.constants.default_pg_nccl_timeout = timeout


def _gloo_unbound(new_group: Callable[..., Any]) -> Callable[..., Any]:
    """Make groups of gloo without the GPU that the default group is bound to, which gloo of a CUDA build knows."""

    @functools.wraps(new_group)
    def unbound(*args: Any, backend: str | None = None, **keywords: Any) -> Any:
        world: Any = dist.group.WORLD
        bound = world.bound_device_id
        if backend == "gloo":
            world.bound_device_id = None
        try:
            return new_group(*args, backend=backend, **keywords)
        finally:
            world.bound_device_id = bound

    return unbound

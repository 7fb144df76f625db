"""NCCL as a backend of torch.distributed: cpp/softnccl.cpp in the place of ProcessGroupNCCL."""

from __future__ import annotations

import datetime
import importlib.util
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
    timeout = datetime.timedelta(minutes=10)  # as in CUDA builds
    c10d.default_pg_nccl_timeout = dist.constants.default_pg_nccl_timeout = timeout

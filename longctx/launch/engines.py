"""Hand a training engine to accelerate through the environment its launcher uses, and start the process group."""

from __future__ import annotations

import os
from datetime import timedelta

_FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}
_DEEPSPEED = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
}
ENGINE_ENVIRONMENT = {"fsdp2": _FSDP, "deepspeed": _DEEPSPEED}
"""What the shipped profiles fsdp2 and zero3 make the launcher export."""


def promote(engine: str) -> None:
    """Make a plain launch use `engine` (fsdp2 or deepspeed), as its shipped profile would have."""
    os.environ.update(ENGINE_ENVIRONMENT[engine])


def stay_on_cpu() -> None:
    """Tell DeepSpeed, which accelerate imports for every engine; else it looks for a GPU, or warns of having none."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def prefer_huge_pages() -> None:
    """Have torch ask for huge pages behind large CPU tensors, whose first touch then costs a fraction.

    Call it before the first tensor: torch reads the variable once.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def start_on_cpu(engine: str, timeout: timedelta | None = None) -> None:
    """Start gloo and tell accelerate which engine runs on it; accelerate itself refuses both engines there.

    Called before TrainingArguments exist, which then take the state as it is.

    Args:
        timeout: how long ranks wait for each other; torch's default where None.
    """
    os.environ.pop("ACCELERATE_USE_CPU", None)  # with it, accelerate leaves DeepSpeed out
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True, backend="gloo", **({} if timeout is None else {"timeout": timeout}))
    if engine == "deepspeed":
        _start_deepspeed_on_gloo()
        PartialState._shared_state["distributed_type"] = DistributedType.DEEPSPEED
    else:
        # A kind with an accelerator: accelerate promotes it to FSDP by itself, plug-in included.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU


def _start_deepspeed_on_gloo() -> None:
    import deepspeed
    import deepspeed.ops

    # Else DeepSpeed compiles a shared-memory op here: half a minute, and a crash without a compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)

"""The processes of a run: they start with their engine, agree on what was decided, and end together."""

from __future__ import annotations

import os
import resource
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch.distributed as dist
from trl import SFTConfig

import longctx
from longctx.launch.network import choose_interface
from longctx.ranks import hang
from longctx.ranks.agreement import check_agreement, on_all_ranks
from longctx.settings.machine_checks import MINIMUM_VERSIONS, REQUIRED_VERSIONS
from longctx.settings.run import Run
from longctx.training.checkpoint.folder import checkpoint_of
from longctx.training.engines import start_on_cpu, start_on_gpu
from longctx.upstream.accelerate_internals import load_on_every_rank, offload_fsdp, promote
from longctx.upstream.deepspeed_internals import stay_on_cpu


def start_processes(run: Run) -> None:
    """Hand the engine to accelerate, and start the process group if there is one.

    As many files may then be open as the system allows: gloo has a connection to every rank.
    """
    settings = run.settings
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if run.has_group:
        choose_interface(os.environ)
        hang.record_collectives(Path(settings["output_dir"]), os.environ)
    if run.promotes_engine:
        promote(run.engine)
    if run.engine == "fsdp2" and settings["load_in_4bit"]:
        load_on_every_rank()
    if run.engine == "fsdp2" and run.memory_options.offload_param_device == "cpu":
        offload_fsdp()
    if run.use_cpu:
        stay_on_cpu()
    if run.has_group:
        timeout = timedelta(seconds=settings["ddp_timeout"])
        if run.use_cpu:
            start_on_cpu(run.engine, timeout)
        else:
            start_on_gpu(timeout, settings["ddp_backend"])


def degrees(run: Run) -> dict[str, object]:
    """Return accelerate's keywords for the mesh: HSDP's replicas, and shards, which contain the sequence groups.

    accelerate makes FSDP2's mesh from them, on the run's kind of device. Without them torch makes the mesh, on GPUs
    wherever it sees one, even in a run on the CPU.
    """
    if run.dims.dp_replicate == 1 and not (run.engine == "fsdp2" and run.use_cpu):
        return {}
    from accelerate import ParallelismConfig

    shards = run.dims.world_size // run.dims.dp_replicate
    return {"parallelism_config": ParallelismConfig(dp_replicate_size=run.dims.dp_replicate, dp_shard_size=shards)}


def agree(run: Run, args: SFTConfig) -> None:
    """Check, on all ranks together, that they have decided the same.

    Raises:
        ValueError: naming what differs.
    """
    check_agreement(on_all_ranks(partial(_decided, run, args)))


def _decided(run: Run, args: SFTConfig) -> dict[str, str]:
    """Return what must be the same on all ranks: settings, what follows from them and from the node, and versions."""
    flags = run.flags.method.flags
    settings = {name: value for name, value in run.settings.items() if name not in flags or not flags[name].node}
    packages = (*REQUIRED_VERSIONS, *MINIMUM_VERSIONS.get(run.engine, {}))
    decided = {f"--{name}": getattr(value, "value", value) for name, value in settings.items()}
    decided |= {"mesh": run.dims, "backend": run.backend.name, "engine": run.engine}
    decided |= {"longctx": longctx.__version__} | {package: version(package) for package in packages}
    if run.settings["resume_from_checkpoint"] is not None:
        found = checkpoint_of(str(run.settings["resume_from_checkpoint"]), Path(args.output_dir))
        decided["checkpoint"] = None if found is None else found.name
    return {name: str(value) for name, value in decided.items()}


def finish() -> None:
    """Leave the process group together."""
    hang.WATCH.stop()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()

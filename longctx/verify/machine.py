"""Checks of the machine: versions, devices, links, shared memory, kernels and settings, each with a remedy.

Advice: a slow link or an untested release makes no run inexact, so none of it decides about the exit code.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import combinations
from pathlib import Path

import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from longctx.attention.kernels import DenseKernel, flash_attn, prefer
from longctx.launch.accelerate import default_config_file
from longctx.machine.measure import measure_link
from longctx.model.allow_list import head_size, kernel_of
from longctx.ranks.agreement import gather_objects
from longctx.settings.run import Run
from longctx.verify.report import Finding

SHARED_MEMORY_GIB = 1.0
"""NCCL and the workers of data loaders pass tensors through /dev/shm; containers have 64 MiB unless told."""

MOST_PAIRED_RANKS = 16
"""The most ranks for which the links between all pairs are measured: 120 pairs."""

SLOW_LINK = 0.25
"""A pair is slow below this part of the median pair's speed."""

MESSAGE_BYTES = 4 << 20

SLOWING_SETTINGS = {
    "CUDA_LAUNCH_BLOCKING": "every kernel waits for the one before; unset it outside of debugging",
    "NCCL_P2P_DISABLE": "GPUs of a node talk through host memory; unset it where NVLink or PCIe peer access works",
    "NCCL_SHM_DISABLE": "GPUs of a node may talk through the network; unset it",
    "NCCL_IB_DISABLE": "nodes talk over TCP; unset it where there is InfiniBand or RoCE",
    "TORCH_NCCL_BLOCKING_WAIT": "communication does not overlap with computation; unset it",
}
"""Environment variables that are set for debugging and then forgotten: what each does, and the remedy."""


def check_machine(run: Run, device: torch.device) -> list[Finding]:
    """Return what rank 0's node shows, and the links among all ranks. All ranks call this together."""
    return [
        *check_versions(),
        *_devices(run, device),
        *check_shared_memory(Path("/dev/shm")),
        *_kernels(run, device),
        *check_settings(os.environ, device),
        *(_links(device) if dist.is_initialized() and dist.get_world_size() > 1 else []),
    ]


DISTRIBUTION = "longctx-train"
"""The name under which pip knows longctx."""


def check_versions(distribution: str = DISTRIBUTION) -> Iterator[Finding]:
    """Compare every dependency with the range that it is tested in, which the distribution itself states."""
    try:
        stated = [Requirement(text) for text in requires(distribution) or []]
    except PackageNotFoundError:
        yield Finding(
            name="versions",
            value=f"{distribution} is not installed",
            ok=False,
            remedy="run pip install -e . in its folder, so that the ranges of its dependencies are known",
        )
        return
    for requirement in stated:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            found = "missing"
        ok = found != "missing" and requirement.specifier.contains(found, prereleases=True)
        remedy = f"tested with {requirement.specifier}: pip install '{requirement}'"
        yield Finding(name="version", value=f"{requirement.name} {found}", ok=ok, remedy="" if ok else remedy)


def _devices(run: Run, device: torch.device) -> Iterator[Finding]:
    """Return the devices of the ranks, and whether they are alike."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        own = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    else:
        own = f"CPU, {torch.get_num_threads()} threads of {os.cpu_count()}"
    found = gather_objects(own)
    kinds = sorted(set(found))
    yield Finding(
        name="devices",
        value="; ".join(f"{found.count(kind)} × {kind}" for kind in kinds),
        ok=len(kinds) == 1,
        remedy="" if len(kinds) == 1 else "all ranks wait for the slowest and the smallest; use devices of one kind",
    )
    local, cores = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), os.cpu_count() or 1
    threads = local * torch.get_num_threads()
    if device.type == "cpu":
        yield Finding(
            name="cores",
            value=f"{local} processes × {torch.get_num_threads()} threads on {cores} cores",
            ok=threads <= cores,
            remedy=f"set OMP_NUM_THREADS={max(1, cores // local)}, or start fewer processes" * (threads > cores),
        )
        if torch.cuda.is_available() and run.use_cpu:
            yield Finding(name="devices", value="GPUs are left idle", ok=False, remedy="leave out --use_cpu")


def check_shared_memory(folder: Path) -> Iterator[Finding]:
    """Return the size of /dev/shm, where the system has it."""
    if not folder.is_dir():
        return
    usage = shutil.disk_usage(folder)
    total, free = usage.total / 2**30, usage.free / 2**30
    ok = free >= SHARED_MEMORY_GIB
    yield Finding(
        name="shared memory",
        value=f"{folder} has {free:.1f} of {total:.1f} GiB free",
        ok=ok,
        remedy="" if ok else f"below {SHARED_MEMORY_GIB:.0f} GiB: docker run --shm-size 16g or --ipc host, or empty it",
    )


def _kernels(run: Run, device: torch.device) -> Iterator[Finding]:
    """Return the attention kernel of the step that is compared, and the libraries that are installed."""
    is_half = run.settings["bf16"] or run.settings["dtype"] == "bfloat16"
    dtype = torch.bfloat16 if is_half else torch.float32
    prefer(run.settings["attn_implementation"])
    kernel = kernel_of(run.model_config, device, dtype)
    ok = device.type == "cpu" or not isinstance(kernel, DenseKernel)
    remedy = "no fast kernel is exact here (see the log for why): pip install flash-attn"
    yield Finding(
        name="attention kernel",
        value=f"{kernel.name} for {str(dtype).removeprefix('torch.')}, heads of {head_size(run.model_config)}",
        ok=ok,
        remedy="" if ok else remedy,
    )
    for installed in flash_attn.installed():
        try:
            _ = installed.module
        except (ImportError, OSError) as error:
            yield Finding(
                name="attention kernel",
                value=f"{installed.name} does not import: {error}",
                ok=False,
                remedy=f"install {installed.distribution} for torch {torch.__version__}, or remove it",
            )


def check_settings(env: Mapping[str, str], device: torch.device) -> Iterator[Finding]:
    """Return environment variables and files that change a run without a flag."""
    found = False
    for name, effect in SLOWING_SETTINGS.items():
        if env.get(name, "0") not in ("", "0"):
            found = True
            yield Finding(name="settings", value=f"{name}={env[name]}", ok=False, remedy=effect)
    left_behind = default_config_file()
    if left_behind is not None:
        found = True
        yield Finding(
            name="settings",
            value=f"accelerate launch reads {left_behind} unasked",
            ok=False,
            remedy="name a profile with --config_file, or remove the file",
        )
    allocator = env.get("PYTORCH_ALLOC_CONF", env.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    if device.type == "cuda" and "expandable_segments:True" not in allocator:
        found = True
        yield Finding(
            name="settings",
            value="GPU memory may be lost to fragments",
            ok=False,
            remedy="set PYTORCH_ALLOC_CONF=expandable_segments:True for the longest sequences",
        )
    if not found:
        yield Finding(name="settings", value="nothing in the environment slows a run", ok=True, remedy="")


def _links(device: torch.device) -> Iterator[Finding]:
    """Measure all-to-all and ring among all ranks at once, and every pair by itself. All ranks call this together."""
    link = measure_link(None, device, num_bytes=MESSAGE_BYTES, repetitions=3)
    yield Finding(name="all-to-all", value=f"{link.exchange / 1e9:.2f} GB/s a rank", ok=True, remedy="")
    yield Finding(name="p2p, all ranks at once", value=f"{link.pass_on / 1e9:.2f} GB/s a rank", ok=True, remedy="")
    if dist.get_world_size() <= MOST_PAIRED_RANKS:
        yield from slow_pairs(measure_pairs(device))


def measure_pairs(device: torch.device, *, repetitions: int = 3) -> dict[tuple[int, int], float]:
    """Measure the bytes a second that two ranks send each other, pair by pair. All ranks call this together."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sent = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    speeds = torch.zeros(world_size, world_size, dtype=torch.float64, device=device)
    for first, second in combinations(range(world_size), 2):
        dist.barrier()
        if rank not in (first, second):
            continue
        peer = second if rank == first else first
        times = []
        for _ in range(repetitions + 1):
            started = time.perf_counter()
            for work in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
            ):
                work.wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - started)
        if rank == first:
            speeds[first, second] = MESSAGE_BYTES / statistics.median(times[1:])
    dist.all_reduce(speeds)
    return {(a, b): float(speeds[a, b]) for a, b in combinations(range(world_size), 2)}


def slow_pairs(speeds: Mapping[tuple[int, int], float]) -> Iterator[Finding]:
    """Return the range of all pairs, and each pair that is far slower than most."""
    median = statistics.median(speeds.values())
    slowest = min(speeds, key=lambda pair: speeds[pair])
    yield Finding(
        name="p2p, pair by pair",
        value=f"{median / 1e9:.2f} GB/s in the middle of {len(speeds)} pairs, {speeds[slowest] / 1e9:.2f} the slowest",
        ok=True,
        remedy="",
    )
    for (first, second), speed in speeds.items():
        if speed < SLOW_LINK * median:
            yield Finding(
                name="p2p, pair by pair",
                value=f"ranks {first} and {second}: {speed / 1e9:.2f} GB/s",
                ok=False,
                remedy="look at nvidia-smi topo -m; let --sp span ranks with fast links only (a node), or replace it",
            )

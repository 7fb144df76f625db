"""Checks of the machine: versions, devices, links, shared memory, kernels and settings, each with its remedy.

Advice: a slow link or an untested release makes no run inexact, so none of it decides about the exit code.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
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
        check_versions(),
        *_devices(device),
        *check_shared_memory(Path("/dev/shm")),
        *_kernels(run, device),
        *check_settings(os.environ, device),
        *_links(device),
    ]


DISTRIBUTION = "longctx-train"
"""The name under which pip knows longctx."""

ALWAYS_NAMED = ("torch", "transformers", "trl", "accelerate", "deepspeed")


def check_versions(distribution: str = DISTRIBUTION) -> Finding:
    """Compare every dependency with the range that it is tested in, which the distribution itself states."""
    try:
        stated = [Requirement(text) for text in requires(distribution) or []]
    except PackageNotFoundError:
        remedy = "run pip install -e . in its folder, so that the ranges of its dependencies are known"
        return Finding("versions", f"{distribution} is not installed", remedy)
    found, off = {}, []
    for requirement in stated:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found[requirement.name] = version(requirement.name)
        except PackageNotFoundError:
            found[requirement.name] = "missing"
        if not requirement.specifier.contains(found[requirement.name], prereleases=True):
            off.append(requirement)
    named = dict.fromkeys([*ALWAYS_NAMED, *(requirement.name for requirement in off)])
    value = ", ".join(f"{name} {found[name]}" for name in named if name in found)
    wanted = " ".join(f"'{requirement}'" for requirement in off)
    return Finding("versions", value, f"not tested: pip install {wanted}" if off else "")


def _devices(device: torch.device) -> Iterator[Finding]:
    """Return the devices of the ranks, and whether they are alike."""
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        own = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    else:
        own = f"CPU, {threads} threads of {cores}"
    found = gather_objects(own)
    kinds = sorted(set(found))
    remedy = "all ranks wait for the slowest and the smallest; use devices of one kind" * (len(kinds) > 1)
    yield Finding("devices", "; ".join(f"{found.count(kind)} × {kind}" for kind in kinds), remedy)
    if device.type == "cpu":
        local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        remedy = f"set OMP_NUM_THREADS={max(1, cores // local)}, or start fewer processes"
        value = f"{local} processes × {threads} threads on {cores} cores"
        yield Finding("cores", value, remedy * (local * threads > cores))


def check_shared_memory(folder: Path) -> Iterator[Finding]:
    """Return the size of /dev/shm, where the system has it."""
    if not folder.is_dir():
        return
    usage = shutil.disk_usage(folder)
    total, free = usage.total / 2**30, usage.free / 2**30
    remedy = f"below {SHARED_MEMORY_GIB:.0f} GiB: docker run --shm-size 16g or --ipc host, or empty it"
    value = f"{folder} has {free:.1f} of {total:.1f} GiB free"
    yield Finding("shared memory", value, remedy * (free < SHARED_MEMORY_GIB))


def _kernels(run: Run, device: torch.device) -> Iterator[Finding]:
    """Return the attention kernel of the step that is compared, and the libraries that are installed."""
    is_half = run.settings["bf16"] or run.settings["dtype"] == "bfloat16"
    dtype = torch.bfloat16 if is_half else torch.float32
    prefer(run.settings["attn_implementation"])
    kernel = kernel_of(run.model_config, device, dtype)
    is_slow = device.type != "cpu" and isinstance(kernel, DenseKernel)
    value = f"{kernel.name} for {str(dtype).removeprefix('torch.')}, heads of {head_size(run.model_config)}"
    remedy = "no fast kernel is exact here (see the log for why): pip install flash-attn"
    yield Finding("attention kernel", value, remedy * is_slow)
    for installed in flash_attn.installed():
        try:
            _ = installed.module
        except (ImportError, OSError) as error:
            remedy = f"install {installed.distribution} for torch {torch.__version__}, or remove it"
            yield Finding("attention kernel", f"{installed.name} does not import: {error}", remedy)


def check_settings(env: Mapping[str, str], device: torch.device) -> list[Finding]:
    """Return environment variables and files that change a run without a flag."""
    found = [
        (f"{name}={env[name]}", effect)
        for name, effect in SLOWING_SETTINGS.items()
        if env.get(name, "0") not in ("", "0")
    ]
    if left_behind := default_config_file():
        remedy = "name a profile with --config_file, or remove the file"
        found.append((f"accelerate launch reads {left_behind} unasked", remedy))
    allocator = env.get("PYTORCH_ALLOC_CONF", env.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    if device.type == "cuda" and "expandable_segments:True" not in allocator:
        remedy = "set PYTORCH_ALLOC_CONF=expandable_segments:True for the longest sequences"
        found.append(("GPU memory may be lost to fragments", remedy))
    return [Finding("settings", *each) for each in found or [("nothing in the environment slows a run", "")]]


def _links(device: torch.device) -> Iterator[Finding]:
    """Measure an all-to-all and a hop around the ring among all ranks. All ranks call this together."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    link = measure_link(None, device, num_bytes=MESSAGE_BYTES, repetitions=3)
    yield Finding("all-to-all", f"{link.exchange / 1e9:.2f} GB/s a rank")
    yield Finding("p2p, all ranks at once", f"{link.pass_on / 1e9:.2f} GB/s a rank")

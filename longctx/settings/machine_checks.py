"""Check that the machine suits the run: memory, disks, sockets, attention kernels, counts, and installed packages."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.version import Version

from longctx.attention.kernels import flash_attn
from longctx.attention.kernels.blockwise import DENSE_TOKENS, ShortDenseKernel, dense_refusal
from longctx.attention.kernels.choose import FLASH_ATTENTION
from longctx.forecast.cost import GIB
from longctx.forecast.memory import offloaded
from longctx.forecast.memory_options import NVME
from longctx.forecast.shape import RunShape
from longctx.machine.here import available_host_memory
from longctx.settings.run import Run
from longctx.upstream.deepspeed_internals import stay_on_cpu

LARGEST_INT32 = 2**31 - 1
LONGEST_SOCKET = 107
"""Limit on the path of a Unix socket, in bytes."""


def check_machine(run: Run) -> None:
    """Check that this machine has room for a row and for offloaded data."""
    check_row_length(
        run.settings["max_length"],
        run.settings["per_device_train_batch_size"],
        heads=run.setup.num_heads // run.dims.ulysses,
        ring=run.dims.ring,
    )
    check_worker_sockets(run.settings["dataloader_num_workers"], tempfile.gettempdir())
    if not run.memory_options.offloads:
        return
    local = int(run.facts.env.get("LOCAL_WORLD_SIZE", 0))
    ranks = min(local or (run.machine.per_node if run.facts.launcher.launched else run.world_size), run.world_size)
    check_host_memory(run.shape, run.settings["max_length"], ranks, available_host_memory())
    check_disks(run.shape, ranks, use_cpu=run.use_cpu)


def check_worker_sockets(num_workers: int, folder: str) -> None:
    """Check that data loader workers can make their sockets in the folder for temporary files.

    A worker that cannot make one yields no batch, and its rank waits forever.

    Raises:
        ValueError: if the folder's path is too long for the system's sockets.
    """
    longest = LONGEST_SOCKET - len("/pymp-12345678/listener-12345678")  # multiprocessing's names
    if num_workers and len(os.fsencode(folder)) > longest:
        raise ValueError(
            f"--dataloader_num_workers {num_workers} needs sockets in {folder}, whose path has more than {longest} "
            "bytes. Set TMPDIR to a shorter one, or use --dataloader_num_workers 0."
        )


def check_kernel_package(name: str | None) -> None:
    """Check that the package of the attention kernel that was asked for is installed; torch has a FlashAttention-2.

    Raises:
        ValueError: if it is not.
    """
    if name not in FLASH_ATTENTION or name == "flash_attention_2" or flash_attn.is_installed(FLASH_ATTENTION[name]):
        return
    package = FLASH_ATTENTION[name].distribution
    raise ValueError(
        f"--attn_implementation {name} needs {package}, which is not installed. Run pip install {package}, or leave "
        "the flag out for the fastest kernel that is exact here."
    )


def check_kernels(found: Sequence[tuple[str, str]], tokens: int) -> None:
    """Check that the attention kernels of the ranks agree and support the length.

    Args:
        found: the names of every rank's device and attention kernel.
        tokens: the most tokens of a document on one rank.

    Raises:
        ValueError: if devices of one kind have different kernels, or if a rank has only the dense kernel for more
            tokens than it supports.
    """
    first: dict[str, tuple[int, str]] = {}
    for rank, (device, kernel) in enumerate(found):
        other, expected = first.setdefault(device, (rank, kernel))
        if kernel != expected:
            raise ValueError(
                f"attention kernels differ on devices of one kind ({device}): {expected} on rank {other}, {kernel} on "
                f"rank {rank}. The log of one of them says why it does not use another kernel. Install the same "
                "packages on all nodes, and check that this GPU works correctly."
            )
    if tokens > DENSE_TOKENS and any(kernel == ShortDenseKernel.name for _, kernel in found):
        raise ValueError(dense_refusal(tokens))


def check_host_memory(shape: RunShape, length: int, ranks: int, available: int) -> None:
    """Check that the host has room for what is offloaded.

    Args:
        length: tokens of a row.
        ranks: of this machine.
        available: bytes of host memory that the run may take.

    Raises:
        ValueError: if more would be offloaded; the message names the categories and the length that fits.
    """
    host = {name: ranks * size for name, size in offloaded(shape, length).items() if size}
    needed, states = sum(host.values()), ranks * sum(offloaded(shape, 0).values())
    if needed <= available:
        return
    parts = ", ".join(f"{name} {size / GIB:,.1f}" for name, size in host.items())
    fits = int(length * (available - states) / (needed - states)) if available > states else 0
    shorter = f"--max_length {fits} fits" if fits else "no length fits"
    raise ValueError(
        f"What is offloaded needs about {needed / GIB:,.1f} GiB of host memory on this machine for its "
        f"{ranks} processes ({parts}), and {available / GIB:,.1f} GiB are available. {shorter}; or "
        "leave out an option that offloads, spread the run over more machines, or give the job more memory."
    )


def check_disks(shape: RunShape, ranks: int, *, use_cpu: bool) -> None:
    """Check that DeepSpeed can write to NVMe here.

    Raises:
        ValueError: if a folder for NVMe offload cannot be written or has too little room, or DeepSpeed cannot build
            async_io.
    """
    memory_options, parameters = shape.options, shape.model.num_parameters * ranks / shape.world_size
    bytes_each = {"optimizer": 12, "param": shape.element_size}  # fp32 weights and AdamW's two moments
    on_disk = [kind for kind in bytes_each if getattr(memory_options, f"offload_{kind}_device") == NVME]
    for kind in on_disk:
        folder = Path(getattr(memory_options, f"offload_{kind}_nvme_path"))
        _check_folder(f"--offload_{kind}_nvme_path", folder, bytes_each[kind] * parameters)
    if on_disk and not _has_async_io(use_cpu):
        raise ValueError(
            "Offloading to nvme needs DeepSpeed's async_io, which cannot be built here: it needs a C++ compiler, ninja "
            "and libaio's headers (apt install libaio-dev); ds_report says what is missing. Install them, or use cpu."
        )


def _check_folder(flag: str, folder: Path, needed: float) -> None:
    """Check that a folder for NVMe offload can be written, and has room."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ValueError(f"{flag} {folder} is not a folder that can be written. Name one on a local SSD.")
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ValueError(
            f"{flag} {folder} has {free / GIB:,.1f} GiB free, and about {needed / GIB:,.1f} GiB go there. Name a "
            "folder with more, or spread the run over more machines."
        )


def _has_async_io(use_cpu: bool) -> bool:
    if use_cpu:
        stay_on_cpu()
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return bool(AsyncIOBuilder().is_compatible(verbose=False))


def check_row_length(max_length: int, num_rows: int, *, heads: int, ring: int) -> None:
    """Check that a row is not longer than attention kernels can count in int32.

    They count a row's document borders and the elements of the log-sum-exp, one per head and token of a call, in
    int32. Everything else, torch's kernels included, counts in 64 bits.

    Args:
        heads: query heads of a rank.
        ring: ring ranks that a row is divided over.

    Raises:
        ValueError: if a count exceeds int32.
    """
    row = f"--max_length {max_length} × --per_device_train_batch_size {num_rows}"
    counts = {
        "a row of {:,} tokens": max_length * num_rows,
        f"{{:,}} sums of {heads} heads on a rank": -(-max_length * num_rows // ring) * heads,
    }
    for what, count in counts.items():
        if count > LARGEST_INT32:
            raise ValueError(
                f"{row} is {what.format(count)}, and attention kernels count {LARGEST_INT32:,} at most, in int32. "
                "Lower one of them, or raise --sp."
            )


REQUIRED_VERSIONS = {"torch": "2.11.0", "accelerate": "1.15.0", "transformers": "5.17.0", "trl": "1.16.0"}

MINIMUM_VERSIONS = {"deepspeed": {"deepspeed": "0.19.8"}}
"""Oldest releases an engine is exact with, besides those every run needs.

DeepSpeed before 0.19.8 waits only for the last of a module's all-gathers (its pull request 8539); over gloo, a layer
then computes with parameters that have not all arrived.
"""

PEFT_VERSIONS = {"peft": "0.20.0"}
"""Releases for --use_peft, the extra `peft`."""

LIGER_VERSIONS = {"liger-kernel": "0.8.0", "triton": "3.0.0"}
"""Releases for --use_liger_kernel."""

QLORA_VERSIONS = {"bitsandbytes": "0.50.0"}
"""Releases for --load_in_4bit, the extra `qlora`."""


def check_versions(minimum: Mapping[str, str], user: str) -> None:
    """Check that packages are installed, in a release that is new enough.

    Args:
        minimum: the oldest release by package.
        user: what needs them, for the message.

    Raises:
        ValueError: for the first that is not, with the installed release and the command to install it.
    """
    for package, oldest in minimum.items():
        try:
            installed = version(package)
        except PackageNotFoundError:
            installed = None
        if installed is None or Version(installed) < Version(oldest):
            found = f"{package} {installed} is installed" if installed else f"{package} is not installed"
            raise ValueError(f"{found} and {user} needs {oldest} or later. Run pip install -U '{package}>={oldest}'.")

"""A CUDA device in host memory, for tests of GPU code on machines without a GPU, with real numbers.

On the CPU build of torch every operator of a CUDA tensor runs its CPU kernel on the same bytes. Everything around the
kernels is as on GPUs: devices and their memory are counted, autograd has a thread for each device, copies are
asynchronous, NCCL wants GPU tensors of a GPU of its own, torch.cuda initialises itself when it is first used.

    cpp/             the device (memory, streams, operators) and NCCL, in C++; build.py compiles and caches them
    library.py       loads the device, which has to be before torch is imported, and reports hazards
    runtime.py       what torch.cuda calls in torch's C extension
    streams.py       torch.cuda.Stream and Event
    storages.py      storages that Python makes and resizes
    kernels.py       kernels that only CUDA has, in Python
    nccl.py          NCCL for torch.distributed
    watch.py         where the host waits for the device, and where streams race
    program.py       SOFTCUDA_WATCH=1 ends a program with an error for what was found in it
    site/            SOFTCUDA=1 with this folder on PYTHONPATH installs the device in every Python process
    ranks.py         run functions on soft GPUs from a test

Kernels run at once, in the order in which the host issues them, whatever their streams. Other orders are not tried.
Instead, each rank of a test, and each program that a test starts as a process of its own, is watched for what could
make them differ (watch.py): it is an error if one kernel writes
memory that another one uses on a stream which no event orders with the first, or if memory is given away while another
stream may use it. Without such races every kernel reads the same bytes in each order that the events allow, so that
running kernels late would show nothing more. Copies to and from the host, and collectives, do run late, because the
host uses their memory without a kernel: until somebody waits for them, what they write reads as NaN, and what they
read must not change.

This does not show what depends on `Event.query`, which always says that the event has happened, and kernels of several
communicators that block each other. Nothing is reported of a process that is killed. The device has no Triton, CUDA
graphs, `torch.compile` or bitsandbytes, and its allocator reserves what it allocates.

Environment: SOFTCUDA_DEVICES (2), SOFTCUDA_BYTES of each (8 GiB), SOFTCUDA_STRICT (1 looks for hazards), SOFTCUDA_WATCH
(1 watches programs).
"""

from __future__ import annotations

import os
import sys


def install() -> None:
    """Put the device in place. Call it before torch is imported, on a machine where `build.unavailable()` is None."""
    from tests.softcuda import library  # isort: skip  (before torch)
    from tests.softcuda import kernels, nccl, runtime, storages, streams

    for part in (runtime, streams, storages, kernels, nccl):
        part.install()
    # Its kernels need a GPU, and importing it initialises CUDA, which a server that forks ranks must not.
    sys.modules.setdefault("bitsandbytes", None)  # type: ignore[arg-type]
    library.set_strict(os.environ.get("SOFTCUDA_STRICT") == "1")

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
    site/            SOFTCUDA=1 with this folder on PYTHONPATH installs the device in every Python process
    ranks.py         run functions on soft GPUs from a test

It has no Triton, CUDA graphs, `torch.compile` or bitsandbytes, its allocator reserves what it allocates, and kernels
run in the order of their calls: races between kernels change no numbers, and watch.py finds them.

Environment: SOFTCUDA_DEVICES (2), SOFTCUDA_BYTES of each (8 GiB), SOFTCUDA_STRICT (1 looks for hazards).
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

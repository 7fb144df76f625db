"""The soft device's library, loaded: import this before torch. What torch's C extension offers for a GPU calls it."""

from __future__ import annotations

import ctypes
import os
import sys
from types import SimpleNamespace

from tests.softcuda.build import build

assert "torch" not in sys.modules, "the soft device has to be there when torch is imported"

LIBRARY_PATH, NCCL_PATH = build()
library = ctypes.CDLL(str(LIBRARY_PATH), mode=ctypes.RTLD_GLOBAL)
library.soft_allocated.restype = library.soft_peak.restype = library.soft_allocations.restype = ctypes.c_int64
library.soft_set_limit.argtypes = (ctypes.c_int, ctypes.c_int64)
library.soft_hazard.restype = ctypes.c_char_p

NUM_DEVICES = int(os.environ.get("SOFTCUDA_DEVICES", "2"))
TOTAL_BYTES = int(os.environ.get("SOFTCUDA_BYTES", str(8 << 30)))
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=TOTAL_BYTES,
    multi_processor_count=132,
    warp_size=32,
    shared_memory_per_block_optin=232448,
    L2_cache_size=50 << 20,
    max_threads_per_multi_processor=2048,
    is_integrated=0,
    regs_per_multiprocessor=65536,
    gcnArchName="",
)
"""What torch.cuda.get_device_properties answers: the choice of kernels and the forecast read it."""


def set_strict(on: bool) -> None:
    """Look for hazards, or not: see cpp/streams.h."""
    library.soft_set_strict(int(on))


def hazards() -> list[str]:
    """Return what was found so far."""
    return [library.soft_hazard(i).decode() for i in range(library.soft_num_hazards())]


def watch_for_hazards() -> None:
    """Look for races between streams, too, from now on: see watch.py."""
    from tests.softcuda.watch import for_races

    for_races.start()


def check_hazards() -> None:
    """Finish all copies.

    Raises:
        AssertionError: with what was read before it was there, or changed while it was being read, and with races.
    """
    from tests.softcuda.watch import for_races

    found = list(dict.fromkeys([*finished_hazards(), *for_races.races]))
    assert not found, "\n".join(found)


def finished_hazards() -> list[str]:
    """Finish all copies; return the hazards that were found, each with the place that saw it, and forget them."""
    from tests.softcuda.watch import hazards_seen_at

    for device in range(NUM_DEVICES):
        library.soft_synchronize(device)
    texts = hazards()
    places = [*hazards_seen_at, *["the end of the process"] * len(texts)]
    library.soft_forget_hazards()
    hazards_seen_at.clear()
    return [f"{text} (seen in {place})" for text, place in zip(texts, places, strict=False)]

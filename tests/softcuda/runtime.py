"""What torch.cuda's own Python code calls in torch's C extension, where a CPU build has nothing.

torch.cuda stays what it is, so that it initialises CUDA when it would on a GPU, queues seeds until then, and refuses a
process that was forked from one that has used CUDA.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch

from tests.softcuda.library import NUM_DEVICES, PROPERTIES, TOTAL_BYTES, library

_used_before_fork = False


def install() -> None:
    """Give torch._C the functions, and torch.cuda what it looked for when it was imported."""
    for name, function in _C_FUNCTIONS.items():
        setattr(torch._C, name, function)
    cuda: Any = torch.cuda
    cuda._cudart = _CUDART
    cuda._exchange_device = _exchange_device
    cuda._maybe_exchange_device = _maybe_exchange_device
    cuda._get_device_properties = lambda device: PROPERTIES
    cuda._is_in_bad_fork = lambda: _used_before_fork
    cuda._device_count_nvml = lambda: NUM_DEVICES  # the driver's library, which answers without touching CUDA
    cuda.graphs._cuda_isCurrentStreamCapturing = lambda: False
    cuda.is_current_stream_capturing = lambda: False
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(cuda.nvtx, name, lambda *args, **kwargs: 0)
    torch.version.cuda = "12.8"
    os.register_at_fork(after_in_child=_after_fork)


_touched = False
"""Whether this process has asked CUDA's runtime for anything, after which a fork of it cannot use CUDA."""


def uses_cuda() -> bool:
    """Return whether this process has used the device; a process forked from such a one cannot."""
    return _touched and not _used_before_fork


def _after_fork() -> None:
    global _used_before_fork
    _used_before_fork = _touched


def _touch() -> None:
    global _touched
    _touched = True


def _init() -> None:
    _touch()
    torch.cuda.default_generators = tuple(torch.ops.softcuda.default_generator(i) for i in range(NUM_DEVICES))


def _get_device_count() -> int:
    _touch()
    return NUM_DEVICES


def _set_device(device: int) -> None:
    torch.cuda._lazy_init()
    if device >= NUM_DEVICES:
        raise torch.AcceleratorError("CUDA error: invalid device ordinal")
    library.soft_set_device(device)


def _exchange_device(device: int) -> int:
    before = library.soft_get_device()
    if device < 0:
        return -1
    _set_device(device)
    return before


def _maybe_exchange_device(device: int) -> int:
    before = library.soft_get_device()
    if device >= 0:
        _set_device(device)
    return before


def _memory_stats(device: int) -> dict[str, Any]:
    """Nested as torch._C's are. What is reserved is what is allocated: this allocator keeps nothing."""
    now, peak = library.soft_allocated(device), library.soft_peak(device)
    number = library.soft_allocations(device)
    of_bytes = {"current": now, "peak": peak, "allocated": peak, "freed": peak - now}
    pools = {pool: dict(of_bytes) for pool in ("all", "small_pool", "large_pool")}
    names = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
    stats: dict[str, Any] = dict.fromkeys(names, pools)
    none = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}
    stats["inactive_split_bytes"] = {"all": none}
    stats["allocation"] = {"all": {**none, "allocated": number}}
    return {**stats, "num_alloc_retries": 0, "num_ooms": 0}


def _stream_data(stream: torch.Stream) -> tuple[int, int, int]:
    return stream.stream_id, stream.device_index, stream.device_type


def _get_current_stream(device: int) -> tuple[int, int, int]:
    return _stream_data(torch.accelerator.current_stream(torch.device("cuda", _index(device))))


def _set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    torch.accelerator.set_stream(torch.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type))


def _index(device: int) -> int:
    return library.soft_get_device() if device < 0 else device


_KCUDA = 1  # c10::DeviceType

_C_FUNCTIONS = {
    "_cuda_init": _init,
    "_cuda_getDeviceCount": _get_device_count,
    "_cuda_getDevice": lambda: library.soft_get_device(),
    "_cuda_setDevice": _set_device,
    "_cuda_exchangeDevice": _exchange_device,
    "_cuda_maybeExchangeDevice": _maybe_exchange_device,
    "_cuda_synchronize": lambda: library.soft_synchronize(library.soft_get_device()),
    "_cuda_getCurrentStream": _get_current_stream,
    "_cuda_getCurrentRawStream": lambda device: _get_current_stream(device)[0],
    "_cuda_getDefaultStream": lambda device: (0, _index(device), _KCUDA),
    "_cuda_setStream": _set_stream,
    "_cuda_memoryStats": _memory_stats,
    "_cuda_resetPeakMemoryStats": lambda device: library.soft_reset_peak(device),
    "_cuda_resetAccumulatedMemoryStats": lambda device: None,
    "_cuda_setMemoryFraction": lambda fraction, device: library.soft_set_limit(device, int(fraction * TOTAL_BYTES)),
    "_cuda_emptyCache": lambda: None,
    "_cuda_ipc_collect": lambda: None,
    "_cuda_canDeviceAccessPeer": lambda device, peer: True,
    "_cuda_getArchFlags": lambda: "sm_90",
    "_cuda_getCurrentBlasHandle": lambda: 0,
    "_cuda_set_sync_debug_mode": lambda mode: None,
    "_cuda_get_sync_debug_mode": lambda: 0,
    "_nccl_version": lambda: 2 << 32 | 27 << 16 | 3,
    "_nccl_version_suffix": lambda: b"",
}

_CUDART = SimpleNamespace(
    cudaMemGetInfo=lambda device: (TOTAL_BYTES - library.soft_allocated(device), TOTAL_BYTES),
    cudaError=SimpleNamespace(success=0),
    cudaGetErrorString=str,
)

"""flash-attn 4 under our adapter, compiled for GPUs that are not there: forward and backward, for each kind of GPU.

Its kernels are written in NVIDIA's CuTe DSL, which nothing runs on a CPU. Its compiler needs no GPU, though, and
flash-attn compiles for tensors that have a shape only. So these tests show that the library takes the adapter's
arguments and that what it makes of them compiles; numbers come from the check of a run's start, on a GPU. The packages
are no dependencies: they are downloaded for these tests, 300 MB, and are not installed.
"""

from __future__ import annotations

import os
import site
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.workers import run_ranks

RELEASE = "4.0.0b36"
DSL = "4.8.1"
PACKAGES = (
    f"flash-attn-4=={RELEASE}",
    *(f"nvidia-cutlass-dsl{part}=={DSL}" for part in ("", "-libs-base", "-libs-core", "-libs-cu12")),
    *("apache-tvm-ffi>=0.1.11,<0.2", "cuda-bindings", "cuda-pathfinder", "quack-kernels>=0.5.3", "torch-c-dlpack-ext"),
)
"""With what the first of them requires, but for torch, whose CPU build is installed."""

MULTIPROCESSORS = {90: 132, 100: 148}
"""Of an H100 and a B200, by compute capability."""

CASES = {
    "documents": (128, (8, 2), True, -1),
    "full entries": (128, (8, 2), False, -1),
    "windows": (64, (4, 4), True, 511),
}
"""Size of a head, (query heads, key heads), causal, keys to the left of a query; -1 for all."""


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flash-attn-4")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(folder), *PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"flash-attn-4 {RELEASE} cannot be downloaded: {done.stderr.strip().splitlines()[-1]}")
    return str(folder)


def _load(packages: str, capability: int, folder: str):
    """Return the adapter over the library, which compiles for this capability and keeps what it made in a folder."""
    from longctx.attention.kernels.flash_attn import FlashAttention4

    num_multiprocessors = MULTIPROCESSORS[capability]
    os.environ["FLASH_ATTENTION_ARCH"] = f"sm_{capability}"
    os.environ["FLASH_ATTENTION_NUM_SMS"] = str(num_multiprocessors)
    os.environ["CUTE_DSL_ARCH"] = f"sm_{capability}a"
    os.environ["CUTE_DSL_KEEP"], os.environ["CUTE_DSL_DUMP_DIR"] = "ptx,cubin", folder
    site.addsitedir(packages)
    from cutlass.utils.hardware_info import HardwareInfo

    # Schedulers of persistent kernels ask the driver for these, as they are compiled.
    HardwareInfo.__init__ = lambda self, device_id=0: None
    HardwareInfo.get_device_multiprocessor_count = lambda self: num_multiprocessors
    HardwareInfo.get_max_active_clusters = lambda self, cluster_size, stream=None: num_multiprocessors // cluster_size
    return FlashAttention4(RELEASE)


def _problem(name: str):
    """Tensors without numbers on a GPU: (q, k, v), boundaries, 1/sqrt(D)."""
    from longctx.attention.kernels.entries import Varlen

    size, (queries, keys), causal, left = CASES[name]
    q, k, v = (torch.empty(300, heads, size, dtype=torch.bfloat16, device="cuda") for heads in (queries, keys, keys))
    starts = torch.empty(4, dtype=torch.int32, device="cuda")
    return (q, k, v), Varlen(starts, starts, 120, 120, causal, left, 0 if causal else -1, 0.0), size**-0.5


def compiled(packages: str, capability: int, folder: str) -> dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]]:
    """{case: {name of a result: its shape and dtype}} of the adapter's passes."""
    kernel = _load(packages, capability, folder)
    found = {}
    with FakeTensorMode():
        for name in CASES:
            inputs, varlen, scale = _problem(name)
            out, lse = kernel._forward(*inputs, varlen, scale)
            grads = kernel._backward(torch.empty_like(out), *inputs, out, lse, varlen, scale)
            results = zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True)
            found[name] = {result: (tuple(x.shape), x.dtype) for result, x in results}
    return found


@pytest.mark.long
@pytest.mark.parametrize("capability", sorted(MULTIPROCESSORS))
def test_every_pass_compiles_for_each_kind_of_gpu(capability, packages, tmp_path):
    found = run_ranks(1, f"{__name__}:compiled", packages, capability, str(tmp_path), backend=None, timeout=900)[0]
    half = torch.bfloat16
    for name, (size, (queries, keys), *_) in CASES.items():
        of_queries, of_keys = ((300, queries, size), half), ((300, keys, size), half)
        lse = ((queries, 300), torch.float32)
        assert found[name] == {"out": of_queries, "lse": lse, "dq": of_queries, "dk": of_keys, "dv": of_keys}
    code = [path for path in tmp_path.rglob("*.ptx") if path.with_suffix(".cubin").exists()]
    for kernel in (f"flash_fwd_sm{capability}", "bwd_preprocess", f"flash_bwd_sm{capability}", "bwd_postprocess"):
        assert any(kernel in path.name for path in code), [path.name for path in code]
    assert all(f".target sm_{capability}a" in path.read_text() for path in code)

"""The check of another library's kernel in a separate process.

Such a library was built for certain releases of torch and certain GPUs. With others it may access invalid memory. CUDA
then no longer works in that process, so no other kernel could be tried.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress

import torch

from longctx.attention.kernels import flash_attn
from longctx.attention.kernels.check import disagreement
from longctx.untrusted.working_directory import without_working_directory

SECONDS = 600.0
"""Most seconds for the check, which may compile kernels. A library that takes longer is passed over."""

_CODE = "from longctx.attention.kernels.elsewhere import main; main()"


def disagreement_elsewhere(
    kernel: flash_attn.FlashAttentionKernel,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    queries_per_key: int,
    windowed: bool,
) -> str | None:
    """Return `disagreement` from a separate process, or how that process ended if it gave no result."""
    what = [type(kernel).__name__, kernel.release, str(device), str(dtype), head_dim, queries_per_key, windowed]
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CODE, json.dumps(what)],
            env=os.environ | without_working_directory(),
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"a process that checked it had no result after {SECONDS:.0f} s"
    with suppress(ValueError, IndexError):
        return json.loads(done.stdout.splitlines()[-1])[0]
    if done.returncode < 0:
        how = f"was ended by {signal.Signals(-done.returncode).name}"
    else:
        how = f"ended with exit code {done.returncode}: {done.stderr.strip().rpartition(chr(10))[2]}"
    return f"a process that checked it {how}"


def main() -> None:
    """Check the kernel that the last argument describes, and print the result as JSON."""
    kind, release, device, dtype, head_dim, queries_per_key, windowed = json.loads(sys.argv[-1])
    where = torch.device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    kernel = getattr(flash_attn, kind)(release)
    wrong = disagreement(
        kernel, where, getattr(torch, dtype.removeprefix("torch.")), head_dim, queries_per_key, windowed
    )
    print(json.dumps([wrong]), flush=True)

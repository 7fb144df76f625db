"""What a server has imported that has CUDA in use from then on, as bitsandbytes has it."""

from __future__ import annotations

import os
import sys

import torch

if __name__ != "__main__":
    torch.ones(1, device="cuda")


def total(numbers: list[float]) -> dict[str, float]:
    """On this rank's GPU."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return {"total": float(torch.tensor(numbers, device="cuda").sum())}


if __name__ == "__main__":
    from pathlib import Path

    from benchmarks.ranks import run_group, start_server
    from tests.uses_cuda import total

    start_server("tests.uses_cuda")
    ended = run_group(2, total, [1.0, 2.0], environment={}, folder=Path(sys.argv[1]), timeout=240)
    print(ended.status, [report["total"] for report in ended.reports], ended.error)

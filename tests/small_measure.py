"""`longctx plan --measure`, of less work than keeps a GPU busy: soft GPUs would take hours over what a GPU does.

Without flags this is one of the processes that measure.
"""

from __future__ import annotations

import sys

import torch

from longctx.launch.spawn import spawn
from longctx.machine import measure

WORK = measure.Work(
    dtype=torch.bfloat16,
    tokens=64,
    hidden_size=64,
    intermediate_size=128,
    row=64,
    num_heads=4,
    num_key_value_heads=2,
    head_size=16,
    num_elements=1 << 16,
)

if __name__ == "__main__":
    measure._ON_GPU = WORK
    if sys.argv[1].startswith("--"):
        from longctx.plan import main

        measure.spawn = lambda num_devices, arguments, module: spawn(
            num_devices, arguments, module="tests.small_measure"
        )
        sys.exit(main(sys.argv[1:]))
    measure._main(sys.argv[1])

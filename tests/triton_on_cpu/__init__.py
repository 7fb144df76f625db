"""Triton kernels on the CPU, with numbers that can be trusted: Triton's interpreter, mended and guarded.

The interpreter runs a kernel's programs one after the other in NumPy. As Triton 3.9 ships it, it is not sound:
arithmetic of bf16 values works on their bits, a kernel's Python floats are no fp32 scalars and its loops count in
Python's integers, functions of libdevice return None, and a load or a store outside its tensors reads or overwrites
whatever lies there. Autotuned kernels do not run at all, since there is no GPU to time them on.

    arithmetic.py   bf16, scalars, loops and libdevice as a GPU has them; what a GPU leaves undefined becomes NaN; an
                    autotuned kernel runs with the first of its configurations
    bounds.py       every load, store and atomic lies within the tensors that the launch was given

What it does not show: races between programs, which run in order here; the rounding of tensor cores, since products of
fp32 are not rounded to TF32; and anything that the compiler does. A program takes 1 to 2 ms.

The interpreter replaces functions of `triton.language` for good, so that no kernel can be compiled in this process any
more, and only kernels that are defined after `install` are interpreted. Call it in a process of its own, such as a
rank of `tests.workers.run_ranks`.
"""

from __future__ import annotations

import math
import os
import sys


def install(*, undefined: float = math.nan) -> None:
    """Interpret every Triton kernel that is defined from now on.

    Args:
        undefined: what a kernel finds in the lanes that a load leaves out and names no `other` for. NaN shows wherever
            such a lane counts, even where it is multiplied by 0; another number passes there.

    Raises:
        RuntimeError: where Liger's kernels are defined already, which would then not be interpreted.
    """
    if "tests.triton_on_cpu.arithmetic" in sys.modules:
        return
    if "liger_kernel.ops" in sys.modules:
        raise RuntimeError("liger_kernel.ops is imported already: call tests.triton_on_cpu.install() before that.")
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.triton_on_cpu import arithmetic, bounds

    arithmetic.install(undefined)
    bounds.install()


def launched() -> list[str]:
    """The names of the kernels that this process has run, in order; clear it to begin anew."""
    from tests.triton_on_cpu import bounds

    return bounds.launched()

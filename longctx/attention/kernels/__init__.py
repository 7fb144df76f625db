"""Local attention kernels over packed documents.

A kernel computes a list of entries over one flattened sequence. An entry pairs a range of queries with a range of keys.
In full entries every query sees every key. In causal entries the queries belong to the last of the keys' tokens, and
each sees the keys up to its own.
"""

from longctx.attention.kernels.blockwise import CappedDenseKernel, CpuFlashKernel, DenseKernel
from longctx.attention.kernels.choose import block_backward, block_forward, block_operator, choose_kernel, prefer
from longctx.attention.kernels.entries import Entries, Inputs, Kernel, Operator, add, merge, upload

__all__ = [
    "CappedDenseKernel",
    "CpuFlashKernel",
    "DenseKernel",
    "Entries",
    "Inputs",
    "Kernel",
    "Operator",
    "add",
    "block_backward",
    "block_forward",
    "block_operator",
    "choose_kernel",
    "merge",
    "prefer",
    "upload",
]

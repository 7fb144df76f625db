"""Local attention kernels over packed segments; the only place that knows them.

A kernel works on one flattened row and a list of entries. An entry pairs a range of queries with a range of
keys: in causal entries the queries are the last of the keys' own tokens, full entries attend all to all.
"""

from longctx.attention.kernels.blockwise import CpuFlashKernel, DenseKernel
from longctx.attention.kernels.choose import block_backward, block_forward, choose_kernel
from longctx.attention.kernels.entries import Entries, Rows, add, merge, put, take, upload
from longctx.attention.kernels.kernel import Kernel

__all__ = [
    "CpuFlashKernel",
    "DenseKernel",
    "Entries",
    "Kernel",
    "Rows",
    "add",
    "block_backward",
    "block_forward",
    "choose_kernel",
    "merge",
    "put",
    "take",
    "upload",
]

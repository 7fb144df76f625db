"""Kernels that the tests of the interpreter run; import this after `tests.triton_on_cpu.install()`."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """out = x + y."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=inside) + tl.load(y_ptr + at, mask=inside), mask=inside)


@triton.jit
def divide_and_sum_kernel(x_ptr, out_ptr, size, divisor, BLOCK: tl.constexpr):
    """out = sum of x / divisor and of exp(x), each in the dtype of x."""
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < size, other=0.0)
    tl.store(out_ptr, tl.sum(x / divisor.to(x.dtype), axis=0))
    tl.store(out_ptr + 1, tl.sum(tl.where(at < size, tl.exp(x.to(tl.float32)), 0.0), axis=0).to(x.dtype))


@triton.jit
def round_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """out (bf16) = x (fp32)."""
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at).to(tl.bfloat16))


@triton.jit
def product_kernel(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
    """out (fp32) = a @ b of [SIZE, SIZE]."""
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


@triton.jit
def tanh_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """out = tanh(x), by libdevice."""
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, libdevice.tanh(tl.load(x_ptr + at)))


@triton.jit
def unknown_function_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """A function of libdevice that NumPy is not given for."""
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, libdevice.j0(tl.load(x_ptr + at)))


@triton.jit
def careless_sum_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """The planted bug: lanes behind the end, which nothing was loaded for, are summed."""
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + at, mask=at < size), axis=0))


@triton.jit
def atomic_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """Add x to out."""
    at = tl.arange(0, BLOCK)
    tl.atomic_add(out_ptr + at, tl.load(x_ptr + at))


@triton.jit
def loop_kernel(x_ptr, out_ptr, size_ptr, BLOCK: tl.constexpr):
    """out = sum of the first blocks of x, as many as *size_ptr says, each times its number; counted as a GPU counts."""
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(tl.load(size_ptr)):
        total += tl.load(x_ptr + i.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)) * i
    for j in range(2):
        total += j.to(tl.float32)
    tl.store(out_ptr + tl.arange(0, BLOCK), total)


@triton.autotune([triton.Config({"STEP": 3}), triton.Config({"STEP": 5})], key=["size"])
@triton.jit
def tuned_kernel(out_ptr, size, STEP: tl.constexpr):
    """out = the step of the configuration."""
    tl.store(out_ptr, STEP)


@triton.jit
def shift_kernel(x_ptr, out_ptr, size, shift, BLOCK: tl.constexpr):
    """The planted bug: out = x moved by `shift` elements, with a mask that does not know of them."""
    at = tl.arange(0, BLOCK)
    inside = at < size
    tl.store(out_ptr + at, tl.load(x_ptr + at + shift, mask=inside), mask=inside)

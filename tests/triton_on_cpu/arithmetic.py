"""Arithmetic of Triton's interpreter as a GPU has it.

The interpreter keeps bf16 values as their bits, in arrays of uint16, and computes with these as if they were integers.
Here every operation on bf16 widens its inputs to fp32, which is exact, and rounds its result to the nearest bf16, ties
to even, as a GPU does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import FunctionRewriter, InterpretedFunction, InterpreterBuilder, TensorHandle
from triton.runtime.jit import JITFunction

LIBDEVICE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "abs": np.abs,
    "ceil": np.ceil,
    "cos": np.cos,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "floor": np.floor,
    "log": np.log,
    "log1p": np.log1p,
    "log2": np.log2,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
}
"""Functions of one number. Those that are missing here raise an error when a kernel calls them."""


def install(undefined: float) -> None:
    """Mend the interpreter of this process; `undefined` is what stands for values that a GPU leaves undefined."""
    _interpret_language()
    for name in ("binary_op", "unary_op", "create_fma", "create_erf", "create_rsqrt", "create_clampf"):
        setattr(InterpreterBuilder, name, _in_fp32(getattr(InterpreterBuilder, name)))
    _mend_casts()
    _mend_products()
    _mend_undefined_loads(np.float32(undefined))
    for kind in (interpreter.ReduceOps, interpreter.ScanOps):
        _mend_reductions(kind)
    for name in [name for name, value in vars(libdevice).items() if callable(value) and not name.startswith("_")]:
        setattr(libdevice, name, _elementwise(name, LIBDEVICE.get(name)))
    _mend_scalars()
    _mend_loops()
    Autotuner.run = _run_first_configuration
    _patch_language_once()


def _interpret_language() -> None:
    """Interpret the kernels that the language is partly made of, such as `tl.sum`.

    They are compiled functions where Triton was imported before TRITON_INTERPRET was set, which torch may have done.
    """
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("triton.language")]
    interpreted: dict[int, InterpretedFunction] = {}
    for place in (*modules, tl.core.tensor):
        for name, value in list(vars(place).items()):
            if isinstance(value, JITFunction):
                setattr(place, name, interpreted.setdefault(id(value), InterpretedFunction(value.fn)))


def _is_bf16(x: Any) -> bool:
    return isinstance(x, TensorHandle) and x.dtype.scalar == tl.bfloat16


def _widened(x: Any) -> Any:
    """An operand of bf16 in fp32; any other as it is."""
    if not _is_bf16(x):
        return x
    return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _rounded(x: TensorHandle) -> TensorHandle:
    """A result of fp32 in bf16; what a comparison gives, as it is."""
    return TensorHandle(_bf16_bits(x.data), tl.bfloat16) if x.data.dtype == np.float32 else x


def _bf16_bits(x: np.ndarray) -> np.ndarray:
    """fp32 -> the bits of the nearest bf16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), nearest)


def _in_fp32(operation: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    def on_values(self, *operands, **keywords):
        if not any(map(_is_bf16, operands)):
            return operation(self, *operands, **keywords)
        return _rounded(operation(self, *map(_widened, operands), **keywords))

    return on_values


def _mend_casts() -> None:
    cast_impl, create_fp_to_fp = InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp

    def cast(self, src: TensorHandle, dst_type: tl.dtype) -> TensorHandle:
        if src.dtype.scalar == dst_type.scalar or tl.bfloat16 not in (src.dtype.scalar, dst_type.scalar):
            return cast_impl(self, src, dst_type)
        wide = _widened(src)
        if dst_type.scalar == tl.bfloat16:
            return TensorHandle(_bf16_bits(wide.data.astype(np.float32)), tl.bfloat16)
        return wide if dst_type.scalar == tl.float32 else cast_impl(self, wide, dst_type)

    def fp_to_fp(self, src: TensorHandle, dst_type: tl.dtype, rounding_mode: Any) -> TensorHandle:
        kinds = (src.dtype.scalar, dst_type.scalar)
        if tl.bfloat16 in kinds and all(kind.primitive_bitwidth > 8 for kind in kinds):
            return cast(self, src, dst_type)
        return create_fp_to_fp(self, src, dst_type, rounding_mode)

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp = cast, fp_to_fp


def _mend_products() -> None:
    create_dot, create_atomic_rmw = InterpreterBuilder.create_dot, InterpreterBuilder.create_atomic_rmw

    def dot(self, a, b, d, *how):
        return create_dot(self, _widened(a), _widened(b), d, *how)

    def atomic_rmw(self, op, pointers, value, *how):
        if _is_bf16(value):
            raise NotImplementedError("the interpreter would add the bits of bf16 values in an atomic operation")
        return create_atomic_rmw(self, op, pointers, value, *how)

    InterpreterBuilder.create_dot, InterpreterBuilder.create_atomic_rmw = dot, atomic_rmw


def _mend_undefined_loads(undefined: np.float32) -> None:
    """What a load leaves out and names no `other` for is not 0, as the interpreter has it: a GPU has anything there."""
    create_masked_load = InterpreterBuilder.create_masked_load

    def masked_load(self, pointers, mask, other, *policy):
        element = pointers.get_element_ty()
        if other is None and element in (tl.float16, tl.float32, tl.float64):
            other = TensorHandle(np.full(pointers.data.shape, undefined, _numpy_type(element)), element)
        elif other is None and element == tl.bfloat16:
            other = TensorHandle(np.full(pointers.data.shape, _bf16_bits(undefined), np.uint16), element)
        return create_masked_load(self, pointers, mask, other, *policy)

    InterpreterBuilder.create_masked_load = masked_load


def _numpy_type(element: tl.dtype) -> np.dtype:
    return np.dtype(f"f{element.primitive_bitwidth // 8}")


def _mend_reductions(kind: type) -> None:
    """Sums, maxima and scans of bf16 run in fp32, and are rounded at their end."""
    apply_impl = kind.apply_impl

    def apply(self, inputs):
        if not any(x.dtype == tl.bfloat16 for x in inputs):
            return apply_impl(self, inputs)
        given = tuple(_retyped(x, _widened, tl.float32) if x.dtype == tl.bfloat16 else x for x in inputs)
        result = apply_impl(self, given)
        results = result if isinstance(result, list | tuple) else [result]
        results = [_retyped(x, _rounded, tl.bfloat16) if x.dtype == tl.float32 else x for x in results]
        return results if isinstance(result, list | tuple) else results[0]

    kind.apply_impl = apply


def _retyped(x: tl.core.tensor, convert: Callable[[Any], TensorHandle], dtype: tl.dtype) -> tl.core.tensor:
    handle = convert(x.handle)
    is_block = isinstance(x.type, tl.block_type)
    return tl.core.tensor(handle, tl.block_type(dtype, list(handle.data.shape)) if is_block else dtype)


def _elementwise(name: str, function: Callable[[np.ndarray], np.ndarray] | None) -> Callable[..., tl.core.tensor]:
    """A function of libdevice in NumPy, in the dtype of its argument."""

    def apply(*arguments, _semantic=None):
        if function is None:
            raise NotImplementedError(f"libdevice's {name} has no counterpart in {__name__}.LIBDEVICE")
        (x,) = arguments
        wide = _widened(x.handle)
        result = TensorHandle(function(wide.data).astype(wide.data.dtype), wide.dtype)
        return tl.core.tensor(_rounded(result) if _is_bf16(x.handle) else result, x.type)

    return apply


def _mend_scalars() -> None:
    """A launch hands a kernel its Python floats as fp32."""
    convert = interpreter._implicit_cvt

    def implicit(argument):
        if isinstance(argument, float):
            return tl.tensor(TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)
        return convert(argument)

    interpreter._implicit_cvt = implicit


def _mend_loops() -> None:
    """A loop over `range` counts in scalar tensors, as in a compiled kernel, and not in integers of Python."""
    compile_and_exec = FunctionRewriter._compile_and_exec

    def with_range(self, tree):
        kernel = compile_and_exec(self, tree)
        names = kernel.__globals__ | {"range": _range}  # a copy, since functions of the host count in integers
        copy = FunctionType(kernel.__code__, names, kernel.__name__, kernel.__defaults__, kernel.__closure__)
        copy.__annotations__ = kernel.__annotations__  # which tell constants
        return copy

    FunctionRewriter._compile_and_exec = with_range


def _range(*bounds: Any) -> Iterator[tl.core.tensor]:
    dtype = tl.int64 if any(getattr(bound, "dtype", None) == tl.int64 for bound in bounds) else tl.int32
    for i in range(*bounds):
        yield tl.core.tensor(TensorHandle(np.array([i], interpreter._get_np_dtype(dtype)), dtype), dtype)


def _run_first_configuration(tuner: Autotuner, *arguments, **keywords) -> Any:
    """Run an autotuned kernel with the first of its configurations, all of which compute the same; none is timed."""
    tuner.nargs = dict(zip(tuner.arg_names, arguments, strict=False))
    config = tuner.prune_configs(keywords)[0]
    assert config.pre_hook is None, f"{tuner.base_fn.__name__} prepares its arguments for each configuration"
    return tuner.fn.run(*arguments, **keywords, **config.all_kwargs())


class _Lasting:
    """What stands for the scope of a patch that is never undone."""

    def restore(self) -> None:
        pass


def _patch_language_once() -> None:
    """Patch each module of the language once a process, rather than in every launch and nested call, which is slow."""
    patch, done = interpreter._patch_lang, set()

    def patch_once(function):
        modules = frozenset(value.__name__ for value in function.__globals__.values() if value in _LANGUAGE)
        if modules not in done:
            patch(function)
            done.add(modules)
        return _Lasting()

    interpreter._patch_lang = patch_once


class _Modules(tuple):
    def __contains__(self, value: object) -> bool:  # by identity: tensors among a function's globals compare otherwise
        return any(value is module for module in self)


_LANGUAGE = _Modules((tl, tl.core))

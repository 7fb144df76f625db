"""Liger's kernels compiled for GPUs that are not there: every launch of a step, for each kind of GPU.

What Triton's interpreter does not show is whether the kernels compile. Triton's compiler makes PTX and machine code
without a GPU; whether that code runs, and how fast, only a GPU shows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longctx.layers.liger import BOUNDS
from tests.loss_kernel_cases import compile_for
from tests.workers import run_ranks

CAPABILITIES = (80, 90, 100)
WIDTHS = {"hidden": 4096, "intermediate": 14336, "head": 128}
"""Of Llama-3.1-8B."""


def launches(dtype: torch.dtype) -> list[tuple[Any, dict[str, Any]]]:
    """(kernel, its arguments by name) of every launch in the forward and backward passes of Liger's functions."""
    from liger_kernel.ops import LigerGELUMulFunction, LigerRMSNormFunction, LigerSiLUMulFunction
    from liger_kernel.transformers.rope import liger_rotary_pos_emb
    from triton.runtime.jit import JITFunction

    found: list[tuple[Any, dict[str, Any]]] = []

    def record(kernel, *arguments, grid, warmup, **keywords):
        names = kernel.arg_names
        defaults = {p.name: p.default for p in kernel.params if p.has_default}
        found.append((kernel, {**defaults, **dict(zip(names, arguments, strict=False)), **keywords}))

    JITFunction.run = record
    wide = [torch.ones(1, 3, WIDTHS["intermediate"], dtype=dtype, requires_grad=True) for _ in range(2)]
    x = torch.ones(1, 3, WIDTHS["hidden"], dtype=dtype, requires_grad=True)
    weight = torch.ones(WIDTHS["hidden"], dtype=torch.float32, requires_grad=True)
    q, k = (torch.ones(1, heads, 3, WIDTHS["head"], dtype=dtype, requires_grad=True) for heads in (32, 8))
    cos = torch.ones(1, 3, WIDTHS["head"], dtype=dtype)
    outputs = [
        LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "llama", True, None),
        LigerRMSNormFunction.apply(x, weight, 1e-6, 1.0, "gemma", False, None),
        LigerSiLUMulFunction.apply(*wide),
        LigerGELUMulFunction.apply(*wide),
        *liger_rotary_pos_emb(q.clone(), k.clone(), cos, cos),
    ]
    torch.autograd.grad(outputs, [x, weight, *wide, q, k], [torch.ones_like(y) for y in outputs])
    return found


def compiled(dtype: torch.dtype) -> dict[tuple[str, int], list[str]]:
    """{(kernel, compute capability): the kinds of code that were made, PTX and machine code among them}."""
    made = {}
    for kernel, arguments in launches(dtype):
        constants = {p.name: arguments[p.name] for p in kernel.params if p.is_constexpr}
        signature = {name: "constexpr" if name in constants else _type(arguments[name]) for name in kernel.arg_names}
        options = {name: arguments[name] for name in ("num_warps", "num_stages") if name in arguments}
        for capability in CAPABILITIES:
            made[kernel.__name__, capability] = compile_for(capability, kernel, signature, constants, options)
    return made


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return {torch.float32: "*fp32", torch.bfloat16: "*bf16"}[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


@pytest.mark.long
@pytest.mark.parametrize("dtype", sorted(BOUNDS, key=str), ids=str)
def test_every_kernel_compiles_for_each_kind_of_gpu(dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # else a second run compiles nothing
    made = run_ranks(1, f"{__name__}:compiled", dtype, backend=None, timeout=600)[0]
    names = {name for name, _ in made}
    kernels = ("rms_norm", "swiglu", "geglu_tanh")
    passes = [f"_{kernel}_{way}_kernel" for kernel in kernels for way in ("forward", "backward")]
    assert names == {*passes, "_triton_rope"}
    assert made.keys() == {(name, capability) for name in names for capability in CAPABILITIES}
    assert all({"ptx", "cubin"} <= set(kinds) for kinds in made.values())

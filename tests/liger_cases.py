"""What tests/layers/test_liger.py runs in processes of their own, in which every Triton kernel is interpreted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests import triton_on_cpu
from tests.model.test_models import make_model, step_errors, stock_step


def alone() -> dict[str, Any]:
    """Everything that one process finds, by function."""
    return {
        "side_effects": side_effects(["gemma", "granite", "qwen3"]),
        "checked": checked(),
    }


def families(
    names: list[str], backends: list[str], memory_options: dict[str, Any] | None = None
) -> dict[tuple[str, str], tuple[dict[str, float], set[str]]]:
    """The errors of `step` for each family and backend, at the group's size, and which kernels ran in it."""
    triton_on_cpu.install()
    results = {}
    for name in names:
        for backend in backends:
            triton_on_cpu.launched().clear()
            results[name, backend] = step(name, backend, **memory_options or {}), set(triton_on_cpu.launched())
    return results


def step(family: str, backend: str = "auto", *, checkpoints: bool = False, **memory_options: Any) -> dict[str, float]:
    """Relative errors of the loss and of the gradients with Liger's kernels, against stock transformers.

    Args:
        memory_options: keywords of `longctx.parallelize`.
    """
    from longctx import parallelize
    from longctx.layers.liger import install_liger, liger_parts

    model = make_model(family)
    expected = stock_step(model)
    install_liger(model, liger_parts(model.config))
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    sp = dist.get_world_size() if dist.is_initialized() else 1
    model, sequence = parallelize(model, sp, sp_backend=backend, **memory_options)
    return step_errors(model, sequence, expected, fused_head=True)


# ------------------------------------------------------------------------------------------------
# Models
# ------------------------------------------------------------------------------------------------


def side_effects(names: list[str]) -> dict[str, list[str]]:
    """What installing Liger changed outside the model: names in any module of transformers or torch.nn.functional."""
    import sys

    triton_on_cpu.install()
    import liger_kernel.transformers.monkey_patch  # noqa: F401  (imports modules of transformers)

    from longctx.layers.liger import install_liger, liger_parts

    changed = {}
    for name in names:
        model = make_model(name)
        modules = {m: dict(vars(sys.modules[m])) for m in list(sys.modules) if m.startswith("transformers.models.")}
        modules["torch.nn.functional"] = dict(vars(F))
        classes = {type(m): dict(vars(type(m))) for m in model.modules()}
        install_liger(model, liger_parts(model.config))
        changed[name] = [
            f"{module}.{key}"
            for module, before in modules.items()
            for key, value in vars(sys.modules[module]).items()
            if key in before and value is not before[key]
        ] + [
            f"{kind}.{key}" for kind, before in classes.items() for key in before if vars(kind)[key] is not before[key]
        ]
    return changed


def applied_by_the_user() -> dict[str, dict[str, float]]:
    """A model that its owner gave to Liger, fused loss included, before `parallelize`."""
    triton_on_cpu.install()
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3

    from longctx import parallelize

    model = make_model("qwen3")
    expected = stock_step(model)
    apply_liger_kernel_to_qwen3(model=model)
    model, sequence = parallelize(model, 1)
    return {
        "token outputs": step_errors(model, sequence, expected, fused_head=True),
        "logits": step_errors(model, sequence, expected),
    }


def checked() -> dict[str, str]:
    """What the product says of sound kernels, and of what may be wrong with them on some machine."""
    triton_on_cpu.install()
    from longctx.layers.liger import check_liger, install_liger, liger_parts
    from tests.triton_on_cpu import arithmetic

    config = make_model("gemma").config
    fp32, bf16 = (
        partial(check_liger, config, liger_parts(config), torch.device("cpu"), dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    said = {"torch.float32": _refusal(fp32), "torch.bfloat16": _refusal(bf16)}
    import liger_kernel.ops
    from liger_kernel.transformers import monkey_patch

    model, failing = make_model("llama"), mock.Mock()
    failing.apply.side_effect = RuntimeError("no kernel image")
    for name, place, attribute, value, call in (
        ("unsound", arithmetic, "_is_bf16", lambda x: False, bf16),
        ("failing", liger_kernel.ops, "LigerGELUMulFunction", failing, bf16),
        ("unfitting", monkey_patch, "MODEL_TYPE_TO_APPLY_LIGER_FN", {}, partial(install_liger, model, ("rope",))),
    ):
        with mock.patch.object(place, attribute, value):
            said[name] = _refusal(call)
    return said


def _refusal(call: Callable[[], None]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def train(cases: dict[str, list[str]]) -> tuple[dict[str, list[tuple[float, float]]], set[str]]:
    """`tests.training.test_training.run_cases`, and which kernels ran after they were checked."""
    triton_on_cpu.install()
    from longctx.run import preparation
    from tests.training.test_training import run_cases

    check = preparation.check_liger

    def checked(*arguments: Any) -> None:
        check(*arguments)
        triton_on_cpu.launched().clear()

    with mock.patch.object(preparation, "check_liger", checked):
        return run_cases(cases), set(triton_on_cpu.launched())

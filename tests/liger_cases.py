"""What tests/layers/test_liger.py runs in processes of their own, in which every Triton kernel is interpreted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor

from tests import triton_on_cpu
from tests.model.test_models import gradients, largest_error, make_batch, make_model, stock_step


def alone() -> dict[str, Any]:
    """Everything that one process finds, by function."""
    return {
        "kernels": kernels(),
        "fused_losses": fused_losses(),
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

    model, batch = make_model(family), make_batch()
    _, expected_loss, expected_gradients = stock_step(model)
    install_liger(model, liger_parts(model.config))
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    sp = dist.get_world_size() if dist.is_initialized() else 1
    model, sequence = parallelize(model, sp, sp_backend=backend, **memory_options)
    shard = sequence.shard(batch)
    losses = model(**shard.inputs, shift_labels=shard.shift_labels, token_outputs=True).losses
    loss = sequence.reduce(losses, sequence.count_label_tokens([batch]))
    loss.backward()
    return _errors(loss, gradients(model), expected_loss, expected_gradients)


def _errors(loss: Tensor, found: dict[str, Tensor], expected_loss: Tensor, expected: dict[str, Tensor]):
    """Against the mean over ranks, as data-parallel engines take it."""
    loss = loss.detach().clone()
    if dist.is_initialized():
        for value in (loss, *found.values()):
            dist.all_reduce(value)
            value /= dist.get_world_size()
    return {"loss": float((loss / expected_loss - 1).abs()), "gradients": largest_error(found, expected)}


# ------------------------------------------------------------------------------------------------
# Kernels
# ------------------------------------------------------------------------------------------------


def kernels() -> dict[tuple[str, str], list[float]]:
    """Relative errors of outputs and gradients of each kernel in each dtype, by (kernel, dtype)."""
    triton_on_cpu.install()
    from liger_kernel.ops import LigerGELUMulFunction, LigerRMSNormFunction, LigerSiLUMulFunction
    from liger_kernel.transformers.rope import liger_rotary_pos_emb
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

    generator = torch.Generator().manual_seed(0)
    cos, sin = (f(torch.rand(1, 5, 12, generator=generator)) for f in (torch.cos, torch.sin))
    cos, sin = (torch.cat((x, x), dim=-1).bfloat16().float() for x in (cos, sin))

    def norm(kind):
        def reference(x, w):
            return torch.func.functional_call(kind(len(w)).double(), {"weight": w}, (x,))

        return reference

    cases = {
        "RMSNorm": (lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama"), norm(LlamaRMSNorm), 1),
        "RMSNorm, Gemma": (lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-6, 1.0, "gemma"), norm(GemmaRMSNorm), 1),
        "SwiGLU": (LigerSiLUMulFunction.apply, lambda a, b: F.silu(a) * b, 2),
        "GeGLU": (LigerGELUMulFunction.apply, lambda a, b: F.gelu(a, approximate="tanh") * b, 2),
        "rotary embeddings": (
            lambda q, k: liger_rotary_pos_emb(q.clone(), k.clone(), cos.to(q), sin.to(q)),
            lambda q, k: apply_rotary_pos_emb(q, k, cos.to(q), sin.to(q)),
            4,
        ),
    }
    shapes = {1: [(1, 9, 50), (50,)], 2: [(1, 7, 70)] * 2, 4: [(1, 4, 5, 24), (1, 2, 5, 24)]}
    results = {}
    for name, (kernel, reference, kind) in cases.items():
        for dtype in (torch.float32, torch.bfloat16):
            inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes[kind]]
            results[name, str(dtype)] = _compare(kernel, reference, inputs)
    return results


def _compare(kernel, reference, inputs: list[Tensor]) -> list[float]:
    """Relative errors of outputs and gradients; the reference computes in fp64."""
    exact_inputs = [x.double().requires_grad_() for x in inputs]
    given = [x.clone().requires_grad_() for x in inputs]
    found, exact = kernel(*given), reference(*exact_inputs)
    found, exact = (x if isinstance(x, tuple) else (x,) for x in (found, exact))
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in found]
    grads = torch.autograd.grad(found, given, [x.clone() for x in upstream])
    exact_grads = torch.autograd.grad(exact, exact_inputs, [x.double() for x in upstream])
    pairs = zip((*found, *grads), (*exact, *exact_grads), strict=True)
    return [float((a.detach().double() - b.detach()).norm() / b.detach().norm()) for a, b in pairs]


PADS_CAPPED_LOGITS = Version(version("liger_kernel")) < Version("0.8.4")
"""Whether Liger's loss counts, beside capped logits, those that fill a block up to a power of two."""


def fused_losses() -> dict[tuple[str, str], list[float]]:
    """Liger's fused linear cross-entropy against ours: relative errors of the loss, dhidden and dweight.

    As a sum over this rank's tokens that the step's count of label tokens divides, which is what a rank needs. Liger's
    own mean is over the tokens of one rank.
    """
    triton_on_cpu.install()
    from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction

    from longctx.layers.loss import LogitScaling, fused_token_outputs

    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 173, (1, 16), generator=generator)
    labels[:, ::5] = -100
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        for name, smoothing, softcap in (("plain", 0.0, None), ("smoothed", 0.1, None), ("capped", 0.0, 5.0)):
            hidden = torch.randn(1, 16, 32, generator=generator).to(dtype)
            tokens = 256 if softcap is not None and PADS_CAPPED_LOGITS else 173
            weight = (0.3 * torch.randn(tokens, 32, generator=generator)).to(dtype)

            def liger(h, w, smoothing=smoothing, softcap=softcap):
                options = (None, None, -100, 0.0, smoothing, "sum", softcap, False, torch.float32)
                return LigerFusedLinearCrossEntropyFunction.apply(h[0], w, labels[0], *options)[0] / 37

            def ours(h, w, smoothing=smoothing, softcap=softcap):
                scaling = LogitScaling(softcap=softcap)
                outputs = fused_token_outputs(h, w, None, labels, label_smoothing=smoothing, scaling=scaling)
                return outputs.losses.sum() / 37

            results[name, str(dtype)] = _difference(liger, ours, hidden, weight)
    return results


def _difference(one, other, *inputs: Tensor) -> list[float]:
    values = []
    for function in (one, other):
        given = [x.clone().requires_grad_() for x in inputs]
        loss = function(*given)
        values.append([loss.detach(), *torch.autograd.grad(loss, given)])
    return [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(*values, strict=True)]


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

    model, batch = make_model("qwen3"), make_batch()
    _, expected_loss, expected_gradients = stock_step(model)
    apply_liger_kernel_to_qwen3(model=model)
    model, sequence = parallelize(model, 1)
    shard = sequence.shard(batch)
    count = sequence.count_label_tokens([batch])
    results = {}
    for name in ("token outputs", "logits"):
        if name == "logits":
            loss = sequence.loss(model(**shard.inputs).logits, shard.shift_labels, count)
        else:
            outputs = model(**shard.inputs, shift_labels=shard.shift_labels, token_outputs=True)
            loss = sequence.reduce(outputs.losses, count)
        loss.backward()
        results[name] = _errors(loss, gradients(model), expected_loss, expected_gradients)
    return results


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

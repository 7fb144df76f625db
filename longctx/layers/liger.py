"""Liger's Triton kernels in a model: norms, activations and rotary embeddings, for --use_liger_kernel.

Liger's loss stays out: the loss here is fused already, counts the label tokens of all ranks, and gives the token
outputs that metrics come from. Experts stay as transformers has them, too; the norms and rotary embeddings around them
are Liger's. Each model type of `LIGER_MODELS` is compared with transformers' own layers by tests/layers/test_liger.py.

Liger also replaces classes and functions in transformers' modules, for every model that the process makes later, such
as the one that a result is compared with. That is undone here: one model gets the kernels, and no other.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from longctx.attention.kernels.check import why_not_exact
from longctx.model.allow_list import GEGLU, MODEL_TYPES, NORMS, ROPE, SWIGLU, head_size, num_heads
from longctx.upstream.transformers_internals import replace_forward, with_names

Function = Callable[..., Any]

_WORDS = {NORMS: "RMSNorm", SWIGLU: "SwiGLU", GEGLU: "GeGLU", ROPE: "rotary embeddings"}
_LOSSES = ("cross_entropy", "fused_linear_cross_entropy")
_ACTIVATIONS = {SWIGLU: ("silu", "swish"), GEGLU: ("gelu_pytorch_tanh",)}
"""The only functions that Liger's layers compute, whatever a configuration says."""

LIGER_MODELS = {name: known.liger for name, known in MODEL_TYPES.items() if known.liger}

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest relative error of a kernel's outputs and gradients. In fp32 what users are promised. In bf16 a number is
rounded to 2^-9 of itself, and Liger's and transformers' kernels each round a few times, at places of their own."""


def liger_parts(config: PretrainedConfig, asked: str | Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """Return the parts of this model that Liger computes.

    Args:
        config: of the model; no weights are needed.
        asked: --liger_kernel_config: parts by Liger's names, with whether Liger computes them. Those that it leaves
            out are on.

    Raises:
        ValueError: for a model type that is not in LIGER_MODELS, for an activation that Liger would replace by
            another, for Liger's loss, and for a part that the model does not have.
    """
    text = config.get_text_config()
    if text.model_type not in LIGER_MODELS:
        raise ValueError(
            f"--use_liger_kernel True: Liger's kernels are not verified with the layers of a {text.model_type} model. "
            f"Leave it out, or use one of {', '.join(LIGER_MODELS)}."
        )
    there = LIGER_MODELS[text.model_type]
    wanted = _wanted(asked, text.model_type, there)
    parts = tuple(part for part in there if wanted.get(part, True))
    activation = getattr(text, "hidden_activation", None) or text.hidden_act
    for part in parts:
        if activation not in _ACTIVATIONS.get(part, (activation,)):
            raise ValueError(
                f"--use_liger_kernel True: the activation is {activation}, and Liger's {_WORDS[part]} kernel computes "
                f"{_ACTIVATIONS[part][0]} instead. Add --liger_kernel_config '{{\"{part}\": false}}'."
            )
    return parts


def _wanted(asked: str | Mapping[str, Any] | None, model_type: str, there: tuple[str, ...]) -> dict[str, bool]:
    """Read --liger_kernel_config, of which Liger itself ignores what it does not know."""
    try:
        wanted = json.loads(asked) if isinstance(asked, str) else dict(asked or {})
    except ValueError as error:
        raise ValueError(f"--liger_kernel_config {asked} is not a JSON object: {error}. {_EXAMPLE}") from None
    if not isinstance(wanted, dict) or not all(isinstance(value, bool) for value in wanted.values()):
        raise ValueError(f"--liger_kernel_config {asked} is not a JSON object of true and false. {_EXAMPLE}")
    for name, value in wanted.items():
        if name in _LOSSES and value:
            raise ValueError(
                f"--liger_kernel_config sets {name}: Liger's loss is the mean over one rank's tokens, and the fused "
                "loss of longctx, which is on without it, is the exact mean over all ranks. Leave it out."
            )
        if name not in (*there, *_LOSSES) and value:
            raise ValueError(
                f"--liger_kernel_config sets {name}, and of a {model_type} model Liger computes {', '.join(there)} "
                "here. Leave it out."
            )
    return wanted


_EXAMPLE = "Example: '{\"rope\": false}'."


def check_liger_machine(use_cpu: bool) -> None:
    """Check that Triton can compile and run kernels at all. Nothing of Liger's is imported.

    Raises:
        ValueError: on the CPU, where only Triton's interpreter (TRITON_INTERPRET=1) runs them, and without the C
            compiler and the header files of Python with which Triton builds the launcher of its first kernel.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    if use_cpu:
        raise ValueError(
            "--use_liger_kernel True on the CPU: Liger's Triton kernels need a GPU. Leave it out: the fused loss, "
            "which saves most of the memory that Liger does, is on without it."
        )
    if not any(map(shutil.which, filter(None, (os.environ.get("CC"), "gcc", "clang")))):
        raise ValueError(
            "--use_liger_kernel needs a C compiler for Triton, and neither gcc nor clang is found. Install gcc, or set "
            "CC to another compiler."
        )
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        release = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise ValueError(
            f"--use_liger_kernel needs {header} for Triton, which is not there. Install python{release}-dev."
        )


def fuses_layers(parts: Mapping[str, bool] | None) -> bool:
    """Whether norms and activations are both single kernels, which keep their inputs alone.

    Args:
        parts: the setting `liger_kernel_config` of a resolved run.
    """
    parts = parts or {}
    return bool(parts.get(NORMS)) and bool(parts.get(SWIGLU) or parts.get(GEGLU))


def describe_liger(parts: tuple[str, ...]) -> str:
    """Describe in one line what Liger computes and what it does not."""
    computed = ", ".join(_WORDS[part] for part in parts) or "nothing"
    return f"{computed} by Liger's Triton kernels; the loss is longctx's own, exact over all ranks"


def install_liger(model: PreTrainedModel, parts: tuple[str, ...]) -> None:
    """Let Liger compute these parts of this model. Call this before `longctx.parallelize` and before it is wrapped.

    The weights stay where they are and may be on the meta device or partitioned by ZeRO-3: only methods of the
    model's modules are replaced.

    Args:
        parts: what `liger_parts` returned.

    Raises:
        ValueError: where the installed releases of Liger and transformers do not fit together.
    """
    model_type = model.config.get_text_config().model_type
    modeling = sys.modules[type(model).__module__]
    before = dict(vars(modeling))
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

        apply = MODEL_TYPE_TO_APPLY_LIGER_FN[model_type]
        switches = [name for name in inspect.signature(apply).parameters if name != "model"]
        apply(model=model, **{name: name in parts for name in switches})
        rope = getattr(modeling, "apply_rotary_pos_emb", None)
    except (AttributeError, ImportError, KeyError, TypeError) as error:
        raise ValueError(
            f"--use_liger_kernel True: liger-kernel {version('liger-kernel')} does not fit a {model_type} model of "
            f"transformers {version('transformers')}: {type(error).__name__}: {error}. Leave it out, or install "
            "another release of liger-kernel."
        ) from error
    finally:
        vars(modeling).update(before)
    if ROPE in parts:
        for module in model.modules():
            _replace_rope(module, rope)


def _replace_rope(module: nn.Module, rope: Any) -> None:
    """Have an attention module call Liger's function where its code calls transformers'."""
    forward = inspect.unwrap(type(module).forward)  # transformers renames deprecated keywords around it
    if not isinstance(forward, FunctionType) or "apply_rotary_pos_emb" not in forward.__code__.co_names:
        return
    replace_forward(module, MethodType(with_names(forward, {"apply_rotary_pos_emb": rope}), module))


# ------------------------------------------------------------------------------------------------
# Is it exact here?
# ------------------------------------------------------------------------------------------------


def check_liger(config: PretrainedConfig, parts: tuple[str, ...], device: torch.device, dtype: torch.dtype) -> None:
    """Compare the kernels on this device with torch's operators, at this model's widths, forward and backward.

    Compilers, drivers and Triton's interpreter, whose bf16 is wrong, differ from machine to machine, so no kernel is
    trusted by its name.

    Args:
        dtype: of activations in training.

    Raises:
        ValueError: for a kernel that fails or that is off by more than BOUNDS.
    """

    def errors(kernel: Function, reference: Function, shapes: Sequence) -> Iterator[tuple[float, float]]:
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        exact = _with_gradients(reference, [x.double() for x in inputs])  # first: a kernel may overwrite its inputs
        found = _with_gradients(kernel, [x.to(device) for x in inputs])
        return ((float((x - y).norm() / y.norm()), BOUNDS[dtype]) for x, y in zip(found, exact, strict=True))

    for name, kernel, reference, shapes in _cases(config, parts):
        if wrong := why_not_exact(dtype, partial(errors, kernel, reference, shapes)):
            raise ValueError(f"--use_liger_kernel True: Liger's kernel of {name} {wrong}. Leave it out.")


_TOKENS = 5


def _cases(config: PretrainedConfig, parts: tuple[str, ...]) -> Iterator[tuple[str, Function, Function, Sequence]]:
    """Yield a kernel's name, the kernel, what it is to compute, and the shapes of its inputs."""
    from liger_kernel.ops import LigerGELUMulFunction, LigerRMSNormFunction, LigerSiLUMulFunction
    from liger_kernel.transformers.rope import liger_rotary_pos_emb
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    text = config.get_text_config()
    if NORMS in parts:
        shapes = [(1, _TOKENS, text.hidden_size), (text.hidden_size,)]
        for offset, casting in ((0.0, "llama"), (1.0, "gemma")):
            yield (
                "RMSNorm",
                lambda x, w, o=offset, c=casting: LigerRMSNormFunction.apply(x, w, 1e-6, o, c, False, None),
                lambda x, w, o=offset: F.rms_norm(x, x.shape[-1:], eps=1e-6) * (w + o),
                shapes,
            )
    wide = [(1, _TOKENS, text.intermediate_size)] * 2
    if SWIGLU in parts:
        yield "SwiGLU", LigerSiLUMulFunction.apply, lambda a, b: F.silu(a) * b, wide
    if GEGLU in parts:
        yield "GeGLU", LigerGELUMulFunction.apply, lambda a, b: F.gelu(a, approximate="tanh") * b, wide
    if ROPE in parts:
        yield (
            "rotary embeddings",
            lambda q, k: liger_rotary_pos_emb(q.clone(), k.clone(), *_angles(q)),
            lambda q, k: apply_rotary_pos_emb(q, k, *_angles(q)),
            [(1, count, _TOKENS, head_size(text)) for count in num_heads(text)],
        )


def _angles(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine [1, T, D] of each token's angles, for x [1, H, T, D], rounded to bf16's digits."""
    tokens, size = x.shape[-2:]
    half = torch.outer(torch.arange(float(tokens)), 10_000 ** (-torch.arange(0, size, 2) / size))
    angles = torch.cat((half, half), dim=-1)[None]
    return angles.cos().bfloat16().to(x), angles.sin().bfloat16().to(x)


def _with_gradients(function: Function, inputs: list[Tensor]) -> list[Tensor]:
    """Return a function's outputs and gradients in fp64 on the CPU, for the same upstream gradients in any dtype."""
    outputs = function(*(x.requires_grad_() for x in inputs))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(x.shape, generator=generator).bfloat16().to(x) for x in outputs]
    return [x.detach().cpu().double() for x in (*outputs, *torch.autograd.grad(outputs, inputs, upstream))]

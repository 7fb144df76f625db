"""flash-linear-attention's kernels in Triton's interpreter, for tests/model/test_gated_delta_kernel.py.

Each function runs in a process of its own, which takes the package from the folder of its wheel, as an installed one.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from longctx.recurrent import gated_delta
from longctx.recurrent.layers import DELTA_ATTENTION, DELTA_RULE, delta_rule_layers, functions_of
from tests import triton_on_cpu
from tests.model import test_models
from tests.model.test_models import make_model
from tests.recurrent.cases import alone, recurrent_delta_rule

MODELS = {"qwen3_next": DELTA_RULE, "qwen3_5_text": DELTA_RULE, "kimi_linear": DELTA_ATTENTION}
"""Models, and the function of transformers that they call."""

ROWS = {
    "several chunks": ((70, 1, 59), (16, 16)),
    "whole chunks": ((64, 128), (16, 16)),
    "one token each": ((1, 1, 1), (16, 16)),
    "one": ((130,), (16, 16)),
    "other sizes": ((70, 1, 59), (24, 40)),
    "more than a block": ((70, 1, 59), (80, 72)),
}
"""Tokens of the documents of a row, of which the kernels take 64 at a time; sizes of a head's keys and of its values,
where a kernel's blocks have 16, 32 or 64."""
HEADS = {
    "a key head of their own": (2, 2, False),
    "a key head for two": (1, 2, False),
    "a key head for four": (2, 8, False),
    "a decay of every key channel": (2, 2, True),
}
"""Key heads, value heads, and whether every key channel has a decay."""


def load(folder: str) -> None:
    """Make the package one that transformers finds, before it imports the modules of models."""
    triton_on_cpu.install()
    sys.path.insert(0, folder)


def _inputs(lengths, heads, sizes, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, g and beta; the decays are fp32 as in a layer, and some forget everything at once."""
    generator = torch.Generator().manual_seed(0)
    decays = (heads[1], sizes[0]) if heads[2] else (heads[1],)
    shapes = [(heads[0], sizes[0]), (heads[0], sizes[0]), (heads[1], sizes[1]), decays, (heads[1],)]
    q, k, v, g, beta = (torch.randn(1, sum(lengths), *shape, generator=generator) for shape in shapes)
    return [q.to(dtype), k.to(dtype), v.to(dtype), -(1.5 * g).exp(), beta.sigmoid().to(dtype)]


def kernels(folder: str) -> dict[tuple[str, str, str], tuple[float, ...]]:
    """{(row, heads, dtype): relative errors of the output and of dq, dk, dv, dg and dbeta}."""
    load(folder)
    found = {}
    for (row, (lengths, sizes)), (shared, heads) in itertools.product(ROWS.items(), HEADS.items()):
        if heads[0] != heads[1] and row != "several chunks":
            continue
        rule = _rule("kimi_linear" if heads[2] else "qwen3_next")
        for dtype in (torch.float32, torch.bfloat16):
            inputs = _inputs(lengths, heads, sizes, dtype)
            given = [x.clone().requires_grad_() for x in inputs]
            exact = [x.double().requires_grad_() for x in inputs]
            out = gated_delta._in_one_call(rule, given, np.array(lengths))[0]
            wanted = alone(lambda *document: recurrent_delta_rule(*document)[0], exact, list(lengths))
            upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
            results = (out, *torch.autograd.grad(out, given, upstream))
            references = (wanted, *torch.autograd.grad(wanted, exact, upstream.double()))
            found[row, shared, str(dtype)] = tuple(map(_error, results, references))
    return found


def _rule(model: str) -> gated_delta.Rule:
    """Return the rule of a model's module, which is the kernel by then."""
    return getattr(functions_of(_layer(model)), MODELS[model])


def _layer(model: str) -> torch.nn.Module:
    return delta_rule_layers(make_model(model), MODELS[model])[0]


def _error(actual: Tensor, exact: Tensor) -> float:
    difference, norm = (actual.detach().double() - exact.detach()).norm(), exact.detach().norm()
    return float(difference / norm) if norm else float(difference)


def checked(folder: str) -> dict[str, Any]:
    """What the check at the start of a run finds: the errors of each model's heads, and what ran.

    Heads have the 128 channels of released models.
    """
    load(folder)
    found: dict[str, Any] = {}
    for name in MODELS:
        heads = replace(gated_delta.DeltaHeads.of(_layer(name)), key_size=128, value_size=128)
        triton_on_cpu.launched().clear()
        found[name] = gated_delta.kernel_errors(_rule(name), heads, torch.device("cpu"), with_states=True)
        found[f"{name} ran"] = set(triton_on_cpu.launched())
    return found


def models(folder: str) -> dict[str, dict[str, float]]:
    """Errors of a packed step of this rank against stock transformers with operators of its own, by model."""
    load(folder)
    size = dist.get_world_size() if dist.is_initialized() else 1
    found = {}
    for name, rule in MODELS.items():
        functions = functions_of(_layer(name))
        own = inspect.unwrap(getattr(functions, rule))

        def stock_step(model, functions=functions, rule=rule, own=own, step=test_models.stock_step):
            with mock.patch.object(functions, rule, own):
                return step(model)

        triton_on_cpu.launched().clear()
        with (
            mock.patch.object(gated_delta, "takes_kernel", return_value=True),
            mock.patch.object(test_models, "stock_step", stock_step),
            mock.patch.object(test_models, "largest_error", _largest_error),
        ):
            found[name] = test_models.sharded_step(name, size, "ulysses" if size > 1 else "auto")
        found[name]["kernels"] = len(set(triton_on_cpu.launched()))
    return found


def _largest_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """As that of tests/test_models.py, but relative to 2% of all gradients where a decay's are less.

    The kernel computes them as differences of sums that are a thousand times larger in these models.
    """
    assert actual.keys() == expected.keys()
    total = torch.nn.utils.get_total_norm(expected.values())
    least = {name: 2e-2 if name.endswith(("A_log", "dt_bias")) else 1e-3 for name in expected}
    return max(float((actual[n] - e).norm() / e.norm().clamp(min=least[n] * total)) for n, e in expected.items())

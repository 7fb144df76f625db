"""MLPs over tiles of tokens against all tokens at once, and training with them against one process."""

from __future__ import annotations

import pytest
import torch

import longctx
from longctx.tiled_mlp import find_mlps, install_tiled_mlp
from tests.test_models import FAMILIES, make_model

TOLERANCE = 1e-5  # fp32; the same sums over tokens, in groups. Measured: at most 1e-6.


def results(mlp, x):
    """All that an MLP gives for x, and the gradients of x and of its parameters that are trained."""
    x = x.clone().requires_grad_()
    out = mlp(x)
    outputs = out if isinstance(out, tuple) else (out,)
    sum((part * torch.linspace(-1, 1, part.numel()).view_as(part)).sum() for part in outputs).backward()
    gradients = [tensor.grad for tensor in (x, *mlp.parameters()) if tensor.requires_grad]
    mlp.zero_grad()
    return [*(part.detach() for part in outputs), *gradients]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_model_s_mlps_are_found_and_give_the_same(family):
    model = make_model(family)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 16, model.config.hidden_size, generator=generator)
    mlps = list(find_mlps(model))
    assert len(mlps) == model.config.num_hidden_layers
    expected = [results(mlp, x) for mlp in mlps]
    install_tiled_mlp(model, 5)  # 32 tokens: the last tile is a shorter one
    lengths = []
    for mlp in mlps:
        part = next(part for part in mlp.modules() if part is not mlp and list(part.parameters()))
        part.register_forward_pre_hook(lambda _, args: lengths.append(args[0].numel() // x.shape[-1]))
    for mlp, references in zip(mlps, expected, strict=True):
        for actual, reference in zip(results(mlp, x), references, strict=True):
            assert actual.shape == reference.shape
            assert float((actual - reference).norm() / reference.norm()) <= TOLERANCE
    assert max(lengths) <= 7

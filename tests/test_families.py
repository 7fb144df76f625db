"""Model families by what their layers do: gated-delta hybrids run on Ulysses alone, other recurrences not at all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING

from longctx.attention.choice import choose_backend
from longctx.attention.cost import Setup
from longctx.attention.support import GATED_DELTA_MODELS
from longctx.train import main
from longctx.ulysses.gated_delta import _convolve_documents
from tests.test_models import LINEAR, SMALL


def setup_of(config, sp):
    return Setup.of_model(config, sp, element_size=4, device_name="CPU", devices_per_node=8)


def hybrid_config(model_type="qwen3_next", **settings):
    return CONFIG_MAPPING[model_type](**SMALL | LINEAR | settings)


@pytest.fixture
def folder(tmp_path):
    """A config and nothing else."""
    hybrid_config("qwen3_5_text").save_pretrained(tmp_path)
    return str(tmp_path)


# ------------------------------------------------------------------------------------------------
# Gated-delta hybrids
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["ring", "gather", "hybrid"])
@pytest.mark.parametrize("model_type", GATED_DELTA_MODELS)
def test_no_ring_runs_gated_delta_layers(model_type, backend):
    with pytest.raises(ValueError, match=rf"--sp_backend {backend} .*linear-attention.*--sp_backend ulysses .*1, 2\."):
        choose_backend(backend, setup_of(hybrid_config(model_type), 2))


@pytest.mark.parametrize("backend", ["ring", "gather", "hybrid"])
def test_the_command_line_refuses_rings_before_anything_starts(backend, folder, capsys, monkeypatch):
    monkeypatch.setattr("longctx.launch.processes.spawn", lambda *_: pytest.fail("processes were started"))
    given = ["--model_name_or_path", folder, "--dataset_name", "stdlib", "--use_cpu", "--sp", "2"]
    assert main([*given, "--sp_backend", backend]) == 2
    error = capsys.readouterr().err
    assert error.startswith("longctx: error: ")
    assert "linear-attention layers" in error
    assert "Use --sp_backend ulysses" in error
    assert main([*given, "--dry_run"]) == 0  # as auto chooses
    assert "ulysses 2 (auto)" in capsys.readouterr().out


def test_key_heads_that_do_not_fit():
    """4 attention heads but 2 linear key heads; 6 and 4 share 1 and 2."""
    with pytest.raises(ValueError, match=r"--sp 4 .*4 attention heads and 2 linear key heads.*--sp 1, 2\."):
        choose_backend("ulysses", setup_of(hybrid_config(), 4))
    uneven = hybrid_config(num_attention_heads=6, linear_num_key_heads=4)
    with pytest.raises(ValueError, match=r"--sp 3 .*6 attention heads and 4 linear key heads.*--sp 1, 2\."):
        choose_backend("ulysses", setup_of(uneven, 3))


def test_auto_takes_ulysses_or_says_why_not():
    from longctx.attention.choice import Documents

    documents = Documents(rows=[np.array([64])], source="one document")
    choice = choose_backend("auto", setup_of(hybrid_config(), 2), documents)
    assert choice.name == "ulysses"
    assert {str(how): why for how, why in choice.refused} == dict.fromkeys(
        ["ring 2", "gather 2"], "linear attention needs all tokens"
    )
    with pytest.raises(ValueError, match=r"auto finds none for sp 4 .*2 linear key heads.*Lower --sp"):
        choose_backend("auto", setup_of(hybrid_config(), 4), documents)


@pytest.mark.parametrize("lengths", [[5], [1, 1, 1], [3, 1, 7, 2]])
def test_convolution_starts_afresh_in_every_document(lengths):
    """Against a convolution of each document by itself, outputs and gradients."""
    torch.manual_seed(0)
    weight = torch.randn(6, 1, 4, dtype=torch.float64)

    def convolve(x):
        return torch.nn.functional.conv1d(x, weight, padding=3, groups=6)[:, :, : x.shape[2]]

    together = torch.randn(1, 6, sum(lengths), dtype=torch.float64, requires_grad=True)
    apart = together.detach().clone().requires_grad_()
    actual = _convolve_documents(together, np.cumsum([0, *lengths]), convolve, reach=3)
    expected = torch.cat([convolve(document) for document in apart.split(lengths, dim=2)], dim=2)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    actual.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(together.grad, apart.grad, rtol=1e-12, atol=1e-12)

"""Activation checkpoints of a run save no RNG state unless asked to, and check shapes only where those can change."""

from __future__ import annotations

import json

import pytest
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from longctx.model.tiny import tiny_config
from tests.small_model import save_with_tokenizer
from tests.workers import run_ranks

STEPS = 2
RUN = f"--dataset_name stdlib --max_length 256 --overlong split --max_steps {STEPS} --use_cpu --save_strategy no"
RUN += " --gradient_checkpointing True"


def reads(flags, folder):
    """Return how often a run has read the CPU's RNG state, and the shape of a saved tensor to compare it."""
    import torch
    from torch.utils import checkpoint

    from tests.training.test_training import log_of

    states, read = [], torch.get_rng_state
    torch.get_rng_state = lambda: states.append(1) or read()
    shapes, shape_of = [], checkpoint._allowed_determinism_checks_to_fns["default"]
    checkpoint._allowed_determinism_checks_to_fns["default"] = lambda tensor: shapes.append(1) or shape_of(tensor)
    assert any("grad_norm" in entry for entry in log_of([*RUN.split(), *flags, "--output_dir", folder]))
    return len(states), len(shapes)


@pytest.mark.parametrize("selective", [True, False])
def test_rng_states_are_saved_only_on_request(selective, tmp_path):
    found = {}
    for name, also in {"default": {}, "kept": {"preserve_rng_state": True}}.items():
        value = json.dumps({"selective": selective} | also)
        flags = ["--model_name_or_path", "tiny", "--gradient_checkpointing_kwargs", value]
        [found[name]] = run_ranks(1, f"{__name__}:reads", flags, str(tmp_path / name))
    assert found["kept"][0] - found["default"][0] >= 2 * STEPS, found  # one for each layer in each step
    assert found["default"][0] < 2 * STEPS
    assert found["default"][1] == 0


def test_shapes_of_routed_tokens_are_compared_when_they_are_computed_again(tmp_path):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = Qwen3MoeConfig(**(tiny_config().to_dict() | experts | {"model_type": "qwen3_moe"}))
    save_with_tokenizer(Qwen3MoeForCausalLM(config), tmp_path / "model")
    flags = ["--model_name_or_path", str(tmp_path / "model")]
    [(_, shapes)] = run_ranks(1, f"{__name__}:reads", flags, str(tmp_path / "run"))
    assert shapes > 0

"""Activation checkpoints of a run check shapes where those can change."""

from __future__ import annotations

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from longctx.model.tiny import tiny_config
from tests.small_model import save_with_tokenizer
from tests.workers import run_ranks

RUN = "--dataset_name stdlib --max_length 256 --overlong split --max_steps 2 --use_cpu --save_strategy no"
RUN += " --gradient_checkpointing True"


def compared_shapes(model, folder):
    """Train, and return how many tensors had their shape compared with that of the first computation."""
    from torch.utils import checkpoint

    from tests.training.test_training import log_of

    shapes, shape_of = [], checkpoint._allowed_determinism_checks_to_fns["default"]
    checkpoint._allowed_determinism_checks_to_fns["default"] = lambda tensor: shapes.append(1) or shape_of(tensor)
    log = log_of([*RUN.split(), "--model_name_or_path", model, "--output_dir", folder])
    assert any("grad_norm" in entry for entry in log)
    return len(shapes)


def test_shapes_of_routed_tokens_are_compared_when_they_are_computed_again(tmp_path):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = Qwen3MoeConfig(**(tiny_config().to_dict() | experts | {"model_type": "qwen3_moe"}))
    save_with_tokenizer(Qwen3MoeForCausalLM(config), tmp_path / "model")
    [shapes] = run_ranks(1, f"{__name__}:compared_shapes", str(tmp_path / "model"), str(tmp_path / "run"))
    assert shapes > 0

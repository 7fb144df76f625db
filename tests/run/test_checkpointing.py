"""Activation checkpoints of a run save no RNG state unless a flag asks for it."""

from __future__ import annotations

import json

import pytest

from tests.workers import run_ranks

STEPS = 2
RUN = f"--model_name_or_path tiny --dataset_name stdlib --max_length 256 --overlong split --max_steps {STEPS} --use_cpu"
RUN += " --save_strategy no --gradient_checkpointing True"


def states_read(flags, folder):
    """Return how often a run has read the CPU's RNG state."""
    import torch

    from tests.training.test_training import log_of

    asked, read = [], torch.get_rng_state
    torch.get_rng_state = lambda: asked.append(1) or read()
    assert any("grad_norm" in entry for entry in log_of([*RUN.split(), *flags, "--output_dir", folder]))
    return len(asked)


@pytest.mark.parametrize("selective", [True, False])
def test_rng_states_are_saved_only_on_request(selective, tmp_path):
    found = {}
    for name, also in {"default": {}, "kept": {"preserve_rng_state": True}}.items():
        value = json.dumps({"selective": selective} | also)
        given = ["--gradient_checkpointing_kwargs", value], str(tmp_path / name)
        [found[name]] = run_ranks(1, f"{__name__}:states_read", *given)
    assert found["kept"] - found["default"] >= 2 * STEPS, found  # one for each layer in each step
    assert found["default"] < 2 * STEPS

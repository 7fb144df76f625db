"""Activation checkpoints of a run keep no state of random numbers, unless somebody asks for it."""

from __future__ import annotations

import json

import pytest

from tests.workers import run_ranks

STEPS = 2
RUN = f"--model_name_or_path tiny --dataset_name stdlib --max_length 256 --overlong split --max_steps {STEPS} --use_cpu"
RUN += " --save_strategy no --gradient_checkpointing True"


def states_read(flags, folder):
    """How often a run has asked for the state of random numbers after its start."""
    import torch

    from tests.training.test_training import log_of

    asked, read = [], torch.get_rng_state
    torch.get_rng_state = lambda: asked.append(1) or read()
    assert len([entry for entry in log_of([*RUN.split(), *flags, "--output_dir", folder]) if "grad_norm" in entry])
    return len(asked)


@pytest.mark.parametrize("selective", [True, False])
def test_states_of_random_numbers_are_kept_only_if_somebody_asks(selective, tmp_path):
    found = {}
    for name, also in {"usual": {}, "kept": {"preserve_rng_state": True}}.items():
        value = json.dumps({"selective": selective} | also)
        given = ["--gradient_checkpointing_kwargs", value], str(tmp_path / name)
        [found[name]] = run_ranks(1, f"{__name__}:states_read", *given)
    assert found["kept"] - found["usual"] >= 2 * STEPS, found  # a state for each layer of each step
    assert found["usual"] < 2 * STEPS

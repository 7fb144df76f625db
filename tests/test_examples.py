"""Every script of examples/ run as its first lines say, against the same steps on one process without longctx."""

from __future__ import annotations

import functools
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from longctx.model.tiny import tiny_model, tiny_tokenizer
from tests.modules import load
from tests.reference import adamw_steps, dense_loss
from tests.softcuda.ranks import soft_environment
from tests.workers import run_ranks, run_script

EXAMPLES = Path(__file__).parents[1] / "examples"
PREFERENCES = EXAMPLES / "dpo.py"
"""Trains on pairs of documents: test_preferences.py."""
SCRIPTS = sorted(set(EXAMPLES.glob("*.py")) - {PREFERENCES})
DOCUMENTS_A_STEP, STEPS = 4, 4


def load_documents(script: Path) -> list[list[int]]:
    """The documents a script trains on, from its own function."""
    return load(script).load_documents(tiny_tokenizer())["input_ids"]


def losses_of(script: Path, folder: Path, processes: int = 2, env: Mapping[str, str] = os.environ) -> list[float]:
    """What a script prints, run as its first lines say but for the number of processes."""
    [command] = re.findall(r"^torchrun --nproc_per_node 2 (.*)$", script.read_text(), re.MULTILINE)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    done = subprocess.run(
        [*launcher, *command.replace("examples/", f"{EXAMPLES}/").split()],
        env={**env, "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return losses_in(done.stdout)


def losses_in(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)", printed, re.MULTILINE)]


@functools.cache
def losses_of_one_process() -> list[float]:
    """AdamW on the documents in order, dense attention, the gradient's norm clipped at 1."""
    documents = load_documents(SCRIPTS[0])
    model = tiny_model()
    model.set_attn_implementation("eager")

    def loss_of_step(step):
        ids = documents[step * DOCUMENTS_A_STEP : (step + 1) * DOCUMENTS_A_STEP]
        return dense_loss(model, [(tokens, tokens) for tokens in ids])

    return adamw_steps(model, [1e-3] * STEPS, loss_of_step)[0]


# Of the losses below: fp32 sums over other tokens first; four AdamW steps amplify their rounding.


def losses_of_trl(script):
    """The losses of TRL's own SFTTrainer with the arguments and documents of a script."""
    from trl import SFTTrainer

    module, tokenizer = load(script), tiny_tokenizer()
    documents = module.load_documents(tokenizer)
    trainer = SFTTrainer(tiny_model(), module.arguments(), train_dataset=documents, processing_class=tokenizer)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.long
def test_the_sft_example_on_two_ranks_has_the_losses_of_trl_on_one_process(tmp_path):
    """Of both in fp32, where a rounded sum is off by 6e-8: 1e-6 after three steps of AdamW, which amplify it."""
    script = EXAMPLES / "sft_trainer.py"
    printed = run_script(2, script, tmp_path)
    [losses] = run_ranks(1, f"{__name__}:losses_of_trl", script)
    assert losses_in(printed) == pytest.approx(losses, rel=1e-6)
    assert re.findall(r"perplexity ([\d.]+)", printed) == [f"{math.exp(loss):.1f}" for loss in losses]


@pytest.mark.long
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_an_example_at_sp_2_has_the_losses_of_one_process(script, tmp_path):
    losses = losses_of(script, tmp_path)
    assert losses == pytest.approx(losses_of_one_process(), rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_an_example_on_two_soft_gpus_has_the_losses_of_one_process(script, tmp_path, soft_gpus):
    # SFTConfig trains in bf16 on GPUs: 1.2e-4 off here, with the bound of tests/gpu/test_soft_training.py.
    tolerance = 5e-4 if script.stem == "sft_trainer" else 1e-5
    losses = losses_of(script, tmp_path, env=soft_environment())
    assert losses == pytest.approx(losses_of_one_process(), rel=tolerance)


def test_the_examples_train_on_the_same_documents():
    sources = {re.search(r"def load_documents.*?\n\n\n", script.read_text(), re.DOTALL).group() for script in SCRIPTS}
    assert len(sources) == 1


@pytest.mark.parametrize("script", [*SCRIPTS, PREFERENCES], ids=lambda script: script.stem)
def test_an_example_is_short_and_needs_the_public_interface_only(script):
    text = script.read_text()
    assert len(text.splitlines()) < (120 if script == PREFERENCES else 80)
    modules = set(re.findall(r"^(?:from|import) (longctx[\w.]*)", text, re.MULTILINE))
    own = "longctx.training.trainer" if script.stem == "sft_trainer" else "longctx.collate"
    assert modules == {"longctx", own, "longctx.data", "longctx.model.tiny"}
    assert set(re.findall(r"longctx\.(\w+)\(", text)) == {"parallelize"}

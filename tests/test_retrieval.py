"""examples/retrieval/ as its first lines say, and with attention across ranks broken."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from longctx.model.tiny import tiny_model, tiny_tokenizer
from tests.modules import load
from tests.small_model import save_with_tokenizer
from tests.workers import run_script

EXAMPLE = Path(__file__).parents[1] / "examples" / "retrieval"


def run(folder: Path, *command: str, **variables: str) -> str:
    root = EXAMPLE.parents[1]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)} | variables
    done = subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_documents_have_their_length_and_one_key():
    example = load(EXAMPLE / "retrieval.py")
    haystack = example.Haystack(seed=3)
    for place, at in ((0.0, 0), (1.0, 300 - 2 * len(example.QUESTION) - 2 * example.DIGITS - 1)):
        question, key = haystack.document(300, place)
        assert len(tiny_tokenizer()(question + key)["input_ids"]) == 300
        assert question.index(f"{example.QUESTION}{key}\n") == at
        assert [letter for letter in question if letter.isdigit()] == list(key)
    for first in (None, 1000):
        records = list(haystack.row(2048, 1000, first))
        assert sum(len(record["input_ids"]) for record in records) == 2048
        assert first is None or len(records[0]["input_ids"]) == first
        for record in records:
            learnt = [token for token in record["labels"] if token != -100]
            assert learnt == record["input_ids"][-example.DIGITS :]
            assert haystack.tokenizer.decode(learnt).isdigit()


def entropies(folder, processes):
    """What examples/retrieval/grpo.py prints for a model with random weights, at sp `processes`."""
    sizes = ("--length", "300", "--steps", "2", "--prompts", "2", "--num_generations", "3")
    model = ("--model_name_or_path", "model", "--sp", str(processes))
    printed = run_script(processes, EXAMPLE / "grpo.py", folder, *model, *sizes)
    found = re.findall(r"^step \d+: mean reward [\d.]+, entropy ([\d.]+)$", printed, re.MULTILINE)
    return [float(value) for value in found]


@pytest.mark.long
def test_the_policy_example_is_the_same_at_sp_1_and_2(tmp_path):
    save_with_tokenizer(tiny_model(), tmp_path / "model")
    alone, together = (entropies(tmp_path, processes) for processes in (1, 2))
    assert len(alone) == 2
    assert together == pytest.approx(alone, abs=1e-5)  # as many digits as are printed


@pytest.mark.long
def test_keys_on_other_ranks_are_learnt_unless_attention_across_ranks_is_broken(tmp_path):
    """Half an hour on 2 cores. A rank alone has a quarter of a document: it can answer a quarter, not more."""
    run(tmp_path, str(EXAMPLE / "retrieval.py"), "data", "--output", "retrieval-data")
    by_place = {}
    for broken in ("", "ranks"):
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4")
        flags = ("--config", str(EXAMPLE / "train.yaml"), "--output_dir", f"run-{broken}")
        run(tmp_path, *torchrun, "-m", "tests.broken_retrieval", *flags, BREAK=broken)
        by_place[broken] = json.loads((tmp_path / f"run-{broken}" / "by_place.json").read_text())
    assert sum(by_place[""]) / len(by_place[""]) > 0.75
    assert max(by_place["ranks"][2:-2]) < 0.2 < max(by_place["ranks"])  # its own keys are the first and the last

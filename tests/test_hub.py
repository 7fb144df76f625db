"""--push_to_hub from real gloo ranks to a stand-in for the hub on this machine: what arrives."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from longctx.checkpoint.files import check_files, read_manifest
from tests.hub import stand_in
from tests.test_training import make_documents, write_jsonl

NAME, TOKENS = "someone/model", ("hf_OfTheFlag", "hf_OfTheEnvironment")


def push(url, folder, *flags):
    """A run of four steps with two checkpoints, as a command."""
    data = write_jsonl(folder / "data.jsonl", make_documents([90, 7, 41, 64]))
    command = [sys.executable, "-m", "longctx.train", "--model_name_or_path", "tiny", "--dataset_name", data]
    command += ["--max_length", "128", "--max_steps", "4", "--save_steps", "2", "--output_dir", str(folder / "out")]
    command += ["--report_to", "none", "--disable_tqdm", "True", "--logging_steps", "1", "--use_cpu", "True"]
    command += ["--push_to_hub", "True", "--hub_model_id", NAME, "--hub_token", TOKENS[0], "--hub_always_push", "True"]
    env = os.environ | {"HF_ENDPOINT": url, "HF_TOKEN": TOKENS[1], "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"}
    env |= {"PYTHONPATH": str(Path(__file__).parent.parent), "HF_HUB_OFFLINE": "0"}
    return subprocess.run([*command, *flags], cwd=folder, env=env, capture_output=True, text=True, timeout=280)


def written(files, folder):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_the_hub_has_what_the_folder_has(tmp_path):
    """Pushed by one rank, without a secret, and whole: it loads, and a checkpoint could be gone on from."""
    with stand_in() as hub:
        done = push(hub.url, tmp_path, "--hub_strategy", "checkpoint", "--sp", "2", "--sp_backend", "ring")
    assert done.returncode == 0, done.stderr
    saved = ["step 2", "step 2, checkpoint", "step 4", "step 4, checkpoint"]
    assert sorted(hub.commits) == ["End of training", *(f"Training in progress, {what}" for what in saved)]
    files, out = hub.files[NAME], tmp_path / "out"
    here = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert {name for name in files if "checkpoint" not in name} == {name for name in here if "checkpoint-" not in name}
    for name, content in files.items():
        own = out / name.replace("last-checkpoint", "checkpoint-4")
        assert content == own.read_bytes(), name
        assert not any(token.encode() in content for token in TOKENS), name
    assert hub.tokens == {f"Bearer {TOKENS[0]}", None}  # None: large files, to addresses that the hub gives
    pushed = written(files, tmp_path / "pushed")
    model, saved = (AutoModelForCausalLM.from_pretrained(folder) for folder in (pushed, out))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), saved.parameters(), strict=True))
    AutoTokenizer.from_pretrained(pushed)
    check_files(pushed / "last-checkpoint", read_manifest(pushed / "last-checkpoint"))
    card = files["README.md"].decode()
    assert "| sequence length | 128 tokens |" in card
    assert "sp 2 (ring 2 × ulysses 1)" in card
    assert "| steps | 4 of 4 |" in card
    assert re.search(r"\| last in the log \| step 4: [\d,]+ tokens, loss \d", card)
    assert "None" not in card
    assert str(tmp_path) not in card

"""--push_to_hub from real gloo ranks to a stand-in for the hub on this machine: what arrives, and what fails how."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from longctx.train import main
from longctx.training.checkpoint.files import check_files, read_manifest
from tests.hub import stand_in
from tests.training.test_training import make_documents, write_jsonl
from tests.workers import call_main, run_ranks

NAME, TOKENS = "someone/model", ("hf_OfTheFlag", "hf_OfTheEnvironment")
LAYOUTS = {"ring": ["--sp", "2", "--sp_backend", "ring"], "ulysses": ["--sp", "2", "--sp_backend", "ulysses"]}


def run_flags(folder):
    data = write_jsonl(folder / "data.jsonl", make_documents([90, 7, 41, 64]))
    flags = ["--model_name_or_path", "tiny", "--dataset_name", data, "--output_dir", str(folder / "out")]
    flags += ["--max_length", "128", "--max_steps", "4", "--save_steps", "2"]
    flags += ["--report_to", "none", "--disable_tqdm", "True", "--logging_steps", "1", "--use_cpu", "True"]
    flags += ["--push_to_hub", "True", "--hub_model_id", NAME, "--hub_token", TOKENS[0], "--hub_always_push", "True"]
    return flags


def push(url, folder, *flags):
    """A run of four steps with two checkpoints, as a command."""
    command = [sys.executable, "-m", "longctx.train", *run_flags(folder)]
    env = os.environ | {"HF_ENDPOINT": url, "HF_TOKEN": TOKENS[1], "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"}
    env |= {"PYTHONPATH": str(Path(__file__).parents[2]), "HF_HUB_OFFLINE": "0"}
    return subprocess.run([*command, *flags], cwd=folder, env=env, capture_output=True, text=True, timeout=280)


def push_from_ranks(url, folder, *flags):
    """The same run on two ranks that a launcher has started; its exit code, stdout and stderr."""
    ranks = run_ranks(2, f"{__name__}:push_from_rank", url, [*run_flags(folder), *flags])
    codes, printed, errors = zip(*ranks, strict=True)
    return SimpleNamespace(returncode=max(codes), stdout="".join(printed), stderr="".join(errors))


def reach(url, monkeypatch):
    """Make this process reach the hub at `url`, though the hub's library has read the environment."""
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", url)
    for name, value in {"ENDPOINT": url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.setenv("HF_TOKEN", TOKENS[1])


def push_from_rank(url, arguments):
    """`longctx train` where HF_ENDPOINT, HF_TOKEN and HF_HUB_DISABLE_XET were set before the hub's library was read."""
    reach(url, pytest.MonkeyPatch())
    return call_main("longctx.train", arguments)


def written(files, folder):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


NOT_COMPARED = "| exactness | step 1 was not compared with one device: only the demo compares its first step"
WITH_CHECKPOINTS = ["step 2", "step 2, checkpoint", "step 4", "step 4, checkpoint"]


@pytest.mark.parametrize("start", [push_from_ranks, pytest.param(push, marks=pytest.mark.long)])
def test_the_hub_has_what_the_folder_has(start, tmp_path):
    """Pushed by one rank, without a secret, and whole: it loads, and a checkpoint could be gone on from."""
    with stand_in() as hub:
        done = start(hub.url, tmp_path, "--hub_strategy", "checkpoint", *LAYOUTS["ring"])
    assert done.returncode == 0, done.stderr
    expected = ["End of training", *(f"Training in progress, {what}" for what in WITH_CHECKPOINTS)]
    assert sorted(hub.commits) == expected
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
    for row in ("| sequence length | 128 tokens |", "sp 2 (ring 2 × ulysses 1)", "| steps | 4 of 4 |", NOT_COMPARED):
        assert row in card
    assert re.search(r"\| last in the log \| step 4: [\d,]+ tokens, loss \d", card)
    assert "None" not in card
    assert str(tmp_path) not in card


BY_STRATEGY = {  # what is pushed of steps 2 and 4, and the folders of checkpoints there
    "every_save": (["step 2", "step 4"], set()),
    "checkpoint": (WITH_CHECKPOINTS, {"last-checkpoint"}),
    "all_checkpoints": (WITH_CHECKPOINTS, {"checkpoint-2", "checkpoint-4"}),
    "end": ([], set()),
}


@pytest.mark.long
def test_every_strategy_pushes_what_its_name_says(tmp_path, monkeypatch):
    """And what was in the folder before; a run goes on from the last-checkpoint that comes back from the hub."""
    with stand_in() as hub:
        reach(hub.url, monkeypatch)
        for strategy, (pushed, folders) in BY_STRATEGY.items():
            folder, before = tmp_path / strategy, len(hub.commits)
            (folder / "out").mkdir(parents=True)
            (folder / "out" / "earlier.html").write_text("the page of another run")
            flags = run_flags(folder)
            asked = [] if strategy == "every_save" else ["--hub_strategy", strategy]
            assert main([*flags, "--hub_model_id", f"someone/{strategy}", *asked]) == 0
            commits = ["End of training", *(f"Training in progress, {what}" for what in pushed)]
            assert sorted(hub.commits[before:]) == commits
            files = hub.files[f"someone/{strategy}"]
            assert files["earlier.html"] == b"the page of another run"
            assert {name.partition("/")[0] for name in files if "checkpoint" in name} == folders
            written(files, folder / "pushed")
            for name in folders & {"last-checkpoint"}:
                again = [*flags, "--push_to_hub", "False", "--max_steps", "5", "--output_dir", str(folder / "again")]
                assert main([*again, "--resume_from_checkpoint", str(folder / "pushed" / name)]) == 0


REFUSED = {  # at the start, and by what
    "token": lambda path, body: 401,
    "read-only token": lambda path, body: 403 if path.endswith("auth-check/write") else 0,
    "nobody there": None,
}


@pytest.mark.parametrize(
    ("why", "layout"),
    [
        pytest.param("token", [], id="token, 1 process"),
        *(pytest.param(why, LAYOUTS["ring"], id=why, marks=pytest.mark.long) for why in REFUSED),
    ],
)
def test_a_hub_that_takes_nothing_is_met_before_data_and_weights(why, layout, tmp_path):
    with stand_in() as hub, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        hub.refuses = REFUSED[why] or hub.refuses
        url = hub.url if REFUSED[why] else f"http://127.0.0.1:{closed.getsockname()[1]}"
        done = push(url, tmp_path, *layout)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("longctx: error: ") == 1
    assert f"--push_to_hub True: {NAME} cannot be written on the hub" in done.stderr
    assert {"token": "401", "read-only token": "403"}.get(why, "ConnectError") in done.stderr
    assert "Give a token that may write it (hf auth login, or --hub_token), or leave" in done.stderr
    assert "Traceback" not in done.stderr
    assert "packing" not in done.stdout


@pytest.mark.long
def test_a_checkpoint_that_cannot_be_pushed_is_said_and_the_run_goes_on(tmp_path):
    with stand_in() as hub:
        hub.refuses = lambda path, body: 403 if b"last-checkpoint" in body else 0
        done = push(hub.url, tmp_path, "--hub_strategy", "checkpoint", *LAYOUTS["ring"])
    assert done.returncode == 0, done.stderr
    warned = re.findall(r"could not be pushed \((\w+): .*Training goes on; what is saved is in", done.stderr, re.DOTALL)
    assert warned == ["HfHubHTTPError"]
    assert done.stderr.count("could not be pushed (") == 2  # of both checkpoints
    assert hub.commits[-1] == "End of training"
    assert not any("checkpoint" in name for name in hub.files[NAME])


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_that_cannot_be_pushed_is_not_lost(layout, tmp_path):
    with stand_in() as hub:
        hub.refuses = lambda path, body: 403 if b"End of training" in body else 0
        done = push(hub.url, tmp_path, "--hub_strategy", "end", *LAYOUTS[layout])
    assert done.returncode == 1
    assert done.stderr.count("longctx: error: --push_to_hub failed: ") == 1
    assert f"what was saved is in {tmp_path / 'out'}" in done.stderr
    assert "Traceback" not in done.stderr
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")

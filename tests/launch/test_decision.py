"""Rank 0 resolves the run and decides for all ranks, before a process group exists; what it refuses, all refuse."""

from __future__ import annotations

import itertools
import json
import os
import socket
from pathlib import Path

import pytest

from longctx.launch import store
from longctx.launch.store import STORE_FILE, share_decision
from longctx.ranks.agreement import RefusedOnAllRanks
from longctx.settings import resolve as module
from longctx.settings.arrange import arrange
from longctx.settings.launcher import read_profile
from longctx.settings.processes import count_to_start
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve_together
from longctx.settings.rules import fill
from tests.workers import run_ranks

TINY = ["--model_name_or_path", "tiny", "--dataset_name", "stdlib", "--overlong", "split", "--max_length", "2048"]
RANKS = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1", "RANK": "1"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """The private folder of a run that longctx has started, whose rank 1 this process is."""
    for name, value in (RANKS | {STORE_FILE: str(tmp_path / "store")}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(store, "_decisions", itertools.count())
    monkeypatch.setattr(module, "REFUSED_SECONDS", 0.0)
    return tmp_path


def decided_together(arguments: list[str]):
    env = dict(os.environ)
    launcher = read_profile(env)
    return resolve_together(fill(parse_flags(arguments), launcher), launcher, env)


def test_a_rank_0_that_decides_nothing_is_named(folder) -> None:
    with pytest.raises(ValueError, match=r"^rank 0 has decided nothing for 0 s \(--ddp_timeout\)\. Start the run anew"):
        share_decision(None, 0.1)


def test_an_address_at_which_no_rank_0_is_is_named(monkeypatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name, value in (RANKS | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(STORE_FILE, raising=False)
    with pytest.raises(ValueError, match=rf"rank 1 on \S+ and rank 0 do not meet at 127\.0\.0\.1:{port} \("):
        share_decision(None, 1)


def test_what_rank_0_refuses_all_refuse_and_one_says(folder) -> None:
    (folder / "decision-0").write_text(json.dumps({"refused": "--sp 3 cannot be"}))
    with pytest.raises(RefusedOnAllRanks, match="--sp 3 cannot be") as refused:
        decided_together(TINY)
    assert not refused.value.is_mine


def test_rank_0_says_its_refusal_and_tells_the_others(folder, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "0")
    given = [*TINY, "--sp", "2", "--sp_backend", "ulysses", "--pad_to_multiple_of", "3", "--use_cpu", "True"]
    with pytest.raises(RefusedOnAllRanks, match="--pad_to_multiple_of 3 is not a multiple of 2") as refused:
        decided_together(given)
    assert refused.value.is_mine
    assert json.loads((folder / "decision-0").read_text()) == {"refused": str(refused.value)}


def choices(arguments: list[str]) -> tuple[int, str, str]:
    """What this rank takes of --sp auto and --memory auto, where ranks would choose by speeds of their own."""
    rank = int(os.environ["RANK"])

    def by_rank(values, world_size, facts):
        return arrange(values.with_("auto", sp=1 + rank, num_processes=world_size, memory="balanced"), facts)

    module.choose_layout = by_rank
    run = decided_together(arguments)
    return run.dims.sp, run.settings["memory"], run.settings["output_dir"]


def test_ranks_that_would_choose_differently_take_what_rank_0_chooses(tmp_path) -> None:
    given = [*TINY, "--sp", "auto", "--memory", "auto", "--use_cpu", "True", "--output_dir", str(tmp_path / "out")]
    first, second = run_ranks(2, f"{__name__}:choices", given)
    assert first == second == (1, "balanced", str(tmp_path / "out"))


def test_processes_that_do_not_exist_are_refused_before_any_is_started(monkeypatch) -> None:
    monkeypatch.setattr("longctx.settings.processes.device_count", lambda: 2)
    settings = fill(parse_flags([*TINY, "--sp", "4"]), read_profile({}))
    with pytest.raises(ValueError, match=r"^4 processes on this machine need 4 GPUs, and 2 are visible\. Use --sp 2"):
        count_to_start(settings, read_profile({}))

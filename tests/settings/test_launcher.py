"""The processes of a launcher, what its reading imports, and `accelerate launch` in the place of this process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from longctx.launch.accelerate import default_config_file, find_profile, relaunch, who_starts
from longctx.settings.launcher import read_profile


def test_processes_of_a_launcher():
    assert not read_profile({}).launched
    by_deepspeed = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_SIZE": "2"}
    launcher = read_profile(by_deepspeed)
    assert (launcher.world_size, launcher.local_world_size, launcher.by_accelerate) == (4, 2, False)
    assert by_deepspeed["LOCAL_WORLD_SIZE"] == "2"
    with pytest.raises(ValueError, match="WORLD_SIZE is many, expected a whole number of at least 1"):
        read_profile({"RANK": "0", "WORLD_SIZE": "many"})
    alone = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}
    assert read_profile(dict(alone)).only_one_started
    assert not read_profile(alone | {"RANK": "0", "WORLD_SIZE": "2"}).only_one_started


def test_refusal_names_the_default_config(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert default_config_file() is None
    path = tmp_path / "accelerate/default_config.yaml"
    path.parent.mkdir()
    path.touch()
    assert default_config_file() == path
    with pytest.raises(ValueError, match=re.escape(str(path))):
        read_profile({"ACCELERATE_USE_MEGATRON_LM": "true"})


def test_default_config_is_accelerates(monkeypatch, tmp_path):
    """The path is worked out without accelerate, which takes a second to import."""
    for home in ({"HF_HOME": str(tmp_path)}, {"XDG_CACHE_HOME": str(tmp_path)}):
        env = {name: value for name, value in os.environ.items() if name not in ("HF_HOME", "XDG_CACHE_HOME")} | home
        code = "from accelerate.commands.config.config_args import default_config_file as p; print(p)"
        printed = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        path = Path(printed.stdout.strip())
        path.parent.mkdir(parents=True)
        path.touch()
        with monkeypatch.context() as patch:
            patch.delenv("HF_HOME", raising=False)
            for name, value in home.items():
                patch.setenv(name, value)
            assert default_config_file() == path


def test_nothing_heavy_is_imported():
    heavy = {"torch", "accelerate", "transformers", "deepspeed", "numpy", "yaml"}
    code = "import sys, longctx.settings.launcher as l; l.read_profile(); print(*sys.modules)"
    root = str(Path(__file__).parents[2])
    printed = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert not heavy & set(printed.stdout.split())


# `accelerate launch` in the place of this process


VALUES: dict[str, Any] = {
    "accelerate_config": "zero3",
    "num_processes": None,
    "machine_rank": None,
    "main_process_ip": None,
}
VALUES |= {"main_process_port": None}
STEP = {"STEP_NUM_TASKS": "2", "STEP_TASKS_PER_NODE": "1(x2)", "STEP_NODELIST": "node[3-4]", "JOB_ID": "0"}
STEP |= {"STEP_ID": "5", "NODEID": "1", "LOCALID": "0", "PROCID": "1"}
RELAUNCHED: dict[str, tuple[dict[str, Any], dict[str, str], dict[str, str]]] = {
    "plain": ({}, {}, {}),
    "processes": ({"num_processes": 2}, {}, {"num_processes": "2"}),
    "machines": (
        {"machine_rank": 1, "main_process_ip": "10.0.0.1"},
        {},
        {"machine_rank": "1", "main_process_ip": "10.0.0.1", "deepspeed_multinode_launcher": "standard"},
    ),
    "srun": (
        {},
        STEP,
        {
            "num_machines": "2",
            "machine_rank": "1",
            "main_process_ip": "node3",
            "main_process_port": "12005",
            "deepspeed_multinode_launcher": "standard",
        },
    ),
}


@pytest.mark.parametrize("case", RELAUNCHED)
def test_relaunch(case, monkeypatch):
    values, step, launcher = RELAUNCHED[case]
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    started: list[str] = []
    monkeypatch.setattr(os, "execv", lambda program, command: started.extend(command))
    arguments = ["--machine-rank=1", "--sp", "2", "--accelerate_config", "zero3", "--main_process_ip", "10.0.0.1"]
    relaunch({**VALUES, **values}, arguments, is_launched=False)
    flags = [word for name, value in launcher.items() for word in (f"--{name}", value)]
    config = ["--config_file", str(find_profile("zero3"))]
    assert started[1:] == ["-m", "accelerate.commands.launch", *config, *flags, "-m", "longctx.train", "--sp", "2"]


def test_relaunch_is_refused_where_processes_run_already(monkeypatch):
    with pytest.raises(ValueError, match=r"zero3 comes too late.*accelerate launch --config_file zero3"):
        relaunch(VALUES, [], is_launched=True)
    for name, value in {**STEP, "STEP_NUM_TASKS": "4", "STEP_TASKS_PER_NODE": "2(x2)"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with pytest.raises(ValueError, match="zero3 in 2 tasks on a node"):
        relaunch(VALUES, [], is_launched=False)


def test_profile_that_does_not_exist():
    with pytest.raises(ValueError, match=r"--accelerate_config zero4 is neither a file nor .*zero3"):
        find_profile("zero4")


def test_who_starts_says_why():
    assert "accelerate starts one process" in who_starts(4, only_one_started=True)
    assert who_starts(4, only_one_started=False) == "no launcher started 4 processes, so longctx.train does."

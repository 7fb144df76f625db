"""The processes of a launcher, and where its default config is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from longctx.launch.accelerate import default_config_file, who_starts
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


@pytest.mark.long
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


def test_who_starts_says_why():
    assert "accelerate starts one process" in who_starts(4, only_one_started=True)
    assert who_starts(4, only_one_started=False) == "longctx.train starts 4 processes, since no launcher did."

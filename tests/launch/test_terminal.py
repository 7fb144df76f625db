"""A run prints a first line before its slow imports, and a summary before its first step."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import warnings

import pytest
import torch.distributed as dist

from longctx.launch.console import Line, show_summary
from longctx.launch.terminal import HAS_STARTED, quieten, say_hello


def test_a_summary_is_short_and_explained_when_asked(capsys):
    lines = [Line("batch", "8 a step", "8 a step = 2 × 4"), Line("mesh", "4 processes"), Line("note", "evil\x1b[2J")]
    show_summary(lines, explain=False)
    short = capsys.readouterr().out
    assert short.split("\n\n")[:3] == ["\nmesh      4 processes", "batch     8 a step", "note      evil\\x1b[2J"]
    assert "--explain" in short
    show_summary(lines, explain=True)
    explained = capsys.readouterr().out
    assert "batch     8 a step = 2 × 4\n" in explained
    assert "--explain" not in explained


def test_a_run_says_hello_once(monkeypatch, capsys):
    monkeypatch.delenv(HAS_STARTED, raising=False)
    for _ in range(2):  # the second time as a process that the first has started
        say_hello("0.1.0")
    assert capsys.readouterr().out.count("longctx 0.1.0 is starting") == 1


def test_the_first_sign_of_life_comes_before_the_slow_imports():
    program = "import sys, longctx.__main__, longctx.train, longctx.launch.terminal as t"
    program += "; t.say_hello(longctx.__version__)"
    program += "; sys.exit(bool({'torch', 'transformers', 'rich'} & set(sys.modules)))"
    environment = {name: value for name, value in os.environ.items() if name != HAS_STARTED}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "is starting" in done.stdout


BARRIER = "barrier(): using the device under current context. "


def test_warnings_of_one_library_about_another_are_not_shown():
    assert f'"{BARRIER}"' in inspect.getsource(dist.barrier)  # as the installed torch words it
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        quieten()
        warnings.warn(BARRIER + "You can specify `device_id`.", UserWarning, stacklevel=1)
        warnings.warn("a warning for users", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in shown] == ["a warning for users"]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_only_the_first_rank_shows_warnings(rank, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        quieten()
        warnings.warn("a warning for users", UserWarning, stacklevel=1)
    assert len(shown) == (rank == "0")

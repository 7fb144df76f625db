"""A run prints a summary before its first step, and one of its ranks shows warnings."""

from __future__ import annotations

import warnings

import pytest

from longctx.launch.console import Line, show_summary
from longctx.launch.terminal import quieten


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


@pytest.mark.parametrize("rank", ["0", "1"])
def test_only_the_first_rank_shows_warnings(rank, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        quieten()
        warnings.warn("a warning for users", UserWarning, stacklevel=1)
    assert len(shown) == (rank == "0")

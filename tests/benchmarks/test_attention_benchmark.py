"""benchmarks.attention: a wrong way is not timed, and both modes print their whole table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.attention import ways as attention
from benchmarks.attention.__main__ import main
from benchmarks.attention.timing import VIRTUAL_WAYS, measure
from tests.workers import run_ranks

ROOT = Path(__file__).parents[2]


def wrong_way():
    """What is said about a way whose values are one token late on rank 1."""
    cu_seqlens, group = np.array([0, 40, 64]), dist.group.WORLD
    right = attention.ulysses(cu_seqlens, group)

    def wrong(q, k, v):
        return right.attend(q, k, v.roll(dist.get_rank(), 2))

    parts = {"one process": attention.one_process(cu_seqlens, group), "late": attention.Part(right.rows, wrong)}
    tensors = attention.Heads(query=4, key_value=2, dim=8).tensors(64, torch.float32, torch.device("cpu"))
    try:
        measure(parts, tensors, repeats=1)
    except RuntimeError as error:
        return str(error)


def test_wrong_result_is_not_timed() -> None:
    for message in run_ranks(2, "tests.benchmarks.test_attention_benchmark:wrong_way"):
        assert message is not None
        assert message.startswith("late is wrong: relative error ")


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "rows"),
    [
        (["--dtype", "float32", "bfloat16"], len(attention.CASES) * 2 * len(attention.WAYS)),
        (["--dtype", "float32", "--virtual_ranks", "2", "4"], len(attention.CASES) * 2 * len(VIRTUAL_WAYS)),
    ],
)
def test_command_prints_and_keeps_the_table(flags, rows, tmp_path) -> None:
    sizes = ["--tokens", "256", "--packs", "1", "--repeats", "2", "--output", str(tmp_path / "report.md")]
    command = [sys.executable, "-m", "benchmarks.attention", *sizes, *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=300)
    assert (tmp_path / "report.md").read_text() == done.stdout
    table = [row.strip("| ").split(" | ") for row in done.stdout.splitlines() if row.startswith("|")]
    header, _, *cells = table
    assert len(cells) == rows
    assert all(len(row) == len(header) for row in cells)
    assert "nan" not in done.stdout


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--tokens 255", "--tokens 255 cannot be divided over 2 ranks"),
        ("--ranks 3 --tokens 384", "--ranks 3 must be at least 2 and divide the 8 query heads"),
        ("--ranks 1", "--ranks 1 must be at least 2"),
        ("--heads 8 3", "query heads divide by key/value heads"),
        ("--repeats 0", "start at 1"),
        ("--device cuda", "--device cuda is for --virtual_ranks"),
    ],
)
def test_options_that_cannot_run_are_refused(flags, said, capsys) -> None:
    with pytest.raises(SystemExit):
        main(flags.split())
    assert said in capsys.readouterr().err

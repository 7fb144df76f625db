"""The loop that the docs show is run as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.softcuda.ranks import soft_environment
from tests.workers import run_script

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "howto" / "loop.md").read_text()


def the_loop(folder):
    """The 30-line loop of the page, as a file."""
    [loop] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    script = folder / "loop.py"
    script.write_text(loop)
    return script


def torchrun(script, env):
    """What a script prints under the launcher that its first line names."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4", str(script)]
    done = subprocess.run(command, env={**env, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses_in(printed):
    return [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", printed)]


@pytest.mark.parametrize("launcher", ["forked", pytest.param("torchrun", marks=pytest.mark.long)])
def test_the_training_loop_runs_as_printed(launcher, tmp_path):
    """Four processes; losses are printed once a step."""
    script = the_loop(tmp_path)
    losses = losses_in(run_script(4, script, tmp_path) if launcher == "forked" else torchrun(script, os.environ))
    assert len(losses) == 10
    assert losses[-1] < losses[0] < 6.0


@pytest.mark.long
def test_the_training_loop_on_four_soft_gpus_has_the_losses_of_four_processes(tmp_path, soft_gpus):
    """It draws its documents on the CPU, and its model is in fp32: both sum the same numbers in another order."""
    script = the_loop(tmp_path)
    expected = losses_in(torchrun(script, os.environ))
    losses = losses_in(torchrun(script, soft_environment() | {"SOFTCUDA_DEVICES": "4"}))
    assert losses == pytest.approx(expected, rel=1e-4)  # printed with four digits after the point

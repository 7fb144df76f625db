"""The loop that the docs show is run as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.softcuda.ranks import soft_environment

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "howto" / "loop.md").read_text()


def losses_of_the_loop(folder, env):
    """What the 30-line loop prints once a step, on four processes."""
    [loop] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    script = folder / "loop.py"
    script.write_text(loop)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4", str(script)]
    done = subprocess.run(command, env={**env, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", done.stdout)]


def test_the_training_loop_runs_as_printed(tmp_path):
    losses = losses_of_the_loop(tmp_path, os.environ)
    assert len(losses) == 10
    assert losses[-1] < losses[0] < 6.0


@pytest.mark.long
def test_the_training_loop_on_four_soft_gpus_has_the_losses_of_four_processes(tmp_path, soft_gpus):
    """It draws its documents on the CPU, and its model is in fp32: both sum the same numbers in another order."""
    expected = losses_of_the_loop(tmp_path, os.environ)
    losses = losses_of_the_loop(tmp_path, soft_environment() | {"SOFTCUDA_DEVICES": "4"})
    assert losses == pytest.approx(expected, rel=1e-4)  # printed with four digits after the point

"""The loop that the docs show is run as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers import run_script

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "howto" / "loop.md").read_text()


@pytest.mark.parametrize("launcher", ["forked", pytest.param("torchrun", marks=pytest.mark.long)])
def test_the_training_loop_runs_as_printed(launcher, tmp_path):
    """The 30-line loop: four processes, losses printed once a step and the same whichever way they are added up."""
    [loop] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    script = tmp_path / "loop.py"
    script.write_text(loop)
    printed = run_script(4, script, tmp_path) if launcher == "forked" else torchrun(script)
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", printed)]
    assert len(losses) == 10
    assert losses[-1] < losses[0] < 6.0


def torchrun(script):
    """What a script prints under the launcher that its first line names."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4", str(script)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout

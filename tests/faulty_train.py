"""`longctx.train` with faults in it: FAULT="kind rank step" has that rank meet it in the forward pass of that step.

Commas separate several faults.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from longctx.launch import spawn
from longctx.launch.slurm import join_step
from longctx.train import main


def meet(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "hang":
        time.sleep(3600)
    elif kind == "raise":
        raise RuntimeError("the fault of this test")
    elif kind == "worker":
        psutil.Process().children()[0].kill()
    elif kind == "stopped worker":
        subprocess.run(["kill", str(psutil.Process().children()[0].pid)], check=True)  # a launcher is not its parent
        time.sleep(3600)  # until torch raises an error here


def plant() -> None:
    from longctx.training.trainer import SequenceTrainer

    faults = {
        tuple(map(int, place)): kind.strip()
        for kind, *place in (f.rsplit(" ", 2) for f in os.environ["FAULT"].split(","))
    }
    once = os.environ.get("FAULT_ONCE")
    forward = SequenceTrainer._forward

    @functools.wraps(forward)
    def faulty(self, *arguments):
        kind = faults.get((self.sequence.rank, self.state.global_step + 1))
        if kind and not (once and Path(once).exists()):
            if once:
                Path(once).touch()
            print(f"FAULT at {time.time():.1f}", flush=True)
            meet(kind)
        return forward(self, *arguments)

    SequenceTrainer._forward = faulty


if __name__ == "__main__":
    start = spawn.spawn
    spawn.spawn = lambda processes, arguments, module, **options: start(
        processes, arguments, "tests.faulty_train", **options
    )
    join_step(os.environ)
    if "RANK" in os.environ and "FAULT" in os.environ:
        plant()
    if os.environ.get("RANK") == "1" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        time.sleep(3)  # rank 0 is first to look for the others of the second attempt
    sys.exit(main())

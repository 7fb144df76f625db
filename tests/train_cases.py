"""`python -m tests.train_cases CASES RESULTS`, under any launcher: the cases of a JSON file, in one process group."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from longctx.launch.slurm import join_step
from tests.training.test_training import run_cases

if __name__ == "__main__":
    join_step(os.environ)
    cases, output = sys.argv[-2:]  # before them DeepSpeed's launcher puts --local_rank
    results = run_cases(json.loads(Path(cases).read_text()))
    if os.environ["RANK"] == "0":
        Path(output).write_text(json.dumps(results))

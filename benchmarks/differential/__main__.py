"""The command line; see the package."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from .judge import Judge
from .space import Case, draw


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=10)
    parser.add_argument("--timeout", type=float, default=90)
    parser.add_argument("--replay", type=str)
    parser.add_argument("--log", action="store_true")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="differential-"))
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "hf"), "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    from ..max_length.processes import start_server

    start_server("peft", "datasets")
    judge = Judge(work, args.timeout)
    cases = [Case.from_json(args.replay)] if args.replay else (draw(args.seed * 1000 + n) for n in range(args.cases))
    for case in cases:
        start = time.monotonic()
        outcome = judge(case)
        print(f"{time.monotonic()-start:5.1f}s {outcome.seconds:5.1f}s {outcome.status:14} {outcome.errors if outcome.status=='exact' else outcome.detail[:600]} {case.to_json()}", flush=True)
        if args.log:
            print(outcome.commands, outcome.log)
    return 0


if __name__ == "__main__":
    sys.exit(main())

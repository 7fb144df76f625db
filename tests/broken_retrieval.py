"""`longctx.train` on examples/retrieval/, with attention across ranks broken on purpose if BREAK is `ranks`.

Rank 0 writes by_place.json to --output_dir: the probability of the right digit in every document of test.jsonl, whose
keys lie from its first to its last tokens. torchrun --nproc_per_node 4 -m tests.broken_retrieval --config …
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np

import longctx.run
from longctx.ring.attention import RingSchedule
from longctx.train import main

fit = longctx.run.fit
init = RingSchedule.__init__


def fit_and_look(prepared, model):
    trainer = fit(prepared, model)
    log_probs = trainer.predict(trainer.eval_dataset).predictions  # 0 where a token is no target
    if trainer.sequence.rank == 0:
        by_place = [float(np.exp(row[row != 0]).mean()) for row in log_probs]
        print(" ".join(f"{probability:.2f}" for probability in by_place), flush=True)
        (Path(trainer.args.output_dir) / "by_place.json").write_text(json.dumps(by_place))
    return trainer


def own_keys_only(self, *args, **kwargs):
    """Keys and values travel as ever, and no query looks at those of another rank."""
    init(self, *args, **kwargs)
    self.steps = [(step, []) for step, _ in self.steps]


longctx.run.fit = fit_and_look
if os.environ.get("BREAK") == "ranks":
    RingSchedule.__init__ = own_keys_only
if __name__ == "__main__":
    sys.exit(main())

"""x"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest


def watched_runs(cases: dict[str, list[str]]) -> dict[str, Any]:
    from accelerate.state import AcceleratorState

    from longctx.trainer import SequenceTrainer
    from tests.softcuda.watch import Watch
    from tests.test_training import log_of
    import time

    environment = dict(os.environ)
    plain = SequenceTrainer.training_step
    results = {}
    for case, arguments in cases.items():
        AcceleratorState._reset_state()
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        number = 0
        t = time.time()
        with Watch() as watch:

            def training_step(self, *args, **kwargs):
                nonlocal number
                number += 1
                with watch.span(f"micro-batch {number}"):
                    return plain(self, *args, **kwargs)

            SequenceTrainer.training_step = training_step
            try:
                log_of(arguments)
            finally:
                SequenceTrainer.training_step = plain
        results[case] = watch.waits, watch.races, watch.num_kernels, watch._last_kernel, time.time() - t
    return results

"""Bugs for the fuzzer to find; benchmarks.differential calls them in every rank before the run."""

from __future__ import annotations

import functools
import time


def divide_by_one_more() -> None:
    """With label smoothing, divide the loss by one token too many."""
    from longctx.training.trainer import SequenceTrainer

    get_batch_samples = SequenceTrainer.get_batch_samples

    @functools.wraps(get_batch_samples)
    def one_more(self, *args):
        shards, counts = get_batch_samples(self, *args)
        return shards, counts + (self.args.label_smoothing_factor > 0)

    SequenceTrainer.get_batch_samples = one_more


def never_start() -> None:
    """Wait for longer than any case may take."""
    time.sleep(3600)

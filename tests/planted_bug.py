"""Bugs for the fuzzer to find; benchmarks.differential calls them in every rank before the run."""

from __future__ import annotations

import functools
import time


def divide_by_one_more() -> None:
    """With label smoothing, divide the loss by one token too many."""
    from longctx.training.trainer import SequenceTrainer

    count_labels = SequenceTrainer._get_num_items_in_batch

    @functools.wraps(count_labels)
    def count(self, batch_samples, device):
        return count_labels(self, batch_samples, device) + (self.args.label_smoothing_factor > 0)

    SequenceTrainer._get_num_items_in_batch = count


def never_start() -> None:
    """Wait for longer than any case may take."""
    time.sleep(3600)

"""A bug for the fuzzer to find: with label smoothing, the loss is divided by one token too many."""

from __future__ import annotations

import functools


def plant() -> None:
    """Patch this process; benchmarks.differential calls it in every rank before the run."""
    from longctx.parallel import SequenceParallel
    from longctx.trainer import SequenceTrainer

    def count(self, batch_samples, device):
        tokens = SequenceParallel.count_label_tokens(self.sequence, batch_samples)
        return tokens + (self.args.label_smoothing_factor > 0)

    SequenceTrainer._get_num_items_in_batch = functools.update_wrapper(count, SequenceTrainer._get_num_items_in_batch)

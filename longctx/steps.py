"""Which rows each data-parallel rank reads in each micro-batch of each optimizer step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.utils.data import DataLoader, Sampler


class StepSampler(Sampler[list[int]]):
    """Batches of row numbers for one data-parallel rank.

    An optimizer step takes the next `micro_batch_size × dp × accumulation_steps` rows of one global order, so its
    rows do not depend on how they are spread over ranks and accumulation. The last step of an epoch takes what is
    left: ranks without rows get an empty list, and feed padding, so that collectives stay in step.

    Args:
        num_rows: rows in the data set.
        micro_batch_size: rows of one rank in one micro-batch.
        seed: of the order; None reads the rows in order. Every epoch has its own order.
        drop_last: leave out a last step that is not full.
    """

    def __init__(
        self,
        num_rows: int,
        *,
        micro_batch_size: int,
        accumulation_steps: int,
        dp: int,
        dp_rank: int,
        seed: int | None,
        drop_last: bool = False,
    ):
        self.num_rows, self.micro_batch_size, self.accumulation_steps = (
            num_rows,
            micro_batch_size,
            accumulation_steps,
        )
        self.dp, self.dp_rank, self.seed, self.drop_last = dp, dp_rank, seed, drop_last
        self.epoch = 0

    def __len__(self) -> int:
        """Micro-batches in an epoch, the same on every rank."""
        per_micro_batch = self.micro_batch_size * self.dp
        full_steps, rest = divmod(self.num_rows, per_micro_batch * self.accumulation_steps)
        return full_steps * self.accumulation_steps + (0 if self.drop_last else -(-rest // per_micro_batch))

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order()
        for micro_batch in range(len(self)):
            start = (micro_batch * self.dp + self.dp_rank) * self.micro_batch_size
            yield order[start : start + self.micro_batch_size].tolist()

    def order(self) -> np.ndarray:
        """int64 [num_rows]: the epoch's global order."""
        if self.seed is None:
            return np.arange(self.num_rows)
        return np.random.default_rng((self.seed, self.epoch)).permutation(self.num_rows)


class StepLoader(DataLoader):
    """A DataLoader over a `StepSampler`, which accelerate is not given to prepare: it would cut it again."""

    batch_sampler: StepSampler

    def set_epoch(self, epoch: int) -> None:
        """Called by the Trainer at the start of every epoch."""
        self.batch_sampler.epoch = epoch

"""Which rows each data-parallel rank reads in each micro-batch of each optimizer step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Sampler

from longctx.packing import balanced_order, shuffled_order, spread_step


class StepSampler(Sampler[list[int]]):
    """Batches of row numbers for one data-parallel rank.

    An optimizer step takes the next `micro_batch_size × dp × accumulation_steps` rows of one global order, so its
    rows do not depend on how they are spread over ranks and accumulation. The last step of an epoch takes what is
    left: ranks without rows get an empty list, and feed padding, so that collectives stay in step.

    Args:
        num_rows: rows in the data set.
        micro_batch_size: rows of one rank in one micro-batch.
        seed: of the order; None reads the rows in order. Every epoch has its own order.
        costs: modelled cost of each row, [num_rows]; a step then takes rows of similar cost, and a micro-batch the
            most similar of them. None, or no seed: rows are shuffled alone, or not at all.
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
        costs: NDArray[np.floating] | None = None,
        drop_last: bool = False,
    ):
        assert costs is None or len(costs) == num_rows, f"{len(costs)} costs of {num_rows} rows"
        self.num_rows, self.micro_batch_size, self.accumulation_steps = (
            num_rows,
            micro_batch_size,
            accumulation_steps,
        )
        self.dp, self.dp_rank, self.seed, self.drop_last = dp, dp_rank, seed, drop_last
        self.costs = None if seed is None else costs
        self.epoch = 0

    @property
    def rows_per_step(self) -> int:
        """Rows of a full optimizer step, over all ranks and micro-batches."""
        return self.micro_batch_size * self.dp * self.accumulation_steps

    def __len__(self) -> int:
        """Micro-batches in an epoch, the same on every rank."""
        full_steps, rest = divmod(self.num_rows, self.rows_per_step)
        last = 0 if self.drop_last else -(-rest // (self.micro_batch_size * self.dp))
        return full_steps * self.accumulation_steps + last

    def __iter__(self) -> Iterator[list[int]]:
        for rows in self.steps():
            for ranks in self._spread(rows):
                yield ranks[self.dp_rank].tolist()

    def steps(self) -> Iterator[NDArray[np.int64]]:
        """The rows of each optimizer step of the epoch, the same on every rank and in every layout."""
        order, size = self._order(), self.rows_per_step
        stop = self.num_rows // size * size if self.drop_last else self.num_rows
        for start in range(0, stop, size):
            yield order[start : start + size]

    def _order(self) -> NDArray[np.int64]:
        """int64 [num_rows]: the epoch's global order."""
        if self.seed is None:
            return np.arange(self.num_rows)
        if self.costs is None:
            return shuffled_order(self.num_rows, seed=self.seed, epoch=self.epoch)
        return balanced_order(self.costs, self.rows_per_step, seed=self.seed, epoch=self.epoch)

    def _spread(self, rows: NDArray[np.int64]) -> list[list[NDArray[np.int64]]]:
        """A step's rows, [micro_batch][dp_rank]."""
        if self.costs is not None:
            return spread_step(rows, self.costs, micro_batch_size=self.micro_batch_size, dp=self.dp)
        per_rank = self.micro_batch_size
        per_micro_batch = per_rank * self.dp
        return [
            [rows[start : start + per_rank] for start in range(first, first + per_micro_batch, per_rank)]
            for first in range(0, len(rows), per_micro_batch)
        ]


class StepLoader(DataLoader):
    """A DataLoader over a `StepSampler`, which accelerate is not given to prepare: it would cut it again."""

    batch_sampler: StepSampler

    def set_epoch(self, epoch: int) -> None:
        """Called by the Trainer at the start of every epoch."""
        self.batch_sampler.epoch = epoch

"""The rows that each data-parallel rank reads in each micro-batch of each optimizer step, and their collators.

The collators cut a rank's part out of the batch of its rows, and add the position in a stream.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, repeat
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, Sampler, get_worker_info

from longctx.collate import SequenceCollator
from longctx.data import DataError
from longctx.packing import PackedStream, PackingReport, balanced_order, shuffled_order, spread_step
from longctx.regions import region
from longctx.ring.planner import TimeOfPlan
from longctx.sequence.layout import Layout
from longctx.sequence.mesh import ParallelDims
from longctx.sequence.shard import Shard, cut


class StepSampler(Sampler[list[int]]):
    """Batches of row numbers for one data-parallel rank.

    An optimizer step takes the next `micro_batch_size × dp × accumulation_steps` rows of one global order, so its rows
    do not depend on how they are spread over ranks and accumulation. The last step of an epoch takes what is left:
    ranks without rows get an empty list, and feed padding, so that collectives stay in step.

    Args:
        num_rows: rows in the data set.
        micro_batch_size: rows of one rank in one micro-batch.
        seed: seed of the order, which changes every epoch; None reads the rows in order.
        costs: modelled cost of each row, [num_rows]; a step then takes rows of similar cost, and a micro-batch the most
            similar of them. Ignored without a seed.
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
        """Number of rows in a full optimizer step, over all ranks and micro-batches."""
        return self.micro_batch_size * self.dp * self.accumulation_steps

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps in an epoch."""
        return -(-len(self) // self.accumulation_steps)

    def __len__(self) -> int:
        """Micro-batches in an epoch, the same on every rank."""
        full_steps, rest = divmod(self.num_rows, self.rows_per_step)
        last = 0 if self.drop_last else -(-rest // (self.micro_batch_size * self.dp))
        return full_steps * self.accumulation_steps + last

    def __iter__(self) -> Iterator[list[int]]:
        for rows in self.steps():
            for ranks in self._spread(rows):
                yield ranks[self.dp_rank].tolist()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch. The Trainer calls this, not the loader's method, in the epoch that a run is resumed in."""
        self.epoch = epoch

    def steps(self) -> Iterator[NDArray[np.int64]]:
        """Yield the rows of each optimizer step of the epoch, the same on every rank and in every layout."""
        order, size = self._order(), self.rows_per_step
        stop = self.num_rows // size * size if self.drop_last else self.num_rows
        for start in range(0, stop, size):
            yield order[start : start + size]

    def _order(self) -> NDArray[np.int64]:
        """Return the epoch's global order, int64 [num_rows]."""
        if self.seed is None:
            return np.arange(self.num_rows)
        if self.costs is None:
            return shuffled_order(self.num_rows, seed=self.seed, epoch=self.epoch)
        return balanced_order(self.costs, self.rows_per_step, seed=self.seed, epoch=self.epoch)

    def _spread(self, rows: NDArray[np.int64]) -> list[list[NDArray[np.int64]]]:
        """Return a step's rows, [micro_batch][dp_rank]."""
        if self.costs is not None:
            return spread_step(rows, self.costs, micro_batch_size=self.micro_batch_size, dp=self.dp)
        per_rank = self.micro_batch_size
        per_micro_batch = per_rank * self.dp
        return [
            [rows[start : start + per_rank] for start in range(first, first + per_micro_batch, per_rank)]
            for first in range(0, len(rows), per_micro_batch)
        ]


class StepLoader(DataLoader):
    """A DataLoader over a `StepSampler`, which accelerate must not prepare, since it would cut batches again."""

    batch_sampler: StepSampler

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch. The Trainer calls it at the start of every epoch."""
        self.batch_sampler.set_epoch(epoch)


PARENT_ENDS_SECONDS = 10.0
"""For a process whose connections are closed to end, as it may first have to close a GPU."""


def end_with_parent(worker: int) -> None:
    """Make this worker of a data loader end, without a traceback, when its parent is killed. A `worker_init_fn`.

    A terminal's Ctrl-C, which reaches workers as well, leaves them running for the step that the parent finishes.
    torch's workers end once they have another parent, which those of a fork server never have. The thread that sends
    tensors passes its errors to `sys.excepthook`.
    """
    parent, show = multiprocessing.parent_process(), sys.excepthook
    assert parent is not None, "a worker is a process of multiprocessing"

    def show_unless_parent_ends(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if issubclass(kind, (ConnectionError, EOFError)):
            _exit_after(parent, PARENT_ENDS_SECONDS)
        show(kind, error, traceback)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.excepthook = show_unless_parent_ends
    threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()


def _exit_after(parent: Any, timeout: float | None = None) -> None:
    """Exit this process once its parent has ended. Return if the parent is alive after `timeout` seconds."""
    parent.join(timeout)
    if not parent.is_alive():
        os._exit(1)


class MicroBatch(NamedTuple):
    """One rank's micro-batch of a stream."""

    rows: list[dict[str, NDArray[Any]]] | None
    """[] if only other ranks have rows left; None for the steps that precede the resumed one."""
    report: PackingReport
    """Counts of the documents read up to the end of this step, or in the first pass if that has ended."""
    passes: int
    """Number of times that the stream was started."""
    position: dict[str, Any]
    """Position in the stream after this step, for `StepStream.go_on_from`."""


class StepStream(IterableDataset):
    """Micro-batches of one data-parallel rank from a stream of rows, for a DataLoader that does not batch.

    An optimizer step takes the next `micro_batch_size × dp × accumulation_steps` rows of a `PackedStream`, spread as
    `StepSampler` spreads them in order: its rows do not depend on the layout, and every row is in one micro-batch of
    one data-parallel rank. A stream that ends is read again from its start, without limit; a pass's last step takes the
    rows that are left, and its other micro-batches are empty.

    Every process, and every worker of a DataLoader, reads and tokenises all documents; workers share out the
    micro-batches. So one worker relieves the training process, and more save no time.

    Args:
        stream: the stream of rows.
        drop_last: leave out a pass's last step if it is not full.
    """

    def __init__(
        self,
        stream: PackedStream,
        *,
        micro_batch_size: int,
        accumulation_steps: int,
        dp: int,
        dp_rank: int,
        drop_last: bool = False,
    ):
        self.stream, self.drop_last = stream, drop_last
        self.micro_batch_size, self.accumulation_steps = micro_batch_size, accumulation_steps
        self.dp, self.dp_rank = dp, dp_rank
        self.rows_per_step = micro_batch_size * dp * accumulation_steps
        self._begin: tuple[int, dict[str, Any]] = 0, {"passes": 1, "first_pass": None}

    def __iter__(self) -> Iterator[MicroBatch]:
        """Iterate without end.

        Raises:
            DataError: from the stream, and if a pass has no rows for a step.
        """
        worker = get_worker_info()
        mine, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return islice(self._micro_batches(), mine, None, workers)

    def go_on_from(self, num_steps: int, position: dict[str, Any]) -> None:
        """Make iterations continue after `num_steps`, whose micro-batches have no rows.

        Iterating raises DataError if the stream's documents have changed.
        """
        self._begin = num_steps, position

    def _micro_batches(self) -> Iterator[MicroBatch]:
        num_steps, position = self._begin
        passes, first_pass = position["passes"], position["first_pass"] and PackingReport(**position["first_pass"])
        if num_steps:
            self.stream.go_on_from(position["stream"])
        else:
            self.stream.reset_counts()
        yield from repeat(MicroBatch(None, self.stream.report, passes, position), num_steps * self.accumulation_steps)
        has_begun = num_steps > 0  # and so had rows
        while True:
            rows = iter(self.stream)
            while step := self._next_step(rows):
                has_begun = True
                report = first_pass or self.stream.report
                position = {
                    "passes": passes,
                    "first_pass": first_pass and asdict(first_pass),
                    "stream": self.stream.position(),
                }
                yield from (MicroBatch(mine, report, passes, position) for mine in step)
            if not has_begun:
                raise DataError(
                    f"the stream has no sequence for a step of {self.rows_per_step}: {self.stream.report}. "
                    "Look at --overlong and --dataloader_drop_last."
                )
            passes, first_pass, has_begun = passes + 1, first_pass or self.stream.report, False

    def _next_step(self, rows: Iterator[dict[str, NDArray[Any]]]) -> list[list[dict[str, NDArray[Any]]]] | None:
        """Return this rank's rows of each micro-batch; None after the last step. Other ranks' rows are not kept."""
        mine: list[list[dict[str, NDArray[Any]]]] = [[] for _ in range(self.accumulation_steps)]
        num_rows = 0
        for place, row in enumerate(islice(rows, self.rows_per_step)):
            micro_batch, place = divmod(place, self.micro_batch_size * self.dp)
            if place // self.micro_batch_size == self.dp_rank:
                mine[micro_batch].append(row)
            num_rows += 1
        return None if num_rows < (self.rows_per_step if self.drop_last else 1) else mine


@dataclass(frozen=True)
class ShardCollator:
    """Makes one rank's part of the batch of some rows, in a data loader's worker: it plans the cut, and cuts.

    A rank without rows gets only padding.
    """

    collator: SequenceCollator
    dims: ParallelDims
    rank: int
    time_of: TimeOfPlan | None = None
    """As in `Layout.spread`."""
    also: Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any], Layout, int], dict[str, Any]] | None = None
    """Returns what a training method adds, of rows, whole batch, layout and this rank's number in its group."""

    def __call__(self, rows: list[dict[str, Any]]) -> Shard:
        with region("pack"):
            sp_rank = self.dims.sp_rank(self.rank)
            batch, layout = self.collator.with_layout(rows)
            layout = layout.spread(self.dims, self.time_of)
            if layout.plan is not None:
                layout.plan.shard(sp_rank // self.dims.ulysses)  # planned here, and not in the first layer
            extras = {} if self.also is None else self.also(rows, batch, layout, sp_rank)
            return cut(batch, layout, sp_rank, extras)

    def whole(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the batch before it is cut, for a computation on one device."""
        return self.collator(rows) | {"lengths": [len(row["input_ids"]) for row in rows]}


@dataclass(frozen=True)
class StreamCollator:
    """Adds the state of the stream as `stream_read`, from a data loader's worker too."""

    collator: ShardCollator

    def __call__(self, micro_batch: MicroBatch) -> Shard | None:
        if micro_batch.rows is None:  # which the Trainer skips
            return None
        return replace(self.collator(micro_batch.rows), stream_read=micro_batch._replace(rows=[]))

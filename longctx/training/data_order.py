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
from dataclasses import KW_ONLY, asdict, dataclass, replace
from itertools import islice
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, Sampler, get_worker_info

from longctx.collate import SequenceCollator
from longctx.data import DataError
from longctx.packing import PackedStream, PackingReport, add_counts, balanced_order, shuffled_order, spread_step
from longctx.regions import region
from longctx.ring.planner import TimeOfPlan
from longctx.sequence.layout import Layout
from longctx.sequence.mesh import ParallelDims
from longctx.sequence.shard import Shard, cut


@dataclass(eq=False)
class StepSampler(Sampler[list[int]]):
    """Batches of row numbers for one data-parallel rank.

    An optimizer step takes the next `micro_batch_size × dp × accumulation_steps` rows of one global order, so its rows
    do not depend on how they are spread over ranks and accumulation. The last step of an epoch takes what is left:
    ranks without rows get an empty list, and feed padding, so that collectives stay in step.
    """

    num_rows: int
    """Rows in the data set."""
    _: KW_ONLY
    micro_batch_size: int
    """Rows of one rank in one micro-batch."""
    dp: int
    dp_rank: int
    accumulation_steps: int = 1
    seed: int | None = None
    """Seed of the order, which changes every epoch; None reads the rows in order."""
    costs: NDArray[np.floating] | None = None
    """Modelled cost of each row, [num_rows]; a step then takes rows of similar cost, and a micro-batch the most similar
    of them. Ignored without a seed."""
    drop_last: bool = False
    """Whether to leave out a last step that is not full."""
    epoch: int = 0

    def __post_init__(self) -> None:
        assert self.costs is None or len(self.costs) == self.num_rows, (
            f"{len(self.costs)} costs of {self.num_rows} rows"
        )
        if self.seed is None:
            self.costs = None

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

    rows: list[dict[str, NDArray[Any]]]
    """One of each lane that has not ended."""
    counts: dict[str, int]
    """Counts of the lanes since the iteration began."""
    lanes: dict[int, dict[str, Any]]
    """Where each lane stands after its row, by number."""


class StepStream(IterableDataset):
    """Micro-batches of one data-parallel rank from a stream, for a DataLoader that does not batch.

    An optimizer step takes a row of each of the `micro_batch_size × dp × accumulation_steps` lanes of a
    `PackedStream`, spread as `StepSampler` spreads rows in order: its rows do not depend on the layout. An iteration
    gives one pass over the data set. Lanes end apart, and the micro-batches of those that have ended are empty, without
    end: what a rank reads does not tell how long the lanes of others are.

    Every process reads all records, and tokenises those of its own lanes. Workers of a DataLoader, whose number divides
    the accumulation, share out the micro-batches.

    Args:
        stream: the stream of rows.
    """

    def __init__(self, stream: PackedStream, *, micro_batch_size: int, accumulation_steps: int, dp: int, dp_rank: int):
        self.stream, self.micro_batch_size, self.accumulation_steps = stream, micro_batch_size, accumulation_steps
        self.dp, self.dp_rank = dp, dp_rank
        self.rows_per_step = micro_batch_size * dp * accumulation_steps
        self._position: Mapping[str, Any] | None = None

    def go_on_from(self, position: Mapping[str, Any]) -> None:
        """Make the next iteration go on from a position of the stream.

        Raises:
            ValueError: it is of another stream; the iteration, a DataError if it is of other documents.
        """
        self.stream.check_position(self.rows_per_step, position)
        self._position = position

    def __iter__(self) -> Iterator[MicroBatch]:
        """Iterate over a pass, and then over empty micro-batches without end.

        Raises:
            DataError: from the stream.
        """
        worker = get_worker_info()
        mine, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        assert self.accumulation_steps % workers == 0, (
            f"{workers} workers share {self.accumulation_steps} micro-batches"
        )
        position, self._position = self._position, None
        starts = range(self.dp_rank * self.micro_batch_size, self.rows_per_step, self.dp * self.micro_batch_size)
        numbers = [range(start, start + self.micro_batch_size) for start in starts[mine::workers]]
        lanes = self.stream.lanes(self.rows_per_step, [lane for some in numbers for lane in some], position)
        while True:
            for some in numbers:
                rows = [row for lane in some if (row := lanes[lane].take()) is not None]
                counts = add_counts(lanes[lane].counts for lane in some)
                yield MicroBatch(rows, counts, {lane: lanes[lane].position() for lane in some})


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

    def __call__(self, micro_batch: MicroBatch) -> Shard:
        return replace(self.collator(micro_batch.rows), stream_read=micro_batch._replace(rows=[]))


class StreamRead(NamedTuple):
    """What all ranks have read of a stream up to the end of a step."""

    report: PackingReport
    """Counts of the first pass."""
    passes: int
    """Number of times that the stream was started."""
    counts: dict[str, int]
    """Counts of all passes."""
    lanes: dict[int, dict[str, Any]]
    """Where this rank's lanes stand."""


class StreamLoader(DataLoader):
    """A DataLoader of a stream, which is read again from its start whenever all lanes of all ranks have ended.

    Only the ranks together know when that is, so the trainer asks for steps, and tells what they have come to: `step`,
    `counts` and `take` in turn.

    Args:
        drop_last: leave out the steps of a pass that are not full.
        num_workers: as many processes at most as have micro-batches of their own.
    """

    dataset: StepStream

    def __init__(
        self, steps: StepStream, collator: ShardCollator, *, drop_last: bool, num_workers: int, **options: Any
    ):
        accumulation = steps.accumulation_steps
        workers = max((n for n in range(1, num_workers + 1) if accumulation % n == 0), default=0)
        options |= {"num_workers": workers, "persistent_workers": workers > 0}
        collate: Any = StreamCollator(collator)  # takes one micro-batch, not a list
        super().__init__(steps, batch_size=None, collate_fn=collate, **options)
        self._fewest_rows = steps.rows_per_step if drop_last else 1
        self.names = steps.stream.count_names
        self._shards: Iterator[Shard] | None = None
        self.first_pass: PackingReport | None = None
        """Counts of the first pass, once it has ended."""
        self._passes = 1
        self._before = dict.fromkeys(self.names, 0)
        """Counts up to this pass, or to the position in it from which the run was resumed."""
        self._rows: int | None = None
        """Rows of this pass, or since that position; None before the pass's first step."""

    def __iter__(self) -> Any:
        """Return an iterator of nothing: the Trainer makes one, and the steps come from `step`."""
        return iter(())

    def step(self) -> list[Shard]:
        """Return this rank's micro-batches of the next step."""
        if self._shards is None:
            self._shards = super().__iter__()
        return list(islice(self._shards, self.dataset.accumulation_steps))

    def counts(self, shards: Sequence[Shard]) -> tuple[int, ...]:
        """Return this rank's counts since the pass began, which it tells the others; zeros if it has no micro-batch."""
        none = dict.fromkeys(self.names, 0)
        return tuple(add_counts([none, *(shard.stream_read.counts for shard in shards)]).values())

    def take(self, shards: Sequence[Shard], counts: Sequence[Sequence[int]]) -> StreamRead | None:
        """Return what has been read up to the end of a step; None if the pass had no such step, and another one begins.

        Args:
            shards: this rank's micro-batches of it.
            counts: the `counts` of each rank.

        Raises:
            DataError: if a pass has no step.
        """
        since = add_counts(dict(zip(self.names, rank, strict=True)) for rank in counts)
        if self._passes > 1:  # whose documents the first pass has had
            since |= {name: 0 for name in since if name.endswith("distinct")}
        read, stream = add_counts([self._before, since]), self.dataset.stream
        if since["packs"] - (self._rows or 0) >= self._fewest_rows:
            self._rows = since["packs"]
            lanes = {lane: where for shard in shards for lane, where in shard.stream_read.lanes.items()}
            return StreamRead(self.first_pass or stream.report_of(read), self._passes, read, lanes)
        if self._rows is None:
            raise DataError(
                f"the stream has no sequence for a step of {self.dataset.rows_per_step}: {stream.report_of(read)}. "
                "Look at --overlong and --dataloader_drop_last."
            )
        self.first_pass = self.first_pass or stream.report_of(read)
        self._passes, self._before, self._rows, self._shards = self._passes + 1, read, None, None
        return None

    def position_of(self, read: StreamRead, lanes: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        """Return the position for `go_on_from` from where all lanes stand, as values of JSON."""
        position = self.dataset.stream.position_of([lanes[lane] for lane in sorted(lanes)], read.counts)
        first_pass = asdict(read.report) if read.passes > 1 else None
        return {**position, "passes": read.passes, "first_pass": first_pass}

    def go_on_from(self, position: Mapping[str, Any]) -> None:
        """Make the next step the one after a position. `step` raises DataError if the stream's documents have changed.

        Raises:
            ValueError: it is of another stream.
        """
        self.dataset.go_on_from(position)
        self._passes, self._before, self._rows = position["passes"], dict(position["counts"]), 0
        self.first_pass = position["first_pass"] and PackingReport(**position["first_pass"])

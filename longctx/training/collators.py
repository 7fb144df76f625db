"""Collators that add to a batch its layout over ranks, token counts and the position in a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from longctx.collate import SequenceCollator
from longctx.regions import region
from longctx.ring.planner import TimeOfPlan
from longctx.sequence.mesh import ParallelDims
from longctx.sequence.shard import complete_position_ids, plan_batch
from longctx.training.data_order import MicroBatch


class PlanningCollator:
    """Adds the batch's `layout`, the rows' `lengths` without padding, their sum `num_tokens`, and what `also` returns
    for rows and batch, in a data loader's worker.

    A rank without rows gets only padding.
    """

    def __init__(
        self,
        collator: SequenceCollator,
        dims: ParallelDims,
        rank: int,
        *,
        time_of: TimeOfPlan | None = None,
        also: Callable[[list[dict[str, Any]], dict[str, Any]], dict[str, Any]] | None = None,
    ):
        self.collator, self.dims, self.rank, self.time_of, self.also = collator, dims, rank, time_of, also

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        with region("pack"):
            batch = self.collator(rows) if rows else self.collator.empty()
            if self.also is not None:
                batch |= self.also(rows, batch)
            sp_rank = self.dims.sp_rank(self.rank)
            layout = plan_batch(complete_position_ids(batch), self.dims, sp_rank, time_of=self.time_of)
        lengths = [len(row["input_ids"]) for row in rows]
        return batch | {"layout": layout, "lengths": lengths, "num_tokens": sum(lengths)}


class StreamCollator:
    """Adds the state of the stream as `stream_read`, from a data loader's worker too."""

    def __init__(self, collator: PlanningCollator):
        self.collator = collator

    def __call__(self, micro_batch: MicroBatch) -> dict[str, Any]:
        if micro_batch.rows is None:  # the Trainer skips an empty batch
            return {}
        return self.collator(micro_batch.rows) | {"stream_read": micro_batch._replace(rows=[])}

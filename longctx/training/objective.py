"""What a training method computes from the model's outputs: a loss, its denominators, and sums for the log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from longctx.layers.loss import TokenOutputs
from longctx.parallel import SequenceParallel
from longctx.sequence.batch import ShardedBatch
from longctx.sequence.layout import Layout
from longctx.sequence.shard import Shard

Metrics = dict[str, float]


class Objective:
    """Supervised fine-tuning: the mean of the token losses over all label tokens of an optimizer step.

    Another method overrides the parts in which it differs. All of them count over the whole step, so that the loss is
    the same at any sp, dp and accumulation.
    """

    tag = "sft"
    """The tag of TRL's trainer, for model cards."""
    sums: tuple[str, ...] = ()
    """Names of what `measure` adds up besides the loss, over all ranks and micro-batches between two log entries."""

    def __init__(self, sequence: SequenceParallel, label_smoothing: float = 0.0):
        self.sequence = sequence
        self.model_options: Mapping[str, Any] = {"label_smoothing": label_smoothing}
        """Keywords for the model besides those of the batch; see `longctx.layers.loss.fuse_head`."""

    def collate(
        self, rows: Sequence[Mapping[str, Any]], batch: Mapping[str, Any], layout: Layout, sp_rank: int
    ) -> dict[str, Any]:
        """Return what this rank's part of the batch of these rows has besides its tokens.

        It runs in a worker of the data loader.

        Args:
            batch: all of it, as `SequenceCollator` makes it.
            layout: of the batch, spread over the ranks.
            sp_rank: this rank's number in its sequence group.
        """
        return {}

    def counts(self, shards: Sequence[Shard]) -> tuple[int, ...]:
        """Return what the denominators of an optimizer step are summed from, of this rank's micro-batches."""
        return (sum(shard.layout.num_targets for shard in shards),)

    def denominators(self, sums: Sequence[int]) -> Any:
        """Return the denominators from the sums of `counts` over all sequence groups; false if nothing is learnt."""
        return sums[0]

    def measure(
        self, shard: ShardedBatch, outputs: TokenOutputs, extras: Mapping[str, Any]
    ) -> tuple[Any, Tensor | None]:
        """Return what `loss` takes, differentiable, and float64 [sums], this rank's part of `sums`.

        Args:
            shard: this rank's part of the batch.
            outputs: of the model for these tokens.
            extras: what `collate` returned for it.
        """
        return outputs.losses, None

    def loss(self, terms: Any, counts: Any) -> Tensor:
        """Return this rank's share of the step's loss.

        Averaged over the ranks and added up over micro-batches, the shares are the loss.
        """
        return self.sequence.reduce(terms, counts)

    def means(self, totals: Mapping[str, float]) -> Metrics:
        """Return metrics computed from the totals of `sums`. They override the default metrics of the same name."""
        return {}

    def prepare(self, trainer: Any, model: Any) -> None:
        """Do what needs the wrapped model before its training, and before a checkpoint is read, on all ranks."""

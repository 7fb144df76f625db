"""What a training method computes from the model's outputs: a loss, its denominators, and sums for the log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from longctx.layers.loss import TokenOutputs
from longctx.parallel import SequenceParallel
from longctx.sequence.batch import ShardedBatch

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

    def collate(self, rows: Sequence[Mapping[str, Any]], batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return further fields of the batch that these rows make. It runs in a worker of the data loader."""
        return {}

    def count(self, batches: Sequence[Mapping[str, Any]]) -> Any:
        """Return the denominators of the loss of an optimizer step, of whose micro-batches this rank has these.

        Called by all ranks together. The result is false if the step has nothing to learn.
        """
        return self.sequence.count_label_tokens(batches)

    def measure(
        self, shard: ShardedBatch, outputs: TokenOutputs, batch: Mapping[str, Any]
    ) -> tuple[Any, Tensor | None]:
        """Return what `loss` takes, differentiable, and float64 [sums], this rank's part of `sums`.

        Args:
            shard: this rank's part of the batch.
            outputs: of the model for these tokens.
            batch: the whole micro-batch, with what `collate` has added.
        """
        return outputs.losses, None

    def loss(self, terms: Any, counts: Any) -> Tensor:
        """Return this rank's share of the step's loss, whose mean over all ranks is summed over micro-batches."""
        return self.sequence.reduce(terms, counts)

    def means(self, totals: Mapping[str, float]) -> Metrics:
        """Return metrics by name from the totals of `sums`, which take the place of those that every method has."""
        return {}

    def prepare(self, trainer: Any, model: Any) -> None:
        """Do what needs the wrapped model before its training, and before a checkpoint is read, on all ranks."""

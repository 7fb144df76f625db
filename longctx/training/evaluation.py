"""Evaluation and prediction, sharded like training: what a trainer has between checkpoints and the step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch.utils.data import Dataset as TorchDataset
from transformers import TrainerControl
from transformers.trainer_utils import PredictionOutput, speed_metrics

from longctx.packing import PackedDataset
from longctx.parallel import SequenceParallel
from longctx.ranks.agreement import gather_objects
from longctx.regions import region
from longctx.training.checkpoint.trainer import ResumableMixin
from longctx.training.data_order import StepLoader, StepSampler, end_with_parent
from longctx.training.metrics import StepMetrics, TokenMeans
from longctx.training.objective import Objective
from longctx.upstream.transformers_internals import memory_tracker


class EvaluatingMixin(ResumableMixin):
    """Makes a trainer evaluate and predict on rows that are cut as in training; each number is that of one device.

    It uses training's `_forward` and `step_metrics`.
    """

    step_metrics: StepMetrics
    control: TrainerControl
    sequence: SequenceParallel
    objective: Objective
    _predictions: list[list[NDArray[np.float32]]] | None = None

    def _worker_options(self) -> dict[str, Any]:
        args = self.args
        return {
            "num_workers": args.dataloader_num_workers,
            "prefetch_factor": args.dataloader_prefetch_factor,
            "multiprocessing_context": args.dataloader_multiprocessing_context if args.dataloader_num_workers else None,
            "worker_init_fn": end_with_parent,
        }

    def get_eval_dataloader(self, eval_dataset: PackedDataset | Dataset | None = None) -> StepLoader:
        """Return a loader that deals each row once, in order, over data-parallel ranks; one without rows gets
        padding."""
        rows = rows_to_evaluate(self.eval_dataset if eval_dataset is None else eval_dataset)
        dp_rank = self.sequence.dims.dp_rank(self.sequence.rank)
        return self.loader_of(rows, self.order_of(rows, self.args.eval_batch_size, dp_rank))

    def loader_of(self, rows: PackedDataset | Dataset, sampler: StepSampler, **options: Any) -> StepLoader:
        """Return a loader of these rows in the order of a sampler, in workers that end with it."""
        options |= {"batch_sampler": sampler, "collate_fn": self.data_collator, **self._worker_options()}
        return StepLoader(cast(TorchDataset, rows), **options)  # map-style, though PackedDataset imports no torch

    def order_of(self, rows: PackedDataset | Dataset, batch_size: int, dp_rank: int) -> StepSampler:
        """Return the numbers of the rows that a data-parallel rank reads if each row is dealt once, in order."""
        return StepSampler(len(rows), micro_batch_size=batch_size, dp=self.sequence.dims.dp, dp_rank=dp_rank)

    def evaluate(
        self,
        eval_dataset: PackedDataset | Dataset | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Return the means over all label tokens: `eval_loss`, `eval_mean_token_accuracy`, `eval_entropy`.

        With the routers' auxiliary loss, `eval_aux_loss` is that of all tokens, and `eval_loss` includes it as in
        training. As in TRL, `eval_num_tokens` is the number of tokens trained on so far. Called by all ranks together.

        Args:
            eval_dataset: rows with `input_ids` and, if not all tokens count, `labels`; the trainer's own if None.

        Raises:
            ValueError: without rows, or for rows that are not tokenised.
        """
        memory_tracker(self).start()
        metrics = self._means(self.get_eval_dataloader(eval_dataset), "Evaluation", metric_key_prefix)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        memory_tracker(self).stop_and_update_metrics(metrics)
        return metrics

    def predict(
        self,
        test_dataset: PackedDataset | Dataset,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
    ) -> PredictionOutput:
        """Return every token's log-probability, and the means of `evaluate`. Called by all ranks together.

        Args:
            test_dataset: rows as `evaluate` takes them; single documents, or packs.

        Returns:
            `predictions`, the same on every rank: for each row in data set order a float32 array [tokens], the
            log-probability of each token given those before it in its document, or 0 if it is no target.

        Raises:
            ValueError: for rows that are not tokenised.
        """
        memory_tracker(self).start()
        self._predictions = []
        try:
            metrics = self._means(self.get_eval_dataloader(test_dataset), "Prediction", metric_key_prefix)
            dims, is_first = self.sequence.dims, self.sequence.dims.sp_rank(self.sequence.rank) == 0
            ranks = gather_objects(self._predictions if is_first else [])[:: dims.sp]
            rows = [row for dealt in zip(*ranks, strict=True) for batch in dealt for row in batch]
        finally:
            self._predictions = None
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, metrics)
        memory_tracker(self).stop_and_update_metrics(metrics)
        return PredictionOutput(predictions=cast(Any, rows), label_ids=None, metrics=metrics)

    def _means(self, loader: StepLoader, description: str, prefix: str) -> dict[str, float]:
        start = time.time()
        self._token_means = TokenMeans(self.sequence.device, self.sequence.routers, self.objective.sums)
        with self.step_metrics.paused(), region("evaluation"):
            output = self.evaluation_loop(loader, description, prediction_loss_only=True, metric_key_prefix=prefix)
        means = self._token_means.read()
        means |= {**self.objective.means(self._token_means.totals), "num_tokens": self.step_metrics.tokens_so_far()}
        named = {f"{prefix}_{name}": value for name, value in means.items()}
        speed = speed_metrics(prefix, start, num_samples=output.num_samples, num_steps=len(loader))
        return {**output.metrics, **named, **speed}

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """Add one batch to the sums; the evaluation loop has nothing to average."""
        with torch.no_grad(), self.compute_loss_context_manager():
            shard, outputs = self._forward(model, inputs)
            _, extra = self.objective.measure(shard, outputs, inputs.extras)
        self._token_means.add(shard, outputs, extra)
        if self._predictions is not None:
            whole = self.sequence.unshard(outputs.log_probs, shard.layout).float().cpu().numpy()
            self._predictions.append(log_probs_of_rows(whole, inputs.layout.lengths))
        return None, None, None


def rows_to_evaluate(rows: PackedDataset | Dataset | None) -> PackedDataset | Dataset:
    """Return the rows after checking that they are tokenised.

    Raises:
        ValueError: without rows, or for rows without `input_ids`.
    """
    if rows is None:
        raise ValueError("there is no evaluation data: pass rows, or eval_dataset to the trainer (--eval_strategy)")
    columns = getattr(rows, "column_names", None)
    if not isinstance(columns, list) or "input_ids" not in columns:
        raise ValueError(
            f"sequences to evaluate need input_ids, and these have {columns or f'the type {type(rows).__name__}'}. "
            "Tokenise them with longctx.data.tokenize_records."
        )
    return rows


def log_probs_of_rows(log_probs: NDArray[np.float32], lengths: Sequence[int]) -> list[NDArray[np.float32]]:
    """Return the log-probabilities [tokens] of each row of a batch, each at its target.

    Args:
        log_probs: [B, S] of the whole batch, each at the token before its target.
        lengths: tokens of each row, or of each pack in one flat row.
    """
    flat, tokens = np.roll(log_probs.reshape(-1), 1), np.array(lengths, dtype=np.int64)
    rows, width = log_probs.shape
    starts = np.arange(rows) * width if rows > 1 else np.cumsum(tokens) - tokens
    return [flat[start : start + length] for start, length in zip(starts, tokens, strict=True)]

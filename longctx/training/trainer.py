"""What makes a trainer one of long sequences: its rows, sharding, loss and log, and no attention code.

Rows are collated and their cut is planned in `longctx.training.data_order`. The base mixins evaluate
(`longctx.training.evaluation`), and save and resume (`longctx.training.checkpoint`).
"""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, Trainer
from transformers.trainer_callback import DefaultFlowCallback
from transformers.trainer_utils import TrainOutput
from trl import SFTConfig

from longctx.collate import SequenceCollator
from longctx.data import DataError, MixedStream, SourceReport
from longctx.layers.loss import TokenOutputs
from longctx.model.load import count_parameters, count_trained_parameters
from longctx.model.quantized import pieces_placed
from longctx.model.rows import rows_read
from longctx.packing import PackedDataset, PackedStream, PackingReport
from longctx.parallel import SequenceParallel
from longctx.regions import clock, region
from longctx.sequence.batch import ShardedBatch
from longctx.sequence.checks import StepCounts
from longctx.sequence.shard import Shard, check_outputs
from longctx.training.beforehand import check_before_training, check_own_trainer
from longctx.training.callbacks import (
    EpochByRows,
    EpochEndsWithItsStep,
    PackingEntry,
    ScheduleGoesOn,
    StopOnSignal,
    StreamEntry,
)
from longctx.training.data_order import ShardCollator, StepSampler, StepStream, StreamLoader
from longctx.training.engines import reshard, saved_buffers_handed_on
from longctx.training.evaluation import EvaluatingMixin
from longctx.training.metrics import StepMetrics
from longctx.training.nonfinite import meet_nonfinite
from longctx.training.objective import Objective
from longctx.training.progress import print_lines
from longctx.upstream.accelerate_internals import allow_meta, fsdp2_plugin, keep_sums_in_fp32, update_shards
from longctx.upstream.transformers_internals import average_running_loss, keep_mode, list_parameters, mean_running_loss


class SequenceMixin(EvaluatingMixin):
    """Makes a trainer train on rows that are cut over sequence groups: `class Mine(SequenceMixin, SFTTrainer)`.

    It replaces the loss, the metrics, the order of the data and the checkpoints; what else a trainer does, such as
    tokenising, stays. Logging, callbacks and steps can be overridden in `Mine`, and so can `compute_loss`: its `inputs`
    are a `Shard`, it must pass on `num_items_in_batch`, and its outputs have no logits.

    Args:
        model: the first result of `longctx.parallelize`.
        data_collator: pads to a multiple of `sequence.dims.multiple`; by default one that packs a micro-batch.
        train_dataset: packs or single documents with `input_ids`, or what the trainer below makes such documents of;
            or a `PackedStream`, which needs `args.max_steps`.
        eval_dataset: packs or single documents to evaluate on.
        sequence: the second result of `longctx.parallelize`.
        objective: the loss and the metrics of the training method; supervised fine-tuning by default.
        costs: modelled cost of each row, for balancing data-parallel ranks; None to shuffle only.
        report: counts of documents and tokens, for the first entry of the log's history; a stream has an entry that
            grows.
        mixture: share of each data set in the documents, for the same entry.
        data_identity: returns what identifies data and model, by name, when a checkpoint is saved; resuming must not
            change it.
        on_nonfinite: `stop` the run, or `skip` the step, if a gradient is NaN or infinite.
        save_async: whether to write checkpoints while training goes on, from copies in host memory. After training,
            `finish_saving` waits for them.
        base_config: configuration of an adapter's base model if it differs from that of its name; saved beside the
            adapter.

    Raises:
        ValueError: for what the trainer below would do and this leaves out, such as a loss of its own.
    """

    loss_is_scaled_for_ga = True
    """`compute_loss` divides by the label tokens of the whole step, so the Trainer must not divide by
    gradient_accumulation_steps again."""
    saved_activations: AbstractContextManager[Any] = nullcontext()
    """A context of each micro-batch, in which activations may be saved elsewhere than on the device."""

    def __init__(
        self,
        model: PreTrainedModel,
        args: SFTConfig,
        data_collator: SequenceCollator | None = None,
        train_dataset: PackedDataset | PackedStream | Dataset | None = None,
        eval_dataset: PackedDataset | Dataset | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        *,
        sequence: SequenceParallel,
        objective: Objective | None = None,
        costs: NDArray[np.floating] | None = None,
        report: PackingReport | None = None,
        mixture: Sequence[SourceReport] = (),
        data_identity: Callable[[], Mapping[str, Any]] = dict,
        on_nonfinite: Literal["stop", "skip"] = "stop",
        save_async: bool = False,
        base_config: PretrainedConfig | None = None,
        **kwargs: Any,
    ):
        given = {"train_dataset": train_dataset, "objective": objective, **kwargs}
        check_own_trainer(type(self), SequenceMixin, args, given)
        objective = objective or Objective(sequence, args.label_smoothing_factor)
        self.sequence, self.objective = sequence, objective
        args = copy.copy(args)
        self._leaves_out_nonfinite, args.logging_nan_inf_filter = args.logging_nan_inf_filter, False  # training_step
        self.costs, self.data_identity = costs, data_identity
        self.on_nonfinite, self.save_async, self.base_config = on_nonfinite, save_async, base_config
        self._tag_names = ("trl", objective.tag, "longctx")
        self._coming: tuple[list[Shard], StepCounts] | None = None
        """The epoch's next step, once it is read, as of `_read_step`."""
        self._uncounted: list[Shard] = []
        """The micro-batches of a step that has begun, before their routers' choices are counted."""
        self._warned: set[str] = set()
        """Names of the warnings of memory that were given, each of which is given once."""
        self._outputs_checked = False
        self.has_seen_labels = False
        """Whether any step so far, including those before resuming, had a token with a label. All ranks agree on it."""
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            **kwargs,
        )
        self.model_accepts_loss_kwargs = True  # as loss_is_scaled_for_ga, for transformers before 5.19
        self.model.add_model_tags(self._tag_names)
        keep_mode(self.model)
        if data_collator is None:
            tokenizer: Any = getattr(self.processing_class, "tokenizer", self.processing_class)
            data_collator = SequenceCollator(tokenizer.pad_token_id, sequence.dims.multiple, padding_free=True)
        self.data_collator = ShardCollator(
            data_collator, sequence.dims, sequence.rank, time_of=sequence.time_of_plan, also=objective.collate
        )
        self.step_metrics = StepMetrics(
            sp=sequence.dims.sp,
            sp_rank=sequence.dims.sp_rank(sequence.rank),
            config=self.model.config,
            flops_per_token=4 * count_parameters(self.model) + 2 * count_trained_parameters(self.model),
            device=sequence.device,
            routers=sequence.routers,
            extra=objective.sums,
        )
        embeddings = nn.ModuleList(module for module in self.model.modules() if isinstance(module, nn.Embedding))
        self._num_weights = count_parameters(self.model) - count_parameters(embeddings)
        keep_sums_in_fp32(self.accelerator)
        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", sequence.dims.world_size))
        print_lines(self, self.step_metrics, ranks_per_node)
        if isinstance(self.train_dataset, PackedStream):
            # Here `epoch` stays the Trainer's: steps / max_steps.
            self.add_callback(StreamEntry(lambda: self.stream_read, self.mixture_read))
        else:
            self.add_callback(EpochByRows(self.step_sampler(dp_rank=0)))
        self.remove_callback(DefaultFlowCallback)
        self.add_callback(EpochEndsWithItsStep())
        if report is not None:
            self.add_callback(PackingEntry(report, mixture))
        self.add_callback(ScheduleGoesOn(self))
        self.stop_on_signal = StopOnSignal(prints=sequence.rank == 0)
        self.add_callback(self.stop_on_signal)

    def mixture_read(self) -> tuple[SourceReport, ...]:
        """Return what was read of each data set of a streamed mixture, up to the last step."""
        if self.stream_read is None or not isinstance(self.train_dataset, PackedStream):
            return ()
        source = self.train_dataset.source
        return source.reports(self.stream_read.counts) if isinstance(source, MixedStream) else ()

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        with self._wrapping():
            prepared = super()._prepare_for_training(*args, **kwargs)
        zero: Any = getattr(self.model_wrapped, "optimizer", None)
        if hasattr(zero, "check_grad_overflow"):  # ZeRO-1 and 2 would not check in fp32; ZeRO-3 always does
            zero.check_grad_overflow = True
        if not self.is_deepspeed_enabled and (fsdp2_plugin(self.accelerator) or not self.is_fsdp_enabled):
            # FSDP1 replaces parameters, and ZeRO's engine does not ask the model for them.
            list_parameters(self.model_wrapped)
        if fsdp2_plugin(self.accelerator):
            update_shards(self.optimizer)
        check_before_training(self, self._nonfinite_from_start)
        self.step_metrics.start()
        return prepared

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        zero = getattr(self.optimizer, "optimizer", None)
        if zero is not None and not hasattr(zero, "defaults"):  # DeepSpeed's, which some schedules read
            zero.defaults = zero.optimizer.defaults
        return super().create_scheduler(*args, **kwargs)

    @contextmanager
    def _wrapping(self) -> Iterator[None]:
        """Hand on what FSDP2 would lose, in the context in which the engine wraps the model."""
        if fsdp2_plugin(self.accelerator) is None or isinstance(self.model, FSDPModule):
            yield
            return
        allow_meta(self.accelerator, self.model)
        with (
            pieces_placed(self.model),
            saved_buffers_handed_on(self.model, self.accelerator.device),
            rows_read(self.model),
        ):
            yield

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate. Before any training, this wraps the model."""
        with self._wrapping():
            output = super().evaluation_loop(*args, **kwargs)
        reshard(self.model)
        return output

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float:
        """Return the norm, the same on all ranks, after handling a NaN or infinite one before the weights change.

        DeepSpeed has changed them by now, and its own check comes before: see `_prepare_for_training`.
        """
        norm = float(super()._get_grad_norm(model, grad_norm))  # the one wait of the host for the device in a step
        if not math.isfinite(norm):
            meet_nonfinite(self, model, norm)
        return norm

    def step_sampler(self, dp_rank: int) -> StepSampler:
        """Return the row numbers that data-parallel rank `dp_rank` reads."""
        assert not isinstance(self.train_dataset, PackedStream), "rows of a stream have no numbers"
        args = self.args
        seed = args.seed if args.data_seed is None else args.data_seed
        return StepSampler(
            len(self.train_dataset),
            micro_batch_size=self.args.train_batch_size,
            accumulation_steps=args.gradient_accumulation_steps,
            dp=self.sequence.dims.dp,
            dp_rank=dp_rank,
            seed=None if args.train_sampling_strategy == "sequential" else seed,
            costs=self.costs,
            drop_last=args.dataloader_drop_last,
        )

    def step_stream(self, dp_rank: int) -> StepStream:
        """Return the rows that data-parallel rank `dp_rank` reads of a stream."""
        assert isinstance(self.train_dataset, PackedStream), "rows that are no stream have a step_sampler"
        return StepStream(
            self.train_dataset,
            micro_batch_size=self.args.train_batch_size,
            accumulation_steps=self.args.gradient_accumulation_steps,
            dp=self.sequence.dims.dp,
            dp_rank=dp_rank,
        )

    def micro_batches(self, dp_rank: int) -> Iterator[list[dict[str, NDArray[Any]]]]:
        """Return the rows of each micro-batch that data-parallel rank `dp_rank` reads; [] if only others have some."""
        if isinstance(self.train_dataset, PackedStream):
            return (micro_batch.rows for micro_batch in self.step_stream(dp_rank))
        return map(self.train_dataset.__getitems__, self.step_sampler(dp_rank))

    def get_train_dataloader(self) -> DataLoader:
        dp_rank = self.sequence.dims.dp_rank(self.sequence.rank)
        if isinstance(self.train_dataset, PackedStream):
            options = self._worker_options() | {"drop_last": self.args.dataloader_drop_last}
            self._stream = StreamLoader(self.step_stream(dp_rank), self.data_collator, **options)
            return self._stream
        kept = {"persistent_workers": self.args.dataloader_persistent_workers}
        return self.loader_of(self.train_dataset, self.step_sampler(dp_rank), **kept)

    def get_total_train_batch_size(self, args: SFTConfig) -> int:
        """Return the sequences of an optimizer step."""
        return self.args.train_batch_size * self.sequence.dims.dp * args.gradient_accumulation_steps

    def get_batch_samples(self, epoch_iterator: Iterator[Shard], num_batches: int, device: torch.device) -> Any:
        """Return a step's micro-batches and its denominators, and send the message of the step after it.

        That message travels while this step is computed. What goes wrong in reading the next step is an error of that
        step, so that this one is trained and saved.
        """
        shards, message = self._coming or self._read_step(epoch_iterator)
        sums = message.read()
        if self._stream is not None:
            names = len(self._stream.names)
            while (read := self._stream.take(shards, [of[:names] for of in message.of_groups()])) is None:
                if not self.has_seen_labels:
                    raise DataError(
                        f"the stream had no token with a label in {self.state.global_step} steps, the whole data set: "
                        f"{self._stream.first_pass}. Nothing was trained, and no model is saved. Check the labels, or "
                        "use a longer --max_length or --overlong split."
                    )
                shards, message = self._read_step(epoch_iterator)
                sums = message.read()
            self.stream_read, sums = read, sums[names:]
        counts = self.objective.denominators(sums)
        self._coming = None
        if self.state.global_step + 1 < self.state.max_steps:
            coming = self._read_step(epoch_iterator)
            self._coming = coming if coming[0] or coming[1].error else None  # None after an epoch's last step
        assert len(shards) == num_batches, f"a step has {len(shards)} of its {num_batches} micro-batches"
        self.has_seen_labels |= bool(counts)
        self._uncounted = shards
        if self.sequence.routers is not None:
            self.sequence.routers.expect(len(shards))
        return shards, counts

    def _read_step(self, epoch_iterator: Iterator[Shard]) -> tuple[list[Shard], StepCounts]:
        """Return the next step's micro-batches, none after an epoch's last one, and its message."""
        shards: list[Shard] = []
        error: Exception | None = None
        try:
            with region("data", "data"):
                if self._stream is not None:
                    shards = self._stream.step()
                else:
                    shards = list(islice(epoch_iterator, self.args.gradient_accumulation_steps))
        except Exception as wrong:  # the other ranks expect a message all the same
            error = wrong
        layouts = [shard.layout for shard in shards]
        of_stream = () if self._stream is None else self._stream.counts(shards)
        return shards, self.sequence.begin_step(layouts, *of_stream, *self.objective.counts(shards), error=error)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return inputs  # cut on the CPU first; only this rank's part goes to the device

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the micro-batch's loss, of which the Trainer logs the mean.

        Like its own --logging_nan_inf_filter, which waits for the device, this takes the mean so far in the place of a
        loss that is NaN or infinite.
        """
        with self.saved_activations:
            loss = super().training_step(*args, **kwargs)
        return torch.where(loss.isfinite(), loss, mean_running_loss(self)) if self._leaves_out_nonfinite else loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if num_items_in_batch is None:
            raise ValueError(
                f"{type(self).__name__} called compute_loss without num_items_in_batch, the label tokens of the step. "
                "Pass on all arguments of your own compute_loss."
            )
        if self._uncounted:
            self.sequence.count_experts(model, self._uncounted)
            self._uncounted = []
        shard, outputs = self._forward(model, inputs)
        terms, extra = self.objective.measure(shard, outputs, inputs.extras)
        loss = self.objective.loss(terms, num_items_in_batch)
        assert outputs.is_top1 is not None, "the head returns it unless it is told not to"
        self.step_metrics.add(shard=inputs, correct=outputs.is_top1, entropy=outputs.entropy, extra=extra)
        return (loss, outputs) if return_outputs else loss

    def _forward(self, model, inputs: Shard) -> tuple[ShardedBatch, TokenOutputs]:
        """Return this rank's part of the batch, and the model's outputs for its tokens."""
        with region("shard"):
            shard = self.sequence.place(inputs)
        outputs = model(
            **shard.inputs,
            shift_labels=shard.shift_labels,
            token_outputs=True,
            **self.objective.model_options,
        )
        if not self._outputs_checked:
            check_outputs(shard, outputs.log_probs)
            self._outputs_checked = True
        return shard, outputs

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        if "loss" not in logs:
            return super().log(logs, start_time)
        numbers = self.step_metrics.read()
        numbers |= self.objective.means(self.step_metrics.totals) | {"loss": logs["loss"]}
        logs.update({name: value for name, value in numbers.items() if value is not None})
        memory = self.step_metrics.peak_memory
        assert memory is not None, "read with the other numbers"
        for name, message in memory.warnings():
            if name not in self._warned:
                self._warned.add(name)
                warnings.warn(message, stacklevel=2)
        super().log(logs, start_time)
        # Only trainer_state.json gets what is not a number: --report_to's integrations would warn of it in every step.
        entry = self.state.log_history[-1]
        entry.update({name: None for name, value in numbers.items() if value is None})
        entry.update(self.step_metrics.details)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Finish with the mean over all ranks of the loss since the last log; transformers would take this rank's."""
        average_running_loss(self)
        return super()._finalize_training(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train, then read the peaks of memory. Called by all ranks together."""
        self._coming = None
        try:
            output = super().train(*args, **kwargs)
        finally:
            clock.stop()
            self.stop_on_signal.restore_handlers()
            self.model_wrapped.__dict__.pop("parameters", None)  # of list_parameters
        self.step_metrics.read_memory()
        return output

    def floating_point_ops(self, inputs: Shard) -> float:
        """Return this rank's share; transformers would count the weights only that ZeRO-3 has gathered just then."""
        return 6 * inputs.input_ids.numel() * self._num_weights


class SequenceTrainer(SequenceMixin, Trainer):
    """transformers' Trainer on rows that are cut over sequence groups, as `longctx train` and `longctx dpo` use it."""

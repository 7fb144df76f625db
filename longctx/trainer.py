"""A thin subclass of TRL's SFTTrainer: our rows, our cut, our loss, our log. No attention code."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset
from numpy.typing import NDArray
from torch.utils.data import Dataset as TorchDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState
from trl import SFTConfig, SFTTrainer

from longctx.collate import SequenceCollator
from longctx.mesh import ParallelDims
from longctx.metrics import StepMetrics
from longctx.model import count_parameters
from longctx.packing import PackedDataset, PackingReport
from longctx.parallel import SequenceParallel
from longctx.shard import complete_position_ids, plan_batch
from longctx.steps import StepLoader, StepSampler


class SequenceTrainer(SFTTrainer):
    """Trains on rows cut over sequence groups.

    Args:
        model: after `longctx.parallelize`.
        sequence: the second result of `longctx.parallelize`.
        rows: packs or single documents, in data set order.
        collator: pads to a multiple of `sequence.dims.multiple`.
        documents: the tokenised documents that `rows` are cut from.
        costs: modelled cost of each row, to balance data-parallel ranks by; None shuffles rows alone.
        report: what became of every document and token, for the first entry of the log's history.
    """

    _name = "longctx"
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: PreTrainedModel,
        args: SFTConfig,
        *,
        sequence: SequenceParallel,
        rows: PackedDataset,
        collator: SequenceCollator,
        documents: Dataset,
        processing_class: PreTrainedTokenizerBase,
        costs: NDArray[np.floating] | None = None,
        report: PackingReport | None = None,
        **kwargs: Any,
    ):
        self.sequence, self.rows, self.costs = sequence, rows, costs
        self.step_metrics = StepMetrics(
            sp=sequence.dims.sp,
            sp_rank=sequence.dims.sp_rank(sequence.rank),
            config=model.config,
            num_parameters=count_parameters(model),
            device=sequence.device,
        )
        self._layers_checked = False
        super().__init__(
            model=model,
            args=_without_data_preparation(args),
            data_collator=_PlanningCollator(collator, sequence.dims, sequence.rank),
            train_dataset=documents,
            processing_class=processing_class,
            **kwargs,
        )
        _keep_sums_in_fp32(self.accelerator)
        if report is not None:
            self.add_callback(_PackingEntry(report))

    def step_sampler(self, dp_rank: int) -> StepSampler:
        """The row numbers that data-parallel rank `dp_rank` reads."""
        args = self.args
        seed = args.seed if args.data_seed is None else args.data_seed
        return StepSampler(
            len(self.rows),
            micro_batch_size=self._train_batch_size,
            accumulation_steps=args.gradient_accumulation_steps,
            dp=self.sequence.dims.dp,
            dp_rank=dp_rank,
            seed=None if args.train_sampling_strategy == "sequential" else seed,
            costs=self.costs,
            drop_last=args.dataloader_drop_last,
        )

    def get_train_dataloader(self) -> StepLoader:
        args = self.args
        return StepLoader(
            cast(TorchDataset, self.rows),  # a map-style data set by protocol; packing does not know torch
            batch_sampler=self.step_sampler(self.sequence.dims.dp_rank(self.sequence.rank)),
            collate_fn=self.data_collator,
            num_workers=args.dataloader_num_workers,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=args.dataloader_multiprocessing_context if args.dataloader_num_workers else None,
        )

    def get_total_train_batch_size(self, args: SFTConfig) -> int:
        """Sequences in an optimizer step."""
        return self._train_batch_size * self.sequence.dims.dp * args.gradient_accumulation_steps

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> int:
        return self.sequence.count_label_tokens(batch_samples)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return inputs  # cut on the CPU first; only this rank's part goes to the device

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        shard = self.sequence.shard(inputs)
        outputs = model(**shard.inputs, shift_labels=shard.shift_labels, fused_lm_head=True)
        self._check_shard_length(shard, outputs.log_probs)
        self.step_metrics.add(
            layout=shard.layout,
            num_tokens=inputs["num_tokens"],
            shift_labels=shard.shift_labels,
            correct=outputs.is_top1,
            entropy=outputs.entropy,
        )
        loss = self.sequence.reduce(-outputs.log_probs, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _check_shard_length(self, shard, log_probs: torch.Tensor) -> None:
        """In the first step, prove that every layer worked on S/sp tokens: a cut that did not happen is silent."""
        if self._layers_checked:
            return
        layers = self.model.config.get_text_config().num_hidden_layers
        assert shard.context.calls == layers, (
            f"{shard.context.calls} of {layers} attention layers went through longctx; the others would not see "
            "the other ranks' tokens"
        )
        assert log_probs.dtype.itemsize >= 4, f"per-token losses are {log_probs.dtype}; their sum would be rounded"
        assert log_probs.shape == (1, shard.layout.local_length), (
            f"the model's output has shape {tuple(log_probs.shape)}, expected one row of {shard.layout.local_length} "
            f"tokens: {shard.layout.num_tokens} over sp {shard.layout.sp}"
        )
        self._layers_checked = True

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs.update(self.step_metrics.read())
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        return super().floating_point_ops(inputs) / self.sequence.dims.sp


class _PackingEntry(TrainerCallback):
    """Puts the packing report into the log's history, and so into trainer_state.json, before the first step."""

    def __init__(self, report: PackingReport):
        self.report = report.to_dict()

    def on_train_begin(self, args: SFTConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not any(entry.get("packing") == self.report for entry in state.log_history):  # a resumed run has it
            state.log_history.append({"step": state.global_step, "packing": self.report})


def _keep_sums_in_fp32(accelerator: Accelerator) -> None:
    """FSDP2 under bf16: per-token losses come out as computed, and gradients add up over micro-batches in fp32.

    accelerate's policy casts what the model returns to bf16, and with it the scale of the whole gradient.
    """
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    policy = getattr(plugin, "mixed_precision_policy", None)
    if policy is not None and plugin.fsdp_version == 2:
        plugin.mixed_precision_policy = replace(policy, output_dtype=None, reduce_dtype=torch.float32)


class _PlanningCollator:
    """Adds what a data loader's worker can work out: how the batch is cut, and `num_tokens`, those without padding.

    A rank without rows feeds padding alone.
    """

    def __init__(self, collator: SequenceCollator, dims: ParallelDims, rank: int):
        self.collator, self.dims, self.rank = collator, dims, rank

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self.collator(rows) if rows else self.collator.empty()
        layout = plan_batch(complete_position_ids(batch), self.dims, self.dims.sp_rank(self.rank))
        return batch | {"layout": layout, "num_tokens": sum(len(row["input_ids"]) for row in rows)}


def _without_data_preparation(args: SFTConfig) -> SFTConfig:
    """Our rows are ready. TRL would refuse packing with a collator of one's own, and prepare and truncate by itself."""
    prepared = copy.copy(args)
    prepared.packing = prepared.padding_free = prepared.assistant_only_loss = False
    prepared.completion_only_loss = None
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):  # the same by two names
        if given := getattr(prepared, name, None):  # `selective` is carried out by longctx.parallelize
            setattr(prepared, name, {key: value for key, value in given.items() if key != "selective"})
    prepared.dataset_kwargs = {**(prepared.dataset_kwargs or {}), "skip_prepare_dataset": True}
    return prepared

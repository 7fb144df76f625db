"""Resuming from a checkpoint in any layout, in place of the engines' own way. saving.py writes checkpoints."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from trl import SFTConfig

from longctx.ranks.agreement import on_all_ranks
from longctx.training.checkpoint.files import (
    MANIFEST,
    CheckpointError,
    Manifest,
    check_files,
    check_same,
    damage_named,
    read_manifest,
)
from longctx.training.checkpoint.folder import best_beside
from longctx.training.checkpoint.masters import round_weights, set_fp32_weights
from longctx.training.checkpoint.saving import SavingMixin, optimization_flags, plain
from longctx.training.checkpoint.shards import WEIGHT, parameter_shards, trained_shapes, update_working_weights
from longctx.training.checkpoint.states import (
    check_kinds,
    nonfinite_weights,
    random_file,
    read_random_state,
    set_random_state,
)
from longctx.training.checkpoint.storage import StateReader
from longctx.training.data_order import StreamLoader
from longctx.upstream.transformers_internals import log_sums, restore_log_sums

logger = logging.getLogger(__name__)


class ResumableMixin(SavingMixin):
    """Makes a trainer go on from its checkpoints.

    A resumed run equals one that was never interrupted: weights, optimizer, schedule, the log's sums and the position
    in the data continue. sp, the backend, the engine and the number of devices may change as long as a step has as many
    sequences.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._fp32_weights = round_weights(self.model) if self.is_deepspeed_enabled and self.args.bf16 else {}
        """Initial values of ZeRO's fp32 weights."""

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, DataLoader]:
        model, loader = super()._prepare_for_training(max_steps, train_dataloader, None)
        set_fp32_weights(model, self._fp32_weights)
        self._fp32_weights = {}
        self._nonfinite_from_start = nonfinite_weights(self.model_wrapped)
        self.objective.prepare(self, model)
        if resume_from_checkpoint is not None:
            folder = Path(resume_from_checkpoint)
            on_all_ranks(lambda: self._restore(folder, loader))
            update_working_weights(self.model_wrapped, self.optimizer)
        return model, loader

    def _restore(self, folder: Path, loader: DataLoader) -> None:
        manifest = read_manifest(folder)
        if self.is_world_process_zero():  # a trainer of one's own has not asked before it read the weights
            now = {"data": dict(self.data_identity()), "optimization": optimization_flags(self.args)}
            check_same(manifest, folder, sequences_per_step=self.get_total_train_batch_size(self.args), **now)
        here = trained_shapes(self.model_wrapped)
        if manifest.parameters != here:
            name = next(n for n in {**manifest.parameters, **here} if manifest.parameters.get(n) != here.get(n))
            raise CheckpointError(
                f"{folder} is of another model: {name} has the shape {manifest.parameters.get(name)} there and "
                f"{here.get(name)} here. Use the same model and adapter flags."
            )
        reader = StateReader(folder, manifest.parameters, last_step=manifest.step)
        kinds = {kind: is_scalar for kind, is_scalar in reader.kinds.items() if is_scalar or kind != WEIGHT}
        check_kinds(folder, plain(self.args.optim), kinds, may_be_empty=self.on_nonfinite == "skip")
        with torch.no_grad():
            for piece in parameter_shards(self.model_wrapped, self.optimizer, kinds):
                reader.fill(piece)
        self._set_learning_rates(manifest.step)
        with damage_named(folder / TRAINER_STATE_NAME):
            self._restore_callbacks()
        if self.args.process_index == 0:
            self._say_what_is_left(folder, manifest)
        with damage_named(folder / MANIFEST):
            self.add_callback(_Continued(self, manifest, folder / MANIFEST))
            if isinstance(loader, StreamLoader) != (manifest.position is not None):
                raise ValueError("a stream needs a position, and only a stream has one")
            if isinstance(loader, StreamLoader) and manifest.position is not None:
                loader.go_on_from(manifest.position)

    def _set_learning_rates(self, step: int) -> None:
        """Set the schedule and the optimizer's learning rates to those after `step`.

        They come from this run's flags, not from the checkpoint. A schedule depends on the step alone, so a longer run
        follows that of its new length. Engines differ in parameter groups: DeepSpeed drops the group without weight
        decay if it is empty, as for LoRA.
        """
        schedule: Any = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)
        schedule.last_epoch, schedule._step_count = step, step + 1
        schedule._last_lr = [
            base * factor(step) for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
        ]
        for group, rate in zip(self.optimizer.param_groups, schedule._last_lr, strict=True):
            group["lr"] = rate

    def _restore_callbacks(self) -> None:
        """Restore what callbacks have counted, but not their settings, which are this run's."""
        for callback in self.callback_handler.callbacks:
            held = self.state.stateful_callbacks.get(type(callback).__name__)
            if isinstance(callback, ExportableState) and isinstance(held, dict):
                for name, value in callback.state()["attributes"].items():
                    found = held["attributes"].get(name, value)
                    if type(found) is not type(value):
                        raise TypeError(f"{name} is {found!r}, expected a {type(value).__name__}")
                    setattr(callback, name, found)

    @property
    def has_stopped_early(self) -> bool:
        """Whether --early_stopping_patience evaluations in a row were no better."""
        stopping = [c for c in self.callback_handler.callbacks if isinstance(c, EarlyStoppingCallback)]
        return any(
            callback.early_stopping_patience_counter >= callback.early_stopping_patience for callback in stopping
        )

    def _say_what_is_left(self, folder: Path, manifest: Manifest) -> None:
        before, now = manifest.progress.get("max_steps"), self.state.max_steps
        if manifest.step >= now:
            said = (
                f"is of step {manifest.step}, and this run has {now}: nothing is left to train. For more, raise "
                "--max_steps or --num_train_epochs."
            )
        elif self.has_stopped_early:
            said = (
                f"is of step {manifest.step}, after which the run stopped early: nothing is left to train. For more, "
                "raise --early_stopping_patience."
            )
        elif before not in (None, now):
            said = (
                f"is of a run of {before} steps, and this one has {now}: from here on, learning rates are those of a "
                f"run of {now} steps."
            )
        else:
            return
        logger.warning("%s %s", folder, said)

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, resume: str | None, trial: Any
    ) -> tuple[int, int]:
        """Begin with the checkpoint's state; flags win over what it says of them, and its best model over its path."""
        begun = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, resume, trial)
        self.state.compute_steps(self.args, max_steps)
        if resume is not None:
            best = best_beside(Path(resume), self.state.best_global_step)
            self.state.best_model_checkpoint = None if best is None else str(best)
        return begun

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Do nothing: `_prepare_for_training` has read everything."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        path = random_file(Path(checkpoint), self.args.process_index) if checkpoint else None
        if path is not None and path.is_file():
            set_random_state(read_random_state(path))

    def _run_epoch(self, **kwargs: Any) -> None:
        """Run an epoch, unless no step is left: the Trainer would take one more within an epoch."""
        if self.state.global_step >= self.state.max_steps or self.has_stopped_early:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(**kwargs)

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        if "train_loss" in logs:  # the Trainer divides the sum over all steps by the steps since resuming
            logs["train_loss"] = log_sums(self)["total_loss"] / max(self.state.global_step, 1)
        super().log(logs, start_time)

    def _load_best_model(self) -> None:
        folder = Path(self.state.best_model_checkpoint)
        on_all_ranks(lambda: self._read_weights(folder))
        update_working_weights(self.model_wrapped, self.optimizer)

    def _read_weights(self, folder: Path) -> None:
        manifest = read_manifest(folder)
        check_files(folder, manifest, part=self.args.process_index, parts=self.args.world_size)
        reader = StateReader(folder, manifest.parameters)
        with torch.no_grad():
            for piece in parameter_shards(self.model_wrapped, self.optimizer):
                reader.fill(replace(piece, states={WEIGHT: piece.states[WEIGHT]}))


class _Continued(TrainerCallback):
    """Restores the log's sums, which the Trainer resets when training begins."""

    def __init__(self, trainer: ResumableMixin, manifest: Manifest, path: Path):
        self.trainer, self.ranks, self.path = trainer, manifest.progress["ranks"], path
        self.expert_load = manifest.progress["expert_load"]
        if not self.ranks:
            raise ValueError("the progress of no rank is in it")
        for rank in self.ranks:
            if not all(math.isfinite(rank[name]) for name in ("loss", "last_logged", "total_loss")):
                raise ValueError(f"a rank's progress is {str(rank)[:60]}")

    def on_train_begin(self, args: SFTConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        trainer, ranks = self.trainer, self.ranks
        same = len(ranks) == args.world_size
        with damage_named(self.path):
            loss = ranks[args.process_index]["loss"] if same else sum(rank["loss"] for rank in ranks) / len(ranks)
            restore_log_sums(trainer, loss=loss, last_logged=ranks[0]["last_logged"], total_loss=ranks[0]["total_loss"])
            metrics = [rank["metrics"] for rank in ranks]
            trainer.step_metrics.load_state_dicts(metrics, self.expert_load, rank=trainer.sequence.rank)
            trainer.has_seen_labels = any(rank["has_seen_labels"] for rank in ranks)

"""Checkpoints that any layout can resume, in place of the engines' own."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from trl import SFTConfig

from longctx.ranks.agreement import broadcast_object, gather_objects, gather_on_first, on_all_ranks
from longctx.regions import region
from longctx.settings.flags import SFT
from longctx.training.checkpoint.files import (
    MANIFEST,
    CheckpointError,
    Manifest,
    NotSavedError,
    check_files,
    check_same,
    checkpoint_name,
    damage_named,
    describe_files,
    make_partial,
    read_manifest,
    take_place,
    take_places,
    write_manifest,
    writing,
)
from longctx.training.checkpoint.folder import MODEL_FILES, RunRecord, best_beside, checkpoints, next_serial, rotate
from longctx.training.checkpoint.hub import PushingMixin
from longctx.training.checkpoint.masters import round_weights, set_fp32_weights
from longctx.training.checkpoint.shards import WEIGHT, parameter_shards, trained_shapes, update_working_weights
from longctx.training.checkpoint.states import (
    STATES_OF,
    StateReader,
    check_kinds,
    nonfinite_weights,
    random_file,
    random_state,
    read_random_state,
    set_random_state,
    write_states,
)
from longctx.training.checkpoint.weights import write_model
from longctx.training.data_order import StepStream
from longctx.training.nonfinite import NonFiniteError
from longctx.upstream.transformers_internals import log_sums, restore_log_sums

logger = logging.getLogger(__name__)


class ResumableMixin(PushingMixin):
    """Makes a trainer save a Transformers folder in `checkpoint-N` and, without --save_only_model, all that resuming
    needs.

    A resumed run equals one that was never interrupted: weights, optimizer, schedule, the log's sums and the position
    in the data continue. sp, the backend, the engine and the number of devices may change as long as a step has as many
    sequences.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._fp32_weights = round_weights(self.model) if self.is_deepspeed_enabled and self.args.bf16 else {}
        """Initial values of ZeRO's fp32 weights."""

    _nonfinite_from_start: Sequence[str] = ()
    """Trained parameters with NaN or infinite values before training, such as embeddings of unused words."""

    def layout(self) -> dict[str, Any]:
        """Return the run's degrees, and `sequences_per_step`, which resuming must not change."""
        dims = self.sequence.dims
        return {
            "sequences_per_step": self.get_total_train_batch_size(self.args),
            "world_size": dims.world_size,
            "sp": dims.sp,
            "ring": dims.ring,
            "dp_replicate": dims.dp_replicate,
        }

    # Saving

    def _check_weights(self) -> None:
        """Check on all ranks together that weights are finite, except those that were not before training.

        A finite gradient does not ensure that: too high a learning rate makes weights infinite in one step.

        Raises:
            NonFiniteError: on every rank.
        """
        spoilt = [name for name in nonfinite_weights(self.model_wrapped) if name not in self._nonfinite_from_start]
        if names := [name for rank in gather_objects(spoilt[:1]) for name in rank]:
            raise NonFiniteError(
                f"{names[0]} is NaN or infinite after step {self.state.global_step}, so the model is not saved. Lower "
                "--learning_rate, and resume from an earlier checkpoint."
            )

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        with region("saving", "saving"):
            self._check_weights()
            self.store_flos()
            folder = Path(self.args.output_dir) / checkpoint_name(self.state.global_step)
            progress = self._all_progress()
            if self.state.best_global_step == self.state.global_step:
                self.state.best_model_checkpoint = str(folder)
            with self._writing(folder) as partial:
                weights = write_model(self, partial)
                files = gather_on_first(on_all_ranks(lambda: self._write_own_part(partial, weights)))
                manifest = on_all_ranks(lambda: self._describe(partial, files, progress))
                if self.args.save_on_each_node:
                    manifest = broadcast_object(manifest)
                self._as_owner(lambda: write_manifest(partial, manifest) if manifest is not None else None)
                self._as_owner(lambda: take_place(partial, folder))
            if self.args.push_to_hub:
                self._push(lambda: self._push_from_checkpoint(str(folder)))
                if self.args.save_total_limit and "checkpoint" in self.args.hub_strategy.value:
                    self._push(self._finish_current_push)  # before the folder that it reads may be deleted
            if self.args.should_save:
                rotate(folder, limit=self.args.save_total_limit, best=self.state.best_model_checkpoint)

    def save_results(self) -> None:
        """Save the model and the trainer's state in output_dir, each file atomically. Called by all ranks together.

        Raises:
            NonFiniteError: if a weight is NaN or infinite.
            NotSavedError, RefusedOnAllRanks: on the rank that failed, and on the others.
        """
        self._check_weights()
        output_dir = Path(self.args.output_dir)
        if self.args.push_to_hub:
            self._push(self._finish_current_push)  # before the files that it reads are replaced
        with self._writing(output_dir / "model") as partial:
            write_model(self, partial)
            on_all_ranks(lambda: self._save_state(partial))
            self._as_owner(lambda: take_places(partial, output_dir, stale=MODEL_FILES))

    @contextmanager
    def _writing(self, folder: Path) -> Iterator[Path]:
        """Yield an empty folder beside `folder`, which is removed if the body fails."""
        try:
            with writing(folder, is_owner=self.args.should_save) as partial:
                self._as_owner(lambda: make_partial(partial))
                yield partial
        except (OSError, SafetensorError) as error:
            raise _not_saved(folder, error) from error

    def _as_owner(self, work: Callable[[], None]) -> None:
        """Do `work` on rank 0, or on every node's first rank with --save_on_each_node; other ranks wait."""
        on_all_ranks(lambda: work() if self.args.should_save else None)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as a Transformers folder. Called by all ranks together."""
        write_model(self, Path(output_dir or self.args.output_dir))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _write_own_part(self, folder: Path, weights: list[Path]) -> dict[str, dict[str, Any]]:
        """Write this rank's states and random state, and describe them and its files of weights."""
        files, rank = weights, self.args.process_index
        if not self.args.save_only_model:
            files += write_states(folder, parameter_shards(self.model_wrapped, self.optimizer), rank)
            files.append(random_file(folder, rank))
            files[-1].write_text(json.dumps(random_state()))
        return describe_files(folder, files)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if not self.is_world_process_zero():  # the engines gather the model nowhere else
            return
        token, self.args.hub_token = self.args.hub_token, None  # training_args.bin is saved, and pushed
        try:
            super()._save(output_dir, state_dict)
            if self.base_config is not None:
                self.base_config.save_pretrained(output_dir or self.args.output_dir)
        except Exception as error:
            if type(error) is Exception:  # raised by tokenizers if the disk is full
                raise OSError(str(error)) from error
            raise
        finally:
            self.args.hub_token = token

    def _save_state(self, folder: Path) -> None:
        if self.is_world_process_zero():
            self.state.save_to_json(str(folder / TRAINER_STATE_NAME))

    def _describe(
        self, folder: Path, files: list[dict[str, dict[str, Any]]], progress: dict[str, Any]
    ) -> Manifest | None:
        """Write the trainer's state and return the manifest on rank 0; None if there is none to write."""
        if not self.is_world_process_zero():
            return None
        self._export_callbacks()
        self._save_state(folder)
        known = {name: about for part in files for name, about in part.items()}
        own = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(_OF_RANKS)]
        known |= describe_files(folder, [path for path in own if str(path.relative_to(folder)) not in known])
        if self.args.save_only_model:
            return None
        record = RunRecord.read(folder.parent)
        return Manifest(
            step=self.state.global_step,
            layout=self.layout(),
            optimization=optimization_flags(self.args),
            parameters=trained_shapes(self.model_wrapped),
            data=dict(self.data_identity()),
            progress=progress | {"max_steps": self.state.max_steps},
            position=self.stream_read and self.stream_read.position,
            files=known,
            run=record.id if record else "",
            began=record.began if record else "",
            serial=next_serial(folder.parent),
        )

    def _export_callbacks(self) -> None:
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                name, state = type(callback).__name__, callback.state()
                held = self.state.stateful_callbacks.get(name)
                if isinstance(held, list):
                    held.append(state)
                else:
                    self.state.stateful_callbacks[name] = state

    def _all_progress(self) -> dict[str, Any]:
        """Return what has to go on in the log: of all ranks on rank 0, and the sums of what they add up."""
        own = {"metrics": self.step_metrics.state_dict(), "has_seen_labels": self.has_seen_labels} | log_sums(self)
        return {"ranks": gather_on_first(own), "expert_load": self.step_metrics.expert_load()}

    # Resuming

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
            check_same(manifest, folder, sequences_per_step=self.layout()["sequences_per_step"], **now)
        reader = self._reader(folder, last_step=manifest.step)
        reader.find(set.union(*STATES_OF[_plain(self.args.optim)]))
        here = trained_shapes(self.model_wrapped)
        if manifest.parameters != here:
            name = next(n for n in {**manifest.parameters, **here} if manifest.parameters.get(n) != here.get(n))
            raise CheckpointError(
                f"{folder} is of another model: {name} has the shape {manifest.parameters.get(name)} there and "
                f"{here.get(name)} here. Use the same model and adapter flags."
            )
        kinds = [kind for kind in reader.kinds(scalars=False) if kind != WEIGHT]
        scalars = reader.kinds(scalars=True)
        check_kinds(folder, _plain(self.args.optim), {*kinds}, {*scalars}, may_be_empty=self.on_nonfinite == "skip")
        with torch.no_grad():
            for piece in parameter_shards(self.model_wrapped, self.optimizer, kinds=kinds, scalars=scalars):
                reader.fill(piece)
        self._set_learning_rates(manifest.step)
        with damage_named(folder / TRAINER_STATE_NAME):
            self._restore_callbacks()
        if self.args.process_index == 0:
            self._say_what_is_left(folder, manifest)
        with damage_named(folder / MANIFEST):
            self.add_callback(_Continued(self, manifest, folder / MANIFEST))
            rows: Any = loader.dataset
            if isinstance(rows, StepStream) != (manifest.position is not None):
                raise ValueError("a stream needs a position, and only a stream has one")
            if manifest.position is not None:
                rows.go_on_from(manifest.step, manifest.position)

    def _reader(self, folder: Path, **known: Any) -> StateReader:
        return StateReader(folder, rank=self.args.process_index, num_ranks=self.args.world_size, **known)

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
            logger.warning(
                "%s is of step %d, and this run has %d: nothing is left to train. For more, raise --max_steps or "
                "--num_train_epochs.",
                folder,
                manifest.step,
                now,
            )
        elif self.has_stopped_early:
            logger.warning(
                "%s is of step %d, after which the run stopped early: nothing is left to train. For more, raise "
                "--early_stopping_patience.",
                folder,
                manifest.step,
            )
        elif before not in (None, now):
            logger.warning(
                "%s is of a run of %d steps, and this one has %d: from here on its learning rates are those of such a "
                "run.",
                folder,
                before,
                now,
            )

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
        check_files(folder, read_manifest(folder), part=self.args.process_index, parts=self.args.world_size)
        reader = self._reader(folder)
        with torch.no_grad():
            for piece in parameter_shards(self.model_wrapped, self.optimizer):
                reader.fill(piece, only=(WEIGHT,))


def optimization_flags(args: SFTConfig) -> dict[str, Any]:
    """Return the flags that a resumed run must not change, by name and as JSON gives them back.

    Optimizer states, loss and schedule depend on them. Engines express no clipping as 0 or infinity; both become 0.
    """
    flags = {flag.name: _plain(getattr(args, flag.name)) for flag in SFT.flags.values() if flag.resume == "same"}
    clipping = args.max_grad_norm or 0.0
    flags["max_grad_norm"] = clipping if math.isfinite(clipping) else 0.0
    return json.loads(json.dumps(flags))


class _Continued(TrainerCallback):
    """Restores the log's sums, which the Trainer resets when training begins."""

    def __init__(self, trainer: ResumableMixin, manifest: Manifest, path: Path):
        self.trainer, self.ranks, self.path = trainer, manifest.progress["ranks"], path
        self.expert_load = manifest.progress.get("expert_load", [])
        if not self.ranks:
            raise ValueError("the progress of no rank is in it")
        for rank in self.ranks:
            if not all(math.isfinite(rank[name]) for name in ("loss", "last_logged", "total_loss")):
                raise ValueError(f"a rank's progress is {str(rank)[:60]}")

    def on_train_begin(self, args: SFTConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        with damage_named(self.path):
            self._restore(args)

    def _restore(self, args: SFTConfig) -> None:
        trainer, ranks = self.trainer, self.ranks
        same = len(ranks) == args.world_size
        loss = ranks[args.process_index]["loss"] if same else sum(rank["loss"] for rank in ranks) / len(ranks)
        restore_log_sums(trainer, loss=loss, last_logged=ranks[0]["last_logged"], total_loss=ranks[0]["total_loss"])
        metrics = [rank["metrics"] for rank in ranks]
        trainer.step_metrics.load_state_dicts(metrics, self.expert_load, rank=trainer.sequence.rank)
        trainer.has_seen_labels = any(rank.get("has_seen_labels", True) for rank in ranks)  # older ones do not say


_OF_RANKS = ("states-", "random-")


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)  # of an enumeration


def _not_saved(folder: Path, error: Exception) -> NotSavedError:
    last = next(iter(checkpoints(folder.parent)), None)
    kept = f"{last} is complete: --resume_from_checkpoint auto goes on from it" if last else "there is none before it"
    return NotSavedError(f"{folder} could not be written: {error}; {kept}.")

"""A trainer that writes checkpoints which any layout resumes, in the place of the engines' own."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import upload_folder
from safetensors import SafetensorError
from torch import nn
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from trl import SFTConfig, SFTTrainer

from longctx.checkpoint.files import (
    CheckpointError,
    Manifest,
    NotSavedError,
    check_files,
    checkpoint_name,
    checkpoints,
    describe_files,
    make_partial,
    read_manifest,
    rotate,
    take_place,
    take_places,
    write_manifest,
    writing,
)
from longctx.checkpoint.pieces import WEIGHT, pieces, trained_shapes, update_working_weights
from longctx.checkpoint.states import StateReader, write_states
from longctx.turns import gathered, together

logger = logging.getLogger(__name__)


class ResumableTrainer(SFTTrainer):
    """Saves in `checkpoint-N` a Transformers folder and, without --save_only_model, what a run needs to go on.

    Resuming gives the run that was never interrupted: weights, optimizer, schedule, the log's sums, and the place in
    the data. Steps are counted in optimizer steps of the same sequences, so sp, the backend, the engine and the number
    of devices may be others as long as a step has as many sequences.
    """

    def layout(self) -> dict[str, Any]:
        """Degrees of the run, and `sequences_per_step`, which a run that goes on has to have, too."""
        raise NotImplementedError

    def data_identity(self) -> dict[str, Any]:
        """What the rows are made from, by name; a run with another value of any cannot go on."""
        raise NotImplementedError

    def data_position(self) -> dict[str, Any] | None:
        """Behind the last step, in data that is a stream: the same on every rank, plain values."""
        return None

    def restore_data_position(self, loader: DataLoader, position: dict[str, Any], step: int) -> None:
        """Make the loader go on behind this step."""

    def progress(self) -> dict[str, Any]:
        """Of this rank, since the last entry of the log. Called by all ranks together."""
        return {}

    def restore_progress(self, progress: Sequence[dict[str, Any]]) -> None:
        """What `progress` gave on every rank of the run that was interrupted."""

    # Saving

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.store_flos()
        folder = Path(self.args.output_dir) / checkpoint_name(self.state.global_step)
        progress = self._all_progress()
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(folder)
        with self._writing(folder) as partial:
            together(lambda: self.save_model(str(partial), _internal_call=True))
            files = gathered(together(lambda: self._write_own_part(partial)))
            manifest = gathered(together(lambda: self._describe(partial, files, progress)))[0]
            if manifest is not None:
                self._as_owner(lambda: write_manifest(partial, manifest))
            self._as_owner(lambda: take_place(partial, folder))
        if self.args.push_to_hub:
            self._push(lambda: self._push_from_checkpoint(str(folder)))
            if self.args.save_total_limit and "checkpoint" in self.args.hub_strategy.value:
                self._push(self._finish_current_push)  # before the folder that it reads may be deleted
        if self.args.should_save:
            rotate(folder, limit=self.args.save_total_limit, best=self.state.best_model_checkpoint)

    def save_results(self) -> None:
        """The model and the trainer's state in output_dir: each file whole, or as it was. Called by all ranks together.

        Raises:
            NotSavedError, RefusedTogether: on the rank that could not write, and on the others.
        """
        output_dir = Path(self.args.output_dir)
        if self.args.push_to_hub:
            self._push(self._finish_current_push)  # before the files that it reads are replaced
        with self._writing(output_dir / "model") as partial:
            together(lambda: self.save_model(str(partial), _internal_call=True))
            together(lambda: self._save_state(partial))
            self._as_owner(lambda: take_places(partial, output_dir))

    def push_results(self) -> None:
        """All of output_dir but checkpoints, as it is on the disk, with a model card. Called by all ranks together.

        Raises:
            NotSavedError, RefusedTogether: on the rank that could not push, and on the others.
        """
        self._push(lambda: self._push_output_dir() if self.is_world_process_zero() else None)

    def _push_output_dir(self) -> None:
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self._finish_current_push()
        self.create_model_card()
        upload_folder(
            repo_id=str(self.hub_model_id),
            folder_path=self.args.output_dir,
            commit_message="End of training",
            token=self.args.hub_token,
            revision=self.args.hub_revision,
            ignore_patterns=["_*", "checkpoint-*"],
        )

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        self._push(lambda: super(ResumableTrainer, self).init_hf_repo(*args, **kwargs))
        if getattr(self, "hub_model_id", None) is None:  # of the other ranks, which would want to make one again
            self.hub_model_id: str | None = self.args.hub_model_id or Path(self.args.output_dir).absolute().name

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        before = self._pushes()
        super()._push_from_checkpoint(checkpoint_folder)
        self._warn_of_failed(before)

    def _finish_current_push(self) -> None:
        super()._finish_current_push()
        self._warn_of_failed(self._pushes())

    def _pushes(self) -> list[Future[Any]]:
        """In the background, on the rank that pushes."""
        return getattr(getattr(self, "push_in_progress", None), "jobs", [])

    def _warn_of_failed(self, pushes: list[Future[Any]]) -> None:
        """Take those that have ended off the list. The run goes on."""
        for push in [push for push in pushes if push.done()]:
            pushes.remove(push)
            if error := push.exception():
                logger.warning(
                    "--push_to_hub: a checkpoint of step %d or before could not be pushed (%s: %s). Training goes on; "
                    "what is saved is in %s.",
                    self.state.global_step,
                    type(error).__name__,
                    error,
                    self.args.output_dir,
                )

    def _push(self, push: Callable[[], Any]) -> None:
        """What rank 0 cannot push ends all ranks."""

        def work() -> None:
            try:
                push()
            except Exception as error:  # of several libraries
                raise NotSavedError(
                    f"--push_to_hub failed: {type(error).__name__}: {error}. Log in (hf auth login), or leave it out; "
                    f"what was saved is in {self.args.output_dir}."
                ) from error

        together(work)

    @contextmanager
    def _writing(self, folder: Path) -> Iterator[Path]:
        """An empty folder beside `folder`, of all ranks; what goes wrong on one of them removes it and ends all."""
        try:
            with writing(folder, is_owner=self.args.should_save) as partial:
                self._as_owner(lambda: make_partial(partial))
                yield partial
        except (OSError, SafetensorError) as error:
            raise _not_saved(folder, error) from error

    def _as_owner(self, work: Callable[[], None]) -> None:
        """On rank 0, or with --save_on_each_node on every node's first rank; the others wait."""
        together(lambda: work() if self.args.should_save else None)

    def _write_own_part(self, folder: Path) -> dict[str, dict[str, Any]]:
        """This rank's states, and where its random numbers are."""
        if self.args.save_only_model:
            return {}
        rank = self.args.process_index
        files = write_states(folder, pieces(self.model_wrapped, self.optimizer), rank)
        files.append(folder / _random_file(rank))
        files[-1].write_text(json.dumps(_random_state()))
        return describe_files(folder, files)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if not self.is_world_process_zero():  # the engines gather the model nowhere else
            return
        try:
            super()._save(output_dir, state_dict)
        except Exception as error:
            if type(error) is Exception:  # what tokenizers makes of a full disk
                raise OSError(str(error)) from error
            raise

    def _save_state(self, folder: Path) -> None:
        if self.is_world_process_zero():
            self.state.save_to_json(str(folder / TRAINER_STATE_NAME))

    def _describe(
        self, folder: Path, files: list[dict[str, dict[str, Any]]], progress: list[dict[str, Any]]
    ) -> Manifest | None:
        """Rank 0 writes the trainer's state, and knows the files of all ranks; None on the others."""
        if not self.is_world_process_zero():
            return None
        self._export_callbacks()
        self._save_state(folder)
        own = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(_OF_RANKS)]
        known = describe_files(folder, own)
        if self.args.save_only_model:
            return None
        for part in files:
            known |= part
        scheduler = {key: value for key, value in self.lr_scheduler.state_dict().items() if _is_plain(value)}
        return Manifest(
            step=self.state.global_step,
            layout=self.layout(),
            optimization={name: _plain(getattr(self.args, name)) for name in OPTIMIZATION},
            parameters=trained_shapes(self.model_wrapped),
            data=self.data_identity(),
            progress={"ranks": progress, "max_steps": self.state.max_steps},
            scheduler=scheduler,
            position=self.data_position(),
            files=known,
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

    def _all_progress(self) -> list[dict[str, Any]]:
        own = self.progress() | {
            "loss": float(self._tr_loss),
            "last_logged": self._globalstep_last_logged,
            "total_loss": self._total_loss_scalar,
        }
        return gathered(own)

    # Resuming

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, DataLoader]:
        model, loader = super()._prepare_for_training(max_steps, train_dataloader, None)
        if resume_from_checkpoint is not None:
            folder = Path(resume_from_checkpoint)
            best = folder.with_name(checkpoint_name(self.state.best_global_step or 0))
            if self.state.best_model_checkpoint is None and best.is_dir():  # the folders were moved
                self.state.best_model_checkpoint = str(best)
            together(lambda: self._restore(folder, loader))
            update_working_weights(self.model_wrapped, self.optimizer)
        return model, loader

    def _restore(self, folder: Path, loader: DataLoader) -> None:
        reader, manifest = StateReader(folder), read_manifest(folder)
        here = trained_shapes(self.model_wrapped)
        if manifest.parameters != here:
            name = next(n for n in {**manifest.parameters, **here} if manifest.parameters.get(n) != here.get(n))
            raise CheckpointError(
                f"{folder} is of another model: {name} has the shape {manifest.parameters.get(name)} there, and "
                f"{here.get(name)} here. Give the same model and adapter flags."
            )
        kinds = [kind for kind in reader.kinds(scalars=False) if kind != WEIGHT]
        with torch.no_grad():
            for piece in pieces(self.model_wrapped, self.optimizer, kinds=kinds, scalars=reader.kinds(scalars=True)):
                reader.fill(piece)
        self._set_learning_rates(manifest.step)
        self._restore_callbacks()
        if self.args.process_index == 0:
            self._say_what_is_left(folder, manifest)
        self.add_callback(_Continued(self, manifest))
        if manifest.position is not None:
            self.restore_data_position(loader, manifest.position, manifest.step)

    def _set_learning_rates(self, step: int) -> None:
        """Put the schedule and the optimizer's learning rates behind `step`.

        Both come from this run's flags, none of it from the checkpoint. Every schedule here depends on the step alone,
        so a longer run continues along its new length. Parameter groups are those that this run's engine keeps:
        DeepSpeed drops the group without weight decay where it is empty, as it is for LoRA, and other engines do not.
        """
        schedule: Any = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)
        schedule.last_epoch, schedule._step_count = step, step + 1
        schedule._last_lr = [
            base * factor(step) for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
        ]
        for group, rate in zip(self.optimizer.param_groups, schedule._last_lr, strict=True):
            group["lr"] = rate

    def _restore_callbacks(self) -> None:
        """What they have counted; how they are set up is up to this run."""
        for callback in self.callback_handler.callbacks:
            held = self.state.stateful_callbacks.get(type(callback).__name__)
            if isinstance(callback, ExportableState) and isinstance(held, dict):
                for name in callback.state()["attributes"].keys() & held["attributes"].keys():
                    setattr(callback, name, held["attributes"][name])

    @property
    def has_stopped_early(self) -> bool:
        """Whether as many evaluations as --early_stopping_patience were no better."""
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

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Everything is read in `_prepare_for_training`, whatever the engine."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        path = Path(checkpoint, _random_file(self.args.process_index)) if checkpoint else None
        if path is not None and path.is_file():
            _set_random_state(json.loads(path.read_text()))

    def _run_epoch(self, **kwargs: Any) -> None:
        """The Trainer would take one more step where the last one was not an epoch's last."""
        if self.state.global_step >= self.state.max_steps or self.has_stopped_early:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(**kwargs)

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        if "train_loss" in logs:  # the sum of all steps, which the Trainer divides by those since it was resumed
            logs["train_loss"] = self._total_loss_scalar / max(self.state.global_step, 1)
        super().log(logs, start_time)

    def _load_best_model(self) -> None:
        folder = Path(self.state.best_model_checkpoint)
        together(lambda: self._read_weights(folder))
        update_working_weights(self.model_wrapped, self.optimizer)

    def _read_weights(self, folder: Path) -> None:
        check_files(folder, read_manifest(folder), part=self.args.process_index, parts=self.args.world_size)
        reader = StateReader(folder)
        with torch.no_grad():
            for piece in pieces(self.model_wrapped, self.optimizer):
                reader.fill(piece, only=(WEIGHT,))


OPTIMIZATION = (
    "optim",
    "learning_rate",
    "lr_scheduler_type",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
)
"""Flags that a resumed run has as they were, since optimizer and schedule bring their own along."""


class _Continued(TrainerCallback):
    """Puts the log's sums back, which the Trainer sets to nothing when it begins."""

    def __init__(self, trainer: ResumableTrainer, manifest: Manifest):
        self.trainer, self.ranks = trainer, manifest.progress["ranks"]

    def on_train_begin(self, args: SFTConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        trainer, ranks = self.trainer, self.ranks
        same = len(ranks) == args.world_size
        loss = ranks[args.process_index]["loss"] if same else sum(rank["loss"] for rank in ranks) / len(ranks)
        trainer._tr_loss += loss
        trainer._globalstep_last_logged = ranks[0]["last_logged"]
        trainer._total_loss_scalar = ranks[0]["total_loss"]
        trainer.restore_progress(ranks)


_OF_RANKS = ("states-", "random-")


def _random_file(rank: int) -> str:
    return f"random-{rank:05d}.json"


def _random_state() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    state = {
        "python": [version, list(numbers), gauss],
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().tolist(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().tolist()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)  # of an enumeration


def _not_saved(folder: Path, error: Exception) -> NotSavedError:
    last = next(iter(checkpoints(folder.parent)), None)
    kept = f"{last} is complete: --resume_from_checkpoint auto goes on from it" if last else "there is none before it"
    return NotSavedError(f"{folder} could not be written: {error}; {kept}.")

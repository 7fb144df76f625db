"""A trainer that writes checkpoints which any layout resumes, in the place of the engines' own."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import rotate_checkpoints
from trl import SFTConfig, SFTTrainer

from longctx.checkpoint.files import (
    CheckpointError,
    Manifest,
    NotSavedError,
    checkpoint_name,
    checkpoints,
    describe_files,
    read_manifest,
    write_manifest,
    writing,
)
from longctx.checkpoint.pieces import WEIGHT, pieces, trained_shapes, update_working_weights
from longctx.checkpoint.states import StateReader, write_states
from longctx.turns import together


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

    def progress(self) -> dict[str, Any]:
        """Of this rank, since the last entry of the log. Called by all ranks together."""
        return {}

    def restore_progress(self, progress: Sequence[dict[str, Any]]) -> None:
        """What `progress` gave on every rank of the run that was interrupted."""

    # Saving

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.store_flos()
        output_dir = Path(self.args.output_dir)
        folder = output_dir / checkpoint_name(self.state.global_step)
        is_owner = self.args.should_save
        progress = self._all_progress()
        if best := self.state.best_global_step:
            self.state.best_model_checkpoint = str(output_dir / checkpoint_name(best))
        try:
            with writing(folder, is_owner=is_owner) as partial:
                together(lambda: None)  # the folder is there
                together(lambda: self.save_model(str(partial), _internal_call=True))
                files = together(lambda: self._write_own_part(partial))
                together(lambda: self._finish(partial, files, progress))
        except (OSError, SafetensorError) as error:
            raise _not_saved(folder, error) from error
        together(lambda: None)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))
        if is_owner:
            rotate_checkpoints(
                output_dir=str(output_dir),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
            )

    def _write_own_part(self, folder: Path) -> dict[str, dict[str, Any]]:
        """This rank's states, and where its random numbers are."""
        if self.args.save_only_model:
            return {}
        rank = self.args.process_index
        files = write_states(folder, pieces(self.model_wrapped, self.optimizer), rank)
        files.append(folder / _random_file(rank))
        files[-1].write_text(json.dumps(_random_state()))
        return describe_files(folder, files)

    def _finish(self, folder: Path, files: dict[str, dict[str, Any]], progress: list[dict[str, Any]]) -> None:
        """The trainer's state and the manifest."""
        everyone = _gathered(files)
        if not self.args.should_save:
            return
        self._export_callbacks()
        self.state.save_to_json(str(folder / TRAINER_STATE_NAME))
        if self.args.save_only_model:
            return
        own = [path for path in folder.iterdir() if path.is_file() and not path.name.startswith(_OF_RANKS)]
        known = describe_files(folder, own)
        for part in everyone:
            known |= part
        scheduler = {key: value for key, value in self.lr_scheduler.state_dict().items() if _is_plain(value)}
        manifest = Manifest(
            step=self.state.global_step,
            layout=self.layout(),
            optimization={name: _plain(getattr(self.args, name)) for name in OPTIMIZATION},
            parameters=trained_shapes(self.model_wrapped),
            data=self.data_identity(),
            progress={"ranks": progress},
            scheduler=scheduler,
            files=known,
        )
        write_manifest(folder, manifest)

    def _export_callbacks(self) -> None:
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                name, state = type(callback).__name__, callback.state()
                held = self.state.stateful_callbacks[name]
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
        return _gathered(own)

    # Resuming

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, DataLoader]:
        model, loader = super()._prepare_for_training(max_steps, train_dataloader, None)
        if resume_from_checkpoint is not None:
            folder = Path(resume_from_checkpoint)
            together(lambda: self._restore(folder))
            update_working_weights(self.model_wrapped, self.optimizer)
        return model, loader

    def _restore(self, folder: Path) -> None:
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
        self.lr_scheduler.load_state_dict(self.lr_scheduler.state_dict() | manifest.scheduler)
        for group, rate in zip(self.optimizer.param_groups, manifest.scheduler["_last_lr"], strict=True):
            group["lr"] = rate
        self.add_callback(_Continued(self, manifest))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Everything is read in `_prepare_for_training`, whatever the engine."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        path = Path(checkpoint, _random_file(self.args.process_index)) if checkpoint else None
        if path is not None and path.is_file():
            _set_random_state(json.loads(path.read_text()))

    def _load_best_model(self) -> None:
        folder = Path(self.state.best_model_checkpoint)
        reader = StateReader(folder)
        with torch.no_grad():
            for piece in pieces(self.model_wrapped, self.optimizer):
                reader.fill(piece, only=(WEIGHT,))
        update_working_weights(self.model_wrapped, self.optimizer)


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


def _gathered(value: Any) -> list[Any]:
    """Every rank's."""
    if not dist.is_initialized():
        return [value]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, value)
    return ranks


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

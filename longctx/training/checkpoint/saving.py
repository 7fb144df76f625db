"""Saving a trainer's checkpoints and its results: what all ranks do together, what each writes, and the commit.

A commit needs no collective: ranks meet over the process group's store. With --save_async a thread of each rank
therefore carries it out while training goes on, from copies in host memory.
"""

from __future__ import annotations

import functools
import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from trl import SFTConfig

from longctx.ranks.agreement import (
    LEAVE_SECONDS,
    gather_objects,
    gathered_on_first,
    on_all_ranks,
    own_channel,
    wait_until,
)
from longctx.regions import region
from longctx.settings.flags import SFT
from longctx.training.checkpoint.files import (
    MANIFEST,
    Manifest,
    NotSavedError,
    checkpoint_name,
    describe_files,
    flush,
    make_partial,
    take_place,
    take_places,
    write_manifest,
    writing,
)
from longctx.training.checkpoint.folder import MODEL_FILES, RunRecord, checkpoints, next_serial, rotate
from longctx.training.checkpoint.hub import PushingMixin
from longctx.training.checkpoint.shards import WEIGHT, ParameterShard, parameter_shards, trained_shapes
from longctx.training.checkpoint.states import nonfinite_weights, random_file, random_state
from longctx.training.checkpoint.storage import write_index, write_states
from longctx.training.checkpoint.weights import names_kept, write_model
from longctx.training.data_order import StreamLoader, StreamRead
from longctx.training.nonfinite import NonFiniteError
from longctx.upstream.transformers_internals import log_sums

_OF_RANKS = ("states-", "random-")


class SavingMixin(PushingMixin):
    """Makes a trainer save a Transformers folder in `checkpoint-N` and, without --save_only_model, all that resuming
    needs.
    """

    save_async = False
    """Whether checkpoints are written while training goes on."""
    _stream: StreamLoader | None = None
    """What reads a stream, from the start of training on."""
    stream_read: StreamRead | None = None
    """What has been read of a stream up to the end of the current step."""
    _saving: Future[None] | None = None
    _nonfinite_from_start: Sequence[str] = ()
    """Trained parameters with NaN or infinite values before training, such as embeddings of unused words."""

    @functools.cached_property
    def _channel(self) -> dist.Store:
        return own_channel("saving")

    @functools.cached_property
    def _is_in_model_files(self) -> bool:
        """Whether the model's files hold all trained weights under their names, so that the ranges need not."""
        names = trained_shapes(self.model_wrapped).keys()
        return not hasattr(self.model, "peft_config") and names <= names_kept(self.model)

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
            self.finish_saving()
            self._check_weights()
            self.store_flos()
            folder = Path(self.args.output_dir) / checkpoint_name(self.state.global_step)
            if self.state.best_global_step == self.state.global_step:
                self.state.best_model_checkpoint = str(folder)
            with self._writing(folder) as unfinished:
                self._as_owner(lambda: make_partial(unfinished))
                commit = self._begin(folder, unfinished)
            if self.save_async:
                self._saving = _in_background(commit)
            else:
                commit()
            if self.args.push_to_hub:
                self.finish_saving()
                self._push(lambda: self._push_from_checkpoint(str(folder)))
                if self.args.save_total_limit and "checkpoint" in self.args.hub_strategy.value:
                    self._push(self._finish_current_push)  # before the folder that it reads may be deleted

    def finish_saving(self) -> None:
        """Wait for a checkpoint that is being written. Called by all ranks together.

        Raises:
            NotSavedError, RefusedOnAllRanks: if it could not be written: on the rank that failed, and on the others.
        """
        if self._saving is not None:
            wait_until(self._saving.done)
            saving, self._saving = self._saving, None
            saving.result()

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """End training once the last checkpoint is there, which may be the best one, or go."""
        self.finish_saving()
        best, limit = self.state.best_model_checkpoint, self.args.save_total_limit
        is_here = best is not None and Path(best).parent == Path(self.args.output_dir)  # else it is another run's
        if self.args.should_save and is_here and limit == 1:  # the Trainer would delete others in place
            rotate(Path(best), limit=limit, best=best)
        return super()._finalize_training(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train. Called by all ranks together."""
        try:
            return super().train(*args, **kwargs)
        except BaseException as error:
            if self._saving is not None:  # all ranks end with a ValueError; after other errors, one may be gone
                wait([self._saving], None if isinstance(error, ValueError) else LEAVE_SECONDS)
            raise

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
        with self._writing(output_dir / "model") as unfinished:
            self._as_owner(lambda: make_partial(unfinished))
            write_model(self, unfinished)
            on_all_ranks(lambda: self._write_state(unfinished, of_callbacks=False))
            self._as_owner(lambda: take_places(unfinished, output_dir, stale=MODEL_FILES))

    @contextmanager
    def _writing(self, folder: Path) -> Iterator[Path]:
        """Yield the path of a folder beside `folder`, which is removed if the body fails."""
        try:
            with writing(folder, is_owner=self.args.should_save) as unfinished:
                yield unfinished
        except (OSError, SafetensorError) as error:
            last = next(iter(checkpoints(folder.parent)), None)
            kept = f"{last} is complete: --resume_from_checkpoint auto goes on from it"
            raise NotSavedError(
                f"{folder} could not be written: {error}; {kept if last else 'there is none before it'}."
            ) from error

    def _as_owner(self, work: Callable[[], None]) -> None:
        """Do `work` on rank 0, or on every node's first rank with --save_on_each_node; other ranks wait."""
        on_all_ranks(lambda: work() if self.args.should_save else None)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as a Transformers folder. Called by all ranks together."""
        write_model(self, Path(output_dir or self.args.output_dir))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _begin(self, folder: Path, unfinished: Path) -> Callable[[], None]:
        """Write what needs all ranks at once, and return a function that writes the rest and commits the checkpoint.

        With --save_async, the function writes the tensors from copies in host memory, which are made here.
        """
        args = self.args
        in_model = not args.save_only_model and self._is_in_model_files
        later: list[Callable[[], None]] = []

        def save_later(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
            copies = {name: tensor.clone() for name, tensor in tensors.items()}
            later.append(partial(save_file, copies, path, metadata))

        weights = write_model(self, unfinished, exact=in_model, save=save_later if self.save_async else save_file)
        read = self.stream_read
        progress = {
            "progress": {"metrics": self.step_metrics.state_dict(), "has_seen_labels": self.has_seen_labels}
            | log_sums(self),
            "lanes": {} if read is None or self.sequence.dims.sp_rank(self.sequence.rank) else read.lanes,
        }
        expert_load = self.step_metrics.expert_load()
        on_all_ranks(lambda: self._write_state(unfinished))
        manifest = on_all_ranks(lambda: self._manifest(folder.parent, expert_load))
        pieces: Iterable[ParameterShard] = () if args.save_only_model else self._pieces()
        leave_out = [WEIGHT] * in_model
        if self.save_async:
            pieces = [_copied(piece, leave_out) for piece in pieces if not piece.is_copy]
        random = json.dumps(random_state())

        def write() -> dict[str, Any]:
            for work in later:
                work()
            ranges, kinds = write_states(unfinished, pieces, args.process_index, leave_out=leave_out)
            files = [*weights, *(unfinished / file for file in ranges)]
            if not args.save_only_model:
                files.append(random_file(unfinished, args.process_index))
                files[-1].write_text(random)
            return {"files": describe_files(unfinished, files), "ranges": ranges, "kinds": kinds, **progress}

        return partial(self._commit, folder, write, manifest, read, self.state.best_model_checkpoint)

    def _pieces(self) -> Iterator[ParameterShard]:
        """Return this rank's ranges, all with the same kinds of states: a parameter without gradients has none yet."""
        found = [piece.states.items() for piece in parameter_shards(self.model_wrapped, self.optimizer)]
        kinds = {kind: not values.dim() for states in found for kind, values in states if kind != WEIGHT}
        return parameter_shards(self.model_wrapped, self.optimizer, kinds)

    def _commit(
        self,
        folder: Path,
        write: Callable[[], dict[str, Any]],
        manifest: Manifest | None,
        read: StreamRead | None,
        best: str | None,
    ) -> None:
        """Let every rank write, describe the files, and give the folder its name. No collective is called.

        Args:
            write: writes this rank's files, and returns what describes them.
            manifest: without what ranks report, on rank 0; None with --save_only_model.
            read: of a stream, up to the step.
        """
        args, channel = self.args, self._channel
        with self._writing(folder) as unfinished:
            reports = gathered_on_first(write, channel)
            on_all_ranks(lambda: self._describe(unfinished, reports, manifest, read), channel)
            on_all_ranks(lambda: self._place(unfinished, folder), channel)
            if args.should_save:  # once the checkpoint is on all nodes
                rotate(folder, limit=args.save_total_limit, best=best)

    def _describe(
        self, unfinished: Path, reports: list[dict[str, Any]], manifest: Manifest | None, read: StreamRead | None
    ) -> None:
        """Write the index and the manifest on rank 0, once all files are flushed to disk.

        Args:
            reports: of each rank, what `write` in `_begin` returns.
        """
        if not self.is_world_process_zero():
            return
        known = {name: about for report in reports for name, about in report["files"].items()}
        if manifest is not None:
            kinds = {kind: is_scalar for report in reports for kind, is_scalar in report["kinds"].items()}
            write_index(unfinished, [report["ranges"] for report in reports], kinds, manifest.parameters)
        own = [path for path in unfinished.rglob("*") if path.is_file() and not path.name.startswith(_OF_RANKS)]
        known |= describe_files(unfinished, [path for path in own if str(path.relative_to(unfinished)) not in known])
        if manifest is not None:
            progress = manifest.progress | {"ranks": [report["progress"] for report in reports]}
            lanes = {int(lane): where for report in reports for lane, where in report["lanes"].items()}
            position = None if self._stream is None or read is None else self._stream.position_of(read, lanes)
            write_manifest(unfinished, replace(manifest, files=known, progress=progress, position=position))
            if self.args.save_on_each_node:
                self._channel.set("manifest", (unfinished / MANIFEST).read_text())

    def _place(self, unfinished: Path, folder: Path) -> None:
        """Give the folder its name, on each node that has a folder of its own."""
        if not self.args.should_save:
            return
        if not self.args.save_only_model and not self.is_world_process_zero():  # rank 0 wrote it on another disk
            (unfinished / MANIFEST).write_bytes(self._channel.get("manifest"))
            flush(unfinished / MANIFEST)
            flush(unfinished)
        take_place(unfinished, folder)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if not self.is_world_process_zero():  # the engines gather the model nowhere else
            return
        token, self.args.hub_token = self.args.hub_token, None  # training_args.bin is saved, and pushed
        try:
            super()._save(output_dir, state_dict)
            if self.base_config is not None:
                self.base_config.save_pretrained(output_dir or self.args.output_dir)
        except Exception as error:
            if type(error) in (Exception, RuntimeError):  # raised by tokenizers and torch
                raise OSError(f"no room for a file, or no right to write it ({error})") from error
            raise
        finally:
            self.args.hub_token = token

    def _write_state(self, folder: Path, *, of_callbacks: bool = True) -> None:
        if self.is_world_process_zero():
            if of_callbacks:
                self._export_callbacks()
            self.state.save_to_json(str(folder / TRAINER_STATE_NAME))

    def _manifest(self, output_dir: Path, expert_load: list[list[float]]) -> Manifest | None:
        """Return what a checkpoint says of itself, except for what ranks report, on rank 0.

        There is none with --save_only_model.
        """
        if self.args.save_only_model or not self.is_world_process_zero():
            return None
        record, dims = RunRecord.read(output_dir), self.sequence.dims
        degrees = {name: getattr(dims, name) for name in ("world_size", "sp", "ring", "dp_replicate")}
        return Manifest(
            step=self.state.global_step,
            layout={"sequences_per_step": self.get_total_train_batch_size(self.args), **degrees},
            optimization=optimization_flags(self.args),
            parameters=trained_shapes(self.model_wrapped),
            data=dict(self.data_identity()),
            progress={"max_steps": self.state.max_steps, "expert_load": expert_load},
            run=record.id if record else "",
            began=record.began if record else "",
            choice=record.choice if record else {},
            serial=next_serial(output_dir),
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


def optimization_flags(args: SFTConfig) -> dict[str, Any]:
    """Return the flags that a resumed run must not change, by name and as JSON gives them back.

    Optimizer states, loss and schedule depend on them. Engines express no clipping as 0 or infinity; both become 0.
    """
    flags = {flag.name: plain(getattr(args, flag.name)) for flag in SFT.flags.values() if flag.resume == "same"}
    clipping = args.max_grad_norm or 0.0
    flags["max_grad_norm"] = clipping if math.isfinite(clipping) else 0.0
    return json.loads(json.dumps(flags))


def plain(value: Any) -> Any:
    """Return the value of a member of an enumeration, and any other value as it is."""
    return getattr(value, "value", value)


def _copied(piece: ParameterShard, leave_out: Sequence[str]) -> ParameterShard:
    """Return the range with copies of its states in host memory, except for the values of some kinds."""
    device = {kind: "meta" if kind in leave_out else "cpu" for kind in piece.states}
    states = {kind: tensor.detach().to(device[kind], copy=True) for kind, tensor in piece.states.items()}
    return replace(piece, states=states)


def _in_background(work: Callable[[], None]) -> Future[None]:
    """Do `work` in a thread that does not keep the process alive."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="longctx-save", daemon=True).start()
    return done

"""Pushes to the hub, of which failed ones end all ranks, or cause a warning if made in the background."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import upload_folder

from longctx.ranks.agreement import on_all_ranks
from longctx.training.checkpoint.files import NotSavedError

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object  # a mixin: the class that uses it adds the trainer

logger = logging.getLogger(__name__)


class PushingMixin(Trainer):
    """Makes a trainer push checkpoints in the background and output_dir at the end."""

    def push_results(self) -> None:
        """Push output_dir, except checkpoints, with a model card. Called by all ranks together.

        Raises:
            NotSavedError, RefusedOnAllRanks: on the rank that failed, and on the others.
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
        self._push(lambda: super(PushingMixin, self).init_hf_repo(*args, **kwargs))
        if getattr(self, "hub_model_id", None) is None:  # on other ranks, which would create it again
            self.hub_model_id: str | None = self.args.hub_model_id or Path(self.args.output_dir).absolute().name

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        before = self._pushes()
        super()._push_from_checkpoint(checkpoint_folder)
        self._warn_of_failed(before)

    def _finish_current_push(self) -> None:
        super()._finish_current_push()
        self._warn_of_failed(self._pushes())

    def _pushes(self) -> list[Future[Any]]:
        """Return this rank's background pushes."""
        return getattr(getattr(self, "push_in_progress", None), "jobs", [])

    def _warn_of_failed(self, pushes: list[Future[Any]]) -> None:
        """Remove finished pushes from the list, and warn of failed ones."""
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
        """Push, and end all ranks if that fails."""

        def work() -> None:
            try:
                push()
            except Exception as error:  # errors of several libraries
                raise NotSavedError(
                    f"--push_to_hub failed: {type(error).__name__}: {error}. Log in (hf auth login), or leave it out; "
                    f"what was saved is in {self.args.output_dir}."
                ) from error

        on_all_ranks(work)

"""Pushes to the hub, of which failed ones end all ranks, or cause a warning if made in the background."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import upload_folder

import longctx
from longctx.model.card import model_card
from longctx.ranks.agreement import on_all_ranks
from longctx.training.checkpoint.files import NotSavedError
from longctx.training.exactness import Exactness

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

    def create_model_card(self, *args: Any, tags: str | Sequence[str] | None = None, **kwargs: Any) -> None:
        """Write README.md in output_dir with what this run knows of the model; TRL's other arguments are ignored."""
        if not self.is_world_process_zero():
            return
        dims, state, settings = self.sequence.dims, self.state, self.args
        last = next((entry for entry in reversed(state.log_history) if "loss" in entry), None)
        training = {
            "sequence length": f"{settings.max_length:,} tokens",
            "sequences a step": self.get_total_train_batch_size(settings),
            "steps": f"{state.global_step:,} of {state.max_steps:,}",
            "last in the log": last
            and f"step {last['step']:,}: {last['num_tokens']:,} tokens, loss {last['loss']:.4g}",
            "learning rate": f"{settings.learning_rate:g}, {settings.lr_scheduler_type.value}",
            "devices": str(dims),
            "attention": "each document alone, as on one device",
            "exactness": Exactness.read(Path(settings.output_dir)),
        }
        card = model_card(
            repository=str(self.hub_model_id or Path(settings.output_dir).name),
            base_model=self.model.config.name_or_path or None,
            tags=[*self._tag_names, *([tags] if isinstance(tags, str) else tags or [])],
            is_adapter=hasattr(self.model, "peft_config"),
            has_config=self.base_config is not None,
            training={name: value for name, value in training.items() if value is not None},
            release=longctx.__version__,
        )
        Path(settings.output_dir, "README.md").write_text(card, encoding="utf-8")

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

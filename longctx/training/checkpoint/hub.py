"""Pushes to the hub, of which failed ones end all ranks, or cause a warning if made in the background."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from huggingface_hub import upload_folder

import longctx
from longctx.model.card import (
    CARD_FILE,
    TrainedModel,
    describe_adapter,
    is_of_others,
    is_on_hub,
    model_card,
    own_card,
    training_section,
)
from longctx.ranks.agreement import on_all_ranks
from longctx.training.checkpoint.files import NotSavedError
from longctx.training.exactness import Exactness
from longctx.untrusted.files import written_whole

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object  # a mixin: the class that uses it adds the trainer

logger = logging.getLogger(__name__)


class BestEvaluation(NamedTuple):
    """The best of a run's evaluations."""

    metric: str
    value: float
    step: int

    def __str__(self) -> str:
        return f"{self.metric} {self.value:.4g} after step {self.step:,}"


class PushingMixin(Trainer):
    """Makes a trainer push checkpoints in the background and output_dir at the end."""

    def push_results(self) -> None:
        """Push output_dir, except checkpoints. Called by all ranks together.

        Raises:
            NotSavedError, RefusedOnAllRanks: on the rank that failed, and on the others.
        """
        self._push(lambda: self._push_output_dir() if self.is_world_process_zero() else None)

    def _push_output_dir(self) -> None:
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self._finish_current_push()
        upload_folder(
            repo_id=str(self.hub_model_id),
            folder_path=self.args.output_dir,
            commit_message="End of training",
            token=self.args.hub_token,
            revision=self.args.hub_revision,
            ignore_patterns=["_*", "checkpoint-*"],
        )

    def trained_model(self, base: str | None = None, *, is_part: bool = False) -> TrainedModel:
        """Return the model in output_dir, with the commands that use it.

        Args:
            base: the model that training began with; the one that the configuration names if None.
            is_part: whether that is a multimodal model, of which the text part was trained.
        """
        model: Any = self.model
        return TrainedModel(
            folder=self.args.output_dir,
            base=base or model.config.name_or_path or None,
            config=self.base_config or model.config,
            adapter=model.active_peft_config if hasattr(model, "peft_config") else None,
            has_own_config=self.base_config is not None,
            has_own_keys=bool(getattr(self.args, "model_init_kwargs", None)),
            is_part=is_part,
        )

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | Sequence[str] | None = None,
        *,
        model: TrainedModel | None = None,
        also: Mapping[str, Any] | None = None,
        license: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Write README.md in output_dir on rank 0: how to use the model, and what this run knows of its training.

        A card that someone else has written stays, and so does the license in an earlier one.

        Args:
            model_name, dataset_name, tags: as in TRL.
            license, kwargs: as the Trainer's `push_to_hub` passes them on; of those, only the license is used.
            model: what `trained_model` returns, if more is known of it.
            also: further rows of the table of the training.
        """
        if not self.is_world_process_zero():
            return
        path, state, settings = Path(self.args.output_dir, CARD_FILE), self.state, self.args
        model = model or self.trained_model()
        last = next((entry for entry in reversed(state.log_history) if "loss" in entry), None)
        training = {
            "base model": model.base,
            "adapter": model.adapter and describe_adapter(model.adapter),
            "data": dataset_name,
            "sequence length": f"{settings.max_length:,} tokens",
            "sequences a step": self.get_total_train_batch_size(settings),
            "steps": f"{state.global_step:,} of {state.max_steps:,}",
            "last in the log": last
            and f"step {last['step']:,}: {last['num_tokens']:,} tokens, loss {last['loss']:.4g}",
            "best evaluation": self.best_evaluation(),
            "learning rate": f"{settings.learning_rate:g}, {settings.lr_scheduler_type.value}",
            "devices": str(self.sequence.dims),
            "attention": "each document alone, as on one device",
            "exactness": Exactness.read(path.parent),
            **(also or {}),
        }
        section = training_section({name: of for name, of in training.items() if of is not None}, longctx.__version__)
        name = str(getattr(self, "hub_model_id", None) or model_name or path.parent.resolve().name)
        more = [tags] if isinstance(tags, str) else tags or []
        try:
            earlier = own_card(path)
            if earlier is None and is_of_others(path):
                logger.warning("%s was not written by longctx, and stays as it is", path)
                return
            card = model_card(
                replace(model, folder=name),
                section,
                tags=["generated_from_trainer", *sorted({*self._tag_names, *more})],
                data_set=dataset_name if is_on_hub(dataset_name) else None,
                license=license or (None if earlier is None else earlier.data.get("license")),
            )
            with written_whole(path) as unfinished:
                unfinished.write_text(card, encoding="utf-8")
        except OSError as error:  # the model is saved, and the run is not to fail for its card
            logger.warning("%s is not written: %s", path, error)

    def best_evaluation(self) -> BestEvaluation | None:
        """Return the best evaluation by --metric_for_best_model, or by the loss; None before the first evaluation."""
        args, state = self.args, self.state
        name = f"eval_{(args.metric_for_best_model or 'loss').removeprefix('eval_')}"
        if args.load_best_model_at_end and state.best_metric is not None:
            return BestEvaluation(name, state.best_metric, state.best_global_step)
        log = state.log_history
        found = [(entry[name], entry["step"]) for entry in log if math.isfinite(entry.get(name, math.nan))]
        best = max if args.greater_is_better else min
        return BestEvaluation(name, *best(found, key=itemgetter(0))) if found else None

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

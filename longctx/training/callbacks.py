"""Callbacks that keep the trainer's log and learning-rate schedule right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState
from trl import SFTConfig

from longctx.data import SourceReport
from longctx.forecast.expected_step import ExpectedStep
from longctx.launch.console import say
from longctx.packing import PackingReport
from longctx.training.data_order import MicroBatch, StepSampler
from longctx.training.peak_memory import GIB


class EpochByRows(TrainerCallback):
    """Counts `epoch` in the log by rows trained on. The Trainer counts micro-batches, which depends on the layout."""

    def __init__(self, sampler: StepSampler):
        step = sampler.rows_per_step
        self.rows = sampler.num_rows // step * step if sampler.drop_last else sampler.num_rows
        self.rows_per_step, self.steps = step, -(-self.rows // step)

    def on_step_end(self, args: SFTConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        epochs, steps = divmod(state.global_step, self.steps)
        state.epoch = epochs + steps * self.rows_per_step / self.rows


class ScheduleGoesOn(TrainerCallback):
    """Advances the learning rate after a step that DeepSpeed skipped, as on other engines."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def on_step_end(self, args: SFTConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.trainer.accelerator.optimizer_step_was_skipped:
            scheduler: Any = self.trainer.lr_scheduler
            getattr(scheduler, "scheduler", scheduler).step()


class CompareForecast(TrainerCallback):
    """Prints once, after the first steps, what a step took beside what was predicted."""

    STEP = 3
    """The step after which it does; the first ones compile kernels and fill caches."""

    def __init__(self, expected: ExpectedStep):
        self.expected = expected
        self.is_done = False

    def on_log(
        self, args: SFTConfig, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **kwargs: Any
    ) -> None:
        if self.is_done or "peak_memory_gib_max" not in logs or state.global_step < min(self.STEP, state.max_steps):
            return
        self.is_done = True
        if line := self.describe(logs["tokens_per_second_per_device"], logs["peak_memory_gib_max"]):
            say(f"measured {line}")

    def describe(self, speed: float, peak_gib: float | None) -> str:
        """Return measured and predicted values in one line, without those that are not predicted.

        Args:
            speed: tokens per second and device.
            peak_gib: GiB of tensors on the fullest GPU at its peak; None on the CPU.
        """
        parts = []
        if (predicted := self.expected.tokens_per_second_per_device) is not None:
            parts.append(f"{speed:,.0f} tokens/s a device, and {predicted:,.0f} were predicted")
        if peak_gib is not None:
            predicted_gib = self.expected.memory.allocated_bytes / GIB
            parts.append(f"{peak_gib:.1f} GiB of tensors on the fullest GPU, and {predicted_gib:.1f} were predicted")
        return "; ".join(parts)


class PackingEntry(TrainerCallback):
    """Puts the packing report into the log's history, and so into trainer_state.json, before the first step."""

    def __init__(self, report: PackingReport, mixture: Sequence[SourceReport]):
        self.report = report.to_dict()
        self.mixture = {"mixture": [source.to_dict() for source in mixture]} if mixture else {}

    def on_train_begin(self, args: SFTConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not any(entry.get("packing") == self.report for entry in state.log_history):  # a resumed run already has it
            state.log_history.append({"step": state.global_step, "packing": self.report, **self.mixture})


class StreamEntry(TrainerCallback):
    """Keeps the packing report of a stream, up to the last step, in the log's history.

    Args:
        read: returns what was read last, with the report up to there.
        mixture: returns what was read of each data set of a mixture.
    """

    def __init__(self, read: Callable[[], MicroBatch | None], mixture: Callable[[], Sequence[SourceReport]]):
        self.read, self.mixture = read, mixture

    def on_step_end(self, args: SFTConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        read, history = self.read(), state.log_history
        assert read is not None, "a step has read something"
        packing = read.report.to_dict() | {"passes": read.passes}
        entry = {"step": state.global_step, "packing": packing}
        if mixture := self.mixture():
            entry["mixture"] = [source.to_dict() for source in mixture]
        history[:] = [entry, *(e for e in history if "packing" not in e)]

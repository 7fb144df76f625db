"""One progress bar for a run, on rank 0, with the numbers of the last logged step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tqdm.auto import tqdm
from transformers import ProgressCallback, Trainer, TrainerControl, TrainerState, TrainingArguments

from longctx.launch.terminal import number


class ProgressBar(ProgressCallback):
    """Replaces the Trainer's bar: a step's numbers stand in the bar instead of a line above it.

    Other lines, such as an evaluation's, stand above the bar. Without a terminal there is no bar, and every line is
    printed.
    """

    _evaluated = 0
    """Batches so far in the current evaluation."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.current_step = state.global_step  # estimates the remaining time from this run's own steps
        if state.is_world_process_zero:
            self.training_bar = tqdm(
                total=state.max_steps, initial=state.global_step, unit="step", dynamic_ncols=True, disable=None
            )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        bar: Any = self.training_bar
        if bar is None or bar.disable or logs is None or "loss" not in logs:
            super().on_log(args, state, control, logs=logs, **kwargs)
        else:
            bar.set_postfix_str(describe(logs))

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        eval_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        bar: Any = self.training_bar
        if bar is None:
            super().on_prediction_step(args, state, control, eval_dataloader=eval_dataloader, **kwargs)
            return
        self._evaluated += 1
        bar.set_description_str(f"evaluation {self._evaluated}/{len(eval_dataloader)}")

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        super().on_evaluate(args, state, control, **kwargs)
        self._evaluated = 0
        bar: Any = self.training_bar
        if bar is not None:
            bar.set_description_str("")


def use_one_bar(trainer: Trainer) -> None:
    """Replace the Trainer's bar, which is missing in a notebook and with --disable_tqdm."""
    if trainer.pop_callback(ProgressCallback) is not None:
        trainer.add_callback(ProgressBar())


def describe(logs: Mapping[str, Any]) -> str:
    """Return a step's numbers, the most important first: a narrow terminal cuts off the last."""
    parts = [f"loss {logs['loss']:.4g}"]
    if "tokens_per_second" in logs:
        parts += [f"{number(logs['tokens_per_second'])} tok/s"]
        parts += [f"{number(logs['tokens_per_second_per_device'])} tok/s/device"]
    if logs.get("mfu") is not None:
        parts += [f"MFU {logs['mfu']:.0%}"]
    for name, where in (("peak_memory_gib_max", ""), ("peak_host_memory_gib_max", " host")):
        if logs.get(name) is not None:
            return ", ".join([*parts, f"{logs[name]:.1f} GiB{where}"])
    return ", ".join(parts)

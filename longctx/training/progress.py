"""The lines of a run's steps, evaluations and end, printed by rank 0."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rich.text import Text
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainerState

from longctx.launch.console import Line, row_width, say, show, show_for_now, show_row
from longctx.launch.terminal import number
from longctx.training.metrics import StepMetrics
from longctx.training.peak_memory import GIB

ROWS_PER_HEADER = 20
WIDE = 120
"""Characters of a row in a file or pipe."""
NEARLY_FULL, FULL = 0.9, 0.97
"""Shares of the memory above which the used memory is coloured."""


class Column(NamedTuple):
    """A column of the table of steps."""

    title: str
    short: str
    """The title in a terminal that is too narrow for the long titles."""
    width: int
    """Characters of the widest usual value."""
    write: Callable[[float], str] | None = None
    """Returns the cell of a value in the log; None for what is not there."""
    style: str = ""


COLUMNS = {
    "step": Column("step", "step", 4),
    "loss": Column("loss", "loss", 6, "{:#.4g}".format, "bold"),
    "aux_loss": Column("aux loss", "aux", 5, "{:#.3g}".format),
    "rewards/accuracies": Column("accuracy", "acc", 4, "{:.0%}".format),
    "rewards/margins": Column("margin", "marg", 5, "{:.2f}".format),
    "grad_norm": Column("grad norm", "grad", 5, lambda norm: number(norm) if norm >= 1000 else f"{norm:#.3g}"),
    "learning_rate": Column("learn. rate", "lr", 7, lambda rate: f"{rate:.1e}" if rate else "0"),
    "tokens_per_second": Column("tokens/s", "tok/s", 5, number, "green"),
    "tokens_per_second_per_device": Column("per device", "/dev", 5, number, "green"),
    "mfu": Column("MFU", "MFU", 4, "{:.0%}".format),
    "memory": Column("memory GiB", "mem GiB", 9),
    "attention_imbalance": Column("imbalance", "imbal", 5, "{:.2f}".format),
    "expert_load_imbalance": Column("expert load", "load", 5, "{:.2f}".format),
    "time_left": Column("time left", "left", 7, style="cyan"),
}
EXPENDABLE = "tokens_per_second_per_device"
"""The column that is left out where a terminal is too narrow for all."""


class StepTable:
    """A table whose rows are printed one at a time, with a header above every ROWS_PER_HEADER of them."""

    def __init__(self) -> None:
        self._rows = 0

    def show(self, cells: Mapping[str, str], styles: Mapping[str, str]) -> None:
        """Print a row. The first row after a header decides which columns there are."""
        if self._rows % ROWS_PER_HEADER == 0:
            widths = {name: max(COLUMNS[name].width, len(cells[name])) for name in COLUMNS if name in cells}
            titles = self._fit(widths)
            show_row(Text(self._gap.join(titles), "dim"))
        self._rows += 1
        row = Text(self._gap).join(
            Text(cells.get(name, "").rjust(self._widths[name]), styles.get(name, COLUMNS[name].style))
            for name in self._names
        )
        show_row(row)

    def _fit(self, values: Mapping[str, int]) -> list[str]:
        """Choose columns, titles and a gap that the terminal is wide enough for, given the values' widths."""
        room = row_width() or WIDE
        for is_long, gap, left_out in ((True, "  ", ""), (False, "  ", ""), (False, " ", ""), (False, " ", EXPENDABLE)):
            self._names = [name for name in values if name != left_out]
            titles = {name: COLUMNS[name].title if is_long else COLUMNS[name].short for name in self._names}
            self._widths, self._gap = {name: max(values[name], len(titles[name])) for name in self._names}, gap
            if sum(self._widths.values()) + len(gap) * (len(self._names) - 1) <= room:
                break
        return [titles[name].rjust(self._widths[name]) for name in self._names]


class StepLines(TrainerCallback):
    """Prints a row for each logged step, and a line for each other entry of the log.

    Args:
        metrics: those of the steps, whose last reading is printed.
        ranks_per_node: ranks that share a machine's memory.
    """

    def __init__(self, metrics: StepMetrics, ranks_per_node: int):
        self.metrics, self.ranks_per_node, self._table = metrics, ranks_per_node, StepTable()
        self._evaluated = 0
        """Batches so far in the current evaluation."""

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._first_step = state.global_step
        self._since = (state.global_step, time.monotonic())
        """The step and the time from which the remaining time is estimated."""

    def on_log(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        logs = kwargs.get("logs")
        if logs is None or not state.is_world_process_zero:
            return
        if "loss" in logs:
            self._show_step(logs, state)
        elif "train_runtime" in logs:
            steps, took = state.global_step - self._first_step, duration(logs["train_runtime"])
            show_row(Text())
            steps_taken = f"{steps:,} {'step' if steps == 1 else 'steps'} in {took}"
            over = f" over all {state.global_step:,} steps" if self._first_step else ""
            show([Line("trained", f"{steps_taken}, mean loss {logs['train_loss']:.4g}{over}")])
        elif "eval_loss" in logs:
            show([Line("evaluated", f"after step {state.global_step:,}: {describe_evaluation(logs)}")])
        else:
            say(", ".join(f"{name} {value:.4g}" for name, value in logs.items() if isinstance(value, int | float)))

    def _show_step(self, logs: Mapping[str, Any], state: TrainerState) -> None:
        known = {name: column.write for name, column in COLUMNS.items() if column.write and logs.get(name) is not None}
        cells = {name: write(logs[name]) for name, write in known.items()}
        peak, styles = self.metrics.peak_memory, {}
        if peak is not None:  # of the fullest GPU, or without GPUs of the fullest machine
            used, total = peak.of_fullest_node(self.ranks_per_node), min(peak.host_total)
            if peak.has_devices:
                used, total = max(peak.allocated), min(peak.device_total)
            cells["memory"] = f"{used / GIB:.1f}/{total / GIB:.1f}"
            styles["memory"] = "red" if used > FULL * total else "yellow" if used > NEARLY_FULL * total else ""
        cells["step"] = f"{state.global_step}/{state.max_steps}".rjust(2 * len(str(state.max_steps)) + 1)
        (step, since), now = self._since, time.monotonic()
        if step == self._first_step:  # the first steps are slower: kernels are compiled, and memory is taken
            self._since = (state.global_step, now)
        left = state.max_steps - state.global_step
        cells["time_left"] = duration((now - since) / max(state.global_step - step, 1) * left)
        self._table.show(cells, styles)

    def on_prediction_step(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._evaluated, batches = self._evaluated + 1, len(kwargs["eval_dataloader"])
        if self._evaluated < batches:
            show_for_now(f"evaluation: batch {self._evaluated} of {batches}")
        else:  # before its line is logged
            show_for_now("")
            self._evaluated = 0


def print_lines(trainer: Trainer, metrics: StepMetrics, ranks_per_node: int) -> None:
    """Replace the Trainer's progress bar or its printed dictionaries; a notebook keeps its own table."""
    for callback in (ProgressCallback, PrinterCallback):
        if trainer.pop_callback(callback) is not None:
            trainer.add_callback(StepLines(metrics, ranks_per_node))


def describe_evaluation(logs: Mapping[str, Any]) -> str:
    """Return an evaluation's numbers in one line: `loss 2.135, token accuracy 51.2%, in 12 s`."""
    parts = [f"loss {logs['eval_loss']:.4g}"]
    if "eval_mean_token_accuracy" in logs:
        parts.append(f"token accuracy {logs['eval_mean_token_accuracy']:.1%}")
    if "eval_rewards/margins" in logs:
        parts.append(f"accuracy {logs['eval_rewards/accuracies']:.1%}, margin {logs['eval_rewards/margins']:.4g}")
    if "eval_runtime" in logs:
        parts.append(f"in {duration(logs['eval_runtime'])}")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Return seconds as text: 8.3 -> 8 s, 754 -> 12:34, 5000 -> 1:23:20, 200000 -> 2d 07h."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02}h"
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"

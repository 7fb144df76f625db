"""`--profile`: a trace of a few steps on every rank, for Perfetto or chrome://tracing."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule
from transformers import TrainerCallback, TrainerControl, TrainerState
from trl import SFTConfig

logger = logging.getLogger(__name__)

FOLDER = "profile"
"""Folder in output_dir."""
BEFORE = 2
"""Number of steps before the trace: the first, and one in which the profiler warms up."""


class ProfileSteps(TrainerCallback):
    """Traces `num_steps` steps, from the third of this run on, to `profile/rank-R.json.gz`.

    Each is named `ProfilerStep#N`, from the end of one optimizer step to that of the next. Tracing only changes the
    run's speed.
    """

    def __init__(self, output_dir: str, num_steps: int, rank: int):
        self.path = Path(output_dir) / FOLDER / f"rank-{rank}.json.gz"
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()]
        self.profiler = profile(
            activities=activities,
            schedule=schedule(wait=BEFORE - 1, warmup=1, active=num_steps, repeat=1),
            on_trace_ready=self._write,
        )
        self.is_written = False

    def on_train_begin(self, args: SFTConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.profiler.start()

    def on_step_end(self, args: SFTConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not self.is_written:
            self.profiler.step()

    def on_train_end(self, args: SFTConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.is_written:
            return
        self.profiler.stop()  # writes what there is
        if not self.is_written:
            logger.warning("--profile True has traced nothing: the run had no step after its first %d.", BEFORE)

    def _write(self, profiler: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self.path))
        self.is_written = True

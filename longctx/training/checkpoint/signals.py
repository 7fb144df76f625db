"""Stopping on a scheduler's SIGTERM or SIGUSR1: finish the step, save, and exit with a code of its own."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState
from trl import SFTConfig

RESUMABLE = 75
"""Exit code of a run that was stopped by a signal and has saved: sysexits' EX_TEMPFAIL."""

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopOnSignal(TrainerCallback):
    """Saves and stops after the step in which any rank gets one of SIGNALS. All ranks agree on the step."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stopped_by: signal.Signals | None = None
        self._received = 0
        self._before: dict[int, Any] = {}

    def on_train_begin(self, args: SFTConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}

    def on_step_end(self, args: SFTConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        received = self._received
        if dist.is_initialized():
            agreed = torch.tensor(received, device=self.device)
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
            received = int(agreed)
        if received and self.stopped_by is None:
            self.stopped_by = signal.Signals(received)
            control.should_save = control.should_training_stop = True

    def restore_handlers(self) -> None:
        """Restore the signal handlers from before the training, which may have failed."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number

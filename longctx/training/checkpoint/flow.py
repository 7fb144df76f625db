"""When a run logs, evaluates and saves."""

from __future__ import annotations

from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import DefaultFlowCallback
from trl import SFTConfig


class EpochEndsWithItsStep(DefaultFlowCallback):
    """Log, evaluate and save at the end of an epoch as part of the epoch's last step.

    The Trainer does so after that step, and thus after the checkpoint that `--save_steps` asks for there. A run that
    resumed from this checkpoint would lack the epoch's evaluation and its entry in the log.
    """

    def on_step_end(self, args: SFTConfig, state: TrainerState, control: TrainerControl, **kwargs) -> TrainerControl:
        control = super().on_step_end(args, state, control, **kwargs)
        assert state.epoch is not None, "set before the end of a step"
        if state.epoch.is_integer() or state.global_step >= state.max_steps:
            control = super().on_epoch_end(args, state, control, **kwargs)
        return control

    def on_epoch_end(self, args: SFTConfig, state: TrainerState, control: TrainerControl, **kwargs) -> TrainerControl:
        return control

"""Callbacks: the log, the schedule, `--profile`, and stopping on Ctrl-C or a scheduler's SIGTERM or SIGUSR1.

A run that is stopped finishes its step, saves, and exits with the code `RESUMABLE`.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import DefaultFlowCallback
from trl import SFTConfig

from longctx.data import SourceReport
from longctx.forecast.cost import Cost
from longctx.forecast.learned import learn
from longctx.launch.console import say
from longctx.launch.terminal import INTERRUPTED
from longctx.packing import PackingReport
from longctx.ranks.agreement import host_group
from longctx.settings.flags import STEPS_BEFORE_PROFILE
from longctx.training.data_order import StepSampler, StreamRead
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
    """Prints once, after the first steps on GPUs, what a step took beside what was predicted.

    A line says if memory was nearly full. The forecast of later runs on this kind of GPU learns from it.

    Args:
        expected: what was predicted.
        reserved: returns the bytes that the allocator of each rank has reserved at most.
        kernel: of attention, as the prediction assumed; empty where nothing is to be learned.
    """

    STEP = 3
    """The step after which it does; the first ones compile kernels and fill caches."""
    NEARLY = 0.97
    """The part of a device's memory from which it is said to be nearly full."""

    def __init__(self, expected: Cost, reserved: Callable[[], Sequence[int]] = tuple, kernel: str = ""):
        self.expected, self.reserved, self.kernel = expected, reserved, kernel
        self.is_done = False

    def on_log(
        self, args: SFTConfig, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **kwargs: Any
    ) -> None:
        if self.is_done or "peak_memory_gib_max" not in logs or state.global_step < min(self.STEP, state.max_steps):
            return
        self.is_done, said = True, "measured"
        speed, peak = logs["tokens_per_second_per_device"], logs["peak_memory_gib_max"]
        if (predicted := self.expected.known_speed) is not None:
            said += f" {speed:,.0f} tokens/s a device, and {predicted:,.0f} were predicted;"
            if self.kernel:
                learn(self.expected, self.kernel, speed=speed, allocated_bytes=peak * GIB)
        said += f" {peak:.1f} GiB of tensors on the fullest GPU, and {self.expected.allocated_bytes / GIB:.1f}"
        say(f"{said} were predicted")
        total = self.expected.machine.device_bytes / GIB
        reserved = max(self.reserved(), default=0) / GIB
        if reserved > self.NEARLY * total > 0:
            say(
                f"memory is nearly full: {reserved:.1f} of {total:.1f} GiB of the fullest GPU are reserved. "
                "--memory longest or a higher --sp leaves more room"
            )


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

    def __init__(self, read: Callable[[], StreamRead | None], mixture: Callable[[], Sequence[SourceReport]]):
        self.read, self.mixture = read, mixture

    def on_step_end(self, args: SFTConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        read, history = self.read(), state.log_history
        assert read is not None, "a step has read something"
        packing = read.report.to_dict() | {"passes": read.passes}
        entry = {"step": state.global_step, "packing": packing}
        if mixture := self.mixture():
            entry["mixture"] = [source.to_dict() for source in mixture]
        history[:] = [entry, *(e for e in history if "packing" not in e)]


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


RESUMABLE = 75
"""Exit code of a run that was stopped by a signal and has saved: sysexits' EX_TEMPFAIL."""

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


TWICE_SECONDS = 0.5
"""A SIGINT that comes again sooner is the same one: a terminal sends it to the whole group of processes, a launcher
passes it on, and a loader's worker that is just being forked hands its own to this process."""


class StopOnSignal(TrainerCallback):
    """Saves and stops after the step in which any rank gets one of SIGNALS. All ranks agree on the step.

    A second SIGINT ends the process at once. A thread answers signals, because the main thread may spend minutes in a
    kernel or a collective before it returns to Python.

    Args:
        prints: whether this rank prints that a signal has come.
    """

    def __init__(self, *, prints: bool):
        self.prints = prints
        self.stopped_by: signal.Signals | None = None
        self.received = 0
        """The number of the signal that this rank has received; 0 for none."""
        self._step, self._step_seconds, self._since = 0, 0.0, 0.0
        self._before: dict[int, Any] = {}

    def on_train_begin(self, args: SFTConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._step, self._since = state.global_step, time.monotonic()
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer)
        threading.Thread(target=self._answer, args=(reader,), name="signals", daemon=True).start()
        self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}

    def on_step_end(self, args: SFTConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        now = time.monotonic()
        self._step, self._step_seconds, self._since = state.global_step, now - self._since, now
        received = self.received
        if dist.is_initialized():
            agreed = torch.tensor(received)
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=host_group(dist.group.WORLD))  # waits for no device
            received = int(agreed)
        if received and self.stopped_by is None:
            self.stopped_by = signal.Signals(received)
            control.should_save = control.should_training_stop = True

    def restore_handlers(self) -> None:
        """Restore the signal handlers from before the training, which may have failed."""
        if not self._before:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._writer)  # ends the thread
        self._before = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number

    def _answer(self, reader: int) -> None:
        """Print at the first of SIGNALS what happens now, and end at a second SIGINT."""
        came: dict[int, float] = {}
        with open(reader, "rb", buffering=0) as signals:
            while byte := signals.read(1):
                number, now = byte[0], time.monotonic()
                if number == signal.SIGINT and now - came.get(number, now) > TWICE_SECONDS:
                    os._exit(INTERRUPTED)
                if number in SIGNALS and not came and self.prints:
                    say(self._describe_end(signal.Signals(number)))
                came.setdefault(number, now)

    def _describe_end(self, received: signal.Signals) -> str:
        left = max(self._step_seconds - (time.monotonic() - self._since), 0)
        estimate = f", which takes about {left:.0f} s more," if self._step_seconds else ""
        again = " Ctrl-C again ends the run at once, without a checkpoint." if received == signal.SIGINT else ""
        return f"{received.name}: the run finishes step {self._step + 1}{estimate} and saves a checkpoint.{again}"


logger = logging.getLogger(__name__)

PROFILE_FOLDER = "profile"
"""Folder in output_dir with the traces of `--profile`, for Perfetto or chrome://tracing."""


class ProfileSteps(TrainerCallback):
    """Traces `num_steps` steps, from the third of this run on, to `profile/rank-R.json.gz`.

    Each is named `ProfilerStep#N`, from the end of one optimizer step to that of the next. Tracing only changes the
    run's speed.
    """

    def __init__(self, output_dir: str, num_steps: int, rank: int):
        self.path = Path(output_dir) / PROFILE_FOLDER / f"rank-{rank}.json.gz"
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()]
        self.profiler = profile(
            activities=activities,
            schedule=schedule(wait=STEPS_BEFORE_PROFILE - 1, warmup=1, active=num_steps, repeat=1),
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
            logger.warning(
                "--profile True has traced nothing: the run had no step after its first %d.", STEPS_BEFORE_PROFILE
            )

    def _write(self, profiler: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self.path))
        self.is_written = True

"""The optimizer steps of a run and their learning rates, worked out before weights load.

A run that would train nothing is refused here: it would end with exit code 0 and save the model that it started from.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from transformers import get_scheduler
from trl import SFTConfig

from longctx.data import DataError
from longctx.packing import PackedDataset, PackedStream

logger = logging.getLogger(__name__)


def check_training_steps(args: SFTConfig, rows: PackedDataset | PackedStream, dp: int) -> None:
    """Check that there are sequences for at least one optimizer step, and a learning rate for each step.

    A stream is only read with --dataloader_drop_last, and only its first step.

    Args:
        rows: the sequences to train on.
        dp: the number of sequence groups, each of which reads sequences of its own.

    Raises:
        DataError: if no step is full and --dataloader_drop_last leaves out those that are not.
        ValueError: see `check_learning_rates`.
    """
    size = args.per_device_train_batch_size * dp * args.gradient_accumulation_steps
    num_sequences = _count(rows, at_most=size) if args.dataloader_drop_last else None
    if num_sequences is not None and num_sequences < size:
        raise DataError(
            f"--dataloader_drop_last True: the training data makes {num_sequences} sequences, and an optimizer step "
            f"takes {size} = per_device_train_batch_size {args.per_device_train_batch_size} × {dp} data-parallel × "
            f"gradient_accumulation_steps {args.gradient_accumulation_steps}. No step would be full, and nothing would "
            "be trained. Leave --dataloader_drop_last out, take fewer sequences a step, or add data."
        )
    if args.max_steps <= 0 and isinstance(rows, PackedDataset):
        check_learning_rates(args, steps_of_run(args, rows, size))


def steps_of_run(args: SFTConfig, rows: PackedDataset | PackedStream, size: int) -> int:
    """Return the optimizer steps of a whole run: --max_steps, which streams need, or those of its epochs.

    Args:
        size: sequences of a step.
    """
    if args.max_steps > 0 or not isinstance(rows, PackedDataset):
        return args.max_steps
    return steps_of_epochs(len(rows), size, epochs=args.num_train_epochs, drop_last=args.dataloader_drop_last)


def steps_of_epochs(num_sequences: int, size: int, *, epochs: float, drop_last: bool) -> int:
    """Return the optimizer steps of epochs of so many sequences, of which a step takes `size`."""
    return math.ceil(epochs * (num_sequences // size if drop_last else -(-num_sequences // size)))


def _count(rows: PackedDataset | PackedStream, *, at_most: int) -> int:
    if isinstance(rows, PackedDataset):
        return len(rows)
    options: Any = {"overlong": rows.overlong, "strategy": rows.strategy, "columns": rows.columns}
    lanes = PackedStream(rows.source, rows.capacity, look_ahead=1, **options).lanes(at_most, range(at_most))
    return sum(lane.take() is not None for lane in lanes.values())


def check_learning_rates(args: SFTConfig, num_steps: int) -> None:
    """Check that the schedule can be made and changes the weights in at least one of the run's steps.

    A run whose learning rates stay below --learning_rate is not refused; a warning on rank 0 says so.

    Raises:
        ValueError: for settings that the schedule does not take, and if the learning rate is 0 in every step although
            --learning_rate is not.
    """
    name, warmup = args.lr_scheduler_type.value, args.get_warmup_steps(num_steps)
    if args.lr_scheduler_kwargs and name in _WITHOUT_SETTINGS:
        raise ValueError(
            f"--lr_scheduler_kwargs {args.lr_scheduler_kwargs} has no effect with --lr_scheduler_type {name}, which "
            "has no settings. Leave it out, or name another schedule."
        )
    try:
        rate = rate_of_step(args, num_steps)
        trains = any(rate(step) for step in range(num_steps))
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ValueError(
            f"--lr_scheduler_type {name} with --learning_rate {args.learning_rate:g} and --lr_scheduler_kwargs "
            f"{args.lr_scheduler_kwargs or None}: {error}. Correct --lr_scheduler_kwargs."
        ) from error
    if args.learning_rate and not trains:
        raise ValueError(
            f"--lr_scheduler_type {name} with {num_steps} steps and --warmup_steps {args.warmup_steps:g}: the learning "
            "rate is 0 in every step, and nothing would be trained. Lower --warmup_steps, or raise --max_steps."
        )
    if args.process_index != 0:
        return
    if not args.learning_rate:
        logger.warning("--learning_rate 0: the weights stay as they are, and the model is saved unchanged.")
    elif warmup and name == "constant":
        logger.warning("--warmup_steps has no effect with --lr_scheduler_type constant. Use constant_with_warmup.")
    elif num_steps <= warmup:
        logger.warning(
            "--warmup_steps %g with %d steps: the run ends while the learning rate rises. It reaches %g, and "
            "--learning_rate is %g.",
            args.warmup_steps,
            num_steps,
            rate(num_steps - 1),
            args.learning_rate,
        )


_WITHOUT_SETTINGS = ("constant", "constant_with_warmup")


def rate_of_step(args: SFTConfig, num_steps: int) -> Callable[[int], float]:
    """Return the function from a step, counted from 0, to its learning rate in a run of `num_steps` by these flags.

    Raises:
        ArithmeticError, TypeError, ValueError: for settings that transformers' schedule rejects.
    """
    scheduler: Any = get_scheduler(
        args.lr_scheduler_type,
        optimizer=torch.optim.SGD([torch.zeros(())], lr=args.learning_rate),
        num_warmup_steps=args.get_warmup_steps(num_steps),
        num_training_steps=num_steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )
    (base,), (factor,) = scheduler.base_lrs, scheduler.lr_lambdas  # of the only parameter group
    return lambda step: base * factor(step)

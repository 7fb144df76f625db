"""Report a failure once: by the rank that knows the cause, and by no rank that fails because of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState
from trl import SFTConfig

from longctx.launch.terminal import tell
from longctx.ranks.watchdog import (
    FAILED,
    LEAVE_SECONDS,
    Failure,
    Watchdog,
    current_watchdog,
    describe_positions,
    limit_waiting,
    position_of,
)

OWN_RUN = "longctx-"
"""Prefix of the ids of runs that longctx starts. It sees how their processes end, so ranks need not report it."""

_OF_OTHERS = (
    *("gloo", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL error"),
    "is killed by signal: Terminated",  # of a data loader's worker: launchers stop workers together with their rank
)
"""Parts of messages of errors that the end of another rank causes."""


@contextmanager
def failures_told(how_to_resume: Callable[[], str], timeout: float) -> Iterator[None]:
    """Let an error through on the rank that meets it first; ranks that fail because of it exit without printing it.

    Args:
        how_to_resume: returns how to resume after a failure.
        timeout: seconds that ranks wait for each other.

    Raises:
        SystemExit: in place of an error whose cause is another rank's failure or absence.
    """
    try:
        yield
    except Exception as error:
        watchdog = current_watchdog()
        if watchdog is None:
            raise
        _ignore_sigterm()
        watchdog.tell = None  # this thread tells
        resume = how_to_resume()
        failure = _of_another(watchdog, error, timeout, resume) if _is_consequence(error) else None
        if failure is None:
            text = f"{watchdog.name(watchdog.rank)} stopped with {type(error).__name__}: {_first_line(error)}. {resume}"
            failure = watchdog.fail("raised", text)
            if failure.teller == watchdog.rank:
                tell(failure.message, prints=False)
                error.add_note(f"longctx: error: {failure.message}")
                raise
        tell_failure(failure, watchdog.rank, resume)
        raise SystemExit(FAILED) from None


def tell_failure(failure: Failure, rank: int, resume: str) -> None:
    """Print why the run fails if this rank found it out, and write it down for the launcher.

    Args:
        rank: this rank.
        resume: how to resume.
    """
    mine = failure.teller == rank
    message = f"{died(failure.message)} {resume}" if failure.kind == "died" else failure.message
    is_seen = failure.kind == "died" and os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(OWN_RUN)
    # Launchers take the earliest failure, in whole seconds, for the cause.
    tell(message if mine else f"another rank failed first: {message}", prints=mine and not is_seen, later=2)


def reason(error: BaseException) -> str:
    """Return why a run fails, as far as this rank knows: another rank's failure, or its own error.

    One of several ranks ignores SIGTERM from here on; see `_ignore_sigterm`.
    """
    watchdog = current_watchdog()
    if watchdog is not None:
        _ignore_sigterm()
        is_told = _is_consequence(error) and not _has_timed_out(error)
        if is_told and (failure := watchdog.wait_for_failure(LEAVE_SECONDS)):
            return failure.message
    return f"{type(error).__name__}: {_first_line(error)}"


def _ignore_sigterm() -> None:
    """Ignore SIGTERM until this rank ends, so that it can report why the run has failed.

    Launchers send SIGTERM as soon as another rank has ended, and SIGKILL 30 s later.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class FollowSteps(TrainerCallback):
    """Tells the watchdog the current step, and gives --ddp_timeout to the engine's process groups."""

    def on_train_begin(self, args: SFTConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if current_watchdog() is not None:
            limit_waiting(timedelta(seconds=args.ddp_timeout))

    def on_step_begin(self, args: SFTConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if watchdog := current_watchdog():
            watchdog.step = state.global_step + 1


_LIKELY = {
    "SIGKILL": "Most often that is the kernel's out-of-memory killer (dmesg says so): give the run more host memory, "
    "or fewer processes and data loader workers per node.",
    "SIGABRT": "So ends a rank that has waited for others for --ddp_timeout in NCCL. Where every rank was is "
    "written above, before torch's report.",
}


def died(rank: str, by: str = "") -> str:
    """Return a message on a rank that has ended without an error of its own.

    Args:
        by: name of the signal, if known.
    """
    how = f"was killed by {by}" if by else "has died without an error of its own"
    return f"{rank} {how}. {_LIKELY.get(by or 'SIGKILL', 'Its last lines, above, may say why.')}"


def _is_consequence(error: BaseException | None) -> bool:
    """Return whether another rank's end, or a launcher that stops all ranks, has caused the error."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # an error that is raised again can be among its own causes
        seen.add(id(error))
        if isinstance(error, dist.DistError):
            return True
        if isinstance(error, RuntimeError) and any(part in str(error) for part in _OF_OTHERS):
            return True
        error = error.__cause__ or error.__context__
    return False


def _has_timed_out(error: BaseException) -> bool:
    return "timed out" in str(error).lower()


def _of_another(watchdog: Watchdog, error: Exception, timeout: float, resume: str) -> Failure | None:
    """Return why other ranks could not be reached, or None if unknown."""
    here = position_of(error, watchdog.step)
    timed_out = _has_timed_out(error)
    if not timed_out and (failure := watchdog.wait_for_failure(LEAVE_SECONDS)):
        return failure
    answers = watchdog.ask_all()
    if watchdog.failure is not None:
        return watchdog.failure
    if not timed_out and None not in answers.values():
        return None
    lines = describe_positions(watchdog, here, answers)
    waited = f"after {timeout:.0f} s (--ddp_timeout)" if timed_out else f"for {_first_line(error)}"
    head = f"the run ends {waited}: {lines[0]}"
    return watchdog.fail("waited", "\n".join([head, *lines[1:], f"  {resume}"]))


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")

"""Report a failure once: by the rank that knows the cause, and by no rank that fails because of it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from transformers import TrainerCallback, TrainerControl, TrainerState
from trl import SFTConfig

from longctx.launch.spawn import SPAWNED, died
from longctx.launch.terminal import tell
from longctx.ranks import FAILED, hang
from longctx.ranks.peers import LEAVE_SECONDS, Failure, Peers, current_peers

_OF_OTHERS = (
    *("gloo", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL error"),
    "is killed by signal: Terminated",  # of a data loader's worker: launchers stop workers together with their rank
)
"""Parts of messages of errors that the end of another rank causes."""


@contextmanager
def failures_told(how_to_resume: Callable[[], str], timeout: float, output_dir: Path) -> Iterator[None]:
    """Let an error through on the rank that meets it first; ranks that fail because of it exit without printing it.

    Args:
        how_to_resume: returns how to resume after a failure.
        timeout: seconds that ranks wait for each other.
        output_dir: of the run.

    Raises:
        SystemExit: in place of an error whose cause is another rank's failure or absence.
    """
    try:
        yield
    except Exception as error:
        peers = current_peers()
        if peers is None:
            raise
        _stay()
        resume = how_to_resume()
        failure = _of_another(peers, error)
        if failure is None and _has_timed_out(error):
            first, *places = hang.describe_hang(peers, output_dir / hang.HANG_FOLDER)
            head = f"the run ends after {timeout:.0f} s (--ddp_timeout); {first}"
            failure = peers.fail("waited", "\n".join([head, *places, f"  {resume}"]))
        if failure is None:
            text = f"{peers.names([peers.rank])} stopped with {type(error).__name__}: {_first_line(error)}. {resume}"
            failure = peers.fail("raised", text)
            if failure.message == text:
                error.add_note(f"longctx: error: {text}")
                get_error_handler().record_exception(error)  # with its traceback, for the launcher's closing report
                peers.leave()
                raise
        mine, is_own = failure.teller == peers.rank, SPAWNED in os.environ
        message = f"{died(failure.message)} {resume}" if failure.kind == "died" else failure.message
        prints = mine and not (failure.kind == "died" and is_own)  # our launcher sees which process has died
        # Launchers take the earliest failure, in whole seconds, for the cause.
        tell(message if mine else f"another rank failed first: {message}", prints=prints, later=2)
        peers.leave()
        raise SystemExit(FAILED) from None


def reason(error: BaseException) -> str:
    """Return why a run fails, as far as this rank knows: another rank's failure, or its own error.

    One of several ranks ignores SIGTERM from here on; see `_stay`.
    """
    peers = current_peers()
    if peers is not None:
        _stay()
        if failure := _of_another(peers, error):
            return failure.message
    return f"{type(error).__name__}: {_first_line(error)}"


def _of_another(peers: Peers, error: BaseException) -> Failure | None:
    """Return why another rank fails, if that has caused the error."""
    if not _is_consequence(error):
        return None
    return peers.wait_for_failure(1 if _has_timed_out(error) else LEAVE_SECONDS)


def _stay() -> None:
    """Let nothing but its main thread end this rank, so that it can report why the run has failed.

    Launchers send SIGTERM as soon as another rank has ended, and SIGKILL 30 s later. They end data loader workers, too,
    for which torch's handler of SIGCHLD would raise an error amid the report.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    hang.WATCH.stop()


class FollowSteps(TrainerCallback):
    """Gives --ddp_timeout to the engine's process groups, and says that this rank goes on."""

    def on_train_begin(self, args: SFTConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        hang.limit_waiting(args.ddp_timeout, Path(args.output_dir))

    def on_step_begin(self, args: SFTConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        hang.WATCH.go_on()

    on_substep_end = on_step_end = on_prediction_step = on_evaluate = on_save = on_step_begin


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
    """Return whether a rank did not come in time; the kernel's time-out of a connection is the end of a machine."""
    return re.search(r"(?<!connection )timed out|application timeout", str(error).lower()) is not None


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")

"""The output folder of a run: what state it is in, what a run may do there, and its checkpoints by age.

`run.json` names the run that writes to the folder. Its process and the time of its last step show whether it is alive.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import math
import os
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from longctx.model.card import CARD_FILE, own_card
from longctx.training.checkpoint.files import (
    CHECKPOINT,
    LEFT_BEHIND,
    MANIFEST,
    PARTIAL,
    REPLACED,
    CheckpointError,
    checkpoint_name,
    read_manifest,
    remove,
    step_of,
)
from longctx.training.exactness import EXACTNESS_FILE
from longctx.untrusted.files import written_whole

logger = logging.getLogger(__name__)

RUN_FILE = "run.json"
DEFAULT_NAME = "longctx-output"
"""Folder of a run that names none; the second one is longctx-output-2."""

EVENTS_FOLDER = "runs"
"""TensorBoard's folder in output_dir, unless TENSORBOARD_LOGGING_DIR names another."""
MODEL_FILES = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "adapter_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.model"),
)
"""Files of a saved model and its tokenizer."""
_RUN_FILES = (
    *("checkpoint-*", "model.partial", "trainer_state.json", "training_args.bin", "run_report.html"),
    *("nonfinite.jsonl", "completions.jsonl", EVENTS_FOLDER, "profile", "hang", EXACTNESS_FILE, CARD_FILE),
)
"""What else a run writes."""
_REPORTS = {EXACTNESS_FILE, CARD_FILE, "run_report.html", "completions.jsonl", EVENTS_FOLDER, "hang"}
"""If a folder holds nothing else but run.json, its run was refused, or ended before its first checkpoint."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What run.json says of the last run in its folder."""

    id: str
    started: str
    launch: str
    """Identifies a launch, with all of its attempts: SLURM's job, torchrun's --rdzv_id, or the launcher's process."""
    host: str = ""
    pid: int | None = None
    """Process of the rank that writes; None once the run has ended by itself."""
    process_started: float = 0.0
    """Seconds since the epoch."""
    finished: int | None = None
    """Steps of a run that was trained to its end."""
    began: str
    """When the run began, which its checkpoints say as well. `started` is the time of the last attempt."""
    choice: dict[str, Any] = field(default_factory=dict)
    """What auto chose, which checkpoints say as well."""

    @classmethod
    def read(cls, folder: Path) -> RunRecord | None:
        """Return the record of a folder, or None.

        Raises:
            ValueError: if the file is damaged.
        """
        try:
            values = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
            datetime.fromisoformat(values["began"])
            values = {"choice": {}, **values}  # which older releases did not write
            return cls(**{name: values[name] for name in cls.__dataclass_fields__})
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{folder / RUN_FILE} is damaged: {error}. Remove it.") from None

    def write(self, folder: Path) -> None:
        """Write run.json atomically."""
        with written_whole(folder / RUN_FILE) as unfinished:
            unfinished.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    def is_alive(self, folder: Path, timeout: float) -> bool:
        """Return whether another process still writes there.

        Args:
            timeout: seconds after its last step from which a process of another host counts as dead.
        """
        if self.pid is None or (self.host, self.pid) == (socket.gethostname(), os.getpid()):
            return False
        if self.host != socket.gethostname():
            return time.time() - (folder / RUN_FILE).stat().st_mtime < timeout
        with suppress(psutil.Error):
            process = psutil.Process(self.pid)
            is_same = abs(process.create_time() - self.process_started) < 1
            # A zombie is a killed process whose parent has not waited for it.
            return is_same and process.status() != psutil.STATUS_ZOMBIE
        return False


def launch_of(env: Mapping[str, str]) -> str:
    """Return what the attempts of one launch have in common."""
    if "SLURM_JOB_ID" in env:
        return f"slurm {env['SLURM_JOB_ID']}"
    run_id = env.get("TORCHELASTIC_RUN_ID", "none")
    return run_id if run_id != "none" else f"{socket.gethostname()}:{os.getppid()}"


def is_restarted(folder: Path, env: Mapping[str, str]) -> bool:
    """Return whether torchrun or SLURM has started the run in this folder anew."""
    attempts = (int(env.get(name) or 0) for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    if not any(attempts):
        return False
    record = RunRecord.read(folder)
    return record is not None and record.launch == launch_of(env)


def default_folder(*, resuming: bool) -> Path:
    """Return the folder of a run that names none: the next free name, or the last that is used for one that resumes."""
    last = folder = Path(DEFAULT_NAME)
    for number in count(2):
        if not _written(folder) and RunRecord.read(folder) is None:
            break
        last, folder = folder, Path(f"{DEFAULT_NAME}-{number}")
    return last if resuming else folder


def _written(folder: Path) -> list[str]:
    """Return the names in a folder that a run writes. Mere reports of a run without a checkpoint do not count."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    found = [name for name in names if any(fnmatch.fnmatchcase(name, kind) for kind in (*MODEL_FILES, *_RUN_FILES))]
    if CARD_FILE in found and own_card(folder / CARD_FILE) is None:
        found.remove(CARD_FILE)
    return [] if set(found) <= _REPORTS else found


def check_output(
    folder: Path, *, asked: str | None, overwrite: bool, timeout: float | None, reads: Iterable[tuple[str, str]]
) -> None:
    """Check, before processes start, that a run may write to its output folder. Nothing is changed.

    Args:
        asked: --resume_from_checkpoint.
        overwrite: --overwrite_output_dir.
        timeout: see `RunRecord.is_alive`. With None, the folder is not checked for a living run: ranks other than the
            first may be on another host than that of run.json, and could not tell.
        reads: flags and the files or folders that they name.

    Raises:
        ValueError: with the state of the folder, and the flags that a run can be started with.
    """
    _check_writable(folder)
    for flag, path in reads:
        _check_apart(folder, flag, Path(path))
    if timeout is not None:
        _check_free(folder, timeout)
    if asked is not None and overwrite:
        raise ValueError(
            f"--overwrite_output_dir True deletes the run that --resume_from_checkpoint {asked} goes on from. Leave "
            "one of them out."
        )
    if asked is not None:
        checkpoint_of(asked, folder)
    goes_on_here = asked is not None and (not is_path(asked) or Path(asked).absolute().parent == folder.absolute())
    if (written := _written(folder)) and not (overwrite or goes_on_here):
        held = ", ".join(written[:4]) + (f" and {len(written) - 4} more" if len(written) > 4 else "")
        raise ValueError(
            f"--output_dir {folder} holds an earlier run ({held}). Go on from it with --resume_from_checkpoint auto, "
            "delete it with --overwrite_output_dir True, or name another folder."
        )


def begin(
    folder: Path,
    *,
    overwrite: bool,
    timeout: float,
    env: Mapping[str, str],
    began: datetime | None = None,
    choice: Mapping[str, Any] | None = None,
) -> list[str]:
    """Take the folder: delete what --overwrite_output_dir allows and half-written checkpoints, and write run.json.

    Return the names of what was deleted of an earlier run.

    Args:
        began: when the run began, if it goes on; None means now.
        choice: what auto chose.

    Raises:
        ValueError: if another run has taken it since `check_output`.
    """
    if not is_restarted(folder, env):
        _check_free(folder, timeout)
    deleted = _written(folder) if overwrite else []
    for path in (*(folder / name for name in deleted), *folder.glob(f"checkpoint-*{PARTIAL}")):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    before = None if overwrite else RunRecord.read(folder)
    RunRecord(
        id=before.id if before else uuid.uuid4().hex[:16],
        started=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        launch=launch_of(env),
        host=socket.gethostname(),
        pid=os.getpid(),
        process_started=psutil.Process().create_time(),
        finished=before.finished if before else None,
        began=(began or datetime.now()).isoformat(),
        choice=dict(choice or {}),
    ).write(folder)
    return deleted


def stamp(folder: Path) -> None:
    """Record that the run is alive, by the time at which run.json was changed."""
    with suppress(OSError):
        os.utime(folder / RUN_FILE)


def end(folder: Path, *, finished: int | None = None) -> None:
    """Record that the run has ended, and its number of steps if it was trained to its end."""
    if (record := RunRecord.read(folder)) is not None:
        finished = record.finished if finished is None else finished
        replace(record, pid=None, finished=finished).write(folder)


def _check_free(folder: Path, timeout: float) -> None:
    record = RunRecord.read(folder)
    if record is not None and record.is_alive(folder, timeout):
        raise ValueError(
            f"--output_dir {folder}: another run writes there (process {record.pid} on {record.host}, started "
            f"{record.started}). Name another folder, or wait until it has ended; a run that was killed with its host "
            f"counts as ended {timeout:g} s (--ddp_timeout) after its last step. If you know that it has died, set a "
            "lower --ddp_timeout."
        )


def _check_writable(folder: Path) -> None:
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise ValueError(f"--output_dir {folder}: {there} is not a folder. Choose another, or remove it.")
    try:
        tempfile.TemporaryFile(dir=there).close()  # permissions do not show a read-only file system
    except OSError as error:
        raise ValueError(
            f"--output_dir {folder}: {there} cannot be written to: {error.strerror}. Choose another folder."
        ) from error


def _check_apart(folder: Path, flag: str, read: Path) -> None:
    """Check that a run does not write where it reads; links are followed."""
    if not os.path.lexists(read):
        return  # a name on the hub, or a pattern
    output, read = folder.resolve(), read.resolve()
    relations = {"is": output == read, "contains": output in read.parents, "lies in": read in output.parents}
    relation = next((name for name, holds in relations.items() if holds), None)
    if relation is not None:
        raise ValueError(
            f"--output_dir {folder} {relation} what --{flag} {read} names, and the run would write over what it reads. "
            "Name another folder."
        )


# Checkpoints


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, newest first: by their serial, which restarts count on, and their step."""
    return sorted((path for path in _named(folder) if (path / MANIFEST).is_file()), key=_age, reverse=True)


def _named(folder: Path) -> list[Path]:
    """Return what has the name of a checkpoint, complete or not."""
    return [path for path in folder.glob("checkpoint-*") if CHECKPOINT.fullmatch(path.name)]


def next_serial(folder: Path) -> int:
    """Return the serial of the next checkpoint in an output folder."""
    return 1 + int(max((serial for path in checkpoints(folder) if (serial := _serial(path)) < math.inf), default=0))


def _serial(folder: Path) -> float:
    """Return the serial of a checkpoint; a damaged one counts as the newest, so that none is taken in its place."""
    try:
        return read_manifest(folder).serial
    except CheckpointError:
        return math.inf


def _age(path: Path) -> tuple[float, int, bool]:
    return _serial(path), step_of(path), path.suffix != REPLACED


def checkpoint_of(asked: str, folder: Path) -> Path | None:
    """Return the checkpoint that --resume_from_checkpoint names: a path, or the newest for `True` and `auto`.

    Raises:
        CheckpointError: if there is none, or its manifest is damaged; `auto` returns None in a folder that no run has
            written to.
    """
    complete = checkpoints(folder)
    if is_path(asked):
        if not Path(asked).is_dir():
            raise CheckpointError(f"--resume_from_checkpoint {asked} is not a folder. Give one, or auto.")
        complete = [Path(asked)]
    else:
        others = [path for path in _named(folder) if path not in complete]
        newest = max((*complete[:1], *others), key=lambda path: path.stat().st_mtime, default=None)
        if newest is not None and newest in others:
            raise CheckpointError(
                f"--resume_from_checkpoint {asked}: {newest}, the newest checkpoint, has no {MANIFEST}: it holds "
                "weights alone (--save_only_model), or is another trainer's. To train on from its weights, use "
                f"--model_name_or_path {newest} and another --output_dir."
            )
    if complete:
        with older_named(complete[0]):
            read_manifest(complete[0])
        return complete[0]
    if asked != "auto":
        raise CheckpointError(
            f"--resume_from_checkpoint {asked}: {folder} has no complete checkpoint. Leave the flag out, or "
            "give auto, which then starts from the beginning."
        )
    if models := [name for name in _written(folder) if name.endswith(".safetensors")]:
        record = RunRecord.read(folder)
        if record is None or record.finished is None:
            raise CheckpointError(
                f"--resume_from_checkpoint auto: {folder} holds a model ({models[0]}) and no checkpoint to go on from. "
                "Delete it with --overwrite_output_dir True, or name another --output_dir."
            )
    return None


def is_path(asked: str) -> bool:
    """Return whether --resume_from_checkpoint names a checkpoint, and not the newest."""
    return asked not in ("auto", "True", "true")


@contextmanager
def older_named(folder: Path) -> Iterator[None]:
    """Add the next older checkpoint to an error about this one, since no other is taken in its place."""
    try:
        yield
    except CheckpointError as error:
        complete = checkpoints(folder.parent)
        older = complete[complete.index(folder) + 1 :] if folder in complete else []
        if not older:
            raise
        raise CheckpointError(f"{error} The one before it has the path {older[0]}.") from error


def best_beside(folder: Path, step: int | None) -> Path | None:
    """Return the checkpoint of the best model, which was of `step`, if it is beside `folder` and of the same run."""
    if step is None:
        return None
    best = folder.with_name(checkpoint_name(step))
    with suppress(CheckpointError):
        if read_manifest(best).run == read_manifest(folder).run:
            return best
    logger.warning("%s is not a complete checkpoint of this run, so its model is no longer the best one.", best)
    return None


def rotate(folder: Path, *, limit: int | None, best: str | None) -> None:
    """Delete parts of checkpoints that a kill has left, and beyond `limit` the oldest checkpoints.

    `folder`, which was just written, and `best` stay. Folders with other names stay.
    """
    for path in folder.parent.glob("checkpoint-*"):
        if path.name.endswith(REPLACED) and path.with_suffix("").exists():
            remove(path)
        elif LEFT_BEHIND.fullmatch(path.name) and not path.name.endswith(REPLACED):
            shutil.rmtree(path, ignore_errors=True)
    if not limit or limit < 0:
        return
    now = step_of(folder)
    others = [path for path in _named(folder.parent) if path.is_dir()]
    # `folder`, then by age; without serials, later steps are of a run that this one repeats, perhaps because of them.
    others.sort(key=lambda path: (-_serial(path), step_of(path) > now, now - step_of(path)))
    kept = [path for path in others if path == folder or (best and path == Path(best))]
    rest = [path for path in others if path not in kept]
    for path in rest[max(limit - len(kept), 0) :]:
        remove(path)


def how_to_resume(folder: Path) -> str:
    """Return a sentence that names the newest complete checkpoint and the flag to resume it with."""
    last = next(iter(checkpoints(folder)), None)
    if last is None:
        return f"There is no checkpoint in {folder} to go on from (--save_steps writes some)."
    return f"--resume_from_checkpoint auto goes on from {last}."

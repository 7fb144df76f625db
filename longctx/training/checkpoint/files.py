"""Checkpoint folders, which are either complete, with a manifest of every file, or absent."""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError

from longctx.untrusted.files import check_folder

MANIFEST = "longctx.json"
FORMAT = 3
PARTIAL, REPLACED = ".partial", ".replaced"
"""Suffixes of a folder that is being written, and of one that is being replaced."""
CHECKPOINT = re.compile(rf"checkpoint-(\d+)({re.escape(REPLACED)})?")
LEFT_BEHIND = re.compile(rf"checkpoint-\d+(?!$)({re.escape(REPLACED)})?({re.escape(PARTIAL)})?")


class CheckpointError(ValueError):
    """Raised for a checkpoint that cannot be resumed."""


class NotSavedError(OSError):
    """Raised if a checkpoint or the model could not be written or pushed."""


_DAMAGE = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Turn errors that unexpected values of a file cause in the body into one that names the file.

    Raises:
        CheckpointError: in place of any such error.
    """
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing. Resume from an earlier checkpoint.") from error
    except (*_DAMAGE, OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} is damaged: {error} ({type(error).__name__}). Resume from an earlier checkpoint."
        ) from error


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of a checkpoint, kept in its longctx.json."""

    step: int
    """Optimizer steps taken."""
    layout: dict[str, Any]
    """Parallel degrees, and the sequences of a step."""
    optimization: dict[str, Any]
    """Flags that the optimizer's states depend on."""
    parameters: dict[str, list[int]]
    """Name -> shape of each trained parameter."""
    data: dict[str, Any]
    """Values that identify data and model, by name."""
    progress: dict[str, Any]
    """`max_steps`, and each rank's sums for the log."""
    position: dict[str, Any] | None = None
    """Position in a stream; None for other data."""
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Path in the folder -> `bytes` and `xxh3` of the file."""
    run: str = ""
    """Id of the run, as in run.json; empty for trainers of one's own."""
    serial: int = 0
    """One more than the highest serial in the output folder, so that the newest is known even after a restart."""
    began: str = ""
    """When the run began, in local time and ISO 8601: what chat templates are told if they ask for the time."""
    choice: dict[str, Any] = field(default_factory=dict)
    """What auto chose when the run began; see `longctx.settings.run.Run.choice`."""
    format: int = FORMAT

    @property
    def digest(self) -> str:
        return _digest_of(asdict(self))


def checkpoint_name(step: int) -> str:
    return f"checkpoint-{step}"


@contextmanager
def writing(folder: Path, *, is_owner: bool) -> Iterator[Path]:
    """Yield the path of a folder beside `folder` to write to, and remove it if the body fails.

    Args:
        is_owner: whether this rank creates, renames and removes the folder.
    """
    partial = folder.with_name(folder.name + PARTIAL)
    try:
        yield partial
    except BaseException:
        if is_owner:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def make_partial(partial: Path) -> None:
    """Create the folder, empty."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def remove(folder: Path) -> None:
    """Delete a checkpoint. A kill meanwhile leaves no folder of its name, but one that the next start removes."""
    partial = folder.with_name(folder.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    with suppress(OSError):
        os.replace(folder, partial)
    shutil.rmtree(partial, ignore_errors=True)


def take_place(partial: Path, folder: Path) -> None:
    """Rename `partial` to `folder`. At every moment it or the old folder, named `.replaced`, is complete."""
    replaced = folder.with_name(folder.name + REPLACED)
    if folder.exists():  # of an earlier run that this one repeats
        remove(replaced)
        os.replace(folder, replaced)
    os.replace(partial, folder)
    flush(folder.parent)
    remove(replaced)


def take_places(partial: Path, folder: Path, *, stale: Sequence[str]) -> None:
    """Move the files of `partial` to `folder`, each atomically, and remove others there that match `stale`.

    A file of an earlier model, such as an adapter, would be loaded with the new one.
    """
    paths = [path for path in sorted(partial.rglob("*")) if path.is_file()]
    for path in paths:
        flush(path)
    for path in paths:
        target = folder / path.relative_to(partial)
        target.parent.mkdir(exist_ok=True)
        os.replace(path, target)
    written = {path.name for path in paths}
    for path in folder.iterdir():
        if path.name not in written and any(fnmatch.fnmatchcase(path.name, pattern) for pattern in stale):
            path.unlink()
    flush(folder)
    shutil.rmtree(partial, ignore_errors=True)


def describe_files(folder: Path, paths: list[Path]) -> dict[str, dict[str, Any]]:
    """Flush files to disk, and return the size and xxh3 of each by its path in the folder."""
    found = {}
    for path in paths:
        flush(path)
        found[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "xxh3": _digest(path)}
    return found


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, after all other files."""
    path = folder / MANIFEST
    values = asdict(manifest)
    path.write_text(json.dumps(values | {"xxh3": _digest_of(values)}, indent=1))
    flush(path)
    flush(folder)


def read_manifest(folder: Path) -> Manifest:
    """Read and check a manifest, once for each state of the file.

    Raises:
        CheckpointError: if there is none that this version can read.
    """
    state = None
    with suppress(OSError):
        found = (folder / MANIFEST).stat()
        state = found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
    return _read_manifest(folder, state)


@functools.lru_cache(maxsize=64)
def _read_manifest(folder: Path, state: tuple[int, ...] | None) -> Manifest:
    path = folder / MANIFEST
    try:
        check_folder(folder, subfolders=True)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    try:
        values = json.loads(path.read_text())
        if values["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {values['format']}, and this version of longctx reads {FORMAT}. "
                "Resume with the version that wrote it."
            )
        if values.pop("xxh3") != _digest_of(values):
            raise ValueError("its contents have changed")
        manifest = Manifest(**values)
        _check_types(manifest)
        return manifest
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is not a checkpoint that longctx can resume: it has no {MANIFEST}. To start from its "
            "weights alone, use --model_name_or_path."
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is damaged: {error}. Resume from an earlier checkpoint.") from None


def _digest_of(values: dict[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _check_types(manifest: Manifest) -> None:
    """Check the types of a manifest's values, and raise TypeError for a wrong one."""
    expected: dict[str, type] = {"step": int, "files": dict, "layout": dict, "optimization": dict, "parameters": dict}
    expected |= {"data": dict, "progress": dict, "choice": dict}
    datetime.fromisoformat(manifest.began or "2000-01-01")
    held = {name: getattr(manifest, name) for name in expected}
    for name, known in held["files"].items() if isinstance(held["files"], dict) else ():
        held |= {f"bytes of {name}": known["bytes"], f"xxh3 of {name}": known["xxh3"]}
        expected.update({f"bytes of {name}": int, f"xxh3 of {name}": str})
    for name, kind in expected.items():
        if not isinstance(held[name], kind) or isinstance(held[name], bool):
            raise TypeError(f"{name} is {str(held[name])[:60]!r}, expected {kind.__name__}")


def check_files(folder: Path, manifest: Manifest, *, part: int = 0, parts: int = 1) -> None:
    """Check that every `parts`-th file is as it was written; ranks share the work.

    Raises:
        CheckpointError: for a missing, changed or unknown file.
    """
    found = {path.name for kind in ("states-*", "*.safetensors*") for path in folder.glob(kind)}
    if unknown := sorted(found - manifest.files.keys()):
        raise CheckpointError(f"{folder / unknown[0]} is not of this checkpoint. Remove it, or resume from another.")
    for name, known in sorted(manifest.files.items())[part::parts]:
        path = folder / name
        with damage_named(folder / MANIFEST):  # by a name that no file can have
            if not path.resolve().is_relative_to(folder.resolve()):
                raise CheckpointError(f"{folder / MANIFEST} names {name}, outside its folder.")
            size = path.stat().st_size if path.is_file() else -1
        if size != known["bytes"]:
            if size < 0:
                raise CheckpointError(
                    f"{path} is missing on {socket.gethostname()}. Resume from an earlier checkpoint; where nodes have "
                    "kept the files of their own ranks (--save_on_each_node), first copy the states-* and random-* of "
                    f"all into the first node's {folder.name}, and that folder to every node."
                )
            raise CheckpointError(
                f"{path} has {size:,} bytes, and was written with {known['bytes']:,}. Resume from an earlier "
                "checkpoint."
            )
        if _digest(path) != known["xxh3"]:
            raise CheckpointError(f"{path} is damaged: its contents have changed. Resume from an earlier checkpoint.")


def check_same(
    manifest: Manifest,
    folder: Path,
    *,
    sequences_per_step: int,
    data: Mapping[str, Any],
    optimization: Mapping[str, Any],
) -> None:
    """Check that a run can continue from the checkpoint.

    Args:
        data: values that identify data and model, by name.
        optimization: the flags that a resumed run must not change.

    Raises:
        CheckpointError: if anything differs.
    """
    before = manifest.layout.get("sequences_per_step")
    if before != sequences_per_step:
        raise CheckpointError(
            f"{folder} was written with {before} sequences in a step, and this run has {sequences_per_step}. Change "
            "--gradient_accumulation_steps or --per_device_train_batch_size: their product × (processes / sp) has to "
            f"be {before}."
        )
    of_evaluation = {values["evaluation"] for values in (manifest.data, data) if values.get("evaluation")}
    if len(of_evaluation) > 1:  # older checkpoints, and runs that do not evaluate, have none
        raise CheckpointError(
            f"the evaluation data has changed since {folder} was written, so that its best metric could not be "
            "compared with new ones. Use the same evaluation data, or start again from its weights with "
            "--model_name_or_path."
        )
    before_and_now = [{name: of[name] for name in of if name != "evaluation"} for of in (manifest.data, data)]
    if changes := _changes(*before_and_now):
        raise CheckpointError(
            f"the data or the model has changed since {folder} was written, so that tokens could be repeated or lost "
            f"({changes}). Use the same data and flags, or start again from its weights with --model_name_or_path."
        )
    if changes := _changes(manifest.optimization, optimization):
        raise CheckpointError(
            f"the optimizer's states in {folder} belong to other flags ({changes}). Use the same flags, or start "
            "again from its weights with --model_name_or_path."
        )


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    found = []
    for name in {**before, **now}:
        then, today = before.get(name), now.get(name)
        if name == "model_config" and isinstance(then, Mapping) and isinstance(today, Mapping):
            shared = [key for key in today if key in then]  # other releases of transformers have other keys
            parts = _changes({key: then[key] for key in shared}, {key: today[key] for key in shared})
            found += [f"{name} {parts}"] if parts else []
        elif then != today:
            found.append(f"{name}: {then} then, {today} now")
    return "; ".join(found)


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def step_of(path: Path) -> int:
    """Return the step that the name of a checkpoint says."""
    match = CHECKPOINT.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()

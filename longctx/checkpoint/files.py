"""A checkpoint's folder: there whole, with a manifest of every file, or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

MANIFEST = "longctx.json"
FORMAT = 1
PARTIAL = ".partial"
_NAME = re.compile(r"checkpoint-(\d+)")


class CheckpointError(ValueError):
    """A checkpoint that cannot be resumed from."""


class NotSavedError(OSError):
    """A checkpoint that could not be written, and which one there is instead."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds, besides the model's own files."""

    step: int
    """Optimizer steps taken."""
    layout: dict[str, Any]
    """Degrees, sequences in a step."""
    optimization: dict[str, Any]
    """Flags of the optimizer that its states belong to."""
    parameters: dict[str, list[int]]
    """Trained ones: name -> shape."""
    data: dict[str, Any]
    """What the rows were made from, by name."""
    progress: dict[str, Any]
    """Of the log: sums since its last entry, tokens so far."""
    scheduler: dict[str, Any]
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Path in the folder -> bytes and xxh3 of each."""
    format: int = FORMAT


def checkpoint_name(step: int) -> str:
    return f"checkpoint-{step}"


@contextmanager
def writing(folder: Path, *, is_owner: bool) -> Iterator[Path]:
    """A folder beside `folder` to write to, which takes its name when nothing went wrong; else it is removed.

    Args:
        is_owner: whether this rank makes and names it. The owner enters first and leaves last.
    """
    partial = folder.with_name(folder.name + PARTIAL)
    if is_owner:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        if is_owner:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if is_owner:
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier run, which this one repeats
        os.replace(partial, folder)
        flush(folder.parent)


def describe_files(folder: Path, paths: list[Path]) -> dict[str, dict[str, Any]]:
    """Flush them to the disk, and what to know them by."""
    found = {}
    for path in paths:
        flush(path)
        found[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "xxh3": _digest(path)}
    return found


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Last of all files."""
    path = folder / MANIFEST
    path.write_text(json.dumps(asdict(manifest), indent=1))
    flush(path)
    flush(folder)


def read_manifest(folder: Path) -> Manifest:
    """
    Raises:
        CheckpointError: where there is none that this version can read.
    """
    path = folder / MANIFEST
    try:
        values = json.loads(path.read_text())
        if values["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {values['format']}, and this version of longctx reads {FORMAT}.")
        return Manifest(**values)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is no checkpoint that longctx can resume: it has no {MANIFEST}. Weights alone are given with "
            "--model_name_or_path."
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is damaged: {error}. Resume from an earlier checkpoint.") from None


def check_files(folder: Path, manifest: Manifest, *, part: int = 0, parts: int = 1) -> None:
    """Every `parts`-th file is as it was written; ranks share the work.

    Raises:
        CheckpointError: with the first file that is not.
    """
    for name, known in sorted(manifest.files.items())[part::parts]:
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise CheckpointError(f"{folder / MANIFEST} names {name}, outside its folder.")
        size = path.stat().st_size if path.is_file() else -1
        if size != known["bytes"]:
            what = "is missing" if size < 0 else f"has {size:,} bytes, and was written with {known['bytes']:,}"
            raise CheckpointError(f"{path} {what}. Resume from an earlier checkpoint.")
        if _digest(path) != known["xxh3"]:
            raise CheckpointError(f"{path} is damaged: its contents have changed. Resume from an earlier checkpoint.")


def checkpoints(output_dir: Path) -> list[Path]:
    """Complete ones, the newest first."""
    found = [path for path in output_dir.glob("checkpoint-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted((path for path in found if (path / MANIFEST).is_file()), key=_step, reverse=True)


def candidates(asked: str, output_dir: Path) -> list[Path]:
    """What --resume_from_checkpoint means: a path; `True`, the newest in output_dir; `auto`, the newest that is whole,
    if there is one.

    Raises:
        CheckpointError: where there is none, unless `auto`.
    """
    if asked in ("auto", "True", "true"):
        found = checkpoints(output_dir)
        if not found and asked != "auto":
            raise CheckpointError(
                f"--resume_from_checkpoint {asked}: {output_dir} has no complete checkpoint. Leave the flag out, or "
                "give auto, which then starts from the beginning."
            )
        return found if asked == "auto" else found[:1]
    folder = Path(asked)
    if not folder.is_dir():
        raise CheckpointError(f"--resume_from_checkpoint {asked} is no folder. Give one, or auto.")
    read_manifest(folder)
    return [folder]


def check_same(
    manifest: Manifest, folder: Path, *, sequences_per_step: int, data: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    """That a run can go on from the checkpoint.

    Args:
        settings: every flag's value.

    Raises:
        CheckpointError: with what differs.
    """
    before = manifest.layout["sequences_per_step"]
    if before != sequences_per_step:
        raise CheckpointError(
            f"{folder} was written with {before} sequences in a step, and this run has {sequences_per_step}. Change "
            "--gradient_accumulation_steps or --per_device_train_batch_size: their product × (processes / sp) has to "
            f"be {before}."
        )
    if changes := _changes(manifest.data, data):
        raise CheckpointError(
            f"the data has changed since {folder} was written, so that tokens would be repeated or lost ({changes}). "
            "Give the same data and flags, or start anew from its weights with --model_name_or_path."
        )
    if changes := _changes(manifest.optimization, {name: settings[name] for name in manifest.optimization}):
        raise CheckpointError(
            f"the optimizer's states in {folder} belong to other flags ({changes}). Give the same, or start anew from "
            "its weights with --model_name_or_path."
        )


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return "; ".join(f"{name}: {before.get(name)} then, {now.get(name)} now" for name in names)


def flush(path: Path) -> None:
    """To the disk; of a folder, the names in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()

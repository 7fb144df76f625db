"""Checkpoints that any layout can resume: states by parameter, without pickles, written atomically."""

from longctx.training.checkpoint.files import (
    MANIFEST,
    CheckpointError,
    Manifest,
    NotSavedError,
    candidates,
    check_files,
    check_same,
    read_manifest,
)
from longctx.training.checkpoint.flow import EpochEndsWithItsStep
from longctx.training.checkpoint.signals import RESUMABLE, StopOnSignal
from longctx.training.checkpoint.soundness import check_side_files
from longctx.training.checkpoint.trainer import ResumableTrainer, optimization_flags

__all__ = [
    "MANIFEST",
    "RESUMABLE",
    "CheckpointError",
    "EpochEndsWithItsStep",
    "Manifest",
    "NotSavedError",
    "ResumableTrainer",
    "StopOnSignal",
    "candidates",
    "check_files",
    "check_same",
    "check_side_files",
    "optimization_flags",
    "read_manifest",
]

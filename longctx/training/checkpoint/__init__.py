"""Checkpoints that any layout can resume: states by parameter, without pickles, written atomically."""

from longctx.training.checkpoint.files import (
    MANIFEST,
    CheckpointError,
    Manifest,
    NotSavedError,
    check_files,
    check_same,
    read_manifest,
)
from longctx.training.checkpoint.saving import optimization_flags
from longctx.training.checkpoint.states import check_side_files
from longctx.training.checkpoint.trainer import ResumableMixin

__all__ = [
    "MANIFEST",
    "CheckpointError",
    "Manifest",
    "NotSavedError",
    "ResumableMixin",
    "check_files",
    "check_same",
    "check_side_files",
    "optimization_flags",
    "read_manifest",
]
